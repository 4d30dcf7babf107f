"""The cheapest set of nodes to store so that others can be computed again: a minimum cut of a plain graph.

Every node is stored (at one price), computed again (at another, and then its operands must be there too), or not
needed. Source = "not there later", sink = "there later": a node that is stored is cut in the middle, one that is
computed again is cut from the source. Knows nothing of HLO.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Sequence

NEVER = 1 << 60


def cheapest_stores(operands: Sequence[Sequence[int]], store: Sequence[int], compute: Sequence[int],
                    needed: Sequence[int]) -> set[int]:
    """The nodes to store so that all `needed` ones are there; prices are integers, `NEVER` where it cannot be done."""
    n = len(operands)
    source, sink = 2 * n, 2 * n + 1     # node v comes in at 2v and leaves at 2v + 1
    flow = _Flow(2 * n + 2)
    for v in range(n):
        flow.add(source, 2 * v, compute[v])
        flow.add(2 * v, 2 * v + 1, store[v])
        for u in operands[v]:
            flow.add(2 * u + 1, 2 * v, NEVER)
    for v in set(needed):
        flow.add(2 * v + 1, sink, NEVER)
    side = flow.source_side(source, sink)
    return {v for v in range(n) if 2 * v in side and 2 * v + 1 not in side}


class _Flow:
    """A flow network, filled along shortest paths: quick enough on a few hundred nodes."""

    def __init__(self, size: int) -> None:
        self.edges: list[list[int]] = []             # target, capacity left; edge ^ 1 is its reverse
        self.at: list[list[int]] = [[] for _ in range(size)]

    def add(self, a: int, b: int, capacity: int) -> None:
        if capacity > 0:
            self.at[a].append(len(self.edges))
            self.edges.append([b, capacity])
            self.at[b].append(len(self.edges))
            self.edges.append([a, 0])

    def source_side(self, source: int, sink: int) -> set[int]:
        """What the source reaches when no more can flow."""
        while True:
            came: dict[int, int] = {source: -1}
            queue = deque([source])
            while queue and sink not in came:
                a = queue.popleft()
                for e in self.at[a]:
                    b, left = self.edges[e]
                    if left > 0 and b not in came:
                        came[b] = e
                        queue.append(b)
            if sink not in came:
                return set(came)
            path, b = [], sink
            while b != source:
                path.append(came[b])
                b = self.edges[came[b] ^ 1][0]
            least = min(self.edges[e][1] for e in path)
            assert least < NEVER, "what is needed can neither be stored nor computed again"
            for e in path:
                self.edges[e][1] -= least
                self.edges[e ^ 1][1] += least
