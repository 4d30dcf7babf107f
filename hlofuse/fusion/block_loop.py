"""Block loops: a loop whose steps read what the last step left elsewhere in an array, run by one block.

The axes that all carries share and no step mixes are blocks; what a carry has beyond them is its *tile*, which lies
twice in the block's shared memory: each step reads one copy and writes the other. Values that are read at several
places and dear, and reductions over the tile, are *stored* in arrays of their own, in phases with a barrier between;
everything else is computed where it is read.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hlofuse.fusion.axes import Axes
from hlofuse.fusion.element_work import operations_of
from hlofuse.fusion.loop_space import body_values, lane_dependent, mixed_atoms, span, uniform_carries, value_text
from hlofuse.fusion.loop_structure import LoopRefusal, LoopStructure, loop_structure
from hlofuse.fusion.plan import AXIS_NAMES, Axis, Plan, Refusal, merge_atoms, reduced_size
from hlofuse.hlo.module import Computation, Instruction
from hlofuse.hlo.shape import Shape

INLINE_TERMS = 8         # of a reduction or a product that a thread computes where it is read
MAX_NUMBERS = 64         # words of the state that each thread holds
LEAST_BLOCKS = 8         # that are left where neighbors become one
VECTOR = 16              # neighbors in memory that are worth a vector
MAX_SITES = 24           # places at which a value is written out
TURNED_BYTES = 24 * 1024     # of a matrix that is copied for its columns
BARRIER_OPS = 256        # what a phase of its own costs, in operations of a block
WEIGHTS = {"special": 16.0, "div": 5.0, "f64": 2.0}    # of a unit's operations, beside one of the others


@dataclass(frozen=True, eq=False)
class BlockLoop:
    """`lanes` are the atoms that blocks run over; `stored` maps what has an array or a number of its own in each step
    to its phase, `fixed` is what the steps share; `work` is the operations of one block in one step, by unit."""

    structure: LoopStructure
    lanes: int
    stored: Mapping[Instruction, int]
    fixed: tuple[Instruction, ...]
    home: Mapping[Instruction, int]      # stored values that are a carry's next value
    in_place: Mapping[int, tuple[Instruction, ...]]    # what writes small parts of a carry, one after another
    single: frozenset[int]               # carries that lie once: points that the last phase reads, it writes itself
    turned: Mapping[Instruction, tuple[int, ...]]      # what steps read along its rows, copied with columns as rows
    mixed: int                           # atoms along which a step reads elsewhere
    shared_bytes: int
    points: int                          # of the largest array of a step
    work: Mapping[str, float]
    phases: int


def block_loop(loop: Instruction, axes: Axes, joined: int = 0) -> BlockLoop:
    """`LoopRefusal` where no block runs the loop. `joined` are atoms of the tile that could be blocks."""
    s = loop_structure(loop)
    if s.nested:
        raise LoopRefusal("state", "a step has a loop of its own")
    for t in s.stacked:
        if t.reads:
            raise LoopRefusal("state", f"a step reads the slice of {value_text(s.update(t.index))} that it writes")
    lanes = _lanes(s, axes) & ~joined
    for value in _state_values(s):
        _check_reached(value, axes)
    block = _Phases(s, axes, lanes).result()
    if block.points < 2:
        raise LoopRefusal("shape", "a block would have one element of each array")
    words = sum(max(1.0, s.shape(k).dtype.itemsize / 4) for k in s.carries
                if not axes.mask(carry_value(s, k)) & ~lanes)
    if words > MAX_NUMBERS:
        raise LoopRefusal("memory", f"the numbers of the state are {words:g} words, the limit is {MAX_NUMBERS}")
    return block


def _state_values(s: LoopStructure) -> list[Instruction]:
    return [*(carry_value(s, k) for k in s.carries), *(t.update for t in s.stacked)]


def carry_value(s: LoopStructure, k: int) -> Instruction:
    """Whose axes are the carry's."""
    return s.readers.get(k, s.update(k))


