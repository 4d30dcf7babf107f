"""Dialects as data: how a block is shaped and how a kernel's frame is spelled on the CPU and on the GPU.

Kernel bodies are the same text in every dialect; what differs stands here and in the prelude. Emitters read numbers from
the record and never ask which backend they write for.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hlofuse.codegen.prelude import block_prelude, prelude


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
    `keep_loads`: whether a row's operands are held too, or read again from the cache; `vector_minimum`: the shortest
    inner loop before outer axes are flattened into it; `tile_elements`: what a block of the loop form covers."""

    name: str
    threads: int
    max_row_threads: int
    lanes: int
    row_lanes: int
    column_lanes: int
    column_threads: int
    keep_elements: int
    keep_loads: bool
    vector_minimum: int
    tile_elements: int
    transpose_threads: int
    split_below: int        # fewer rows than this are split over blocks
    chunk_elements: int     # the least that a split leaves to a block
    column_blocks: int      # how many blocks a column reduction wants

    @property
    def prelude(self) -> str:
        """What stands before the kernels in every translation unit."""
        return prelude(self.name) + block_prelude(self.name)

    def frame(self, symbol: str, arguments: Sequence[Argument], threads: int, body: str) -> str:
        return FRAMES[self.name](symbol, arguments, threads, body)


def _host_frame(symbol: str, arguments: Sequence[Argument], threads: int, body: str) -> str:
    """A block function, and an entry that runs blocks [begin, end)."""
    parameters = "".join(f", {a.kind}({a.c_type}) {a.name}" for a in arguments)
    unpacked = "".join(f"  {'const ' if a.kind == 'IN' else ''}{a.c_type}* {a.name} = "
                       f"({'const ' if a.kind == 'IN' else ''}{a.c_type}*)buffers[{k}];\n"
                       for k, a in enumerate(arguments))
    names = "".join(f", {a.name}" for a in arguments)
    return (f"DEVICE void {symbol}_block(const long long BLOCK, unsigned* counters{parameters}) {{\n{body}}}\n\n"
            f"extern \"C\" void {symbol}(void** buffers, long long begin, long long end, unsigned* counters) {{\n"
            f"{unpacked}  for (long long block = begin; block < end; block++) "
            f"{symbol}_block(block, counters{names});\n}}\n")


def _cuda_frame(symbol: str, arguments: Sequence[Argument], threads: int, body: str) -> str:
    parameters = ", ".join([*(f"{a.kind}({a.c_type}) {a.name}" for a in arguments), "unsigned* counters"])
    return (f"extern \"C\" __global__ void __launch_bounds__({threads}) {symbol}({parameters}) {{\n"
            f"  const long long BLOCK = blockIdx.x;\n{body}}}\n")


FRAMES = {"host": _host_frame, "cuda": _cuda_frame}

HOST = Dialect(
    name="host", threads=1, max_row_threads=1, lanes=64, row_lanes=64,
    column_lanes=1024, column_threads=1, keep_elements=16384, keep_loads=False, vector_minimum=48, tile_elements=8192,
    transpose_threads=1, split_below=8, chunk_elements=16384, column_blocks=16)

CUDA = Dialect(
    name="cuda", threads=256, max_row_threads=1024, lanes=4, row_lanes=4,
    column_lanes=1, column_threads=128, keep_elements=16, keep_loads=True, vector_minimum=512, tile_elements=2048,
    transpose_threads=256, split_below=264, chunk_elements=4096, column_blocks=1056)

DIALECTS = {"host": HOST, "cuda": CUDA}
