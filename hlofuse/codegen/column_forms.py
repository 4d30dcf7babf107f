"""Columns: each lane has its own accumulators. Short rows are columns too, once a tile of them is turned.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from hlofuse.codegen.nest import Nest
from hlofuse.codegen.reduction import Reduction
from hlofuse.codegen.row_passes import passes
from hlofuse.codegen.scalar_expr import storage_type
from hlofuse.hlo.index_map import Index, linearize, to_c, variable
from hlofuse.hlo.module import Instruction
from hlofuse.hlo.shape import Shape


def write_column(nest: Nest) -> int:
    z = nest.sizing
    tile, _ = nest.begin_item()
    begin, end = nest.tile_range(tile)
    nest.schedule_names()
    with column_lanes(nest, begin, end):
        for p in passes(nest):
            _column_pass(nest, p.reductions, p.stores, "0", None)
        store_columns(nest)
    return z.items


@contextmanager
def column_lanes(nest: Nest, begin: str, end: str) -> Iterator[None]:
    name, t = nest.lane_variable(), nest.index_type
    nest.place_lanes()
    nest.finished = []
    with nest.block(f"for_tiles<THREADS, LANES>(({t}){begin}, ({t}){end}, "
                    f"[&](const {t} {name}0, const int count) INLINE {{", footer="});"):
        yield


@contextmanager
def each_lane(nest: Nest) -> Iterator[None]:
    name = nest.lane_variable()
    with nest.block("FOR_LANES(l, count) {", (name, "l")):
        if nest.sizing.vector_size > 1:
            nest.emit(f"const {nest.index_type} {name} = {name}0 + l;")
        yield


def publish_lanes(nest: Nest) -> None:
    for r in nest.finished:
        for name, init in zip(r.names, r.late_init, strict=False):
            nest.emit(f"{r.reducer}({name}[l], {init});")
        r.late_init = []
        nest.publish(r, [f"{a}[l]" for a in r.names])


def store_columns(nest: Nest) -> None:
    """Stores what has one element a column."""
    results = nest.outputs(None, nest.plan.parallel_mask)
    if results:
        with each_lane(nest):
            publish_lanes(nest)
            for k in results:
                nest.store(k)


def _column_pass(nest: Nest, reductions: list[Reduction], stores: list[int], begin: str, end: str | None) -> None:
    for r in reductions:
        nest.declare_lanes(r)
    with nest.loop_axes(begin, end, reductions):
        with each_lane(nest):
            publish_lanes(nest)
            for r in reductions:
                nest.accumulate(r)
            for k in stores:
                nest.store(k)
    late_init(nest, reductions)
    nest.finished.extend(reductions)


def late_init(nest: Nest, reductions: list[Reduction]) -> None:
    if any(r.late_init for r in reductions):
        with each_lane(nest):
            for r in reductions:
                for name, init in zip(r.names, r.late_init, strict=False):
                    nest.emit(f"{r.reducer}({name}[l], {init});")
                r.late_init = []


def write_short_row(nest: Nest) -> int:
    """Neighboring lanes have neighboring rows: a tile of rows is turned on the stack, where the lanes' elements lie
    side by side, and the results are turned back."""
    z = nest.sizing
    tile, _ = nest.begin_item()
    begin, end = nest.tile_range(tile)
    nest.schedule_names()
    with column_lanes(nest, begin, end):
        turned_back = _turn_rows(nest) if len(z.loop) == 1 else []
        for p in passes(nest):
            _column_pass(nest, p.reductions, p.stores, "0", None)
        for out, name, place in turned_back:
            with each_lane(nest), nest.loop_axes():
                nest.emit(f"{out}[{place}] = {name};")
        store_columns(nest)
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
        with each_lane(nest), nest.loop_axes():
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
    with column_lanes(nest, begin, end):
        _column_pass(nest, reductions, nest.outputs(0, nest.plan.domain_mask), "first", "last")
        with nest.block("FOR_LANES(l, count) {"):
            for r, names in zip(reductions, partials, strict=True):
                for n, a in zip(names, r.names, strict=True):
                    nest.emit(f"{n}[BLOCK * {z.tile} + {place}] = {a}[l];")
    nest.counters = z.items
    with nest.block(f"if (is_last_block(counters + BLOCK / {chunks}, {chunks})) {{", guard=True):
        with column_lanes(nest, begin, end):
            for r, names, init in zip(reductions, partials, late, strict=True):
                again = replace(r, names=[nest.values.name(f"{a}_total") for a in r.names], late_init=init)
                nest.declare_lanes(again)
                with nest.block(f"for (int chunk = 0; chunk < {chunks}; chunk++) {{"):
                    with nest.block("FOR_LANES(l, count) {"):
                        at = f"(BLOCK / {chunks} * {chunks} + chunk) * {z.tile} + {place}"
                        values = [f"{n}[{at}]" for n in names]
                        nest.emit(f"{r.reducer}({', '.join([*(f'{a}[l]' for a in again.names), *values])});")
                nest.finished.append(again)
            with each_lane(nest):
                publish_lanes(nest)
                for k in nest.outputs(None, nest.plan.parallel_mask):
                    nest.store(k)
    return z.items * chunks
