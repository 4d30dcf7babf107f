"""What the opcodes that move or contract elements mean, as `jax.lax` calls: `meaning(instruction, *operands)`.

HLO's own conventions hold: gather and dynamic slices clamp their indices, scatter drops updates that are out of bounds,
a negative index is out of bounds, and nothing depends on JAX's configuration (precision, negative indices).
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from hlofuse.errors import HlofuseError
from hlofuse.hlo.module import Instruction


def constant(i: Instruction) -> Any:
    return jnp.asarray(i.literal)


def iota(i: Instruction) -> Any:
    return lax.broadcasted_iota(i.array.dtype, i.dims, i.attrs["iota_dimension"])


def broadcast(i: Instruction, x: Any) -> Any:
    return lax.broadcast_in_dim(x, i.dims, i.attrs["dimensions"])


def reshape(i: Instruction, x: Any) -> Any:
    return lax.reshape(x, i.dims)


def bitcast(i: Instruction, x: Any) -> Any:
    """The same bytes, row by row, as another type and shape of the same size."""
    if x.dtype == i.array.dtype:
        return lax.reshape(x, i.dims)
    flat = lax.bitcast_convert_type(lax.reshape(x, (x.size,)), i.array.dtype) \
        if x.dtype.itemsize >= i.array.dtype.itemsize else \
        lax.bitcast_convert_type(lax.reshape(x, (i.array.size, i.array.dtype.itemsize // x.dtype.itemsize)),
                                 i.array.dtype)
    return lax.reshape(flat, i.dims)


def transpose(i: Instruction, x: Any) -> Any:
    return lax.transpose(x, i.attrs["dimensions"])


def reverse(i: Instruction, x: Any) -> Any:
    return lax.rev(x, i.attrs["dimensions"])


def slice_(i: Instruction, x: Any) -> Any:
    starts, limits, strides = zip(*i.attrs["slice"], strict=True) if i.attrs["slice"] else ((), (), ())
    return lax.slice(x, starts, limits, strides)


def pad(i: Instruction, x: Any, value: Any) -> Any:
    return lax.pad(x, value, i.attrs["padding"])


def concatenate(i: Instruction, *operands: Any) -> Any:
    return lax.concatenate(operands, i.attrs["dimensions"][0])


def dynamic_slice(i: Instruction, x: Any, *starts: Any) -> Any:
    return lax.dynamic_slice(x, starts, i.attrs["dynamic_slice_sizes"], allow_negative_indices=False)


def dynamic_update_slice(i: Instruction, x: Any, update: Any, *starts: Any) -> Any:
    return lax.dynamic_update_slice(x, update, starts, allow_negative_indices=False)


def index_vector_last(indices: Any, index_vector_dim: int, batching_dims: Sequence[int]) -> tuple[Any, tuple[int, ...]]:
    """The indices with their vectors along the last axis, as lax wants them, and the batching dims renumbered."""
    rank = indices.ndim
    if index_vector_dim == rank:
        return lax.expand_dims(indices, (rank,)), tuple(batching_dims)
    if index_vector_dim == rank - 1:
        return indices, tuple(batching_dims)
    return (jnp.moveaxis(indices, index_vector_dim, -1),
            tuple(d - (d > index_vector_dim) for d in batching_dims))


def gather(i: Instruction, x: Any, indices: Any) -> Any:
    attrs = i.attrs
    indices, batching = index_vector_last(indices, attrs["index_vector_dim"],
                                          attrs.get("start_indices_batching_dims", ()))
    numbers = lax.GatherDimensionNumbers(
        offset_dims=attrs["offset_dims"], collapsed_slice_dims=attrs["collapsed_slice_dims"],
        start_index_map=attrs["start_index_map"], operand_batching_dims=attrs.get("operand_batching_dims", ()),
        start_indices_batching_dims=batching)
    return lax.gather(x, indices, numbers, attrs["slice_sizes"], mode=lax.GatherScatterMode.CLIP,
                      indices_are_sorted=attrs.get("indices_are_sorted", False))


def _precision(i: Instruction) -> Any:
    """What the text says, not what JAX's configuration would make of silence."""
    words = i.attrs.get("operand_precision", ("default", "default"))
    algorithm = i.attrs.get("algorithm")
    if algorithm is not None and algorithm != "dot_unset":
        return lax.DotAlgorithmPreset[algorithm.removeprefix("dot_").upper()]
    return tuple(lax.Precision[word.upper()] for word in words)


def dot(i: Instruction, left: Any, right: Any) -> Any:
    attrs = i.attrs
    numbers = ((attrs["lhs_contracting_dims"], attrs["rhs_contracting_dims"]),
               (attrs.get("lhs_batch_dims", ()), attrs.get("rhs_batch_dims", ())))
    return lax.dot_general(left, right, numbers, precision=_precision(i), preferred_element_type=i.array.dtype)


