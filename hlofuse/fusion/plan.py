"""The plan of one cluster: which loops a kernel runs and which reductions it schedules.

A cluster is a computation: its parameters are read from memory, its outputs written. The plan names the *domain* D (the
axes that the kernel iterates over), splits it into parallel axes P and reduced axes R, orders them by how memory is
laid out, and gives each scheduled reduction its level (how many scheduled reductions are below it). What is not aligned
with the domain is computed where it is read. A cluster without a plan is refused with a reason.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from hlofuse.fusion.axes import Axes
from hlofuse.fusion.cumulative import cumulative_of, is_scanned
from hlofuse.fusion.loop_space import MAX_PLACES, LoopSpace, body_values, loop_space, span
from hlofuse.fusion.loop_structure import LoopRefusal, loop_structure
from hlofuse.hlo.index_map import Index, delinearize, linearize
from hlofuse.hlo.module import Computation, Instruction
from hlofuse.hlo.shape import Shape

if TYPE_CHECKING:
    from hlofuse.fusion.block_loop import BlockLoop
    from hlofuse.fusion.scatter import Scatter

INLINE_REDUCTION = 32        # a reduction of at most so many elements is a loop inside the thread that reads it
UNROLLED_REDUCTION = 4       # one of at most so many is written out; one of more that is read again at each element
                             # that it folds, is scheduled like a large one
NESTED_REDUCTION = 1024      # so is one of at most so many inside a scheduled reduction of other axes
AXIS_NAMES = ("i", "j", "k", "m", "n", "p", "q", "r", "s", "t", "u", "w")


class Refusal(Exception):
    """Why instructions cannot share a kernel: `rule` is one of the five legality rules, the message has the numbers.

    `instructions` fill the message's braces only when somebody reads it: the search refuses thousands of times.
    """

    def __init__(self, rule: str, message: str, *instructions: Instruction) -> None:
        super().__init__(rule, message, *instructions)
        self.rule = rule
        self.message = message
        self.instructions = instructions

    def __str__(self) -> str:
        return self.message.format(*map(repr, self.instructions))

    def text(self, names: Mapping[Instruction, str]) -> str:
        """The message with the names that a text gives to the instructions."""
        return self.message.format(*(names.get(i, repr(i)) for i in self.instructions))


@dataclass(frozen=True)
class Axis:
    """One loop of the domain: atoms that every value of the cluster keeps together."""

    name: str
    size: int
    reduced: bool
    atoms: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """`axes` are the domain's loops, outermost first; `levels` the scheduled reductions. With `scatters` the axes are
    those of the arrays that they write."""

    computation: Computation
    analysis: Axes
    axes: tuple[Axis, ...]
    levels: Mapping[Instruction, int]
    staged: tuple[Instruction, ...]     # parameters to read through a tile, because they are laid out across the lanes
    scatters: tuple[Scatter, ...] = ()
    scans: tuple[Instruction, ...] = ()   # cumulative operations along the reduced axes, all in one direction
    loops: tuple[Instruction, ...] = ()   # each runs whole inside a lane,
    block: BlockLoop | None = None        # or the only one inside a block

    @property
    def parallel(self) -> tuple[Axis, ...]:
        return tuple(a for a in self.axes if not a.reduced)

    @property
    def reduced(self) -> tuple[Axis, ...]:
        return tuple(a for a in self.axes if a.reduced)

    @property
    def lanes_reduced(self) -> bool:
        """Whether neighboring elements belong to one reduction (a row) and not to neighboring ones (columns)."""
        return bool(self.levels or self.scans) and bool(self.axes) and self.axes[-1].reduced

    def turned(self) -> Plan:
        """The same with the lanes over neighboring rows and the loops along each row."""
        return replace(self, axes=(*self.reduced, *self.parallel))

    @property
    def points(self) -> int:
        """How many elements the loops visit."""
        tile = self.block.points if self.block else 1
        return math.prod(a.size for a in self.axes) * tile + sum(s.updates.array.size for s in self.scatters)

    @cached_property
    def domain_mask(self) -> int:
        return sum(1 << atom for axis in self.axes for atom in axis.atoms)

    @cached_property
    def parallel_mask(self) -> int:
        return sum(1 << atom for axis in self.parallel for atom in axis.atoms)

    def canonical(self, instruction: Instruction, where: Mapping[str, Index]) -> tuple[Index, ...]:
        """The indices of an aligned value, given the index of every axis."""
        atom_index = self._atom_index(where)
        size = self.analysis.size
        return tuple(linearize([atom_index[a] for a in dim], [size(a) for a in dim])
                     for dim in self.analysis.dims(instruction))

    def _atom_index(self, where: Mapping[str, Index]) -> dict[int, Index]:
        found: dict[int, Index] = {}
        for axis in self.axes:
            sizes = [self.analysis.size(a) for a in axis.atoms]
            found.update(zip(axis.atoms, delinearize(where[axis.name], sizes), strict=True))
        return found


@dataclass(frozen=True, eq=False)
class Segment:
    """One plan of a launch: which of the cluster's operands it reads and which results it writes, by position."""

    plan: Plan
    operands: tuple[int, ...]
    results: tuple[int, ...]


