"""Kernels: the loops of a plan around the values of its cluster, one text for every dialect.

All forms are one nest. A block works on one *item* (a point of the outer parallel axes, and a tile or chunk); in it the
lanes run over the innermost axis. Where the lanes are reduced (rows) they fold at the end of a pass; where they are not
(loops, columns) each lane has its own accumulators. A reduction that is split over blocks leaves partial results, which the
last block of the item folds in fixed order.
"""
from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from hlofuse.codegen.dialect import Argument, Dialect
from hlofuse.codegen.index_map import Index, Var, constant, delinearize, linearize, to_c, variable
from hlofuse.codegen.scalar_expr import c_type, literal_expr, storage_type, store_expr
from hlofuse.codegen.values import Values
from hlofuse.fusion.plan import Axis, Plan
from hlofuse.hlo.module import Computation, Instruction
from hlofuse.hlo.opcode import OPCODES
from hlofuse.hlo.shape import Shape

SYMBOL = "KERNEL_SYMBOL"
TILE = 32                 # a transpose goes through tiles of TILE x TILE
MAX_VARIANTS = 16         # how many copies of a loop the cuts of pad and concatenate may make


@dataclass(frozen=True)
class KernelText:
    """A kernel in one dialect. Its arguments are the cluster's parameters, its outputs, then `scratch` arrays; `counters`
    zeroed unsigned integers go with them. `work` estimates the operations of one block."""

    dialect: str
    symbol: str
    text: str
    form: str
    blocks: int
    threads: int
    counters: int
    scratch: tuple[Shape, ...]
    shared_bytes: int
    work: int
    aliases: Mapping[int, int]   # parameter -> result that may take its memory: read only where that result is written

    @property
    def digest(self) -> str:
        """Of the text and the launch: two kernels with one digest are the same."""
        launch = (self.blocks, self.threads, self.counters)
        return hashlib.sha256(f"{launch}\0{self.text}".encode()).hexdigest()


