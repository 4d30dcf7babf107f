"""What a coloring must respect beyond legality: what earlier rounds found out, and what a person asked for.

A constraint is a set of vertices of which at most so many may share a kernel: "not all of these" is a set less one, a
forbidden pair is at most one of two.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

Pair = tuple[int, int]


@dataclass(frozen=True)
class Wishes:
    """Pairs of vertices that a person wants in one kernel, or apart. A program's vertices have the same numbers each
    time that it is fused."""

    force: tuple[Pair, ...] = ()
    forbid: tuple[Pair, ...] = ()


@dataclass(frozen=True)
class Constraint:
    """At most `at_most` of `members` may share a kernel. `rule` and `reason` say why, as a `Refusal` does."""

    members: frozenset[int]
    at_most: int
    rule: str
    reason: str

    def is_broken_by(self, kernel: Set[int]) -> bool:
        return len(self.members & kernel) > self.at_most

    @property
    def message(self) -> str:
        """The reason as the message of a `Refusal`, in which braces stand for instructions."""
        return self.reason.replace("{", "{{").replace("}", "}}")

    @classmethod
    def not_all(cls, members: frozenset[int], rule: str, reason: str) -> Constraint:
        return cls(members, len(members) - 1, rule, reason)
