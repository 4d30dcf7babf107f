"""What the array runtime computes without a kernel of ours: products, fft, sort, cholesky, triangular solve by the
array library where it means the same as HLO, everything else by JAX.

A call either writes into the memory that the buffer plan gives it (`WritingCall`), or returns arrays of its own
(`ReturningCall`). Where the library finds no answer (a matrix that is not positive definite), JAX is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from hlofuse.fusion.called import CALLERS
from hlofuse.hlo.module import Instruction
from hlofuse.hlo.shape import AnyShape, Shape, TupleShape
from hlofuse.hlo.sort_order import natural_keys, sort_keys
from hlofuse.hlo.to_jax import evaluate_computation, evaluate_instruction
from hlofuse.runtime.array_backend import ArrayBackend
from hlofuse.runtime.fused_program import FusedProgram
from hlofuse.runtime.gemm import plan_gemm


@dataclass(frozen=True)
class WritingCall:
    """`run(operands, result)`. It allocates nothing and waits for nothing, so that it may be recorded in a graph.
    `orders` are those in which the axes of its operands have to lie; None is as they are."""

    name: str
    run: Callable[[Sequence[Any], Any], None]
    orders: tuple[tuple[int, ...] | None, ...] = ()


@dataclass(frozen=True)
class ReturningCall:
    """`run(operands)` gives one array per result, flat, which alias no operand."""

    name: str
    run: Callable[[Sequence[Any]], Sequence[Any]]


def library_call(i: Instruction, backend: ArrayBackend, bodies: FusedProgram) -> WritingCall | ReturningCall:
    """How an instruction runs that is in no kernel. Operands and results are its arrays, tuples flattened; `bodies`
    has the kernels in what it calls."""
    if i.opcode == "dot" and (writing := _product(i, backend)) is not None:
        return writing
    through_jax = jax_call(i, backend, bodies)
    own = _LIBRARY[i.opcode](i, backend) if i.opcode in _LIBRARY and isinstance(i.shape, Shape) else None
    if own is None or any(s.size == 0 for s in (*i.result_shapes, *(o.array for o in i.operands))):
        return through_jax

    def run(operands: Sequence[Any]) -> Sequence[Any]:
        result = own(*operands)
        return through_jax.run(operands) if result is None else [result]

    return ReturningCall(f"{backend.name}.{i.opcode}", run)


# ------------------------------------------------------------------------------------------------ through JAX


def jax_call(i: Instruction, backend: ArrayBackend, bodies: FusedProgram) -> ReturningCall:
    """The instruction's meaning as a jitted JAX function; a fusion's is that of its computation. In a loop, a branch or
    a call JAX calls kernels."""

    def meaning(*flat: Any) -> list[Any]:
        values = iter(flat)
        operands = [_nested(o.shape, values) for o in i.operands]
        if i.opcode == "fusion":
            return evaluate_computation(i.attrs["calls"], operands)
        if i.opcode in CALLERS:
            return jax.tree.leaves(bodies.evaluate_call(i, operands))
        return jax.tree.leaves(evaluate_instruction(i, operands))

    jitted = jax.jit(meaning)
    is_wide = any(_is_wide(shape) for shape in (i.shape, *(o.shape for o in i.operands)))

    def run(operands: Sequence[Any]) -> Sequence[Any]:
        if not is_wide:
            return backend.call_jax(jitted, operands)
        with jax.enable_x64(True):    # a type of 64 bits is meant as it stands
            return backend.call_jax(jitted, operands)

    return ReturningCall(f"jax.{i.opcode}", run)


def _is_wide(shape: AnyShape) -> bool:
    if isinstance(shape, TupleShape):
        return any(_is_wide(element) for element in shape.elements)
    return shape.element_type in ("s64", "u64", "f64", "c128")


def _nested(shape: AnyShape, values: Any) -> Any:
    if isinstance(shape, TupleShape):
        return tuple(_nested(element, values) for element in shape.elements)
    return None if shape.element_type == "token" else next(values)


# ------------------------------------------------------------------------------------------------ products


def _product(i: Instruction, backend: ArrayBackend) -> WritingCall | None:
    left, right, result = i.operands[0].array.dtype, i.operands[1].array.dtype, i.array.dtype
    if i.attrs.get("algorithm") not in (None, "dot_unset") or not backend.has_gemm(left, right, result):
        return None
    plan = plan_gemm(i)
    sizes = (plan.batch, plan.m, plan.n, plan.k, plan.lhs.rows, plan.rhs.rows)
    if not all(0 < size < 2**31 for size in sizes):
        return None
    precise = any(word != "default" for word in i.attrs.get("operand_precision", ()))

    def run(operands: Sequence[Any], out: Any) -> None:
        backend.gemm(plan, operands[0], operands[1], out, precise)

    return WritingCall(f"{backend.name}.gemm", run, (plan.lhs.order, plan.rhs.order))


# ------------------------------------------------------------------------------------------------ the rest

Library = Callable[..., Any]    # of the operands; None where JAX has to answer


def _fft(i: Instruction, backend: ArrayBackend) -> Library | None:
    kind, lengths = i.attrs["fft_type"], tuple(i.attrs["fft_length"])
    axes = tuple(range(len(i.dims) - len(lengths), len(i.dims)))
    if not lengths:
        return None
    name = {"FFT": "fftn", "IFFT": "ifftn", "RFFT": "rfftn", "IRFFT": "irfftn"}[kind]
    transform = getattr(backend.module.fft, name)
    return lambda x: backend.module.ascontiguousarray(transform(x, lengths, axes).astype(i.array.dtype, copy=False))


def _sort(i: Instruction, backend: ArrayBackend) -> Library | None:
    """One operand, ascending, ties in order: for integers and floats what a stable sort of both libraries does."""
    keys = sort_keys(i.attrs["to_apply"])
    if keys is None or natural_keys(i.attrs["to_apply"], keys) != 1 or i.array.dtype.name not in _SORTABLE:
        return None
    axis = i.attrs["dimensions"][0]
    return lambda x: backend.module.sort(x, axis=axis, kind="stable")


_SORTABLE = frozenset({"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64"})
_SOLVABLE = frozenset({"float32", "float64", "complex64", "complex128"})


def _cholesky(i: Instruction, backend: ArrayBackend) -> Library | None:
    if not i.attrs.get("lower", False) or i.array.dtype.name not in _SOLVABLE:
        return None

    def run(x: Any) -> Any:
        try:
            return backend.cholesky(x)
        except np.linalg.LinAlgError:
            return None

    return run


def _triangular_solve(i: Instruction, backend: ArrayBackend) -> Library | None:
    if len(i.dims) != 2 or i.array.dtype.name not in _SOLVABLE or not i.attrs.get("left_side", False):
        return None
    transpose = {"NO_TRANSPOSE": "N", "TRANSPOSE": "T", "ADJOINT": "C"}[i.attrs.get("transpose_a", "NO_TRANSPOSE")]
    lower, unit = i.attrs.get("lower", False), i.attrs.get("unit_diagonal", False)

    def run(a: Any, b: Any) -> Any:
        try:
            return backend.module.ascontiguousarray(backend.solve_triangular(a, b, lower, transpose, unit))
        except np.linalg.LinAlgError:
            return None

    return run


_LIBRARY: dict[str, Callable[[Instruction, ArrayBackend], Library | None]] = {
    "fft": _fft, "sort": _sort, "cholesky": _cholesky, "triangular-solve": _triangular_solve}