@dataclass(frozen=True)
class Sizing:
    """How a plan is cut for a dialect: `outer` axes make items, `loop` axes run inside an item, `vector` axes are the
    lanes' (flattened); `chunks` is over how many blocks a reduction is split."""

    outer: tuple[Axis, ...]
    loop: tuple[Axis, ...]
    vector: tuple[Axis, ...]
    threads: int
    lanes: int
    tile: int
    chunks: int

    @property
    def vector_size(self) -> int:
        return math.prod(a.size for a in self.vector)

    @property
    def loop_size(self) -> int:
        return math.prod(a.size for a in self.loop)

    @property
    def tiles(self) -> int:
        return max(1, -(-self.vector_size // self.tile))

    @property
    def items(self) -> int:
        return math.prod(a.size for a in self.outer) * self.tiles


def size_plan(plan: Plan, dialect: Dialect) -> Sizing:
    """Chooses lanes, threads, tiles and chunks."""
    axes = plan.axes
    last_kind = axes[-1].reduced if axes else False
    inner = tuple(a for a in axes if a.reduced == last_kind)
    other = tuple(a for a in axes if a.reduced != last_kind)
    cut = len(inner)
    size = 1
    while cut and size < dialect.vector_minimum:
        cut -= 1
        size *= inner[cut].size
    vector, rest = inner[cut:], inner[:cut]
    if not plan.levels:
        return _size_loop(rest, vector, dialect)
    if plan.lanes_reduced:
        return _size_row(plan, other, rest, vector, dialect)
    return _size_column(plan, rest, other, vector, dialect)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def _size_loop(outer: tuple[Axis, ...], vector: tuple[Axis, ...], dialect: Dialect) -> Sizing:
    size = math.prod(a.size for a in vector)
    lanes = min(dialect.lanes, _power_of_two(size))
    threads = 1 if dialect.threads == 1 else min(dialect.threads, _round_up(-(-size // lanes), 32))
    tile = size if size <= dialect.tile_elements * 3 // 2 else dialect.tile_elements
    return Sizing(outer, (), vector, threads, lanes, max(tile, 1), 1)


def _size_row(plan: Plan, outer: tuple[Axis, ...], loop: tuple[Axis, ...], vector: tuple[Axis, ...],
              dialect: Dialect) -> Sizing:
    size = math.prod(a.size for a in vector)
    lanes = min(dialect.row_lanes, _power_of_two(size))
    threads = 1
    if dialect.max_row_threads > 1:
        wanted = _power_of_two(-(-size // (lanes * 4)))
        threads = min(dialect.max_row_threads, max(32, wanted))
    rows = math.prod(a.size for a in outer)
    total = size * math.prod(a.size for a in loop)
    chunks = 1
    if can_split(plan) and rows < dialect.split_below and total >= 4 * dialect.chunk_elements:
        chunks = min(1024 // max(1, rows) if rows < 1024 else 1, total // dialect.chunk_elements)
        threads = min(threads, dialect.threads)
    return Sizing(outer, loop, vector, threads, lanes, size, max(1, chunks))


def _size_column(plan: Plan, outer: tuple[Axis, ...], loop: tuple[Axis, ...], vector: tuple[Axis, ...],
                 dialect: Dialect) -> Sizing:
    size = math.prod(a.size for a in vector)
    lanes = min(dialect.column_lanes, _power_of_two(size))
    threads = 1 if dialect.column_threads == 1 else min(dialect.column_threads, _round_up(-(-size // lanes), 32))
    tile = min(threads * lanes, size)
    sizing = Sizing(outer, loop, vector, threads, lanes, tile, 1)
    rows = sizing.loop_size
    if can_split(plan) and sizing.items < dialect.column_blocks and rows * tile >= 4 * dialect.chunk_elements:
        wanted = min(-(-dialect.column_blocks // sizing.items), rows * tile // dialect.chunk_elements, rows,
                     max(1, 65536 // (4 * tile)))
        sizing = replace(sizing, chunks=max(1, wanted))
    return sizing


def can_split(plan: Plan) -> bool:
    """Whether a reduction may leave partial results: nothing over the whole domain waits for it."""
    if any(level for level in plan.levels.values()):
        return False
    waiting = dependent_levels(plan)
    return all(not waiting[o] or plan.analysis.mask(o) == plan.parallel_mask for o in plan.computation.outputs)


def dependent_levels(plan: Plan) -> dict[Instruction, int]:
    """For each instruction the number of scheduled reductions that must be complete before it."""
    found: dict[Instruction, int] = {}
    for i in plan.computation.instructions:
        level = max((found[o] for o in i.operands), default=0)
        found[i] = max(level, plan.levels[i] + 1) if i in plan.levels else level
    return found


@dataclass
class Reduction:
    """One scheduled reduction while its kernel is written."""

    instruction: Instruction
    reducer: str
    types: list[str]
    starts: list[str]      # what accumulators begin with
    late_init: list[str]   # an initial value that is not the identity, folded in once at the end
    names: list[str]


class KernelWriter:
    """Writes one plan in one dialect."""

    def __init__(self, plan: Plan, dialect: Dialect, hint: str = "fusion") -> None:
        self.plan, self.dialect, self.hint = plan, dialect, hint
        self.sizing = size_plan(plan, dialect)
        computation = plan.computation
        big = max((s.size for i in computation.instructions for s in i.result_shapes), default=1)
        self.index_type = "int" if big < 2**31 - 2**16 else "long long"
        names: dict[Instruction, str] = {}
        self.values = Values(computation, self.index_type, names)
        for a in plan.axes:
            self.values.name(a.name)
        for p in computation.parameters:
            names[p] = self.values.name(p.name or "x")
        self.output_names = [self.values.name(f"out_{o.name or o.opcode}" if len(computation.outputs) > 1 else "out")
                             for o in computation.outputs]
        self.names = names
        self.scratch: list[tuple[str, str, Shape]] = []
        self.where: dict[str, Index] = {}
        self.waiting = dependent_levels(plan)
        self.counters = 0
        self.shared_bytes = 0
        self.scheduled_names: dict[Instruction, list[str]] = {}

    # --- the whole kernel -------------------------------------------------------------------------------------------

    def write(self) -> KernelText:
        z, v = self.sizing, self.values
        if not self.plan.levels:
            form = "transpose" if self.plan.staged else "loop"
            blocks = self._transpose() if self.plan.staged else self._loop()
        elif self.plan.lanes_reduced:
            form = "full" if z.chunks > 1 else "row"
            blocks = self._split_row() if z.chunks > 1 else self._row()
        else:
            form = "column"
            blocks = self._split_column() if z.chunks > 1 else self._column()
        arguments = self._arguments()
        constants = f"  enum {{ THREADS = {self.sizing.threads}, LANES = {self.sizing.lanes} }};\n"
        body = constants + "".join(f"  {line}\n" for line in v.root.lines)
        text = self.dialect.frame(SYMBOL, arguments, self.sizing.threads, body)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        symbol = f"{_identifier(self.hint)}_{digest}"
        domain = math.prod(a.size for a in self.plan.axes)
        work = sum(max(1, int(OPCODES[i.opcode].ops)) for i in self.plan.computation.instructions)
        if any(OPCODES[i.opcode].unit in ("special", "div") for i in self.plan.computation.instructions):
            work *= 4
        return KernelText(self.dialect.name, symbol, text.replace(SYMBOL, symbol), form, blocks, self.sizing.threads,
                          self.counters, tuple(s for _, _, s in self.scratch), self.shared_bytes,
                          max(1, domain * work // max(1, blocks)),
                          self._aliases(form))

    def _aliases(self, form: str) -> dict[int, int]:
        """Only the loop form reads and writes each element in one iteration; rows are read again in later passes."""
        if form != "loop":
            return {}
        found: dict[int, int] = {}
        computation = self.plan.computation
        for k, output in enumerate(computation.outputs):
            address = linearize(self.plan.canonical(output, self.where), output.dims)
            for n, p in enumerate(computation.parameters):
                places = {linearize(r, p.dims) for r in self.values.reads.get(p, ())}
                if n not in found and p.shape == output.shape and places == {address}:
                    found[n] = k
                    break
        return found

    def _arguments(self) -> list[Argument]:
        computation = self.plan.computation
        inputs = [Argument("IN", storage_type(p.element_type), self.names[p]) for p in computation.parameters]
        outputs = [Argument("OUT", storage_type(o.element_type), n)
                   for o, n in zip(computation.outputs, self.output_names, strict=True)]
        return [*inputs, *outputs, *(Argument("SCRATCH", t, n) for n, t, _ in self.scratch)]

    # --- pieces -----------------------------------------------------------------------------------------------------

    def emit(self, line: str) -> None:
        self.values.scope.lines.append(line)

    @contextmanager
    def block(self, header: str, variables: Sequence[str] = (), footer: str = "}", guard: bool = False) -> Iterator[None]:
        with self.values.inside(variables, guard) as scope:
            yield
        self.emit(header)
        self.values.scope.lines.extend("  " + line for line in scope.lines)
        self.emit(footer)

    def _begin_item(self, extra: int = 1) -> tuple[str, str]:
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

    def _lane_variable(self) -> str:
        z = self.sizing
        if len(z.vector) == 1:
            return z.vector[0].name
        if not hasattr(self, "_lane"):
            self._lane = self.values.name("v")
        return self._lane

    def _place_lanes(self, low: int = 0, high: int | None = None) -> None:
        """Sets the vector axes' indices for a lane variable in [low, high)."""
        z = self.sizing
        name = self._lane_variable()
        top = z.vector_size if high is None else high
        index = Index(((Var(name, low, top - 1), 1),)) if top - low > 1 or low else constant(low) if top - low == 1 and \
            z.vector_size == 1 else Index(((Var(name, low, top - 1), 1),))
        if z.vector_size == 1:
            index = constant(0)
        self.where.update(zip((a.name for a in z.vector), delinearize(index, [a.size for a in z.vector]), strict=True))

    def tiles(self, begin: str, end: str, bounds: tuple[int, int], write: Callable[[], None]) -> None:
        """for_tiles over [begin, end) with `write` in the lane loop; cut where a branch of the body changes, so that most
        lanes take none. `bounds` is what the range can be at most."""
        cuts = self._cuts(write, bounds)
        name = self._lane_variable()
        for low, high in zip(cuts[:-1], cuts[1:], strict=True):
            first, last = begin, end
            if low > bounds[0]:
                first = str(low) if begin == "0" else f"({begin} > {low} ? {begin} : {low})"
            if high < bounds[1]:
                last = str(high) if end == str(bounds[1]) else f"({end} < {high} ? {end} : {high})"
            self._place_lanes(low, high)
            start = f"{name}0"
            cast = f"({self.index_type})"
            with self.block(f"for_tiles<THREADS, LANES>({cast}{first}, {cast}{last}, "
                            f"[&](const {self.index_type} {start}, const int count) INLINE {{", footer="});"):
                with self.block("FOR_LANES(l, count) {", (name, "l")):
                    if self.sizing.vector_size > 1:
                        self.emit(f"const {self.index_type} {name} = {start} + l;")
                    write()
        self._place_lanes()

    def _cuts(self, write: Callable[[], None], bounds: tuple[int, int]) -> list[int]:
        v = self.values
        if not _has_branches(self.plan.computation) or len(self.sizing.vector) > 1:
            return list(bounds)
        v.breakpoints = {}
        name = self._lane_variable()
        with v.dry_run():
            self._place_lanes()
            with v.inside((name, "l")):
                write()
        found = sorted(b for b in v.breakpoints.get(name, ()) if bounds[0] < b < bounds[1])
        v.breakpoints = None
        return [bounds[0], *found, bounds[1]] if len(found) < MAX_VARIANTS else list(bounds)

    def by_outer_branches(self, write: Callable[[], None]) -> None:
        """Runs `write` once for each range of the outer axes between which its branches change."""
        v = self.values
        if not _has_branches(self.plan.computation):
            write()
            return
        v.breakpoints = {}
        with v.dry_run():
            saved = dict(self.where)
            write_free, self_tiles = write, self._cuts
            self._cuts = lambda w, b: _probe(v, self, w, b)  # type: ignore[method-assign]
            try:
                write_free()
            finally:
                self._cuts = self_tiles  # type: ignore[method-assign]
            self.where = saved
        found = v.breakpoints or {}
        v.breakpoints = None
        cuts = {a.name: sorted(found.get(a.name, ())) for a in self.sizing.outer if found.get(a.name)}
        variants = math.prod(len(c) + 1 for c in cuts.values())
        if not cuts or variants > MAX_VARIANTS:
            write()
            return
        self._nest_cuts(list(cuts.items()), write)

    def _nest_cuts(self, cuts: list[tuple[str, list[int]]], write: Callable[[], None]) -> None:
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
                self._nest_cuts(rest, write)
        self.where[name] = whole

    def loop_axes(self, begin: str = "0", end: str | None = None) -> contextmanager:  # type: ignore[valid-type]
        """The sequential loop over the loop axes, flattened."""
        return self._loop_axes(begin, end)

    @contextmanager
    def _loop_axes(self, begin: str, end: str | None) -> Iterator[None]:
        z = self.sizing
        if z.loop_size == 1 and end is None:
            for a in z.loop:
                self.where[a.name] = constant(0)
            yield
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
        with self.block(f"for ({self.index_type} {name} = {begin}; {name} < {stop}; {name}++) {{", (name,)):
            yield

    def store(self, k: int) -> None:
        output = self.plan.computation.outputs[k]
        index = self.plan.canonical(output, self.where)
        value = self._value(output, index)
        place = to_c(linearize(index, output.dims))
        self.emit(f"{self.output_names[k]}[{place}] = {store_expr(value, output.element_type)};")

    def _value(self, i: Instruction, index: tuple[Index, ...]) -> str:
        return self.values.at(i, index)

    # --- reductions -------------------------------------------------------------------------------------------------

    def _reductions(self, level: int) -> list[Reduction]:
        return [self._reduction(i) for i, n in self.plan.levels.items() if n == level]

    def _reduction(self, i: Instruction) -> Reduction:
        n = len(i.operands) // 2
        types = [c_type(o.element_type) for o in i.operands[:n]]
        starts, late = [], []
        for init in i.operands[n:]:
            neutral = identity(i.attrs["to_apply"], init.element_type)
            value = self.values.at(init, ())
            if neutral is None or value == literal_expr(neutral, init.element_type):
                starts.append(value)
            else:
                starts.append(literal_expr(neutral, init.element_type))
                late.append(value)
        names = [self.values.name(i.name or "sum") for _ in range(n)]
        return Reduction(i, self.values.reducer(i), types, starts, late, names)

    def _declare_lanes(self, r: Reduction) -> None:
        for name, kind, start in zip(r.names, r.types, r.starts, strict=True):
            self.emit(f"{kind} {name}[LANES];")
            self.emit(f"for (int l = 0; l < LANES; l++) {name}[l] = {start};")

    def _accumulate(self, r: Reduction) -> None:
        """In the lane loop: folds this element into the lane's accumulators."""
        n = len(r.names)
        operands = r.instruction.operands[:n]
        values = [self._value(o, self.plan.canonical(o, self.where)) for o in operands]
        self.emit(f"{r.reducer}({', '.join([*(f'{a}[l]' for a in r.names), *values])});")

    def _finish_rows(self, r: Reduction) -> list[str]:
        """Folds lanes and threads; the results' names."""
        self.emit(f"fold_lanes<LANES>({', '.join([r.reducer, *r.names])});")
        self.emit(f"fold_threads<THREADS>({', '.join([r.reducer, *(f'{a}[0]' for a in r.names)])});")
        if r.late_init:
            self.emit(f"{r.reducer}({', '.join([*(f'{a}[0]' for a in r.names), *r.late_init])});")
        self.shared_bytes += 32 * 8 * len(r.names) if self.sizing.threads > 1 else 0
        return [f"{a}[0]" for a in r.names]

    def _publish(self, r: Reduction, results: Sequence[str]) -> None:
        """Makes the results known as the values of the reduction at the item's index."""
        i = r.instruction
        memo = self.values.scope.memo
        if isinstance(i.shape, Shape):
            index = self.plan.canonical(i, self.where)
            memo[(i, index)] = _rounded(i.element_type, results[0])
            return
        for user in self.plan.computation.users[i]:
            index = self.plan.canonical(user, self.where)
            memo[(user, index)] = _rounded(user.element_type, results[user.attrs["index"]])

    def _schedule_names(self) -> None:
        self.values.scheduled = set(self.plan.levels)

    def _outputs(self, level: int | None, mask: int) -> list[int]:
        return [k for k, o in enumerate(self.plan.computation.outputs)
                if self.plan.analysis.mask(o) == mask and (level is None or self.waiting[o] == level)]

    # --- forms ------------------------------------------------------------------------------------------------------

    def _loop(self) -> int:
        z = self.sizing
        tile, _ = self._begin_item()
        begin, end = self._tile_range(tile)

        def body() -> None:
            self.tiles(begin, end, (0, z.vector_size), lambda: [self.store(k) for k in range(len(self.output_names))])  # type: ignore[arg-type,return-value]

        self.by_outer_branches(body)
        return z.items

    def _tile_range(self, tile: str) -> tuple[str, str]:
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

    def _transpose(self) -> int:
        """Tiles of the two innermost directions: staged operands go through shared memory, both sides coalesced."""
        plan, t = self.plan, self.index_type
        inner = plan.axes[-1]
        last = plan.analysis.atoms(plan.staged[0])[-1]
        across = next(a for a in plan.axes if last in a.atoms)
        outer = tuple(a for a in plan.axes if a not in (inner, across))
        rows, columns = -(-across.size // TILE), -(-inner.size // TILE)
        self.sizing = replace(self.sizing, outer=outer, vector=(inner,), threads=self.dialect.transpose_threads, lanes=1,
                              tile=TILE)
        counts = [*(a.size for a in outer), rows, columns]
        stride = 1
        texts = []
        for count in reversed(counts):
            texts.append(f"BLOCK / {stride} % {count}" if stride > 1 else f"BLOCK % {count}")
            stride *= count
        texts.reverse()
        for axis, text in zip(outer, texts, strict=False):
            self.where[axis.name] = variable(axis.name, axis.size)
            if axis.size > 1:
                self.emit(f"const {t} {axis.name} = ({t})({text});")
        row0, column0 = f"{across.name}0", f"{inner.name}0"
        self.emit(f"const {t} {row0} = ({t})({texts[-2]}) * {TILE}, {column0} = ({t})({texts[-1]}) * {TILE};")
        for n, (axis, start) in enumerate(((across, row0), (inner, column0))):
            label = ("rows", "columns")[n]
            self.emit(f"const int {label} = {axis.size} - {start} < {TILE} ? (int)({axis.size} - {start}) : {TILE};")
        for axis in (across, inner):
            self.where[axis.name] = Index(((Var(axis.name, 0, axis.size - 1), 1),))
        for p in plan.staged:
            self._stage(p, across, inner, row0, column0)
        self.emit("BARRIER();")
        with self.block(f"for_tile<THREADS, {TILE}, {TILE}>(rows, columns, [&](const int row, const int column) INLINE {{",
                        (across.name, inner.name), "});"):
            self.emit(f"const {t} {across.name} = {row0} + row, {inner.name} = {column0} + column;")
            for k in range(len(self.output_names)):
                self.store(k)
        return math.prod(counts)

    def _stage(self, p: Instruction, across: Axis, inner: Axis, row0: str, column0: str) -> None:
        kind, name = storage_type(p.element_type), self.values.name(f"{self.names[p]}_tile")
        index = self.plan.canonical(p, self.where)
        place = to_c(linearize(index, p.dims))
        self.emit(f"SHARED({kind}, {name}, {TILE} * {TILE + 1});")
        with self.block(f"for_tile<THREADS, {TILE}, {TILE}>(columns, rows, [&](const int column, const int row) INLINE {{",
                        footer="});"):
            self.emit(f"const {self.index_type} {across.name} = {row0} + row, {inner.name} = {column0} + column;")
            self.emit(f"{name}[column * {TILE + 1} + row] = {self.names[p]}[{place}];")
        self.shared_bytes += TILE * (TILE + 1) * p.array.dtype.itemsize
        self.values.element_readers[p] = lambda _, name=name: f"{name}[column * {TILE + 1} + row]"

    def _row(self) -> int:
        z = self.sizing
        self._begin_item()
        self._schedule_names()
        passes = 1 + max([*self.plan.levels.values(),
                          *(self.waiting[o] for o in self.plan.computation.outputs
                            if self.plan.analysis.mask(o) == self.plan.domain_mask)])
        for level in range(passes):
            reductions = self._reductions(level)
            stores = self._outputs(level, self.plan.domain_mask)
            if not reductions and not stores:
                continue
            for r in reductions:
                self._declare_lanes(r)

            def write(reductions: list[Reduction] = reductions, stores: list[int] = stores) -> None:
                for r in reductions:
                    self._accumulate(r)
                for k in stores:
                    self.store(k)

            with self.loop_axes():
                self.tiles("0", str(z.vector_size), (0, z.vector_size), write)
            for r in reductions:
                self._publish(r, self._finish_rows(r))
        self._store_parallel()
        return z.items

    def _store_parallel(self) -> None:
        """Results of whole rows, written by one thread."""
        rows = self._outputs(None, self.plan.parallel_mask)
        if rows and self.plan.parallel_mask != self.plan.domain_mask:
            with self.block("if (THREAD == 0) {", guard=True):
                for k in rows:
                    self.store(k)

    def _split_row(self) -> int:
        z, t = self.sizing, self.index_type
        self._schedule_names()
        over_loop = z.loop_size > 1
        total = z.loop_size if over_loop else z.vector_size
        size = _round_up(-(-total // z.chunks), 1 if over_loop else z.threads * z.lanes)
        chunks = -(-total // size)
        self.sizing = z = replace(z, chunks=chunks)
        _, chunk = self._begin_item(chunks)
        self.emit(f"const {t} begin = ({t})({chunk}) * {size};")
        self.emit(f"const {t} end = begin + {size} < {total} ? begin + {size} : {total};")
        reductions = self._reductions(0)
        stores = self._outputs(0, self.plan.domain_mask)
        for r in reductions:
            self._declare_lanes(r)

        def write() -> None:
            for r in reductions:
                self._accumulate(r)
            for k in stores:
                self.store(k)

        if over_loop:
            with self.loop_axes("begin", "end"):
                self.tiles("0", str(z.vector_size), (0, z.vector_size), write)
        else:
            for a in z.loop:
                self.where[a.name] = constant(0)
            self.tiles("begin", "end", (0, z.vector_size), write)
        partials = []
        for r in reductions:
            late, r.late_init = r.late_init, []
            results = self._finish_rows(r)
            r.late_init = late
            partials.append([self._scratch(kind, z.items * chunks) for kind in r.types])
            with self.block("if (THREAD == 0) {", guard=True):
                for name, result in zip(partials[-1], results, strict=True):
                    self.emit(f"{name}[BLOCK] = {result};")
        self.counters = z.items
        with self.block(f"if (is_last_block(counters + BLOCK / {chunks}, {chunks})) {{", guard=True):
            for r, names in zip(reductions, partials, strict=True):
                again = replace(r, names=[self.values.name(f"{a}_total") for a in r.names])
                self._declare_lanes(again)
                with self.block(f"for_tiles<THREADS, LANES>(({t})0, ({t}){chunks}, "
                                f"[&](const {t} k0, const int count) INLINE {{", footer="});"):
                    with self.block("FOR_LANES(l, count) {"):
                        values = [f"{n}[BLOCK / {chunks} * {chunks} + k0 + l]" for n in names]
                        self.emit(f"{r.reducer}({', '.join([*(f'{a}[l]' for a in again.names), *values])});")
                self._publish(again, self._finish_rows(again))
            self._store_parallel()
        return z.items * chunks

    def _scratch(self, kind: str, size: int) -> str:
        name = self.values.name("partial")
        element = {"float": "f32", "double": "f64", "bool": "pred"}.get(kind, kind)
        self.scratch.append((name, kind, Shape(element, (size,))))
        return name

    def _column(self) -> int:
        z = self.sizing
        tile, _ = self._begin_item()
        begin, end = self._tile_range(tile)
        self._schedule_names()
        with self._column_lanes(begin, end):
            passes = 1 + max([*self.plan.levels.values(),
                              *(self.waiting[o] for o in self.plan.computation.outputs
                                if self.plan.analysis.mask(o) == self.plan.domain_mask)])
            for level in range(passes):
                reductions = self._reductions(level)
                stores = self._outputs(level, self.plan.domain_mask)
                if reductions or stores:
                    self._column_pass(reductions, stores, "0", None)
            with self._each_lane():
                self._publish_lanes()
                for k in self._outputs(None, self.plan.parallel_mask):
                    self.store(k)
        return z.items

    @contextmanager
    def _column_lanes(self, begin: str, end: str) -> Iterator[None]:
        name, t = self._lane_variable(), self.index_type
        self._place_lanes()
        self.finished: list[Reduction] = []
        with self.block(f"for_tiles<THREADS, LANES>(({t}){begin}, ({t}){end}, "
                        f"[&](const {t} {name}0, const int count) INLINE {{", footer="});"):
            yield

    @contextmanager
    def _each_lane(self) -> Iterator[None]:
        name = self._lane_variable()
        with self.block("FOR_LANES(l, count) {", (name, "l")):
            if self.sizing.vector_size > 1:
                self.emit(f"const {self.index_type} {name} = {name}0 + l;")
            yield

    def _publish_lanes(self) -> None:
        for r in self.finished:
            for name, init in zip(r.names, r.late_init, strict=False):
                self.emit(f"{r.reducer}({name}[l], {init});")
            r.late_init = []
            self._publish(r, [f"{a}[l]" for a in r.names])

    def _column_pass(self, reductions: list[Reduction], stores: list[int], begin: str, end: str | None) -> None:
        for r in reductions:
            self._declare_lanes(r)
        with self.loop_axes(begin, end):
            with self._each_lane():
                self._publish_lanes()
                for r in reductions:
                    self._accumulate(r)
                for k in stores:
                    self.store(k)
        if any(r.late_init for r in reductions):
            with self._each_lane():
                for r in reductions:
                    for name, init in zip(r.names, r.late_init, strict=False):
                        self.emit(f"{r.reducer}({name}[l], {init});")
                    r.late_init = []
        self.finished.extend(reductions)

    def _split_column(self) -> int:
        z, t = self.sizing, self.index_type
        self._schedule_names()
        size = -(-z.loop_size // z.chunks)
        chunks = -(-z.loop_size // size)
        self.sizing = z = replace(z, chunks=chunks)
        tile, chunk = self._begin_item(chunks)
        begin, end = self._tile_range(tile)
        self.emit(f"const {t} first = ({t})({chunk}) * {size};")
        self.emit(f"const {t} last = first + {size} < {z.loop_size} ? first + {size} : {z.loop_size};")
        reductions = self._reductions(0)
        late = [r.late_init for r in reductions]
        for r in reductions:
            r.late_init = []
        partials = [[self._scratch(kind, z.items * chunks * z.tile) for kind in r.types] for r in reductions]
        name = self._lane_variable()
        place = f"{name}0 - {begin} + l" if begin != "0" else f"{name}0 + l"
        with self._column_lanes(begin, end):
            self._column_pass(reductions, self._outputs(0, self.plan.domain_mask), "first", "last")
            with self.block("FOR_LANES(l, count) {"):
                for r, names in zip(reductions, partials, strict=True):
                    for n, a in zip(names, r.names, strict=True):
                        self.emit(f"{n}[BLOCK * {z.tile} + {place}] = {a}[l];")
        self.counters = z.items
        with self.block(f"if (is_last_block(counters + BLOCK / {chunks}, {chunks})) {{", guard=True):
            with self._column_lanes(begin, end):
                for r, names, init in zip(reductions, partials, late, strict=True):
                    again = replace(r, names=[self.values.name(f"{a}_total") for a in r.names], late_init=init)
                    self._declare_lanes(again)
                    with self.block(f"for (int k = 0; k < {chunks}; k++) {{"):
                        with self.block("FOR_LANES(l, count) {"):
                            at = f"(BLOCK / {chunks} * {chunks} + k) * {z.tile} + {place}"
                            self.emit(f"{r.reducer}({', '.join([*(f'{a}[l]' for a in again.names), *(f'{n}[{at}]' for n in names)])});")
                    self.finished.append(again)
                with self._each_lane():
                    self._publish_lanes()
                    for k in self._outputs(None, self.plan.parallel_mask):
                        self.store(k)
        return z.items * chunks


def _probe(v: Values, writer: KernelWriter, write: Callable[[], None], bounds: tuple[int, int]) -> list[int]:
    return list(bounds)


def _rounded(element_type: str, value: str) -> str:
    return f"round_{element_type}({value})" if element_type in ("f16", "bf16") else value


def _identifier(hint: str) -> str:
    text = "".join(c if c.isalnum() else "_" for c in hint).strip("_")
    return text if text and not text[0].isdigit() else f"k_{text}"


def _has_branches(computation: Computation) -> bool:
    return any(i.opcode in ("pad", "concatenate", "dynamic-update-slice") for i in computation.instructions)


def identity(reducer: Computation, element_type: str) -> np.ndarray | None:
    """The neutral element of a one-operation reducer, None where there is none known."""
    root = reducer.root
    if len(reducer.parameters) != 2 or len(root.operands) != 2 or set(root.operands) != set(reducer.parameters):
        return None
    dtype = Shape(element_type).dtype
    if root.opcode == "add" or root.opcode in ("or", "xor"):
        return np.zeros((), dtype)
    if root.opcode == "multiply":
        return np.ones((), dtype)
    if root.opcode == "and":
        return np.asarray(True) if element_type == "pred" else np.asarray(-1).astype(dtype)
    if root.opcode in ("maximum", "minimum") and element_type not in ("c64", "c128"):
        high = root.opcode == "minimum"
        if element_type == "pred":
            return np.asarray(high)
        if dtype.kind in "iu":
            info = np.iinfo(dtype)
            return np.asarray(info.max if high else info.min, dtype)
        return np.asarray(np.inf if high else -np.inf).astype(dtype)
    return None


def write_kernel(plan: Plan, dialect: Dialect, hint: str = "fusion") -> KernelText:
    """The kernel of a plan in a dialect."""
    return KernelWriter(plan, dialect, hint).write()


__all__ = ["KernelText", "KernelWriter", "Sizing", "identity", "size_plan", "write_kernel"]
