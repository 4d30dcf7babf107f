"""What passes ask about reductions: which they are, and whether a kernel can keep what they read."""
from __future__ import annotations

import math

from hlofuse.hlo.module import Computation, Instruction

IN_A_THREAD = 32         # a reduction of at most so many elements is a loop of the thread that reads it
KEPT_ROW = 16384         # a row of at most so many elements stays with its block between passes


def folds_with(i: Instruction, opcode: str) -> bool:
    """Whether an instruction is a reduction of one operand by an operation."""
    if i.opcode != "reduce" or len(i.operands) != 2:
        return False
    body: Computation = i.attrs["to_apply"]
    return body.root.opcode == opcode and body.root.operands in (body.parameters, body.parameters[::-1])


def is_sum(i: Instruction) -> bool:
    return folds_with(i, "add")


def reduced_count(i: Instruction) -> int:
    """How many elements each result folds."""
    return math.prod(i.operands[0].dims[d] for d in i.attrs["dimensions"])


def reads_again(i: Instruction) -> bool:
    """Whether a pass after this reduction, over the same elements, would have to read them again: all but what one
    thread folds, and rows (the innermost axis is reduced) that a block keeps."""
    count, dims = reduced_count(i), i.operands[0].dims
    if count <= IN_A_THREAD:
        return False
    inner = max((d for d, n in enumerate(dims) if n > 1), default=-1)
    return inner not in i.attrs["dimensions"] or count > KEPT_ROW
