"""Shape rules: an instruction's result shape from its operands' shapes and its attributes.

One function per rule, named in the opcode table. A rule checks what it reads and raises `ShapeError` naming the operand
and the reason; the caller puts the opcode in front. Computations are only asked for `.root.shape`.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hlofuse.hlo.shape import COMPLEX, FLOATS, TOKEN, AnyShape, Shape, TupleShape, shape_of

Operands = Sequence[AnyShape]
Attrs = Mapping[str, Any]
Rule = Callable[[Operands, Attrs], AnyShape]

_REAL_OF = {"c64": "f32", "c128": "f64"}
_COMPLEX_OF = {real: cplx for cplx, real in _REAL_OF.items()}


class ShapeError(TypeError):
    """Operands or attributes that an opcode cannot take."""


def type_class(element_type: str) -> str:
    """"p"(red), "i"(nteger), "f"(loat), "c"(omplex) or "t"(oken)."""
    if element_type == "pred":
        return "p"
    if element_type in FLOATS:
        return "f"
    if element_type in COMPLEX:
        return "c"
    return {"s": "i", "u": "i", "f": "f", "t": "t"}[element_type[0]]


def _array(operands: Operands, number: int) -> Shape:
    if number >= len(operands):
        raise ShapeError(f"operand {number} is missing")
    shape = operands[number]
    if not isinstance(shape, Shape):
        raise ShapeError(f"operand {number} is the tuple {shape}, an array is needed")
    return shape


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ShapeError(message)


def _check_dimensions(dimensions: Sequence[int], rank: int, what: str = "dimensions") -> None:
    _need(len(set(dimensions)) == len(dimensions), f"{what} {tuple(dimensions)} repeat one")
    _need(all(0 <= d < rank for d in dimensions), f"{what} {tuple(dimensions)} are not all in an array of rank {rank}")


# --- element-wise -----------------------------------------------------------------------------------------------------

def same_as_operands(operands: Operands, attrs: Attrs) -> Shape:
    """All operands have one shape, and so has the result."""
    first = _array(operands, 0)
    for number in range(1, len(operands)):
        if operands[number] != first:
            raise ShapeError(f"operand {number} is {operands[number]}, but operand 0 is {first}")
    return first


def predicate_of_operand(operands: Operands, attrs: Attrs) -> Shape:
    return same_as_operands(operands, attrs).with_type("pred")


def abs_rule(operands: Operands, attrs: Attrs) -> Shape:
    shape = _array(operands, 0)
    return shape.with_type(_REAL_OF.get(shape.element_type, shape.element_type))


def complex_of_parts(operands: Operands, attrs: Attrs) -> Shape:
    shape = same_as_operands(operands, attrs)
    _need(shape.element_type in _COMPLEX_OF, f"operand 0 is {shape}, f32 or f64 is needed")
    return shape.with_type(_COMPLEX_OF[shape.element_type])


def part_of_complex(operands: Operands, attrs: Attrs) -> Shape:
    return abs_rule(operands, attrs)


def select_rule(operands: Operands, attrs: Attrs) -> Shape:
    predicate, result = _array(operands, 0), _array(operands, 1)
    _need(predicate.element_type == "pred", f"operand 0 is {predicate}, pred is needed")
    _need(operands[2] == result, f"operand 2 is {operands[2]}, but operand 1 is {result}")
    _need(predicate.dims in ((), result.dims), f"operand 0 is {predicate}: neither a scalar nor like {result}")
    return result


def clamp_rule(operands: Operands, attrs: Attrs) -> Shape:
    result = _array(operands, 1)
    for number in (0, 2):
        bound = _array(operands, number)
        _need(bound.element_type == result.element_type and bound.dims in ((), result.dims),
              f"operand {number} is {bound}: neither a scalar nor of operand 1's shape {result}")
    return result


# --- leaves, tuples and calls -----------------------------------------------------------------------------------------

def constant_rule(operands: Operands, attrs: Attrs) -> Shape:
    return shape_of(attrs["literal"])


def token_rule(operands: Operands, attrs: Attrs) -> Shape:
    return TOKEN


def scalar_u32(operands: Operands, attrs: Attrs) -> Shape:
    return Shape("u32")


def shape_of_operand(number: int) -> Rule:
    def rule(operands: Operands, attrs: Attrs) -> AnyShape:
        _need(number < len(operands), f"operand {number} is missing")
        return operands[number]
    return rule


def operand_shapes(operands: Operands, attrs: Attrs) -> AnyShape:
    """One operand's shape, or a tuple of all."""
    return operands[0] if len(operands) == 1 else TupleShape(tuple(operands))


