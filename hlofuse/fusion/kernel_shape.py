"""How the loops of a kernel lie on a device: threads, passes over the domain, and what a split leaves behind.

Sizes alone decide, so the cost model can ask for any set of instructions; the text that is written follows the same
rules (codegen/sizing.py).
"""
from __future__ import annotations

from dataclasses import dataclass

from hlofuse.fusion.devices import DeviceSpec


@dataclass(frozen=True, slots=True)
class KernelShape:
    """`passes` over the domain; `kept`: what a row reads stays with its block; `cached`: it stays in the L2 cache."""

    passes: int
    threads: float
    partial_bytes: int
    kept: bool
    cached: bool


def loop_shape(device: DeviceSpec, total: int, rows: int, is_scanned: bool, along: bool,
               has_loops: bool) -> KernelShape:
    """Without scheduled reductions; `along`: the lanes run along what is scanned."""
    blocks = device.blocks
    if not is_scanned:
        threads = float(total) if has_loops else total / blocks.lanes
    elif along:
        threads = rows * min(float(blocks.scan_threads), total / rows / blocks.lanes)
    else:
        threads = float(rows)
    return KernelShape(1, threads, 0, True, True)


def reduction_shape(device: DeviceSpec, total: int, rows: int, is_row: bool, levels: int,
                    accumulators: int) -> KernelShape:
    """With scheduled reductions: of how many `rows`, along the lanes or not, and how many `levels` wait for others."""
    blocks = device.blocks
    length = max(1, total // rows)
    width = 1 if is_row else min(blocks.column_width, rows)
    working = length * width * 4
    items = -(-rows // width)
    threads = float(rows)
    if is_row:
        threads = rows * min(float(blocks.row_threads), max(float(blocks.group_threads), length / blocks.lanes))
    chunks = 1
    if levels == 0 and (rows < blocks.split_below or not is_row) and total >= blocks.split_elements:
        wanted = blocks.row_chunks // rows if is_row else -(-blocks.split_blocks // items)
        most = blocks.row_chunks if is_row else blocks.partial_bytes // (4 * width)
        chunks = max(1, min(wanted, total // items // blocks.chunk_elements, most))
    active = min(items, device.sm_count * blocks.per_sm)
    return KernelShape(levels + 1, threads * chunks, 4 * accumulators * rows * chunks if chunks > 1 else 0,
                       is_row and working <= blocks.kept_bytes, active * working <= device.l2_bytes // 2)


def efficiency(device: DeviceSpec, registers: int, threads: float) -> float:
    """The share of the bandwidth that the bytes in flight can use (Little's law)."""
    if not device.latency_bytes:
        return 1.0
    resident = min(device.threads_per_sm, device.registers_per_sm // max(registers, 16)) * device.sm_count
    in_flight = min(resident, max(float(device.blocks.group_threads), threads)) * device.thread_bytes
    return min(1.0, in_flight / (device.latency_bytes * device.sm_count))
