"""Dialects as data: how a block is shaped and how a kernel's frame is spelled on the CPU and on the GPU.

Kernel bodies are the same text in every dialect; what differs stands here and in the prelude. Emitters read numbers
from the record and never ask which backend they write for.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hlofuse.codegen.prelude import block_prelude, prelude

MIN_TILE_LANES = 16    # lanes of a thread that still are a vector


@dataclass(frozen=True)
class Argument:
    """One kernel parameter: `kind` is "IN", "OUT" or "SCRATCH"; `c_type` is the type in memory."""

    kind: str
    c_type: str
    name: str


@dataclass(frozen=True)
class Dialect:
    """`lanes`: neighboring elements of one thread; `row_lanes`: the same in rows; `column_lanes`: accumulators of one
    thread in column reductions; `keep_elements`: how much of a row one thread may hold between passes;
    `keep_loads`: whether a row's operands are held too, or read again from the cache; `vector_bytes`: what a thread
    reads at once where its lanes are neighbors in memory (0: the compiler makes vectors of loops); `group_threads`:
    short rows share a block of so many threads; `vector_minimum`: the shortest inner loop before outer axes are
    flattened into it; `tile_elements`: what a block of the loop form covers."""

    name: str
    threads: int
    max_row_threads: int
    lanes: int
    row_lanes: int
    column_lanes: int
    column_threads: int
    keep_elements: int
    keep_loads: bool
    vector_bytes: int
    group_threads: int
    vector_minimum: int
    unroll_minor: int       # an innermost loop of at most so many, with branches in it, is written out for each lane
    short_row: int          # the lanes run over rows that are shorter, not along them
    tile_elements: int
    transpose_threads: int
    transpose_tile: int     # a transpose goes through square tiles of so many elements a side
    split_below: int        # fewer rows than this are split over blocks
    chunk_elements: int     # the least that a split leaves to a block
    column_blocks: int      # how many blocks a column reduction wants
    row_batch: int          # runs of a row, and rows of a column, that a thread folds at once (codegen/batches.py)
    column_batch: int
    time_lanes: int         # lanes of one thread that run a loop in step
    time_minimum: int       # as `vector_minimum`, for loops: an axis of its own is cheaper than flattened indices
    tile_bytes: int         # of what loops leave to later ones in all lanes of a thread; 0: that is in memory
    block_minimum: int      # as `vector_minimum`, for the points of a loop that a block runs,
    block_lanes: int        # and accumulators of one thread in it: enough to hide the latency of one

    @property
    def prelude(self) -> str:
        """What stands before the kernels in every translation unit."""
        return prelude(self.name) + block_prelude(self.name)

    def frame(self, symbol: str, arguments: Sequence[Argument], shape: BlockShape, pieces: Sequence[Piece]) -> str:
        """The whole text of a kernel from its pieces' bodies."""
        return FRAMES[self.name](symbol, arguments, shape, pieces)


@dataclass(frozen=True)
class BlockShape:
    """`threads` threads work on an item (BLOCK), and `groups` items share a block of the machine. `roomy`: data that
    waits in registers is worth more than many blocks at a time."""

    threads: int
    groups: int = 1
    roomy: bool = False


@dataclass(frozen=True)
class Piece:
    """A segment's body as a function of its own `arguments`, which stand at `positions` among the kernel's; its
    counters begin at `counters`."""

    arguments: Sequence[Argument]
    body: str
    blocks: int
    counters: int
    positions: tuple[int, ...]
    number: int


def _function(name: str, piece: Piece) -> str:
    parameters = "".join(f", {a.kind}({a.c_type}) {a.name}" for a in piece.arguments)
    return f"DEVICE void {name}(const BlockIndex BLOCK, unsigned* counters{parameters}) {{\n{piece.body}}}\n\n"


def _calls(symbol: str, arguments: Sequence[Argument], pieces: Sequence[Piece], block: str) -> list[str]:
    """One statement per segment: the blocks are dealt out in order."""
    lines: list[str] = []
    first = 0
    for piece in pieces:
        names = "".join(f", {arguments[k].name}" for k in piece.positions)
        at = f"{block} - {first}" if first else block
        counters = f"counters + {piece.counters}" if piece.counters else "counters"
        call = f"{_piece_name(symbol, piece, pieces)}({at}, {counters}{names});"
        last = piece is pieces[-1]
        first += piece.blocks
        test = "" if last else f"if ({block} < {first}) "
        lines.append(("else " if lines else "") + test + call)
    return lines


