"""Sizing of the scatter form: the tile of rows x columns that a block owns, and the chunk of the updates that it reads.

Every tile reads all index vectors of its chunk, chunks leave partial results that a last block folds: the tiling is
the one with the least of both. On the CPU accumulators lie in memory, and rows are not cut, because which updates
have one would be a branch that is hard to predict: there are chunks where arrays are small beside the updates, and wide
rows are cut along their columns.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hlofuse.codegen.dialect import Dialect
from hlofuse.fusion.scatter import ASSIGN, Scatter, widest

RUN = 16                  # as many columns are worth neighboring threads or a vector
MOST_COLUMNS = 256        # of a tile
NARROW_COLUMNS = 8        # of a tile whose threads are side by side along the updates
TILE_BYTES = 38 * 1024    # of accumulators in shared memory, which has 48 KiB for them and a round's list
ROUND = 2048              # index vectors that a block looks at together
LEAST_CHUNK = 512         # updates that are worth a block
TASK_ELEMENTS = 65536     # updated elements that are worth a block on the CPU
FEW_ROWS = 8              # an array has few where it has so many times more updates
HOST_COLUMNS = 64         # of a tile on the CPU
SCAN_RATE = 1.6e6         # index vectors per µs that a GPU looks at
FOLD_RATE = 7e3           # partial results per µs that one block folds: few are under way at a time
ELEMENT_RATE = 2e3        # elements of updates per µs that one block adds up, for the same reason
WANTED_BLOCKS = 1056
HOST_BLOCKS = 8


@dataclass(frozen=True)
class Tiling:
    """`rows` x `columns` cells of a block, out of `row_count` x `column_count` in each of `batches`; `chunks` of the
    `updates`. `by_column`: neighboring threads have neighboring columns. `numbered`: of an assignment a row keeps the
    number of its last update, not that update."""

    rows: int
    columns: int
    chunks: int
    by_column: bool
    numbered: bool
    row_count: int
    column_count: int
    batches: int
    updates: int

    def keeps_number(self, s: Scatter) -> bool:
        return self.numbered and s.combine == ASSIGN

    def width(self, s: Scatter) -> int:
        """Accumulators of a row of the tile."""
        return self.columns if s.column_count > 1 and not self.keeps_number(s) else 1

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
        alone = self.batches * self.updates * self.column_count / ELEMENT_RATE / min(blocks, WANTED_BLOCKS)
        fold = self.chunks * self.rows * self.columns / FOLD_RATE if self.chunks > 1 else 0.0
        return max(scan, alone) + fold


def tile_scatters(scatters: Sequence[Scatter], dialect: Dialect) -> Tiling:
    """The tiling of a kernel's scatters."""
    return _on_host(scatters) if dialect.threads == 1 else _on_gpu(scatters)


def _on_gpu(scatters: Sequence[Scatter]) -> Tiling:
    main = widest(scatters)
    wide = [s for s in scatters if s.column_count > 1 and s.combine != ASSIGN]
    by_column = _by_column(wide)
    row_bytes = sum(8 if s.combine == ASSIGN else s.instruction.array.dtype.itemsize * 2
                    for s in scatters if s not in wide)
    columns = min(main.column_count, MOST_COLUMNS if by_column or not wide else NARROW_COLUMNS)
    columns = -(-main.column_count // -(-main.column_count // columns))
    wide_bytes = sum(max(4, s.instruction.array.dtype.itemsize) for s in wide)
    columns = max(1, min(columns, (TILE_BYTES - row_bytes) // max(1, wide_bytes)))
    row_bytes += wide_bytes * columns
    rows = max(1, min(main.row_count, TILE_BYTES // row_bytes))
    found: list[Tiling] = []
    while True:
        tiling = _tiling(main, rows, columns, 1, by_column, True)
        chunks = max(1, min(WANTED_BLOCKS // tiling.items, main.update_count // LEAST_CHUNK))
        found += [replace(tiling, chunks=max(1, chunks // part)) for part in (1, 2, 4, chunks)]
        if rows == 1 or tiling.items >= WANTED_BLOCKS:
            return min(found, key=lambda t: t.extra_us)
        rows = -(-rows // 2)


def _on_host(scatters: Sequence[Scatter]) -> Tiling:
    main = widest(scatters)
    columns, chunks = main.column_count, 1
    blocks = min(HOST_BLOCKS // min(main.batch_count, HOST_BLOCKS), main.update_count * columns // TASK_ELEMENTS)
    by_column = _by_column([s for s in scatters if s.column_count > 1])
    if blocks > 1 and main.row_count * FEW_ROWS <= main.update_count and all(s.combine != ASSIGN for s in scatters):
        chunks = min(blocks, main.update_count // (main.row_count * FEW_ROWS // 2))
    elif blocks > 1 and by_column and columns >= 2 * HOST_COLUMNS:
        columns = RUN * -(-columns // (RUN * min(blocks, columns // HOST_COLUMNS)))
    return _tiling(main, main.row_count, columns, chunks, by_column, False)


def _by_column(scatters: Sequence[Scatter]) -> bool:
    return any(s.has_runs and s.column_count >= RUN for s in scatters)


def _tiling(main: Scatter, rows: int, columns: int, chunks: int, by_column: bool, numbered: bool) -> Tiling:
    return Tiling(rows, columns, chunks, by_column, numbered, main.row_count, main.column_count, main.batch_count,
                  main.update_count)
