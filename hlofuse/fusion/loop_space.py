"""The space of a loop: which axes its lanes run over, and which small ones each lane holds in full.

The lanes' axes are those that every carry and every stacked slice have, and along which no step mixes elements. What a
carry has beyond them (the 3 of a state vector) lies in the lane's registers, one for each place, and mixes as it likes.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hlofuse.fusion.loop_structure import LoopRefusal, LoopStructure, loop_structure
from hlofuse.hlo.module import Instruction
from hlofuse.hlo.opcode import OPCODES, Kind
from hlofuse.hlo.shape import Shape

if TYPE_CHECKING:
    from hlofuse.fusion.axes import Axes

MAX_PLACES = 32       # of one carry in one lane
MAX_REGISTERS = 128   # words of all carries of one lane


@dataclass(frozen=True)
class LoopSpace:
    """Atoms as bit sets: `lanes` are the parallel axes, `inner` those that each lane holds."""

    lanes: int
    inner: int

    def __or__(self, other: LoopSpace) -> LoopSpace:
        if self.lanes != other.lanes:
            raise LoopRefusal("shape", "two loops run over different lanes")
        return LoopSpace(self.lanes, self.inner | other.inner)


def loops_of(loop: Instruction) -> Iterator[LoopStructure]:
    """The loop and those nested in it, outermost first."""
    structure = loop_structure(loop)
    yield structure
    for inner in structure.nested:
        yield from loops_of(inner)


def loop_space(loop: Instruction, axes: Axes) -> LoopSpace:
    """The space of a loop in a program's axes; `LoopRefusal` where a lane would have to hold too much."""
    try:
        return _space(loop, axes, frozenset())
    except LoopRefusal:
        uniform = uniform_carries(loop_structure(loop))
        if not uniform:
            raise
        return _space(loop, axes, uniform)


def _space(loop: Instruction, axes: Axes, uniform: frozenset[int]) -> LoopSpace:
    """`uniform` are small carries of the outermost loop that are the same for all lanes: each lane has its own copy."""
    structures = list(loops_of(loop))
    moving = lane_dependent(structures, uniform)
    carried: list[Instruction] = []
    copied: list[Instruction] = []
    for n, s in enumerate(structures):
        for k in s.carries:
            if s.shape(k).size > 1:
                (copied if n == 0 and k in uniform else carried).append(s.readers.get(k, s.update(k)))
        for t in s.stacked:
            if t.update.array.size > 1:
                (copied if uniform and t.update not in moving else carried).append(t.update)
        if s.lanes_leave and s.predicate.array.size > 1:
            carried.append(s.predicate)
    lanes = -1
    for value in carried:
        lanes &= axes.mask(value)
    lanes = lanes & ~mixed_atoms(structures, moving, axes) if carried else 0
    for s in structures:
        if s.lanes_leave and axes.mask(s.predicate) & ~lanes:
            raise LoopRefusal("lanes", f"the condition {value_text(s.predicate)} is not one number for each lane")
    inner, words = 0, 0.0
    for value in (*carried, *copied):
        rest = axes.mask(value) & ~lanes
        if value in copied and axes.mask(value) & lanes:
            raise LoopRefusal("shape", f"{value_text(value)} is the same for all lanes and has their axes")
        places = span(rest, axes)
        if places > MAX_PLACES:
            raise LoopRefusal("shape", f"{value_text(value)} has {places} places beyond the axes that all carries "
                              f"share and no step mixes, the limit is {MAX_PLACES}")
        inner |= rest
        words += places * max(1.0, value.array.dtype.itemsize / 4)
    if words > MAX_REGISTERS:
        raise LoopRefusal("memory", f"the carries of a lane are {words:g} words, the limit is {MAX_REGISTERS}")
    if lanes:
        _check_numbers(structures, moving)
    return LoopSpace(lanes, inner)


