"""Sizing: how a plan is cut for a dialect into lanes, threads, tiles and chunks."""
from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hlofuse.codegen.dialect import MIN_TILE_LANES, Dialect
from hlofuse.fusion.plan import Axis, Plan, left_to_loops
from hlofuse.hlo.module import Computation, Instruction


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
    groups: int = 1     # items that share a block
    unrolled: tuple[Axis, ...] = ()    # short innermost axes, written out for each lane

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


SHORT_ROW_LANES = 128    # rows of a tile whose elements wait on the stack
CUT_RUN = 16             # an inner loop so long is one of its own where it has branches
COLUMN_RUN = 512         # with fewer columns a block would read too little of each row


def size_plan(plan: Plan, dialect: Dialect, short_rows: bool = False) -> Sizing:
    """Chooses lanes, threads, tiles and chunks. `short_rows`: the plan's lanes run over rows that lie one by one."""
    if short_rows:
        dialect = replace(dialect, column_lanes=SHORT_ROW_LANES)
    axes = plan.axes
    if plan.block is not None:
        return Sizing(axes, (), (), _block_threads(plan.block.points, dialect), 1, 1, 1)
    if plan.scans and plan.lanes_reduced:
        return _size_row(plan, plan.parallel, (), plan.reduced,
                         replace(dialect, max_row_threads=min(dialect.max_row_threads, dialect.threads)))
    is_loop = not plan.levels and not plan.scans and not plan.loops
    if is_loop and len(axes) > 1 and axes[-1].size <= dialect.unroll_minor and has_branches(plan.computation):
        outer, vector = _innermost(axes[:-1], dialect.vector_minimum)
        return replace(_size_loop(plan, outer, vector, dialect), unrolled=axes[-1:])
    last_kind = axes[-1].reduced if axes else False
    inner = tuple(a for a in axes if a.reduced == last_kind)
    other = tuple(a for a in axes if a.reduced != last_kind)
    rest, vector = _innermost(inner, dialect.time_minimum if plan.loops else shortest_run(plan, dialect))
    if plan.loops:
        return _size_time_loop(plan, rest, vector, dialect)
    if is_loop:
        return _size_loop(plan, rest, vector, dialect)
    if plan.lanes_reduced:
        return _size_row(plan, other, rest, vector, dialect)
    return _size_column(plan, rest, other, vector, dialect)


def shortest_run(plan: Plan, dialect: Dialect) -> int:
    """The shortest inner loop before outer axes are flattened into it. Only a loop of one axis can be cut where its
    branches change, without which a compiler makes no vectors of it."""
    is_cut = not dialect.vector_bytes and not plan.levels and has_branches(plan.computation)
    return min(CUT_RUN, dialect.vector_minimum) if is_cut else dialect.vector_minimum


def _innermost(axes: tuple[Axis, ...], least: int) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """The outer axes, and as many of the innermost as make a loop long enough for lanes."""
    cut, size = len(axes), 1
    while cut and size < least:
        cut -= 1
        size *= axes[cut].size
    return axes[:cut], axes[cut:]


