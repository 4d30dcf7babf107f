"""A topological order of the quotient graph (kernels as nodes) that survives contraction and edge changes.

"Would joining x and y make a cycle" is a search for a path of two or more edges; it need only look at nodes between
x and y in the order, from both ends, until either end has nothing left. That end is also all that must move when the
order changes. Nodes form a linked list with a label each, so moving one costs the same anywhere. Updates are atomic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_GAP = 1 << 128  # between labels at first; moves divide gaps, and once one is used up all nodes are labeled anew
_ENDS = -1  # before the first and after the last node


class QuotientOrder:
    def __init__(self, preds: Mapping[int, Iterable[int]]):
        """Order the nodes of `preds` (each node's predecessors, all >= 0); ValueError when they form a cycle."""
        self.preds: dict[int, set[int]] = {k: set(p) for k, p in preds.items()}
        self.succs: dict[int, set[int]] = {k: set() for k in preds}
        for k, ps in self.preds.items():
            for p in ps:
                self.succs[p].add(k)
        waiting = {k: len(p) for k, p in self.preds.items()}
        ready = [k for k, count in waiting.items() if count == 0]
        ordered: list[int] = []
        while ready:
            ordered += ready
            following = []
            for k in ready:
                for s in self.succs[k]:
                    waiting[s] -= 1
                    if waiting[s] == 0:
                        following.append(s)
            ready = following
        if len(ordered) < len(self.preds):
            raise ValueError(f"kernels {sorted(self.preds.keys() - set(ordered))} form a cycle")
        self.position: dict[int, int] = {k: (i + 1) * _GAP for i, k in enumerate(ordered)}
        self._next = dict(zip([_ENDS, *ordered], [*ordered, _ENDS], strict=True))
        self._prev = {after: before for before, after in self._next.items()}

    def copy(self) -> QuotientOrder:
        twin = object.__new__(QuotientOrder)
        twin.preds = {k: set(p) for k, p in self.preds.items()}
        twin.succs = {k: set(s) for k, s in self.succs.items()}
        twin.position = dict(self.position)
        twin._next = dict(self._next)
        twin._prev = dict(self._prev)
        return twin

    def sorted(self) -> list[int]:
        return sorted(self.preds, key=self.position.__getitem__)

    def has_edge(self, a: int, b: int) -> bool:
        return b in self.succs[a] or a in self.succs[b]

    def has_long_path(self, a: int, b: int) -> bool:
        """Whether a path of two or more edges joins a and b: joining them would make a cycle."""
        if self.position[a] > self.position[b]:
            a, b = b, a
        low, high = self.position[a], self.position[b]
        down = [s for s in self.succs[a] if self.position[s] < high]
        return bool(down) and self._meet(down, [p for p in self.preds[b] if self.position[p] > low], low, high) is None

    def _meet(self, down: list[int], up: list[int], low: int, high: int) -> tuple[set[int], bool] | None:
        """Search down from some nodes and up from others, strictly between two labels; None if that meets.

        Otherwise the nodes of the side that ended first, and whether it is the lower one (`down`).
        """
        position, preds, succs = self.position, self.preds, self.succs
        reached, reaching = set(down), set(up)
        if not reached.isdisjoint(reaching):
            return None
        while down and up:
            if len(reached) <= len(reaching):
                for s in succs[down.pop()]:
                    if position[s] < high and s not in reached:
                        if s in reaching:
                            return None
                        reached.add(s)
                        down.append(s)
            else:
                for p in preds[up.pop()]:
                    if position[p] > low and p not in reaching:
                        if p in reached:
                            return None
                        reaching.add(p)
                        up.append(p)
        return (reaching, False) if down else (reached, True)

    def long_path(self, a: int, b: int) -> list[int]:
        """A shortest path of two or more edges between a and b, from the earlier to the later; [] if there is none."""
        if self.position[a] > self.position[b]:
            a, b = b, a
        came_from = {s: a for s in self.succs[a] if s != b and self.position[s] < self.position[b]}
        frontier = sorted(came_from)
        while frontier:
            following = []
            for k in frontier:
                if b in self.succs[k]:
                    path = [b, k]
                    while path[-1] != a:
                        path.append(came_from[path[-1]])
                    return path[::-1]
                for s in sorted(self.succs[k]):
                    if s not in came_from and self.position[s] < self.position[b]:
                        came_from[s] = k
                        following.append(s)
            frontier = following
        return []

    def contract(self, kept: int, gone: int) -> bool:
        """Make two nodes one, under the name `kept`; False, and nothing changes, if that would make a cycle."""
        position, preds, succs = self.position, self.preds, self.succs
        first, last = (kept, gone) if position[kept] < position[gone] else (gone, kept)
        low, high = position[first], position[last]
        down = [s for s in succs[first] if position[s] < high]
        met = self._meet(down, [p for p in preds[last] if position[p] > low], low, high)
        if met is None:
            return False
        moved, is_below = met
        # The joint node takes the place of the last one, and what hangs on the first moves behind it; or vice versa.
        place = last if is_below else first
        self._move(sorted(moved, key=position.__getitem__), after=last if is_below else self._prev[first])
        if place != kept:
            self._move([kept], after=gone)
        self._drop(gone)

        gone_preds, gone_succs = preds.pop(gone), succs.pop(gone)
        for p in gone_preds:
            succs[p].discard(gone)
            if p != kept:
                succs[p].add(kept)
                preds[kept].add(p)
        for s in gone_succs:
            preds[s].discard(gone)
            if s != kept:
                preds[s].add(kept)
                succs[kept].add(s)
        return True

    def update(self, preds: Mapping[int, set[int]], added: Mapping[int, int], removed: Iterable[int]) -> bool:
        """Give nodes new predecessors; False, and nothing changes, if that would make a cycle.

        `added` maps each new node to a node it should start beside; `removed` nodes must have lost their successors.
        """
        for k, beside in added.items():
            self.preds[k], self.succs[k] = set(), set()
            self._insert([k], beside)
        targets = {**preds, **{k: set() for k in removed}}
        dropped = [(p, k) for k, new in targets.items() for p in self.preds[k] - new]
        wanted = [(p, k) for k, new in targets.items() for p in new - self.preds[k]]
        for p, k in dropped:
            self._unlink(p, k)
        # Moves only ever make the order fit more edges, so a failed update need not move anything back, once the
        # dropped edges fit again.
        for done, (p, k) in enumerate(wanted):
            if not self._link(p, k):
                for edge in wanted[:done]:
                    self._unlink(*edge)
                for edge in dropped:
                    self._link(*edge)
                self._forget(added)
                return False
        self._forget(removed)
        return True

    def _link(self, p: int, k: int) -> bool:
        position = self.position
        if p == k:
            return False
        if position[p] > position[k]:
            met = self._meet([k], [p], position[k] - 1, position[p] + 1)
            if met is None:
                return False
            moved, is_below = met
            self._move(sorted(moved, key=position.__getitem__), after=p if is_below else self._prev[k])
        self.preds[k].add(p)
        self.succs[p].add(k)
        return True

    def _unlink(self, p: int, k: int) -> None:
        self.preds[k].discard(p)
        self.succs[p].discard(k)

    def _forget(self, nodes: Iterable[int]) -> None:
        for k in nodes:
            if self.succs[k] or self.preds[k]:
                raise AssertionError(f"kernel {k} is removed but still linked")
            self._drop(k)
            del self.preds[k], self.succs[k]

    # ---- the linked list -----------------------------------------------------------------------------------------

    def _drop(self, k: int) -> None:
        before, after = self._prev.pop(k), self._next.pop(k)
        self._next[before], self._prev[after] = after, before
        del self.position[k]

    def _move(self, nodes: list[int], after: int) -> None:
        for k in nodes:
            self._drop(k)
        self._insert(nodes, after)

    def _insert(self, nodes: list[int], after: int) -> None:
        """Place nodes, in this order, behind a node (or `_ENDS`: first of all)."""
        if not nodes:
            return
        following = self._next[after]
        for before, k in zip([after, *nodes], [*nodes, following], strict=False):
            self._next[before], self._prev[k] = k, before
        low = self.position.get(after, 0)
        high = self.position.get(following, low + 2 * _GAP * len(nodes))
        step = (high - low) // (len(nodes) + 1)
        if step:
            self.position.update((k, low + (i + 1) * step) for i, k in enumerate(nodes))
            return
        k, label = self._next[_ENDS], _GAP
        while k != _ENDS:
            self.position[k] = label
            k, label = self._next[k], label + _GAP