def convolution(i: Instruction, x: Any, kernel: Any) -> Any:
    window, attrs = i.attrs.get("window", ()), i.attrs
    inputs, result = attrs["dim_labels"].split("->")
    lhs, rhs = inputs.split("_")
    axes = [str(axis) for axis in range(len(window))]
    numbers = lax.ConvDimensionNumbers(*(tuple(labels.index(label) for label in [*pair, *axes]) for labels, pair in
                                         ((lhs, "bf"), (rhs, "oi"), (result, "bf"))))
    turned = tuple(rhs.index(axis) for axis, w in zip(axes, window, strict=True) if w.reversed)
    if turned:
        kernel = lax.rev(kernel, turned)
    return lax.conv_general_dilated(
        x, kernel, [w.stride for w in window], [(w.pad_low, w.pad_high) for w in window],
        [w.lhs_dilate for w in window], [w.rhs_dilate for w in window], numbers,
        feature_group_count=attrs.get("feature_group_count", 1), batch_group_count=attrs.get("batch_group_count", 1),
        precision=_precision(i), preferred_element_type=i.array.dtype)


# --- run by a library -------------------------------------------------------------------------------------------------

def fft(i: Instruction, x: Any) -> Any:
    return lax.fft(x, lax.FftType[i.attrs["fft_type"]], i.attrs["fft_length"])


def cholesky(i: Instruction, x: Any) -> Any:
    """Reads one triangle only, as HLO does."""
    if i.attrs.get("lower", False):
        return lax.linalg.cholesky(x, symmetrize_input=False)
    return _adjoint(lax.linalg.cholesky(_adjoint(x), symmetrize_input=False))


def _adjoint(x: Any) -> Any:
    return jnp.swapaxes(lax.conj(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x, -1, -2)


def triangular_solve(i: Instruction, a: Any, b: Any) -> Any:
    attrs = i.attrs
    return lax.linalg.triangular_solve(
        a, b, left_side=attrs.get("left_side", False), lower=attrs.get("lower", False),
        transpose_a=attrs.get("transpose_a", "NO_TRANSPOSE") != "NO_TRANSPOSE",
        conjugate_a=attrs.get("transpose_a") == "ADJOINT", unit_diagonal=attrs.get("unit_diagonal", False))


def topk(i: Instruction, x: Any) -> Any:
    k = i.attrs["k"]
    if i.attrs.get("largest", True):
        return tuple(lax.top_k(x, k))
    positions = lax.broadcasted_iota(np.int32, x.shape, x.ndim - 1)
    values, indices = lax.sort((x, positions), num_keys=1, is_stable=True)
    return values[..., :k], indices[..., :k]


_ALGORITHMS = {"rng_default": "RNG_DEFAULT", "rng_three_fry": "RNG_THREE_FRY", "rng_philox": "RNG_PHILOX"}


def rng_bit_generator(i: Instruction, state: Any) -> Any:
    bits = i.result_shapes[-1]
    algorithm = lax.RandomAlgorithm[_ALGORITHMS[i.attrs["algorithm"]]]
    return tuple(lax.rng_bit_generator(state, bits.dims, bits.dtype, algorithm))


def get_dimension_size(i: Instruction, x: Any) -> Any:
    return jnp.asarray(x.shape[i.attrs["dimensions"][0]], np.int32)


def tuple_(i: Instruction, *operands: Any) -> Any:
    return operands


def get_tuple_element(i: Instruction, x: Any) -> Any:
    return x[i.attrs["index"]]


def opt_barrier(i: Instruction, *operands: Any) -> Any:
    return lax.optimization_barrier(operands[0] if len(operands) == 1 else operands)


def parameter(i: Instruction) -> Any:
    raise HlofuseError(f"parameter {i.name!r} has no value: evaluate its computation with arguments")


# Tokens order effects; a program that has a meaning here has none, so that a token is nothing.
MEANINGS: dict[str, Callable[..., Any]] = {
    "parameter": parameter, "constant": constant, "iota": iota, "broadcast": broadcast, "reshape": reshape,
    "bitcast": bitcast, "transpose": transpose, "reverse": reverse, "slice": slice_, "pad": pad,
    "concatenate": concatenate, "dynamic-slice": dynamic_slice, "dynamic-update-slice": dynamic_update_slice,
    "gather": gather, "dot": dot, "convolution": convolution, "fft": fft, "cholesky": cholesky,
    "triangular-solve": triangular_solve, "topk": topk, "rng-bit-generator": rng_bit_generator,
    "get-dimension-size": get_dimension_size, "tuple": tuple_, "get-tuple-element": get_tuple_element,
    "opt-barrier": opt_barrier, "after-all": lambda i, *operands: None, "add-dependency": lambda i, x, token: x,
    "domain": lambda i, x: x, "copy-start": lambda i, x: (x, x, None), "copy-done": lambda i, started: started[0],
}
