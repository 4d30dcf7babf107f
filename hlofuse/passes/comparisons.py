"""Rules of algebraic_simplifier for comparisons and selections: what is known, or said twice, is not computed."""
from __future__ import annotations

from typing import Any

import numpy as np

from hlofuse.hlo.builder import make
from hlofuse.hlo.module import Instruction
from hlofuse.hlo.shape import INTEGERS, UNSIGNED
from hlofuse.passes.known import full_like, integer_range, is_integral, uniform_value
from hlofuse.passes.rewrite import Readers, RuleTable

RULES = RuleTable()

_INVERSE = {"EQ": "NE", "NE": "EQ", "LT": "GE", "GE": "LT", "GT": "LE", "LE": "GT"}
_REFLEXIVE = frozenset({"EQ", "LE", "GE"})


@RULES.on("compare")
def compare_with_itself(i: Instruction) -> Instruction | None:
    """compare(x, x) => true or false; of floats only LT and GT, because NaN differs from itself"""
    if i.operands[0] is not i.operands[1]:
        return None
    direction = i.attrs["direction"]
    if is_integral(i.operands[0]) or direction in ("LT", "GT"):
        return full_like(i, direction in _REFLEXIVE)
    return None


@RULES.on("compare")
def compare_of_pred(i: Instruction) -> Instruction | None:
    """compare(p, true), EQ => p; compare(p, true), NE => not(p); and with false the other way round"""
    p, value = i.operands[0], uniform_value(i.operands[1])
    direction = i.attrs["direction"]
    if p.element_type != "pred" or value is None or direction not in ("EQ", "NE"):
        return None
    return p if bool(value) == (direction == "EQ") else make("not", p)


@RULES.on("compare")
def compare_of_converted_pred(i: Instruction) -> Instruction | None:
    """compare(convert(p), 0), NE => p; compare(convert(p), 0), EQ => not(p); with 1 the other way round"""
    converted, value = i.operands[0], uniform_value(i.operands[1])
    direction = i.attrs["direction"]
    if value is None or converted.opcode != "convert" or converted.operands[0].element_type != "pred":
        return None
    if value not in (0, 1) or direction not in ("EQ", "NE") or i.attrs.get("type") == "TOTALORDER":
        return None
    p = converted.operands[0]
    return p if (value == 1) == (direction == "EQ") else make("not", p)


@RULES.on("compare")
def compare_by_range(i: Instruction) -> Instruction | None:
    """compare(x, y) => true or false, where the integers' ranges decide it (an iota against a bound)"""
    if i.operands[0].element_type not in INTEGERS:
        return None
    left, right = _range_of(i.operands[0]), _range_of(i.operands[1])
    if left is None or right is None:
        return None
    decided = _DECIDED[i.attrs["direction"]](*left, *right)
    return full_like(i, decided) if decided is not None else None


def _range_of(x: Instruction) -> tuple[int, int] | None:
    return (0, np.iinfo(x.array.dtype).max) if (found := integer_range(x)) is None and x.element_type in UNSIGNED \
        else found


def _less(a: int, b: int, c: int, d: int) -> bool | None:
    return True if b < c else False if a >= d else None


def _equal(a: int, b: int, c: int, d: int) -> bool | None:
    return False if b < c or d < a else True if a == b == c == d else None


def _inverted(decided: bool | None) -> bool | None:
    return None if decided is None else not decided


_DECIDED: dict[str, Any] = {
    "LT": _less,
    "GE": lambda a, b, c, d: _inverted(_less(a, b, c, d)),
    "GT": lambda a, b, c, d: _less(c, d, a, b),
    "LE": lambda a, b, c, d: _inverted(_less(c, d, a, b)),
    "EQ": _equal,
    "NE": lambda a, b, c, d: _inverted(_equal(a, b, c, d)),
}


@RULES.on_readers("not")
def not_of_compare(i: Instruction, readers: Readers) -> Instruction | None:
    """not(compare(x, y)) => the inverse comparison; of floats only EQ and NE: NaN is neither less nor greater"""
    inner = i.operands[0]
    if inner.opcode != "compare" or readers(inner) > 1:
        return None
    direction = inner.attrs["direction"]
    if not is_integral(inner.operands[0]) and direction not in ("EQ", "NE"):
        return None
    return make("compare", *inner.operands, shape=inner.shape, **{**inner.attrs, "direction": _INVERSE[direction]})


@RULES.on("select")
def select_by_constant(i: Instruction) -> Instruction | None:
    """select(true, x, y) => x, select(false, x, y) => y"""
    value = uniform_value(i.operands[0])
    return None if value is None else i.operands[1 if value else 2]


@RULES.on("select")
def select_of_truth(i: Instruction) -> Instruction | None:
    """select(p, true, false) => p, select(p, false, true) => not(p)"""
    p, x, y = i.operands
    if i.element_type != "pred" or p.shape != i.shape:
        return None
    values = uniform_value(x), uniform_value(y)
    if values == (True, False):
        return p
    return make("not", p) if values == (False, True) else None


@RULES.on("select")
def select_of_not(i: Instruction) -> Instruction | None:
    """select(not(p), x, y) => select(p, y, x)"""
    p, x, y = i.operands
    return make("select", p.operands[0], y, x) if p.opcode == "not" else None


@RULES.on("select")
def select_of_select(i: Instruction) -> Instruction | None:
    """select(p, select(p, a, b), c) => select(p, a, c); select(p, a, select(p, b, c)) => select(p, a, c)"""
    p, x, y = i.operands
    if x.opcode == "select" and x.operands[0] is p:
        return make("select", p, x.operands[1], y)
    return make("select", p, x, y.operands[2]) if y.opcode == "select" and y.operands[0] is p else None
