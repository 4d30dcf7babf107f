"""What the opcodes that call a computation mean: `meaning(instruction, operands, evaluate)`.

`evaluate(computation, arguments)` is the value of the computation's root. A computation on scalars that HLO applies to
whole arrays is mapped over them; the usual ones (add, max, …) are recognized and use lax's own reductions.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hlofuse.errors import HlofuseError
from hlofuse.hlo.lax_elementwise import total_order_key
from hlofuse.hlo.lax_structure import index_vector_last
from hlofuse.hlo.module import Computation, Instruction
from hlofuse.hlo.shape import TupleShape
from hlofuse.hlo.sort_order import SortKey, natural_keys, sort_keys

Evaluate = Callable[[Computation, Sequence[Any]], Any]
Meaning = Callable[[Instruction, Sequence[Any], Evaluate], Any]


def monoid_of(computation: Computation) -> str | None:
    """The opcode of a computation that is one commutative and associative operation of its two parameters, such as
    "add"; `None` for pred, where HLO's add is not lax's."""
    root, parameters = computation.root, computation.parameters
    if root.opcode not in _MONOIDS or len(parameters) != 2 or root.element_type == "pred":
        return None
    return root.opcode if set(root.operands) == set(parameters) else None


_MONOIDS: dict[str, Callable[..., Any]] = {
    "add": lax.add, "multiply": lax.mul, "maximum": lax.max, "minimum": lax.min, "and": lax.bitwise_and,
    "or": lax.bitwise_or, "xor": lax.bitwise_xor}


def _mapped(computation: Computation, evaluate: Evaluate) -> Callable[..., Any]:
    """A computation on scalars as a function of arrays of one shape."""

    def function(*arrays: Any) -> Any:
        flat = [lax.reshape(x, (x.size,)) for x in arrays]
        results = jax.vmap(lambda *scalars: evaluate(computation, scalars))(*flat)
        return jax.tree.map(lambda y: lax.reshape(y, arrays[0].shape), results)

    return function


def call(i: Instruction, operands: Sequence[Any], evaluate: Evaluate) -> Any:
    return evaluate(i.attrs["to_apply"], operands)


def fusion(i: Instruction, operands: Sequence[Any], evaluate: Evaluate) -> Any:
    return evaluate(i.attrs["calls"], operands)


def map_(i: Instruction, operands: Sequence[Any], evaluate: Evaluate) -> Any:
    return _mapped(i.attrs["to_apply"], evaluate)(*operands)


def while_(i: Instruction, operands: Sequence[Any], evaluate: Evaluate) -> Any:
    condition, body = i.attrs["condition"], i.attrs["body"]
    carry = jax.tree.map(jnp.asarray, operands[0])
    return lax.while_loop(lambda x: evaluate(condition, [x]), lambda x: evaluate(body, [x]), carry)


def conditional(i: Instruction, operands: Sequence[Any], evaluate: Evaluate) -> Any:
    index, *arguments = operands
    branches = i.attrs["branch_computations"]
    functions = [lambda *x, k=k, branch=branch: evaluate(branch, [x[k]]) for k, branch in enumerate(branches)]
    if index.dtype == np.bool_:
        return lax.cond(index, functions[0], functions[1], *arguments)
    last = np.int32(len(branches) - 1)  # what any index out of range means
    in_range = lax.bitwise_and(lax.ge(index, np.int32(0)), lax.le(index, last))
    return lax.switch(lax.select(in_range, index, jnp.asarray(last)), functions, *arguments)


# --- reductions -------------------------------------------------------------------------------------------------------

def _is_negative_zero(init: Any) -> bool:
    return not isinstance(init, jax.core.Tracer) and init.dtype.kind in "fcV" and bool(
        np.signbit(np.real(np.asarray(init)).astype(np.float64)))


def _reducer(i: Instruction, inits: Sequence[Any], evaluate: Evaluate) -> Callable[..., Any]:
    """The computation as a Python function of (accumulator, value), or lax's own function, which lax knows better."""
    computation = i.attrs["to_apply"]
    name = monoid_of(computation)
    # lax.reduce takes -0.0 for the neutral 0.0, which it is not for a sum of negative zeros.
    if name is not None and not _is_negative_zero(inits[0]):
        return _MONOIDS[name]
    if len(inits) == 1:
        return lambda x, y: evaluate(computation, [x, y])
    return lambda x, y: evaluate(computation, [*x, *y])