def tuple_rule(operands: Operands, attrs: Attrs) -> TupleShape:
    return TupleShape(tuple(operands))


def get_tuple_element_rule(operands: Operands, attrs: Attrs) -> AnyShape:
    shape, index = operands[0], attrs["index"]
    if not isinstance(shape, TupleShape):
        raise ShapeError(f"operand 0 is {shape}, a tuple is needed")
    _need(0 <= index < len(shape.elements), f"index {index} is not in a tuple of {len(shape.elements)}")
    return shape.elements[index]


def root_of(attribute: str) -> Rule:
    def rule(operands: Operands, attrs: Attrs) -> AnyShape:
        return attrs[attribute].root.shape
    return rule


def conditional_rule(operands: Operands, attrs: Attrs) -> AnyShape:
    first, *others = (computation.root.shape for computation in attrs["branch_computations"])
    for number, shape in enumerate(others, start=1):
        _need(shape == first, f"branch {number} returns {shape}, but branch 0 returns {first}")
    return first


def map_rule(operands: Operands, attrs: Attrs) -> Shape:
    dims = _array(operands, 0).dims
    for number in range(1, len(operands)):
        _need(_array(operands, number).dims == dims, f"operand {number} is {operands[number]}, not of {dims}")
    return Shape(attrs["to_apply"].root.shape.element_type, dims)


# --- moving elements --------------------------------------------------------------------------------------------------

def transpose_rule(operands: Operands, attrs: Attrs) -> Shape:
    shape, dimensions = _array(operands, 0), attrs["dimensions"]
    _need(sorted(dimensions) == list(range(shape.rank)), f"dimensions {dimensions} do not permute operand 0, {shape}")
    return shape.with_dims([shape.dims[d] for d in dimensions])


def reverse_rule(operands: Operands, attrs: Attrs) -> Shape:
    shape = _array(operands, 0)
    _check_dimensions(attrs["dimensions"], shape.rank)
    return shape


