"""Cumulative operations: cumsum and its kind, which HLO writes as a window that holds all before each element.

Such a reduce-window keeps the axes of its operand, so it is aligned with its neighbors; what it asks of a kernel is an
order along its axis. Which ones a kernel computes, and which XLA does better, is decided here.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hlofuse.fusion.devices import DeviceSpec
from hlofuse.hlo.module import Computation, Instruction
from hlofuse.hlo.opcode import identity_of
from hlofuse.hlo.shape import FUSIBLE, Shape

SHORTEST = 33           # below it a window is written out where it is read
XLA_LAUNCHES = 6        # of one cumulative operation, which moves its array
XLA_PASSES = 4          # so often (measured on XLA:GPU)


@dataclass(frozen=True)
class Cumulative:
    """`dimension` of the operand is folded in ascending order, or from its end if `reverse`."""

    dimension: int
    reverse: bool


def cumulative_of(i: Instruction) -> Cumulative | None:
    """What a reduce-window accumulates, if it is a cumulative operation with a neutral initial value."""
    if i.opcode != "reduce-window" or len(i.operands) != 2 or not isinstance(i.shape, Shape):
        return None
    x, init = i.operands
    window = i.attrs["window"]
    wide = [d for d, w in enumerate(window) if w.size > 1]
    if len(wide) != 1 or i.dims != x.dims or any(
            w.stride != 1 or w.lhs_dilate != 1 or w.rhs_dilate != 1 or w.reversed for w in window):
        return None
    dimension, w = wide[0], window[wide[0]]
    others = all((v.pad_low, v.pad_high) == (0, 0) for d, v in enumerate(window) if d != dimension)
    directions = {(w.size - 1, 0): False, (0, w.size - 1): True}
    reverse = directions.get((w.pad_low, w.pad_high))
    if not others or reverse is None or w.size != x.dims[dimension]:
        return None
    return Cumulative(dimension, reverse) if _is_neutral(i.attrs["to_apply"], init) else None


def is_scanned(i: Instruction) -> bool:
    """Whether kernels carry this operation along its axis: it is cumulative and not short."""
    return i.opcode == "reduce-window" and cumulative_of(i) is not None and \
        max(w.size for w in i.attrs["window"]) >= SHORTEST and i.array.element_type in FUSIBLE and i.array.size > 0


def _is_neutral(body: Computation, init: Instruction) -> bool:
    """Whether folding the initial value in changes nothing."""
    if init.opcode != "constant":
        return False
    value, root = init.literal, body.root
    if _is_logaddexp(body):
        return bool(np.isneginf(value))
    if len(body.instructions) != 3 or set(root.operands) != set(body.parameters):
        return False
    neutral = identity_of(root.opcode, init.element_type)
    if neutral is None:
        return False
    return bool(value == neutral)    # either zero starts a sum


def _is_logaddexp(body: Computation) -> bool:
    """select(x - y is NaN, x + y, max(x, y) + log1p(exp(-|x - y|)))"""
    root = body.root
    if root.opcode != "select" or root.operands[2].opcode != "add":
        return False
    larger, tail = root.operands[2].operands
    chain = []
    while tail.opcode in ("log-plus-one", "exponential", "negate", "abs"):
        chain.append(tail.opcode)
        tail = tail.operands[0]
    return larger.opcode == "maximum" and set(larger.operands) == set(body.parameters) and tail.opcode == "subtract" \
        and set(tail.operands) == set(body.parameters) and chain == ["log-plus-one", "exponential", "negate", "abs"]


def cumulatives_for_xla(computation: Computation, device: DeviceSpec) -> dict[Instruction, str]:
    """Those that one kernel would compute with too little of the machine, each with the reason."""
    found: dict[Instruction, str] = {}
    if device.dialect != "cuda":
        return found
    for i in computation.instructions:
        if not is_scanned(i):
            continue
        threads = _threads(i.dims, cumulative_of(i))
        share = min(1.0, threads / (device.sm_count * 256))
        ours = device.launch_us + 2 * i.array.byte_size / (device.bandwidth * share)
        theirs = XLA_LAUNCHES * device.launch_us + XLA_PASSES * i.array.byte_size / device.bandwidth
        if ours > theirs:
            found[i] = (f"one kernel would run {threads} threads and take {ours:.1f} us, "
                        f"XLA's {XLA_LAUNCHES} kernels {theirs:.1f} us")
    return found


def _threads(dims: Sequence[int], cumulative: Cumulative | None) -> int:
    """How many threads one kernel has: a block of up to 256 for a row, one thread for a column."""
    assert cumulative is not None
    length = dims[cumulative.dimension]
    others = math.prod(dims) // length
    inner = math.prod(dims[cumulative.dimension + 1:])
    return others * (min(256, -(-length // 4)) if inner == 1 else 1)
