"""The kernel forms: one emitter each, and the table of them.

Where the lanes are reduced (rows) they fold at the end of a pass; where they are not (loops, columns) each lane has
its own accumulators. A reduction that is split over blocks leaves partial results, which the last block of its item
folds in fixed order. Every emitter returns the number of blocks.
"""
from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from hlofuse.codegen.nest import Nest, Reduction
from hlofuse.codegen.scalar_expr import c_type, storage_type
from hlofuse.codegen.scan import Scan, scans_needed
from hlofuse.codegen.scatter_form import write_scatter
from hlofuse.codegen.sizing import has_branches, round_up
from hlofuse.codegen.time_loop import write_time_loop
from hlofuse.codegen.values import EmitError
from hlofuse.fusion.plan import Axis
from hlofuse.hlo.index_map import Index, Var, constant, linearize, to_c, variable
from hlofuse.hlo.module import Instruction
from hlofuse.hlo.opcode import OPCODES
from hlofuse.hlo.shape import Shape

ROOMY_THREADS = 512       # a larger block leaves its threads no registers to keep a row in


def write_loop(nest: Nest) -> int:
    """Every element of the domain once."""
    z = nest.sizing
    tile, _ = nest.begin_item()
    begin, end = nest.tile_range(tile)

    def store_all() -> None:
        for places in itertools.product(*(range(a.size) for a in z.unrolled)):
            nest.where.update((a.name, constant(n)) for a, n in zip(z.unrolled, places, strict=True))
            for k in range(len(nest.output_names)):
                nest.store(k)

    nest.by_outer_branches(lambda: nest.tiles(begin, end, (0, z.vector_size), store_all))
    return z.items