def uniform_carries(s: LoopStructure) -> frozenset[int]:
    """Small arrays whose new value needs no other array carry: the key of a random number generator."""
    found = {k for k in s.carries if 1 < s.shape(k).size <= MAX_PLACES}
    arrays = {k for k in s.carries if s.shape(k).size > 1} | {t.index for t in s.stacked if t.reads}
    while True:
        others = {i for i, k in s.elements.items() if k in arrays - found}
        for i in s.values:
            if i.opcode == "while" or not others.isdisjoint(i.operands):
                others.add(i)
        kept = {k for k in found if s.update(k) not in others}
        if kept == found:
            return frozenset(found) if arrays - found else frozenset()
        found = kept


def value_text(value: Instruction) -> str:
    return f"{value.element_type}[{','.join(map(str, value.dims))}]"


def span(mask: int, axes: Axes) -> int:
    """The number of points of a set of atoms."""
    size = 1
    while mask:
        lowest = mask & -mask
        size *= axes.size(lowest.bit_length() - 1)
        mask ^= lowest
    return size


def _check_numbers(structures: list[LoopStructure], moving: frozenset[Instruction]) -> None:
    """What is one number for all lanes depends on none of them."""
    for s in structures:
        for k in s.carries:
            if s.shape(k).size == 1 and (s.update(k) in moving or s.initial(k) in moving):
                raise LoopRefusal("lanes", f"element {k} of the state, a number, depends on all elements of an array")
        if not s.lanes_leave and s.predicate in moving:
            raise LoopRefusal("lanes", "the condition depends on all elements of an array")
        if any(t.position in moving for t in s.stacked):
            raise LoopRefusal("lanes", "where a step writes depends on the elements of an array")


def lane_dependent(structures: list[LoopStructure], uniform: frozenset[int]) -> frozenset[Instruction]:
    """What in the bodies differs from lane to lane because an array carry does; `uniform` ones do not."""
    found: set[Instruction] = set()
    for n, s in enumerate(structures):
        read = {t.index for t in s.stacked if t.reads}
        for reader, k in s.elements.items():
            if n == 0 and k in uniform:
                continue
            if s.shape(k).size > 1 and (k in s.carries or k in read) or s.initial(k) in found:
                found.add(reader)
        for i in s.values:
            if i.opcode == "while" or not found.isdisjoint(i.operands):
                found.add(i)
    return frozenset(found)


def mixed_atoms(structures: list[LoopStructure], moving: frozenset[Instruction], axes: Axes) -> int:
    """The atoms along which some step reads an array carry at another place than where it writes."""
    mask = 0
    for s in structures:
        for k in s.carries:
            changed = [d for d in range(len(s.shape(k).dims)) if (s.loop, k, d) in axes.permuted]
            mask |= _atoms(s.update(k), changed, axes) | (_atoms(s.readers[k], changed, axes) if k in s.readers else 0)
        for i in s.values:
            for number, operand in enumerate(i.operands):
                if operand in moving and is_array(operand):
                    mask |= mixed_by(i, number, axes)
    return mask


def mixed_by(i: Instruction, number: int, axes: Axes) -> int:
    """The atoms along which an instruction reads an operand at another place than its own."""
    operand = i.operands[number]
    if i.opcode == "reduce":
        return _atoms(operand, i.attrs["dimensions"], axes)
    if i.opcode == "dot" and (i, number) not in axes.shifted:
        return _atoms(operand, i.attrs["rhs_contracting_dims" if number else "lhs_contracting_dims"], axes)
    if (i, number) not in axes.shifted:
        return 0
    if i.opcode in ("slice", "pad", "reverse", "dynamic-slice", "concatenate", "dynamic-update-slice"):
        return _atoms(operand, _touched(i, operand), axes) | _atoms(i, _touched(i, operand), axes)
    if i.opcode == "gather" and number == 0:
        own = {d for d, r in _batches_of_gather(i) if axes.dims(operand)[d] == axes.dims(i)[r]}
        sizes = enumerate(zip(operand.dims, i.attrs["slice_sizes"], strict=True))
        return _atoms(operand, [d for d, (n, m) in sizes if n != m and d not in own], axes)
    if i.opcode == "gather":
        vector = i.attrs["index_vector_dim"]
        numbers = _atoms(operand, [vector], axes) if vector < len(operand.dims) else 0
        return numbers | axes.mask(operand) & ~axes.mask(i)
    pairs = _same_dimensions(i, number)
    if pairs is None:
        return axes.mask(operand) | axes.mask(i)
    # A matrix beside its own transpose: of the axes that both have, only those that lie elsewhere are mixed.
    moved = [(d, r) for d, r in pairs if axes.dims(operand)[d] != axes.dims(i)[r]]
    alone = set(range(len(operand.dims))).difference(d for d, _ in pairs)
    return _atoms(operand, [*alone, *(d for d, _ in moved)], axes) | _atoms(i, [r for _, r in moved], axes)


