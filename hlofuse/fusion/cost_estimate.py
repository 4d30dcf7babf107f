"""What the cost model says of a kernel: its predicted time and what it consists of."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

UNITS = ("fp", "int", "special", "div", "f64")


@dataclass
class CostEstimate:
    """Times in µs, bytes of memory traffic, operations by unit."""

    time_us: float
    launch_us: float
    compute_us: float
    memory_us: float
    bytes: int
    flops: float
    registers: int
    partial_bytes: int = 0
    work: dict[str, float] = field(default_factory=dict)

    @classmethod
    def packed(cls, parts: Sequence[CostEstimate]) -> CostEstimate:
        """The cost of one launch that runs several kernels side by side."""
        work = {unit: sum(p.work.get(unit, 0.0) for p in parts) for unit in UNITS}
        time = sum(p.time_us - p.launch_us for p in parts)
        launch = max(p.launch_us for p in parts)
        return cls(time + launch, launch, sum(p.compute_us for p in parts), sum(p.memory_us for p in parts),
                   sum(p.bytes for p in parts), sum(p.flops for p in parts), max(p.registers for p in parts),
                   sum(p.partial_bytes for p in parts), work)

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes if self.bytes else 0.0
