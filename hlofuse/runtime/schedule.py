"""Which stream each step of a program is issued on, and what it waits for: a plan, without a GPU.

Steps are numbered in the order in which they are issued, operands first. Independent steps that leave room on the
device go to streams of their own, a chain of steps stays on one. Stream 0 is the caller's: the others begin after what
it held when the program started, and it waits for all of them at the end. `before` is all that may be relied upon:
memory is shared by steps of which one surely ends before the other begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_STREAMS = 4


@dataclass(frozen=True)
class Task:
    """A step as the schedule sees it. `is_narrow`: it leaves a good part of the device idle."""

    after: tuple[int, ...]
    is_narrow: bool = False


@dataclass(frozen=True)
class Schedule:
    """`streams` and `waits` by step: its stream, and the steps of other streams whose end it waits for. `before` by
    step: those that surely ended when it starts, as a bit mask. `joined`: what the caller's stream waits for at the
    end."""

    streams: tuple[int, ...]
    waits: tuple[tuple[int, ...], ...]
    before: tuple[int, ...]
    joined: tuple[int, ...]

    @property
    def stream_count(self) -> int:
        return max(self.streams, default=0) + 1

    @property
    def awaited(self) -> frozenset[int]:
        """The steps after which an event is recorded."""
        return frozenset(step for waits in (*self.waits, self.joined) for step in waits)


def plan_schedule(tasks: Sequence[Task], max_streams: int = MAX_STREAMS) -> Schedule:
    """Chains on one stream each; wide steps, and what finds no free stream, on stream 0."""
    streams: list[int] = []
    waits: list[tuple[int, ...]] = []
    before: list[int] = []
    tails: list[int | None] = [None]    # the last step of each stream
    for number, task in enumerate(tasks):
        ancestors = 0
        for step in task.after:
            ancestors |= before[step] | 1 << step
        stream = _choose(task, ancestors, tails, max_streams) if task.is_narrow else 0
        if stream == len(tails):
            tails.append(None)
        tail = tails[stream]
        known = before[tail] | 1 << tail if tail is not None else 0
        awaited: list[int] = []
        for step in sorted(task.after, reverse=True):    # the latest first: it may stand for earlier ones
            if not known >> step & 1:
                awaited.append(step)
                known |= before[step] | 1 << step
        streams.append(stream)
        waits.append(tuple(awaited))
        before.append(known)
        tails[stream] = number
    joined: list[int] = []
    known = before[tails[0]] | 1 << tails[0] if tails[0] is not None else 0
    for tail in sorted((t for t in tails[1:] if t is not None), reverse=True):
        if not known >> tail & 1:
            joined.append(tail)
            known |= before[tail] | 1 << tail
    return Schedule(tuple(streams), tuple(waits), tuple(before), tuple(joined))


def _choose(task: Task, ancestors: int, tails: Sequence[int | None], max_streams: int) -> int:
    """The stream that ends with an operand of the step, else one whose steps all have to end first, else a new one."""
    continued = [stream for stream, tail in enumerate(tails) if tail is not None and tail in task.after]
    if continued:
        return max(continued, key=lambda stream: tails[stream] or 0)
    for stream, tail in enumerate(tails):
        if tail is None or ancestors >> tail & 1:
            return stream
    return len(tails) if len(tails) < max_streams else 0
