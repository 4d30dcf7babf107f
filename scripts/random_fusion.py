"""Random fusion problems with a cost like a GPU's: launch + bytes / bandwidth, a shared operand counted once."""

from __future__ import annotations

import random
from dataclasses import dataclass, field


@dataclass
class RandomProblem:
    """Work that fits `max_members` per kernel; vertices with a size (kB), parameters with a size, random conflicts."""

    num_vertices: int
    operands: list[list[int]]
    users: list[list[int]]
    is_output: list[bool]
    is_fixed: list[bool]
    is_clonable: list[bool]
    shared_inputs: list[list[int]]
    size: list[float]
    work: list[float]
    inputs: list[list[int]]
    input_size: list[float]
    conflicts: set[tuple[int, int]]
    shape: list[int]
    max_members: int = 1000
    launch_cost: float = 2.5
    bandwidth: float = 4.0
    cost_calls: int = field(default=0)

    @property
    def follows_user(self) -> list[bool]:
        return [False] * self.num_vertices

    @property
    def may_conflict(self) -> list[bool]:
        found = {v for pair in self.conflicts for v in pair}
        return [v in found for v in range(self.num_vertices)]

    def kernel_cost(self, members: frozenset[int], outputs: frozenset[int]) -> float | None:
        self.cost_calls += 1
        if len(members) > self.max_members:
            return None
        read: set[int] = set()
        parameters: set[int] = set()
        work = 0.0
        for v in members:
            read.update(self.operands[v])
            parameters.update(self.inputs[v])
            work += self.work[v]
        size = self.size
        moved = sum([size[u] for u in read - members]) + sum([size[v] for v in outputs])
        moved += sum([self.input_size[p] for p in parameters])
        return self.launch_cost + max(moved / self.bandwidth, work)

    def kernel_floor(
        self, members: frozenset[int], outputs: frozenset[int], reads: frozenset[int]
    ) -> tuple[float, float] | None:
        if len(members) > self.max_members:
            return None
        parameters = {p for v in members for p in self.inputs[v]}
        moved = sum([self.size[v] for v in (*reads, *outputs)]) + sum([self.input_size[p] for p in parameters])
        memory, work = moved / self.bandwidth, sum([self.work[v] for v in members])
        return self.launch_cost + max(memory, work), max(0.0, work - memory)

    def remaining_floor(self, position: int, slack: float) -> float:
        later = {p for v in range(position, self.num_vertices) for p in self.inputs[v]}
        mine = [v for v in range(position) if not self.is_fixed[v]]
        moved = sum([self.size[v] for v in mine if self.is_output[v]])
        moved += sum([self.input_size[p] for p in {p for v in mine for p in self.inputs[v]} - later])
        return max(0.0, moved / self.bandwidth - slack)

    def conflict(self, u: int, v: int) -> bool:
        return (min(u, v), max(u, v)) in self.conflicts

    def can_pack(self, a: frozenset[int], b: frozenset[int]) -> bool:
        return self.shape[min(a)] == self.shape[min(b)]


def random_problem(
    seed: int,
    n: int,
    conflict: float = 0.1,
    clonable: float = 0.4,
    fixed: float = 0.05,
    window: int = 4,
    max_members: int = 1000,
    packing: bool = True,
) -> RandomProblem:
    """Each vertex reads 1 to 3 of the `window` vertices before it, or parameters; conflicts lie within 2 windows."""
    rng = random.Random(seed)
    parameters = rng.randint(1, 3) if n < 100 else n // 20
    operands: list[list[int]] = []
    inputs: list[list[int]] = []
    for v in range(n):
        reads: set[int] = set()
        params: set[int] = set()
        for _ in range(rng.choice([1, 1, 2, 2, 3])):
            if v and rng.random() < 0.8:
                reads.add(rng.randrange(max(0, v - window), v))
            else:
                params.add(rng.randrange(parameters))
        operands.append(sorted(reads))
        inputs.append(sorted(params))
    users: list[list[int]] = [[] for _ in range(n)]
    readers: list[list[int]] = [[] for _ in range(parameters)]
    for v in range(n):
        for u in operands[v]:
            users[u].append(v)
        for p in inputs[v]:
            readers[p].append(v)
    pairs = set()
    for u in range(n):
        for v in range(u + 1, min(n, u + 2 * window + 1)):
            if rng.random() < conflict:
                pairs.add((u, v))
    is_fixed = [rng.random() < fixed for _ in range(n)]
    return RandomProblem(
        n,
        operands,
        users,
        [not users[v] or rng.random() < 0.1 for v in range(n)],
        is_fixed,
        [rng.random() < clonable for _ in range(n)],
        [r for r in readers if len(r) > 1],
        [rng.choice([0.01, 0.5, 4, 16, 64]) for _ in range(n)],
        [rng.choice([0.01, 0.1, 0.5]) for _ in range(n)],
        inputs,
        [rng.choice([0.5, 4, 16, 64]) for _ in range(parameters)],
        pairs,
        [rng.randrange(2) for _ in range(n)] if packing else list(range(n)),
        max_members,
    )