def slice_rule(operands: Operands, attrs: Attrs) -> Shape:
    shape, ranges = _array(operands, 0), attrs["slice"]
    _need(len(ranges) == shape.rank, f"{len(ranges)} ranges for operand 0, {shape}")
    dims = []
    for axis, ((start, limit, stride), size) in enumerate(zip(ranges, shape.dims, strict=True)):
        _need(0 <= start <= limit <= size and stride > 0,
              f"range [{start}:{limit}:{stride}] of axis {axis} is not in operand 0, {shape}")
        dims.append(-(-(limit - start) // stride))
    return shape.with_dims(dims)


def pad_rule(operands: Operands, attrs: Attrs) -> Shape:
    shape, value, padding = _array(operands, 0), _array(operands, 1), attrs["padding"]
    _need(value == Shape(shape.element_type), f"operand 1 is {value}, a scalar {shape.element_type} is needed")
    _need(len(padding) == shape.rank, f"padding of {len(padding)} axes for operand 0, {shape}")
    dims = [low + size + max(size - 1, 0) * interior + high
            for size, (low, high, interior) in zip(shape.dims, padding, strict=True)]
    _need(min(dims, default=0) >= 0, f"padding {padding} leaves a negative size of operand 0, {shape}")
    return shape.with_dims(dims)


def concatenate_rule(operands: Operands, attrs: Attrs) -> Shape:
    first = _array(operands, 0)
    (axis,) = attrs["dimensions"]
    _check_dimensions((axis,), first.rank)
    total = 0
    for number in range(len(operands)):
        shape = _array(operands, number)
        _need(shape.element_type == first.element_type and shape.rank == first.rank
              and shape.dims[:axis] + shape.dims[axis + 1:] == first.dims[:axis] + first.dims[axis + 1:],
              f"operand {number} is {shape}, which does not continue operand 0, {first}, along axis {axis}")
        total += shape.dims[axis]
    return first.with_dims((*first.dims[:axis], total, *first.dims[axis + 1:]))


def _check_indices(operands: Operands, first: int, rank: int) -> None:
    """The scalar start indices of dynamic-slice and dynamic-update-slice (or the older one vector of them)."""
    indices = operands[first:]
    if len(indices) == 1 and isinstance(indices[0], Shape) and indices[0].dims == (rank,):
        return
    _need(len(indices) == rank, f"{len(indices)} start indices for an array of rank {rank}")
    for number in range(first, len(operands)):
        shape = _array(operands, number)
        _need(shape.rank == 0 and type_class(shape.element_type) == "i",
              f"operand {number} is {shape}, an integer scalar is needed")


def dynamic_slice_rule(operands: Operands, attrs: Attrs) -> Shape:
    shape, sizes = _array(operands, 0), attrs["dynamic_slice_sizes"]
    _check_indices(operands, 1, shape.rank)
    _need(len(sizes) == shape.rank and all(0 <= s <= d for s, d in zip(sizes, shape.dims, strict=True)),
          f"dynamic_slice_sizes {sizes} are not in operand 0, {shape}")
    return shape.with_dims(sizes)


def dynamic_update_slice_rule(operands: Operands, attrs: Attrs) -> Shape:
    shape, update = _array(operands, 0), _array(operands, 1)
    _check_indices(operands, 2, shape.rank)
    _need(update.element_type == shape.element_type and update.rank == shape.rank
          and all(u <= d for u, d in zip(update.dims, shape.dims, strict=True)),
          f"operand 1 is {update}, which does not fit into operand 0, {shape}")
    return shape


def gather_rule(operands: Operands, attrs: Attrs) -> Shape:
    shape, indices = _array(operands, 0), _array(operands, 1)
    sizes, offset_dims = attrs["slice_sizes"], attrs["offset_dims"]
    _need(len(sizes) == shape.rank and all(0 <= s <= d for s, d in zip(sizes, shape.dims, strict=True)),
          f"slice_sizes {sizes} are not in operand 0, {shape}")
    vector = attrs["index_vector_dim"]
    _need(0 <= vector <= indices.rank, f"index_vector_dim {vector} is not in operand 1, {indices}")
    batch = [size for axis, size in enumerate(indices.dims) if axis != vector]
    dropped = {*attrs["collapsed_slice_dims"], *attrs.get("operand_batching_dims", ())}
    window = [size for axis, size in enumerate(sizes) if axis not in dropped]
    _need(len(window) == len(offset_dims),
          f"offset_dims {offset_dims} do not name the {len(window)} axes that slices {sizes} keep")
    _check_dimensions(offset_dims, len(batch) + len(window), "offset_dims")
    batch_left, window_left = iter(batch), iter(window)
    return shape.with_dims([next(window_left if axis in offset_dims else batch_left)
                            for axis in range(len(batch) + len(window))])


def scatter_rule(operands: Operands, attrs: Attrs) -> AnyShape:
    """Operands are n arrays, the indices, n updates; the results have the arrays' shapes."""
    n = len(operands) // 2
    _need(len(operands) == 2 * n + 1, f"{len(operands)} operands: n arrays, the indices and n updates are needed")
    for number in range(n):
        array, update = _array(operands, number), _array(operands, n + 1 + number)
        _need(array.element_type == update.element_type,
              f"operand {n + 1 + number} is {update}, but operand {number} is {array}")
    return operand_shapes(operands[:n], attrs)


def sort_rule(operands: Operands, attrs: Attrs) -> AnyShape:
    first = _array(operands, 0)
    _check_dimensions(attrs["dimensions"], first.rank)
    for number in range(1, len(operands)):
        _need(_array(operands, number).dims == first.dims, f"operand {number} is {operands[number]}, operand 0 {first}")
    return operand_shapes(operands, attrs)


# --- reductions and contractions --------------------------------------------------------------------------------------

def _arrays_and_inits(operands: Operands) -> tuple[list[Shape], list[Shape]]:
    """The operands of reduce and reduce-window: n arrays of one size, then n scalars."""
    n = len(operands) // 2
    _need(n > 0 and len(operands) == 2 * n, f"{len(operands)} operands: as many initial values as arrays are needed")
    arrays = [_array(operands, number) for number in range(n)]
    inits = [_array(operands, number) for number in range(n, 2 * n)]
    for number, (array, init) in enumerate(zip(arrays, inits, strict=True)):
        _need(array.dims == arrays[0].dims, f"operand {number} is {array}, but operand 0 is {arrays[0]}")
        _need(init.rank == 0, f"operand {n + number} is {init}, a scalar is needed")
    return arrays, inits


def reduce_rule(operands: Operands, attrs: Attrs) -> AnyShape:
    arrays, inits = _arrays_and_inits(operands)
    dimensions = attrs["dimensions"]
    _check_dimensions(dimensions, arrays[0].rank)
    dims = tuple(size for axis, size in enumerate(arrays[0].dims) if axis not in dimensions)
    return operand_shapes([init.with_dims(dims) for init in inits], attrs)


def _windowed(size: int, window: Any) -> int:
    """The number of positions of one window dimension over `size` elements."""
    base = size and (size - 1) * window.lhs_dilate + 1
    reach = window.size and (window.size - 1) * window.rhs_dilate + 1
    room = base + window.pad_low + window.pad_high
    return 0 if room < reach or room <= 0 else (room - reach) // window.stride + 1


def reduce_window_rule(operands: Operands, attrs: Attrs) -> AnyShape:
    arrays, inits = _arrays_and_inits(operands)
    window = attrs["window"]
    _need(len(window) == arrays[0].rank, f"window of {len(window)} dimensions for operand 0, {arrays[0]}")
    dims = tuple(_windowed(size, w) for size, w in zip(arrays[0].dims, window, strict=True))
    return operand_shapes([init.with_dims(dims) for init in inits], attrs)


def select_and_scatter_rule(operands: Operands, attrs: Attrs) -> Shape:
    """Operands: the array, the source (one element per window), a scalar initial value."""
    array, source, window = _array(operands, 0), _array(operands, 1), attrs["window"]
    _need(len(window) == array.rank, f"window of {len(window)} dimensions for operand 0, {array}")
    windows = tuple(_windowed(size, w) for size, w in zip(array.dims, window, strict=True))
    _need(source.dims == windows, f"operand 1 is {source}, but operand 0 has windows {windows}")
    return array


def dot_rule(operands: Operands, attrs: Attrs) -> Shape:
    """Batch axes, the left operand's free axes, the right's; the operands' type (a given shape may name another)."""
    lhs, rhs = _array(operands, 0), _array(operands, 1)
    lhs_batch, rhs_batch = attrs.get("lhs_batch_dims", ()), attrs.get("rhs_batch_dims", ())
    lhs_sum, rhs_sum = attrs["lhs_contracting_dims"], attrs["rhs_contracting_dims"]
    _check_dimensions((*lhs_batch, *lhs_sum), lhs.rank, "operand 0's batch and contracting dims")
    _check_dimensions((*rhs_batch, *rhs_sum), rhs.rank, "operand 1's batch and contracting dims")
    for left, right, what in ((lhs_batch, rhs_batch, "batch"), (lhs_sum, rhs_sum, "contracting")):
        _need([lhs.dims[d] for d in left] == [rhs.dims[d] for d in right],
              f"{what} dims {left} of operand 0, {lhs}, and {right} of operand 1, {rhs}, differ")
    _need(lhs.element_type == rhs.element_type,
          f"operand 1 is {rhs}, operand 0 {lhs}: with two element types the shape must be given")
    return lhs.with_dims((*(lhs.dims[d] for d in lhs_batch),
                          *(size for d, size in enumerate(lhs.dims) if d not in (*lhs_batch, *lhs_sum)),
                          *(size for d, size in enumerate(rhs.dims) if d not in (*rhs_batch, *rhs_sum))))


def convolution_rule(operands: Operands, attrs: Attrs) -> Shape:
    lhs, rhs, window = _array(operands, 0), _array(operands, 1), attrs["window"]
    inputs, result_labels = attrs["dim_labels"].split("->")
    lhs_labels, rhs_labels = inputs.split("_")
    for number, (shape, labels) in enumerate(((lhs, lhs_labels), (rhs, rhs_labels))):
        _need(shape.rank == len(labels), f"operand {number} is {shape}, but its labels are {labels}")
    _need(lhs.element_type == rhs.element_type, f"operand 1 is {rhs}, but operand 0 is {lhs}")
    features, groups = lhs.dims[lhs_labels.index("f")], attrs.get("feature_group_count", 1)
    _need(features == groups * rhs.dims[rhs_labels.index("i")],
          f"operand 0, {lhs}, has {features} features, operand 1, {rhs}, takes {rhs.dims[rhs_labels.index('i')]} in "
          f"{groups} group(s)")
    dims = {"b": lhs.dims[lhs_labels.index("b")] // attrs.get("batch_group_count", 1),
            "f": rhs.dims[rhs_labels.index("o")]}
    for axis, w in enumerate(window):
        _need(w.size == rhs.dims[rhs_labels.index(str(axis))], f"window axis {axis} is not of operand 1's size, {rhs}")
        dims[str(axis)] = _windowed(lhs.dims[lhs_labels.index(str(axis))], w)
    return lhs.with_dims([dims[label] for label in result_labels])


def fft_rule(operands: Operands, attrs: Attrs) -> Shape:
    shape, kind, length = _array(operands, 0), attrs["fft_type"], attrs["fft_length"]
    if kind == "RFFT":
        _need(shape.element_type in _COMPLEX_OF, f"operand 0 is {shape}, f32 or f64 is needed")
        return Shape(_COMPLEX_OF[shape.element_type], (*shape.dims[:-1], length[-1] and length[-1] // 2 + 1))
    _need(shape.element_type in _REAL_OF, f"operand 0 is {shape}, complex numbers are needed")
    if kind == "IRFFT":
        return Shape(_REAL_OF[shape.element_type], (*shape.dims[:-1], length[-1]))
    return shape