def reduce(i: Instruction, operands: Sequence[Any], evaluate: Evaluate) -> Any:
    n = len(operands) // 2
    arrays, inits = operands[:n], operands[n:]
    reducer = _reducer(i, inits, evaluate)
    if n == 1:
        return lax.reduce(arrays[0], inits[0], reducer, i.attrs["dimensions"])
    return tuple(lax.reduce(tuple(arrays), tuple(inits), reducer, i.attrs["dimensions"]))


def reduce_window(i: Instruction, operands: Sequence[Any], evaluate: Evaluate) -> Any:
    n = len(operands) // 2
    window = i.attrs["window"]
    if any(w.reversed for w in window):
        raise HlofuseError("reduce-window with a reversed window has no meaning in jax.lax")
    arrays: Any = tuple(operands[:n])
    inits: Any = tuple(operands[n:])
    reducer = _reducer(i, inits, evaluate)
    if n == 1:
        arrays, inits = arrays[0], inits[0]
    result = lax.reduce_window(
        arrays, inits, reducer, [w.size for w in window], [w.stride for w in window],
        [(w.pad_low, w.pad_high) for w in window], [w.lhs_dilate for w in window], [w.rhs_dilate for w in window])
    return result if n == 1 else tuple(result)


def _scalar_jaxpr(computation: Computation, evaluate: Evaluate) -> Any:
    scalars = [jax.ShapeDtypeStruct((), p.array.dtype) for p in computation.parameters]
    return jax.make_jaxpr(lambda *x: evaluate(computation, x))(*scalars)


def select_and_scatter(i: Instruction, operands: Sequence[Any], evaluate: Evaluate) -> Any:
    window = i.attrs["window"]
    if any(w.lhs_dilate != 1 or w.rhs_dilate != 1 or w.reversed for w in window):
        raise HlofuseError("select-and-scatter with a dilated or reversed window has no meaning in jax.lax")
    select, scatter = _scalar_jaxpr(i.attrs["select"], evaluate), _scalar_jaxpr(i.attrs["scatter"], evaluate)
    return lax.select_and_scatter_p.bind(
        *operands, select_jaxpr=select.jaxpr, select_consts=tuple(select.consts), scatter_jaxpr=scatter.jaxpr,
        scatter_consts=tuple(scatter.consts), window_dimensions=tuple(w.size for w in window),
        window_strides=tuple(w.stride for w in window), padding=tuple((w.pad_low, w.pad_high) for w in window))


# --- scatter ----------------------------------------------------------------------------------------------------------

_SCATTERS: dict[str, Callable[..., Any]] = {"add": lax.scatter_add, "multiply": lax.scatter_mul,
                                            "minimum": lax.scatter_min, "maximum": lax.scatter_max}


def scatter(i: Instruction, operands: Sequence[Any], evaluate: Evaluate) -> Any:
    if len(operands) != 3:
        raise HlofuseError("scatter of several operands at once has no meaning in jax.lax: scatter each by itself")
    x, indices, updates = operands
    attrs, computation = i.attrs, i.attrs["to_apply"]
    indices, batching = index_vector_last(indices, attrs["index_vector_dim"],
                                          attrs.get("scatter_indices_batching_dims", ()))
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=attrs["update_window_dims"], inserted_window_dims=attrs["inserted_window_dims"],
        scatter_dims_to_operand_dims=attrs["scatter_dims_to_operand_dims"],
        operand_batching_dims=attrs.get("input_batching_dims", ()), scatter_indices_batching_dims=batching)
    facts = {"indices_are_sorted": attrs.get("indices_are_sorted", False),
             "unique_indices": attrs.get("unique_indices", False), "mode": lax.GatherScatterMode.FILL_OR_DROP}
    if computation.root is computation.parameters[1]:
        return lax.scatter(x, indices, updates, numbers, **facts)
    name = monoid_of(computation)
    if name in _SCATTERS:
        return _SCATTERS[name](x, indices, updates, numbers, **facts)
    update = _scalar_jaxpr(computation, evaluate)
    return lax.scatter_p.bind(x, indices, updates, dimension_numbers=numbers, update_jaxpr=update.jaxpr,
                              update_consts=tuple(update.consts), **facts)


# --- sort -------------------------------------------------------------------------------------------------------------

