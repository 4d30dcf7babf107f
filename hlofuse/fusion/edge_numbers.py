"""The figures behind an edge's decision: launches, bytes, registers and predicted time with two kernels and with one.

Of an edge that is fused, its two instructions are compared as kernels of their own and as one; of one that is not, the
two kernels of the coloring as they stand and as one. A second test of a join whose sole gain is bytes is the saving
ratio (Q_unfused - Q_fused) / Q_unfused > delta; delta is the least gain of a step, in time, as a share of Q_unfused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hlofuse.fusion.coloring import MIN_GAIN
from hlofuse.fusion.cost_estimate import CostEstimate
from hlofuse.fusion.cost_model import KernelCosts
from hlofuse.fusion.partition import UNOWNED, Coloring
from hlofuse.fusion.plan import Refusal


@dataclass(frozen=True)
class EdgeNumbers:
    """Two kernels against one: bytes Q and microseconds. `registers` are those of the one."""

    launches_saved: int
    bytes_unfused: int
    bytes_fused: int
    unfused_us: float
    fused_us: float
    registers: int
    delta: float

    @property
    def bytes_saved(self) -> int:
        return self.bytes_unfused - self.bytes_fused

    @property
    def saving_ratio(self) -> float:
        return self.bytes_saved / self.bytes_unfused if self.bytes_unfused else 0.0


def pair_numbers(costs: KernelCosts, coloring: Coloring, u: int, v: int) -> EdgeNumbers | None:
    """An edge's two instructions alone and as one kernel; None where only more than these two make a kernel."""
    outputs = (u, v) if costs.is_output[u] or coloring.owner[u] != UNOWNED else (v,)
    try:
        apart = [costs.estimate((w,), (w,), constrained=False) for w in (u, v)]
        together = costs.estimate((u, v), outputs, constrained=False)
    except Refusal:
        return None
    return _numbers(costs, apart, [together])


def join_numbers(costs: KernelCosts, coloring: Coloring, a: int, b: int) -> EdgeNumbers | None:
    """Two kernels of a coloring as they stand and as one; None where that is not legal."""
    change = coloring.joined(a, b)
    if change is None:
        return None
    changed = sorted(change.costs.keys() | {a, b})
    before = [costs.estimate(coloring.members[k], coloring.outputs[k], constrained=False) for k in changed]
    after = [costs.estimate(change.members[k] if k in change.members else coloring.members[k], change.outputs[k],
                            constrained=False) for k in sorted(change.costs)]
    return _numbers(costs, before, after)


def bytes_at_stake(costs: KernelCosts, coloring: Coloring, u: int, v: int) -> int:
    """What an edge moves: the producer is read, and written if nobody else needs it."""
    alone = len(coloring.readers[u]) < 2 and not costs.is_output[u]
    return costs.result_bytes(u) * (2 if alone else 1)


def _numbers(costs: KernelCosts, apart: Iterable[CostEstimate], together: Iterable[CostEstimate]) -> EdgeNumbers:
    before, after = list(apart), list(together)
    unfused = sum(e.bytes for e in before)
    delta = MIN_GAIN * costs.device.bandwidth / unfused if unfused else 0.0
    return EdgeNumbers(len(before) - len(after), unfused, sum(e.bytes for e in after), sum(e.time_us for e in before),
                       sum(e.time_us for e in after), max(e.registers for e in after), delta)
