"""Local search from a coloring: joins, moves, and rebuilding two kernels around a pair that is apart.

Every step must save more than `min_gain`, so the search ends; the work limit only ends it earlier. What was tried
around a vertex is not tried again until one of the kernels around it has changed.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations

from hlofuse.fusion.moves import FEW_KERNELS, MOVES
from hlofuse.fusion.partition import Coloring
from hlofuse.fusion.starts import contract_edges

_MAX_SWEEPS = 8
_REBUILD_LIMIT = 400  # vertices: a rebuild works on a copy of the coloring
_COPIED_PER_LOOKUP = 16  # vertices copied in the time of one lookup


Examined = dict[tuple[str, int], int]


class Trails:
    """What earlier searches passed through: from there a search goes where they went."""

    def __init__(self) -> None:
        self._known: set[frozenset[object]] = set()
        self._own: set[frozenset[object]] = set()

    def begin(self) -> None:
        """Another search starts."""
        self._known |= self._own
        self._own = set()

    def meet(self, coloring: Coloring) -> bool:
        """Whether an earlier search was here; this one was from now on."""
        state = frozenset((mem, coloring.outputs[k]) for k, mem in coloring.members.items())
        self._own.add(state)
        return state in self._known


def improve(coloring: Coloring, min_gain: float, stop_at: int, trails: Trails | None = None) -> Counter[str]:
    """Take steps until none pays, `CostMemo.work` reaches `stop_at` or the way meets an earlier search's; how many of
    each kind."""
    taken: Counter[str] = Counter()
    if trails is not None:
        trails.begin()
    _settle(coloring, min_gain, stop_at, taken, {}, trails)
    return +taken


def _settle(coloring: Coloring, min_gain: float, stop_at: int, taken: Counter[str], examined: Examined,
            trails: Trails | None = None) -> None:
    for _ in range(_MAX_SWEEPS):
        before = coloring.clock
        taken["join"] += _join_pairs(coloring, min_gain, stop_at)
        if trails is not None and trails.meet(coloring):
            return
        for kind in MOVES:
            taken[kind] += _sweep(coloring, kind, examined, min_gain, stop_at)
        if coloring.clock == before or coloring.memo.work >= stop_at:
            return


def _join_pairs(coloring: Coloring, min_gain: float, stop_at: int) -> int:
    memo = coloring.memo
    pairs = memo.pairs
    if len(coloring.members) <= FEW_KERNELS:
        pairs = [*pairs, *combinations(sorted(min(m) for m in coloring.members.values()), 2)]
    taken = 0
    seen: dict[tuple[int, int], int] = {}
    for u, v in pairs:
        if memo.work >= stop_at:
            break
        a, b = coloring.home(u), coloring.home(v)
        if a == b or memo.conflict(u, v):
            continue
        if seen.get((a, b), -1) >= max(coloring.changed_at[a], coloring.changed_at[b]):
            continue
        seen[a, b] = seen[b, a] = coloring.clock
        if coloring.order.has_long_path(a, b) or memo.first_conflict(coloring.members[a], coloring.members[b]):
            continue
        gain = coloring.join_gain(a, b)
        if gain is not None and gain > min_gain and coloring.join(a, b) is not None:
            taken += 1
    return taken


def _sweep(coloring: Coloring, kind: str, examined: Examined, min_gain: float, stop_at: int) -> int:
    """Try one kind of move around every vertex whose surroundings changed since it was last tried."""
    memo, move = coloring.memo, MOVES[kind]
    taken = 0
    for v in range(memo.problem.num_vertices):
        if memo.is_fixed[v] or not coloring.copies[v]:
            continue
        if memo.work >= stop_at:
            break
        if _last_change(coloring, v) <= examined.get((kind, v), -1):
            continue
        examined[kind, v] = coloring.clock
        for members in move(coloring, v):
            change = coloring.propose(members)
            if change is not None and change.delta < -min_gain and coloring.apply(change):
                taken += 1
                break
    return taken


def _last_change(coloring: Coloring, v: int) -> int:
    if len(coloring.members) <= FEW_KERNELS:  # then moves look at all kernels
        return coloring.clock
    changed_at, copies = coloring.changed_at, coloring.copies
    near = (v, *coloring.memo.operands[v], *coloring.memo.users[v])
    return max([changed_at[k] for u in near for k in copies[u]])


def rebuild_pairs(coloring: Coloring, min_gain: float, stop_at: int) -> tuple[Coloring, int]:
    """For each pair that is apart: put it together, dissolve the rest of both kernels, contract and improve again.

    This leaves local minima in which every single step costs more than it saves. Returns how often it did.
    """
    memo = coloring.memo
    n = memo.problem.num_vertices
    taken = 0
    if n > _REBUILD_LIMIT:
        return coloring, taken
    tried: dict[tuple[int, int], int] = {}
    examined: Examined = {}
    while True:
        before = coloring.clock
        for u, v in memo.pairs:
            if memo.work >= stop_at:
                return coloring, taken
            a, b = coloring.home(u), coloring.home(v)
            if a == b or memo.conflict(u, v):
                continue
            if tried.get((u, v), -1) >= max(coloring.changed_at[a], coloring.changed_at[b]):
                continue
            tried[u, v] = coloring.clock
            memo.lookups += n // _COPIED_PER_LOOKUP
            trial = _rebuilt_around(coloring, u, v, min_gain)
            if trial is None:
                continue
            trial_examined = dict(examined)
            _settle(trial, min_gain, stop_at, Counter(), trial_examined)
            if trial.total_cost < coloring.total_cost - min_gain:
                coloring, examined = trial, trial_examined
                taken += 1
        if coloring.clock == before:
            return coloring, taken


def _rebuilt_around(coloring: Coloring, u: int, v: int, min_gain: float) -> Coloring | None:
    a, b = coloring.home(u), coloring.home(v)
    released = (coloring.members[a] | coloring.members[b]) - {u, v}
    trial = coloring.copy()
    members = {a: frozenset((u, v)), b: frozenset()}
    members.update((trial.fresh_kernel(), frozenset((w,))) for w in sorted(released))
    change = trial.propose(members)
    if change is None or not trial.apply(change):
        return None
    contract_edges(trial, min_gain, around=released | {u, v})
    return trial
