"""Where the search starts: single vertices, then edge contraction and DSATUR. (The third start is the greedy baseline.)

Both build a coloring from single vertices by joins that pay; they differ in what is joined first. Contraction takes
the best gain anywhere; DSATUR the vertex that conflicts with the most kernels, while it still has a choice.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection

from hlofuse.fusion.moves import clone_into_readers
from hlofuse.fusion.partition import Coloring
from hlofuse.fusion.problem import CostMemo

_TOGETHER_FROM = 1000  # vertices; smaller graphs are searched from single vertices
_MAX_TOGETHER = 16


def first_coloring(memo: CostMemo) -> Coloring:
    """Each vertex alone; in a large graph with what surely belongs to its kernel, because weighing a join takes as long
    as the kernel has members."""
    n = memo.problem.num_vertices
    if n < _TOGETHER_FROM:
        return Coloring(memo)
    # Every way out of such a group leads through its last vertex, so groups make no cycle.
    follows, groups, home = memo.problem.follows_user, [[v] for v in range(n)], list(range(n))
    for v in reversed(range(n)):
        if follows[v]:
            last = home[min(memo.users[v])]
            if len(groups[last]) < _MAX_TOGETHER:
                groups[last].append(v)
                home[v] = last
                groups[v] = []
    kernels: list[frozenset[int]] = []
    for v, group in enumerate(groups):
        members = frozenset(group)
        fits = len(group) < 2 or memo.kernel_cost(members, frozenset((v,))) is not None
        kernels.extend([members] if fits and group else [frozenset((w,)) for w in group])
    return Coloring(memo, kernels)


def contract_edges(
    coloring: Coloring, min_gain: float, around: Collection[int] | None = None, eager_neighbors: int = 8
) -> None:
    """Join by gain from a lazy max-heap: producers with consumers, siblings, a producer into all of its readers.

    An entry whose kernels changed since it was weighed is weighed again when it surfaces. u == v stands for cloning u.
    Up to `eager_neighbors` pairs are weighed again right after a join; beyond it gains may be stale until they surface.
    `around`: only pairs that touch these vertices.
    """
    memo = coloring.memo
    heap: list[tuple[float, int, int, int]] = []
    weighed: dict[tuple[int, int], int] = {}

    def gain_of(u: int, v: int) -> float | None:
        if u == v:
            change = clone_into_readers(coloring, u)
            return None if change is None else -change.delta
        a, b = coloring.home(u), coloring.home(v)
        if a == b or memo.conflict(u, v):
            return None
        return coloring.join_gain(a, b)

    def push(u: int, v: int) -> None:
        if u != v:
            a, b = sorted((coloring.home(u), coloring.home(v)))
            if a == b or weighed.get((a, b), -1) >= max(coloring.changed_at[a], coloring.changed_at[b]):
                return
            weighed[a, b] = coloring.clock
        gain = gain_of(u, v)
        if gain is not None and gain > min_gain:
            heapq.heappush(heap, (-gain, u, v, coloring.clock))

    pairs = memo.pairs if around is None else [(u, v) for u, v in memo.pairs if u in around or v in around]
    for u, v in pairs:
        push(u, v)
    for v in range(memo.problem.num_vertices) if around is None else sorted(around):
        if memo.is_clonable[v] and len(coloring.readers[v]) > 1 and not memo.must_write[v]:
            push(v, v)

    while heap:
        negative_gain, u, v, clock = heapq.heappop(heap)
        if _changed_since(coloring, u, v, clock):
            gain = gain_of(u, v)
            if gain is None or gain <= min_gain:
                continue
            if heap and -gain > heap[0][0]:
                heapq.heappush(heap, (-gain, u, v, coloring.clock))
                continue
        if u == v:
            change = clone_into_readers(coloring, u)
            if change is not None:
                coloring.apply(change)
            continue
        a, b = coloring.home(u), coloring.home(v)
        if (
            a == b
            or coloring.order.has_long_path(a, b)
            or memo.first_conflict(coloring.members[a], coloring.members[b])
        ):
            continue
        joint = coloring.join(a, b)
        if joint is not None:
            nearby = coloring.neighbors(joint)
            if len(nearby) <= eager_neighbors:
                for k in nearby:
                    push(min(coloring.members[joint]), min(coloring.members[k]))


def _changed_since(coloring: Coloring, u: int, v: int, clock: int) -> bool:
    if u != v:
        return max(coloring.changed_at[coloring.home(u)], coloring.changed_at[coloring.home(v)]) > clock
    places = coloring.copies[u] | coloring.readers[u]
    return max(coloring.changed_at[k] for k in places) > clock


def color_by_saturation(coloring: Coloring, min_gain: float) -> None:
    """DSATUR: color the vertex whose conflicting neighbors have the most colors; ties by time at stake, then order.

    Conflicts are looked at among vertices that share data, as others have nothing to gain. A vertex takes the color
    (joins the kernel) that saves the most time, or stays alone as a color of its own. Uncolored vertices count as
    single kernels for cycles.
    """
    memo = coloring.memo
    n = memo.problem.num_vertices
    related: list[list[int]] = [[] for _ in range(n)]
    for u, v in memo.pairs:
        related[u].append(v)
        related[v].append(u)
    stake = [coloring.costs[coloring.home(v)] * (1 + len(related[v])) for v in range(n)]
    saturation: list[set[int]] = [set() for _ in range(n)]
    colored = [False] * n
    heap = [(0, -stake[v], v) for v in range(n) if not memo.is_fixed[v]]
    heapq.heapify(heap)
    while heap:
        negative_saturation, _, v = heapq.heappop(heap)
        if colored[v] or -negative_saturation < len(saturation[v]):
            continue
        colored[v] = True
        color = _join_best(coloring, v, {coloring.home(u) for u in related[v] if colored[u]}, min_gain)
        for u in related[v]:
            if not colored[u] and memo.conflict(u, v) and color not in saturation[u]:
                saturation[u].add(color)
                heapq.heappush(heap, (-len(saturation[u]), -stake[u], u))


def _join_best(coloring: Coloring, v: int, colors: set[int], min_gain: float) -> int:
    own = coloring.home(v)
    gains = []
    for k in sorted(colors - {own}):    # vertices that started together share a color already
        gain = coloring.join_gain(own, k)
        if gain is not None and gain > min_gain:
            gains.append((-gain, k))
    for _, k in sorted(gains):
        if not coloring.memo.first_conflict((v,), coloring.members[k]):
            joint = coloring.join(own, k)
            if joint is not None:
                return joint
    return own
