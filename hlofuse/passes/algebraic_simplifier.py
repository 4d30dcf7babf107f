"""Identities of arithmetic, logic and comparison that hold bit for bit.

Floats: only what is exact for NaN, infinities and signed zeros, so `x + 0.0`, `x - x` and `x * 0.0` stay. Complex
numbers are left alone where a part could meet an infinity. Integers wrap. Constants stand on the right (canonicalize).
"""
from __future__ import annotations

import math

import numpy as np

from hlofuse.hlo.builder import make
from hlofuse.hlo.module import Instruction, Module
from hlofuse.hlo.opcode import identity_of
from hlofuse.hlo.shape import COMPLEX, FLOATS, INTEGERS, UNSIGNED
from hlofuse.passes.comparisons import RULES as COMPARISONS
from hlofuse.passes.known import all_ones, full_like, integer_range, is_exactly, is_integral, same_number, uniform_value
from hlofuse.passes.rewrite import RuleTable, rewrite

RULES = RuleTable()


def algebraic_simplifier(module: Module) -> Module:
    return rewrite(module, RULES)


# --- identities -------------------------------------------------------------------------------------------------------

@RULES.on("add", "multiply", "maximum", "minimum", "and", "or", "xor")
def drop_identity(i: Instruction) -> Instruction | None:
    """op(x, identity) => x: add -0.0 (0 for integers), multiply 1, maximum -inf, minimum inf, and ~0, or 0, xor 0"""
    value = uniform_value(i.operands[1])
    if value is None or i.opcode == "multiply" and i.element_type in COMPLEX:
        return None
    identity = identity_of(i.opcode, i.element_type)
    return i.operands[0] if identity is not None and same_number(value, identity) else None


@RULES.on("add")
def drop_float_zero(i: Instruction) -> Instruction | None:
    """add(x, 0.0) => x where x is never -0.0: an abs, an exponential, a converted integer"""
    x, zero = i.operands
    return x if i.element_type in FLOATS and is_exactly(zero, 0.0) and _never_negative_zero(x) else None


def _never_negative_zero(x: Instruction) -> bool:
    if x.opcode == "broadcast":
        x = x.operands[0]
    if x.opcode in ("abs", "exponential", "logistic", "cosh"):
        return True
    if x.opcode == "convert":
        return is_integral(x.operands[0])
    if x.opcode == "multiply":
        return x.operands[0] is x.operands[1]
    return x.opcode == "add" and (is_exactly(x.operands[1], 0.0) or all(_is_square(o) for o in x.operands))


def _is_square(x: Instruction) -> bool:
    return x.opcode == "multiply" and x.operands[0] is x.operands[1]


@RULES.on("subtract")
def subtract_zero(i: Instruction) -> Instruction | None:
    """subtract(x, 0) => x; -0.0 - 0.0 is -0.0"""
    x, zero = i.operands
    return x if i.element_type not in COMPLEX and is_exactly(zero, 0.0) else None


@RULES.on("divide")
def divide_by_one(i: Instruction) -> Instruction | None:
    """divide(x, 1) => x"""
    return i.operands[0] if i.element_type not in COMPLEX and is_exactly(i.operands[1], 1) else None


@RULES.on("shift-left", "shift-right-arithmetic", "shift-right-logical")
def shift_by_zero(i: Instruction) -> Instruction | None:
    """shift(x, 0) => x"""
    return i.operands[0] if is_exactly(i.operands[1], 0) else None


@RULES.on("multiply", "and")
def annihilated(i: Instruction) -> Instruction | None:
    """multiply(x, 0) => 0 and and(x, 0) => 0, for integers and pred"""
    return full_like(i, 0) if is_integral(i) and is_exactly(i.operands[1], 0) else None


@RULES.on("or")
def saturated_or(i: Instruction) -> Instruction | None:
    """or(x, ~0) => ~0"""
    value = uniform_value(i.operands[1])
    return full_like(i, value) if value is not None and value == all_ones(i.element_type) else None


@RULES.on("maximum", "minimum")
def saturated_bound(i: Instruction) -> Instruction | None:
    """maximum(x, largest) => largest, minimum(x, smallest) => smallest, for integers"""
    value = uniform_value(i.operands[1])
    if value is None or not is_integral(i):
        return None
    opposite = identity_of("minimum" if i.opcode == "maximum" else "maximum", i.element_type)
    return full_like(i, value) if value == opposite else None


