"""The sum of exp(x - max(x)) is found in the pass that finds the maximum (Milakov and Gimelshein), not in a second one.

Only where the second pass would read memory again or wait for the whole grid: a row that stays in registers is cheaper
in two passes. Exponentials that others read stay. Where the maximum is not finite, the sum is what jax.nn.softmax
(NaN) or jax.nn.logsumexp (exp(max)) has there. f16 and bf16 are summed in f32, without rounding each exponential.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hlofuse.hlo.builder import constant, convert, element_of, full, make
from hlofuse.hlo.combiners import online
from hlofuse.hlo.module import Computation, Instruction, Module
from hlofuse.hlo.shape import TupleShape
from hlofuse.hlo.traverse import map_computations, rebuild
from hlofuse.passes.known import is_exactly
from hlofuse.passes.reductions import folds_with, is_sum, reads_again

_Key = tuple[Instruction, Instruction | None, str]


def online_softmax(module: Module) -> Module:
    return map_computations(module, _with_online_sums)


@dataclass(frozen=True)
class _Sum:
    """sum(exp(x - maximum)), where `guarded` with 0 in place of a maximum that is not finite; of the elements that
    `mask` names, if there is one. x is -inf elsewhere."""

    instruction: Instruction
    maximum: Instruction
    guarded: bool
    mask: Instruction | None

    @property
    def key(self) -> _Key:
        return self.maximum, None if self.guarded else self.mask, self.instruction.element_type


def _with_online_sums(computation: Computation) -> Computation:
    """max(x), sum(exp(x - max(x))) => get-tuple-elements of reduce(x, 1, -inf, 0), to_apply=online"""
    replace: dict[Instruction, Instruction] = {}
    reduced: dict[_Key, Instruction] = {}
    for i in computation.instructions:
        found = _sum_of_exponentials(i)
        if found is None:
            continue
        if found.key not in reduced:
            reduced[found.key] = _reduced(found)
        both = reduced[found.key]
        replace[i] = _total(found, both)
        replace.setdefault(found.maximum, convert(element_of(both, 0), found.maximum.element_type))
    return rebuild(computation, replace) if replace else computation


def _reduced(found: _Sum) -> Instruction:
    i, x = found.instruction, convert(found.maximum.operands[0], found.instruction.element_type)
    one = full(1, x.array)
    weight = one if found.mask is None or found.guarded else make("select", found.mask, one, full(0, x.array))
    lowest, zero = constant(-float("inf"), i.element_type), constant(0, i.element_type)
    return make("reduce", x, weight, lowest, zero, shape=TupleShape((i.shape, i.shape)),
                dimensions=i.attrs["dimensions"], to_apply=online(i.element_type), metadata=i.metadata)


def _total(found: _Sum, both: Instruction) -> Instruction:
    """The sum as the program had it, also where the maximum is not finite (m - m is 0, or NaN there)."""
    m, s = element_of(both, 0), element_of(both, 1)
    if found.guarded:
        return make("select", make("is-finite", m), s, make("exponential", m))
    total = make("add", s, make("subtract", m, m))
    if found.mask is None:
        return total
    zero = full(0, s.array)     # where no element counts
    nothing = make("compare", s, zero, direction="EQ")
    return make("select", nothing, zero, total)


def _sum_of_exponentials(i: Instruction) -> _Sum | None:
    if not is_sum(i) or i.control or i.element_type not in ("f32", "f64") or not is_exactly(i.operands[1], 0) or \
            not reads_again(i):
        return None
    value, mask = _exponentials(i.operands[0])
    if value.opcode != "exponential" or value.operands[0].opcode != "subtract":
        return None
    x, center = value.operands[0].operands
    if center.opcode != "broadcast" or not _is_across(center, i):
        return None
    maximum, guarded = _unguarded(center.operands[0])
    if not folds_with(maximum, "maximum") or maximum.control or not is_exactly(maximum.operands[1], -float("inf")) or \
            tuple(maximum.attrs["dimensions"]) != tuple(i.attrs["dimensions"]):
        return None
    of = maximum.operands[0]
    if of.dims != i.operands[0].dims or not (_is_same(of, x) if mask is None else _is_chosen(of, x, mask)):
        return None
    return _Sum(i, maximum, guarded, mask)


def _exponentials(value: Instruction) -> tuple[Instruction, Instruction | None]:
    """v of v, of convert(v) from a narrower type, of v in other axes of one element, and of select(mask, v, 0)."""
    mask = None
    while True:
        if value.opcode == "convert" and value.element_type == "f32" and \
                value.operands[0].element_type in ("f16", "bf16") or _is_of_units(value):
            value = value.operands[0]
        elif value.opcode == "select" and mask is None and is_exactly(value.operands[2], 0):
            mask, value = value.operands[:2]
        else:
            return value, mask


def _is_of_units(i: Instruction) -> bool:
    """A reshape that adds or takes away axes of one element only."""
    return i.opcode == "reshape" and _wide(i.dims) == _wide(i.operands[0].dims)


def _wide(dims: Sequence[int]) -> list[int]:
    return [n for n in dims if n != 1]


def _is_across(center: Instruction, i: Instruction) -> bool:
    """Whether a broadcast has, for each element that the reduction folds, the element at the result's place."""
    dims, source = i.operands[0].dims, center.operands[0].dims
    if _wide(dims) != _wide(center.dims) or source != i.dims:
        return False
    places = [d for d, n in enumerate(center.dims) if n != 1]    # where the axes of `dims` lie in the broadcast
    kept = [d not in i.attrs["dimensions"] for d, n in enumerate(dims) if n != 1]
    return [d for d, n in zip(center.attrs["dimensions"], source, strict=True) if n != 1] == \
        [d for d, k in zip(places, kept, strict=True) if k]


def _is_same(of: Instruction, x: Instruction) -> bool:
    return of is x or _is_of_units(of) and of.operands[0] is x


def _is_chosen(of: Instruction, x: Instruction, mask: Instruction) -> bool:
    """Whether `of` is select(mask, y, -inf) and x, where the mask is true, is y too."""
    if of.opcode != "select" or of.operands[0] is not mask or not is_exactly(of.operands[2], -float("inf")):
        return False
    y = of.operands[1]
    return x in (of, y) or x.opcode == "select" and x.operands[0] is mask and x.operands[1] is y


def _unguarded(center: Instruction) -> tuple[Instruction, bool]:
    """m of select(is-finite(m), m, 0), and whether it was that."""
    if center.opcode == "select":
        test, m, otherwise = center.operands
        if test.opcode == "is-finite" and test.operands[0] is m and is_exactly(otherwise, 0):
            return m, True
    return center, False
