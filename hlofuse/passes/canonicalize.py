"""One form for what can be said in several: later passes, fusion and people then meet only that form.

Constants stand on the right; what moves or computes nothing is gone; a reduction over axes of one element is
element-wise; a scatter with one index is a dynamic-update-slice; a constant start makes a slice static.
An opt-barrier is never looked through.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from hlofuse.hlo.builder import broadcast, constant, full, make, reshape, with_operands
from hlofuse.hlo.module import Computation, Instruction, Module
from hlofuse.hlo.opcode import OPCODES, Kind, identity_of
from hlofuse.hlo.shape import FUSIBLE, Shape
from hlofuse.passes.known import full_like, is_constant_like, same_number, uniform_value
from hlofuse.passes.lift import lift
from hlofuse.passes.rewrite import RuleTable, rewrite

RULES = RuleTable()

_COMMUTATIVE = tuple(name for name, row in OPCODES.items() if row.commutative)
_PURE_KINDS = (Kind.ELEMENTWISE, Kind.SHAPE, Kind.REDUCTION, Kind.CONTRACTION)
_PURE = tuple(name for name, row in OPCODES.items() if row.kind in _PURE_KINDS)
_FLIPPED = {"EQ": "EQ", "NE": "NE", "LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}


def canonicalize(module: Module) -> Module:
    return rewrite(module, RULES)


# --- operand order and constants --------------------------------------------------------------------------------------

@RULES.on(*_COMMUTATIVE)
def constant_to_the_right(i: Instruction) -> Instruction | None:
    """op(constant, x) => op(x, constant), op commutative"""
    left, right = i.operands
    return with_operands(i, (right, left)) if is_constant_like(left) and not is_constant_like(right) else None


@RULES.on("compare")
def compared_constant_to_the_right(i: Instruction) -> Instruction | None:
    """compare(constant, x), LT => compare(x, constant), GT, and so on"""
    left, right = i.operands
    if not is_constant_like(left) or is_constant_like(right):
        return None
    attrs = {**i.attrs, "direction": _FLIPPED[i.attrs["direction"]]}
    return make("compare", right, left, shape=i.shape, **attrs)


@RULES.on("constant")
def splat_constant(i: Instruction) -> Instruction | None:
    """constant({c, c, …}) => broadcast(c)"""
    literal = i.literal
    if not literal.shape or literal.size == 0 or i.element_type not in FUSIBLE:
        return None
    first = literal.reshape(-1)[:1]
    if literal.size > 1 and literal.tobytes() != first.tobytes() * literal.size:
        return None
    return broadcast(constant(first.reshape(())), i.dims)


@RULES.on(*_PURE)
def empty_result(i: Instruction) -> Instruction | None:
    """op(…) => an empty constant, where the result has no element"""
    if not isinstance(i.shape, Shape) or i.shape.size or i.element_type not in FUSIBLE:
        return None
    if i.opcode == "broadcast" and is_constant_like(i):
        return None
    return full(0, i.shape)


# --- what does nothing ------------------------------------------------------------------------------------------------

@RULES.on("copy")
def drop_copy(i: Instruction) -> Instruction | None:
    """copy(x) => x"""
    return i.operands[0]


@RULES.on("bitcast")
def bitcast_is_reshape(i: Instruction) -> Instruction | None:
    """bitcast(x) => reshape(x), of one element type: arrays are dense and row-major"""
    x = i.operands[0]
    if not isinstance(i.shape, Shape) or not isinstance(x.shape, Shape) or x.element_type != i.element_type:
        return None
    return reshape(x, i.dims)


@RULES.on("reshape")
def drop_reshape(i: Instruction) -> Instruction | None:
    """reshape(x) => x, of x's own shape"""
    return i.operands[0] if i.operands[0].shape == i.shape else None


@RULES.on("broadcast")
def drop_broadcast(i: Instruction) -> Instruction | None:
    """broadcast(x) => x where nothing repeats; => reshape(x) where only axes of one element are new"""
    x = i.operands[0]
    if not i.dims:
        return x
    if x.array.size != i.array.size or i.array.size == 0 or is_constant_like(i):
        return None
    if list(i.attrs["dimensions"]) != sorted(i.attrs["dimensions"]):
        return None
    return reshape(x, i.dims)


@RULES.on("transpose")
def drop_transpose(i: Instruction) -> Instruction | None:
    """transpose(x) => x in order; => reshape(x) where only axes of one element move"""
    moved = [d for d in i.attrs["dimensions"] if i.operands[0].dims[d] != 1]
    return reshape(i.operands[0], i.dims) if moved == sorted(moved) else None


@RULES.on("reverse")
def drop_reverse(i: Instruction) -> Instruction | None:
    """reverse(x) => x along axes of one element; those axes are dropped from `dimensions`"""
    x = i.operands[0]
    kept = tuple(d for d in i.attrs["dimensions"] if x.dims[d] != 1)
    if not kept:
        return x
    return make("reverse", x, dimensions=kept) if kept != tuple(i.attrs["dimensions"]) else None