def sort(i: Instruction, operands: Sequence[Any], evaluate: Evaluate) -> Any:
    comparator, axis = i.attrs["to_apply"], i.attrs["dimensions"][0]
    is_stable = i.attrs.get("is_stable", False)
    keys = sort_keys(comparator)
    results: Sequence[Any]
    if keys is None:
        results = _sorted_by_network(comparator, operands, axis, evaluate)
    elif (count := natural_keys(comparator, keys)) is not None:
        results = lax.sort(tuple(operands), axis, is_stable, count)
    else:
        values = [_key_values(comparator, key, operands, evaluate) for key in keys]
        results = lax.sort((*values, *operands), axis, is_stable, len(keys))[len(keys):]
    return tuple(results) if isinstance(i.shape, TupleShape) else results[0]


def _key_values(comparator: Computation, key: SortKey, operands: Sequence[Any], evaluate: Evaluate) -> Any:
    """The key of every element, as something that sorts ascending."""
    key_of = Computation("key", comparator.parameters, key.value)
    pairs = [x for operand in operands for x in (operand, operand)]
    values = _mapped(key_of, evaluate)(*pairs)
    if key.total_order and jnp.issubdtype(values.dtype, jnp.floating):
        values = total_order_key(values)
    if not key.descending:
        return values
    if values.dtype == np.bool_ or jnp.issubdtype(values.dtype, jnp.integer):
        return lax.bitwise_not(values)
    # Without total order zeros of both signs tie, and where NaNs go is not said.
    return lax.neg(values)


def _sorted_by_network(comparator: Computation, operands: Sequence[Any], axis: int, evaluate: Evaluate) -> list[Any]:
    """A bitonic sort with any comparator at all; positions break ties, so that it is stable."""
    size = operands[0].shape[axis]
    padded = 1 << max(size - 1, 0).bit_length()
    columns = []
    for operand in operands:
        column = jnp.moveaxis(operand, axis, -1)
        columns.append(jnp.pad(column, [(0, 0)] * (column.ndim - 1) + [(0, padded - size)]))
    columns.append(lax.broadcasted_iota(np.int32, columns[0].shape, columns[0].ndim - 1))
    less = _mapped(comparator, evaluate)

    def precedes(left: Sequence[Any], right: Sequence[Any]) -> Any:
        """Whether left must come first; padding, known by its position, comes last."""
        strictly = less(*(x for pair in zip(left[:-1], right[:-1], strict=True) for x in pair))
        after = less(*(x for pair in zip(right[:-1], left[:-1], strict=True) for x in pair))
        real_left, real_right = left[-1] < size, right[-1] < size
        by_value = strictly | (~after & (left[-1] < right[-1]))
        return jnp.where(real_left & real_right, by_value, left[-1] < right[-1])

    block = 2
    while block <= padded:
        distance = block // 2
        while distance:
            columns = _exchange(columns, block, distance, padded, precedes)
            distance //= 2
        block *= 2
    return [jnp.moveaxis(column[..., :size], -1, axis) for column in columns[:-1]]


def _exchange(columns: Sequence[Any], block: int, distance: int, padded: int,
              precedes: Callable[[Sequence[Any], Sequence[Any]], Any]) -> list[Any]:
    """One layer of the network: elements `distance` apart trade places where they are out of order."""
    split = [c.reshape(*c.shape[:-1], padded // (2 * distance), 2, distance) for c in columns]
    left, right = [c[..., 0, :] for c in split], [c[..., 1, :] for c in split]
    starts = np.arange(padded // (2 * distance)) * 2 * distance
    ascending = ((starts & block) == 0)[:, None] | np.zeros((1, distance), bool)
    keep = precedes(left, right) == jnp.asarray(ascending)
    swapped = [jnp.stack([jnp.where(keep, a, b), jnp.where(keep, b, a)], axis=-2)
               for a, b in zip(left, right, strict=True)]
    return [s.reshape(c.shape) for s, c in zip(swapped, columns, strict=True)]


# --- asynchronous calls, which here are calls -------------------------------------------------------------------------

def async_start(i: Instruction, operands: Sequence[Any], evaluate: Evaluate) -> Any:
    return tuple(operands), evaluate(i.attrs["calls"], operands), None


MEANINGS: dict[str, Meaning] = {
    "call": call, "fusion": fusion, "map": map_, "while": while_, "conditional": conditional, "reduce": reduce,
    "reduce-window": reduce_window, "select-and-scatter": select_and_scatter, "scatter": scatter, "sort": sort,
    "async-start": async_start, "async-update": lambda i, operands, evaluate: operands[0],
    "async-done": lambda i, operands, evaluate: operands[0][1],
}
