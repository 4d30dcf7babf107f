"""Computes what depends on literals only, in NumPy, where NumPy gives the bits that the program would give.

Capped by size: a large iota or broadcast is never materialized, and a broadcast of a scalar stays a broadcast.
Functions that libraries round differently (exp, sin, pow, …) are left to the program, so that folding changes no bit.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from hlofuse.hlo.builder import constant
from hlofuse.hlo.module import Instruction, Module
from hlofuse.hlo.shape import COMPLEX, FLOATS, FUSIBLE, INTEGERS, SIGNED, Shape
from hlofuse.passes.known import full_like
from hlofuse.passes.rewrite import RuleTable, rewrite

RULES = RuleTable()
LARGEST_LITERAL = 1024  # elements

Array = np.ndarray
Folder = Callable[..., "Array | None"]


def constant_folding(module: Module) -> Module:
    return rewrite(module, RULES)


# --- scalar meanings: `None` where NumPy's answer might not be the program's ------------------------------------------

def _divide(x: Array, y: Array) -> Array | None:
    """Integers truncate; x / 0 is all ones, and the smallest integer over -1 wraps to itself."""
    if x.dtype.kind not in "iu":
        return x / y
    wide = _exact_quotient(x, np.where(y == 0, 1, y))
    return np.where(y == 0, _minus_one(x), wide).astype(x.dtype)


def _exact_quotient(x: Array, y: Array) -> Array:
    smallest_over_minus_one = (y == -1) if x.dtype.kind == "i" else np.zeros(x.shape, bool)
    safe = np.where(smallest_over_minus_one, 1, y).astype(x.dtype)
    quotient = x // safe
    if x.dtype.kind == "i":
        quotient = quotient + ((x % safe != 0) & ((x < 0) != (safe < 0)))  # floor to truncation
    return np.where(smallest_over_minus_one, -x, quotient)


def _minus_one(x: Array) -> Array:
    return np.invert(np.zeros_like(x))


def _remainder(x: Array, y: Array) -> Array | None:
    """Has the dividend's sign; x % 0 is x for integers."""
    if x.dtype.kind not in "iu":
        return None
    safe = np.where((y == 0) | (y == _minus_one(y)) if x.dtype.kind == "i" else y == 0, 1, y).astype(x.dtype)
    return np.where(y == 0, x, np.fmod(x, safe)).astype(x.dtype)


def _extreme(pick: Callable[..., Array]) -> Folder:
    """NaN wins. A pair of zeros of both signs is left to the program."""
    def fold(x: Array, y: Array) -> Array | None:
        if x.dtype.kind not in "iub" and np.any((x == 0) & (y == 0) & (np.signbit(x) != np.signbit(y))):
            return None
        return pick(x, y)
    return fold


def _shift(shift: Callable[[Array, Array], Array], beyond: Callable[[Array], Array]) -> Folder:
    """A shift by the width or more (or by a negative amount) gives `beyond`."""
    def fold(x: Array, y: Array) -> Array:
        outside = (y < 0) | (y >= _bits(x))
        return np.where(outside, beyond(x), shift(x, np.where(outside, 0, y).astype(x.dtype))).astype(x.dtype)
    return fold


def _bits(x: Array) -> int:
    return x.dtype.itemsize * 8


def _logical_right(x: Array, y: Array) -> Array:
    unsigned = x.dtype.str.replace("i", "u")
    return (x.view(unsigned) >> y.view(unsigned)).view(x.dtype)


def _arithmetic_right(x: Array, y: Array) -> Array:
    """The highest bit fills in, also that of an unsigned type."""
    signed = x.dtype.str.replace("u", "i")
    return (x.view(signed) >> y.view(signed)).view(x.dtype)


def _select(p: Array, x: Array, y: Array) -> Array:
    return np.where(p, x, y)


def _sign(x: Array) -> Array | None:
    return np.sign(x) if x.dtype.kind in "iu" else None


def _count_leading_zeros(x: Array) -> Array:
    bits = _bits(x)
    return np.array([bits - (int(v) & ((1 << bits) - 1)).bit_length() for v in x.ravel()], x.dtype).reshape(x.shape)


