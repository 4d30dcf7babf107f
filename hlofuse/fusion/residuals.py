"""Residuals: what a loop leaves to a later one is as little as the later one can compute the rest from.

    ys: sin(theta), cos(theta); later loop reads both  =>  ys: theta; later loop computes sin(theta), cos(theta) again

Which values are stored is a minimum cut between what a step of the first loop computes and what the later loop reads:
bytes against operations, at the device's rates. Bytes never grow, and the same expressions give the same bits.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hlofuse.codegen.dialect import MIN_TILE_LANES
from hlofuse.codegen.scalar_expr import has_scalar_expr
from hlofuse.fusion.devices import DeviceSpec
from hlofuse.fusion.element_work import operations_of
from hlofuse.fusion.loop_state import renewed, with_body
from hlofuse.fusion.loop_structure import LoopStructure, Stacked, loop_structure
from hlofuse.fusion.minimum_cut import NEVER, cheapest_stores
from hlofuse.hlo.builder import constant, element_of, full, make, parameter, reshape, tuple_of
from hlofuse.hlo.index_map import Var
from hlofuse.hlo.module import Computation, Instruction, post_order
from hlofuse.hlo.opcode import OPCODES, Kind
from hlofuse.hlo.shape import FUSIBLE, Shape, TupleShape
from hlofuse.hlo.traverse import rebuild

MAX_NODES = 800
_SCALE = 1e12     # prices are whole numbers of 1e-12 µs for each element
_FREE = frozenset({"broadcast", "reshape", "slice", "concatenate", "transpose", "reverse", "iota", "pad"})


@dataclass(frozen=True)
class Rewritten:
    """The computation with some loops made anew, known by their bodies; `notes` say what is computed again."""

    computation: Computation
    bodies: frozenset[Computation]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class _Residual:
    """A stacked element of the first loop, and the slices that later loops read of it. `stays`: others read it too."""

    stacked: Stacked
    slices: Mapping[Instruction, tuple[Instruction, ...]]     # by loop
    stays: bool


@dataclass(frozen=True, eq=False)
class _New:
    """The loops in place of the old ones, the first one first, and what their results replace."""

    loops: Sequence[Instruction]
    replaced: Mapping[Instruction, Instruction]


@dataclass(eq=False)
class _Cut:
    """What is stored and computed again of one loop's values; `nodes` are in post-order."""

    structure: LoopStructure
    residuals: Sequence[_Residual]
    nodes: dict[Instruction, int] = field(default_factory=dict)
    operands: list[list[int]] = field(default_factory=list)
    stored: set[Instruction] = field(default_factory=set)


def recompute_residuals(computation: Computation, loops: frozenset[Instruction], device: DeviceSpec,
                        check: Callable[[Instruction], None], refusals: tuple[type[Exception], ...]) -> Rewritten:
    """Looks at each loop that leaves arrays to later ones; `check` raises one of `refusals` where a new loop is no
    kernel, and then both stay as they were."""
    bodies = frozenset(loop.attrs["body"] for loop in loops)
    notes: list[str] = []
    done: set[Computation] = set()
    while True:
        current = [i for i in computation.instructions if i.opcode == "while" and i.attrs["body"] in bodies]
        first = next((i for i in current if i.attrs["body"] not in done), None)
        if first is None:
            return Rewritten(computation, bodies, tuple(notes))
        done.add(first.attrs["body"])
        cut = _cut(computation, first, frozenset(current), device)
        if cut is None:
            continue
        new = _rewrite(cut, computation.users)
        try:
            for loop in new.loops:
                check(loop)
        except refusals:
            continue
        notes += _notes(cut)
        done.add(new.loops[0].attrs["body"])
        bodies |= {loop.attrs["body"] for loop in new.loops}
        computation = rebuild(computation, new.replaced)


# --- what is read -----------------------------------------------------------------------------------------------------

