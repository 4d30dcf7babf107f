"""Import rules of primitives that move elements: shapes, slices, gather, scatter, sort.

Random keys are u32 arrays with the key's dimensions last, so every rule here first widens the equation's dimension
numbers by those; for other types there is nothing to widen.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hlofuse.frontend import jaxpr_compat as compat
from hlofuse.frontend.elementwise_rules import extremum
from hlofuse.frontend.scope import Rule, Scope
from hlofuse.hlo.module import Instruction
from hlofuse.hlo.shape import COMPLEX, Shape, TupleShape, dtype_of


def _ints(values: Any) -> list[int]:
    return [int(v) for v in values]


# --- shape --------------------------------------------------------------------------------------------------------

def broadcast_in_dim(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    key = compat.key_dims(eqn.invars[0].aval)
    dims = _ints(eqn.params["shape"])
    dimensions = _ints(eqn.params["broadcast_dimensions"])
    dimensions += range(len(dims), len(dims) + len(key))
    return [scope.broadcast_in_dim(operands[0], (*dims, *key), dimensions)]


def broadcast_to(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    return [scope.broadcast_to(operands[0], compat.physical_shape(eqn.outvars[0].aval).dims)]


def reshape(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    x = operands[0]
    if eqn.params.get("dimensions") is not None:
        permutation = _ints(eqn.params["dimensions"])
        x = scope.transpose(x, [*permutation, *range(len(permutation), x.array.rank)])
    return [scope.reshape(x, compat.physical_shape(eqn.outvars[0].aval).dims)]


def to_result_dims(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    """squeeze and expand_dims: the elements in the same order."""
    return [scope.reshape(operands[0], compat.physical_shape(eqn.outvars[0].aval).dims)]


def transpose(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    permutation = _ints(eqn.params["permutation"])
    return [scope.transpose(operands[0], [*permutation, *range(len(permutation), operands[0].array.rank)])]


def rev(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    dimensions = tuple(_ints(eqn.params["dimensions"]))
    if not dimensions:
        return operands
    return [scope.emit("reverse", operands[0], shape=operands[0].shape, dimensions=dimensions)]


def iota(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    return [scope.iota(compat.physical_shape(eqn.outvars[0].aval), int(eqn.params["dimension"]))]


def pad(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    x, value = operands
    padding = tuple(tuple(_ints(p)) for p in eqn.params["padding_config"])
    if not any(any(p) for p in padding):
        return [x]
    return [scope.emit("pad", x, value, shape=compat.physical_shape(eqn.outvars[0].aval), padding=padding)]


def concatenate(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    return [scope.concatenate(operands, int(eqn.params["dimension"]))]


def stack(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    axis = int(eqn.params["axis"])
    return [scope.concatenate([scope.reshape(x, (*x.dims[:axis], 1, *x.dims[axis:])) for x in operands], axis)]


def unstack(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    axis = int(eqn.params["axis"])
    return [scope.take(operands[0], axis, index) for index in range(operands[0].dims[axis])]


def split(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    axis, start, results = int(eqn.params["axis"]), 0, []
    for size in _ints(eqn.params["sizes"]):
        results.append(scope.slice_axis(operands[0], axis, start, start + size))
        start += size
    return results


def tile(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    x, repeats = operands[0], _ints(eqn.params["reps"])
    dims = [d for pair in zip(repeats, x.dims, strict=True) for d in pair]
    repeated = scope.broadcast(x, dims, range(1, len(dims), 2))
    return [scope.reshape(repeated, [r * d for r, d in zip(repeats, x.dims, strict=True)])]


# --- slices -------------------------------------------------------------------------------------------------------

def slice_(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    key = compat.key_dims(eqn.invars[0].aval)
    starts = [*_ints(eqn.params["start_indices"]), *[0] * len(key)]
    limits = [*_ints(eqn.params["limit_indices"]), *key]
    strides = eqn.params["strides"]
    return [scope.slice(operands[0], starts, limits, None if strides is None else [*_ints(strides), *[1] * len(key)])]


def _indices(scope: Scope, indices: Sequence[Instruction], rank: int) -> list[Instruction]:
    """Start indices of one integer type, one for every axis."""
    types = {index.element_type for index in indices}
    common = types.pop() if len(types) == 1 else "s64" if any(t.endswith("64") for t in types) else "s32"
    return [scope.convert(i, common) for i in indices] + [scope.scalar(0, common)] * (rank - len(indices))


def dynamic_slice(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    x, *indices = operands
    sizes = [*_ints(eqn.params["slice_sizes"]), *compat.key_dims(eqn.invars[0].aval)]
    return [scope.dynamic_slice(x, _indices(scope, indices, x.array.rank), sizes) if x.array.rank else x]


def dynamic_update_slice(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    x, update, *indices = operands
    if not x.array.rank:
        return [update]
    return [scope.dynamic_update_slice(x, update, _indices(scope, indices, x.array.rank))]


# --- gather and scatter -------------------------------------------------------------------------------------------

def gather(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    """HLO clamps start indices, which is JAX's `clip`; `fill_or_drop` selects `fill_value` where one was outside."""
    x, indices = operands
    numbers, key = eqn.params["dimension_numbers"], compat.key_dims(eqn.invars[0].aval)
    sizes = _ints(eqn.params["slice_sizes"])
    shape = compat.physical_shape(eqn.outvars[0].aval)
    if not shape.size:
        return [scope.full(0, shape)]
    is_fill = eqn.params["mode"].name == "FILL_OR_DROP"
    if is_fill:
        indices = scope.convert(indices, "s32" if max(x.dims, default=0) < 1 << 31 else "s64")
    offset_dims = (*_ints(numbers.offset_dims), *range(shape.rank - len(key), shape.rank))
    taken = scope.emit(
        "gather", x, indices, shape=shape, offset_dims=offset_dims,
        collapsed_slice_dims=tuple(_ints(numbers.collapsed_slice_dims)),
        start_index_map=tuple(_ints(numbers.start_index_map)),
        operand_batching_dims=tuple(_ints(numbers.operand_batching_dims)),
        start_indices_batching_dims=tuple(_ints(numbers.start_indices_batching_dims)),
        index_vector_dim=indices.array.rank - 1, slice_sizes=(*sizes, *key),
        indices_are_sorted=bool(eqn.params["indices_are_sorted"]))
    if not is_fill or not numbers.start_index_map:
        return [taken]
    bounds = [x.dims[axis] - sizes[axis] for axis in numbers.start_index_map]
    inside = _inside(scope, indices, bounds)
    batch_dims = [axis for axis in range(shape.rank) if axis not in offset_dims]
    fill = scope.full(np.asarray(eqn.params["fill_value"]).astype(dtype_of(shape.element_type)), shape)
    return [scope.select(scope.broadcast(inside, shape.dims, batch_dims), taken, fill)]


