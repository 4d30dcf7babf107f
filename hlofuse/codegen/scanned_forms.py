"""Rows and columns along which cumulative operations run.
"""
from __future__ import annotations

import functools
import math

from hlofuse.codegen.column_forms import column_lanes, each_lane, late_init, publish_lanes, store_columns
from hlofuse.codegen.nest import Nest
from hlofuse.codegen.row_passes import Pass, passes
from hlofuse.codegen.scan import Scan, scans_needed


def write_scanned_row(nest: Nest) -> int:
    """A block for each row, as `write_row`, but in step: the threads' runs are scanned together, and a carry goes from
    one tile to the next. What is needed after a scan is computed in a loop over the lanes of its own."""
    z, t = nest.sizing, nest.index_type
    nest.begin_item()
    nest.schedule_names()
    for p in passes(nest):
        for r in p.reductions:
            nest.declare_lanes(r)
        scans = [Scan.of(nest, i) for i in scans_needed(nest, p.reductions, p.stores, p.level)]
        for s in scans:
            nest.emit(f"{s.c_type} {s.carry} = {s.start};")

        def write(p: Pass = p) -> None:
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
    z = nest.sizing
    tile, _ = nest.begin_item()
    begin, end = nest.tile_range(tile)
    nest.schedule_names()
    stretch = max(8, math.isqrt(z.loop_size))
    with column_lanes(nest, begin, end):
        for p in passes(nest):
            for r in p.reductions:
                nest.declare_lanes(r)
            scans = [Scan.of(nest, i) for i in scans_needed(nest, p.reductions, p.stores, p.level)]
            for s in scans:
                nest.emit(f"{s.c_type} {s.name}[LANES], {s.carry}[LANES];")
                nest.emit(f"for (int l = 0; l < LANES; l++) {s.name}[l] = {s.carry}[l] = {s.start};")
            with nest.loop_axes() as step:
                if nest.plan_reversed:
                    nest.turn_around(z.loop)
                with each_lane(nest):
                    publish_lanes(nest)
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
            late_init(nest, p.reductions)
            nest.finished.extend(p.reductions)
        store_columns(nest)
    return z.items
