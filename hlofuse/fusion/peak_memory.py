"""Peak memory: the buffers that are alive together, and the fusions that keep large ones alive too long.

A buffer lives from the launch that writes it to the last that reads it; arguments live throughout, results to the end.
A kernel that runs late keeps what it reads alive: where its early part would leave less behind, that part has to be a
kernel of its own. A kernel that runs early may write what is only needed late. Only a program whose buffers exceed the
device's memory together is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hlofuse.fusion.constraints import Constraint
from hlofuse.fusion.cost_model import KernelCosts
from hlofuse.fusion.partition import Coloring
from hlofuse.hlo.shape import Shape

_LARGEST = 8   # live buffers that are looked at in one round


@dataclass(frozen=True)
class Peak:
    """`launch` is the place in the order at which `bytes` are alive, `live` the vertices whose results these are,
    largest first; `order` the launches, each a set of kernels."""

    bytes: int
    launch: int
    live: tuple[int, ...]
    order: tuple[tuple[int, ...], ...]


def peak_memory(costs: KernelCosts, coloring: Coloring) -> Peak | None:
    """The peak; None where all buffers fit together, which is quick to see."""
    arguments = sum(p.shape.byte_size for p in costs.graph.computation.parameters if isinstance(p.shape, Shape))
    written = sum(costs.result_bytes(v) for out in coloring.outputs.values() for v in out)
    if arguments + written <= costs.device.memory_bytes:
        return None
    launches = coloring.packs or [(k,) for k in coloring.order.sorted()]
    orders = (tuple(launches), _thrifty_order(costs, coloring, launches))
    return min((_peak(costs, coloring, order, arguments) for order in orders), key=lambda p: p.bytes)


class MemoryRounds:
    """Colors again, a bounded number of times, as long as that lowers a peak that the device has no memory for."""

    def __init__(self, costs: KernelCosts, rounds: int) -> None:
        self.costs, self.left = costs, rounds
        self.peak: Peak | None = None
        self._kept = 0     # constraints before the last step, which is taken back if it did not help

    def look_at(self, coloring: Coloring) -> bool:
        """Whether the constraints changed, so that a new coloring is due."""
        before, self.peak = self.peak, peak_memory(self.costs, coloring)
        if self.peak is None or self.peak.bytes <= self.costs.device.memory_bytes or not self.left:
            return False
        constraints = self.costs.constraints
        if before is not None and self.peak.bytes >= before.bytes:
            self.left = 0
            del constraints[self._kept:]
            return True
        self.left -= 1
        self._kept = len(constraints)
        constraints.extend(shorten_lives(self.costs, coloring, self.peak))
        return len(constraints) > self._kept


def _peak(costs: KernelCosts, coloring: Coloring, order: tuple[tuple[int, ...], ...], arguments: int) -> Peak:
    born, dies = _lives(costs, coloring, order)
    change = [0] * (len(order) + 1)
    for v, start in born.items():
        change[start] += costs.result_bytes(v)
        change[dies[v] + 1] -= costs.result_bytes(v)
    most, place, alive = -1, 0, 0
    for t in range(len(order)):
        alive += change[t]
        if alive > most:
            most, place = alive, t
    live = sorted((v for v in born if born[v] <= place <= dies[v]), key=lambda v: (-costs.result_bytes(v), v))
    return Peak(arguments + max(most, 0), place, tuple(live), order)


def _lives(costs: KernelCosts, coloring: Coloring,
           order: Sequence[Sequence[int]]) -> tuple[dict[int, int], dict[int, int]]:
    """The launch that writes each buffer, and the last at which it is alive."""
    place = {k: t for t, launch in enumerate(order) for k in launch}
    born = {v: place[k] for k, out in coloring.outputs.items() for v in out}
    dies = {v: len(order) - 1 if costs.is_output[v] else max([place[k] for k in coloring.readers[v]], default=t)
            for v, t in born.items()}
    return born, dies


def _thrifty_order(costs: KernelCosts, coloring: Coloring,
                   launches: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Of the launches that can run, always the one that leaves the least behind."""
    place = {k: n for n, launch in enumerate(launches) for k in launch}
    reads = [{v for k in launch for v in coloring.reads[k]} for launch in launches]
    waiting = [{place[coloring.owner[v]] for v in r} - {n} for n, r in enumerate(reads)]
    users: list[list[int]] = [[] for _ in launches]
    for n, before in enumerate(waiting):
        for m in before:
            users[m].append(n)
    left = {v: len({place[k] for k in coloring.readers[v]}) for out in coloring.outputs.values() for v in out}
    grown = [sum(costs.result_bytes(v) for k in launch for v in coloring.outputs[k]) for launch in launches]

    def growth(n: int) -> tuple[int, int]:
        freed = sum(costs.result_bytes(v) for v in reads[n] if left[v] == 1 and not costs.is_output[v])
        return grown[n] - freed, n

    counts = [len(w) for w in waiting]
    ready = [n for n, count in enumerate(counts) if not count]
    order = []
    while ready:
        n = min(ready, key=growth)
        ready.remove(n)
        order.append(launches[n])
        for v in reads[n]:
            left[v] -= 1
        for m in users[n]:
            counts[m] -= 1
            if not counts[m]:
                ready.append(m)
    return tuple(order)