@RULES.on("and", "or", "maximum", "minimum")
def same_operands(i: Instruction) -> Instruction | None:
    """op(x, x) => x"""
    return i.operands[0] if i.operands[0] is i.operands[1] else None


@RULES.on("subtract", "xor")
def cancelled(i: Instruction) -> Instruction | None:
    """subtract(x, x) => 0 and xor(x, x) => 0, for integers and pred"""
    return full_like(i, 0) if i.operands[0] is i.operands[1] and is_integral(i) else None


@RULES.on("remainder")
def remainder_by_one(i: Instruction) -> Instruction | None:
    """remainder(x, 1) => 0, for integers; x itself where 0 <= x < divisor"""
    x, divisor = i.operands
    if i.element_type not in INTEGERS:
        return None
    if is_exactly(divisor, 1):
        return full_like(i, 0)
    found, bound = integer_range(x), uniform_value(divisor)
    return x if found is not None and bound is not None and 0 <= found[0] and found[1] < int(bound) else None


# --- signs ------------------------------------------------------------------------------------------------------------

@RULES.on("negate", "not")
def involution(i: Instruction) -> Instruction | None:
    """negate(negate(x)) => x, not(not(x)) => x"""
    return i.operands[0].operands[0] if i.operands[0].opcode == i.opcode else None


@RULES.on("abs", "sign", "floor", "ceil", "round-nearest-even", "round-nearest-afz")
def idempotent(i: Instruction) -> Instruction | None:
    """op(op(x)) => op(x)"""
    return i.operands[0] if i.operands[0].opcode == i.opcode and i.operands[0].shape == i.shape else None


@RULES.on("reduce-precision")
def idempotent_precision(i: Instruction) -> Instruction | None:
    """reduce-precision(reduce-precision(x)) => reduce-precision(x), of equal bits"""
    inner = i.operands[0]
    return inner if inner.opcode == i.opcode and dict(inner.attrs) == dict(i.attrs) else None


@RULES.on("abs")
def abs_of_negate(i: Instruction) -> Instruction | None:
    """abs(negate(x)) => abs(x)"""
    inner = i.operands[0]
    return make("abs", inner.operands[0]) if inner.opcode == "negate" else None


@RULES.on("abs")
def abs_of_unsigned(i: Instruction) -> Instruction | None:
    """abs(x) => x, x unsigned"""
    return i.operands[0] if i.element_type in UNSIGNED else None


@RULES.on("multiply", "divide")
def times_minus_one(i: Instruction) -> Instruction | None:
    """multiply(x, -1) => negate(x), divide(x, -1) => negate(x)"""
    if i.element_type in COMPLEX or i.element_type in UNSIGNED or i.element_type == "pred":
        return None
    return make("negate", i.operands[0]) if is_exactly(i.operands[1], -1) else None


@RULES.on("subtract")
def integer_zero_minus(i: Instruction) -> Instruction | None:
    """subtract(0, x) => negate(x), for integers: 0.0 - 0.0 is 0.0, not -0.0"""
    if i.element_type not in INTEGERS or not is_exactly(i.operands[0], 0):
        return None
    return make("negate", i.operands[1])


@RULES.on("subtract")
def negative_zero_minus(i: Instruction) -> Instruction | None:
    """subtract(-0.0, x) => negate(x)"""
    return make("negate", i.operands[1]) if i.element_type in FLOATS and is_exactly(i.operands[0], -0.0) else None


@RULES.on("add")
def add_of_negate(i: Instruction) -> Instruction | None:
    """add(x, negate(y)) => subtract(x, y), add(negate(y), x) => subtract(x, y)"""
    if i.element_type in COMPLEX:
        return None
    left, right = i.operands
    if right.opcode == "negate":
        return make("subtract", left, right.operands[0])
    return make("subtract", right, left.operands[0]) if left.opcode == "negate" else None


