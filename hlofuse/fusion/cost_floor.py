"""Floors: what kernels cost at least while not all of their members are known, so that `exact` can stop early.

Kernels grow from the last vertex to the first: whatever joins later comes before the present members. So the places at
which these are computed are final, and so is the domain once a scheduled reduction is among them. Everything that the
cost model adds beyond computation and mandatory traffic (re-reads, occupancy) only makes kernels dearer.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hlofuse.fusion.plan import Refusal

if TYPE_CHECKING:
    from hlofuse.fusion.cost_model import KernelCosts


class KernelFloors:
    """Bounds from below on the costs of one graph."""

    def __init__(self, costs: KernelCosts) -> None:
        self._costs = costs
        self._loss = costs.device.overlap_loss
        self._remaining = self._mandatory_traffic()

    def kernel(self, members: Iterable[int], outputs: Iterable[int],
               reads: Iterable[int]) -> tuple[float, float] | None:
        """(µs, memory µs that still hide behind the computation) of any kernel of these members and vertices before
        them that writes `outputs` and reads `reads`; None where none has a plan."""
        costs = self._costs
        order, outs = sorted(members), list(outputs)
        large, small = (sorted(kind.intersection(order)) for kind in (costs._large, costs._small))
        least = self._time(0.0, sum(costs._loop_results.least_bytes(v) if v in costs._loops else costs._bytes[v]
                                    for v in outs))
        if any(v < order[0] or v in order for v in (*costs._scatters, *costs._scans, *costs._loops, *costs._blocks)):
            return least   # a scatter, scan or loop that is there or may join decides the domain
        try:
            scheduled, domain, reduced = costs._domain(large, small, outs, ())
            if any(costs._mask[v] not in (domain, domain & ~reduced) for v in outs):
                raise Refusal("shape", "a result covers other axes than the kernel")
            sites = costs._sites(order, outs, scheduled, domain)
        except Refusal:
            return None if large or not (small or self._reduction_may_help(order[0], outs)) else least
        inside, rows = set(order), set(scheduled)
        work = dict.fromkeys(costs._rates, 0.0)
        for v in order:
            unit, ops, wide = costs._ops[v]
            places = sites.get(v)
            if not ops or not places:
                continue
            count = costs._mask_size(domain) if v in rows else self._count(v, places) * (costs._reduced[v] or 1)
            work[unit] += ops * count * wide
        read = set(reads)
        moved: float = sum(costs._bytes[v] for v in outs)
        for source, places in sites.items():
            if source not in inside and (source >= costs.num_vertices or source in read):
                moved += min(costs._bytes[source], sum(places.values()) * costs._itemsize[source])
        return self._time(max(work[u] / costs._rates[u] for u in work), moved)

    def remaining(self, position: int, slack: float) -> float:
        """What the vertices before `position` add at least to kernels that hide `slack` µs of memory traffic."""
        traffic = self._remaining[position]
        return self._loss * traffic + (1 - self._loss) * max(0.0, traffic - slack)

    def _count(self, v: int, places: dict[int, int]) -> int:
        return sum(places.values()) + (self._costs._size[v] - places[0] if 0 in places else 0)

    def _time(self, compute: float, moved: float) -> tuple[float, float]:
        device = self._costs.device
        memory = moved / device.bandwidth
        time = device.launch_us + max(compute, memory) + self._loss * min(compute, memory)
        return time, max(0.0, compute - memory)

    def _reduction_may_help(self, before: int, outs: list[int]) -> bool:
        """Whether some reduction that may yet join has a domain that the results fit."""
        masks = {self._costs._mask[v] for v in outs}
        return any(v < before and masks <= {r.domain, r.domain & ~r.reduced} for v, r in self._costs._rows.items())

    def _mandatory_traffic(self) -> list[float]:
        """By position, the µs of what vertices before it must yet write, and of what only they read from memory."""
        costs, n = self._costs, self._costs.num_vertices
        needs = self._needs()
        read: dict[int, tuple[int, int]] = {}   # source -> its last reader, bytes
        at = [0.0] * (n + 1)
        for v in range(n):
            if costs.is_fixed[v]:
                continue
            if costs.is_output[v] or not costs.users[v]:
                at[v + 1] += costs._loop_results.least_bytes(v) if v in costs._loops else costs._bytes[v]
            for source, _, often, _ in costs._edges[v] if v not in costs._scatters else ():
                if source >= n or costs.is_fixed[source]:
                    moved = min(costs._bytes[source], (often or needs[v]) * costs._itemsize[source])
                    read[source] = (v, max(read.get(source, (0, 0))[1], moved))
        for last, traffic in read.values():
            at[last + 1] += traffic
        for v in range(n):
            at[v + 1] += at[v]
        return [total / costs.device.bandwidth for total in at]

    def _needs(self) -> list[int]:
        """Of how many elements each vertex is computed at least, wherever it is computed for its readers."""
        costs = self._costs
        needs = list(costs._size[:costs.num_vertices])
        for v in reversed(range(costs.num_vertices)):
            if costs.is_output[v] or not costs.users[v] or any(costs.is_fixed[u] for u in costs.users[v]):
                continue
            needs[v] = min([needs[v], *(0 if u in costs._scatters else often or needs[u] for u in costs.users[v]
                                        for source, _, often, _ in costs._edges[u] if source == v)])
        return needs