def _inside(scope: Scope, indices: Instruction, bounds: Sequence[int]) -> Instruction:
    """Where every component of the index vectors is between 0 and its bound: pred over the batch dimensions."""
    inside = None
    for component, bound in enumerate(bounds):
        index = scope.take(indices, indices.array.rank - 1, component)
        fits = scope.binary("and", scope.compare("GE", index, 0), scope.compare("LE", index, bound))
        inside = fits if inside is None else scope.binary("and", inside, fits)
    assert inside is not None
    return inside


_SCATTER_COMBINERS = {"scatter-add": "add", "scatter_add": "add", "scatter-sub": "subtract", "scatter_sub": "subtract",
                      "scatter-mul": "multiply", "scatter_mul": "multiply", "scatter-min": "minimum",
                      "scatter_min": "minimum", "scatter-max": "maximum", "scatter_max": "maximum"}


def scatter(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    """HLO drops updates that are not wholly inside, which is JAX's `fill_or_drop`; `clip` clamps the indices first."""
    x, indices, updates = operands
    if not x.array.size or not updates.array.size:
        return [x]
    numbers, key = eqn.params["dimension_numbers"], compat.key_dims(eqn.invars[0].aval)
    if eqn.params["mode"].name == "CLIP":
        indices = _clamped(scope, indices, _last_starts(x, updates, numbers))
    window_dims = (*_ints(numbers.update_window_dims), *range(updates.array.rank - len(key), updates.array.rank))
    return [scope.emit(
        "scatter", x, indices, updates, shape=x.shape, update_window_dims=window_dims,
        inserted_window_dims=tuple(_ints(numbers.inserted_window_dims)),
        scatter_dims_to_operand_dims=tuple(_ints(numbers.scatter_dims_to_operand_dims)),
        input_batching_dims=tuple(_ints(numbers.operand_batching_dims)),
        scatter_indices_batching_dims=tuple(_ints(numbers.scatter_indices_batching_dims)),
        index_vector_dim=indices.array.rank - 1, indices_are_sorted=bool(eqn.params["indices_are_sorted"]),
        unique_indices=bool(eqn.params["unique_indices"]), to_apply=_scatter_combiner(scope, eqn, x.element_type))]


def _scatter_combiner(scope: Scope, eqn: Any, element_type: str) -> Any:
    name = eqn.primitive.name
    if name in _SCATTER_COMBINERS:
        opcode = _SCATTER_COMBINERS[name]
        if element_type in COMPLEX and opcode in ("minimum", "maximum"):
            return extremum_combiner(scope, opcode, element_type)
        return scope.combiner("or" if (element_type, opcode) == ("pred", "add") else opcode, element_type)
    if eqn.params.get("update_jaxpr") is not None:
        return scope.scalar_jaxpr(eqn.params["update_jaxpr"], "update", eqn.params["update_consts"])
    return scope.scalar_computation("assign", (element_type,) * 2, lambda _, values: values[1])


def extremum_combiner(scope: Scope, opcode: str, element_type: str) -> Any:
    direction = "GT" if opcode == "maximum" else "LT"
    return scope.scalar_computation(opcode, (element_type,) * 2,
                                    lambda inner, ab: extremum(inner, opcode, direction, *ab))


def _last_starts(x: Instruction, updates: Instruction, numbers: Any) -> list[int]:
    """The largest start at which a window of updates is inside, for every component of the index."""
    sizes, windows = [], iter(_ints(numbers.update_window_dims))
    removed = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    for axis in range(len(removed) + len(numbers.update_window_dims)):
        sizes.append(1 if axis in removed else updates.dims[next(windows)])
    return [x.dims[axis] - sizes[axis] for axis in numbers.scatter_dims_to_operand_dims]


def _clamped(scope: Scope, indices: Instruction, bounds: list[int]) -> Instruction:
    """Index vectors between 0 and the bounds."""
    if not bounds:
        return indices
    limit = np.iinfo(indices.array.dtype).max
    bounds = [min(bound, limit) for bound in bounds]
    high = scope.scalar(bounds[0], indices.element_type)
    low = scope.scalar(0, indices.element_type)
    if len(set(bounds)) > 1:
        vector = scope.literal(np.array(bounds, indices.array.dtype), indices.element_type)
        high = scope.broadcast(vector, indices.dims, (indices.array.rank - 1,))
        low = scope.like(indices, 0)
    return scope.emit("clamp", low, indices, high, shape=indices.shape)


# --- sort ---------------------------------------------------------------------------------------------------------

def sort(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    """Ascending by the first `num_keys` operands; NaN last, 0 equal to -0, complex as (real, imaginary)."""
    num_keys = int(eqn.params["num_keys"])
    types = [x.element_type for x in operands for _ in range(2)]
    comparator = scope.scalar_computation(f"compare_{num_keys}", types, lambda inner, xs: _is_less(inner, xs, num_keys))
    shape: Any = operands[0].shape if len(operands) == 1 else TupleShape(tuple(x.shape for x in operands))
    result = scope.emit("sort", *operands, shape=shape, dimensions=(int(eqn.params["dimension"]),),
                        is_stable=bool(eqn.params["is_stable"]), to_apply=comparator)
    return [result] if len(operands) == 1 else scope.elements(result)


def _is_less(scope: Scope, values: list[Instruction], num_keys: int) -> Instruction:
    """Lexicographic: less in the first key, or equal there and less in the next."""
    pairs: list[tuple[Instruction, Instruction]] = []
    for x, y in zip(values[:2 * num_keys:2], values[1:2 * num_keys:2], strict=True):
        if x.element_type in COMPLEX:
            pairs += [(scope.real(x), scope.real(y)), (scope.imag(x), scope.imag(y))]
        else:
            pairs.append((x, y))
    less: Instruction | None = None
    for x, y in reversed(pairs):
        order = "TOTALORDER" if x.element_type not in ("pred",) and x.element_type[0] in "fb" else None
        if order is not None:
            x, y = _canonical(scope, x), _canonical(scope, y)
        first = scope.compare("LT", x, y, order)
        if less is not None:
            first = scope.binary("or", first, scope.binary("and", scope.compare("EQ", x, y, order), less))
        less = first
    assert less is not None
    return less


def _canonical(scope: Scope, x: Instruction) -> Instruction:
    """One zero and one NaN, so that the total order is the sort order."""
    x = scope.select(scope.compare("EQ", x, 0), scope.like(x, 0), x)
    return scope.select(scope.compare("NE", x, x), scope.like(x, np.nan), x)


def iota_2x32_shape(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    """Upper and lower words of the row-major number of every element."""
    shape = compat.physical_shape(eqn.outvars[0].aval)
    high, low = element_numbers(scope, shape.dims)
    return [high, low]


def element_numbers(scope: Scope, dims: Sequence[int]) -> tuple[Instruction, Instruction]:
    """(upper, lower) words of the row-major number of every element, in u32 where that is exact."""
    is_small = int(np.prod(dims, dtype=object)) <= 1 << 32
    shape = Shape("u32" if is_small else "u64", tuple(dims))
    number, stride = None, 1
    for axis in reversed(range(len(dims))):
        if dims[axis] != 1:
            position = scope.iota(shape, axis)
            term = scope.mul(position, stride) if stride != 1 else position
            number = term if number is None else scope.add(term, number)
        stride *= dims[axis]
    if number is None:
        number = scope.full(0, shape)
    if is_small:
        return scope.full(0, shape), number
    upper = scope.binary("shift-right-logical", number, 32)
    return scope.convert(upper, "u32"), scope.convert(number, "u32")


RULES: dict[str, Rule] = {
    "broadcast_in_dim": broadcast_in_dim,
    "broadcast_to": broadcast_to,
    "reshape": reshape,
    "squeeze": to_result_dims,
    "expand_dims": to_result_dims,
    "transpose": transpose,
    "rev": rev,
    "iota": iota,
    "iota_2x32_shape": iota_2x32_shape,
    "pad": pad,
    "concatenate": concatenate,
    "stack": stack,
    "unstack": unstack,
    "split": split,
    "tile": tile,
    "slice": slice_,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "gather": gather,
    "scatter": scatter,
    **dict.fromkeys(_SCATTER_COMBINERS, scatter),
    "sort": sort,
}
