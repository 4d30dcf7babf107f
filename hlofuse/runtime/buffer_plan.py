"""Where every buffer of a program lies: one arena, whose places are used again as soon as that is surely safe.

Buffers and steps are numbers; nothing here knows HLO or devices. Invariants, whatever the streams do: two buffers share
memory only where every step that touches the one ends before the step that writes the other begins, or where that step
may write an element as soon as it has read it (`takes`); a buffer that the caller keeps is never in the arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

ALIGNMENT = 256    # CuPy's and XLA's own


class Home(Enum):
    """Who has the memory of a buffer."""

    ARENA = "arena"
    OPERAND = "operand"    # one that the caller gave away
    RESULT = "result"


@dataclass(frozen=True)
class BufferRequest:
    """`writer` is the step that fills it, -1 for an operand; `takes` are buffers of the same size whose memory the
    writer may overwrite while it reads them. What the caller reads afterwards has a reader behind the last step."""

    size: int
    writer: int
    readers: tuple[int, ...] = ()
    home: Home = Home.ARENA
    takes: tuple[int, ...] = ()


@dataclass(frozen=True)
class BufferPlan:
    """`owner` by buffer: the buffer whose memory it has, itself or one that it took. `offsets` of owners in the arena;
    None for those that live elsewhere. `requested`: what the arena's buffers would take without any reuse."""

    owner: tuple[int, ...]
    offsets: tuple[int | None, ...]
    arena_bytes: int
    requested: int


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def plan_buffers(requests: Sequence[BufferRequest], before: Sequence[int]) -> BufferPlan:
    """Largest first, each at the lowest place that is free for as long as it lives. `before` is a schedule's."""
    groups = _share(requests, before)
    owner = [0] * len(requests)
    for group in groups:
        for buffer in group.members:
            owner[buffer] = group.owner
    offsets: list[int | None] = [None] * len(requests)
    placed: list[tuple[_Group, int, int]] = []
    in_arena = [g for g in groups if g.home is Home.ARENA]
    for group in sorted(in_arena, key=lambda g: (-g.size, g.owner)):
        size, start = aligned(group.size), 0
        for other, begin, end in placed:    # sorted by `begin`
            if begin >= start + size:
                break
            if end > start and not _disjoint(group, other, before):
                start = end
        offsets[group.owner] = start
        if size:
            placed.append((group, start, start + size))
            placed.sort(key=lambda p: (p[1], p[2]))
    return BufferPlan(tuple(owner), tuple(offsets), max((end for _, _, end in placed), default=0),
                      sum(aligned(r.size) for r in requests if r.home is Home.ARENA))


@dataclass(eq=False)
class _Group:
    """Buffers of one place. `touches`: the steps that read or write it, as a bit mask; `writer` the first of them."""

    owner: int
    members: list[int]
    size: int
    home: Home
    writer: int
    touches: int


def _share(requests: Sequence[BufferRequest], before: Sequence[int]) -> list[_Group]:
    """A group for each buffer that takes nobody's memory, with those that take its."""
    by_buffer: dict[int, _Group] = {}
    for number in sorted(range(len(requests)), key=lambda n: requests[n].writer):
        request = requests[number]
        touches = sum(1 << step for step in {request.writer, *request.readers} if step >= 0)
        kept = request.home is not Home.ARENA
        for taken in request.takes:
            group = by_buffer[taken]
            others = group.touches & ~(1 << request.writer)
            if others & ~before[request.writer] or group.size != request.size:
                continue
            group.members.append(number)
            group.touches |= touches
            if kept and group.home is Home.ARENA:
                group.home, group.owner = request.home, number
            by_buffer[number] = group
            break
        else:
            by_buffer[number] = _Group(number, [number], request.size, request.home, request.writer, touches)
    return list(dict.fromkeys(by_buffer.values()))


def _disjoint(a: _Group, b: _Group, before: Sequence[int]) -> bool:
    """Whether one is done with before the other begins."""
    return not a.touches & ~before[b.writer] or not b.touches & ~before[a.writer]