def _residuals(computation: Computation, loop: Instruction, loops: frozenset[Instruction]) -> list[_Residual]:
    s, users = loop_structure(loop), computation.users
    found = []
    for t in s.stacked:
        if not t.is_covered or t.dim or t.reads:
            continue
        slices: dict[Instruction, tuple[Instruction, ...]] = {}
        stays = False
        for result in users[loop]:
            if result.attrs["index"] != t.index:
                continue
            stays = stays or result in computation.outputs
            for user in users[result]:
                later = users[user][0] if user.opcode == "tuple" and len(users[user]) == 1 else None
                read = None if later is None or later not in loops else _slices(later, result)
                if later is None or read is None:
                    stays = True
                else:
                    slices[later] = (*slices.get(later, ()), *read)
        if slices:
            found.append(_Residual(t, slices, stays))
    return [r for r in found if r.stacked.position is found[0].stacked.position]


def _slices(later: Instruction, result: Instruction) -> list[Instruction] | None:
    """The slices of one step each that a later loop reads of an array; None where it reads it otherwise."""
    s = loop_structure(later)
    if s.counter is None:
        return None
    found: list[Instruction] = []
    for k, o in enumerate(later.operands[0].operands):
        if o is not result:
            continue
        if k not in s.invariants:
            return None
        for reader, index in s.elements.items():
            if index != k:
                continue
            for user in s.body.users.get(reader, ()):
                if user is s.body.root:
                    continue
                if user.opcode != "dynamic-slice" or user.operands[0] is not reader or user.dims != (
                        1, *result.dims[1:]) or not _is_inside(user.operands[1], s, result.dims[0]):
                    return None
                found.append(user)
    return found


def _is_inside(start: Instruction, s: LoopStructure, size: int) -> bool:
    place = s.position(start, "t")
    return place is not None and 0 <= place.bounds[0] and place.bounds[1] < size


# --- the cut ----------------------------------------------------------------------------------------------------------

def _cut(computation: Computation, loop: Instruction, loops: frozenset[Instruction], device: DeviceSpec) -> _Cut | None:
    s = loop_structure(loop)
    residuals = _residuals(computation, loop, loops) if s.counter is not None else []
    if not residuals:
        return None
    cut = _Cut(s, residuals)
    _collect(cut)
    if len(cut.nodes) > MAX_NODES:
        return None
    updates = {r.stacked.update for r in residuals}
    lanes = max(u.array.size for u in updates)
    readers = len({later for r in residuals for later in r.slices})
    bandwidth = _bandwidth(residuals, s.counter.trips if s.counter else 1, lanes, device)
    stays = {r.stacked.update for r in residuals if r.stays}
    own = set(post_order((s.predicate, *(s.update(k) for k in s.carries),
                          *(t.update for t in s.stacked if t.update not in updates - stays))))
    store, compute = [], []
    for i in cut.nodes:
        # What is stored already is preferred, and one number for all lanes is as bad as a number for each.
        size = lanes if i.array.size == 1 else i.array.size
        price = 2e3 * size * i.array.dtype.itemsize / lanes / bandwidth * (0.999 if i in updates else 1.001)
        store.append(0 if i in stays else int(price * _SCALE / 1e3) + 2 if i.element_type in FUSIBLE else NEVER)
        again = _again(i, cut, lanes, device, bandwidth)
        times = readers if i in own else readers - 1     # what only residuals need, the first loop need not compute
        compute.append(NEVER if again is None else int(again * times * _SCALE) + 1)
    numbers = cheapest_stores(cut.operands, store, compute, [cut.nodes[u] for u in updates])
    names = list(cut.nodes)
    cut.stored = {names[n] for n in numbers}
    before, after = (sum(i.array.byte_size for i in chosen - stays) for chosen in (updates, cut.stored))
    return cut if cut.stored | stays != updates and after <= before else None


def _bandwidth(residuals: Sequence[_Residual], trips: int, lanes: int, device: DeviceSpec) -> float:
    """Of what is stored: near the thread where there is room for it."""
    tile = sum(r.stacked.update.array.byte_size for r in residuals) / lanes * trips * MIN_TILE_LANES
    return device.l2_bandwidth if tile <= device.tile_bytes else device.bandwidth


