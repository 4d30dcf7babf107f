"""Horizontal fusion: kernels that no path joins become segments of one launch.

Kernels stay what they are; each pack saves launch costs. Packs are contracted in a copy of the quotient order, so
that a later pack sees the paths that an earlier one made.
"""

from __future__ import annotations

from hlofuse.fusion.partition import Coloring
from hlofuse.fusion.quotient_order import QuotientOrder

_MAX_SEGMENTS = 64
_LOOK_BACK = 48  # packs tried per kernel, the most recent first: keeps packing linear


def pack_launches(coloring: Coloring) -> None:
    """Set `coloring.packs`, in an order in which they can run."""
    problem = coloring.memo.problem
    order = QuotientOrder(coloring.order.preds)
    packs: dict[int, list[int]] = {k: [k] for k in order.sorted()}
    open_packs: list[int] = []
    for k in list(packs):
        if coloring.is_fixed(k):
            continue
        tries = 0
        for pack in reversed(open_packs):
            if tries == _LOOK_BACK:
                break
            tries += 1
            segments = packs[pack]
            if len(segments) >= _MAX_SEGMENTS or order.has_edge(pack, k):
                continue
            members = coloring.members
            if all(problem.can_pack(members[s], members[k]) for s in segments) and order.contract(pack, k):
                segments.extend(packs.pop(k))
                break
        else:
            open_packs.append(k)
            continue
        if k in packs:
            open_packs.append(k)
    coloring.packs = [tuple(packs[k]) for k in order.sorted()]
