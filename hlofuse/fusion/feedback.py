"""What ptxas says of the kernels of a coloring, as constraints on the next one.

A kernel that spills, or needs more registers than a thread of its block has, may not hold as many of its instructions
again: the share that fits, by its registers, and less in every further round. Where it has several reductions, these
are what has to be parted, because each holds its accumulators through the whole loop.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from hlofuse.fusion.constraints import Constraint
from hlofuse.fusion.partition import Kernel

_SHARE = 0.9    # of its instructions that a kernel may keep at most
_FURTHER = 0.8  # of that, in every further round
_REDUCTIONS = 3  # from so many on they are what is parted


@dataclass(frozen=True)
class Measured:
    """Of one thread: registers, bytes that are spilled to memory, and the registers that it may have."""

    registers: int
    spilled_bytes: int
    limit: int

    @property
    def is_too_large(self) -> bool:
        return self.spilled_bytes > 0 or self.registers > self.limit


@dataclass(frozen=True)
class Finding:
    """A kernel of an earlier round that was too large; `at_most` of its `members` may share a kernel from then on, None
    where nothing was done about it: it is a single instruction, or the rounds are over."""

    round: int
    kernel: str
    members: frozenset[int]
    measured: Measured
    at_most: int | None

    def constraint(self) -> Constraint | None:
        if self.at_most is None:
            return None
        return Constraint(self.members, self.at_most, "memory",
                          f"with more than {self.at_most} of {len(self.members)} instructions of {self.kernel} ptxas "
                          f"gave {self.measured.registers} registers and spilled {self.measured.spilled_bytes} bytes")


def find_spilling(names: Sequence[str], launches: Sequence[Sequence[Kernel]], measured: Sequence[Measured | None],
                  reductions: Set[int], number: int, is_last: bool) -> list[Finding]:
    """The findings of one round. Of a launch of several kernels the largest one is blamed."""
    found = []
    for name, launch, figures in zip(names, launches, measured, strict=True):
        if figures is None or not figures.is_too_large:
            continue
        members = max((k.members for k in launch), key=len)
        if len(members & reductions) >= _REDUCTIONS:
            members &= reductions
        needed = figures.registers + figures.spilled_bytes / 4
        share = min(_SHARE, figures.limit / needed) * _FURTHER ** (number - 1)
        at_most = None if is_last or len(members) < 2 else max(1, min(len(members) - 1, int(share * len(members))))
        found.append(Finding(number, name, members, figures, at_most))
    return found
