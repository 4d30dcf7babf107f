"""What scatters cost in a kernel, and which of them XLA computes better.

Every tile of the result reads all index vectors (from the second-level cache), and chunks of the updates leave
partial results. XLA adds with atomics where it needs no order, and changes a few rows of an array in its place.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hlofuse.codegen.dialect import DIALECTS
from hlofuse.codegen.scatter_sizing import Tiling, tile_scatters
from hlofuse.fusion.devices import DeviceSpec
from hlofuse.fusion.plan import Refusal
from hlofuse.fusion.scatter import Scatter, check_scatters, scatter_of, widest
from hlofuse.hlo.module import Computation, Instruction

FEW_UPDATES = 4       # an array is changed in its place where updates are so many times smaller
NATIVE = frozenset({"f16", "pred"})     # what XLA:CPU scatters several times faster
SLOWER = 1.5          # how much slower than XLA's atomics a deterministic kernel may be


@dataclass(frozen=True)
class ScatterShape:
    """What a kernel's scatters add to its cost: bytes of partial results, bytes and µs of repeated reads, threads."""

    tiling: Tiling
    partial_bytes: int
    again_bytes: int
    extra_us: float
    threads: float


def scatter_shape(scatters: Sequence[Scatter], device: DeviceSpec) -> ScatterShape:
    tiling = tile_scatters(scatters, DIALECTS[device.dialect])
    cells = tiling.items * tiling.rows * sum(s.instruction.array.dtype.itemsize * tiling.width(s) for s in scatters)
    again = (tiling.row_tiles * tiling.column_tiles - 1) * scatters[0].indices.array.byte_size
    threads = tiling.items * tiling.chunks * 256.0
    return ScatterShape(tiling, cells * tiling.chunks if tiling.chunks > 1 else 0, again,
                        0.0 if device.dialect == "host" else tiling.extra_us, threads)


def check_scattering(order: Sequence[int], scatters: dict[int, Scatter], operands: Sequence[Sequence[int]],
                     large: set[int]) -> list[Scatter]:
    """The scatters among a kernel's members. None may wait for another, and none reduces."""
    found = [scatters[v] for v in order if v in scatters]
    check_scatters(found)
    waiting: set[int] = set()
    for v in order:
        waits = not waiting.isdisjoint(operands[v])
        if v in scatters and waits:
            raise Refusal("producer-consumer", "{} waits for another scatter", scatters[v].instruction)
        if v in large:
            raise Refusal("producer-consumer", "{} scatters in a kernel that reduces", found[0].instruction)
        if waits or v in scatters:
            waiting.add(v)
    return found


def widest_scatter(scatters: Sequence[Scatter]) -> Instruction:
    return widest(scatters).instruction


def scatters_for_xla(computation: Computation, device: DeviceSpec) -> dict[Instruction, str]:
    """The scatters that no kernel computes, or that XLA computes better, each with the reason."""
    found: dict[Instruction, str] = {}
    for i in computation.instructions:
        if i.opcode == "scatter":
            s = scatter_of(i)
            reason = s if isinstance(s, str) else _is_better_left(s, device)
            if reason is not None:
                found[i] = reason
    return found


def _is_better_left(s: Scatter, device: DeviceSpec) -> str | None:
    updated, array = s.updates.array.byte_size, s.instruction.array.byte_size
    if FEW_UPDATES * updated < array and not _is_fill(s.array):
        return f"{updated} bytes of updates change an array of {array} in its place"
    if device.dialect == "host":
        known = s.instruction.element_type in NATIVE
        return "the CPU has instructions for its type, kernels have not" if known else None
    ours = scatter_shape([s], device)
    read = s.indices.array.byte_size
    moved = (updated + array + read + 2 * ours.partial_bytes) / device.bandwidth
    mine = device.launch_us + max(moved + ours.again_bytes / device.l2_bandwidth, ours.extra_us)
    theirs = 2 * device.launch_us + (updated + array + read) / device.bandwidth + 2 * updated / device.l2_bandwidth
    if mine > SLOWER * theirs:
        return f"in a fixed order it would take {mine:.1f} us, with atomics about {theirs:.1f}"
    return None


def _is_fill(i: Instruction) -> bool:
    while i.opcode in ("broadcast", "reshape", "bitcast"):
        i = i.operands[0]
    return i.opcode == "constant" and not i.array.rank
