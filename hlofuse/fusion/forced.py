"""Coloring with vertices that a person wants in one kernel: the graph is contracted before the search.

A clonable producer is copied into its consumer's vertex (both are then computed together wherever the consumer is);
anything else becomes one vertex with what lies between the two. The search sees a smaller graph and knows nothing of
it; its kernels are then written in terms of the vertices that they stand for.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hlofuse.fusion.coloring import color_graph
from hlofuse.fusion.cost_model import KernelCosts
from hlofuse.fusion.packing import pack_launches
from hlofuse.fusion.partition import UNOWNED, Coloring
from hlofuse.fusion.plan import Refusal
from hlofuse.fusion.problem import CostMemo

Pairs = Sequence[tuple[int, int]]


def color_with_forced(costs: KernelCosts, pairs: Pairs, method: str) -> Coloring:
    """As `color_graph`, with the two of each pair in one kernel; `Refusal` where that is not legal."""
    contracted = contract(costs, pairs)
    found = color_graph(contracted, method)
    owner = {v: found.owner[s] for s, own in enumerate(contracted.own) for v in own if found.owner[s] != UNOWNED}
    kernels = _without_dead(costs, {k: contracted.expand(members) for k, members in found.members.items()}, owner)
    index = {k: n for n, k in enumerate(kernels)}
    owners = {v: index[k] for v, k in owner.items() if k in index}
    coloring = Coloring(CostMemo(costs), kernels.values(), owners)
    if found.packs is not None:
        pack_launches(coloring)
    coloring.statistics = found.statistics
    return coloring


def _without_dead(costs: KernelCosts, kernels: Mapping[int, frozenset[int]],
                  owner: Mapping[int, int]) -> Mapping[int, frozenset[int]]:
    """Kernels without what nobody reads: a forced copy serves the kernel's other readers too, and what was written for
    these may not be needed any more."""
    users = [frozenset(u) for u in costs.users]
    while True:
        read = {u for mem in kernels.values() for v in mem for u in costs.operands[v] if u not in mem}
        wanted = {v for v in owner if v in read or costs.is_output[v] or not users[v]}
        kept = {k: frozenset(v for v in mem if not users[v].isdisjoint(mem) or owner.get(v) == k and v in wanted)
                for k, mem in kernels.items()}
        if kept == kernels:
            return kernels
        kernels = {k: mem for k, mem in kept.items() if mem}


@dataclass
class ContractedProblem:
    """A `FusionProblem` whose vertices stand for sets: `own` are written here, `copies` computed once more."""

    costs: KernelCosts
    own: list[frozenset[int]]
    copies: list[frozenset[int]]
    operands: list[list[int]]
    users: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        costs, n = self.costs, len(self.own)
        self.num_vertices, self.launch_cost = n, costs.launch_cost
        self.users = [[] for _ in range(n)]
        for s, operands in enumerate(self.operands):
            for o in operands:
                self.users[o].append(s)
        self.is_output = [any(costs.is_output[v] for v in own) for own in self.own]
        self.is_fixed = [any(costs.is_fixed[v] for v in own) for own in self.own]
        self.is_clonable = [len(own) == 1 and all(costs.is_clonable[v] for v in own) for own in self.own]
        self.may_conflict = [any(costs.may_conflict[v] for v in self.own[s] | self.copies[s]) for s in range(n)]
        self.follows_user = [False] * n
        place = {v: s for s, own in enumerate(self.own) for v in own}
        groups = [sorted({place[v] for v in group if v in place}) for group in costs.shared_inputs]
        self.shared_inputs = [g for g in groups if len(g) > 1]

    def expand(self, members: Iterable[int]) -> frozenset[int]:
        return frozenset().union(*(self.own[s] | self.copies[s] for s in members))

    def outputs(self, members: frozenset[int], outputs: Iterable[int]) -> frozenset[int]:
        """What a kernel writes: of a vertex that it owns, what the program wants or somebody outside reads."""
        written: set[int] = set()
        for s in outputs:
            needed = [v for v in self.own[s] if self._is_read(v, members)]
            written.update(needed or [v for v in self.own[s] if self._is_read(v, self.own[s])])
        return frozenset(written)

    def _is_read(self, v: int, inside: frozenset[int]) -> bool:
        users = self.costs.users[v]
        return self.costs.is_output[v] or not users or not inside.issuperset(users)

    def kernel_cost(self, members: frozenset[int], outputs: frozenset[int]) -> float | None:
        expanded = self.expand(members)
        return self.costs.kernel_cost(expanded, self.outputs(expanded, outputs))

    def kernel_floor(self, members: frozenset[int], outputs: frozenset[int],
                     reads: frozenset[int]) -> tuple[float, float] | None:
        return self.launch_cost, 0.0

    def remaining_floor(self, position: int, slack: float) -> float:
        return 0.0

    def conflict(self, u: int, v: int) -> bool:
        a, b = (self.own[s] | self.copies[s] for s in (u, v))
        return any(self.costs.conflict(min(x, y), max(x, y)) for x in a for y in b if x != y)

    def can_pack(self, a: frozenset[int], b: frozenset[int]) -> bool:
        return self.costs.can_pack(self.expand(a), self.expand(b))


def contract(costs: KernelCosts, pairs: Pairs) -> ContractedProblem:
    """The problem in which the two of each pair are together; `Refusal` names the rule that forbids it."""
    copied: dict[int, set[int]] = {}
    together: list[set[int]] = []
    for first, second in pairs:
        u, v = min(first, second), max(first, second)
        _check_pair(costs, u, v)
        if u in costs.operands[v] and costs.is_clonable[u]:
            copied.setdefault(v, set()).add(u)
        else:
            together.append({u, v})
    home = _close(costs, together)
    sets: dict[int, set[int]] = {}
    for v in range(costs.num_vertices):
        sets.setdefault(home[v], set()).add(v)
    copies = {h: _copies_of(own, copied) for h, own in sets.items()}
    _drop_unread(costs, sets, copies, home)
    problem = _ordered(costs, sets, copies, home)
    for s, own in enumerate(problem.own):
        whole = own | problem.copies[s]
        if len(whole) > 1:
            costs.estimate(whole, problem.outputs(whole, (s,)))
    return problem


def _check_pair(costs: KernelCosts, u: int, v: int) -> None:
    instructions = [costs.graph.vertices[w].instruction for w in (u, v)]
    for w, instruction in zip((u, v), instructions, strict=True):
        if costs.is_fixed[w]:
            raise Refusal("no side effects", "{} is a call of its own", instruction)
    if costs.conflict(u, v) and any(i in costs.graph.loops for i in instructions):
        raise Refusal("producer-consumer", f"{{}} and {{}}: {costs.loop_conflict(u, v)}", *instructions)
    if costs.conflict(u, v):
        raise Refusal("producer-consumer", "{} and {} reduce different axes", *instructions)


def _close(costs: KernelCosts, together: list[set[int]]) -> list[int]:
    """The group of every vertex: pairs that touch are one, and what lies between two of a group belongs to it."""
    groups = [set(group) for group in together]
    changed = True
    while changed:
        changed = False
        merged: list[set[int]] = []
        for group in groups:
            for other in [m for m in merged if not m.isdisjoint(group)]:
                merged.remove(other)
                group |= other
            merged.append(group)
        groups = merged
        for group in groups:
            between = _between(costs, group)
            for v in sorted(between - group):
                if costs.is_fixed[v]:
                    ends = [costs.graph.vertices[w].instruction for w in (min(group), max(group))]
                    raise Refusal("no cycle", "between {} and {} stands {}, which is a call of its own", *ends,
                                  costs.graph.vertices[v].instruction)
            if not between <= group:
                group |= between
                changed = True
    home = list(range(costs.num_vertices))
    for group in groups:
        for v in group:
            home[v] = min(group)
    return home


def _between(costs: KernelCosts, group: set[int]) -> set[int]:
    """Vertices on paths from one of a group to another."""
    low, high = min(group), max(group)
    below = _reach(group, costs.users, low, high)
    return below & _reach(group, costs.operands, low, high)


def _reach(start: set[int], steps: Sequence[Sequence[int]], low: int, high: int) -> set[int]:
    seen, stack = set(start), sorted(start)
    while stack:
        for w in steps[stack.pop()]:
            if low <= w <= high and w not in seen:
                seen.add(w)
                stack.append(w)
    return seen


def _copies_of(own: set[int], copied: Mapping[int, set[int]]) -> set[int]:
    found: set[int] = set()
    stack = sorted(own)
    while stack:
        for u in copied.get(stack.pop(), ()):
            if u not in found:
                found.add(u)
                stack.append(u)
    return found - own


def _drop_unread(costs: KernelCosts, sets: dict[int, set[int]], copies: dict[int, set[int]], home: list[int]) -> None:
    """What all of its readers copy has no kernel of its own, unless the program wants it."""
    for h in sorted(sets, reverse=True):
        own = sets[h]
        if any(costs.is_output[v] or not costs.users[v] for v in own):
            continue
        readers = {home[w] for v in own for w in costs.users[v]} - {h}
        readers |= {g for g in copies if g != h and any(not own.isdisjoint(costs.operands[c]) for c in copies[g])}
        if all(g not in sets or own <= copies[g] for g in readers):
            del sets[h], copies[h]


def _ordered(costs: KernelCosts, sets: dict[int, set[int]], copies: dict[int, set[int]],
             home: list[int]) -> ContractedProblem:
    """The groups as vertices in topological order."""
    reads = {h: {home[u] for v in own | copies[h] for u in costs.operands[v]
                 if u not in own and u not in copies[h]} - {h} for h, own in sets.items()}
    waiting = {h: len(r) for h, r in reads.items()}
    users: dict[int, list[int]] = {h: [] for h in sets}
    for h, r in reads.items():
        for g in r:
            users[g].append(h)
    ready = [h for h, count in waiting.items() if not count]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        order.append(heapq.heappop(ready))
        for h in users[order[-1]]:
            waiting[h] -= 1
            if not waiting[h]:
                heapq.heappush(ready, h)
    if len(order) < len(sets):
        stuck = sorted(h for h in sets if waiting[h] and len(sets[h]) > 1)
        raise Refusal("no cycle", "the kernels around {} would wait for each other",
                      costs.graph.vertices[stuck[0]].instruction)
    number = {h: n for n, h in enumerate(order)}
    return ContractedProblem(costs, [frozenset(sets[h]) for h in order], [frozenset(copies[h]) for h in order],
                             [sorted(number[g] for g in reads[h]) for h in order])
