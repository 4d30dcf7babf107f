"""Import rules of element-wise primitives: one table row where HLO has the opcode, a small function elsewhere.

JAX's primitives broadcast scalars and axes of size 1; HLO's operands all have the result's shape.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hlofuse.frontend import jaxpr_compat as compat
from hlofuse.frontend.scope import Rule, Scope
from hlofuse.hlo.module import Instruction
from hlofuse.hlo.shape import COMPLEX, UNSIGNED


def aligned(scope: Scope, eqn: Any, operands: Sequence[Instruction]) -> list[Instruction]:
    """The operands in the result's shape (and in `out_dtype`, where an equation has one)."""
    shape = compat.physical_shape(eqn.outvars[0].aval)
    if eqn.params.get("out_dtype") is not None:
        operands = [scope.convert(x, shape.element_type) for x in operands]
    return [scope.broadcast_to(x, shape.dims) for x in operands]


def opcode_rule(opcode: str) -> Rule:
    """A primitive that is one HLO opcode, result type as JAX says."""

    def rule(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
        shape = compat.physical_shape(eqn.outvars[0].aval)
        return [scope.emit(opcode, *aligned(scope, eqn, operands), shape=shape)]

    return rule


def formula_rule(formula: Callable[..., Instruction]) -> Rule:
    """A primitive that is a formula of the emitter on operands in the result's shape."""

    def rule(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
        return [formula(scope, *aligned(scope, eqn, operands))]

    return rule


def identity(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    return list(operands)


def second_operand(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    return [operands[1]]


# --- comparison ---------------------------------------------------------------------------------------------------

def compare_rule(direction: str, order: str | None = None) -> Rule:
    def rule(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
        dims = tuple(eqn.outvars[0].aval.shape)
        key_rank = len(compat.key_dims(eqn.invars[0].aval))
        if key_rank:
            return [_compare_keys(scope, direction, eqn, operands, key_rank)]
        x, y = (scope.broadcast_to(x, dims) for x in operands)
        is_float = np.issubdtype(x.array.dtype, np.inexact) or x.element_type in ("bf16", *COMPLEX)
        return [scope.compare(direction, x, y, order if is_float or x.element_type.startswith("f") else None)]

    return rule


def _compare_keys(scope: Scope, direction: str, eqn: Any, operands: list[Instruction], key_rank: int) -> Instruction:
    """Keys are equal where all of their words are."""
    dims = tuple(eqn.outvars[0].aval.shape)
    words = [scope.broadcast_in_dim(x, dims + x.dims[x.array.rank - key_rank:],
                                    range(len(dims) + key_rank - x.array.rank, len(dims) + key_rank))
             for x in operands]
    equal = scope.compare("EQ", words[0], words[1])
    axes = range(len(dims), len(dims) + key_rank)
    result = scope.reduce(equal, scope.scalar(True, "pred"), axes, scope.combiner("and", "pred"))
    return result if direction == "EQ" else scope.unary("not", result)


def extremum_rule(opcode: str, direction: str) -> Rule:
    def rule(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
        return [extremum(scope, opcode, direction, *aligned(scope, eqn, operands))]

    return rule


def extremum(scope: Scope, opcode: str, direction: str, x: Instruction, y: Instruction) -> Instruction:
    """maximum or minimum; complex numbers are compared as (real, imaginary) pairs."""
    if x.element_type not in COMPLEX:
        return scope.binary(opcode, x, y)
    by_real = scope.compare(direction, scope.real(x), scope.real(y))
    by_imag = scope.compare(direction, scope.imag(x), scope.imag(y))
    same_real = scope.compare("EQ", scope.real(x), scope.real(y))
    return scope.select(scope.select(same_real, by_imag, by_real), x, y)


# --- selection ----------------------------------------------------------------------------------------------------

def clamp(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    """Bounds are scalars or of the operand's shape, as in HLO."""
    low, x, high = operands
    if low.array.rank != high.array.rank:
        low, high = (scope.broadcast_to(bound, x.dims) for bound in (low, high))
    return [scope.emit("clamp", low, x, high, shape=x.shape)]


def select_n(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    """A pred chooses case 0 or 1; an integer chooses by halving."""
    which, *cases = operands
    if len(cases) == 1:
        return cases
    if which.array.rank and which.dims != cases[0].dims:  # keys have trailing dimensions
        which = scope.broadcast(which, cases[0].dims, range(which.array.rank))
    if which.element_type == "pred":
        return [scope.select(which, cases[1], cases[0])]

    def choose(low: int, chosen: list[Instruction]) -> Instruction:
        if len(chosen) == 1:
            return chosen[0]
        middle = len(chosen) // 2
        is_low = scope.compare("LT", which, low + middle)
        return scope.select(is_low, choose(low, chosen[:middle]), choose(low + middle, chosen[middle:]))

    return [choose(0, cases)]


# --- conversion ---------------------------------------------------------------------------------------------------

def convert_element_type(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    return [scope.convert(operands[0], compat.physical_shape(eqn.outvars[0].aval).element_type)]


def bitcast_convert_type(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    shape = compat.physical_shape(eqn.outvars[0].aval)
    if shape == operands[0].shape:
        return operands
    return [scope.emit("bitcast-convert", operands[0], shape=shape)]


def reduce_precision(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    return [scope.emit("reduce-precision", operands[0], shape=operands[0].shape,
                       exponent_bits=int(eqn.params["exponent_bits"]), mantissa_bits=int(eqn.params["mantissa_bits"]))]


def conj(scope: Scope, x: Instruction) -> Instruction:
    if x.element_type in COMPLEX:
        return scope.complex(scope.real(x), scope.unary("negate", scope.imag(x)))
    return scope.complex(x, scope.like(x, 0))


# --- arithmetic ---------------------------------------------------------------------------------------------------

def integer_pow(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    """Repeated squaring in JAX's order, so that results agree bit for bit."""
    return [power_by_squaring(scope, operands[0], int(eqn.params["y"]))]


def power_by_squaring(scope: Scope, x: Instruction, exponent: int) -> Instruction:
    if exponent == 0:
        return scope.like(x, 1)
    if exponent == 3:
        return scope.mul(scope.mul(x, x), x)
    result, square, left = None, x, abs(exponent)
    while left:
        if left & 1:
            result = square if result is None else scope.mul(result, square)
        left >>= 1
        if left:
            square = scope.mul(square, square)
    assert result is not None
    return scope.div(scope.like(result, 1), result) if exponent < 0 else result


def square(scope: Scope, x: Instruction) -> Instruction:
    """(a + bi)² is (a - b)(a + b) + 2abi, which does not cancel; a - b is taken as 0 where both are one infinity."""
    if x.element_type not in COMPLEX:
        return scope.mul(x, x)
    a, b = scope.real(x), scope.imag(x)
    same = scope.compare("EQ", scope.unary("abs", a), scope.unary("abs", b))
    real = scope.select(same, scope.like(a, 0), scope.mul(scope.sub(a, b), scope.add(a, b)))
    product = scope.mul(a, b)
    return scope.complex(real, scope.add(product, product))


def pow_(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    x, y = operands
    return [scope.binary("power", *aligned(scope, eqn, [x, scope.convert(y, x.element_type)]))]


def sign(scope: Scope, x: Instruction) -> Instruction:
    if x.element_type in UNSIGNED:
        return scope.select(scope.compare("EQ", x, 0), x, 1)
    return scope.unary("sign", x)


def exp2(scope: Scope, x: Instruction) -> Instruction:
    return scope.unary("exponential", scope.mul(x, math.log(2)))


def log2(scope: Scope, x: Instruction) -> Instruction:
    log, scale = scope.unary("log", x), 1 / math.log(2)
    if x.element_type in COMPLEX:
        return scope.complex(scope.mul(scope.real(log), scale), scope.mul(scope.imag(log), scale))
    return scope.mul(log, scale)


def atan(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction] | None:
    x = operands[0]
    return None if x.element_type in COMPLEX else [scope.binary("atan2", x, 1)]


def one_minus_square(scope: Scope, x: Instruction) -> Instruction:
    """1 - x² without cancellation near |x| = 1."""
    one = scope.like(x, 1)
    return scope.mul(scope.add(one, x), scope.sub(one, x))


def polynomial(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    """Coefficients from the constant term up; Horner's rule."""
    x, *coefficients = aligned(scope, eqn, operands)
    result = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        result = scope.add(scope.mul(result, x), coefficient)
    return [result]


def round_(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    to_even = eqn.params["rounding_method"].name == "TO_NEAREST_EVEN"
    return [scope.unary("round-nearest-even" if to_even else "round-nearest-afz", operands[0])]


def mulhi(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    """The upper half of the double-width product: in a wider type, or from the halves of 64-bit factors."""
    x, y = aligned(scope, eqn, operands)
    bits = x.array.dtype.itemsize * 8
    if bits < 64:
        wide = f"{x.element_type[0]}{2 * bits}"
        product = scope.mul(scope.convert(x, wide), scope.convert(y, wide))
        return [scope.convert(scope.binary("shift-right-arithmetic" if wide[0] == "s" else "shift-right-logical",
                                           product, bits), x.element_type)]
    return [_mulhi_64(scope, x, y)]


def _mulhi_64(scope: Scope, x: Instruction, y: Instruction) -> Instruction:
    """(x1·2³² + x0)(y1·2³² + y0) by halves; the high halves keep the sign, the low ones do not have one."""
    shift = "shift-right-arithmetic" if x.element_type == "s64" else "shift-right-logical"
    mask = (1 << 32) - 1
    x0, y0 = scope.binary("and", x, mask), scope.binary("and", y, mask)
    x1, y1 = scope.binary(shift, x, 32), scope.binary(shift, y, 32)
    carry = scope.binary("shift-right-logical", scope.mul(x0, y0), 32)
    middle = scope.add(scope.mul(x1, y0), carry)
    low = scope.add(scope.mul(x0, y1), scope.binary("and", middle, mask))
    return scope.add(scope.add(scope.mul(x1, y1), scope.binary(shift, middle, 32)), scope.binary(shift, low, 32))


def nextafter(scope: Scope, x: Instruction, y: Instruction) -> Instruction:
    """The neighbor of x towards y: one step of its bits, read as sign and magnitude."""
    bits = x.array.dtype.itemsize * 8
    unsigned, sign_bit = f"u{bits}", 1 << (bits - 1)

    def bits_of(value: Instruction) -> Instruction:
        return scope.emit("bitcast-convert", value, shape=value.array.with_type(unsigned))

    word = bits_of(x)
    magnitude = scope.binary("and", word, sign_bit - 1)
    smallest = scope.binary("or", scope.binary("and", bits_of(y), sign_bit), 1)
    is_negative = scope.compare("NE", scope.binary("and", word, sign_bit), 0)
    towards_zero = scope.binary("xor", is_negative, scope.compare("LT", y, x))
    step = scope.select(towards_zero, scope.like(word, (1 << bits) - 1), 1)
    moved = scope.select(scope.compare("EQ", magnitude, 0), smallest, scope.add(word, step))
    result = scope.emit("bitcast-convert", moved, shape=x.shape)
    result = scope.select(scope.compare("EQ", x, y), y, result)
    is_nan = scope.binary("or", scope.compare("NE", x, x), scope.compare("NE", y, y))
    return scope.select(is_nan, scope.like(x, math.nan), result)


def full_of_result(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    """Memory whose contents nobody may depend on: zeros."""
    return [scope.full(0, compat.physical_shape(v.aval)) for v in eqn.outvars]


def real_part(scope: Scope, x: Instruction) -> Instruction:
    return scope.real(x)


def imag_part(scope: Scope, x: Instruction) -> Instruction:
    return scope.imag(x)


_OPCODES = {
    "add": "add", "add_any": "add", "sub": "subtract", "mul": "multiply", "div": "divide", "rem": "remainder",
    "atan2": "atan2", "neg": "negate", "abs": "abs", "floor": "floor", "ceil": "ceil", "is_finite": "is-finite",
    "and": "and", "or": "or", "xor": "xor", "not": "not", "shift_left": "shift-left",
    "shift_right_arithmetic": "shift-right-arithmetic", "shift_right_logical": "shift-right-logical",
    "population_count": "popcnt", "clz": "count-leading-zeros", "exp": "exponential",
    "expm1": "exponential-minus-one", "log": "log", "log1p": "log-plus-one", "logistic": "logistic", "sqrt": "sqrt",
    "rsqrt": "rsqrt", "cbrt": "cbrt", "sin": "sine", "cos": "cosine", "tan": "tan", "tanh": "tanh",
    "erf": "erf", "complex": "complex",
}
_FORMULAS: dict[str, Callable[..., Instruction]] = {
    "conj": conj, "square": square, "sign": sign, "exp2": exp2, "log2": log2, "nextafter": nextafter,
    "one_minus_square": one_minus_square, "real": real_part, "imag": imag_part,
}
_IDENTITIES = ("copy", "copy_p", "stop_gradient", "stage", "name", "sharding_constraint", "layout_constraint",
               "random_clone", "to_edtype", "from_edtype")
_COMPARISONS = {"eq": "EQ", "ne": "NE", "ge": "GE", "gt": "GT", "le": "LE", "lt": "LT"}

RULES: dict[str, Rule] = {
    **{name: opcode_rule(opcode) for name, opcode in _OPCODES.items()},
    **{name: formula_rule(formula) for name, formula in _FORMULAS.items()},
    **{name: compare_rule(direction) for name, direction in _COMPARISONS.items()},
    **{f"{name}_to": compare_rule(_COMPARISONS[name], "TOTALORDER") for name in ("eq", "le", "lt")},
    **dict.fromkeys(_IDENTITIES, identity),
    **dict.fromkeys(("empty", "empty2"), full_of_result),
    "tie": second_operand,
    "max": extremum_rule("maximum", "GT"),
    "min": extremum_rule("minimum", "LT"),
    "clamp": clamp,
    "select_n": select_n,
    "convert_element_type": convert_element_type,
    "bitcast_convert_type": bitcast_convert_type,
    "reduce_precision": reduce_precision,
    "integer_pow": integer_pow,
    "pow": pow_,
    "atan": atan,
    "polynomial": polynomial,
    "round": round_,
    "mulhi": mulhi,
}
