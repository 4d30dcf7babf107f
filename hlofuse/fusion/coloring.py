"""Fusion as graph coloring: vertices are instructions, colors are kernels, and the cheapest legal coloring wins.

Several starts (edge contraction, DSATUR, greedy) are each improved by joins and moves within a work budget counted in
cost evaluations, never in time, so that results are the same on every machine; then kernels are packed into launches
and the cheapest result stays. Greedy is one of the starts: coloring is never worse than it. Ties fall by index.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from hlofuse.fusion.exact import color_exactly
from hlofuse.fusion.greedy import fuse_greedily
from hlofuse.fusion.improvement import Trails, improve, rebuild_pairs
from hlofuse.fusion.packing import pack_launches
from hlofuse.fusion.partition import Coloring, SearchStatistics
from hlofuse.fusion.problem import CostMemo, FusionProblem
from hlofuse.fusion.starts import color_by_saturation, contract_edges, first_coloring

METHODS = ("coloring", "greedy", "none", "exact")
MIN_GAIN = 0.1  # microseconds that a step must save

# Work that improvement may use, in cost evaluations: about what the starts use, more on small graphs.
_BASE_WORK = 400
_WORK_PER_VERTEX = 1
_ALL_STARTS = 1500  # vertices; beyond it contraction and greedy start, and only the better one is improved


def color_graph(
    problem: FusionProblem, method: str = "coloring", *, min_gain: float = MIN_GAIN, work_limit: int | None = None
) -> Coloring:
    """Group the vertices of a problem into kernels and launches.

    `coloring` searches, `greedy` and `none` (each vertex alone) are baselines, `exact` is optimal, clones included, on
    small graphs and raises `TooLargeError` where proving that takes too long. `work_limit` bounds the cost evaluations
    that `coloring` spends on improvement.
    """
    if method not in METHODS:
        raise ValueError(f"unknown fusion method {method!r}; valid methods: {', '.join(METHODS)}")
    memo = CostMemo(problem)
    with collector_paused():
        return _color(memo, method, min_gain, work_limit)


def _color(memo: CostMemo, method: str, min_gain: float, work_limit: int | None) -> Coloring:
    if method == "coloring":
        return _search(memo, min_gain, _improvement_work(memo) if work_limit is None else work_limit)
    if method == "exact":
        coloring = color_exactly(memo, _search(memo, min_gain, _improvement_work(memo)))
        scope = "clones" if any(memo.is_clonable) else "partitions"
    else:
        coloring, scope = Coloring(memo) if method == "none" else first_coloring(memo), ""
        if method == "greedy":
            fuse_greedily(coloring, min_gain)
    if method != "none":
        pack_launches(coloring)
    coloring.statistics = SearchStatistics(method, method, evaluations=memo.evaluations, optimal_over=scope)
    return coloring


def _improvement_work(memo: CostMemo) -> int:
    return _BASE_WORK + _WORK_PER_VERTEX * memo.problem.num_vertices


@contextmanager
def collector_paused() -> Iterator[None]:
    """Searching makes many sets and no cycles; looking for cycles among them took a quarter of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _search(memo: CostMemo, min_gain: float, work_limit: int) -> Coloring:
    n = memo.problem.num_vertices
    starts: dict[str, Callable[[Coloring, float], None]] = {"contraction": contract_edges, "greedy": fuse_greedily}
    if n <= _ALL_STARTS:
        starts["dsatur"] = color_by_saturation
    else:
        starts["contraction"] = partial(contract_edges, eager_neighbors=0)
    colorings: dict[str, Coloring] = {}
    for name, start in starts.items():
        colorings[name] = first_coloring(memo)
        start(colorings[name], min_gain)
    start_costs = {name: c.total_cost for name, c in colorings.items()}
    by_promise = sorted(colorings, key=lambda name: (start_costs[name], name))
    # In large graphs the work does not go round: all of it is for the more promising start.
    improved = by_promise if n <= _ALL_STARTS else by_promise[:1]
    # What a start is worth as it stands: a step that lowers the cost may undo more than that in packing.
    candidates = {name: [c.copy() if name in improved else c] for name, c in colorings.items()}
    steps: dict[str, Counter[str]] = {name: Counter() for name in colorings}
    stop_at = memo.work + work_limit
    trails = Trails()
    for i, name in enumerate(improved):
        share = (stop_at - memo.work) // (len(improved) - i + 1)
        steps[name] = improve(colorings[name], min_gain, memo.work + share, trails)
    best = min(by_promise, key=lambda name: colorings[name].total_cost)
    colorings[best], rebuilt = rebuild_pairs(colorings[best], min_gain, stop_at)
    if rebuilt:
        steps[best]["rebuild"] = rebuilt
    for name, c in colorings.items():
        if steps[name]:
            candidates[name].append(c)
        for candidate in candidates[name]:
            pack_launches(candidate)
    best_of = {name: min(found, key=lambda c: c.predicted_cost) for name, found in candidates.items()}
    winner = min(by_promise, key=lambda name: best_of[name].predicted_cost)
    coloring = best_of[winner]
    coloring.statistics = SearchStatistics(
        "coloring",
        winner,
        {name: (start_costs[name], c.total_cost) for name, c in colorings.items()},
        dict(steps[winner]) if coloring is colorings[winner] else {},
        memo.evaluations,
    )
    return coloring