def _population_count(x: Array) -> Array:
    bits = _bits(x)
    return np.array([(int(v) & ((1 << bits) - 1)).bit_count() for v in x.ravel()], x.dtype).reshape(x.shape)


SCALAR_FOLDERS: dict[str, Folder] = {
    "add": lambda x, y: x | y if x.dtype == bool else x + y,
    "subtract": lambda x, y: x - y,
    "multiply": lambda x, y: x & y if x.dtype == bool else None if x.dtype.kind == "c" else x * y,
    "divide": lambda x, y: None if x.dtype.kind == "c" else _divide(x, y),
    "remainder": _remainder,
    "maximum": _extreme(np.maximum),
    "minimum": _extreme(np.minimum),
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "not": lambda x: ~x,
    "negate": np.negative,
    "abs": lambda x: None if x.dtype.kind == "c" else np.abs(x),
    "sign": _sign,
    "floor": np.floor,
    "ceil": np.ceil,
    "round-nearest-even": np.rint,
    "is-finite": np.isfinite,
    "sqrt": lambda x: np.sqrt(x) if x.dtype in (np.float32, np.float64) else None,
    "shift-left": _shift(lambda x, y: x << y, np.zeros_like),
    "shift-right-arithmetic": _shift(_arithmetic_right, lambda x: _arithmetic_right(x, np.full_like(x, _bits(x) - 1))),
    "shift-right-logical": _shift(_logical_right, np.zeros_like),
    "popcnt": _population_count,
    "count-leading-zeros": _count_leading_zeros,
    "select": _select,
    "complex": lambda a, b: _complex(a, b),
    "real": np.real,
    "imag": np.imag,
}
_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal,
}


def _complex(real: Array, imag: Array) -> Array:
    made = np.empty(real.shape, np.complex64 if real.dtype == np.float32 else np.complex128)
    made.real, made.imag = real, imag
    return made


def converted(x: Array, target: Shape) -> Array | None:
    """As `convert`: integers wrap, floats round to nearest even, a float becomes an integer by truncation."""
    source, to = x.dtype, target.dtype
    if target.element_type == "pred":
        return x != 0
    if source.kind in "iub" and target.element_type in INTEGERS:
        return x.astype(to)
    if source.kind in "iub":
        # Half types are reached through float32, which is exact up to 2^24.
        small = source.kind == "b" or bool(np.all(np.abs(x.astype(np.float64)) <= 2 ** 24))
        return x.astype(to) if small or to.itemsize >= 4 else None
    if target.element_type in INTEGERS:
        info = np.iinfo(to)
        wide = x.astype(np.float64) if source.kind != "c" else np.full(x.shape, np.nan)
        inside = bool(np.all((wide > float(info.min - 1)) & (wide < float(info.max + 1))))  # false for NaN
        return np.trunc(wide).astype(to) if inside else None
    if source.kind == "c" and target.element_type not in COMPLEX:
        return None
    if source == np.float64 and to == ml_dtypes.bfloat16 and not np.array_equal(x, x.astype(np.float32)):
        return None
    return x.astype(to)


# --- rules ------------------------------------------------------------------------------------------------------------

def _literal(i: Instruction) -> Array | None:
    """The value of a literal, or of a small broadcast scalar."""
    if i.opcode == "constant":
        return i.literal if i.literal.size <= LARGEST_LITERAL and i.element_type in FUSIBLE else None
    if i.opcode == "broadcast" and i.operands[0].opcode == "constant" and not i.operands[0].dims \
            and i.array.size <= LARGEST_LITERAL and i.element_type in FUSIBLE:
        return np.broadcast_to(i.operands[0].literal, i.dims)
    return None


def _small_literals(i: Instruction) -> list[Array] | None:
    """The operands' values; `None` unless at least one is a real array literal or all are scalars."""
    if not isinstance(i.shape, Shape) or i.shape.size > LARGEST_LITERAL or i.element_type not in FUSIBLE:
        return None
    found = []
    for operand in i.operands:
        value = _literal(operand)
        if value is None:
            return None
        found.append(value)
    return found if any(o.opcode == "constant" for o in i.operands) else None


def _as_constant(i: Instruction, value: Any) -> Instruction | None:
    if value is None:
        return None
    literal = np.ascontiguousarray(np.asarray(value, i.array.dtype)).reshape(i.dims)
    return constant(literal)


