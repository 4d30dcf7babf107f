"""Sizing of the scatter form: the tile of rows x columns that a block owns, and the chunk of the updates that it reads.

Every tile reads all index vectors of its chunk, chunks leave partial results that a last block folds: the tiling is
the one with the least of both. On the CPU accumulators lie in memory and columns are cut, because rows that are cut
make a branch that is hard to predict; there is one chunk unless arrays are small beside the updates.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hlofuse.codegen.dialect import Dialect
from hlofuse.codegen.scalar_expr import c_type
from hlofuse.fusion.scatter import ASSIGN, Scatter, widest
from hlofuse.hlo.shape import Shape

RUN = 16                  # as many columns are worth neighboring threads or a vector
MOST_COLUMNS = 256        # of a tile
NARROW_COLUMNS = 8        # of a tile whose threads are side by side along the updates
TILE_BYTES = 24 * 1024    # of accumulators in shared memory: several blocks of a multiprocessor
ROUND = 2048              # index vectors that a block looks at together
TASK_UPDATES = 65536      # updated elements that are worth a block on the CPU
SCAN_RATE = 1.6e6         # index vectors per µs that a GPU looks at
FOLD_RATE = 3e4           # partial results per µs that one block folds
ROW_RATE = 1e5            # elements per µs that one block adds up
WANTED_BLOCKS = 1056
HOST_BLOCKS = 16


@dataclass(frozen=True)
class Tiling:
    """`rows` x `columns` cells of a block, out of `row_count` x `column_count` in each of `batches`; `chunks` of the
    `updates`. `by_column`: neighboring threads have neighboring columns."""

    rows: int
    columns: int
    chunks: int
    by_column: bool
    row_count: int
    column_count: int
    batches: int
    updates: int

    @property
    def row_tiles(self) -> int:
        return -(-self.row_count // self.rows)

    @property
    def column_tiles(self) -> int:
        return -(-self.column_count // self.columns)

    @property
    def items(self) -> int:
        return self.batches * self.row_tiles * self.column_tiles

    @property
    def chunk_size(self) -> int:
        return -(-self.updates // self.chunks)

    @property
    def extra_us(self) -> float:
        """On a GPU: what is not reading updates and writing results once."""
        scan = self.items * self.updates / SCAN_RATE
        blocks = self.items * self.chunks
        alone = self.batches * self.updates * self.column_count / ROW_RATE / min(blocks, WANTED_BLOCKS)
        fold = self.chunks * self.rows * self.columns / FOLD_RATE if self.chunks > 1 else 0.0
        return max(scan, alone) + fold


def accumulator_type(s: Scatter, wide_index: bool = False) -> str:
    """The C type of a cell while it is accumulated: of an assignment, of the number of the last update."""
    if s.combine == ASSIGN:
        return "s64" if wide_index else "s32"
    return c_type(s.instruction.element_type)


def _cell_bytes(scatters: Sequence[Scatter], wide: bool) -> int:
    sizes = {"float": 4, "double": 8, "bool": 1}
    return sum(sizes.get(kind) or Shape(kind).dtype.itemsize
               for kind in (accumulator_type(s, True) for s in scatters if s.is_wide == wide))


def tile_scatters(scatters: Sequence[Scatter], dialect: Dialect) -> Tiling:
    main = widest(scatters)
    # Where only numbers of updates are kept, columns are cut for the finish alone.
    by_column = any(s.is_wide and s.has_runs and s.column_count >= RUN for s in scatters)
    if dialect.threads == 1:
        return _on_host(scatters, main, by_column)
    wide, narrow = max(1, _cell_bytes(scatters, True)), _cell_bytes(scatters, False)
    columns = min(main.column_count, MOST_COLUMNS if by_column or not _has_wide(scatters) else NARROW_COLUMNS)
    columns = -(-main.column_count // -(-main.column_count // columns))
    most = max(1, min(main.row_count, TILE_BYTES // (wide * columns + narrow)))
    found = []
    rows = most
    while True:
        tiling = Tiling(rows, columns, 1, by_column, main.row_count, main.column_count, main.batch_count,
                        main.update_count)
        chunks = max(1, min(WANTED_BLOCKS // tiling.items, main.update_count // (2 * ROUND)))
        for n in dict.fromkeys((chunks, max(1, chunks // 2), max(1, chunks // 4), 1)):
            found.append(Tiling(rows, columns, n, by_column, main.row_count, main.column_count, main.batch_count,
                                main.update_count))
        if rows == 1 or tiling.items >= WANTED_BLOCKS:
            break
        rows = -(-rows // 2)
    return min(found, key=lambda t: t.extra_us)


def _has_wide(scatters: Sequence[Scatter]) -> bool:
    return any(s.is_wide for s in scatters)


def _on_host(scatters: Sequence[Scatter], main: Scatter, by_column: bool) -> Tiling:
    rows, columns, chunks = main.row_count, main.column_count, 1
    work = max(main.update_count, rows) * columns
    blocks = max(1, min(HOST_BLOCKS // min(main.batch_count, HOST_BLOCKS), work // TASK_UPDATES))
    if blocks > 1 and by_column and columns >= 2 * RUN:
        columns = RUN * -(-columns // (RUN * min(blocks, columns // RUN)))
    elif blocks > 1 and rows * columns * 8 <= main.update_count:
        chunks = min(blocks, HOST_BLOCKS // 2)
    elif blocks > 1:
        rows = -(-rows // min(blocks, HOST_BLOCKS // 2, rows))
    return Tiling(rows, columns, chunks, by_column, main.row_count, main.column_count, main.batch_count,
                  main.update_count)
