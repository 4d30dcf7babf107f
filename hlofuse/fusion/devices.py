"""Devices: one row of data each. Every constant that the cost model reads stands here.

Sources: NVIDIA's data sheets and tuning guides (SM counts, clocks, bandwidths, register files), XLA's device
description of the H200; launch times and cache speeds are round figures of published microbenchmarks. `host` stands for
two cores of an x86 server, where a "launch" is a custom call.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

from hlofuse.codegen.dialect import CUDA, HOST
from hlofuse.errors import UnknownNameError


@dataclass(frozen=True)
class BlockLimits:
    """How kernels lie on the device, as their text has it (codegen/dialect.py, sizing.py)."""

    lanes: int            # elements of one thread
    group_threads: int    # the fewest threads of a row
    row_threads: int      # the most
    scan_threads: int     # the most of a scanned row
    column_width: int     # columns of one block
    split_below: int      # fewer rows than this are split over blocks,
    split_elements: int   # if there are so many elements;
    chunk_elements: int   # the least that a split leaves to a block,
    row_chunks: int       # the most chunks of all rows,
    split_blocks: int     # how many blocks columns are split into,
    partial_bytes: int    # and the most partial results of one column block
    kept_bytes: int       # of a row, that its block keeps between passes
    per_sm: int           # blocks of one SM that share the cache
    block_bytes: int      # of the arrays of a loop that one block runs: shared memory, or what stays near a core;
    joined_bytes: int     # several small ones are one block's


@dataclass(frozen=True)
class DeviceSpec:
    """Bandwidths in bytes/µs (= MB/s), rates in operations/µs, times in µs, sizes in bytes."""

    name: str
    dialect: str                 # which text runs on it: "cuda" | "host"
    arch: str                    # NVRTC's name, "" for the host
    sm_count: int
    threads_per_sm: int
    registers_per_sm: int
    max_registers: int           # of one thread
    shared_per_sm: int
    shared_optin: int            # largest shared memory of one block
    memory_bytes: int            # what programs that exceed it are colored again for (peak_memory.py)
    bandwidth: float
    l2_bandwidth: float
    l2_bytes: int
    launch_us: float             # one more kernel in a graph
    fp32_rate: float
    int_rate: float
    special_rate: float          # sin, exp, …
    div_rate: float
    fp64_rate: float
    matmul_rate: float           # multiply-adds * 2 of a library's f32/TF32 matrix product
    half_matmul_rate: float      # the same in f16 and bf16
    latency_bytes: float         # bytes in flight that saturate the memory (Little's law), per SM; 0: any do
    thread_bytes: float          # in flight, of one thread
    tile_bytes: int              # as the dialect's: what loops leave to later ones beside a thread
    busy_lanes: int              # of one SM, that hide each other's latency in a loop; 0: one does
    overlap_loss: float          # of the shorter of computing and moving, what is not hidden behind the longer
    strided_penalty: float       # of memory time, where neighbors in memory are not neighbors in the inner loop
    blocks: BlockLimits
    library_epilogues: bool      # whether what follows a product may be computed by the library (epilogues.py)

    def matmul_rate_of(self, element_type: str) -> float:
        """Of a product in a type; without matrix units, two operations for each multiply-add."""
        rates = {"f16": self.half_matmul_rate, "bf16": self.half_matmul_rate, "f32": self.matmul_rate,
                 "c64": self.matmul_rate / 4, "f64": 2 * self.fp64_rate, "c128": self.fp64_rate / 2}
        return rates.get(element_type, self.int_rate)


_GPU_BLOCKS = BlockLimits(
    lanes=CUDA.lanes, group_threads=32, row_threads=CUDA.max_row_threads, scan_threads=256,
    column_width=CUDA.column_threads, split_below=CUDA.split_below, split_elements=1 << 14,
    chunk_elements=CUDA.chunk_elements, row_chunks=1024, split_blocks=CUDA.column_blocks, partial_bytes=65536,
    kept_bytes=4 * CUDA.keep_elements * CUDA.max_row_threads, per_sm=4, block_bytes=48 * 1024, joined_bytes=0)


def _gpu(name: str, arch: str, sm_count: int, clock_ghz: float, bandwidth_gbs: float, memory_gb: float, l2_mb: float,
         matmul_tflops: tuple[float, float], *, fp32_per_sm: int = 128, fp64_share: float = 1 / 64, threads: int = 2048,
         shared_kb: int = 228, optin_kb: int = 227, launch_us: float = 2.2) -> DeviceSpec:
    """`matmul_tflops` are those of f32 (TF32 where there is) and of half precision, as libraries reach them."""
    rate = sm_count * clock_ghz * 1e3          # SM cycles per µs
    bandwidth = bandwidth_gbs * 1e3
    return DeviceSpec(name, "cuda", arch, sm_count, threads, 65536, 255, shared_kb * 1024, optin_kb * 1024,
                      int(memory_gb * 1e9), bandwidth, 2.5 * bandwidth, int(l2_mb * 1e6), launch_us,
                      fp32_rate=rate * fp32_per_sm, int_rate=rate * 64, special_rate=rate * 8, div_rate=rate * 8,
                      fp64_rate=rate * fp32_per_sm * fp64_share, matmul_rate=matmul_tflops[0] * 1e6,
                      half_matmul_rate=matmul_tflops[1] * 1e6, latency_bytes=bandwidth * 0.7 / sm_count,
                      thread_bytes=16.0, tile_bytes=CUDA.tile_bytes, busy_lanes=512, overlap_loss=0.15,
                      strided_penalty=1.15, blocks=_GPU_BLOCKS, library_epilogues=True)


DEVICES: dict[str, DeviceSpec] = {d.name: d for d in (
    _gpu("t4", "sm_75", 40, 1.59, 320, 16, 4, (8, 50), fp32_per_sm=64, fp64_share=1 / 32, threads=1024, shared_kb=64,
         optin_kb=64),
    _gpu("a100", "sm_80", 108, 1.41, 1555, 40, 40, (120, 250), fp32_per_sm=64, fp64_share=1 / 2, shared_kb=164,
         optin_kb=163),
    _gpu("h100", "sm_90", 132, 1.98, 3350, 80, 50, (400, 750), fp64_share=1 / 2),
    _gpu("h200", "sm_90", 132, 1.98, 4800, 141, 50, (400, 750), fp64_share=1 / 2),
    _gpu("b200", "sm_100", 148, 1.96, 8000, 180, 126, (900, 1800), fp64_share=1 / 2),
    _gpu("rtx4090", "sm_89", 128, 2.52, 1008, 24, 72, (80, 160), threads=1536, shared_kb=100, optin_kb=99),
    _gpu("l4", "sm_89", 58, 2.04, 300, 24, 48, (30, 100), threads=1536, shared_kb=100, optin_kb=99),
    DeviceSpec("host", "host", "", 2, 1, 1 << 20, 1 << 20, 1 << 20, 1 << 20, 16 * 10**9, 12e3, 40e3, 4 << 20, 0.6,
               fp32_rate=4e4, int_rate=3e4, special_rate=2.5e3, div_rate=8e3, fp64_rate=2e4, matmul_rate=1e5,
               half_matmul_rate=5e4, latency_bytes=0.0, thread_bytes=0.0, tile_bytes=HOST.tile_bytes,
               busy_lanes=0, overlap_loss=0.15, strided_penalty=1.15, library_epilogues=False,
               blocks=replace(_GPU_BLOCKS, split_blocks=16, block_bytes=256 * 1024, joined_bytes=16 * 1024)),
)}
# The H200's kernels, executed thread by thread on the CPU.
DEVICES["simt"] = replace(DEVICES["h200"], name="simt")


def find_device(name: str) -> DeviceSpec:
    """The row of a device; an error that lists the valid names."""
    if name not in DEVICES:
        raise UnknownNameError("device", name, list(DEVICES))
    return DEVICES[name]


def nearest_device(name: str, arch: str, sm_count: int) -> DeviceSpec:
    """The row of a GPU by the name that its driver gives it, with the architecture and size that it really has; for one
    without a row, the nearest of its architecture, or of all."""
    words = name.lower().replace("-", " ").split()
    names = {*words, *(a + b for a, b in zip(words, words[1:], strict=False))}    # "RTX 4090" is one
    rows = [d for d in DEVICES.values() if d.dialect == "cuda"]
    named = [d for d in rows if d.name in names]
    akin = [d for d in rows if d.arch == arch] or [d for d in rows if d.arch[:-1] == arch[:-1]] or rows
    row = named[0] if named else min(akin, key=lambda d: abs(d.sm_count - sm_count))
    return replace(row, arch=arch, sm_count=sm_count)
