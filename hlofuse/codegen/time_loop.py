"""The time loop form: whole loops inside a thread, for a run of lanes, their carries in registers.

    carry[l] = initial value; for each step { for each lane l { carry[l] = body(carry[l]) } }; results of the lanes

Time is outside of the lanes, so that the lanes of one step are a vector; what does not change from step to step is
computed before the loop and kept. A lane that leaves on its own stays as it is until all of its run have left.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from hlofuse.codegen.contraction import products_in_sums
from hlofuse.codegen.element_reads import splat_literal
from hlofuse.codegen.lanes import Carry, part_type
from hlofuse.codegen.loop_counters import place_counters
from hlofuse.codegen.nest import Nest
from hlofuse.codegen.scalar_expr import c_type, literal_expr, storage_type
from hlofuse.codegen.step_runs import StepRunWriter
from hlofuse.codegen.values import EmitError, Key
from hlofuse.fusion.loop_space import MAX_PLACES, loops_of, span
from hlofuse.fusion.loop_structure import LoopStructure, loop_structure
from hlofuse.fusion.plan import stacked_results
from hlofuse.hlo.index_map import ZERO, Indices, linearize
from hlofuse.hlo.module import Instruction, post_order
from hlofuse.hlo.opcode import OPCODES
from hlofuse.hlo.shape import COMPLEX

MAX_STATEMENTS = 1500    # of one kernel: compilers slow down beyond


def write_time_loop(nest: Nest) -> int:
    """Every loop of the cluster for each run of lanes, then the results."""
    tile, _ = nest.begin_item()
    begin, end = nest.tile_range(tile)
    name, t = nest.lane_variable(), nest.index_type
    nest.place_lanes()
    nest.values.unrolled = MAX_PLACES    # an element of a carry is a register only where its place is known
    writer = _Writer(nest)
    writer.place_results()
    with nest.block(f"for_tiles<THREADS, LANES>(({t}){begin}, ({t}){end}, "
                    f"[&](const {t} {name}0, const int count) INLINE {{", footer="});"):
        nest.values.scope.owned = _after_loops(nest)
        nest.values.contracted = dict(products_in_sums(s for loop in nest.plan.loops for s in loops_of(loop)))
        for loop in nest.plan.loops:
            writer.loop(loop_structure(loop))
        writer.results()
    statements = sum(line.rstrip().endswith(";") or "//" in line for line in nest.values.root.lines)
    if statements > MAX_STATEMENTS:
        raise EmitError(f"{statements} statements, the limit is {MAX_STATEMENTS}")
    return nest.sizing.items


def _after_loops(nest: Nest) -> frozenset[Instruction]:
    found: set[Instruction] = set(nest.plan.loops)
    for i in nest.plan.computation.instructions:
        if not found.isdisjoint(i.operands):
            found.add(i)
    return frozenset(found)


@dataclass(frozen=True)
class _Kept:
    """Elements that lie in an array of the lanes: `before` the loop for all steps, or read at the begin of `each` step,
    because neighbor lanes do not read neighbors."""

    before: dict[Key, str] = field(default_factory=dict)
    each: dict[Key, str] = field(default_factory=dict)

    @property
    def texts(self) -> dict[Key, str]:
        return {**self.before, **self.each}


class _Writer(StepRunWriter):
    """Writes the loops of one plan, outermost first."""

    # --- a loop -----------------------------------------------------------------------------------------------------

    def loop(self, s: LoopStructure) -> None:
        nest, v = self.nest, self.values
        carries = [self._carry(s, k) for k in s.carries if not (s.counter and k in s.counter.counts)]
        for reader, k in s.elements.items():
            if k in s.invariants:
                v.aliases[reader] = s.initial(k)
        if s.loop not in self.plan.loops:
            self.place_nested(s, list(self._bodies_readers(s.loop)))
        self._begin(s, carries)
        step = v.name("t")
        self.place_runs(s, step)
        kept = self._kept(s, carries, step)
        with self.lanes():
            self.assign([(kept.before[key], v.at(*key)) for key in kept.before])
        if s.lanes_leave and self.has_lanes:
            live = v.name("live")
            with nest.block("for (bool more = true; more;) {"):
                nest.emit(f"int {live}[LANES];")
                self._step(s, carries, step, kept, live)
                nest.emit(f"more = any_lane<LANES>({live}, count);")
        elif s.counter is not None:
            with nest.block(f"for (int {step} = 0; {step} < {s.counter.trips}; {step}++) {{", (step,)):
                self._step(s, carries, step, kept, None)
        else:
            with nest.block("for (;;) {"):
                self._step(s, carries, step, kept, None)
        self._finish(s, carries)

    def _carry(self, s: LoopStructure, k: int) -> Carry:
        value = s.readers.get(k, s.update(k))
        initial = s.initial(k)
        hint = initial.name if initial.opcode == "parameter" and initial.name else "carry"
        name = self.values.name(f"{hint}_now")
        has_lanes = self.is_of_lanes(value)
        is_split = value.element_type in COMPLEX and has_lanes
        return Carry(k, name, value, self.places_of(value), ("_re", "_im") if is_split else ("",), has_lanes)

    def _begin(self, s: LoopStructure, carries: Sequence[Carry]) -> None:
        """Declares the carries with their initial values."""
        nest = self.nest
        for c in carries:
            kind = c_type(s.shape(c.index).element_type)
            if c.is_number:
                nest.emit(f"{kind} {c.name} = {self.values.at(s.initial(c.index), self.index_of(c.value, {}))};")
            else:
                places = f"[{len(c.places)}]" if len(c.places) > 1 else ""
                for part in c.parts:
                    nest.emit(f"{part_type(kind, c.parts)} {c.name}{part}{places}{'[LANES]' if c.has_lanes else ''};")
                if not c.has_lanes:
                    self._initialize(s, c)
        with self.lanes():
            for c in carries:
                if c.has_lanes:
                    self._initialize(s, c)
        for t in s.stacked:
            if not t.is_covered:
                self.prefill(s, t)

    def _initialize(self, s: LoopStructure, c: Carry) -> None:
        for place in c.places:
            index = self.index_of(c.value, place)
            self.assign([(self.element_of_carry(c, index), self.values.at(s.initial(c.index), index))])

    def _enter(self, s: LoopStructure, carries: Sequence[Carry], step: str, kept: _Kept) -> None:
        """Inside the time loop: what the body reads."""
        v = self.values
        v.scope.owned = _moving(s)
        by_index = {c.index: c for c in carries}
        for reader, k in s.elements.items():
            if k in by_index:
                v.sources[reader] = _same(self.element_of_carry, by_index[k])
        place_counters(v, s, step)
        for t in s.stacked:
            for read in t.reads:
                v.sources[read] = self.slice_reader(s, t, read)
        v.scope.memo.update(kept.before)
        if kept.each:
            with self.lanes():
                self.assign([(kept.each[key], v.at(*key)) for key in kept.each])
            v.scope.memo.update(kept.each)

    def _step(self, s: LoopStructure, carries: Sequence[Carry], step: str, kept: _Kept,
              live: str | None) -> None:
        nest, v = self.nest, self.values
        self._enter(s, carries, step, kept)
        if not s.lanes_leave and s.counter is None:
            nest.emit(f"if (!({v.at(s.predicate, (ZERO,) * len(s.predicate.dims))})) break;")
        elif s.lanes_leave and live is None:
            nest.emit(f"if (!({v.at(s.predicate, (ZERO,) * len(s.predicate.dims))})) break;")
        for inner in s.nested:
            self.loop(loop_structure(inner))
        self._branches(s)
        with self.lanes():
            if live is not None:
                nest.emit(f"{live}[l] = {v.at(s.predicate, self.index_of(s.predicate, {}))};")
            arrays = self._moves(s, [c for c in carries if c.has_lanes])
            late: list[tuple[str, str, str]] = []
            for t in s.stacked:
                if self.is_of_lanes(t.update) or not self.has_lanes:
                    kind = storage_type(t.update.element_type)
                    late += [(kind, element, value) for element, value in self.write_slice(s, t, self.homes_of(s, t))]
            waiting = self.wait(late)
            self.assign(arrays)
        with self.lanes():
            self.assign(waiting)
        self.write_behind(s, step)
        numbers = self._moves(s, [c for c in carries if not c.has_lanes])
        self.write_numbers(s)
        self.assign(numbers)

    # --- branches ---------------------------------------------------------------------------------------------------

    def _branches(self, s: LoopStructure) -> None:
        """Selects by one number for all lanes, of dear values: a branch around loops over the lanes, not in them."""
        chosen: set[Instruction] = set()
        outermost: list[Instruction] = []
        for i in reversed(s.values):
            if self._is_branch(i) and i not in chosen:
                outermost.append(i)
                stack = [i]
                while stack:
                    sides = [o for o in stack.pop().operands[1:] if self._is_branch(o)]
                    chosen.update(sides)
                    stack.extend(sides)
        for i in reversed(outermost):
            targets = []
            for place in self.places_of(i):
                index = self.index_of(i, place)
                targets.append((index, self.new_array("branch", i.element_type)))
            self._branch(i, targets)
            self.values.scope.memo.update(((i, index), text) for index, text in targets)

    def _branch(self, i: Instruction, targets: Sequence[tuple[Indices, str]]) -> None:
        test = self.values.at(i.operands[0], ())
        for header, side in ((f"if ({test}) {{", i.operands[1]), ("else {", i.operands[2])):
            with self.nest.block(header, guard=True):
                if self._is_branch(side):
                    self._branch(side, targets)
                else:
                    with self.lanes():
                        self.assign([(text, self.values.at(side, index)) for index, text in targets])

    def _is_branch(self, i: Instruction) -> bool:
        if i.opcode != "select" or i.operands[0].dims or (self.has_lanes and not i.dims):
            return False
        mask, lanes = self.axes.mask(i), self.plan.domain_mask
        if mask & lanes != lanes or span(mask & ~lanes, self.axes) > MAX_PLACES:
            return False
        dear = [o for o in i.operands[1:] if OPCODES[o.opcode].unit in ("special", "div") or self._is_branch(o)]
        return bool(dear) and not set(dear) <= set(post_order((i.operands[0],)))    # not if the test needs them anyway

    def _moves(self, s: LoopStructure, carries: Sequence[Carry]) -> list[tuple[str, str]]:
        """(carry, new value) for each place; all are computed before the first old value is lost."""
        found: list[tuple[str, str, str]] = []
        for c in carries:
            for place in c.places:
                index = self.index_of(c.value, place)
                found.append((c_type(c.value.element_type), self.element_of_carry(c, index),
                              self.values.at(s.update(c.index), index)))
        names = {f"{c.name}{part}" for c in carries for part in c.parts}
        moves = []
        for kind, target, text in found:
            if text == target:
                continue
            if not names.isdisjoint(re.findall(r"\w+", text)):     # a carry's element, at a place known or not
                name = self.values.name("moved")
                self.nest.emit(f"const {kind} {name} = {text};")
                text = name
            moves.append((target, text))
        return moves

    def _finish(self, s: LoopStructure, carries: Sequence[Carry]) -> None:
        """The loop's results are what its carries hold now."""
        by_index = {c.index: c for c in carries}
        users = self.plan.computation.users.get(s.loop) or tuple(
            i for i in self._bodies_readers(s.loop))
        for result in users:
            k = result.attrs["index"]
            if k in by_index:
                self.values.sources[result] = _same(self.element_of_carry, by_index[k])
            elif k in s.invariants:
                self.values.aliases[result] = s.initial(k)
            elif s.counter is not None and k in s.counter.counts:
                start, step = s.counter.counts[k]
                last = start + step * s.counter.trips
                self.values.sources[result] = _always(literal_expr(last, result.element_type))
            elif homes := self.homes.get((s.loop, k)):
                self.values.sources[result] = self.result_reader(result, homes[-1])

    def _bodies_readers(self, loop: Instruction) -> Iterator[Instruction]:
        """The readers of a nested loop's results, in the body around it."""
        for outer in self.plan.loops:
            pending = [loop_structure(outer)]
            while pending:
                s = pending.pop()
                pending.extend(map(loop_structure, s.nested))
                if loop in s.values:
                    yield from (i for i in s.values if i.opcode == "get-tuple-element" and i.operands[0] is loop)

    # --- what is kept -----------------------------------------------------------------------------------------------

    def _kept(self, s: LoopStructure, carries: Sequence[Carry], step: str) -> _Kept:
        """What each step needs of a lane although it is the same in all of them, and what it reads with a stride."""
        kept = _Kept()
        if not self.has_lanes:
            return kept
        nest, v = self.nest, self.values
        outside = {name for scope in v.scope.chain() for name in scope.variables}
        outside |= {nest.lane_variable(), "l", *(a.name for a in nest.sizing.outer)}
        known = {key for scope in v.scope.chain() for key in scope.memo}
        saved, v.requests = v.requests, []
        shared, scratch = nest.shared_bytes, list(nest.scratch)
        with v.dry_run():
            with nest.block("{", (step,)):
                self._step(s, carries, step, kept, "live" if s.lanes_leave else None)
        requests, v.requests = v.requests, saved
        nest.shared_bytes, nest.scratch = shared, scratch
        fixed = {r.key for r in requests if _is_fixed(r.key, s, outside)}
        for r in requests:
            i, index = r.key
            if r.guarded or r.key in known or r.key in kept.texts or not any(x.variables for x in index):
                continue
            if r.key in fixed and r.caller not in fixed:
                kept.before[r.key] = self.new_array(f"{i.name or i.opcode}_kept", i.element_type)
            elif r.key not in fixed and self._is_strided(i, index, outside | {step}):
                kept.each[r.key] = self.new_array(f"{i.name}_read", i.element_type)
        return kept

    def _is_strided(self, i: Instruction, index: Indices, known: set[str]) -> bool:
        """Whether the lanes of a run read a parameter elsewhere than side by side."""
        return i.opcode == "parameter" and self.has_stride(linearize(index, i.dims)) and all(
            variable.name in known for x in index for variable in x.variables)

    # --- results ----------------------------------------------------------------------------------------------------

    def results(self) -> None:
        nest = self.nest
        stacked = stacked_results(self.plan.computation)
        outputs = [(k, o) for k, o in enumerate(self.plan.computation.outputs) if o not in stacked]
        with self.lanes():
            for k, o in outputs:
                if self.is_of_lanes(o) or not self.has_lanes:
                    self._store_places(k, o)
        uniform = [(k, o) for k, o in outputs if self.has_lanes and not self.is_of_lanes(o)]
        if uniform:
            with nest.block(f"if ({self.first_lane()}) {{", guard=True):
                for k, o in uniform:
                    self._store_places(k, o)

    def _store_places(self, k: int, output: Instruction) -> None:
        for place in self.places_of(output):
            self.store(k, output, place)


def _same(function: Callable[..., str], first: object) -> Callable[[Indices], str]:
    return lambda index: function(first, index)


def _always(text: str) -> Callable[[Indices], str]:
    return lambda index: text


def _is_fixed(key: Key, s: LoopStructure, outside: set[str]) -> bool:
    """Whether an element is the same in every step, and known before the first."""
    instruction, index = key
    if instruction in _moving(s) or splat_literal(instruction) is not None or instruction.opcode == "iota":
        return False
    return all(variable.name in outside for i in index for variable in i.variables)


def _moving(s: LoopStructure) -> frozenset[Instruction]:
    """What varies with a loop's steps, in the loops nested in it too."""
    found = set(s.varying)
    for loop in s.nested:
        inner = loop_structure(loop)
        found.update(_moving(inner))
        found.update(reader for reader, k in inner.elements.items() if inner.initial(k) in found)
        for i in inner.values:
            if not found.isdisjoint(i.operands):
                found.add(i)
    return frozenset(found)
