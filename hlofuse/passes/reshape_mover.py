"""Moves of elements meet and merge: reshape, transpose, slice, pad, concatenate, reverse, broadcast.

The normal form is elementwise → transpose → reshape → broadcast: broadcasts end up last (broadcast_sinking moves
element-wise work above them), so a reshape or transpose of a broadcast works on the smaller source. A reshape that only
inserts axes of one element sinks below slices, transposes and reductions until it meets what removes those axes.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hlofuse.hlo.builder import broadcast, make, reshape
from hlofuse.hlo.module import Instruction, Module
from hlofuse.passes.rewrite import RuleTable, rewrite

RULES = RuleTable()


def reshape_mover(module: Module) -> Module:
    return rewrite(module, RULES)


def transpose(x: Instruction, dimensions: Sequence[int]) -> Instruction:
    return x if tuple(dimensions) == tuple(range(len(x.dims))) else make("transpose", x, dimensions=tuple(dimensions))


def spread(x: Instruction, dims: Sequence[int], axes: Sequence[int]) -> Instruction:
    return x if tuple(dims) == x.dims and tuple(axes) == tuple(range(len(dims))) else broadcast(x, dims, axes)


# --- two of a kind ----------------------------------------------------------------------------------------------------

@RULES.on("reshape")
def reshape_of_reshape(i: Instruction) -> Instruction | None:
    """reshape(reshape(x)) => reshape(x)"""
    inner = i.operands[0]
    return reshape(inner.operands[0], i.dims) if inner.opcode == "reshape" else None


@RULES.on("transpose")
def transpose_of_transpose(i: Instruction) -> Instruction | None:
    """transpose(transpose(x)) => transpose(x)"""
    inner = i.operands[0]
    if inner.opcode != "transpose":
        return None
    return transpose(inner.operands[0], [inner.attrs["dimensions"][d] for d in i.attrs["dimensions"]])


@RULES.on("broadcast")
def broadcast_of_broadcast(i: Instruction) -> Instruction | None:
    """broadcast(broadcast(x)) => broadcast(x)"""
    inner = i.operands[0]
    if inner.opcode != "broadcast":
        return None
    return spread(inner.operands[0], i.dims, [i.attrs["dimensions"][d] for d in inner.attrs["dimensions"]])


@RULES.on("slice")
def slice_of_slice(i: Instruction) -> Instruction | None:
    """slice(slice(x)) => slice(x)"""
    inner = i.operands[0]
    if inner.opcode != "slice":
        return None
    bounds = tuple(
        (s0 + s1 * t0, s0 + (s1 + (size - 1) * t1) * t0 + 1 if size else s0 + s1 * t0, t0 * t1)
        for (s0, _, t0), (s1, _, t1), size in zip(inner.attrs["slice"], i.attrs["slice"], i.dims, strict=True))
    return make("slice", inner.operands[0], slice=bounds)


@RULES.on("reverse")
def reverse_of_reverse(i: Instruction) -> Instruction | None:
    """reverse(reverse(x)) => reverse(x), along the axes in one of the two"""
    inner = i.operands[0]
    if inner.opcode != "reverse":
        return None
    axes = tuple(sorted(set(i.attrs["dimensions"]) ^ set(inner.attrs["dimensions"])))
    return make("reverse", inner.operands[0], dimensions=axes) if axes else inner.operands[0]


@RULES.on("pad")
def pad_of_pad(i: Instruction) -> Instruction | None:
    """pad(pad(x, c), c) => pad(x, c), where both only add, and nothing between elements"""
    inner, value = i.operands
    if inner.opcode != "pad" or not _same_scalar(inner.operands[1], value):
        return None
    if any(low < 0 or high < 0 or interior for p in (inner, i) for low, high, interior in p.attrs["padding"]):
        return None
    padding = tuple((a + c, b + d, 0) for (a, b, _), (c, d, _) in zip(inner.attrs["padding"], i.attrs["padding"],
                                                                     strict=True))
    return make("pad", inner.operands[0], value, padding=padding)


def _same_scalar(a: Instruction, b: Instruction) -> bool:
    return a is b or a.opcode == b.opcode == "constant" and a.shape == b.shape \
        and a.literal.tobytes() == b.literal.tobytes()


@RULES.on_readers("concatenate")
def concatenate_of_concatenate(i: Instruction, readers: Any) -> Instruction | None:
    """concatenate(concatenate(a, b), c) => concatenate(a, b, c), along one axis, where nothing else reads the inner"""
    axes = i.attrs["dimensions"]
    flat: list[Instruction] = []
    for o in i.operands:
        nested = o.opcode == "concatenate" and o.attrs["dimensions"] == axes and readers(o) == 1
        flat.extend(o.operands if nested else (o,))
    return make("concatenate", *flat, dimensions=axes) if len(flat) > len(i.operands) else None


@RULES.on("concatenate")
def concatenate_of_neighbors(i: Instruction) -> Instruction | None:
    """concatenate(slice(x, a:b), slice(x, b:c)) => slice(x, a:c)"""
    axis = i.attrs["dimensions"][0]
    merged: list[Instruction] = []
    for o in i.operands:
        joined = _joined(merged[-1], o, axis) if merged else None
        if joined is None:
            merged.append(o)
        else:
            merged[-1] = joined
    if len(merged) == len(i.operands):
        return None
    return merged[0] if len(merged) == 1 else make("concatenate", *merged, dimensions=i.attrs["dimensions"])


def _joined(left: Instruction, right: Instruction, axis: int) -> Instruction | None:
    """One slice for two that lie side by side along the axis."""
    if left.opcode != "slice" or right.opcode != "slice" or left.operands[0] is not right.operands[0]:
        return None
    a, b = list(left.attrs["slice"]), list(right.attrs["slice"])
    (start, limit, stride), (start2, limit2, stride2) = a[axis], b[axis]
    if stride != 1 or stride2 != 1 or limit != start2:
        return None
    a[axis] = b[axis] = (start, limit2, 1)
    return make("slice", left.operands[0], slice=tuple(a)) if a == b else None


# --- slices of what was put together ----------------------------------------------------------------------------------

@RULES.on("slice")
def slice_of_concatenate(i: Instruction) -> Instruction | None:
    """slice(concatenate(a, b)) => slice(a), where it lies in one operand; fewer operands where it lies in some"""
    joined = i.operands[0]
    if joined.opcode != "concatenate" or not i.array.size:
        return None
    axis = joined.attrs["dimensions"][0]
    bounds = list(i.attrs["slice"])
    start, limit, stride = bounds[axis]
    limit = start + (i.dims[axis] - 1) * stride + 1
    kept: list[Instruction] = []
    offset = first = 0
    for o in joined.operands:
        if offset < limit and offset + o.dims[axis] > start:
            first = offset if not kept else first
            kept.append(o)
        offset += o.dims[axis]
    if len(kept) == len(joined.operands):
        return None
    bounds[axis] = (start - first, limit - first, stride)
    source = kept[0] if len(kept) == 1 else make("concatenate", *kept, dimensions=(axis,))
    return make("slice", source, slice=tuple(bounds))


@RULES.on("slice")
def slice_of_pad(i: Instruction) -> Instruction | None:
    """slice(pad(x, c)) => slice(x), where it keeps away from the padding"""
    padded = i.operands[0]
    if padded.opcode != "pad" or not i.array.size:
        return None
    bounds = []
    for (start, _, stride), (low, _, interior), size, count in zip(
            i.attrs["slice"], padded.attrs["padding"], padded.operands[0].dims, i.dims, strict=True):
        step = interior + 1
        last = start + (count - 1) * stride
        if start < low or last > low + (size - 1) * step or (start - low) % step or (count > 1 and stride % step):
            return None
        first = (start - low) // step
        bounds.append((first, (last - low) // step + 1, max(stride // step, 1)))
    return make("slice", padded.operands[0], slice=tuple(bounds))


# --- moves of a broadcast work on its source --------------------------------------------------------------------------

@RULES.on("slice")
def slice_of_broadcast(i: Instruction) -> Instruction | None:
    """slice(broadcast(x)) => broadcast(slice(x))"""
    inner = i.operands[0]
    if inner.opcode != "broadcast":
        return None
    x, axes = inner.operands[0], inner.attrs["dimensions"]
    bounds = tuple(i.attrs["slice"][d] for d in axes)
    whole = all(b == (0, size, 1) for b, size in zip(bounds, x.dims, strict=True))
    return spread(x if whole else make("slice", x, slice=bounds), i.dims, axes)


@RULES.on("reverse")
def reverse_of_broadcast(i: Instruction) -> Instruction | None:
    """reverse(broadcast(x)) => broadcast(reverse(x))"""
    inner = i.operands[0]
    if inner.opcode != "broadcast":
        return None
    x, axes = inner.operands[0], inner.attrs["dimensions"]
    reversed_axes = tuple(n for n, d in enumerate(axes) if d in i.attrs["dimensions"])
    return spread(make("reverse", x, dimensions=reversed_axes) if reversed_axes else x, i.dims, axes)


@RULES.on("transpose")
def transpose_of_broadcast(i: Instruction) -> Instruction | None:
    """transpose(broadcast(x)) => broadcast(transpose(x))"""
    inner = i.operands[0]
    if inner.opcode != "broadcast":
        return None
    x, axes = inner.operands[0], inner.attrs["dimensions"]
    moved = [i.attrs["dimensions"].index(d) for d in axes]  # where each axis of x ends up
    order = sorted(range(len(axes)), key=moved.__getitem__)
    return spread(transpose(x, order), i.dims, [moved[n] for n in order])


@RULES.on("broadcast")
def broadcast_in_order(i: Instruction) -> Instruction | None:
    """broadcast(x), dimensions={1,0} => broadcast(transpose(x)), dimensions={0,1}"""
    axes = i.attrs["dimensions"]
    order = sorted(range(len(axes)), key=axes.__getitem__)
    if order == list(range(len(axes))):
        return None
    return spread(transpose(i.operands[0], order), i.dims, [axes[n] for n in order])


@RULES.on("reshape")
def reshape_of_broadcast(i: Instruction) -> Instruction | None:
    """reshape(broadcast(x)) => broadcast(reshape(x)), where no merged or split axis is partly repeated"""
    inner = i.operands[0]
    if inner.opcode != "broadcast" or not i.array.size:
        return None
    x, axes = inner.operands[0], set(inner.attrs["dimensions"])
    new_axes: list[int] = []
    for old, new in common_factors(inner.dims, i.dims):
        repeated = [d for d in old if inner.dims[d] != 1 and d not in axes]
        kept = [inner.dims[d] for d in old if d in axes]
        if repeated and any(size != 1 for size in kept):
            return None
        new_axes.extend(_matching(kept, new, i.dims, bool(repeated)))
    return spread(reshape(x, [i.dims[d] for d in new_axes]), i.dims, new_axes)


def _matching(sizes: list[int], group: list[int], dims: Sequence[int], is_repeated: bool) -> list[int]:
    """Which axes of the group the source's axes become: the same ones if they are all there, else all that count."""
    matched: list[int] = []
    rest = iter(group)
    for size in sizes:
        found = next((d for d in rest if dims[d] == size), None)
        if found is None:
            return [] if is_repeated else [d for d in group if dims[d] != 1]
        matched.append(found)
    unmatched = [d for d in group if d not in matched and dims[d] != 1]
    return matched if is_repeated or not unmatched else [d for d in group if dims[d] != 1]


