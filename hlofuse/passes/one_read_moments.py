"""The squared deviations from the mean are summed in the pass that finds the mean (Welford, Chan), not in a second one.

Only where the second pass would read memory again or wait for the whole grid: a row that stays in registers is cheaper,
and more accurate, in two passes. The mean that others read stays the sum that it was. Never E[x^2] - E[x]^2.
"""
from __future__ import annotations

import numpy as np

from hlofuse.hlo.builder import broadcast, constant, element_of, full, make, reshape
from hlofuse.hlo.combiners import moments
from hlofuse.hlo.module import Instruction, Module
from hlofuse.hlo.shape import TupleShape
from hlofuse.passes.known import is_exactly, uniform_value
from hlofuse.passes.reductions import is_sum, reads_again, reduced_count
from hlofuse.passes.rewrite import RuleTable, rewrite

RULES = RuleTable()


def one_read_moments(module: Module) -> Module:
    return rewrite(module, RULES)


@RULES.on("reduce")
def squared_deviations(i: Instruction) -> Instruction | None:
    """sum((x - mean(x))^2) => get-tuple-element(reduce(d, d - d, 1), to_apply=moments), index=1, d = x - x[0]

    Deviations do not change by the shift, and a mean near zero has all its bits. d - d is zero, and NaN where x is not
    finite."""
    if not is_sum(i) or i.element_type not in ("f32", "f64") or not is_exactly(i.operands[1], 0) or not reads_again(i):
        return None
    square = i.operands[0]
    if square.opcode != "multiply" or square.operands[0] is not square.operands[1]:
        return None
    x = _centered(square.operands[0], i)
    if x is None:
        return None
    zero, d = constant(0, i.element_type), make("subtract", x, _first(x, i))
    found = make("reduce", d, make("subtract", d, d), full(1, x.array), zero, zero, zero,
                 shape=TupleShape((i.shape,) * 3), dimensions=i.attrs["dimensions"], to_apply=moments(i.element_type),
                 metadata=i.metadata)
    return element_of(found, 1)


def _first(x: Instruction, i: Instruction) -> Instruction:
    """For each result of the reduction `i` the first element that it folds, in the dimensions of x."""
    axes = i.attrs["dimensions"]
    rest = [d for d in range(len(x.dims)) if d not in axes]
    first = make("slice", x, shape=x.array.with_dims([1 if d in axes else n for d, n in enumerate(x.dims)]),
                 slice=tuple((0, 1 if d in axes else n, 1) for d, n in enumerate(x.dims)))
    return broadcast(reshape(first, i.dims), x.dims, rest)


def _centered(difference: Instruction, i: Instruction) -> Instruction | None:
    """x of x - broadcast(mean(x)), the mean over the same axes as the reduction `i`."""
    if difference.opcode != "subtract":
        return None
    x, mean = difference.operands
    axes = i.attrs["dimensions"]
    rest = tuple(d for d in range(len(x.dims)) if d not in axes)
    if mean.opcode != "broadcast" or tuple(mean.attrs["dimensions"]) != rest:
        return None
    mean = mean.operands[0]
    if mean.opcode not in ("multiply", "divide"):
        return None
    total, factor = mean.operands
    if not is_sum(total) or total.operands[0] is not x or tuple(total.attrs["dimensions"]) != tuple(axes) or \
            not is_exactly(total.operands[1], 0):
        return None
    value, count = uniform_value(factor), np.asarray(reduced_count(i), x.array.dtype)
    expected = count if mean.opcode == "divide" else 1 / count
    return x if value is not None and value == expected else None
