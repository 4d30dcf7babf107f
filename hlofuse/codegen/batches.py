"""Reductions that fold several elements of a thread at a time: what is dear once for each element is dear once a batch.

A known reducer (hlo/combiners.py) has a function in the prelude that adds a batch of elements to a thread's
accumulators. Between lanes, threads and blocks the reducer itself combines them, as any other.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field

from hlofuse.codegen.element_reads import splat_literal
from hlofuse.hlo.combiners import is_moments, is_online
from hlofuse.hlo.module import Instruction


@dataclass(frozen=True)
class Batch:
    """`values` are what is needed of each element; they wait in the arrays `names` until the prelude's `add_{kind}`
    adds them to the `accumulators`."""

    kind: str
    accumulators: tuple[str, ...]
    values: tuple[Instruction, ...]
    names: list[str] = field(default_factory=list)


def batch_of(i: Instruction) -> Batch | None:
    """How a reduction is done in batches, if it is of a known kind."""
    count = len(i.operands) // 2
    operands, inits = i.operands[:count], i.operands[count:]
    if count == 3 and is_moments(i.attrs["to_apply"]):
        x, m2, ones = operands
        if m2.opcode == "subtract" and m2.operands == (x, x) and _is_all(ones, 1) and \
                all(_is_all(init, 0) for init in inits):
            return Batch("moments", ("mean", "deviations", "weight"), (x,))
    if count == 2 and is_online(i.attrs["to_apply"]):
        x, ones = operands
        if _is_all(ones, 1) and _is_all(inits[0], -math.inf) and _is_all(inits[1], 0):
            return Batch("online", ("upper", "sum"), (x,))
    return None


def _is_all(i: Instruction, number: float) -> bool:
    literal = splat_literal(i)
    return literal is not None and literal == number
