"""The cheapest coloring of a small graph, as a quality reference: branch and bound from the last vertex to the first.

A vertex is placed once its users are: the kernels that read it hold a copy or read it from memory, and one kernel, old
or new, writes it. That is every coloring, clones included, and each one once. A branch ends when its kernels have no
plan or a cycle, or when what they cost at least (`FusionProblem.kernel_floor`) reaches the best coloring known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, combinations
from typing import NamedTuple

from hlofuse.fusion.partition import Coloring
from hlofuse.fusion.problem import CostMemo

MAX_WORK = 1_000_000  # placements tried; some ten seconds
_WEIGHING = 4  # placements tried in the time in which a kernel is weighed
_TOLERANCE = 1e-9  # relative: costs that differ by rounding only


class TooLargeError(ValueError):
    """The graph is beyond what `exact` can color."""


class _Part(NamedTuple):
    """A kernel so far: bit masks of what it holds, writes and surely reads; its floor in µs, and the memory time that
    hides behind its computation."""

    members: int
    outputs: int
    reads: int
    floor: float
    slack: float


class _State(NamedTuple):
    """Vertices from `position` on are placed; `readers` are bit masks of the kernels that read what a kernel writes."""

    position: int
    parts: tuple[_Part, ...]
    readers: tuple[int, ...]


_NEW = -1
_UNWRITTEN = -2


def color_exactly(memo: CostMemo, known: Coloring, max_work: int | None = None) -> Coloring:
    """The cheapest coloring: `known` where none is cheaper. TooLargeError where that takes more than `max_work`."""
    return _Search(memo, known, MAX_WORK if max_work is None else max_work).run()


class _Search:
    def __init__(self, memo: CostMemo, known: Coloring, max_work: int) -> None:
        n = memo.problem.num_vertices
        self.memo, self.best, self.max_work = memo, known, max_work
        self.limit = known.total_cost * (1 - _TOLERANCE)
        self.work = 0
        self.users = [_mask(u) for u in memo.users]
        self.conflicts = [_mask(v for v in range(n) if v != u and memo.conflict(u, v)) for u in range(n)]
        self.operands = [_mask(o) for o in memo.operands]
        self.fixed = _mask(v for v in range(n) if memo.is_fixed[v])
        alone = [frozenset((v,)) for v in _bits(self.fixed)]
        self.fixed_total = sum([memo.kernel_cost(v, v) or 0.0 for v in alone])
        self.floors: dict[tuple[int, int, int], _Part | None] = {}

    def run(self) -> Coloring:
        stack = [[(0.0, _State(self.memo.problem.num_vertices, (), ()))]]
        while stack:
            if not stack[-1]:
                stack.pop()
                continue
            floor, state = stack[-1].pop()
            if floor >= self.limit:
                stack.pop()  # the others of this branch cost no less
            elif state.position:
                stack.append(sorted(self._following(state), key=lambda f: -f[0]))
            else:
                self._finish(state)
        return self.best

    def _following(self, state: _State) -> Iterator[tuple[float, _State]]:
        """The states in which one more vertex is placed, with their floors."""
        position = state.position - 1
        for copies, owner in self._places(state, position):
            self._spend(1)
            following = self._place(state, position, copies, owner)
            if following is None:
                continue
            floor = self.fixed_total + sum([p.floor for p in following.parts])
            floor += self.memo.problem.remaining_floor(position, sum([p.slack for p in following.parts]))
            if floor < self.limit:
                yield floor, following

    def _places(self, state: _State, v: int) -> Iterator[tuple[tuple[int, ...], int]]:
        """Which of the kernels that read v have a copy, and which kernel writes it."""
        parts, clonable, must_write = state.parts, self.memo.is_clonable[v], self.memo.must_write[v]
        if self.fixed >> v & 1:
            yield (), _NEW
            return
        blocked = self.conflicts[v] | self.fixed
        reading = [k for k, p in enumerate(parts) if p.members & self.users[v]]
        fitting = [k for k in reading if not parts[k].members & blocked]
        others = [k for k, p in enumerate(parts) if not p.members & (self.users[v] | blocked)]
        sizes = range(len(fitting) + 1) if clonable else range(min(1, len(fitting)) + 1)
        for copies in chain.from_iterable(combinations(fitting, size) for size in sizes):
            if len(copies) == len(reading) and not must_write:
                yield copies, _UNWRITTEN
                continue
            for k in copies:
                yield copies, k
            if clonable or not copies:
                for k in others:
                    yield copies, k
                yield copies, _NEW

    def _place(self, state: _State, v: int, copies: tuple[int, ...], owner: int) -> _State | None:
        parts, readers = list(state.parts), list(state.readers)
        bit, users = 1 << v, self.users[v]
        if owner == _NEW:
            owner = len(parts)
            parts.append(_Part(0, 0, 0, 0.0, 0.0))
            readers.append(0)
        if owner != _UNWRITTEN:
            reading = _mask(k for k, p in enumerate(parts) if p.members & users and k not in copies and k != owner)
            if reading and _reaches(readers, reading, owner):
                return None
            readers[owner] |= reading
        for k, p in enumerate(parts):
            if k in copies or k == owner:
                part = self._part(p.members | bit, p.outputs | (bit if k == owner else 0), p.reads)
            elif p.members & users:
                part = self._part(p.members, p.outputs, p.reads | bit)
            else:
                continue
            if part is None:
                return None
            parts[k] = part
        return _State(v, tuple(parts), tuple(readers))

    def _part(self, members: int, outputs: int, reads: int) -> _Part | None:
        if members & self.fixed:
            return _Part(members, outputs, reads, 0.0, 0.0)
        # What a member reads although it may not share the kernel is read from memory, wherever it will be written.
        inside = _bits(members)
        blocked = self.fixed
        for v in inside:
            blocked |= self.conflicts[v]
        for v in inside:
            reads |= self.operands[v] & blocked
        key = (members, outputs, reads)
        if key not in self.floors:
            self._spend(_WEIGHING)
            found = self.memo.problem.kernel_floor(*(frozenset(_bits(mask)) for mask in key))
            self.floors[key] = None if found is None else _Part(members, outputs, reads, *found)
        return self.floors[key]

    def _spend(self, work: int) -> None:
        self.work += work
        if self.work > self.max_work:
            n = self.memo.problem.num_vertices
            raise TooLargeError(
                f"fusion='exact' tries at most {self.max_work} placements, and the {n} vertices of this graph take "
                "more; use fusion='coloring'"
            )

    def _finish(self, state: _State) -> None:
        """All vertices are placed: the floors give way to the costs."""
        kernels = [(frozenset(_bits(p.members)), frozenset(_bits(p.outputs))) for p in state.parts]
        total = 0.0
        for members, outputs in kernels:
            cost = self.memo.kernel_cost(members, outputs)
            if cost is None:
                return
            total += cost
            if total >= self.limit:
                return
        owners = {v: k for k, (_, outputs) in enumerate(kernels) for v in outputs}
        self.best = Coloring(self.memo, [members for members, _ in kernels], owners)
        self.limit = total * (1 - _TOLERANCE)


def _reaches(readers: list[int], start: int, goal: int) -> bool:
    """Whether a kernel of a mask is the goal, or writes what in turn leads to it."""
    seen = waiting = start
    while waiting:
        if seen >> goal & 1:
            return True
        lowest = waiting & -waiting
        waiting ^= lowest
        following = readers[lowest.bit_length() - 1] & ~seen
        seen |= following
        waiting |= following
    return bool(seen >> goal & 1)


def _bits(mask: int) -> list[int]:
    return [v for v in range(mask.bit_length()) if mask >> v & 1]


def _mask(vertices: Iterable[int]) -> int:
    return sum(1 << v for v in vertices)