def common_factors(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The finest split of both axis lists into runs of equal products: (8,6)→(2,4,6) gives [0]→[0,1] and [1]→[2].

    Axes of one element belong to the run before them, or to the first.
    """
    groups: list[tuple[list[int], list[int]]] = []
    a = b = 0
    while a < len(old) or b < len(new):
        left: list[int] = []
        right: list[int] = []
        product = other = 1
        while True:
            if a < len(old) and (product < other or product == other and not left):
                product *= old[a]
                left.append(a)
                a += 1
            elif b < len(new) and (other < product or not right):
                other *= new[b]
                right.append(b)
                b += 1
            else:
                break
            if product == other and product > 1:
                break
        while a < len(old) and old[a] == 1:
            left.append(a)
            a += 1
        while b < len(new) and new[b] == 1:
            right.append(b)
            b += 1
        groups.append((left, right))
    return groups


# --- axes of one element ----------------------------------------------------------------------------------------------

def inserted_axes(i: Instruction) -> tuple[int, ...] | None:
    """The axes of one element that a reshape adds; `None` if it is not a reshape, or does more than add such axes."""
    if i.opcode != "reshape":
        return None
    return _inserted(i.operands[0].dims, i.dims)


def _inserted(old: Sequence[int], new: Sequence[int]) -> tuple[int, ...] | None:
    axes: list[int] = []
    position = 0
    for d, size in enumerate(new):
        if position < len(old) and old[position] == size:
            position += 1
        elif size == 1:
            axes.append(d)
        else:
            return None
    return tuple(axes) if position == len(old) and axes else None


@RULES.on("broadcast")
def broadcast_of_inserted(i: Instruction) -> Instruction | None:
    """broadcast(reshape(x)) => broadcast(x), where the reshape only adds axes of one element"""
    inner = i.operands[0]
    added = inserted_axes(inner)
    if added is None:
        return None
    return spread(inner.operands[0], i.dims, [d for n, d in enumerate(i.attrs["dimensions"]) if n not in added])


@RULES.on("slice")
def slice_of_inserted(i: Instruction) -> Instruction | None:
    """slice(reshape(x)) => reshape(slice(x)), where the reshape only adds axes of one element"""
    inner = i.operands[0]
    added = inserted_axes(inner)
    if added is None or not i.array.size:
        return None
    bounds = tuple(b for d, b in enumerate(i.attrs["slice"]) if d not in added)
    return reshape(make("slice", inner.operands[0], slice=bounds), i.dims)


@RULES.on("transpose")
def transpose_of_inserted(i: Instruction) -> Instruction | None:
    """transpose(reshape(x)) => reshape(transpose(x)), where the reshape only adds axes of one element"""
    inner = i.operands[0]
    added = inserted_axes(inner)
    if added is None:
        return None
    kept = [d for d in range(len(inner.dims)) if d not in added]
    order = [kept.index(d) for d in i.attrs["dimensions"] if d not in added]
    return reshape(transpose(inner.operands[0], order), i.dims)


@RULES.on("reduce")
def reduce_of_inserted(i: Instruction) -> Instruction | None:
    """reduce(reshape(x), init) => reshape(reduce(x, init)), where the reshape only adds such axes, kept ones"""
    if len(i.operands) != 2:
        return None
    inner = i.operands[0]
    added = inserted_axes(inner)
    axes = i.attrs["dimensions"]
    if added is None or any(d in added for d in axes):
        return None
    kept = [d for d in range(len(inner.dims)) if d not in added]
    reduced = make("reduce", inner.operands[0], i.operands[1], dimensions=tuple(kept.index(d) for d in axes),
                   to_apply=i.attrs["to_apply"])
    return reshape(reduced, i.dims)


@RULES.on("iota")
def iota_of_many_axes(i: Instruction) -> Instruction | None:
    """iota over one axis of several => broadcast(iota)"""
    axis = i.attrs["iota_dimension"]
    if len(i.dims) < 2:
        return None
    line = make("iota", shape=i.array.with_dims((i.dims[axis],)), iota_dimension=0)
    return spread(line, i.dims, (axis,))