@RULES.on("subtract")
def subtract_of_negate(i: Instruction) -> Instruction | None:
    """subtract(x, negate(y)) => add(x, y)"""
    left, right = i.operands
    if i.element_type in COMPLEX or right.opcode != "negate":
        return None
    return make("add", left, right.operands[0])


@RULES.on("multiply", "divide")
def both_negated(i: Instruction) -> Instruction | None:
    """multiply(negate(x), negate(y)) => multiply(x, y), and divide of floats"""
    left, right = i.operands
    if left.opcode != "negate" or right.opcode != "negate" or i.element_type in COMPLEX:
        return None
    if i.opcode == "divide" and i.element_type not in FLOATS:
        return None
    return make(i.opcode, left.operands[0], right.operands[0])


# --- other forms ------------------------------------------------------------------------------------------------------

@RULES.on("divide")
def divide_by_power_of_two(i: Instruction) -> Instruction | None:
    """divide(x, 2^k) => multiply(x, 2^-k), floats, where 2^-k is a normal number: both round the same real number"""
    if i.element_type not in FLOATS:
        return None
    value = uniform_value(i.operands[1])
    if value is None or not np.isfinite(value) or value == 0:
        return None
    mantissa, exponent = math.frexp(float(value))
    if abs(mantissa) != 0.5 or not _normal_exponent(1 - exponent, i.element_type):
        return None
    return make("multiply", i.operands[0], full_like(i, math.copysign(math.ldexp(1.0, 1 - exponent), mantissa)))


def _normal_exponent(exponent: int, element_type: str) -> bool:
    """Whether 2^exponent is a normal number, neither subnormal nor infinite."""
    low, high = {"f16": (-14, 15), "bf16": (-126, 127), "f32": (-126, 127), "f64": (-1022, 1023)}[element_type]
    return low <= exponent <= high


@RULES.on("power")
def small_power(i: Instruction) -> Instruction | None:
    """power(x, 0) => 1, power(x, 1) => x, power(x, 2) => multiply(x, x), and power(x, -1) => divide(1, x) of floats"""
    x, exponent = i.operands
    if i.element_type in COMPLEX or uniform_value(exponent) is None:
        return None
    if uniform_value(exponent) == 0:
        return full_like(i, 1)
    if is_exactly(exponent, 1):
        return x
    if is_exactly(exponent, 2):
        return make("multiply", x, x)
    if i.element_type in FLOATS and is_exactly(exponent, -1):
        return make("divide", full_like(i, 1), x)
    return None


@RULES.on("add", "multiply", "and", "or", "xor", "maximum", "minimum")
def gather_integer_constants(i: Instruction) -> Instruction | None:
    """op(op(x, c1), c2) => op(x, op(c1, c2)), for integers and pred"""
    inner, outer_constant = i.operands
    if inner.opcode != i.opcode or not is_integral(i):
        return None
    if uniform_value(outer_constant) is None or uniform_value(inner.operands[1]) is None:
        return None
    return make(i.opcode, inner.operands[0], make(i.opcode, inner.operands[1], outer_constant))


@RULES.on("clamp")
def clamp_to_everything(i: Instruction) -> Instruction | None:
    """clamp(-inf, x, inf) => x; and x itself where the integer x is known to lie between constant bounds"""
    low, x, high = i.operands
    least, most = uniform_value(low), uniform_value(high)
    if least is None or most is None or i.element_type == "pred":
        return None
    if same_number(least, identity_of("maximum", i.element_type)) and \
            same_number(most, identity_of("minimum", i.element_type)):
        return x
    found = integer_range(x)
    return x if found is not None and int(least) <= found[0] and found[1] <= int(most) else None


@RULES.on("real", "imag")
def part_of_complex(i: Instruction) -> Instruction | None:
    """real(complex(a, b)) => a, imag(complex(a, b)) => b"""
    made = i.operands[0]
    return made.operands[0 if i.opcode == "real" else 1] if made.opcode == "complex" else None


@RULES.on("complex")
def complex_of_parts(i: Instruction) -> Instruction | None:
    """complex(real(z), imag(z)) => z"""
    a, b = i.operands
    same = a.opcode == "real" and b.opcode == "imag" and a.operands[0] is b.operands[0]
    return a.operands[0] if same and a.operands[0].shape == i.shape else None


RULES.include(COMPARISONS)