def write_transpose(nest: Nest) -> int:
    """Tiles of the two innermost directions: staged operands go through shared memory, both sides coalesced."""
    plan, t, side = nest.plan, nest.index_type, nest.dialect.transpose_tile
    inner = plan.axes[-1]
    last = plan.analysis.atoms(plan.staged[0])[-1]
    across = next(a for a in plan.axes if last in a.atoms)
    outer = tuple(a for a in plan.axes if a not in (inner, across))
    rows, columns = -(-across.size // side), -(-inner.size // side)
    nest.sizing = replace(nest.sizing, outer=outer, vector=(inner,), threads=nest.dialect.transpose_threads, lanes=1,
                          tile=side)
    counts = [*(a.size for a in outer), rows, columns]
    stride = 1
    texts = []
    for count in reversed(counts):
        texts.append(f"BLOCK / {stride} % {count}" if stride > 1 else f"BLOCK % {count}")
        stride *= count
    texts.reverse()
    for axis, text in zip(outer, texts, strict=False):
        nest.where[axis.name] = variable(axis.name, axis.size)
        if axis.size > 1:
            nest.emit(f"const {t} {axis.name} = ({t})({text});")
    row0, column0 = f"{across.name}0", f"{inner.name}0"
    nest.emit(f"const {t} {row0} = ({t})({texts[-2]}) * {side}, {column0} = ({t})({texts[-1]}) * {side};")
    for n, (axis, start) in enumerate(((across, row0), (inner, column0))):
        label = ("rows", "columns")[n]
        nest.emit(f"const int {label} = {axis.size} - {start} < {side} ? (int)({axis.size} - {start}) : {side};")
    for axis in (across, inner):
        nest.where[axis.name] = Index(((Var(axis.name, 0, axis.size - 1), 1),))
    for p in plan.staged:
        _stage(nest, p, across, inner, row0, column0)
    nest.emit("BARRIER();")
    with nest.block(f"for_tile<THREADS, {side}, {side}>(rows, columns, [&](const int row, const int column) INLINE {{",
                    (across.name, inner.name), "});"):
        nest.emit(f"const {t} {across.name} = {row0} + row, {inner.name} = {column0} + column;")
        for k in range(len(nest.output_names)):
            nest.store(k)
    return math.prod(counts)


def _stage(nest: Nest, p: Instruction, across: Axis, inner: Axis, row0: str, column0: str) -> None:
    kind, name = storage_type(p.element_type), nest.values.name(f"{nest.names[p]}_tile")
    side = nest.dialect.transpose_tile
    index = nest.plan.canonical(p, nest.where)
    place = to_c(linearize(index, p.dims))
    nest.emit(f"SHARED({kind}, {name}, {side} * {side + 1});")
    with nest.block(f"for_tile<THREADS, {side}, {side}>(columns, rows, [&](const int column, const int row) INLINE {{",
                    footer="});"):
        nest.emit(f"const {nest.index_type} {across.name} = {row0} + row, {inner.name} = {column0} + column;")
        nest.emit(f"{name}[column * {side + 1} + row] = {nest.names[p]}[{place}];")
    nest.shared_bytes += side * (side + 1) * p.array.dtype.itemsize
    staged = f"{name}[column * {side + 1} + row]"

    def read(where: tuple[Index, ...]) -> str:
        if where != index:
            raise EmitError(f"{p!r} is read at another place than where its tile lies")
        return staged

    nest.values.element_readers[p] = read


@dataclass(frozen=True)
class _Pass:
    """One reading of the rows: the reductions that it completes and the results that it can store."""

    level: int
    reductions: list[Reduction]
    stores: list[int]


def _passes(nest: Nest) -> Iterator[_Pass]:
    plan = nest.plan
    whole = [nest.waiting[o] for o in plan.computation.outputs if plan.analysis.mask(o) == plan.domain_mask]
    for level in range(1 + max([*plan.levels.values(), *whole])):
        found = _Pass(level, nest.reductions(level), nest.outputs(level, plan.domain_mask))
        if found.reductions or found.stores:
            yield found


def write_row(nest: Nest) -> int:
    """A block for each row, which it reads once for every level of reductions; dear values stay between the passes."""
    z = nest.sizing
    nest.begin_item()
    nest.schedule_names()
    kept = _kept_values(nest)
    for p in _passes(nest):
        for r in p.reductions:
            nest.declare_lanes(r)
        for value in kept:
            if value.first == p.level:
                nest.emit(f"{value.c_type} {value.name}[{nest.steps * z.lanes}];")

        def write(p: _Pass = p) -> None:
            memo = nest.values.scope.memo
            memo.update({v.key: f"{v.name}[slot + l]" for v in kept if v.first < p.level})
            for r in p.reductions:
                nest.accumulate(r)
            for k in p.stores:
                nest.store(k)
            for v in kept:
                if v.first == p.level:
                    nest.emit(f"{v.name}[slot + l] = {memo[v.key]};")

        with nest.loop_axes():
            if any(v.first <= p.level <= v.last for v in kept):
                nest.kept_tiles(write)
            else:
                nest.tiles("0", str(z.vector_size), (0, z.vector_size), write, p.reductions)
        for r in p.reductions:
            nest.publish(r, nest.finish_rows(r))
    nest.store_parallel()
    return z.items


@dataclass(frozen=True)
class _Kept:
    """An element's value that pass `first` computes and later passes, until `last`, need again."""

    key: tuple[Instruction, tuple[Index, ...]]
    name: str
    c_type: str
    first: int
    last: int


def _kept_values(nest: Nest) -> list[_Kept]:
    """What is worth keeping of several passes: dear operations, and loads where the dialect keeps rows in registers."""
    z, v, dialect = nest.sizing, nest.values, nest.dialect
    if z.loop_size > 1 or len(set(nest.waiting.values())) < 2 or has_branches(nest.plan.computation):
        return []
    room = dialect.keep_elements // max(1, nest.steps * z.lanes) if z.threads <= ROOMY_THREADS else 0
    if not room:
        return []
    needs: dict[int, list[tuple[Instruction, tuple[Index, ...]]]] = {}
    shared = nest.shared_bytes
    with v.dry_run():
        nest.place_lanes()
        for p in _passes(nest):
            with nest.loop_axes(), v.inside((nest.lane_variable(), "l")) as scope:
                for r in p.reductions:
                    nest.accumulate(r)
                for k in p.stores:
                    nest.store(k)
            needs[p.level] = list(scope.memo)
            for r in p.reductions:
                nest.publish(r, nest.finish_rows(r))
    nest.shared_bytes = shared
    found: list[_Kept] = []
    for level, keys in needs.items():
        for key in keys:
            last = max(n for n, other in needs.items() if key in other)
            instruction = key[0]
            dear = OPCODES[instruction.opcode].unit in ("special", "div")
            if instruction.opcode == "parameter":
                dear = dialect.keep_loads and instruction.array.size >= nest.plan.computation.outputs[0].array.size
            if last > level and dear and len(found) < room and all(f.key != key for f in found):
                name = v.name(f"kept_{instruction.name or instruction.opcode}")
                found.append(_Kept(key, name, c_type(instruction.element_type), level, last))
    return found


def write_split_row(nest: Nest) -> int:
    z, t = nest.sizing, nest.index_type
    nest.schedule_names()
    over_loop = z.loop_size > 1
    total = z.loop_size if over_loop else z.vector_size
    size = round_up(-(-total // z.chunks), 1 if over_loop else z.threads * z.lanes)
    chunks = -(-total // size)
    nest.sizing = z = replace(z, chunks=chunks)
    _, chunk = nest.begin_item(chunks)
    nest.emit(f"const {t} begin = ({t})({chunk}) * {size};")
    nest.emit(f"const {t} end = begin + {size} < {total} ? begin + {size} : {total};")
    reductions = nest.reductions(0)
    stores = nest.outputs(0, nest.plan.domain_mask)
    for r in reductions:
        nest.declare_lanes(r)

    def write() -> None:
        for r in reductions:
            nest.accumulate(r)
        for k in stores:
            nest.store(k)

    if over_loop:
        with nest.loop_axes("begin", "end"):
            nest.tiles("0", str(z.vector_size), (0, z.vector_size), write, reductions)
    else:
        for a in z.loop:
            nest.where[a.name] = constant(0)
        nest.tiles("begin", "end", (0, z.vector_size), write, reductions)
    partials = []
    for r in reductions:
        late, r.late_init = r.late_init, []
        results = nest.finish_rows(r)
        r.late_init = late
        partials.append([nest.new_scratch(kind, z.items * chunks) for kind in r.types])
        with nest.block("if (THREAD == 0) {", guard=True):
            for name, result in zip(partials[-1], results, strict=True):
                nest.emit(f"{name}[BLOCK] = {result};")
    nest.counters = z.items
    with nest.block(f"if (is_last_block(counters + BLOCK / {chunks}, {chunks})) {{", guard=True):
        for r, names in zip(reductions, partials, strict=True):
            again = replace(r, names=[nest.values.name(f"{a}_total") for a in r.names])
            nest.declare_lanes(again)
            with nest.block(f"for_tiles<THREADS, LANES>(({t})0, ({t}){chunks}, "
                            f"[&](const {t} chunk0, const int count) INLINE {{", footer="});"):
                with nest.block("FOR_LANES(l, count) {"):
                    values = [f"{n}[BLOCK / {chunks} * {chunks} + chunk0 + l]" for n in names]
                    nest.emit(f"{r.reducer}({', '.join([*(f'{a}[l]' for a in again.names), *values])});")
            nest.publish(again, nest.finish_rows(again))
        nest.store_parallel()
    return z.items * chunks


def write_column(nest: Nest) -> int:
    z = nest.sizing
    tile, _ = nest.begin_item()
    begin, end = nest.tile_range(tile)
    nest.schedule_names()
    with _column_lanes(nest, begin, end):
        for p in _passes(nest):
            _column_pass(nest, p.reductions, p.stores, "0", None)
        results = nest.outputs(None, nest.plan.parallel_mask)
        if results:
            with _each_lane(nest):
                _publish_lanes(nest)
                for k in results:
                    nest.store(k)
    return z.items


@contextmanager
def _column_lanes(nest: Nest, begin: str, end: str) -> Iterator[None]:
    name, t = nest.lane_variable(), nest.index_type
    nest.place_lanes()
    nest.finished = []
    with nest.block(f"for_tiles<THREADS, LANES>(({t}){begin}, ({t}){end}, "
                    f"[&](const {t} {name}0, const int count) INLINE {{", footer="});"):
        yield


@contextmanager
def _each_lane(nest: Nest) -> Iterator[None]:
    name = nest.lane_variable()
    with nest.block("FOR_LANES(l, count) {", (name, "l")):
        if nest.sizing.vector_size > 1:
            nest.emit(f"const {nest.index_type} {name} = {name}0 + l;")
        yield


def _publish_lanes(nest: Nest) -> None:
    for r in nest.finished:
        for name, init in zip(r.names, r.late_init, strict=False):
            nest.emit(f"{r.reducer}({name}[l], {init});")
        r.late_init = []
        nest.publish(r, [f"{a}[l]" for a in r.names])


def _column_pass(nest: Nest, reductions: list[Reduction], stores: list[int], begin: str, end: str | None) -> None:
    for r in reductions:
        nest.declare_lanes(r)
    with nest.loop_axes(begin, end, reductions):
        with _each_lane(nest):
            _publish_lanes(nest)
            for r in reductions:
                nest.accumulate(r)
            for k in stores:
                nest.store(k)
    _late_init(nest, reductions)
    nest.finished.extend(reductions)


def _late_init(nest: Nest, reductions: list[Reduction]) -> None:
    if any(r.late_init for r in reductions):
        with _each_lane(nest):
            for r in reductions:
                for name, init in zip(r.names, r.late_init, strict=False):
                    nest.emit(f"{r.reducer}({name}[l], {init});")
                r.late_init = []


def write_short_row(nest: Nest) -> int:
    """Neighboring lanes have neighboring rows: a tile of rows is turned on the stack, where the lanes' elements lie
    side by side, and the results are turned back."""
    z, plan = nest.sizing, nest.plan
    tile, _ = nest.begin_item()
    begin, end = nest.tile_range(tile)
    nest.schedule_names()
    with _column_lanes(nest, begin, end):
        turned_back = _turn_rows(nest) if len(z.loop) == 1 else []
        for p in _passes(nest):
            _column_pass(nest, p.reductions, p.stores, "0", None)
        for out, name, place in turned_back:
            with _each_lane(nest), nest.loop_axes():
                nest.emit(f"{out}[{place}] = {name};")
        results = nest.outputs(None, plan.parallel_mask)
        if results:
            with _each_lane(nest):
                _publish_lanes(nest)
                for k in results:
                    nest.store(k)
    return z.items


def _turn_rows(nest: Nest) -> list[tuple[str, str, str]]:
    """Fills the tiles of the parameters that lie row by row, and declares those of such results: for each of these its
    name, the element in its tile, and the place in memory."""
    plan, size = nest.plan, nest.sizing.loop_size
    element = f"{nest.sizing.loop[0].name} * LANES + l"
    for a in nest.sizing.loop:
        nest.where[a.name] = variable(a.name, a.size)
    whole = plan.domain_mask
    for p in plan.computation.parameters:
        if not isinstance(p.shape, Shape) or plan.analysis.mask(p) != whole:
            continue
        tile, index = nest.values.name(f"{nest.names[p]}_rows"), plan.canonical(p, nest.where)
        nest.emit(f"{storage_type(p.element_type)} {tile}[{size} * LANES];")
        with _each_lane(nest), nest.loop_axes():
            nest.emit(f"{tile}[{element}] = {nest.names[p]}[{to_c(linearize(index, p.dims))}];")

        def read(where: tuple[Index, ...], p: Instruction = p, tile: str = tile,
                 index: tuple[Index, ...] = index) -> str:
            if where == index:
                return f"{tile}[{element}]"
            return f"{nest.names[p]}[{to_c(linearize(where, p.dims))}]"

        nest.values.element_readers[p] = read
    found = []
    for k in nest.outputs(None, whole):
        output, out = plan.computation.outputs[k], nest.output_names[k]
        tile, index = nest.values.name(f"{out}_rows"), plan.canonical(output, nest.where)
        nest.emit(f"{storage_type(output.element_type)} {tile}[{size} * LANES];")
        nest.turned_stores[k] = f"{tile}[{element}]"
        found.append((out, f"{tile}[{element}]", to_c(linearize(index, output.dims))))
    return found


def write_scanned_row(nest: Nest) -> int:
    """A block for each row, as `write_row`, but in step: the threads' runs are scanned together, and a carry goes from
    one tile to the next. What is needed after a scan is computed in a loop over the lanes of its own."""
    z, t = nest.sizing, nest.index_type
    nest.begin_item()
    nest.schedule_names()
    for p in _passes(nest):
        for r in p.reductions:
            nest.declare_lanes(r)
        scans = [Scan.of(nest, i) for i in scans_needed(nest, p.reductions, p.stores, p.level)]
        for s in scans:
            nest.emit(f"{s.c_type} {s.carry} = {s.start};")

        def write(p: _Pass = p) -> None:
            for r in p.reductions:
                nest.accumulate(r)
            for k in p.stores:
                nest.store(k)

        nest.place_lanes()
        if nest.plan_reversed:
            nest.turn_around(z.vector)
        name = nest.lane_variable()
        with nest.block(f"for_scan_tiles<THREADS, LANES>(({t}){z.vector_size}, "
                        f"[&](const {t} {name}0, const int count) INLINE {{", footer="});"):
            for s in scans:
                nest.emit(f"{s.c_type} {s.name}[LANES];")
                nest.emit(f"for (int l = 0; l < LANES; l++) {s.name}[l] = {s.start};")
                nest.lane_loop(functools.partial(s.fill, nest))
                nest.emit(f"scan_lanes<THREADS, LANES>({s.reducer}, {s.name}, {s.carry});")
                nest.scanned[s.instruction] = f"{s.name}[l]"
            nest.lane_loop(write)
        nest.scanned.clear()
        if z.threads > 32:
            nest.shared_bytes += 32 * 8 * len(scans)
        for r in p.reductions:
            nest.publish(r, nest.finish_rows(r))
    nest.store_parallel()
    return z.items


def write_scanned_column(nest: Nest) -> int:
    """As `write_column`; each lane carries its scans along its column: `base` holds whole stretches, so that a sum of
    many terms is one of few sums."""
    z, plan = nest.sizing, nest.plan
    tile, _ = nest.begin_item()
    begin, end = nest.tile_range(tile)
    nest.schedule_names()
    stretch = max(8, math.isqrt(z.loop_size))
    with _column_lanes(nest, begin, end):
        for p in _passes(nest):
            for r in p.reductions:
                nest.declare_lanes(r)
            scans = [Scan.of(nest, i) for i in scans_needed(nest, p.reductions, p.stores, p.level)]
            for s in scans:
                nest.emit(f"{s.c_type} {s.name}[LANES], {s.carry}[LANES];")
                nest.emit(f"for (int l = 0; l < LANES; l++) {s.name}[l] = {s.carry}[l] = {s.start};")
            with nest.loop_axes() as step:
                if nest.plan_reversed:
                    nest.turn_around(z.loop)
                with _each_lane(nest):
                    _publish_lanes(nest)
                    for s in scans:
                        s.carry_on(nest)
                    for r in p.reductions:
                        nest.accumulate(r)
                    for k in p.stores:
                        nest.store(k)
                if scans:
                    with nest.block(f"if ({step} % {stretch} == {stretch - 1}) {{", guard=True):
                        with nest.block("FOR_LANES(l, count) {", ("l",)):
                            for s in scans:
                                nest.emit(f"{s.reducer}({s.carry}[l], {s.name}[l]);")
                                nest.emit(f"{s.name}[l] = {s.start};")
            _late_init(nest, p.reductions)
            nest.finished.extend(p.reductions)
        results = nest.outputs(None, plan.parallel_mask)
        if results:
            with _each_lane(nest):
                _publish_lanes(nest)
                for k in results:
                    nest.store(k)
    return z.items


def write_split_column(nest: Nest) -> int:
    z, t = nest.sizing, nest.index_type
    nest.schedule_names()
    size = -(-z.loop_size // z.chunks)
    chunks = -(-z.loop_size // size)
    nest.sizing = z = replace(z, chunks=chunks)
    tile, chunk = nest.begin_item(chunks)
    begin, end = nest.tile_range(tile)
    nest.emit(f"const {t} first = ({t})({chunk}) * {size};")
    nest.emit(f"const {t} last = first + {size} < {z.loop_size} ? first + {size} : {z.loop_size};")
    reductions = nest.reductions(0)
    late = [r.late_init for r in reductions]
    for r in reductions:
        r.late_init = []
    partials = [[nest.new_scratch(kind, z.items * chunks * z.tile) for kind in r.types] for r in reductions]
    name = nest.lane_variable()
    place = f"{name}0 - {begin} + l" if begin != "0" else f"{name}0 + l"
    with _column_lanes(nest, begin, end):
        _column_pass(nest, reductions, nest.outputs(0, nest.plan.domain_mask), "first", "last")
        with nest.block("FOR_LANES(l, count) {"):
            for r, names in zip(reductions, partials, strict=True):
                for n, a in zip(names, r.names, strict=True):
                    nest.emit(f"{n}[BLOCK * {z.tile} + {place}] = {a}[l];")
    nest.counters = z.items
    with nest.block(f"if (is_last_block(counters + BLOCK / {chunks}, {chunks})) {{", guard=True):
        with _column_lanes(nest, begin, end):
            for r, names, init in zip(reductions, partials, late, strict=True):
                again = replace(r, names=[nest.values.name(f"{a}_total") for a in r.names], late_init=init)
                nest.declare_lanes(again)
                with nest.block(f"for (int chunk = 0; chunk < {chunks}; chunk++) {{"):
                    with nest.block("FOR_LANES(l, count) {"):
                        at = f"(BLOCK / {chunks} * {chunks} + chunk) * {z.tile} + {place}"
                        values = [f"{n}[{at}]" for n in names]
                        nest.emit(f"{r.reducer}({', '.join([*(f'{a}[l]' for a in again.names), *values])});")
                nest.finished.append(again)
            with _each_lane(nest):
                _publish_lanes(nest)
                for k in nest.outputs(None, nest.plan.parallel_mask):
                    nest.store(k)
    return z.items * chunks


FORMS: dict[str, Callable[[Nest], int]] = {
    "loop": write_loop,
    "transpose": write_transpose,
    "row": write_row,
    "full": write_split_row,
    "column": write_column,
    "split column": write_split_column,
    "short row": write_short_row,
    "scatter": write_scatter,
    "scanned row": write_scanned_row,
    "scanned column": write_scanned_column,
    "time loop": write_time_loop,
}


def choose_form(nest: Nest) -> str:
    """The form of a plan: by what its lanes run over, and whether its reductions are split over blocks."""
    plan, split = nest.plan, nest.sizing.chunks > 1
    if plan.scatters:
        return "scatter"
    if plan.scans:
        return "scanned row" if plan.lanes_reduced else "scanned column"
    if plan.loops:
        return "time loop"
    if not plan.levels:
        return "transpose" if plan.staged else "loop"
    if plan.lanes_reduced:
        return "full" if split else "row"
    return "split column" if split else "short row" if nest.short_rows else "column"