def _check_reached(value: Instruction, axes: Axes) -> None:
    atoms = axes.atoms(value)
    if len(set(atoms)) != len(atoms) or math.prod(axes.size(a) for a in atoms) != value.array.size:
        raise LoopRefusal("shape", f"the axes of {value_text(value)} do not reach each of its elements once")


# --- blocks -----------------------------------------------------------------------------------------------------------

def _lanes(s: LoopStructure, axes: Axes) -> int:
    """The atoms of the blocks: as many as there are, for the loop needs no other block's elements."""
    refusal: LoopRefusal | None = None
    for uniform in dict.fromkeys((frozenset[int](), uniform_carries(s))):
        lanes = _shared_axes(s, axes, uniform)
        try:
            if lanes:
                _check_apart(s, axes, lanes, uniform)
        except LoopRefusal as found:
            refusal, lanes = found, 0
        if lanes:
            return lanes
    if s.lanes_leave:
        if s.predicate.array.size > 1:
            raise refusal or LoopRefusal("lanes", f"the condition {value_text(s.predicate)} is not one number for each "
                                         "block")
    return 0


def _shared_axes(s: LoopStructure, axes: Axes, uniform: frozenset[int]) -> int:
    moving = lane_dependent([s], uniform)
    shared = [s.predicate] if s.lanes_leave else []
    shared += [carry_value(s, k) for k in s.carries if s.shape(k).size > 1 and k not in uniform]
    shared += [t.update for t in s.stacked if t.update.array.size > 1 and not (uniform and t.update not in moving)]
    lanes = -1 if shared else 0
    for value in shared:
        lanes &= axes.mask(value)
    return lanes & ~mixed_atoms([s], moving, axes) if lanes else 0


def _check_apart(s: LoopStructure, axes: Axes, lanes: int, uniform: frozenset[int]) -> None:
    """What is the same for all blocks depends on none of them."""
    moving = lane_dependent([s], uniform)
    for k in s.carries:
        if not axes.mask(carry_value(s, k)) & lanes and (s.update(k) in moving or s.initial(k) in moving):
            raise LoopRefusal("lanes", f"element {k} of the state depends on all blocks")
    for t in s.stacked:
        if t.position in moving or (t.update in moving and not axes.mask(t.update) & lanes):
            raise LoopRefusal("lanes", "what a step writes depends on all blocks")
    for value in (*_state_values(s), s.predicate):
        if axes.mask(value) & lanes not in (0, lanes):
            raise LoopRefusal("shape", f"{value_text(value)} has some of the blocks' axes")
    if s.lanes_leave and axes.mask(s.predicate) & ~lanes:
        raise LoopRefusal("lanes", f"the condition {value_text(s.predicate)} is not one number for each block")
    if not s.lanes_leave and s.predicate in moving:
        raise LoopRefusal("lanes", "the condition depends on all blocks")


# --- phases -----------------------------------------------------------------------------------------------------------

Site = tuple[bool, int]     # whether the last phase of a step evaluates there, and a number of the place