@RULES.on("slice")
def drop_slice(i: Instruction) -> Instruction | None:
    """slice(x) => x, of everything"""
    return i.operands[0] if i.operands[0].shape == i.shape else None


@RULES.on("pad")
def drop_pad(i: Instruction) -> Instruction | None:
    """pad(x, c) => x with no padding; => slice(x) where padding only removes; => broadcast(c) where x is empty"""
    x, value = i.operands
    padding = i.attrs["padding"]
    if x.array.size == 0:
        return broadcast(value, i.dims)
    if any(low > 0 or high > 0 or (interior > 0 and size > 1)
           for (low, high, interior), size in zip(padding, x.dims, strict=True)):
        return None
    if x.shape == i.shape:
        return x
    bounds = tuple((-low, size + high, 1) for (low, high, _), size in zip(padding, x.dims, strict=True))
    return make("slice", x, slice=bounds)


@RULES.on("concatenate")
def drop_concatenate(i: Instruction) -> Instruction | None:
    """concatenate(x) => x; operands without elements are dropped"""
    axis = i.attrs["dimensions"][0]
    kept = tuple(o for o in i.operands if o.dims[axis])
    if len(kept) == 1:
        return kept[0]
    return make("concatenate", *kept, **i.attrs) if kept and len(kept) < len(i.operands) else None


@RULES.on("select")
def same_branches(i: Instruction) -> Instruction | None:
    """select(p, x, x) => x"""
    return i.operands[1] if i.operands[1] is i.operands[2] else None


@RULES.on("get-tuple-element")
def element_of_tuple(i: Instruction) -> Instruction | None:
    """get-tuple-element(tuple(a, b), index=0) => a"""
    made = i.operands[0]
    return made.operands[i.attrs["index"]] if made.opcode == "tuple" and not made.control else None


# --- reductions -------------------------------------------------------------------------------------------------------

@RULES.on("reduce")
def reduce_of_units(i: Instruction) -> Instruction | None:
    """reduce(x, init) over axes of one element => reshape(x), init the identity; else to_apply(init, reshape(x))"""
    count = len(i.operands) // 2
    values, inits = i.operands[:count], i.operands[count:]
    axes = i.attrs["dimensions"]
    units = tuple(d for d in axes if values[0].dims[d] == 1)
    if len(units) < len(axes):
        return _without_units(i, units) if units else None
    dims = [size for d, size in enumerate(values[0].dims) if d not in axes]
    if count == 1 and _is_identity(inits[0], i.attrs["to_apply"]):
        return reshape(values[0], dims)
    arguments = [broadcast(init, dims) if dims else init for init in inits] + [reshape(v, dims) for v in values]
    lifted = lift(i.attrs["to_apply"], arguments, dims)
    return lifted if lifted is not None and lifted.shape == i.shape else None


def _is_identity(init: Instruction, combiner: Computation) -> bool:
    """Whether the combiner is one operation whose identity is `init`. A sum starts from 0.0, as in JAX: as HLO has it,
    the start of a reduction is its identity, so nothing says that it is added to a lone -0.0."""
    value, root = uniform_value(init), combiner.root
    if value is None or set(root.operands) != set(combiner.parameters) or len(root.operands) != 2:
        return False
    identity = identity_of(root.opcode, init.element_type)
    return identity is not None and (same_number(value, identity) or root.opcode == "add" and value == 0)


def _without_units(i: Instruction, units: tuple[int, ...]) -> Instruction:
    """reduce over axes of which some have one element => reduce(reshape(x)) over the others"""
    count = len(i.operands) // 2
    kept = [d for d in range(len(i.operands[0].dims)) if d not in units]
    values = [reshape(v, [v.dims[d] for d in kept]) for v in i.operands[:count]]
    axes = tuple(kept.index(d) for d in i.attrs["dimensions"] if d not in units)
    return make("reduce", *values, *i.operands[count:], shape=i.shape, dimensions=axes, to_apply=i.attrs["to_apply"])


@RULES.on("reduce")
def reduce_of_nothing(i: Instruction) -> Instruction | None:
    """reduce(x, init) => broadcast(init), where x has no element"""
    if not isinstance(i.shape, Shape) or i.operands[0].array.size:
        return None
    return broadcast(i.operands[1], i.dims) if i.dims else i.operands[1]


# --- slices and updates with an index ---------------------------------------------------------------------------------

@RULES.on("dynamic-slice")
def static_slice(i: Instruction) -> Instruction | None:
    """dynamic-slice(x, constants) => slice(x), at the clamped start; an axis taken whole starts at 0"""
    x, *starts = i.operands
    sizes = i.dims
    known = [0 if size == whole else uniform_value(start)
             for start, size, whole in zip(starts, sizes, x.dims, strict=True)]
    if any(value is None for value in known):
        return None
    clamped = [min(max(int(value), 0), whole - size) for value, size, whole in zip(known, sizes, x.dims, strict=True)]
    return make("slice", x, slice=tuple((start, start + size, 1) for start, size in zip(clamped, sizes, strict=True)))


