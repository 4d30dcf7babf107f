"""Transposes around a dot become its dimension numbers, as far as a library call can read the operands as they lie.

A result is ordered batch, left free, right free axes, so a transpose of an operand folds when the free axes keep their
order, and a transpose of the result that swaps the two free parts swaps the operands.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hlofuse.hlo.builder import make
from hlofuse.hlo.module import Instruction, Module
from hlofuse.passes.reshape_mover import transpose
from hlofuse.passes.rewrite import Readers, RuleTable, rewrite

RULES = RuleTable()

BATCH = ("lhs_batch_dims", "rhs_batch_dims")
CONTRACTING = ("lhs_contracting_dims", "rhs_contracting_dims")


def dot_canonicalizer(module: Module) -> Module:
    return rewrite(module, RULES)


def free_axes(dot: Instruction, side: int) -> list[int]:
    """The axes of an operand (0: left, 1: right) that are neither batch nor contracted, in order."""
    taken = {*dot.attrs.get(BATCH[side], ()), *dot.attrs.get(CONTRACTING[side], ())}
    return [d for d in range(len(dot.operands[side].dims)) if d not in taken]


def is_plain_layout(dot: Instruction, attrs: Mapping[str, Any], side: int, dims: Sequence[int] | None = None) -> bool:
    """Whether a strided-batched call reads the operand as it lies: batch, contracting and free axes are one run each,
    the last axis is not of batch, unless all are. Axes of one element do not count."""
    dims = dot.operands[side].dims if dims is None else dims
    batch = [d for d in attrs.get(BATCH[side], ()) if dims[d] != 1]
    contracting = [d for d in attrs.get(CONTRACTING[side], ()) if dims[d] != 1]
    axes = [d for d, size in enumerate(dims) if size != 1]
    free = [d for d in axes if d not in batch and d not in contracting]
    runs = (batch, contracting, free)
    in_runs = all([axes.index(d) for d in run] == list(range(axes.index(run[0]), axes.index(run[0]) + len(run)))
                  for run in runs if run)
    return in_runs and (axes == sorted(batch) or axes[-1] not in batch)


@RULES.on("dot")
def dot_of_transpose(i: Instruction) -> Instruction | None:
    """dot(transpose(x), y) => dot(x, y) with x's own axes, where x's free axes stay in order and its layout is plain"""
    for side in (0, 1):
        moved = i.operands[side]
        if moved.opcode != "transpose":
            continue
        order = moved.attrs["dimensions"]
        free = [order[d] for d in free_axes(i, side)]
        attrs = renumbered(i.attrs, side, order)
        if free == sorted(free) and (is_plain_layout(i, attrs, side, moved.operands[0].dims)
                                     or not is_plain_layout(i, i.attrs, side)):
            return with_operand(i, side, moved.operands[0], attrs)
    return None


def renumbered(attrs: Mapping[str, Any], side: int, number: Sequence[int]) -> dict[str, Any]:
    """A dot's attributes where axis d of one operand is axis `number[d]`."""
    keys = (BATCH[side], CONTRACTING[side])
    return {**attrs, **{key: tuple(number[d] for d in attrs.get(key, ())) for key in keys}}


def with_operand(i: Instruction, side: int, operand: Instruction, attrs: Mapping[str, Any]) -> Instruction:
    operands = list(i.operands)
    operands[side] = operand
    return make("dot", *operands, shape=i.shape, **attrs)


@RULES.on_readers("transpose")
def transpose_of_dot(i: Instruction, readers: Readers) -> Instruction | None:
    """transpose(dot(x, y)) => dot(y, x), where it swaps left and right free axes; => transpose(dot(y, x)), where that
    leaves the last axis in its place, so that runs of elements move together"""
    dot = i.operands[0]
    if dot.opcode != "dot" or readers(dot) > 1 or dot.control:
        return None
    left, right = len(free_axes(dot, 0)), len(free_axes(dot, 1))
    batch = len(dot.dims) - left - right
    order = i.attrs["dimensions"]
    if not left or not right or order[-1] != batch + left - 1:
        return None
    place = [*range(batch), *range(batch + right, batch + right + left), *range(batch, batch + right)]
    dims = [0] * len(place)
    for old, new in enumerate(place):
        dims[new] = dot.dims[old]
    swapped = make("dot", dot.operands[1], dot.operands[0], shape=dot.array.with_dims(dims), **_swapped(dot.attrs))
    return transpose(swapped, [place[d] for d in order])


def _swapped(attrs: Any) -> dict[str, Any]:
    """A dot's attributes with left and right exchanged."""
    found = dict(attrs)
    for left, right in (BATCH, CONTRACTING):
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