class _Phases:
    """Chooses what has an array of its own. Readers come first: how often a value is evaluated is known when all of
    them are; what is stored is evaluated once, whoever reads it."""

    def __init__(self, s: LoopStructure, axes: Axes, lanes: int) -> None:
        self.s, self.axes, self.lanes = s, axes, lanes
        self.sites: dict[Instruction, dict[Site, float]] = {}
        self.reads: dict[int, set[Site]] = {}
        self.cones: dict[Instruction, frozenset[Instruction]] = {}
        self.stored: set[Instruction] = set()
        self.fixed: list[Instruction] = []
        self.turned: dict[Instruction, tuple[int, ...]] = {}
        self.work: dict[str, float] = {}

    def points(self, value: Instruction) -> int:
        return span(self.axes.mask(value) & ~self.lanes, self.axes)

    def tile_atoms(self, value: Instruction) -> tuple[int, ...]:
        return tuple(a for a in self.axes.atoms(value) if not self.lanes >> a & 1)

    def result(self) -> BlockLoop:
        s = self.s
        self._collect_cones()
        in_place = {k: chain for k in s.carries if (chain := _written_in_place(s, k))}
        pairs = [(carry_value(s, k), s.update(k)) for k in s.carries if k not in in_place]
        pairs += [(i, i) for i in (*(t.update for t in s.stacked), s.predicate, *(t.position for t in s.stacked))]
        pairs += [(o, o) for chain in in_place.values() for i in chain for o in i.operands[1:]]
        self.parts = {i.operands[1] for chain in in_place.values() for i in chain}
        for place, value in pairs:
            self._read(value, (True, hash(self.tile_atoms(place))), float(self.points(place)))
        for i in reversed(s.values):
            if i in self.sites:
                self._visit(i)
        levels = self._levels()
        home = self._homes()
        single = self._single() - set(home.values()) | set(in_place)
        arrays = [*((carry_value(s, k), 1 if k in single else 2) for k in s.carries),
                  *((i, 1) for i in {*self.stored, *self.fixed, *self.turned} if i not in home)]
        shared = sum(copies * self.points(i) * item_bytes(i) for i, copies in arrays if self.points(i) > 1)
        points = max([1, *(self.points(i) for i in (*self.stored, *self.fixed, *_state_values(s)))])
        order = sorted(levels, key=levels.__getitem__)
        mixed = mixed_atoms([s], lane_dependent([s], frozenset()), self.axes)
        return BlockLoop(s, self.lanes, {i: levels[i] for i in order}, tuple(reversed(self.fixed)), home, in_place,
                         single, self.turned, mixed, shared, points, self.work, 1 + len(set(levels.values())))

    def _collect_cones(self) -> None:
        """What computing a value where it is read computes again."""
        for i in self.s.values:
            cone: set[Instruction] = {i}
            if not self._must_be_stored(i):
                for o in i.operands:
                    cone |= self.cones.get(o, frozenset())
            self.cones[i] = frozenset(cone) if not self._must_be_stored(i) else frozenset()

    def _must_be_stored(self, i: Instruction) -> bool:
        return terms_of(i) > INLINE_TERMS

    def _read(self, value: Instruction, site: Site, count: float) -> None:
        if value in self.s.elements:
            self.reads.setdefault(self.s.elements[value], set()).add(site)
        if value in self.s.elements or value.opcode in ("constant", "parameter", "iota"):
            return
        sites = self.sites.setdefault(value, {})
        sites[site] = max(sites.get(site, 0.0), count)

    def _visit(self, i: Instruction) -> None:
        sites = self.sites[i]
        evaluations, terms = sum(sites.values()), terms_of(i)
        if self._is_stored(i, sites, evaluations):
            (self.stored.add if i in self.s.varying else self.fixed.append)(i)
            if i.opcode == "dot":
                self._turn(i)
            evaluations = float(self.points(i))
            sites = {(False, hash(i.operands[0] if i.opcode == "get-tuple-element" else i)): evaluations}
        unit, ops, wide = operations_of(i)
        if i.opcode == "dot":
            unit, ops = "f64" if i.element_type == "f64" else "fp", 2.0
        if i in self.s.varying and ops:
            self.work[unit] = self.work.get(unit, 0.0) + ops * wide * evaluations * terms
        folded = i.operands[:len(i.operands) // 2] if i.opcode in ("reduce", "reduce-window") else i.operands
        for number, operand in enumerate(folded):
            share = self._share(i, number)
            elsewhere = (i, number) in self.axes.shifted or terms > 1
            for site, count in sites.items():
                place = (site[0], hash((i, 0 if i.opcode == "concatenate" else number, site)))
                self._read(operand, place if elsewhere else site, count * terms * share)
        for operand in i.operands[len(folded):]:
            self._read(operand, (True, 0), 1.0)

    def _turn(self, dot: Instruction) -> None:
        """A small matrix whose rows are folded, the same in all steps: neighbor results should be neighbors."""
        left, right = dot.operands
        batch, over = len(dot.attrs.get("rhs_batch_dims", ())), tuple(dot.attrs["rhs_contracting_dims"])
        if len(right.dims) > batch + len(over):
            matrix = right
        else:
            matrix, over = left, tuple(dot.attrs["lhs_contracting_dims"])
        is_same = matrix not in self.s.varying and not self.axes.mask(matrix) & self.lanes
        size = matrix.array.size * item_bytes(matrix)
        if is_same and len(matrix.dims) - 1 in over and self.points(dot) >= INLINE_TERMS and size <= TURNED_BYTES and \
                len(set(self.axes.atoms(matrix))) == len(self.axes.atoms(matrix)):
            self.turned[matrix] = (*over, *(d for d in range(len(matrix.dims)) if d not in over))

    def _share(self, i: Instruction, number: int) -> float:
        """How often one element needs an operand, at most once."""
        if i.opcode in ("concatenate", "pad") or (i.opcode == "dynamic-update-slice" and number == 1):
            return min(1.0, i.operands[number].array.size / max(1, i.array.size)) if number < 2 or i.opcode != "pad" \
                else 0.0
        return 1.0

    def _is_stored(self, i: Instruction, sites: Mapping[Site, float], evaluations: float) -> bool:
        if not isinstance(i.shape, Shape):
            return False     # its get-tuple-elements are
        producer = i.operands[0] if i.opcode == "get-tuple-element" else i
        size = self.points(i)
        if i in self.turned:
            return True
        if producer.opcode in ("reduce", "dot") and terms_of(producer) > 1:
            return terms_of(producer) > INLINE_TERMS or (evaluations > size and terms_of(producer) > 2)
        if size == 1:
            return False
        if i in self.parts and i in self.s.varying:
            return True      # until all have read what it overwrites
        again = (evaluations - size) * sum(self._ops(c) for c in self.cones[i])
        return again > 3 * size + evaluations + BARRIER_OPS or (len(sites) > MAX_SITES and again > 0)

    def _ops(self, i: Instruction) -> float:
        if i.opcode == "dot":
            return 2.0 * terms_of(i)
        unit, ops, wide = operations_of(i)
        return ops * wide * WEIGHTS.get(unit, 1.0) * (terms_of(i) if i.opcode == "reduce" else 1)

    def _levels(self) -> dict[Instruction, int]:
        """The phase of each stored value: after those that it reads."""
        below: dict[Instruction, int] = {}
        levels: dict[Instruction, int] = {}
        for i in self.s.values:
            level = max((below.get(o, 0) for o in i.operands), default=0)
            if i in self.stored:
                levels[i] = level
                level += 1
            below[i] = level
        return levels

    def _single(self) -> frozenset[int]:
        found = set()
        for k in self.s.carries:
            own = (True, hash(self.tile_atoms(carry_value(self.s, k))))
            if all(site == own or not site[0] for site in self.reads.get(k, ())):
                found.add(k)
        return frozenset(found)

    def _homes(self) -> dict[Instruction, int]:
        """A stored value that is what a carry becomes needs no array beside the carry's next one."""
        s, found = self.s, {}
        for k in s.carries:
            value, update = carry_value(s, k), s.update(k)
            if update in self.stored and update not in found and self.points(value) > 1 and \
                    self.axes.dims(value) == self.axes.dims(update):
                found[update] = k
        return found


def _written_in_place(s: LoopStructure, k: int) -> tuple[Instruction, ...]:
    """The dynamic-update-slices that make a carry's next value of its last one, innermost first, where they write less
    than half of it."""
    chain: list[Instruction] = []
    value = s.update(k)
    while value.opcode == "dynamic-update-slice":
        chain.append(value)
        value = value.operands[0]
    written = sum(i.operands[1].array.size for i in chain)
    is_whole = s.elements.get(value) != k or 2 * written > s.shape(k).size or not written
    return () if is_whole else tuple(reversed(chain))


def terms_of(i: Instruction) -> int:
    """How many elements of its operands one element of a value folds."""
    if i.opcode == "reduce":
        return reduced_size(i)
    if i.opcode == "dot":
        return math.prod(i.operands[0].dims[d] for d in i.attrs["lhs_contracting_dims"])
    if i.opcode == "reduce-window":
        return math.prod(w.size for w in i.attrs["window"])
    return 1


def item_bytes(i: Instruction) -> int:
    """Of an element in shared memory, where 16-bit floats are held in 32 bits."""
    return 4 if i.element_type in ("f16", "bf16") else i.array.dtype.itemsize


# --- the plan ---------------------------------------------------------------------------------------------------------

def plan_block_loop(computation: Computation, joined_bytes: int = 0) -> Plan:
    """The plan of a cluster that is one loop and what its initial state is written from; `Refusal` where there is
    none. Its axes are the blocks', of which neighbors become one as far as their arrays have `joined_bytes`."""
    instructions = computation.instructions
    loops = [i for i in instructions if i.opcode == "while"]
    if len(loops) != 1 or any(o.opcode != "get-tuple-element" or o.operands[0] is not loops[0]
                              for o in computation.outputs):
        raise Refusal("producer-consumer", "a loop that a block runs shares no kernel")
    analysis = Axes(instructions)
    values = [*instructions, *body_values(loops[0])]
    try:
        block = block_loop(loops[0], analysis)
        order = _layout(block, values, analysis)
        together = _joined(block, order, analysis, joined_bytes)
        if together > 1:
            inner, size = order[-1], analysis.size(order[-1])
            analysis = Axes(instructions)
            if together < size:
                _, inner = analysis.split(inner, size // together)
            block = block_loop(loops[0], analysis, 1 << inner)
            order = _layout(block, values, analysis)
    except LoopRefusal as refusal:
        raise Refusal("producer-consumer", str(refusal)) from None
    axes = merge_atoms(values, analysis, order)
    return Plan(computation, analysis, axes, {}, (), loops=(loops[0],), block=block)


def _layout(block: BlockLoop, values: Sequence[Instruction], axes: Axes) -> list[int]:
    """The blocks' atoms as the widest array lies."""
    if not block.lanes:
        return []
    whole = [i for i in values if isinstance(i.shape, Shape) and axes.mask(i) & block.lanes == block.lanes]
    return [a for a in axes.atoms(max(whole, key=lambda i: i.array.byte_size)) if block.lanes >> a & 1]


def _joined(block: BlockLoop, order: Sequence[int], axes: Axes, limit: int) -> int:
    """How many neighbor blocks become one. Where they are neighbors in memory, they are a vector's lanes, or none."""
    s = block.structure
    if not order or not s.carries or s.lanes_leave:
        return 1
    widest = max((carry_value(s, k) for k in s.carries), key=lambda i: i.array.byte_size)
    is_inner = axes.atoms(widest)[-1:] == (order[-1],)
    size, least = axes.size(order[-1]), VECTOR if is_inner else 1
    most = min(size, limit * (VECTOR if is_inner else 1) // max(1, block.shared_bytes),
               span(block.lanes, axes) // LEAST_BLOCKS)
    return max([n for n in range(least, most + 1) if size % n == 0], default=1)


def tile_axes(plan: Plan, value: Instruction) -> tuple[Axis, ...]:
    """The loops over what a block has of a value, outermost first."""
    assert plan.block is not None
    order = [a for a in plan.analysis.atoms(value) if not plan.block.lanes >> a & 1]
    values = [*plan.computation.instructions, *body_values(plan.loops[0])]
    merged: list[Axis] = []
    for is_mixed, run in itertools.groupby(order, lambda a: bool(plan.block and plan.block.mixed >> a & 1)):
        for atoms in [[a] for a in run] if is_mixed else [list(run)]:    # a branch of one axis is none of another
            merged += merge_atoms(values, plan.analysis, atoms)
    first = len(plan.axes)
    return tuple(Axis(AXIS_NAMES[first + n] if first + n < len(AXIS_NAMES) else f"axis{first + n}", a.size, False,
                      a.atoms) for n, a in enumerate(merged))