def has_branches(computation: Computation) -> bool:
    """Whether an element is read here or there depending on where it is."""
    return any(i.opcode in ("pad", "concatenate", "dynamic-update-slice", "reduce-window")
               for i in computation.instructions)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def _fitting_lanes(plan: Plan, outer: tuple[Axis, ...], size: int, lanes: int, dialect: Dialect) -> int:
    """As many lanes as make aligned words of every line of `size` elements. An odd line has one, so that neighbor
    threads read neighbors."""
    lanes = min(lanes, _power_of_two(size))
    if not dialect.vector_bytes:
        return lanes
    arrays = [*plan.computation.parameters, *plan.computation.outputs]
    widest = max((a.array.dtype.itemsize for a in arrays if a.array.size > 1), default=1)
    lanes = max(1, min(lanes, dialect.vector_bytes // widest))
    while math.prod(a.size for a in outer) > 1 and size % lanes:
        lanes //= 2
    return lanes


def _size_loop(plan: Plan, outer: tuple[Axis, ...], vector: tuple[Axis, ...], dialect: Dialect) -> Sizing:
    size = math.prod(a.size for a in vector)
    lanes = _fitting_lanes(plan, outer, size, dialect.lanes, dialect)
    threads = 1 if dialect.threads == 1 else min(dialect.threads, round_up(-(-size // lanes), 32))
    tile = size if size <= dialect.tile_elements * 3 // 2 else dialect.tile_elements
    return Sizing(outer, (), vector, threads, lanes, max(tile, 1), 1)


def _size_time_loop(plan: Plan, outer: tuple[Axis, ...], vector: tuple[Axis, ...], dialect: Dialect) -> Sizing:
    """Blocks are small: every lane runs long, and each part of the machine should have one. What loops leave
    to later ones should stay in the nearest cache but one."""
    size = math.prod(a.size for a in vector)
    lanes = min(dialect.time_lanes, _power_of_two(size))
    if dialect.tile_bytes:
        kept = lane_tile_bytes(plan)
        while lanes > MIN_TILE_LANES and kept * lanes > dialect.tile_bytes // 4:
            lanes //= 2
    threads = 1
    if dialect.threads > 1:
        total = size * math.prod(a.size for a in outer)
        threads = 32
        while threads < dialect.threads and total >= 2 * threads * dialect.column_blocks:
            threads *= 2
        threads = min(threads, round_up(size, 32))
    return Sizing(outer, (), vector, threads, lanes, min(size, max(threads * lanes, 1)), 1)


def lane_tile_bytes(plan: Plan) -> int:
    """What the loops of a plan leave to later ones in each lane, where it is no result."""
    lanes = math.prod(a.size for a in plan.axes)
    return sum(r.array.byte_size // lanes for r in left_to_loops(plan.computation)
               if r not in plan.computation.outputs and plan.analysis.mask(r) & plan.domain_mask)


def _block_threads(points: int, dialect: Dialect) -> int:
    """Of a block that holds a tile: its largest array, within what leaves each thread registers enough."""
    return 1 if dialect.threads == 1 else max(32, min(dialect.max_row_threads // 2, _power_of_two(points)))


def _size_row(plan: Plan, outer: tuple[Axis, ...], loop: tuple[Axis, ...], vector: tuple[Axis, ...],
              dialect: Dialect) -> Sizing:
    size = math.prod(a.size for a in vector)
    lanes = _fitting_lanes(plan, (*outer, *loop), size, dialect.row_lanes, dialect)
    rows = math.prod(a.size for a in outer)
    threads = 1
    if dialect.max_row_threads > 1:
        wanted = _power_of_two(-(-size // (lanes * 4)))
        least = 32 if rows * 32 < dialect.split_below * dialect.group_threads else 8
        threads = min(dialect.max_row_threads, max(least, wanted))
    total = size * math.prod(a.size for a in loop)
    chunks = 1
    if can_split(plan) and rows < dialect.split_below and total >= 4 * dialect.chunk_elements:
        chunks = min(1024 // max(1, rows) if rows < 1024 else 1, total // dialect.chunk_elements)
        threads = min(dialect.threads, max(threads, 32))
    groups = 1
    if chunks <= 1 and 1 < threads <= 32:
        while threads * groups < dialect.group_threads and rows >= 2 * groups * dialect.split_below:
            groups *= 2
    return Sizing(outer, loop, vector, threads, lanes, size, max(1, chunks), groups)


def _size_column(plan: Plan, outer: tuple[Axis, ...], loop: tuple[Axis, ...], vector: tuple[Axis, ...],
                 dialect: Dialect) -> Sizing:
    size = math.prod(a.size for a in vector)
    lanes = min(dialect.column_lanes, _power_of_two(size))
    threads = 1 if dialect.column_threads == 1 else min(dialect.column_threads, round_up(-(-size // lanes), 32))
    tile = min(threads * lanes, size)
    sizing = Sizing(outer, loop, vector, threads, lanes, tile, 1)
    rows = sizing.loop_size
    if not can_split(plan):
        while sizing.items < dialect.split_below and sizing.lanes > COLUMN_RUN:
            lanes = sizing.lanes // 2
            sizing = replace(sizing, lanes=lanes, tile=min(threads * lanes, size))
    elif sizing.items < dialect.column_blocks and rows * tile >= 4 * dialect.chunk_elements:
        wanted = min(-(-dialect.column_blocks // sizing.items), rows * tile // dialect.chunk_elements, rows,
                     max(1, 65536 // (4 * tile)))
        sizing = replace(sizing, chunks=max(1, wanted))
    return sizing


def can_split(plan: Plan) -> bool:
    """Whether a reduction may leave partial results: nothing over the whole domain waits for it."""
    if plan.scans or any(level for level in plan.levels.values()):
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


