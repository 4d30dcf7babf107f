"""The passes over a row or a column: each completes reductions, and stores what waited for earlier ones.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hlofuse.codegen.nest import Nest
from hlofuse.codegen.reduction import Reduction


@dataclass(frozen=True)
class Pass:
    """One reading of the rows: the reductions that it completes and the results that it can store."""

    level: int
    reductions: list[Reduction]
    stores: list[int]


def passes(nest: Nest) -> Iterator[Pass]:
    plan = nest.plan
    whole = [nest.waiting[o] for o in plan.computation.outputs if plan.analysis.mask(o) == plan.domain_mask]
    for level in range(1 + max([*plan.levels.values(), *whole])):
        found = Pass(level, nest.reductions(level), nest.outputs(level, plan.domain_mask))
        if found.reductions or found.stores:
            yield found
