"""Why each producer-consumer edge is fused, cloned or separate: the numbers behind `explain()`.

A separate edge names the first reason that holds for joining the two kernels as they stand in the final coloring, in
this order: fixed, conflict, cycle, no plan, no gain.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hlofuse.fusion.partition import UNOWNED, Coloring


@dataclass(frozen=True)
class EdgeDecision:
    """One edge. `status`: fused, cloned (the consumer has a copy of its own) or separate.

    `reason`, of separate edges: "fixed"; "conflict" (`conflict` is the pair that may never share a kernel); "cycle"
    (`path`: the vertices that carry data on a third way from the producer's kernel to the consumer's);
    "no plan"; "no gain" (`delta`: microseconds that joining would add). `kernels`: the one that writes and the first
    one that reads.
    """

    producer: int
    consumer: int
    status: str
    reason: str | None = None
    conflict: tuple[int, int] | None = None
    path: tuple[int, ...] = ()
    delta: float | None = None
    kernels: tuple[int, int] | None = None


def explain_edges(coloring: Coloring) -> list[EdgeDecision]:
    """A decision for every edge, ordered by consumer, then producer."""
    decisions = []
    known: dict[tuple[int, int], EdgeDecision] = {}
    for v, operands in enumerate(coloring.memo.operands):
        for u in sorted(operands):
            status, kernels = _status(coloring, u, v)
            if kernels is None:
                decisions.append(EdgeDecision(u, v, status))
                continue
            if kernels not in known:
                known[kernels] = _separate(coloring, u, v, *kernels)
            why = known[kernels]
            if coloring.memo.conflict(u, v) and not (coloring.memo.is_fixed[u] or coloring.memo.is_fixed[v]):
                decisions.append(EdgeDecision(u, v, status, "conflict", conflict=(u, v), kernels=kernels))
            else:
                decisions.append(replace(why, producer=u, consumer=v, kernels=kernels))
    return decisions


def _status(coloring: Coloring, u: int, v: int) -> tuple[str, tuple[int, int] | None]:
    """The status of an edge and, for a separate one, the writing and the first reading kernel."""
    lacking = sorted(k for k in coloring.copies[v] if k not in coloring.copies[u])
    if lacking and coloring.owner[u] != UNOWNED:
        return "separate", (coloring.owner[u], lacking[0])
    return ("cloned" if len(coloring.copies[u]) > 1 else "fused"), None


def _separate(coloring: Coloring, u: int, v: int, a: int, b: int) -> EdgeDecision:
    if coloring.is_fixed(a) or coloring.is_fixed(b):
        return EdgeDecision(u, v, "separate", "fixed")
    pair = coloring.memo.first_conflict(sorted(coloring.members[a]), sorted(coloring.members[b]))
    if pair is not None:
        return EdgeDecision(u, v, "separate", "conflict", conflict=pair)
    path = coloring.order.long_path(a, b)
    if path:
        return EdgeDecision(u, v, "separate", "cycle", path=_written_along(coloring, path))
    gain = coloring.join_gain(a, b)
    if gain is None:
        return EdgeDecision(u, v, "separate", "no plan")
    return EdgeDecision(u, v, "separate", "no gain", delta=-gain)


def _written_along(coloring: Coloring, path: list[int]) -> tuple[int, ...]:
    """For each hop between kernels of a path, the vertex that the first writes and the second reads."""
    hops = zip(path, path[1:], strict=False)
    return tuple(min(coloring.outputs[a] & coloring.reads[b]) for a, b in hops)
