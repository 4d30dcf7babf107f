"""The nest: items, tiles and lanes around the values of one cluster, and the reductions that run in them.

A block works on one *item* (a point of the outer parallel axes, and a tile or chunk); in it the lanes run over the
innermost axis. The kernel forms (forms.py) are written with these pieces; the text is the same in every dialect.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from hlofuse.codegen.batches import batch_of
from hlofuse.codegen.dialect import Argument, Dialect
from hlofuse.codegen.reduction import Reduction, initial_values, rounded
from hlofuse.codegen.scalar_expr import c_type, storage_type, store_expr
from hlofuse.codegen.sizing import dependent_levels, has_branches, size_plan
from hlofuse.codegen.values import Scope, Values
from hlofuse.fusion.cumulative import cumulative_of
from hlofuse.fusion.plan import Axis, Plan
from hlofuse.hlo.index_map import Index, Var, constant, delinearize, is_run, linearize, renamed, to_c, variable
from hlofuse.hlo.module import Instruction
from hlofuse.hlo.shape import Shape

FRAME_NAMES = ("BLOCK", "block", "blockIdx", "buffers", "chunk", "column0", "counters", "filled", "fold", "fold_row",
               "read", "read_value", "row0", "row_of", "slot", "steps", "threadIdx")     # not for a user's array
MAX_INT_INDEX = 2**31 - 2**21    # the last chunk of a split ends up to (1024 chunks of 1024 elements) behind the array
MAX_VARIANTS = 16         # how many copies of a loop the cuts of pad and concatenate may make


@dataclass
class Run:
    """Where runs of lanes are written: `before` the lane loop over `variable`, and in it. `words` are the names of the
    arrays already read as whole runs."""

    before: Scope
    lanes: Scope
    variable: str
    words: dict[tuple[str, Index], str] = field(default_factory=dict)


class Nest:
    """One plan in one dialect, while its kernel is written."""

    def __init__(self, plan: Plan, dialect: Dialect, threads: int | None = None) -> None:
        self.short_rows = plan.lanes_reduced and math.prod(a.size for a in plan.reduced) < dialect.short_row
        if self.short_rows:
            plan = plan.turned()
        self.plan, self.dialect = plan, dialect
        self.sizing = size_plan(plan, dialect, self.short_rows)
        if threads is not None:   # a packed launch has one block shape for all its segments
            self.sizing = replace(self.sizing, threads=threads, groups=1)
        computation = plan.computation
        big = max((s.size for i in computation.instructions for s in i.result_shapes), default=1)
        self.index_type = "int" if big < MAX_INT_INDEX else "long long"
        names: dict[Instruction, str] = {}
        self.values = Values(computation, self.index_type, names)
        for name in FRAME_NAMES:
            self.values.name(name)
        for name in (*(a.name for a in plan.axes), "v"):
            self.values.name(name)
            self.values.name(f"{name}0")    # where a run of lanes begins
        for p in computation.parameters:
            names[p] = self.values.name(p.name or "x")
        self.output_names = [self.values.name(f"out_{o.name or o.opcode}" if len(computation.outputs) > 1 else "out")
                             for o in computation.outputs]
        self.names = names
        self.scratch: list[tuple[str, str, Shape]] = []
        self.where: dict[str, Index] = {}
        self.waiting = dependent_levels(plan)
        self.aliases: dict[int, int] = {}     # of the scatter form, as a kernel's
        self.counters = 0
        self.shared_bytes = 0
        self.finished: list[Reduction] = []   # whose results are in their lanes' accumulators
        self.keeps = False      # whether values wait in registers between passes
        self.run: Run | None = None
        self.scanned: dict[Instruction, str] = {}  # cumulative operations that this place has the results of
        self.turned_stores: dict[int, str] = {}    # results that are written to a tile first
        self._probing = False
        self._batched: Sequence[Reduction] = ()   # whose elements are collected in the loop that is being written
        if dialect.vector_bytes:
            readers = self.values.element_readers
            readers.update((p, functools.partial(self._read, p)) for p in computation.parameters)

    def arguments(self) -> list[Argument]:
        computation = self.plan.computation
        inputs = [Argument("IN", storage_type(p.element_type), self.names[p]) for p in computation.parameters]
        outputs = [Argument("OUT", storage_type(o.element_type), n)
                   for o, n in zip(computation.outputs, self.output_names, strict=True)]
        return [*inputs, *outputs, *(Argument("SCRATCH", t, n) for n, t, _ in self.scratch)]

    # --- pieces -----------------------------------------------------------------------------------------------------

    def emit(self, line: str) -> None:
        self.values.scope.lines.append(line)

    @contextmanager
    def block(self, header: str, variables: Sequence[str] = (), footer: str = "}",
              guard: bool = False) -> Iterator[None]:
        """A block of statements between `header` and `footer`, in which `variables` are declared."""
        with self.values.inside(variables, guard) as scope:
            yield
        self.emit(header)
        self.values.scope.lines.extend("  " + line for line in scope.lines)
        self.emit(footer)

    def begin_item(self, extra: int = 1) -> tuple[str, str]:
        """Takes BLOCK apart into the outer axes, the tile and the chunk; returns the last two's names."""
        z = self.sizing
        rest, counts = "BLOCK", [a.size for a in z.outer] + [z.tiles, extra]
        texts: list[str] = []
        inner = 1
        for count in reversed(counts):
            if count == 1:
                texts.append("0")
                continue
            text = rest if inner == 1 else f"{rest} / {inner}"
            inner *= count
            texts.append(text if inner == math.prod(counts) else f"{text} % {count}")
        texts.reverse()
        for axis, text in zip(z.outer, texts, strict=False):
            self.where[axis.name] = variable(axis.name, axis.size)
            if axis.size > 1:
                self.emit(f"const {self.index_type} {axis.name} = ({self.index_type})({text});")
        return texts[-2], texts[-1]

    def lane_variable(self) -> str:
        z = self.sizing
        return z.vector[0].name if len(z.vector) == 1 else "v"

    def place_lanes(self, low: int = 0, high: int | None = None) -> None:
        """Sets the vector axes' indices for a lane variable in [low, high)."""
        z = self.sizing
        name = self.lane_variable()
        top = z.vector_size if high is None else high
        index = Index(((Var(name, low, top - 1), 1),)) if z.vector_size > 1 else constant(0)
        self.where.update(zip((a.name for a in z.vector), delinearize(index, [a.size for a in z.vector]), strict=True))

    def tiles(self, begin: str, end: str, bounds: tuple[int, int], write: Callable[[], None],
              reductions: Sequence[Reduction] = ()) -> None:
        """for_tiles over [begin, end) with `write` in the lane loop; cut where a branch of the body changes, so that
        most lanes take none. `bounds` is what the range can be at most, `reductions` what is accumulated."""
        cuts = self.cuts(write, bounds)
        name = self.lane_variable()
        for low, high in zip(cuts[:-1], cuts[1:], strict=True):
            first, last = begin, end
            if low > bounds[0]:
                first = str(low) if begin == "0" else f"({begin} > {low} ? {begin} : {low})"
            if high < bounds[1]:
                last = str(high) if end == str(bounds[1]) else f"({end} < {high} ? {end} : {high})"
            self.place_lanes(low, high)
            cast, lanes = f"({self.index_type})", self.sizing.lanes
            whole = "" if self.sizing.vector_size % lanes or low % lanes or high % lanes else "whole_"
            span = f"({cast}{first}, {cast}{last}, [&](const {self.index_type} {name}0, const int count"
            with self.batches(reductions, self.dialect.row_batch, "add_{}<LANES, {}>({}, filled);", "filled") as footer:
                head = f"for_{whole}tiles<THREADS, LANES>{span}) INLINE {{" if footer == "});" else \
                    f"for_tile_batches<THREADS, LANES, {self.dialect.row_batch}>{span}, const int slot) INLINE {{"
                with self.block(head, footer=footer):
                    self.lane_loop(write, aligned=low % lanes == 0)
        self.place_lanes()

    @contextmanager
    def batches(self, reductions: Sequence[Reduction], steps: int, call: str, filled: str) -> Iterator[str]:
        """Inside, elements of reductions that fold batches are collected; yields how the loop over them ends. `call`
        adds a batch to a reduction's accumulators, as far as it is `filled`."""
        batched = [r for r in reductions if r.batch]
        if not batched:
            yield "});"
            return
        for r in batched:
            assert r.batch is not None
            r.batch.names[:] = [self.values.name(f"{v.name or v.opcode}_batch") for v in r.batch.values]
            for name, kind in zip(r.batch.names, r.types, strict=False):
                self.emit(f"{kind} {name}[{steps} * LANES];")
        outer, self._batched = self._batched, batched
        yield f"}}, [&](const int {filled}) INLINE {{"
        self._batched = outer
        for r in batched:
            assert r.batch is not None
            arguments = ", ".join([r.reducer, *r.names, *r.batch.names])
            self.emit("  " + call.format(r.batch.kind, steps, arguments))
        self.emit("});")

    def lane_loop(self, write: Callable[[], None], aligned: bool = True) -> None:
        """`write` for each lane of a run, which starts at a multiple of LANES if it is `aligned`."""
        before, name = self.values.scope, self.lane_variable()
        with self.block("FOR_LANES(l, count) {", (name, "l")):
            if aligned and self.dialect.vector_bytes and self.sizing.lanes > 1:
                self.run = Run(before, self.values.scope, name)
            if self.sizing.vector_size > 1:
                self.emit(f"const {self.index_type} {name} = {name}0 + l;")
            for i, result in self.scanned.items():
                self.values.scope.memo[i, self.plan.canonical(i, self.where)] = rounded(i.element_type, result)
            write()
            self.run = None

    def _words(self, place: Index) -> tuple[Run, str] | None:
        """Where to write an access to a whole run, and where that begins in memory; None if this element, here, is not
        one of neighbors."""
        run = self.run
        if run is None or self.values.scope is not run.lanes or not is_run(place, run.variable, self.sizing.lanes):
            return None
        if any(v.name in run.lanes.variables for v in place.variables if v.name != run.variable):
            return None     # a row of a gather, which each lane finds for itself
        return run, to_c(renamed(place, run.variable, f"{run.variable}0"))

    def _read(self, p: Instruction, index: tuple[Index, ...]) -> str:
        """One element of a parameter, in a run that is read as words where all lanes read neighbors."""
        name, place = self.names[p], linearize(index, p.dims)
        words = self._words(place)
        if words is None:
            return f"{name}[{to_c(place)}]"
        run, start = words
        if (name, place) not in run.words:
            run.words[name, place] = self.values.name(f"{name}_lanes")
            run.before.lines.append(f"const auto {run.words[name, place]} = read_lanes<LANES>({name}, {start}, count);")
        return f"{run.words[name, place]}[l]"

    @property
    def plan_reversed(self) -> bool:
        """Whether its cumulative operations run from the end."""
        return any(c is not None and c.reverse for c in map(cumulative_of, self.plan.scans))

    def turn_around(self, axes: Sequence[Axis]) -> None:
        """From here on the loops over some axes begin at their ends."""
        for a in axes:
            self.where[a.name] = constant(a.size - 1) - self.where[a.name]

    @property
    def steps(self) -> int:
        """How many runs of LANES elements one thread has of a row."""
        return -(-self.sizing.vector_size // (self.sizing.threads * self.sizing.lanes))

    def kept_tiles(self, write: Callable[[], None]) -> None:
        """As `tiles` over the whole row, but with `slot`, the place of a run among those of its thread."""
        z, name, t = self.sizing, self.lane_variable(), self.index_type
        self.place_lanes()
        self.keeps = True
        whole = "" if z.vector_size % z.lanes else "whole_"
        with self.block(f"for_kept_{whole}tiles<THREADS, LANES, {self.steps}>(({t}){z.vector_size}, "
                        f"[&](const {t} {name}0, const int count, const int slot) INLINE {{", footer="});"):
            self.lane_loop(write, aligned=True)

    def cuts(self, write: Callable[[], None], bounds: tuple[int, int]) -> list[int]:
        v = self.values
        if not has_branches(self.plan.computation) or len(self.sizing.vector) > 1:
            return list(bounds)
        if self._probing:
            return list(bounds)
        v.breakpoints = {}
        name = self.lane_variable()
        with v.dry_run():
            self.place_lanes()
            with v.inside((name, "l")):
                write()
        found = sorted(b for b in v.breakpoints.get(name, ()) if bounds[0] < b < bounds[1])
        v.breakpoints = None
        return [bounds[0], *found, bounds[1]] if len(found) < MAX_VARIANTS else list(bounds)

    def by_outer_branches(self, write: Callable[[], None]) -> None:
        """Runs `write` once for each range of the outer axes between which its branches change."""
        v = self.values
        if not has_branches(self.plan.computation):
            write()
            return
        v.breakpoints = {}
        saved = dict(self.where)
        self._probing = True
        with v.dry_run():
            write()
        self._probing = False
        self.where = saved
        found = v.breakpoints or {}
        v.breakpoints = None
        cuts = {a.name: sorted(found.get(a.name, ())) for a in self.sizing.outer if found.get(a.name)}
        variants = math.prod(len(c) + 1 for c in cuts.values())
        if not cuts or variants > MAX_VARIANTS:
            write()
            return
        self.nest_cuts(list(cuts.items()), write)

    def nest_cuts(self, cuts: list[tuple[str, list[int]]], write: Callable[[], None]) -> None:
        if not cuts:
            write()
            return
        (name, points), rest = cuts[0], cuts[1:]
        whole = self.where[name]
        size = whole.bounds[1] + 1
        edges = [0, *points, size]
        for n, (low, high) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
            test = f"if ({name} < {high})" if n == 0 else f"else if ({name} < {high})" if high < size else "else"
            self.where[name] = Index(((Var(name, low, high - 1), 1),))
            with self.block(f"{test} {{", guard=True):
                self.nest_cuts(rest, write)
        self.where[name] = whole

    @contextmanager
    def loop_axes(self, begin: str = "0", end: str | None = None, reductions: Sequence[Reduction] = (),
                  ) -> Iterator[str]:
        """A loop over the axes of `Sizing.loop`, whose variable it gives. Where lanes are columns, `reductions` are
        those that it accumulates."""
        z, t = self.sizing, self.index_type
        if z.loop_size == 1 and end is None:
            for a in z.loop:
                self.where[a.name] = constant(0)
            yield "0"
            return
        if len(z.loop) == 1:
            name = z.loop[0].name
            flat = variable(name, z.loop[0].size)
        else:
            name = self.values.name("step")
            flat = variable(name, z.loop_size)
        for a, index in zip(z.loop, delinearize(flat, [a.size for a in z.loop]), strict=True):
            self.where[a.name] = index
        stop = str(z.loop_size) if end is None else end
        steps = self.dialect.column_batch
        with self.batches(reductions, steps, "add_{}_by_lane<LANES, {}>({}, steps, count);", "steps") as footer:
            head = f"for ({t} {name} = {begin}; {name} < {stop}; {name}++) {{" if footer == "});" else \
                f"for_batches<LANES, {steps}>(({t}){begin}, ({t}){stop}, " \
                f"[&](const {t} {name}, const int slot) INLINE {{"
            with self.block(head, (name,), "}" if footer == "});" else footer):
                yield name

    def store(self, k: int) -> None:
        output = self.plan.computation.outputs[k]
        index = self.plan.canonical(output, self.where)
        value = store_expr(self.value(output, index), output.element_type)
        name, place = self.output_names[k], linearize(index, output.dims)
        words = self._words(place)
        if k in self.turned_stores:
            self.emit(f"{self.turned_stores[k]} = {value};")
        elif words is None:
            self.emit(f"{name}[{to_c(place)}] = {value};")
        else:
            run, start = words
            lanes = self.values.name(f"{name}_lanes")
            run.before.lines.append(f"auto {lanes} = write_lanes<LANES>({name}, {start}, count);")
            self.emit(f"{lanes}[l] = {value};")

    def value(self, i: Instruction, index: tuple[Index, ...]) -> str:
        return self.values.at(i, index)

    # --- reductions -------------------------------------------------------------------------------------------------

    def reductions(self, level: int) -> list[Reduction]:
        return [self._reduction(i) for i, n in self.plan.levels.items() if n == level]

    def _reduction(self, i: Instruction) -> Reduction:
        n = len(i.operands) // 2
        types = [c_type(o.element_type) for o in i.operands[:n]]
        starts, late = [], []
        for init in i.operands[n:]:
            start, rest = initial_values(i.attrs["to_apply"], init.element_type, self.values.at(init, ()))
            starts.append(start)
            late += rest
        operation = i.attrs["to_apply"].root.opcode if n == 1 else "best"
        hints = [i.name or {"add": "sum"}.get(operation, operation)] * n
        if (batch := batch_of(i)) is not None:
            hints = list(batch.accumulators)
        names = [self.values.name(hint) for hint in hints]
        return Reduction(i, self.values.reducer(i), types, starts, late, names, batch)

    def declare_lanes(self, r: Reduction) -> None:
        for name, kind, start in zip(r.names, r.types, r.starts, strict=True):
            self.emit(f"{kind} {name}[LANES];")
            self.emit(f"for (int l = 0; l < LANES; l++) {name}[l] = {start};")

    def accumulate(self, r: Reduction) -> None:
        """In the lane loop: folds this element into the lane's accumulators, or adds it to the batch."""
        if r.batch and r in self._batched:
            for name, v in zip(r.batch.names, r.batch.values, strict=True):
                self.emit(f"{name}[slot + l] = {self.value(v, self.plan.canonical(v, self.where))};")
            return
        n = len(r.names)
        operands = r.instruction.operands[:n]
        values = [self.value(o, self.plan.canonical(o, self.where)) for o in operands]
        self.emit(f"{r.reducer}({', '.join([*(f'{a}[l]' for a in r.names), *values])});")

    def finish_rows(self, r: Reduction) -> list[str]:
        """Folds lanes and threads; the results' names."""
        self.emit(f"fold_lanes<LANES>({', '.join([r.reducer, *r.names])});")
        self.emit(f"fold_threads<THREADS>({', '.join([r.reducer, *(f'{a}[0]' for a in r.names)])});")
        if r.late_init:
            self.emit(f"{r.reducer}({', '.join([*(f'{a}[0]' for a in r.names), *r.late_init])});")
        self.shared_bytes += 32 * 8 * len(r.names) if self.sizing.threads > 32 else 0
        return [f"{a}[0]" for a in r.names]

    def publish(self, r: Reduction, results: Sequence[str]) -> None:
        """Makes the results known as the values of the reduction at the item's index."""
        i = r.instruction
        memo = self.values.scope.memo
        if isinstance(i.shape, Shape):
            index = self.plan.canonical(i, self.where)
            memo[(i, index)] = rounded(i.element_type, results[0])
            return
        for user in self.plan.computation.users[i]:
            index = self.plan.canonical(user, self.where)
            memo[(user, index)] = rounded(user.element_type, results[user.attrs["index"]])

    def schedule_names(self) -> None:
        self.values.scheduled = {*self.plan.levels, *self.plan.scans}

    def outputs(self, level: int | None, mask: int) -> list[int]:
        return [k for k, o in enumerate(self.plan.computation.outputs)
                if self.plan.analysis.mask(o) == mask and (level is None or self.waiting[o] == level)]

    def tile_range(self, tile: str) -> tuple[str, str]:
        z = self.sizing
        if z.tiles == 1:
            return "0", str(z.vector_size)
        t = self.index_type
        self.emit(f"const {t} begin = ({t})({tile}) * {z.tile};")
        if z.vector_size % z.tile == 0:
            self.emit(f"const {t} end = begin + {z.tile};")
        else:
            self.emit(f"const {t} end = begin + {z.tile} < {z.vector_size} ? begin + {z.tile} : {z.vector_size};")
        return "begin", "end"

    def store_parallel(self) -> None:
        """Results of whole rows, written by one thread."""
        rows = self.outputs(None, self.plan.parallel_mask)
        if rows and self.plan.parallel_mask != self.plan.domain_mask:
            with self.block("if (THREAD == 0) {", guard=True):
                for k in rows:
                    self.store(k)

    def new_scratch(self, kind: str, size: int) -> str:
        name = self.values.name("partial")
        element = {"float": "f32", "double": "f64", "bool": "pred"}.get(kind, kind)
        self.scratch.append((name, kind, Shape(element, (size,))))
        return name
