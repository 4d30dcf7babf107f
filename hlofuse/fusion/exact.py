"""The cheapest coloring of a small graph, as a quality reference: A* over what has been computed so far.

A state is (vertices in memory, non-clonable vertices computed); a transition runs one more kernel. Any acyclic
coloring is such a path, in topological order of its quotient. The bound: each vertex that must yet be written or
computed costs at least its smallest share of a kernel that does so.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np

from hlofuse.fusion.partition import Coloring
from hlofuse.fusion.problem import CostMemo

MAX_VERTICES = 14
_MAX_CANDIDATES = 60_000


class TooLargeError(ValueError):
    """The graph is beyond what `exact` can color."""


def _bits(mask: int) -> list[int]:
    return [v for v in range(mask.bit_length()) if mask >> v & 1]


def _mask(vertices: Iterable[int]) -> int:
    return sum(1 << v for v in vertices)


# Vertices written, and non-clonable vertices computed, as bit masks.
State = tuple[int, int]


class _Candidates:
    """All legal kernels as arrays of bit masks: members, outputs, reads, cost."""

    def __init__(self, memo: CostMemo, is_clonable: list[bool], limit: int):
        self.overflow = False
        n = memo.problem.num_vertices
        conflicts = [_mask(v for v in range(n) if v != u and memo.conflict(u, v)) for u in range(n)]
        operands, users = [_mask(o) for o in memo.operands], [_mask(u) for u in memo.users]
        clonable = _mask(v for v in range(n) if is_clonable[v])
        rows: list[tuple[int, int, int, float]] = []
        frontier = [1 << v for v in range(n)]
        while frontier:
            following: list[int] = []
            for members in frontier:
                vertices = _bits(members)
                reads = 0
                forced = optional = 0
                for v in vertices:
                    reads |= operands[v]
                    outside = users[v] & ~members
                    if not users[v] & members:
                        forced |= 1 << v
                    elif clonable >> v & 1:
                        optional |= (outside != 0 or memo.must_write[v]) << v
                        # Its users may all be here while one of them has a clone elsewhere.
                        optional |= (users[v] & clonable != 0) << v
                    elif outside or memo.must_write[v]:
                        forced |= 1 << v
                    elif users[v] & clonable:
                        optional |= 1 << v
                chosen = optional
                while True:
                    outputs = forced | chosen
                    cost = memo.kernel_cost(frozenset(vertices), frozenset(_bits(outputs)))
                    if cost is not None:
                        rows.append((members, outputs, reads & ~members, cost))
                    if chosen == 0:
                        break
                    chosen = (chosen - 1) & optional
                if len(rows) > limit:
                    self.overflow = True
                    return
                blocked = members
                for v in vertices:
                    blocked |= conflicts[v]
                following.extend(members | 1 << v for v in range(vertices[-1] + 1, n) if not blocked >> v & 1)
            frontier = following
        self.members, self.outputs, self.reads = (np.array([r[i] for r in rows], np.int64) for i in range(3))
        self.cost = np.array([r[3] for r in rows])


def color_exactly(memo: CostMemo) -> tuple[Coloring, str]:
    """The cheapest coloring, and what it is the cheapest over: "clones", or "partitions" where clones are too many.

    TooLargeError beyond MAX_VERTICES vertices.
    """
    n = memo.problem.num_vertices
    if n > MAX_VERTICES:
        raise TooLargeError(
            f"fusion='exact' takes at most {MAX_VERTICES} vertices, this graph has {n}; use fusion='coloring'"
        )
    candidates = _Candidates(memo, memo.is_clonable, _MAX_CANDIDATES)
    is_clonable, scope = memo.is_clonable, "clones" if any(memo.is_clonable) else "partitions"
    if candidates.overflow:
        is_clonable, scope = [False] * n, "partitions"
        candidates = _Candidates(memo, is_clonable, 1 << n)
    return _shortest_path(memo, candidates, is_clonable), scope


def _shortest_path(memo: CostMemo, c: _Candidates, is_clonable: list[bool]) -> Coloring:
    n = memo.problem.num_vertices
    once = _mask(v for v in range(n) if not is_clonable[v])
    must = _mask(v for v in range(n) if memo.must_write[v])
    # Goals: bit v for "computed" of a vertex computed once, bit n + v for "written" of a clonable output.
    goal = once | (must & ~once) << n
    covers = (c.members & once) | (c.outputs & must & ~once) << n
    counts = np.array([int(x).bit_count() for x in covers.tolist()])
    share = [0.0] * (2 * n)
    for g in _bits(goal):
        able = (covers >> g & 1) == 1
        share[g] = float(np.min(c.cost[able] / counts[able])) if able.any() else float("inf")

    def bound(written: int, computed: int) -> float:
        missing = goal & ~(computed | written << n)
        return sum(share[g] for g in _bits(missing))

    best: dict[State, float] = {(0, 0): 0.0}
    came_from: dict[State, tuple[State, int]] = {}
    heap = [(bound(0, 0), 0, 0)]
    closed: set[State] = set()
    while heap:
        _, written, computed = heapq.heappop(heap)
        state = (written, computed)
        if state in closed:
            continue
        closed.add(state)
        if must & ~written == 0:
            return _trace(memo, c, came_from, state)
        fits = (c.reads & ~written == 0) & (c.outputs & written == 0) & (c.members & computed == 0)
        for i in np.flatnonzero(fits).tolist():
            following = (written | int(c.outputs[i]), computed | (int(c.members[i]) & once))
            cost = best[state] + float(c.cost[i])
            if cost < best.get(following, float("inf")):
                best[following] = cost
                came_from[following] = (state, i)
                heapq.heappush(heap, (cost + bound(*following), *following))
    raise ValueError("no legal coloring exists: some vertex has no plan in any kernel")


def _trace(memo: CostMemo, c: _Candidates, came_from: dict[State, tuple[State, int]], state: State) -> Coloring:
    rows = []
    while state in came_from:
        state, row = came_from[state]
        rows.append(row)
    kernels = [frozenset(_bits(int(c.members[i]))) for i in reversed(rows)]
    owners = {v: index for index, i in enumerate(reversed(rows)) for v in _bits(int(c.outputs[i]))}
    return Coloring(memo, kernels, owners)
