"""What each element-wise opcode means, as a `jax.lax` call on operands of the instruction's exact types.

Where HLO takes a type that the lax function refuses (pred in arithmetic, unsigned in abs), the meaning is spelled out.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from hlofuse.hlo.module import Instruction
from hlofuse.hlo.shape import FLOATS

Function = Callable[..., Any]


def _on_pred(of_pred: Function, otherwise: Function) -> Function:
    return lambda *x: (of_pred if x[0].dtype == np.bool_ else otherwise)(*x)


def _absolute(x: Any) -> Any:
    return x if jnp.issubdtype(x.dtype, jnp.unsignedinteger) else lax.abs(x)


def _real(x: Any) -> Any:
    return lax.real(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x


def _imaginary(x: Any) -> Any:
    return lax.imag(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else lax.full_like(x, 0)


def _power(x: Any, y: Any) -> Any:
    """Integers wrap, and a negative exponent gives the truncated quotient: 0 but for the bases 1 and -1."""
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return lax.pow(x, y)
    one, zero = lax.full_like(x, 1), lax.full_like(x, 0)

    def step(bit: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        result, square = state
        is_set = lax.ne(lax.bitwise_and(lax.shift_right_logical(y, lax.full_like(y, bit)), one), zero)
        return lax.select(is_set, lax.mul(result, square), result), lax.mul(square, square)

    result, _ = lax.fori_loop(0, jnp.iinfo(x.dtype).bits, step, (one, x))
    if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        return result
    # ±1 to the -n is ±1 to the n, and the loop has taken -n for 2^bits - n, which is as odd.
    is_unit = lax.eq(lax.abs(x), one)
    return lax.select(lax.lt(y, zero) & ~is_unit, zero, result)


# Opcodes whose meaning needs the operands only.
FUNCTIONS: dict[str, Function] = {
    "abs": _absolute, "negate": lax.neg, "sign": lax.sign, "floor": lax.floor, "ceil": lax.ceil,
    "round-nearest-even": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    "round-nearest-afz": lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
    "add": _on_pred(lax.bitwise_or, lax.add), "subtract": lax.sub,
    "multiply": _on_pred(lax.bitwise_and, lax.mul), "divide": lax.div, "remainder": lax.rem, "power": _power,
    "maximum": lax.max, "minimum": lax.min, "atan2": lax.atan2,
    "and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor, "not": lax.bitwise_not,
    "shift-left": lax.shift_left, "shift-right-arithmetic": lax.shift_right_arithmetic,
    "shift-right-logical": lax.shift_right_logical, "popcnt": lax.population_count, "count-leading-zeros": lax.clz,
    "exponential": lax.exp, "exponential-minus-one": lax.expm1, "log": lax.log, "log-plus-one": lax.log1p,
    "logistic": lax.logistic, "sqrt": lax.sqrt, "rsqrt": lax.rsqrt, "cbrt": lax.cbrt, "erf": lax.erf,
    "sine": lax.sin, "cosine": lax.cos, "tan": lax.tan, "tanh": lax.tanh, "sinh": lax.sinh, "cosh": lax.cosh,
    "asin": lax.asin, "acos": lax.acos, "asinh": lax.asinh, "acosh": lax.acosh, "atanh": lax.atanh,
    "is-finite": lax.is_finite, "complex": lax.complex, "real": _real, "imag": _imaginary,
    "select": lax.select, "clamp": lax.clamp, "copy": lambda x: x,
}

_COMPARISONS: dict[str, Function] = {"EQ": lax.eq, "NE": lax.ne, "LT": lax.lt, "LE": lax.le, "GT": lax.gt, "GE": lax.ge}


def compare(instruction: Instruction, left: Any, right: Any) -> Any:
    if instruction.attrs.get("type") == "TOTALORDER" and instruction.operands[0].element_type in FLOATS:
        left, right = total_order_key(left), total_order_key(right)
    return _COMPARISONS[instruction.attrs["direction"]](left, right)


def total_order_key(x: Any) -> Any:
    """Signed integers in the order -NaN < -inf < … < -0 < +0 < … < inf < NaN of the floats `x`."""
    bits = 8 * np.dtype(x.dtype).itemsize
    signed = np.dtype(f"int{bits}")
    as_int = lax.bitcast_convert_type(x, signed)
    # Negative floats descend as integers do: all their bits but the sign turn around.
    flipped = lax.bitwise_xor(as_int, lax.full_like(as_int, np.iinfo(signed).max))
    return lax.select(lax.lt(as_int, lax.full_like(as_int, 0)), flipped, as_int)


def convert(instruction: Instruction, x: Any) -> Any:
    return lax.convert_element_type(x, instruction.array.dtype)


def reduce_precision(instruction: Instruction, x: Any) -> Any:
    return lax.reduce_precision(x, instruction.attrs["exponent_bits"], instruction.attrs["mantissa_bits"])


def bitcast_convert(instruction: Instruction, x: Any) -> Any:
    dtype = instruction.array.dtype
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


# Opcodes whose meaning needs the instruction too.
MEANINGS: dict[str, Function] = {"compare": compare, "convert": convert, "reduce-precision": reduce_precision,
                                 "bitcast-convert": bitcast_convert}
