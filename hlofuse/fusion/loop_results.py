"""What a loop leaves behind: which of its results a kernel writes, and which only its later loops read.

An array that a loop writes slice by slice (a scan's ys, the residuals of a gradient) and of which each lane reads its
own elements in a later loop of the same kernel need not exist in memory: where the device has room beside a thread it
is a tile of some lanes and all steps, elsewhere a scratch array of the kernel, read back from the cache if it fits.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hlofuse.codegen.dialect import MIN_TILE_LANES
from hlofuse.fusion.devices import DeviceSpec
from hlofuse.fusion.plan import Refusal
from hlofuse.hlo.module import Instruction

if TYPE_CHECKING:
    from hlofuse.fusion.graph import FusionGraph
    from hlofuse.fusion.loop_work import LoopCost


@dataclass(frozen=True)
class LoopResult:
    """One result: `lane_bytes` is a lane's part of a stacked array (0: it is none), `is_shared` one that is the same
    for all lanes. `readers` are vertices; what else reads it makes it `needed` in memory whoever they are."""

    bytes: int
    lane_bytes: float
    is_shared: bool
    readers: frozenset[int]
    is_needed: bool

    def is_inside(self, chosen: Collection[int]) -> bool:
        """Whether a kernel of these vertices need not write it."""
        return not self.is_needed and self.readers.issubset(chosen)


@dataclass(frozen=True)
class ResultTraffic:
    """Bytes: `moved` through memory, `cached` ones that stay near."""

    moved: float = 0.0
    cached: float = 0.0


class LoopResults:
    """The results of the loops of one graph on one device."""

    def __init__(self, graph: FusionGraph, device: DeviceSpec, loops: Mapping[int, LoopCost],
                 is_clonable: Sequence[bool]) -> None:
        self.device = device
        self._results = {v: [_result(graph, r, loop, is_clonable) for r in graph.vertices[v].results]
                         for v, loop in loops.items()}

    def least_bytes(self, v: int) -> int:
        """What a loop writes whatever shares its kernel."""
        return sum(r.bytes for r in self._results[v] if r.is_needed)

    def written_bytes(self, v: int, chosen: Collection[int]) -> int:
        """What a kernel writes of a loop whose results others need."""
        return sum(r.bytes for r in self._results[v] if not r.is_inside(chosen))

    def traffic(self, loops: Sequence[int], chosen: set[int], outputs: Collection[int], lanes: int) -> ResultTraffic:
        """What later loops of a kernel read of these; `Refusal` where there is no room for that."""
        device, moved, cached, tile = self.device, 0.0, 0.0, 0.0
        resident = min(lanes, device.sm_count * device.threads_per_sm)
        for v in loops:
            for r in self._results[v]:
                if not r.lane_bytes or r.readers.isdisjoint(chosen):
                    continue
                inside = v not in outputs or r.is_inside(chosen)
                if r.is_shared and not device.tile_bytes:
                    raise Refusal("producer-consumer", "an array of numbers that all lanes share, and that one of them "
                                  "writes, is read by a later loop")
                if device.tile_bytes:
                    tile += r.lane_bytes * (1 if r.is_shared else MIN_TILE_LANES) if inside or r.is_shared else 0
                    near = inside or r.lane_bytes * MIN_TILE_LANES <= device.tile_bytes
                else:
                    near = resident * r.lane_bytes <= device.l2_bytes // 2
                traffic = r.bytes * (2 if inside else 1)
                cached += traffic if near else 0
                moved += 0 if near else traffic
        if tile > device.tile_bytes:
            raise Refusal("memory", f"what loops leave to later ones is {tile:.0f} bytes in {MIN_TILE_LANES} lanes, "
                          f"the limit is {device.tile_bytes}")
        return ResultTraffic(moved, cached)


def _result(graph: FusionGraph, r: Instruction, loop: LoopCost, is_clonable: Sequence[bool]) -> LoopResult:
    found = result_readers(graph, r)
    readers = found or frozenset()
    # A copy of a reader in another kernel reads the array too.
    is_needed = found is None or any(is_clonable[u] for u in readers)
    if r.attrs["index"] not in loop.stacked:
        return LoopResult(r.shape.byte_size, 0.0, False, readers, is_needed)
    is_shared = bool(loop.space.lanes) and not graph.axes.mask(r) & loop.space.lanes
    return LoopResult(r.shape.byte_size, r.shape.byte_size / (1 if is_shared else loop.lanes), is_shared, readers,
                      is_needed)


def result_readers(graph: FusionGraph, result: Instruction) -> frozenset[int] | None:
    """The vertices that read a result, through what is free; None where the program needs it in memory."""
    computation = graph.computation
    found: set[int] = set()
    seen: set[Instruction] = set()
    stack = [result]
    while stack:
        i = stack.pop()
        if i in seen:
            continue
        seen.add(i)
        if i is computation.root:
            return None
        for user in computation.users[i]:
            if user in graph.loop_states or user in graph.free and user not in graph.vertex_of:
                stack.append(user)
                continue
            v = graph.vertex_of.get(user)
            if v is None or graph.is_fixed[v]:
                return None
            found.add(v)
            if user in graph.free:
                stack.append(user)
    return frozenset(found)
