"""Candidate steps around one vertex, other than joins: where else it, or a cone of it, could be computed.

Each generator yields what some kernels would become, for `Coloring.propose`. Pairwise conflicts are checked here,
before anything costly is asked; plans and cycles are checked by the coloring.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from hlofuse.fusion.partition import Change, Coloring

Members = dict[int, frozenset[int]]
_MAX_EXCHANGE = 48  # members of two kernels in a Kempe exchange, which looks at all pairs
_MAX_SIBLINGS = 4
FEW_KERNELS = 16  # up to here kernels that share no data are tried as well: one launch less may pay


def cone(coloring: Coloring, v: int, k: int, steps: list[frozenset[int]]) -> frozenset[int]:
    """v and what `steps` (operands or users) reach from it inside kernel k."""
    members = coloring.members[k]
    seen = {v}
    stack = [v]
    while stack:
        for u in steps[stack.pop()]:
            if u in members and u not in seen:
                seen.add(u)
                stack.append(u)
    return frozenset(seen)


def clone_set(coloring: Coloring, v: int) -> frozenset[int] | None:
    """What a kernel needs to compute v itself: v and its unwritten operands. None if some are not clonable."""
    home = coloring.home(v)
    members = coloring.members[home]
    needed = {v}
    stack = [v]
    while stack:
        w = stack.pop()
        if not coloring.memo.is_clonable[w]:
            return None
        for u in coloring.memo.operands[w]:
            if u in members and coloring.owner[u] != home and u not in needed:
                needed.add(u)
                stack.append(u)
    return frozenset(needed)


def clone_into_readers(coloring: Coloring, v: int) -> Change | None:
    """Weigh computing v in each kernel that reads it, so that it need not be written."""
    extra = clone_set(coloring, v)
    readers = sorted(coloring.readers[v])
    if extra is None or not readers or any(coloring.is_fixed(k) for k in readers):
        return None
    members = coloring.members
    if any(_conflict(coloring, extra, members[k]) for k in readers):
        return None
    return coloring.propose({k: members[k] | extra for k in readers})


def related_kernels(coloring: Coloring, v: int) -> list[int]:
    """Kernels that hold operands, users or a few siblings of v, without its home and fixed ones."""
    memo = coloring.memo
    if len(coloring.members) <= FEW_KERNELS:
        home = coloring.home(v)
        return [k for k in sorted(coloring.members) if k != home and not coloring.is_fixed(k)]
    found: dict[int, None] = {}
    for u in sorted(memo.operands[v] | memo.users[v]):
        found.update((k, None) for k in sorted(coloring.copies[u]))
    for u in sorted(memo.operands[v]):
        near = sorted(coloring.readers[u], key=lambda k: abs(min(coloring.members[k]) - v))
        found.update((k, None) for k in near[:_MAX_SIBLINGS])
    found.pop(coloring.home(v), None)
    return [k for k in found if not coloring.is_fixed(k)]


def clones(coloring: Coloring, v: int) -> Iterator[Members]:
    """Copies of v for one reader or all, with and without what it is computed from."""
    memo, members = coloring.memo, coloring.members
    if not memo.is_clonable[v] or not coloring.readers[v]:
        return
    home = coloring.home(v)
    readers = [k for k in sorted(coloring.readers[v]) if not coloring.is_fixed(k)]
    whole = cone(coloring, v, home, memo.operands)
    sets = [clone_set(coloring, v), whole if all(memo.is_clonable[u] for u in whole) else None]
    for extra in dict.fromkeys(s for s in sets if s is not None):
        fitting = [k for k in readers if not _conflict(coloring, extra, members[k])]
        if len(fitting) > 1 and len(fitting) == len(coloring.readers[v]):
            yield {k: members[k] | extra for k in fitting}
        for k in fitting:
            yield {k: members[k] | extra}


def unclones(coloring: Coloring, v: int) -> Iterator[Members]:
    """Drop one copy of v, so that its kernel reads it; or all but one."""
    copies = sorted(coloring.copies[v])
    if len(copies) < 2:
        return
    for k in copies:
        yield {k: coloring.members[k] - {v}}
    if len(copies) > 2:
        for kept in copies:
            yield {k: coloring.members[k] - {v} for k in copies if k != kept}


def single_moves(coloring: Coloring, v: int) -> Iterator[Members]:
    """v into the kernel of an operand, a user or a sibling."""
    home, members = coloring.home(v), coloring.members
    for k in related_kernels(coloring, v):
        if not _conflict(coloring, (v,), members[k]):
            yield {home: members[home] - {v}, k: members[k] | {v}}


def cone_moves(coloring: Coloring, v: int) -> Iterator[Members]:
    """v with what it feeds, or is computed from, inside its kernel, into a neighboring kernel."""
    home, members = coloring.home(v), coloring.members
    if len(members[home]) < 3:
        return
    cones = [c for c in _cones(coloring, v, home) if 1 < len(c) < len(members[home])]
    for k in related_kernels(coloring, v):
        for part in cones:
            if not _conflict(coloring, part, members[k]):
                yield {home: members[home] - part, k: members[k] | part}


def splits(coloring: Coloring, v: int) -> Iterator[Members]:
    """v, or a cone of it, as a kernel of its own."""
    home = coloring.home(v)
    members = coloring.members[home]
    if len(members) < 2:
        return
    for part in [frozenset((v,)), *_cones(coloring, v, home)]:
        if len(part) < len(members):
            yield {home: members - part, coloring.fresh_kernel(): part}


def exchanges(coloring: Coloring, v: int) -> Iterator[Members]:
    """Kempe: swap between two kernels the part of both that conflicts, directly or in turn, with v."""
    home, members, memo = coloring.home(v), coloring.members, coloring.memo
    for k in related_kernels(coloring, v):
        a, b = members[home], members[k]
        if len(a) + len(b) > _MAX_EXCHANGE or not a.isdisjoint(b) or not _conflict(coloring, (v,), b):
            continue
        chain, stack = {v}, [v]
        while stack:
            u = stack.pop()
            for w in (b if u in a else a) - chain:
                if memo.conflict(u, w):
                    chain.add(w)
                    stack.append(w)
        if len(chain) < len(a) + len(b):
            yield {home: (a - chain) | (b & chain), k: (b - chain) | (a & chain)}


def _cones(coloring: Coloring, v: int, k: int) -> list[frozenset[int]]:
    memo = coloring.memo
    return list(dict.fromkeys((cone(coloring, v, k, memo.users), cone(coloring, v, k, memo.operands))))


def _conflict(coloring: Coloring, a: Collection[int], b: Collection[int]) -> bool:
    return coloring.memo.first_conflict(a, b) is not None


# In the order in which they are tried: what most often pays first.
MOVES: dict[str, Callable[[Coloring, int], Iterator[Members]]] = {
    "clone": clones,
    "unclone": unclones,
    "move": single_moves,
    "cone": cone_moves,
    "split": splits,
    "exchange": exchanges,
}
