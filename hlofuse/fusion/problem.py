"""What the coloring algorithms know about a program: a graph of ints, a cost, and who may not share a kernel.

Vertices are 0..n-1 in topological order (operands before users). Nothing here knows HLO: legality and cost
implement `FusionProblem`, the algorithms ask only through `CostMemo`, which counts and remembers the answers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol


class FusionProblem(Protocol):
    """A graph to be colored. Costs are in microseconds."""

    @property
    def num_vertices(self) -> int: ...

    @property
    def operands(self) -> Sequence[Sequence[int]]:
        """Producers of each vertex, without duplicates."""

    @property
    def users(self) -> Sequence[Sequence[int]]:
        """Consumers of each vertex, without duplicates."""

    @property
    def is_output(self) -> Sequence[bool]:
        """Written to memory by its owner whatever the readers do. A vertex without users counts as one."""

    @property
    def is_fixed(self) -> Sequence[bool]:
        """Stands alone: never joined or cloned, read from memory only, its cost a constant."""

    @property
    def is_clonable(self) -> Sequence[bool]:
        """May be recomputed in several kernels."""

    @property
    def shared_inputs(self) -> Sequence[Sequence[int]]:
        """Groups of vertices that read one same external operand: candidates for sibling joins."""

    @property
    def follows_user(self) -> Sequence[bool]:
        """Has one user and surely belongs to its kernel: in large graphs these are together from the start."""

    @property
    def launch_cost(self) -> float: ...

    def kernel_cost(self, members: frozenset[int], outputs: frozenset[int]) -> float | None:
        """Predicted time of one kernel that holds `members` and writes `outputs`; None: it has no legal plan."""

    def kernel_floor(
        self, members: frozenset[int], outputs: frozenset[int], reads: frozenset[int]
    ) -> tuple[float, float] | None:
        """The least cost of a kernel of `members` and any vertices before all of them, that writes at least `outputs`
        and reads at least `reads`; and how much memory time its computation would still hide. None: it has no plan."""

    def remaining_floor(self, position: int, slack: float) -> float:
        """What the vertices before `position` add at least to kernels whose computation hides `slack`."""

    @property
    def may_conflict(self) -> Sequence[bool]:
        """False where `conflict` is false with every vertex that is not fixed: most need not be asked about."""

    def conflict(self, u: int, v: int) -> bool:
        """These two may never share a kernel. Cheap."""

    def can_pack(self, a: frozenset[int], b: frozenset[int]) -> bool:
        """Two kernels, with no path between them, may become segments of one launch."""


_CHECKS_PER_EVALUATION = 16
_MEMBERS_PER_EVALUATION = 64
_LOOKUPS_PER_EVALUATION = 4  # a lookup stands for weighing a step whose cost is known
_ALL_PAIRS = 4  # groups of readers up to this size are paired completely, larger ones as a chain


def candidate_pairs(problem: FusionProblem) -> list[tuple[int, int]]:
    """Vertex pairs that share data and might share a kernel: producer and consumer, then readers of one operand."""
    fixed = problem.is_fixed
    pairs = {(u, v): None for v, ops in enumerate(problem.operands) for u in ops if not (fixed[u] or fixed[v])}
    for group in [*problem.users, *problem.shared_inputs]:
        readers = sorted(v for v in set(group) if not fixed[v])
        reach = len(readers) if len(readers) <= _ALL_PAIRS else 2
        for i, u in enumerate(readers):
            pairs.update(((u, v), None) for v in readers[i + 1 : i + reach])
    return list(pairs)


class CostMemo:
    """Remembers kernel costs and conflicts of one problem, and counts the evaluations that a work budget limits."""

    # Kept keys, in vertices: beyond it (some 100 MB) everything is forgotten, which costs time but no quality.
    capacity = 1_500_000

    def __init__(self, problem: FusionProblem):
        self.problem = problem
        self.pairs = candidate_pairs(problem)
        self.evaluations = 0
        self.large_evaluations = 0  # what evaluating large kernels takes more
        self.lookups = 0
        self.conflict_checks = 0
        self.operands = [frozenset(o) for o in problem.operands]
        self.users = [frozenset(u) for u in problem.users]
        self.must_write = [bool(o) or not u for o, u in zip(problem.is_output, problem.users, strict=True)]
        self.is_fixed = [bool(f) for f in problem.is_fixed]
        self.is_clonable = [bool(c) and not f for c, f in zip(problem.is_clonable, problem.is_fixed, strict=True)]
        self._fixed = frozenset(v for v, fixed in enumerate(self.is_fixed) if fixed)
        self._may_conflict = frozenset(v for v, may in enumerate(problem.may_conflict) if may)
        self._costs: dict[tuple[frozenset[int], frozenset[int]], float | None] = {}
        self._held = 0
        self._conflicts: dict[int, bool] = {}
        self._stride = problem.num_vertices

    def kernel_cost(self, members: frozenset[int], outputs: frozenset[int]) -> float | None:
        key = (members, outputs)
        large = len(members) // _MEMBERS_PER_EVALUATION
        self.lookups += 1 + large
        if key in self._costs:
            return self._costs[key]
        if self._held > self.capacity:
            self._costs.clear()
            self._held = 0
        self.evaluations += 1
        self.large_evaluations += large
        cost = self.problem.kernel_cost(members, outputs)
        if cost is None and len(members) == 1 and self.is_fixed[next(iter(members))]:
            cost = 0.0  # the same constant in every coloring, so any value does
        self._held += len(members)
        self._costs[key] = cost
        return cost

    def conflict(self, u: int, v: int) -> bool:
        key = u * self._stride + v if u < v else v * self._stride + u
        known = self._conflicts.get(key)
        return self._ask(u, v, key) if known is None else known

    def first_conflict(self, a: Collection[int], b: Collection[int]) -> tuple[int, int] | None:
        """The first pair across two vertex sets that may not share a kernel."""
        stride, conflicts = self._stride, self._conflicts
        if self._fixed.isdisjoint(a) and self._fixed.isdisjoint(b):
            if self._may_conflict.isdisjoint(a) or self._may_conflict.isdisjoint(b):
                return None
            a, b = ([v for v in side if v in self._may_conflict] for side in (a, b))
        for u in a:
            for v in b:
                key = u * stride + v if u < v else v * stride + u
                known = conflicts.get(key)
                if known or (known is None and self._ask(u, v, key)):
                    return u, v
        return None

    def _ask(self, u: int, v: int, key: int) -> bool:
        if u == v:
            answer = False
        elif self.is_fixed[u] or self.is_fixed[v]:
            answer = True
        else:
            answer = bool(self.problem.conflict(min(u, v), max(u, v)))
        self._conflicts[key] = answer
        self.conflict_checks += 1
        return answer

    @property
    def work(self) -> int:
        """What was done so far, in kernel cost evaluations. Counted, not timed: the same on every machine."""
        lesser = self.lookups // _LOOKUPS_PER_EVALUATION + self.conflict_checks // _CHECKS_PER_EVALUATION
        return self.evaluations + self.large_evaluations + lesser
