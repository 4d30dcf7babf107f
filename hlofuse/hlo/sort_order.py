"""Reads a sort's comparator: which keys it compares, in which order. The inverse of how comparators are written.

A comparator of n operands takes 2n scalars, (left0, right0, left1, right1, …). It is understood if it is lexicographic,
`k0(l) < k0(r) or (k0(l) == k0(r) and …)`, with each key the same function of the left and of the right scalars.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hlofuse.hlo.attributes import printed_attrs
from hlofuse.hlo.module import Computation, Instruction, post_order
from hlofuse.hlo.shape import FLOATS

_MIRRORED = {"LT": "GT", "GT": "LT"}


@dataclass(frozen=True)
class SortKey:
    """One key: an instruction of the comparator that depends on left scalars only."""

    value: Instruction
    descending: bool
    total_order: bool  # of floats: -0 before +0, NaNs by sign and payload


def sort_keys(comparator: Computation) -> list[SortKey] | None:
    """The keys, most significant first; `None` for a comparator of another form."""
    keys: list[SortKey] = []
    rest: Instruction | None = comparator.root
    while rest is not None:
        first, rest, tie = _split(rest)
        key = _key(comparator, first)
        if key is None or (tie is not None and not _is_tie_of(comparator, tie, key)):
            return None
        keys.append(key)
    return keys


def natural_keys(comparator: Computation, keys: Sequence[SortKey]) -> int | None:
    """k if the order is that of `jax.lax.sort(operands, num_keys=k)`: ascending first operands, -0 equal to +0, NaNs
    equal and last; `None` otherwise."""
    for number, key in enumerate(keys):
        left = comparator.parameters[2 * number] if 2 * number < len(comparator.parameters) else None
        if key.descending or left is None:
            return None
        is_float = left.element_type in FLOATS
        if is_float and not (key.total_order and _canonical_float_of(key.value) is left):
            return None
        if not is_float and key.value is not left:
            return None
    return len(keys)


def _split(less: Instruction) -> tuple[Instruction, Instruction | None, Instruction | None]:
    """or(first, and(tie, rest)) and select(tie, rest, first)  =>  first, rest, tie."""
    if less.opcode == "or":
        for first, second in (less.operands, less.operands[::-1]):
            if first.opcode == "compare" and second.opcode == "and":
                for tie, rest in (second.operands, second.operands[::-1]):
                    if tie.opcode == "compare" and tie.attrs["direction"] == "EQ":
                        return first, rest, tie
    if less.opcode == "select" and less.operands[0].opcode == "compare":
        tie, rest, first = less.operands
        if tie.attrs["direction"] == "EQ":
            return first, rest, tie
    return less, None, None


def _key(comparator: Computation, less: Instruction) -> SortKey | None:
    if less.opcode != "compare" or less.attrs["direction"] not in _MIRRORED:
        return None
    a, b = less.operands
    direction = less.attrs["direction"]
    total_order = less.attrs.get("type") == "TOTALORDER"
    if _is_mirror(comparator, a, b):
        return SortKey(a, direction == "GT", total_order)
    if _is_mirror(comparator, b, a):
        return SortKey(b, _MIRRORED[direction] == "GT", total_order)
    return None


def _is_tie_of(comparator: Computation, tie: Instruction, key: SortKey) -> bool:
    return any(_is_mirror(comparator, key.value, other) and mine is key.value
               for mine, other in (tie.operands, tie.operands[::-1]))


def _is_mirror(comparator: Computation, left: Instruction, right: Instruction) -> bool:
    """Whether `right` computes of the right scalars what `left` computes of the left ones."""
    partner = {comparator.parameters[n]: comparator.parameters[n + 1] for n in range(0, len(comparator.parameters), 2)}
    lefts, rights = post_order((left,)), post_order((right,))
    if len(lefts) != len(rights):
        return False
    twin: dict[Instruction, Instruction] = {}
    for x, y in zip(lefts, rights, strict=True):
        if x.opcode == "parameter":
            if partner.get(x) is not y:
                return False
        elif x.opcode != y.opcode or x.shape != y.shape or x.called:
            return False
        elif [twin[o] for o in x.operands] != list(y.operands):
            return False
        elif x.opcode == "constant":
            if x.literal.tobytes() != y.literal.tobytes():
                return False
        elif printed_attrs(x) != printed_attrs(y):
            return False
        twin[x] = y
    return True


def _canonical_float_of(key: Instruction) -> Instruction | None:
    """select(y != y, nan, y) with y = select(x == 0, 0, x)  =>  x; the NaN may be looked for in x too."""
    if key.opcode != "select" or key.operands[2].opcode != "select":
        return None
    is_nan, nan, inner = key.operands
    is_zero, zero, x = inner.operands
    holds = (any(_compares(is_nan, "NE", v, v) for v in (x, inner)) and nan.opcode == "constant"
             and bool(np.isnan(nan.literal)) and not np.signbit(nan.literal)
             and zero.opcode == "constant" and not zero.literal.tobytes().strip(b"\0")
             and is_zero.opcode == "compare" and is_zero.operands[1].opcode == "constant"
             and _compares(is_zero, "EQ", x, is_zero.operands[1]) and bool(is_zero.operands[1].literal == 0))
    return x if holds else None


def _compares(i: Instruction, direction: str, left: Instruction, right: Instruction) -> bool:
    return (i.opcode == "compare" and i.attrs["direction"] == direction and i.attrs.get("type") != "TOTALORDER"
            and i.operands[0] is left and i.operands[1] is right)