@RULES.on("dynamic-slice", "dynamic-update-slice")
def whole_axis_starts_at_zero(i: Instruction) -> Instruction | None:
    """dynamic-slice(x, s, …) => dynamic-slice(x, 0, …) along an axis that is taken whole, and the same of an update"""
    first = 1 if i.opcode == "dynamic-slice" else 2
    sizes = i.dims if first == 1 else i.operands[1].dims
    starts = tuple(
        constant(0, s.element_type) if size == whole and uniform_value(s) != 0 else s
        for s, size, whole in zip(i.operands[first:], sizes, i.operands[0].dims, strict=True))
    operands = (*i.operands[:first], *starts)
    return with_operands(i, operands) if operands != i.operands else None


@RULES.on("dynamic-update-slice")
def trivial_update(i: Instruction) -> Instruction | None:
    """dynamic-update-slice(x, u, …) => u where it covers x, => x where u has no element"""
    x, update = i.operands[:2]
    if update.shape == x.shape:
        return update
    return x if update.array.size == 0 else None


@RULES.on("scatter")
def scatter_of_one_index(i: Instruction) -> Instruction | None:
    """scatter(x, index, u) with one index => dynamic-update-slice(x, select(in bounds, u, dynamic-slice(x)), index)

    Scatter drops an update that is out of bounds, where dynamic-update-slice clamps: hence the select. A combiner
    other than plain store is applied to the slice and the update.
    """
    if len(i.operands) != 3:
        return None
    x, indices, update = i.operands
    attrs = i.attrs
    components = _index_components(indices, attrs["index_vector_dim"])
    if components is None or attrs.get("input_batching_dims") or update.array.size == 0 or x.array.size == 0:
        return None
    window = set(attrs["update_window_dims"])
    if any(size != 1 for d, size in enumerate(update.dims) if d not in window):
        return None
    inserted = set(attrs["inserted_window_dims"])
    window_sizes = iter([update.dims[d] for d in sorted(window)])
    sizes = [1 if d in inserted else next(window_sizes) for d in range(len(x.dims))]
    starts: list[Instruction] = [constant(0, indices.element_type) for _ in x.dims]
    for component, d in zip(components, attrs["scatter_dims_to_operand_dims"], strict=True):
        starts[d] = component
    old = make("dynamic-slice", x, *starts, dynamic_slice_sizes=tuple(sizes))
    combined = lift(attrs["to_apply"], [old, reshape(update, sizes)], sizes)
    if combined is None or combined.shape != old.shape:
        return None
    inside = _in_bounds(starts, attrs["scatter_dims_to_operand_dims"], sizes, x.dims)
    kept = combined if inside is None else make("select", broadcast(inside, sizes) if sizes else inside, combined, old)
    return make("dynamic-update-slice", x, kept, *starts)


def _index_components(indices: Instruction, vector_dim: int) -> list[Instruction] | None:
    """The scalars of the only index vector; `None` where there are more index vectors than one."""
    if any(size != 1 for d, size in enumerate(indices.dims) if d != vector_dim):
        return None
    count = indices.array.size
    flat = reshape(indices, (count,))
    return [reshape(make("slice", flat, slice=((n, n + 1, 1),)), ()) for n in range(count)]


def _in_bounds(starts: list[Instruction], axes: Any, sizes: list[int], whole: tuple[int, ...]) -> Instruction | None:
    """Whether the window lies inside: 0 <= start <= whole - size on each axis; `None` if nothing is to be checked."""
    checks = []
    for d in axes:
        start = starts[d]
        limits = np.iinfo(start.array.dtype)
        if limits.min < 0:
            checks.append(make("compare", start, full_like(start, 0), direction="GE"))
        if whole[d] - sizes[d] < limits.max:
            checks.append(make("compare", start, full_like(start, whole[d] - sizes[d]), direction="LE"))
    inside = checks[0] if checks else None
    for check in checks[1:]:
        assert inside is not None
        inside = make("and", inside, check)
    return inside


# --- control ----------------------------------------------------------------------------------------------------------

@RULES.on("conditional")
def conditional_by_constant(i: Instruction) -> Instruction | None:
    """conditional(constant, …) => call(…), to_apply= the branch that is taken"""
    value = uniform_value(i.operands[0])
    if value is None:
        return None
    branches = i.attrs["branch_computations"]
    if i.operands[0].element_type == "pred":
        taken = 0 if value else 1
    else:
        taken = int(value) if 0 <= int(value) < len(branches) else len(branches) - 1
    return make("call", i.operands[1 + taken], shape=i.shape, to_apply=branches[taken])