def _collect(cut: _Cut) -> None:
    """The values that residuals can be computed from, each after its operands."""
    stack = [(r.stacked.update, False) for r in cut.residuals]
    seen: set[Instruction] = set()
    while stack:
        i, is_open = stack.pop()
        if is_open:
            cut.nodes[i] = len(cut.nodes)
            cut.operands.append([cut.nodes[o] for o in _sources(i, cut)])
        elif i not in seen:
            seen.add(i)
            stack.append((i, True))
            stack.extend((o, False) for o in _sources(i, cut))


def _sources(i: Instruction, cut: _Cut) -> tuple[Instruction, ...]:
    return () if i in cut.structure.elements or not _is_simple(i) else i.operands


def _is_simple(i: Instruction) -> bool:
    """Computed again in a lane from its operands."""
    return i.opcode in _FREE or (OPCODES[i.opcode].kind is Kind.ELEMENTWISE and has_scalar_expr(i))


def _again(i: Instruction, cut: _Cut, lanes: int, device: DeviceSpec, bandwidth: float) -> float | None:
    """µs for each lane of computing a value again; None where that cannot be."""
    s, share = cut.structure, i.array.size / lanes
    if i in s.elements:
        k = s.elements[i]
        return 0.0 if k in s.invariants or _counts(s, k) is not None else None
    if i.opcode == "constant":
        return 0.0
    if _is_slice_of_step(i, cut):
        return share * i.array.dtype.itemsize / bandwidth
    if not _is_simple(i):
        return None
    if i.opcode in _FREE or i not in s.varying:
        return 0.0
    unit, ops, wide = operations_of(i)
    rates = {"fp": device.fp32_rate, "int": device.int_rate, "special": device.special_rate, "div": device.div_rate,
             "f64": device.fp64_rate}
    return share * ops * wide / rates[unit]


def _is_slice_of_step(i: Instruction, cut: _Cut) -> bool:
    """A scan's xs: the slice of an array at the place where the residuals of this step are."""
    s, place = cut.structure, cut.residuals[0].stacked.position
    if i.opcode != "dynamic-slice" or s.elements.get(i.operands[0], -1) not in s.invariants:
        return False
    whole = i.operands[0].dims
    touched = [d for d, (n, m) in enumerate(zip(whole, i.dims, strict=True)) if n != m]
    steps = s.update(cut.residuals[0].stacked.index).dims[0]
    return len(touched) == 1 and i.dims[touched[0]] == 1 and whole[touched[0]] == steps and \
        i.operands[1 + touched[0]] is place


def _counts(s: LoopStructure, k: int) -> tuple[int, int] | None:
    """(first, step) of a counter, where the residuals' place moves by one in each step."""
    return None if s.counter is None else s.counter.counts.get(k)


# --- the new loops ----------------------------------------------------------------------------------------------------

def _rewrite(cut: _Cut, users: Mapping[Instruction, Sequence[Instruction]]) -> _New:
    s = cut.structure
    kept = {r.stacked.update for r in cut.residuals if r.stays} | cut.stored
    dropped = {r.stacked.index for r in cut.residuals if r.stacked.update not in kept}
    updates = {r.stacked.update for r in cut.residuals}
    added = [i for i in cut.nodes if i in cut.stored and i not in updates]
    first = _first_loop(s, cut, dropped, added)
    begin = len(s.loop.operands[0].operands)
    results = {k: element_of(first, k) for k in (*{u.attrs["index"] for u in users[s.loop]} - dropped,
                                                 *range(begin, begin + len(added)))}
    arrays = {i: results[begin + n] for n, i in enumerate(added)}
    arrays |= {r.stacked.update: results[r.stacked.index] for r in cut.residuals if r.stacked.update in kept}
    replaced = {u: results[u.attrs["index"]] for u in users[s.loop] if u.attrs["index"] not in dropped}
    loops = [first]
    for loop in dict.fromkeys(loop for r in cut.residuals for loop in r.slices):
        loops.append(_LaterLoop(loop, cut, arrays).rewritten())
        replaced |= {u: element_of(loops[-1], u.attrs["index"]) for u in users[loop]}
    return _New(loops, replaced)