def make_plan(computation: Computation) -> Plan:
    """The plan of a cluster; `Refusal` where there is none."""
    instructions = computation.instructions
    analysis = Axes(instructions)
    for output in computation.outputs[1:]:   # in the whole program, what reads both may be what aligns them
        analysis.align(computation.outputs[0], output)
    large = [i for i in instructions if i.opcode == "reduce" and reduced_size(i) > INLINE_REDUCTION]
    for r in large[1:]:
        if r.attrs["dimensions"] == large[0].attrs["dimensions"]:
            analysis.align(large[0].operands[0], r.operands[0])
    masks = {i: analysis.mask(i) for i in instructions}
    outputs = computation.outputs
    scans = tuple(i for i in instructions if is_scanned(i))
    loops = tuple(i for i in instructions if i.opcode == "while")
    if loops:
        return _plan_loops(computation, analysis, masks, loops)
    scheduled, domain, reduced = _schedule(instructions, analysis, masks, outputs, scans)
    parallel = domain & ~reduced
    for value in (*outputs, *scans, *(r.operands[0] for r in scheduled)):
        check_axes(value, analysis)
    for r in scheduled:
        for other in r.operands[1:len(r.operands) // 2]:
            if analysis.dims(other) != analysis.dims(r.operands[0]):
                raise Refusal("shape", "the operands of {} lie along different axes", r)
    for output in outputs:
        mask = masks[output]
        if mask not in (domain, parallel):
            raise Refusal("shape", "{} covers other axes than the kernel's domain", output)
    levels = _levels(instructions, scheduled)
    order = _order(computation, analysis, masks, domain, reduced, (*scheduled, *scans))
    axes = merge_atoms(instructions, analysis, order, reduced)
    staged = _staged(computation, analysis, masks, domain, axes) if not scheduled and not scans else ()
    return Plan(computation, analysis, axes, levels, staged, scans=scans)


def _plan_loops(computation: Computation, analysis: Axes, masks: Mapping[Instruction, int],
                loops: tuple[Instruction, ...]) -> Plan:
    """The loops' lanes are the domain; a result may have small axes beyond it, which each lane writes in full."""
    try:
        space = functools.reduce(LoopSpace.__or__, [loop_space(loop, analysis) for loop in loops])
    except LoopRefusal as refusal:
        raise Refusal("producer-consumer", str(refusal)) from None
    for i in computation.instructions:
        if i.opcode == "reduce" and reduced_size(i) > INLINE_REDUCTION:
            raise Refusal("producer-consumer", "{} reduces more than a lane may, beside a loop", i)
    stacked = stacked_results(computation)
    for output in computation.outputs:
        beyond = masks[output] & ~space.lanes
        if output in stacked or (not masks[output] & space.lanes and span(beyond, analysis) <= MAX_PLACES):
            continue
        if masks[output] & space.lanes != space.lanes or span(beyond, analysis) > MAX_PLACES:
            raise Refusal("shape", "{} covers other axes than the loop's lanes", output)
        check_axes(output, analysis)
    values = [*computation.instructions, *(i for loop in loops for i in body_values(loop))]
    whole = [i for i in values if isinstance(i.shape, Shape) and analysis.mask(i) & space.lanes == space.lanes]
    layout = analysis.atoms(max(whole, key=lambda i: i.shape.byte_size)) if whole else ()
    order = [a for a in layout if space.lanes >> a & 1]
    return Plan(computation, analysis, merge_atoms(values, analysis, order), {}, (), loops=loops)


def stacked_results(computation: Computation) -> set[Instruction]:
    """What loops write slice by slice while they run."""
    return {i for i in computation.instructions if i.opcode == "get-tuple-element" and i.operands[0].opcode == "while"
            and any(s.index == i.attrs["index"] for s in loop_structure(i.operands[0]).stacked)}


def left_to_loops(computation: Computation) -> tuple[Instruction, ...]:
    """What loops write slice by slice and other members of the cluster read, each lane its own."""
    stacked = stacked_results(computation)
    return tuple(i for i in computation.instructions if i in stacked
                 and any(user is not computation.root for user in computation.users[i]))


def check_axes(value: Instruction, analysis: Axes) -> None:
    """The loops reach every element: the atoms of what they write or reduce are distinct, and of its size."""
    atoms = analysis.atoms(value)
    shape = value.result_shapes[0]
    if len(set(atoms)) != len(atoms) or math.prod(analysis.size(a) for a in atoms) != shape.size:
        raise Refusal("shape", "the axes of {} do not reach each of its elements once", value)


def _schedule(instructions: Sequence[Instruction], analysis: Axes, masks: Mapping[Instruction, int],
              outputs: Sequence[Instruction], scans: Sequence[Instruction]) -> tuple[list[Instruction], int, int]:
    """The reductions to schedule, the domain and its reduced atoms."""
    reductions = [i for i in instructions if i.opcode == "reduce"]
    large = [i for i in reductions if reduced_size(i) > INLINE_REDUCTION]
    returning = [i for i in reductions if i not in large and reduced_size(i) > UNROLLED_REDUCTION
                 and any(masks[i.operands[0]] == masks[o] for o in outputs)]
    if scans:
        main = scans[-1]
        domain, reduced = masks[main], scanned_mask(main, analysis)
        if any(masks[i] != domain or scanned_mask(i, analysis) != reduced for i in scans):
            raise Refusal("producer-consumer", "{} runs along other axes than {}", scans[0], main)
        if len({cumulative.reverse for i in scans if (cumulative := cumulative_of(i))}) > 1:
            raise Refusal("producer-consumer", "{} runs in the other direction than {}", scans[0], main)
    elif not large and not returning:
        domains = {masks[o] for o in outputs}
        if len(domains) != 1:
            raise Refusal("shape", "outputs of different domains")
        return [], domains.pop(), 0
    else:
        main = (large or returning)[-1]
        domain = masks[main.operands[0]]
        reduced = domain & ~_result_mask(main, analysis)
    scheduled = []
    for i in [i for i in reductions if i in large or i in returning]:
        operand = masks[i.operands[0]]
        if operand == domain and operand & ~_result_mask(i, analysis) == reduced:
            scheduled.append(i)
        elif reduced_size(i) > NESTED_REDUCTION:
            raise Refusal("producer-consumer", "{} reduces other axes than {}", i, main)
    return scheduled, domain, reduced


def scanned_mask(scan: Instruction, analysis: Axes) -> int:
    """The atoms along which a cumulative operation runs."""
    cumulative = cumulative_of(scan)
    assert cumulative is not None
    return sum(1 << atom for atom in analysis.dims(scan)[cumulative.dimension])


def reduced_size(reduction: Instruction) -> int:
    """How many elements each result of a reduction folds."""
    dims = reduction.operands[0].dims
    return math.prod(dims[d] for d in reduction.attrs["dimensions"])


def _result_mask(reduction: Instruction, analysis: Axes) -> int:
    return analysis.mask(reduction)


def _levels(instructions: Sequence[Instruction], scheduled: Sequence[Instruction]) -> dict[Instruction, int]:
    below: dict[Instruction, int] = {}
    levels: dict[Instruction, int] = {}
    chosen = set(scheduled)
    for i in instructions:
        level = max((below[o] for o in i.operands), default=0)
        if i in chosen:
            levels[i] = level
            level += 1
        below[i] = level
    return levels


def _order(computation: Computation, analysis: Axes, masks: Mapping[Instruction, int], domain: int, reduced: int,
           scheduled: Sequence[Instruction]) -> tuple[int, ...]:
    """The domain's atoms, outermost loop first: the parallel ones as the widest array lies, the lanes' last."""
    arrays = [*computation.parameters, *computation.outputs]
    whole = [i for i in arrays if isinstance(i.shape, Shape) and masks[i] == domain]
    if not scheduled:
        return analysis.atoms(computation.outputs[0])
    if whole:
        layout = analysis.atoms(max(whole, key=lambda i: i.shape.byte_size))
    else:
        layout = analysis.atoms(scheduled[0].operands[0])
    if not layout:
        return ()
    inside = [a for a in layout if (reduced >> a & 1) == (reduced >> layout[-1] & 1)]
    outside = [a for a in layout if a not in inside]
    return (*outside, *inside)


def merge_atoms(instructions: Sequence[Instruction], analysis: Axes, order: Sequence[int],
                reduced: int = 0) -> tuple[Axis, ...]:
    """Atoms that every value which has one of them holds side by side become one axis."""
    sequences = [analysis.atoms(i) for i in instructions if isinstance(i.shape, Shape) or i.opcode == "reduce"]
    runs: list[list[int]] = []
    for atom in order:
        if runs and (reduced >> runs[-1][-1] & 1) == (reduced >> atom & 1) and _adjacent(sequences, runs[-1][-1], atom):
            runs[-1].append(atom)
        else:
            runs.append([atom])
    return tuple(Axis(_axis_name(n), math.prod(analysis.size(a) for a in run), bool(reduced >> run[0] & 1), tuple(run))
                 for n, run in enumerate(runs))


def with_single_axes(plan: Plan, least: int) -> Plan:
    """The plan with an axis of its own for the innermost atom, if it has at least so many elements."""
    if not plan.axes or plan.levels or plan.loops or plan.scans or plan.scatters:
        return plan
    *outer, last = plan.axes
    size = plan.analysis.size(last.atoms[-1])
    if len(last.atoms) < 2 or size < least or size == last.size:
        return plan
    above = Axis(last.name, last.size // size, last.reduced, last.atoms[:-1])
    return replace(plan, axes=(*outer, above, Axis(_axis_name(len(outer) + 1), size, last.reduced, last.atoms[-1:])))


def _axis_name(position: int) -> str:
    return AXIS_NAMES[position] if position < len(AXIS_NAMES) else f"axis{position}"


def _adjacent(sequences: Sequence[tuple[int, ...]], first: int, second: int) -> bool:
    for atoms in sequences:
        has_first, has_second = first in atoms, second in atoms
        if has_first != has_second:
            return False
        if has_first and atoms.index(second) != atoms.index(first) + 1:
            return False
    return True


def _staged(computation: Computation, analysis: Axes, masks: Mapping[Instruction, int], domain: int,
            axes: Sequence[Axis]) -> tuple[Instruction, ...]:
    """Parameters over the whole domain whose neighbors in memory are not neighbors in the innermost loop. Only where
    each is read at the loops' own place: not with a shifted read, nor in a reduction inside a thread."""
    if not axes or any(i.opcode == "reduce" for i in computation.instructions):
        return ()
    if any((i, k) in analysis.shifted for i in computation.instructions for k in range(len(i.operands))):
        return ()
    inner = axes[-1].atoms[-1]
    found = []
    across: int | None = None
    for p in computation.parameters:
        if not isinstance(p.shape, Shape) or masks[p] != domain:
            continue
        last = analysis.atoms(p)[-1]
        if last == inner:
            continue
        if across is None:
            across = last
        if last == across and analysis.size(last) >= 8 and analysis.size(inner) >= 8:
            found.append(p)
    return tuple(found)