def shorten_lives(costs: KernelCosts, coloring: Coloring, peak: Peak) -> list[Constraint]:
    """What not to fuse so that less is alive at the peak."""
    found: dict[tuple[int, int], Constraint] = {}
    born, dies = _lives(costs, coloring, peak.order)
    for v in peak.live[:_LARGEST]:
        if born[v] == peak.launch or dies[v] == peak.launch:
            continue
        pairs = [*_early_parts(costs, coloring, peak, born, v), *_late_parts(costs, coloring, peak, born, v)]
        reason = (f"in one kernel they keep {costs.result_bytes(v) / 1e9:.3g} GB alive: {peak.bytes / 1e9:.3g} GB at "
                  f"the peak, the device has {costs.device.memory_bytes / 1e9:.3g} GB")
        for pair in pairs:
            found.setdefault(pair, Constraint(frozenset(pair), 1, "memory", reason))
    return list(found.values())


def _early_parts(costs: KernelCosts, coloring: Coloring, peak: Peak, born: dict[int, int],
                 v: int) -> Iterator[tuple[int, int]]:
    """Pairs that separate what late kernels compute from v, and could compute early, from the rest of them."""
    place = {k: t for t, launch in enumerate(peak.order) for k in launch}
    late = [k for k in sorted(coloring.readers[v]) if place[k] > peak.launch]
    operands, users = coloring.memo.operands, coloring.memo.users
    for k in late:
        members = coloring.members[k]
        if coloring.is_fixed(k):
            return   # it needs v itself
        early: set[int] = set()
        for w in sorted(members):
            if operands[w] and all(u in early if u in members else born[u] < peak.launch for u in operands[w]):
                early.add(w)
        if users[v] & members - early:
            return
        front = {w for w in early if users[w] & (members - early) or w in coloring.outputs[k]}
        freed = [u for u in coloring.reads[k] if u in peak.live and not costs.is_output[u]
                 and not users[u] & members - early and all(place[r] <= peak.launch or r == k or r in late
                                                            for r in coloring.readers[u])]
        if sum(costs.result_bytes(w) for w in front) >= sum(costs.result_bytes(u) for u in freed):
            return
        yield from ((w, x) for w in sorted(front) for x in sorted(users[w] & (members - early)))


def _late_parts(costs: KernelCosts, coloring: Coloring, peak: Peak, born: dict[int, int],
                v: int) -> Iterator[tuple[int, int]]:
    """Pairs that separate v, which only late kernels read, from what its kernel writes for earlier ones."""
    place = {k: t for t, launch in enumerate(peak.order) for k in launch}
    home = coloring.owner[v]
    if costs.is_output[v] or any(place[k] <= peak.launch for k in coloring.readers[v]):
        return
    members = coloring.members[home]
    needed, stack = {v}, [v]
    inputs: set[int] = set()
    while stack:
        for u in coloring.memo.operands[stack.pop()]:
            if u not in members:
                inputs.add(u)
            elif u not in needed:
                needed.add(u)
                stack.append(u)
    if sum(costs.result_bytes(u) for u in inputs if u not in peak.live) >= costs.result_bytes(v):
        return
    others = [w for w in sorted(coloring.outputs[home]) if w != v and w not in needed]
    yield from ((min(v, w), max(v, w)) for w in others)
