"""A legal coloring: kernels over possibly overlapping members, and the steps that lead from one to the next.

A vertex may live in several kernels (clones); one of them owns it if it is written: an output, or read by a kernel
without its own copy. After every step the plans are valid, no copy is dead, and the quotient graph (all kernels,
single and fixed vertices included) is acyclic. A step is first weighed (`join_gain`, `propose`), then taken
(`join`, `apply`); taking it fails, changing nothing, if it would make a cycle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hlofuse.fusion.problem import CostMemo
from hlofuse.fusion.quotient_order import QuotientOrder

_NONE: frozenset[int] = frozenset()
UNOWNED = -1


@dataclass(frozen=True)
class Kernel:
    """One kernel of a finished coloring; `id` is its name inside the `Coloring`."""

    id: int
    members: frozenset[int]
    outputs: frozenset[int]
    cost: float


@dataclass(frozen=True)
class Change:
    """A weighed step: what the touched kernels become. `delta` is what it adds to the total cost, in microseconds."""

    members: Mapping[int, frozenset[int]]
    reads: Mapping[int, frozenset[int]]
    outputs: Mapping[int, frozenset[int]]
    costs: Mapping[int, float]
    owner: Mapping[int, int]
    delta: float


@dataclass(frozen=True)
class SearchStatistics:
    """How a coloring was found: cost of each start before and after improvement, and the steps of the winner."""

    method: str
    winner: str
    starts: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)
    evaluations: int = 0
    optimal_over: str = ""  # proven by `exact`, before packing: over "clones", or "partitions" where none are allowed


class Coloring:
    """Kernels of a problem. Starts with each vertex alone, or with the given kernels (and owners, vertex -> index)."""

    def __init__(
        self, memo: CostMemo, kernels: Iterable[frozenset[int]] | None = None, owners: Mapping[int, int] | None = None
    ):
        self.memo = memo
        n = memo.problem.num_vertices
        chosen = [frozenset((v,)) for v in range(n)] if kernels is None else list(kernels)
        self.members = dict(enumerate(chosen))
        self.reads = {k: self._reads_of(m) for k, m in self.members.items()}
        self.copies: list[set[int]] = [set() for _ in range(n)]
        self.readers: list[set[int]] = [set() for _ in range(n)]
        for k, mem in self.members.items():
            for v in mem:
                self.copies[v].add(k)
            for v in self.reads[k]:
                self.readers[v].add(k)
        self.owner = [UNOWNED] * n
        for v in range(n):
            if not self.copies[v]:
                if self._is_needed(v, self.readers[v]):
                    raise ValueError(f"vertex {v} is in no kernel but is needed")
            elif self._is_needed(v, self.readers[v]):
                self.owner[v] = min(self.copies[v]) if owners is None else owners.get(v, min(self.copies[v]))
        self.outputs = {k: frozenset(v for v in m if self.owner[v] == k) for k, m in self.members.items()}
        self.costs: dict[int, float] = {}
        for k, mem in self.members.items():
            cost = memo.kernel_cost(mem, self.outputs[k])
            if cost is None:
                raise ValueError(f"kernel {sorted(mem)} with outputs {sorted(self.outputs[k])} has no legal plan")
            self.costs[k] = cost
        self.order = QuotientOrder({k: {self.owner[v] for v in r} for k, r in self.reads.items()})
        self.total_cost = sum(self.costs.values())
        self.cloned = {v for v in range(n) if len(self.copies[v]) > 1}
        self.clock = 0
        self.changed_at = dict.fromkeys(self.members, 0)
        self._next_id = len(chosen)
        self.packs: list[tuple[int, ...]] | None = None  # set by packing; None: one launch per kernel
        self.statistics = SearchStatistics("", "")

    def copy(self) -> Coloring:
        """An independent coloring that shares the memo."""
        twin = object.__new__(Coloring)
        twin.__dict__.update(self.__dict__)
        for name in ("members", "reads", "outputs", "costs", "changed_at", "owner", "cloned"):
            setattr(twin, name, getattr(self, name).copy())
        twin.copies = [set(c) for c in self.copies]
        twin.readers = [set(r) for r in self.readers]
        twin.order = self.order.copy()
        return twin

    # ---- reading -------------------------------------------------------------------------------------------------

    def kernel(self, k: int) -> Kernel:
        return Kernel(k, self.members[k], self.outputs[k], self.costs[k])

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """All kernels, fixed vertices included, in an order in which they can run."""
        return tuple(self.kernel(k) for k in self.order.sorted())

    @property
    def launches(self) -> tuple[tuple[Kernel, ...], ...]:
        """Groups of kernels that are one launch each, in an order in which they can run."""
        if self.packs is None:
            return tuple((kernel,) for kernel in self.kernels)
        return tuple(tuple(self.kernel(k) for k in pack) for pack in self.packs)

    @property
    def predicted_cost(self) -> float:
        """Microseconds with packing: each launch saved by it saves one launch cost."""
        saved = 0 if self.packs is None else len(self.members) - len(self.packs)
        return self.total_cost - saved * self.memo.problem.launch_cost

    def owner_of(self, v: int) -> int | None:
        """The id of the kernel that writes v to memory; None when every reader has its own copy."""
        return None if self.owner[v] == UNOWNED else self.owner[v]

    def home(self, v: int) -> int:
        """The kernel to ask about v: its owner, else its first copy."""
        owner = self.owner[v]
        return owner if owner != UNOWNED else min(self.copies[v])

    def fresh_kernel(self) -> int:
        """An unused kernel id, for `propose`."""
        self._next_id += 1
        return self._next_id - 1

    def neighbors(self, k: int) -> list[int]:
        """Kernels that k reads from or writes for, without fixed ones."""
        return sorted(o for o in self.order.preds[k] | self.order.succs[k] if not self.is_fixed(o))

    def is_fixed(self, k: int) -> bool:
        mem = self.members[k]
        return len(mem) == 1 and self.memo.is_fixed[next(iter(mem))]

    def _reads_of(self, members: frozenset[int]) -> frozenset[int]:
        operands = self.memo.operands
        return _NONE.union(*[operands[v] for v in members]) - members

    def _is_needed(self, v: int, readers: set[int]) -> bool:
        return bool(readers) or self.memo.must_write[v]

    # ---- joining two kernels -------------------------------------------------------------------------------------

    def join_gain(self, a: int, b: int) -> float | None:
        """Microseconds saved if a and b were one kernel; None: no plan. Conflicts and cycles are not looked at."""
        outputs = self._joint_outputs(a, b)
        if outputs is not None:
            cost = self.memo.kernel_cost(self.members[a] | self.members[b], outputs)
            return None if cost is None else self.costs[a] + self.costs[b] - cost
        change = self.joined(a, b)
        return None if change is None else -change.delta

    def join(self, a: int, b: int) -> int | None:
        """Make a and b one kernel and return its id; None if that has no plan or makes a cycle."""
        outputs = self._joint_outputs(a, b)
        if outputs is None:
            members = self._join_change(a, b)
            change = self.propose(members)
            return next(iter(members)) if change is not None and self.apply(change) else None
        if len(self.members[a]) < len(self.members[b]):
            a, b = b, a
        union = self.members[a] | self.members[b]
        cost = self.memo.kernel_cost(union, outputs)
        if cost is None or not self.order.contract(a, b):
            return None
        self.total_cost += cost - self.costs[a] - self.costs.pop(b)
        for v in self.members[b]:
            copies = self.copies[v]
            copies.discard(b)
            copies.add(a)
            if len(copies) == 1:
                self.cloned.discard(v)
        for v in self.outputs[b]:
            self.owner[v] = a if v in outputs else UNOWNED
        for v in self.outputs[a] - outputs:
            self.owner[v] = UNOWNED
        for v in self.reads[b]:
            self.readers[v].discard(b)
            if v not in union:
                self.readers[v].add(a)
        for v in self.reads[a] & union:
            self.readers[v].discard(a)
        self.reads[a] = (self.reads[a] | self.reads.pop(b)) - union
        self.members[a], self.outputs[a], self.costs[a] = union, outputs, cost
        del self.members[b], self.outputs[b], self.changed_at[b]
        self.packs = None
        self.clock += 1
        self.changed_at[a] = self.clock
        return a

    def joined(self, a: int, b: int) -> Change | None:
        """The step that makes a and b one kernel, weighed; None: no plan. Conflicts and cycles are not looked at."""
        return self.propose(self._join_change(a, b))

    def _join_change(self, a: int, b: int) -> dict[int, frozenset[int]]:
        if len(self.members[a]) < len(self.members[b]):
            a, b = b, a
        return {a: self.members[a] | self.members[b], b: _NONE}

    def _joint_outputs(self, a: int, b: int) -> frozenset[int] | None:
        """Outputs of the union of two kernels: what others still read, or the program wants.

        None if a third kernel changes too: it writes what one of the two reads, although the other holds a copy.
        """
        owner, readers, must_write = self.owner, self.readers, self.memo.must_write
        internal = []
        for k, reads in ((a, self.reads[b]), (b, self.reads[a])):
            for v in reads & self.members[k]:
                if owner[v] != k:
                    return None
                if not must_write[v] and (len(readers[v]) == 1 or readers[v] <= {a, b}):
                    internal.append(v)
        outputs = self.outputs[a] | self.outputs[b]
        return outputs.difference(internal) if internal else outputs

    # ---- any other step ------------------------------------------------------------------------------------------

    def propose(self, members: Mapping[int, frozenset[int]]) -> Change | None:
        """Weigh giving kernels other members (empty: it goes; an id of `fresh_kernel`: it comes).

        Copies that this makes dead are dropped. None: something has no plan, or a needed vertex would be lost.
        Conflicts and cycles are not looked at.
        """
        new = dict(members)
        users, must_write = self.memo.users, self.memo.must_write
        while True:
            reads = {k: self._reads_of(mem) for k, mem in new.items()}
            read = _NONE.union(*reads.values())
            owner: dict[int, int] = {}
            dead: dict[int, set[int]] = {}
            for v in self._touched(new, reads):
                copies = [k for k in self.copies[v] if k not in new]
                copies += [k for k, mem in new.items() if v in mem]
                needed = must_write[v] or v in read or not self.readers[v] <= new.keys()
                if not needed:
                    chosen = UNOWNED
                elif not copies:
                    return None
                else:
                    chosen = self.owner[v] if self.owner[v] in copies else min(copies, key=self._place)
                owner[v] = chosen
                for k in copies:
                    if k != chosen and users[v].isdisjoint(new[k] if k in new else self.members[k]):
                        dead.setdefault(k, set()).add(v)
            if not dead:
                break
            for k, gone in dead.items():
                new[k] = (new[k] if k in new else self.members[k]) - gone
        return self._weigh(new, reads, owner)

    def _touched(self, new: Mapping[int, frozenset[int]], reads: Mapping[int, frozenset[int]]) -> list[int]:
        """Vertices whose copies, readers or use within a kernel a change of members may alter."""
        touched: set[int] = set()
        operands = self.memo.operands
        for k, mem in new.items():
            old = self.members.get(k, _NONE)
            touched |= mem ^ old
            touched |= reads[k] ^ self.reads.get(k, _NONE)
            if mem:
                for v in old - mem:
                    touched |= operands[v] & mem
        return sorted(touched)

    def _place(self, k: int) -> tuple[float, int]:
        # Of several copies the earliest kernel owns a vertex: it is the least likely to close a cycle.
        return self.order.position.get(k, float("inf")), k

    def _weigh(
        self, new: Mapping[int, frozenset[int]], reads: Mapping[int, frozenset[int]], owner: Mapping[int, int]
    ) -> Change | None:
        affected = set(new)
        owned: dict[int, set[int]] = {}
        for v, k in owner.items():
            owned.setdefault(k, set()).add(v)
            if k != self.owner[v]:
                affected.update((k, self.owner[v]))
        affected.discard(UNOWNED)
        outputs: dict[int, frozenset[int]] = {}
        costs: dict[int, float] = {}
        delta = 0.0
        for k in sorted(affected):
            mem = new[k] if k in new else self.members[k]
            delta -= self.costs.get(k, 0.0)
            if not mem:
                continue
            outputs[k] = self.outputs.get(k, _NONE).difference(owner).union(owned.get(k, _NONE))
            cost = self.memo.kernel_cost(mem, outputs[k])
            if cost is None:
                return None
            costs[k] = cost
            delta += cost
        return Change(new, reads, outputs, costs, owner, delta)

    def apply(self, change: Change) -> bool:
        """Take a step that was proposed on the present coloring; False, and nothing changes, if it makes a cycle."""
        new = change.members
        stale = {k for k, mem in new.items() if mem}
        for v, k in change.owner.items():
            if k != self.owner[v]:
                stale |= self.readers[v] - new.keys()
        preds = {
            k: {change.owner.get(v, self.owner[v]) for v in (change.reads[k] if k in new else self.reads[k])}
            for k in stale
        }
        beside = next(k for k in new if k in self.members)
        added = {k: beside for k, mem in new.items() if mem and k not in self.members}
        removed = [k for k, mem in new.items() if not mem and k in self.members]
        if not self.order.update(preds, added, removed):
            return False
        self.packs = None
        self.clock += 1
        for k, mem in new.items():
            old = self.members.get(k, _NONE)
            for v in old - mem:
                self.copies[v].discard(k)
            for v in mem - old:
                self.copies[v].add(k)
            for v in mem ^ old:
                (self.cloned.add if len(self.copies[v]) > 1 else self.cloned.discard)(v)
            old_reads = self.reads.get(k, _NONE)
            for v in old_reads - change.reads[k]:
                self.readers[v].discard(k)
            for v in change.reads[k] - old_reads:
                self.readers[v].add(k)
            if mem:
                self.members[k], self.reads[k] = mem, change.reads[k]
            elif k in self.members:
                for table in (self.members, self.reads, self.outputs, self.costs, self.changed_at):
                    table.pop(k)  # type: ignore[attr-defined]
        for v, k in change.owner.items():
            self.owner[v] = k
        for k, cost in change.costs.items():
            self.outputs[k], self.costs[k], self.changed_at[k] = change.outputs[k], cost, self.clock
        self.total_cost += change.delta
        return True

    # ---- checking ------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Recompute everything from the members and owners; AssertionError names what is wrong."""
        fresh = Coloring(self.memo, list(self.members.values()), self._owner_indices())
        for index, k in enumerate(self.members):
            mem = self.members[k]
            assert mem, f"kernel {k} is empty"
            assert fresh.outputs[index] == self.outputs[k], f"kernel {k}: outputs {self.outputs[k]} are stale"
            assert fresh.reads[index] == self.reads[k], f"kernel {k}: reads {self.reads[k]} are stale"
            assert fresh.costs[index] == self.costs[k], f"kernel {k}: cost {self.costs[k]} is stale"
            assert self.memo.first_conflict(mem, mem) is None, f"kernel {sorted(mem)} holds conflicting vertices"
            dead = [v for v in mem if self.owner[v] != k and self.memo.users[v].isdisjoint(mem)]
            assert not dead, f"kernel {k}: copies {dead} are dead"
        for v, copies in enumerate(self.copies):
            assert len(copies) <= 1 or self.memo.is_clonable[v], f"vertex {v} is cloned but not clonable"
            assert (fresh.owner[v] == UNOWNED) == (self.owner[v] == UNOWNED), f"vertex {v}: owner is wrong"
            assert self.owner[v] == UNOWNED or self.owner[v] in copies, f"vertex {v}: owner lacks it"
        position = self.order.position
        for k, preds in self.order.preds.items():
            assert preds == {self.owner[v] for v in self.reads[k]}, f"kernel {k}: predecessors are stale"
            assert all(position[p] < position[k] for p in preds), f"kernel {k} runs before what it reads"
        assert abs(fresh.total_cost - self.total_cost) < 1e-6 * max(1.0, fresh.total_cost), "total cost is stale"

    def _owner_indices(self) -> dict[int, int]:
        index = {k: i for i, k in enumerate(self.members)}
        return {v: index[k] for v, k in enumerate(self.owner) if k != UNOWNED}