def _same_dimensions(i: Instruction, number: int) -> list[tuple[int, int]] | None:
    """(operand's, result's) dimensions along which an instruction reads an operand where it writes, if they have the
    same axes; None where it is not that simple."""
    operand = i.operands[number]
    if i.opcode == "broadcast":
        return list(enumerate(i.attrs["dimensions"]))
    if i.opcode == "transpose":
        return [(d, r) for r, d in enumerate(i.attrs["dimensions"])]
    if i.opcode == "dot":
        batch = [i.attrs["lhs_batch_dims"], i.attrs["rhs_batch_dims"]]
        summed = [i.attrs["lhs_contracting_dims"], i.attrs["rhs_contracting_dims"]]
        ranks = [len(o.dims) for o in i.operands]
        free = [[d for d in range(ranks[n]) if d not in batch[n] and d not in summed[n]] for n in (0, 1)]
        first = len(batch[0]) + (len(free[0]) if number else 0)
        return [*((d, r) for r, d in enumerate(batch[number])), *((d, first + r) for r, d in enumerate(free[number]))]
    if OPCODES[i.opcode].kind is Kind.ELEMENTWISE and operand.dims == i.dims:
        return [(d, d) for d in range(len(i.dims))]
    return None


def _batches_of_gather(i: Instruction) -> list[tuple[int, int]]:
    """(operand's, result's) dimensions of a gather's batches."""
    indices = [d for d in range(len(i.operands[1].dims)) if d != i.attrs["index_vector_dim"]]
    results = [d for d in range(len(i.dims)) if d not in i.attrs["offset_dims"]]
    pairs = zip(i.attrs["operand_batching_dims"], i.attrs["start_indices_batching_dims"], strict=True)
    return [(d, results[indices.index(at)]) for d, at in pairs]


def _touched(i: Instruction, operand: Instruction) -> list[int]:
    if i.opcode == "slice":
        return [d for d, (s, n) in enumerate(zip(i.attrs["slice"], operand.dims, strict=True)) if s != (0, n, 1)]
    if i.opcode == "pad":
        return [d for d, p in enumerate(i.attrs["padding"]) if tuple(p) != (0, 0, 0)]
    if i.opcode in ("reverse", "concatenate"):
        return list(i.attrs["dimensions"])
    whole = i.operands[0].dims if i.opcode == "dynamic-update-slice" else i.dims
    return [d for d, (a, b) in enumerate(zip(whole, operand.dims, strict=True)) if a != b]


def _atoms(i: Instruction, dimensions: list[int] | tuple[int, ...], axes: Axes) -> int:
    return sum({1 << atom for d in dimensions for atom in axes.dims(i)[d]})


def is_array(i: Instruction) -> bool:
    return isinstance(i.shape, Shape) and i.array.size > 1


def body_values(loop: Instruction) -> Iterator[Instruction]:
    """Everything that the loop and those nested in it compute or read of their states."""
    for s in loops_of(loop):
        yield from s.elements
        yield from s.values
