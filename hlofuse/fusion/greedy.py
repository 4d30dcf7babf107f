"""The baseline: fuse pairs in rounds, best score first, as long as it is legal and saves time.

This is the rule that TorchInductor's scheduler follows: scores are taken once per round, a fused pair stands for
both in the rest of the round, and rounds repeat until one fuses nothing. No clones, nothing is ever undone.
"""

from __future__ import annotations

from hlofuse.fusion.partition import Coloring


def fuse_greedily(coloring: Coloring, min_gain: float, max_rounds: int = 10) -> None:
    memo = coloring.memo
    vertex_pairs = memo.pairs
    scores: dict[tuple[int, int], tuple[int, float]] = {}
    for _ in range(max_rounds):
        scored_at = coloring.clock
        candidates = []
        apart = []
        for u, v in vertex_pairs:
            a, b = coloring.home(u), coloring.home(v)
            if a == b or memo.conflict(u, v):
                continue
            apart.append((u, v))
            pair = (a, b) if a < b else (b, a)
            known = scores.get(pair)
            if known is None or max(coloring.changed_at[a], coloring.changed_at[b]) > known[0]:
                gain = coloring.join_gain(a, b)
                scores[pair] = (scored_at, 0.0 if gain is None else gain)
            elif known[0] == scored_at:
                continue
            if scores[pair][1] > min_gain:
                candidates.append((-scores[pair][1], u, v))
        vertex_pairs = apart  # what is joined stays joined, what conflicts stays apart
        for _, u, v in sorted(candidates):
            a, b = coloring.home(u), coloring.home(v)
            if a == b or coloring.order.has_long_path(a, b):
                continue
            if memo.first_conflict(coloring.members[a], coloring.members[b]):
                continue
            if max(coloring.changed_at[a], coloring.changed_at[b]) > scored_at:
                gain = coloring.join_gain(a, b)
                if gain is None or gain <= min_gain:
                    continue
            coloring.join(a, b)
        if coloring.clock == scored_at:
            return
