"""What a loop costs: operations of a lane by unit over all steps, registers, and how often it reads its state."""
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hlofuse.fusion.loop_space import loop_space, loops_of, mixed_by, span
from hlofuse.fusion.loop_structure import LoopStructure, has_structure, loop_structure
from hlofuse.fusion.plan import Refusal
from hlofuse.hlo.module import Instruction
from hlofuse.hlo.opcode import OPCODES
from hlofuse.hlo.shape import Shape

if TYPE_CHECKING:
    from hlofuse.fusion.axes import Axes

ASSUMED_TRIPS = 32     # of a loop whose end depends on data


def trips(s: LoopStructure) -> int:
    return ASSUMED_TRIPS if s.counter is None else s.counter.trips


@functools.lru_cache(maxsize=256)
def loop_work(loop: Instruction) -> dict[str, float]:
    """Operations by unit of one lane, all steps together. An array's are spread over the lanes of the largest carry."""
    s = loop_structure(loop)
    lanes = max([s.shape(k).size for k in s.carries] + [t.update.array.size for t in s.stacked], default=1)
    found: dict[str, float] = {}
    for i in s.values:
        if i.opcode == "while":
            if has_structure(i):
                for unit, ops in loop_work(i).items():
                    found[unit] = found.get(unit, 0.0) + ops
            continue
        row = OPCODES[i.opcode]
        if i not in s.varying or not isinstance(i.shape, Shape) or row.unit == "none":
            continue
        unit = "f64" if i.element_type in ("f64", "c128") and row.unit != "int" else row.unit
        found[unit] = found.get(unit, 0.0) + row.ops * max(1.0, i.array.size / lanes)
    return {unit: ops * trips(s) for unit, ops in found.items()}


def body_size(loop: Instruction) -> int:
    """How many instructions a step has."""
    return sum(1 for s in loops_of(loop) for i in s.values if i.opcode not in ("tuple", "get-tuple-element"))


class LoopCost:
    """The figures of one loop in the axes of its program."""

    def __init__(self, loop: Instruction, axes: Axes) -> None:
        s = loop_structure(loop)
        self.space = loop_space(loop, axes)
        self.work = loop_work(loop)
        self.lanes = span(self.space.lanes, axes)
        self.registers = loop_registers(loop, axes)
        self.inner_atom = -1
        for k in s.carries:
            atoms = [a for a in axes.atoms(s.update(k)) if self.space.lanes >> a & 1]
            if atoms:
                self.inner_atom = atoms[-1]
        self.stacked = frozenset(t.index for t in s.stacked)


def loop_domain(loops: Sequence[LoopCost], reductions: Sequence[Instruction]) -> int:
    """The lanes that loops of one kernel share; `Refusal` where there are none, or beside large `reductions`."""
    if reductions:
        raise Refusal("producer-consumer", "{} reduces more than a lane may, beside a loop", reductions[0])
    lanes = {loop.space.lanes for loop in loops}
    if len(lanes) > 1:
        raise Refusal("shape", "the loops run over different lanes")
    return lanes.pop()


def loop_registers(loop: Instruction, axes: Axes) -> int:
    """Registers of a thread with one lane: its carries, what is kept for every step, and what one step reads, writes
    and has under way. ptxas's figures for sm_90 are within a third of it."""
    space, words = loop_space(loop, axes), 0.0
    for s in loops_of(loop):
        for k in s.carries:
            words += 1.5 * _places(s.update(k), s.shape(k), space.inner, axes)
        for t in s.stacked:
            words += 2 + _places(t.update, t.update.array, space.inner, axes)
        whole = _read_whole(s)
        for reader, k in s.elements.items():
            if k in s.invariants:
                words += 1 + _places(reader, s.shape(k), ~space.lanes if reader in whole else space.inner, axes)
        for i in whole.difference(s.elements):
            words += _places(i, i.array, ~space.lanes, axes)
    return int(16 + words + 0.5 * body_size(loop) ** 0.5)


def _read_whole(s: LoopStructure) -> set[Instruction]:
    """What each step needs in full although no step changes it, as a matrix of weights: compilers load it once."""
    found: set[Instruction] = set()
    for i in s.values:
        if i not in s.varying or i.opcode in ("while", "tuple"):
            continue
        for number, o in enumerate(i.operands):
            while o.opcode in ("broadcast", "reshape") and o not in s.elements and o not in s.varying:
                o = o.operands[0]
            is_table = number == 0 and i.opcode in ("gather", "dynamic-slice")
            if o not in s.varying and o.opcode not in ("constant", "iota", "parameter") and not is_table:
                found.add(o)
    return found


def _places(i: Instruction, shape: Shape, inner: int, axes: Axes) -> float:
    """The words of an element's places in one lane."""
    return span(axes.mask(i) & inner, axes) * max(1.0, shape.dtype.itemsize / 4)


def element_reads(loop: Instruction, axes: Axes) -> dict[int, tuple[int, int]]:
    """How often the loop reads the initial value of each state element, 0 where each lane reads its own, once; and the
    atoms along which that is elsewhere (-1: any)."""
    s = loop_structure(loop)
    space = loop_space(loop, axes)
    found = dict.fromkeys(range(len(s.body.root.operands)), (0, 0))
    for k in s.carries:
        if (loop, k) in axes.shifted:
            found[k] = s.shape(k).size, -1
    for t in s.stacked:
        if not t.is_covered:
            found[t.index] = s.update(t.index).array.size, -1
    readers: dict[Instruction, list[tuple[Instruction, int]]] = {}
    for i in s.values:
        for number, o in enumerate(i.operands):
            readers.setdefault(o, []).append((i, number))
    for reader, k in s.elements.items():
        if k not in s.invariants:
            continue
        uses = readers.get(reader, [])
        elsewhere = axes.mask(reader) & ~(space.lanes | space.inner)
        if elsewhere or any((i, n) in axes.shifted or i.opcode == "while" for i, n in uses):
            often, mixed = found[k]
            often += sum(_array_size(i) * (trips(s) if i in s.varying else 1) for i, _ in uses)
            if any(i.opcode == "while" for i, _ in uses) or mixed < 0:
                mixed = -1
            else:
                mixed |= elsewhere | functools.reduce(int.__or__, [mixed_by(i, n, axes) for i, n in uses], 0)
            found[k] = often, mixed
    return found


def _array_size(i: Instruction) -> int:
    return sum(shape.size for shape in i.result_shapes)