def _first_loop(s: LoopStructure, cut: _Cut, dropped: set[int], added: Sequence[Instruction]) -> Instruction:
    """The loop that stacks `added` and no longer the elements `dropped`, which are numbers that it passes on."""
    steps = s.update(cut.residuals[0].stacked.index).dims[0]
    stacks = [Shape(i.element_type, (steps, *i.dims)) for i in added]
    state = [constant(0, "s32") if k in dropped else o for k, o in enumerate(s.loop.operands[0].operands)]
    state += [full(0, shape) for shape in stacks]
    fresh = parameter(0, TupleShape(tuple(o.shape for o in state)), "state")
    gone = {s.update(k) for k in dropped} | {i for i, k in s.elements.items() if k in dropped}
    new = {s.body.parameters[0]: fresh}
    for i in s.body.instructions:
        if i not in new and i not in gone and i is not s.body.root:
            new[i] = renewed(i, new)
    roots = [element_of(fresh, k) if k in dropped else new[o] for k, o in enumerate(s.body.root.operands)]
    place = new[cut.residuals[0].stacked.position]
    for n, (i, shape) in enumerate(zip(added, stacks, strict=True)):
        starts = [place, *(constant(0, place.element_type) for _ in i.dims)]
        whole = element_of(fresh, len(s.body.root.operands) + n)
        roots.append(make("dynamic-update-slice", whole, reshape(new[i], (1, *i.dims)), *starts, shape=shape))
    return with_body(s.loop, Computation(s.body.name, (fresh,), tuple_of(roots)), state)


class _LaterLoop:
    """Makes a later loop that computes what is no longer stored."""

    def __init__(self, loop: Instruction, cut: _Cut, arrays: Mapping[Instruction, Instruction]) -> None:
        self.s, self.cut, self.arrays = loop_structure(loop), cut, arrays
        self.slices = {i: r.stacked.update for r in cut.residuals for i in r.slices.get(loop, ())
                       if r.stacked.update not in arrays}
        gone = {r.stacked.index for r in cut.residuals if r.stacked.update not in arrays}
        old = loop.operands[0].operands
        self.dropped = {k for k, o in enumerate(old) if o.opcode == "get-tuple-element"
                        and o.operands[0] is cut.structure.loop and o.attrs["index"] in gone}
        self.state = [constant(0, "s32") if k in self.dropped else o for k, o in enumerate(old)]
        self.added: dict[Instruction, int] = {}     # array of the program -> element of the new state
        self._find_leaves()
        self.fresh = parameter(0, TupleShape(tuple(o.shape for o in self.state)), "state")

    def _find_leaves(self) -> None:
        first, stack, seen = self.cut.structure, list(self.slices.values()), set()
        while stack:
            i = stack.pop()
            if i in seen:
                continue
            seen.add(i)
            if i in self.arrays:
                self._add(self.arrays[i])
            elif i in first.elements:
                if first.elements[i] in first.invariants:
                    self._add(first.initial(first.elements[i]))
            elif _is_slice_of_step(i, self.cut):
                self._add(first.initial(first.elements[i.operands[0]]))
            else:
                stack.extend(_sources(i, self.cut))

    def _add(self, array: Instruction) -> None:
        if array not in self.added:
            self.added[array] = len(self.state)
            self.state.append(array)

    def rewritten(self) -> Instruction:
        body = self.s.body
        new = {body.parameters[0]: self.fresh}
        gone = {reader for reader, k in self.s.elements.items() if k in self.dropped}
        for i in body.instructions:
            if i in new or i in gone or i is body.root:
                continue
            new[i] = self._again(self.slices[i], new[i.operands[1]]) if i in self.slices else renewed(i, new)
        roots = [element_of(self.fresh, k) if k in self.dropped else new[o] for k, o in enumerate(body.root.operands)]
        roots += [element_of(self.fresh, k) for k in self.added.values()]
        return with_body(self.s.loop, Computation(body.name, (self.fresh,), tuple_of(roots)), self.state)

    def _again(self, value: Instruction, start: Instruction) -> Instruction:
        """A value of the first loop's step whose residuals are at `start`."""
        first, stack = self.cut.structure, [value]
        done: dict[Instruction, Instruction] = {}
        while stack:
            i = stack[-1]
            sources = () if i in self.arrays or _is_slice_of_step(i, self.cut) else _sources(i, self.cut)
            pending = [o for o in sources if o not in done]
            if i in done or pending:
                stack.pop() if i in done else stack.extend(pending)
                continue
            stack.pop()
            done[i] = self._value(i, start, first, done)
        return done[value]

    def _value(self, i: Instruction, start: Instruction, first: LoopStructure,
               done: Mapping[Instruction, Instruction]) -> Instruction:
        if i in self.arrays:
            array = element_of(self.fresh, self.added[self.arrays[i]])
            is_update = array.dims[1:] == i.dims[1:] and len(array.dims) == len(i.dims)
            return _slice(array, 0, start) if is_update else reshape(_slice(array, 0, start), i.dims)
        if i in first.elements:
            k = first.elements[i]
            if k in first.invariants:
                return element_of(self.fresh, self.added[first.initial(k)])
            return _count_at(first, k, self.cut, start)
        if _is_slice_of_step(i, self.cut):
            array = element_of(self.fresh, self.added[first.initial(first.elements[i.operands[0]])])
            dim = next(d for d, (n, m) in enumerate(zip(array.dims, i.dims, strict=True)) if n != m)
            return _slice(array, dim, start)
        return i if not i.operands else make(i.opcode, *(done[o] for o in i.operands), shape=i.shape, name=i.name,
                                             metadata=i.metadata, **i.attrs)