@RULES.on(*SCALAR_FOLDERS)
def fold_elementwise(i: Instruction) -> Instruction | None:
    """op(constant, …) => constant"""
    values = _small_literals(i)
    if values is None:
        return None
    with np.errstate(all="ignore"):
        return _as_constant(i, SCALAR_FOLDERS[i.opcode](*values))


@RULES.on("clamp")
def fold_clamp(i: Instruction) -> Instruction | None:
    """clamp(constant, constant, constant) => constant"""
    values = _small_literals(i)
    if values is None:
        return None
    low, x, high = values
    raised = SCALAR_FOLDERS["maximum"](*np.broadcast_arrays(x, low))
    return None if raised is None else _as_constant(i, SCALAR_FOLDERS["minimum"](*np.broadcast_arrays(raised, high)))


@RULES.on("compare")
def fold_compare(i: Instruction) -> Instruction | None:
    """compare(constant, constant) => constant"""
    values = _small_literals(i)
    if values is None or i.attrs.get("type") == "TOTALORDER" or i.operands[0].element_type in COMPLEX:
        return None
    return _as_constant(i, _COMPARE[i.attrs["direction"]](*values))


@RULES.on("convert")
def fold_convert(i: Instruction) -> Instruction | None:
    """convert(constant) => constant; a float out of the integer's range is left to the program"""
    values = _small_literals(i)
    if values is None:
        return None
    with np.errstate(all="ignore"):
        return _as_constant(i, converted(values[0], i.array))


@RULES.on("bitcast-convert")
def fold_bitcast_convert(i: Instruction) -> Instruction | None:
    """bitcast-convert(constant) => constant, between types of one width"""
    values = _small_literals(i)
    if values is None or values[0].dtype.itemsize != i.array.dtype.itemsize or i.element_type == "pred" \
            or values[0].dtype == bool:
        return None
    return _as_constant(i, np.ascontiguousarray(values[0]).reshape(i.dims).view(i.array.dtype))


@RULES.on("reshape", "bitcast", "transpose", "reverse", "slice", "concatenate")
def fold_move(i: Instruction) -> Instruction | None:
    """reshape, transpose, reverse, slice, concatenate of constants => constant"""
    if not all(o.opcode == "constant" for o in i.operands):
        return None
    values = _small_literals(i)
    return None if values is None else _as_constant(i, _MOVES[i.opcode](i, *values))


_MOVES: dict[str, Callable[..., Array]] = {
    "reshape": lambda i, x: x.reshape(i.dims),
    "bitcast": lambda i, x: x.reshape(i.dims),
    "transpose": lambda i, x: x.transpose(i.attrs["dimensions"]),
    "reverse": lambda i, x: np.flip(x, i.attrs["dimensions"]),
    "slice": lambda i, x: x[tuple(slice(*bounds) for bounds in i.attrs["slice"])],
    "concatenate": lambda i, *xs: np.concatenate(xs, i.attrs["dimensions"][0]),
}


@RULES.on("iota")
def iota_of_one(i: Instruction) -> Instruction | None:
    """iota => 0, where its axis has one element"""
    return full_like(i, 0) if i.dims[i.attrs["iota_dimension"]] == 1 and i.element_type in FUSIBLE else None


@RULES.on("convert")
def convert_of_iota(i: Instruction) -> Instruction | None:
    """convert(iota) => iota of the other type, where both types hold every index exactly"""
    x = i.operands[0]
    if x.opcode != "iota":
        return None
    last = x.dims[x.attrs["iota_dimension"]] - 1
    if last > min(_largest_exact(x.element_type), _largest_exact(i.element_type)):
        return None
    return Instruction("iota", i.shape, attrs=x.attrs)


def _largest_exact(element_type: str) -> int:
    if element_type in FLOATS:
        return {"f16": 2 ** 11, "bf16": 2 ** 8, "f32": 2 ** 24, "f64": 2 ** 53}[element_type]
    if element_type in INTEGERS:
        bits = int(element_type[1:])
        return 2 ** (bits - 1 if element_type in SIGNED else bits) - 1
    return -1
