"""The kernel forms: one emitter each, and the table of them.

Where the lanes are reduced (rows) they fold at the end of a pass; where they are not (loops, columns) each lane has
its own accumulators. A reduction that is split over blocks leaves partial results, which the last block of its item
folds in fixed order. Every emitter returns the number of blocks.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

from hlofuse.codegen.block_loop import write_block_loop
from hlofuse.codegen.column_forms import write_column, write_short_row, write_split_column
from hlofuse.codegen.nest import Nest
from hlofuse.codegen.row_forms import write_row, write_split_row
from hlofuse.codegen.scalar_expr import storage_type
from hlofuse.codegen.scanned_forms import write_scanned_column, write_scanned_row
from hlofuse.codegen.scatter_form import write_scatter
from hlofuse.codegen.time_loop import write_time_loop
from hlofuse.codegen.values import EmitError
from hlofuse.fusion.plan import Axis
from hlofuse.hlo.index_map import Index, Var, constant, linearize, to_c, variable
from hlofuse.hlo.module import Instruction


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
    "block loop": write_block_loop,
}


def choose_form(nest: Nest) -> str:
    """The form of a plan: by what its lanes run over, and whether its reductions are split over blocks."""
    plan, split = nest.plan, nest.sizing.chunks > 1
    if plan.scatters:
        return "scatter"
    if plan.scans:
        return "scanned row" if plan.lanes_reduced else "scanned column"
    if plan.block is not None:
        return "block loop"
    if plan.loops:
        return "time loop"
    if not plan.levels:
        return "transpose" if plan.staged else "loop"
    if plan.lanes_reduced:
        return "full" if split else "row"
    return "split column" if split else "short row" if nest.short_rows else "column"