def _slice(array: Instruction, dim: int, start: Instruction) -> Instruction:
    sizes = [1 if d == dim else n for d, n in enumerate(array.dims)]
    starts = [start if d == dim else constant(0, start.element_type) for d in range(len(sizes))]
    return make("dynamic-slice", array, *starts, shape=array.array.with_dims(sizes), dynamic_slice_sizes=tuple(sizes))


def _count_at(first: LoopStructure, k: int, cut: _Cut, start: Instruction) -> Instruction:
    """A counter of the first loop in the step whose residuals are at `start`: first + step * (start - p0) * slope."""
    begin, step = _counts(first, k) or (0, 0)
    place = first.position(cut.residuals[0].stacked.position, "t")
    assert place is not None
    slope = place.terms[0][1] if place.terms and isinstance(place.terms[0][0], Var) else 0
    offset = begin - step * slope * place.constant
    moved = start if step * slope == 1 else make("multiply", start, constant(step * slope, "s32"))
    return moved if not offset else make("add", moved, constant(offset, "s32"))


def _notes(cut: _Cut) -> list[str]:
    notes = []
    for r in cut.residuals:
        if r.stays or r.stacked.update in cut.stored:
            continue
        leaves: dict[str, None] = {}
        stack, seen = [r.stacked.update], set()
        while stack:
            i = stack.pop()
            if i not in seen and i in cut.stored:
                leaves[_word(i, cut)] = None
            elif i not in seen:
                stack.extend(reversed(_sources(i, cut)))
            seen.add(i)
        name = _word(r.stacked.update, cut)
        if name not in leaves:
            notes.append(f"residual {name} is recomputed from {', '.join(leaves) or 'what the steps read anyway'}")
    return notes


def _word(i: Instruction, cut: _Cut) -> str:
    while i.opcode in ("reshape", "broadcast"):
        i = i.operands[0]
    if i in cut.structure.elements:
        initial = cut.structure.initial(cut.structure.elements[i])
        return initial.name if initial.opcode == "parameter" and initial.name else "a carry"
    return i.name or i.opcode
