"""An operand that no strided-batched library call reads as it lies gets a transpose.

The library would copy anyway, but a transpose fuses with what makes the operand. Not on the CPU, where XLA gives the
array another layout instead.
"""
from __future__ import annotations

from hlofuse.hlo.builder import make
from hlofuse.hlo.module import Instruction, Module
from hlofuse.passes.dot_canonicalizer import BATCH, CONTRACTING, free_axes, is_plain_layout, renumbered, with_operand
from hlofuse.passes.rewrite import RuleTable, rewrite

RULES = RuleTable()


def dot_operand_layout(module: Module) -> Module:
    return rewrite(module, RULES)


@RULES.on("dot")
def dot_of_scattered_axes(i: Instruction) -> Instruction | None:
    """dot(x, y) => dot(transpose(x), y), batch axes first and contracting axes last, where x's layout is not plain"""
    for side in (0, 1):
        if is_plain_layout(i, i.attrs, side):
            continue
        order = (*i.attrs.get(BATCH[side], ()), *free_axes(i, side), *i.attrs.get(CONTRACTING[side], ()))
        places = [order.index(d) for d in range(len(order))]
        moved = make("transpose", i.operands[side], dimensions=order)
        return with_operand(i, side, moved, renumbered(i.attrs, side, places))
    return None
