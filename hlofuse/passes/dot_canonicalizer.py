"""Transposes around a dot become its dimension numbers, where the result's order stays as it is.

A result is ordered batch, left free, right free axes, so a transpose of an operand folds when the free axes keep their
order, and a transpose of the result that swaps the two free parts swaps the operands.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hlofuse.hlo.builder import make
from hlofuse.hlo.module import Instruction, Module
from hlofuse.passes.rewrite import Readers, RuleTable, rewrite

RULES = RuleTable()

_BATCH = ("lhs_batch_dims", "rhs_batch_dims")
_CONTRACTING = ("lhs_contracting_dims", "rhs_contracting_dims")


def dot_canonicalizer(module: Module) -> Module:
    return rewrite(module, RULES)


def free_axes(dot: Instruction, side: int) -> list[int]:
    """The axes of an operand (0: left, 1: right) that are neither batch nor contracted, in order."""
    taken = {*dot.attrs.get(_BATCH[side], ()), *dot.attrs.get(_CONTRACTING[side], ())}
    return [d for d in range(len(dot.operands[side].dims)) if d not in taken]


@RULES.on("dot")
def dot_of_transpose(i: Instruction) -> Instruction | None:
    """dot(transpose(x), y) => dot(x, y) with x's own axes, where x's free axes stay in order"""
    for side in (0, 1):
        moved = i.operands[side]
        if moved.opcode != "transpose":
            continue
        order = moved.attrs["dimensions"]
        free = [order[d] for d in free_axes(i, side)]
        if free != sorted(free):
            continue
        attrs = dict(i.attrs)
        for key in (_BATCH[side], _CONTRACTING[side]):
            attrs[key] = tuple(order[d] for d in i.attrs.get(key, ()))
        operands = list(i.operands)
        operands[side] = moved.operands[0]
        return make("dot", *operands, shape=i.shape, **attrs)
    return None


@RULES.on_readers("transpose")
def transpose_of_dot(i: Instruction, readers: Readers) -> Instruction | None:
    """transpose(dot(x, y)) => dot(y, x), where it swaps left and right free axes and keeps the rest in order"""
    dot = i.operands[0]
    if dot.opcode != "dot" or readers(dot) > 1 or dot.control:
        return None
    batch = len(dot.attrs.get("lhs_batch_dims", ()))
    left, right = len(free_axes(dot, 0)), len(free_axes(dot, 1))
    swapped = (*range(batch), *range(batch + left, batch + left + right), *range(batch, batch + left))
    if tuple(i.attrs["dimensions"]) != swapped:
        return None
    return make("dot", dot.operands[1], dot.operands[0], shape=i.shape, **_swapped(dot.attrs))


def _swapped(attrs: Any) -> dict[str, Any]:
    """A dot's attributes with left and right exchanged."""
    found = dict(attrs)
    for left, right in (_BATCH, _CONTRACTING):
        found[left], found[right] = attrs.get(right, ()), attrs.get(left, ())
    if "operand_precision" in attrs:
        precision: Sequence[str] = attrs["operand_precision"]
        found["operand_precision"] = tuple(reversed(precision))
    return found


@RULES.on("dot")
def contracting_axes_in_order(i: Instruction) -> Instruction | None:
    """dot, contracting {2,1} with {1,0} => contracting {1,2} with {0,1}"""
    pairs = list(zip(i.attrs.get("lhs_contracting_dims", ()), i.attrs.get("rhs_contracting_dims", ()), strict=True))
    if pairs == sorted(pairs):
        return None
    left, right = zip(*sorted(pairs), strict=True)
    return make("dot", *i.operands, shape=i.shape,
                **{**i.attrs, "lhs_contracting_dims": left, "rhs_contracting_dims": right})