def _piece_name(symbol: str, piece: Piece, pieces: Sequence[Piece]) -> str:
    return f"{symbol}_block" if len(pieces) == 1 else f"{symbol}_segment{piece.number}"


def _host_frame(symbol: str, arguments: Sequence[Argument], shape: BlockShape, pieces: Sequence[Piece]) -> str:
    """A block function for each segment, and an entry that runs blocks [begin, end)."""
    functions = "".join(_function(_piece_name(symbol, p, pieces), p) for p in pieces)
    unpacked = "".join(f"  {'const ' if a.kind == 'IN' else ''}{a.c_type}* {a.name} = "
                       f"({'const ' if a.kind == 'IN' else ''}{a.c_type}*)buffers[{k}];\n"
                       for k, a in enumerate(arguments))
    calls = _calls(symbol, arguments, pieces, "block")
    loop = "  for (long long block = begin; block < end; block++)"
    inner = "".join(f"    {c}\n" for c in calls)
    body = f"{loop} {calls[0]}\n" if len(calls) == 1 else f"{loop} {{\n{inner}  }}\n"
    head = f"extern \"C\" void {symbol}(void** buffers, long long begin, long long end, unsigned* counters) {{\n"
    return f"{functions}{head}{unpacked}{body}}}\n"


def _cuda_frame(symbol: str, arguments: Sequence[Argument], shape: BlockShape, pieces: Sequence[Piece]) -> str:
    """The body itself where there is one segment, else a function for each."""
    parameters = ", ".join([*(f"{a.kind}({a.c_type}) {a.name}" for a in arguments), "unsigned* counters"])
    bounds = f"{shape.threads * shape.groups}, 1" if shape.roomy else f"{shape.threads * shape.groups}"
    block, items = "(int)blockIdx.x", sum(p.blocks for p in pieces)
    if shape.groups > 1:
        block = f"(int)(blockIdx.x * {shape.groups} + threadIdx.x / {shape.threads})"
    rest = f"  if (BLOCK >= {items}) return;\n" if items % shape.groups else ""
    head = (f"extern \"C\" __global__ void __launch_bounds__({bounds}) {symbol}({parameters}) {{\n"
            f"  const int BLOCK = {block};\n{rest}")
    if len(pieces) == 1:
        return f"{head}{pieces[0].body}}}\n"
    functions = "".join(_function(_piece_name(symbol, p, pieces), p) for p in pieces)
    return functions + head + "".join(f"  {c}\n" for c in _calls(symbol, arguments, pieces, "BLOCK")) + "}\n"


FRAMES = {"host": _host_frame, "cuda": _cuda_frame, "simt": _cuda_frame}

HOST = Dialect(
    name="host", threads=1, max_row_threads=1, lanes=64, row_lanes=64,
    column_lanes=1024, column_threads=1, keep_elements=16384, keep_loads=False, vector_bytes=0, group_threads=1,
    vector_minimum=48, unroll_minor=4, short_row=24, tile_elements=8192, transpose_threads=1, transpose_tile=128,
    split_below=8, chunk_elements=16384, column_blocks=16, row_batch=1, column_batch=1,
    time_lanes=256, time_minimum=16, tile_bytes=512 * 1024, block_minimum=8, block_lanes=256)

CUDA = Dialect(
    name="cuda", threads=256, max_row_threads=1024, lanes=4, row_lanes=4,
    column_lanes=1, column_threads=128, keep_elements=16, keep_loads=True, vector_bytes=16, group_threads=256,
    vector_minimum=512, unroll_minor=0, short_row=0, tile_elements=2048, transpose_threads=256, transpose_tile=32,
    split_below=264, chunk_elements=4096, column_blocks=1056, row_batch=4, column_batch=8,
    time_lanes=1, time_minimum=512, tile_bytes=0, block_minimum=1 << 30, block_lanes=1)

# CUDA's text under another prelude, in which the threads of a block are fibers on the CPU and everything is checked.
SIMT = replace(CUDA, name="simt")

DIALECTS = {"host": HOST, "cuda": CUDA}     # in which every kernel is written
