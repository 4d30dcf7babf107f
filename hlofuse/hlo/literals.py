"""Literals in HLO text: `{ {1, 2.5}, {-inf, nan} }` and back, every bit kept (-0.0, NaN payloads, sub-byte types)."""
from __future__ import annotations

import re
from typing import Any

import numpy as np

from hlofuse.hlo.shape import COMPLEX, Shape, dtype_of

# Mantissa bits of the types whose NaNs can differ in more than the sign.
_MANTISSA_BITS = {"f16": 10, "bf16": 7, "f32": 23, "f64": 52, "f8e5m2": 2, "f8e4m3": 3, "f8e3m4": 4}
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

_TOKEN = re.compile(r"\((?P<pair>[^()]*)\)|(?P<scalar>-?nan\(0x[0-9a-fA-F]+\)|[^\s,{}()]+)")
_NAN = re.compile(r"(-?)nan\(0x([0-9a-fA-F]+)\)")


class LiteralError(ValueError):
    """A malformed literal; `offset` is where in the text."""

    def __init__(self, message: str, offset: int = 0):
        super().__init__(message)
        self.offset = offset


def format_literal(literal: np.ndarray, element_type: str) -> str:
    """The text between the parentheses of `constant(...)`."""
    flat = literal.reshape(-1)
    if element_type == "pred":
        items = ["true" if v else "false" for v in flat.tolist()]
    elif element_type in COMPLEX:
        part = "f32" if element_type == "c64" else "f64"
        items = [f"({_number(v.real, part)}, {_number(v.imag, part)})" for v in flat]
    elif element_type.startswith(("s", "u")):
        items = [str(int(v)) for v in flat]
    else:
        items = [_number(v, element_type) for v in flat]
    return items[0] if not literal.shape else _nested(items, literal.shape)


def _nested(items: list[str], dims: tuple[int, ...]) -> str:
    """Braces around the items, innermost axis first."""
    for axis in range(len(dims) - 1, -1, -1):
        size, count = dims[axis], int(np.prod(dims[:axis], dtype=np.int64))
        opening, closing = ("{", "}") if axis == len(dims) - 1 else ("{ ", " }")
        items = [opening + ", ".join(items[k * size:(k + 1) * size]) + closing for k in range(count)]
    return items[0]


def _number(value: Any, element_type: str) -> str:
    if value != value:
        return _nan(value, element_type)
    if value == 0:
        return "-0.0" if np.signbit(value) else "0"  # XLA reads -0 as +0
    return str(value).removesuffix(".0")


def _nan(value: Any, element_type: str) -> str:
    bits = int(np.asarray(value, dtype_of(element_type)).view(_BITS[dtype_of(element_type).itemsize]))
    sign = "-" if bits >> (8 * dtype_of(element_type).itemsize - 1) and element_type != "f8e8m0fnu" else ""
    mantissa_bits = _MANTISSA_BITS.get(element_type)
    if mantissa_bits is None:
        return sign + "nan"
    payload = bits & ((1 << mantissa_bits) - 1)
    return sign + ("nan" if payload == 1 << (mantissa_bits - 1) else f"nan({payload:#x})")


def has_nan_real_part(literal: np.ndarray) -> bool:
    """XLA's parser reads `(nan, 0)` as `(nan, nan)`: such a literal needs another way of writing."""
    return literal.dtype.kind == "c" and bool(np.isnan(literal.real).any())


def parse_literal(text: str, shape: Shape) -> np.ndarray:
    """The array that `text` (from between the parentheses of `constant(...)`) denotes."""
    if "..." in text:
        raise LiteralError("the values of this constant were left out when the text was written ('{...}') and cannot "
                           "be recovered: write the text with large constants in full", text.index("..."))
    _check_braces(text, shape)
    tokens = [match[0] for match in _TOKEN.finditer(text)]
    if len(tokens) != shape.size:
        raise LiteralError(f"{shape} has {shape.size} element(s), the literal has {len(tokens)}")
    try:
        return _values(tokens, shape.element_type).reshape(shape.dims)
    except (ValueError, OverflowError):
        raise _bad_token(text, shape.element_type) from None


def _check_braces(text: str, shape: Shape) -> None:
    depth = deepest = 0
    for match in re.finditer(r"[{}]", text):
        depth += 1 if match[0] == "{" else -1
        deepest = max(deepest, depth)
        if depth < 0:
            raise LiteralError("'}' closes nothing", match.start())
    if depth:
        raise LiteralError(f"{depth} '{{' of this literal are not closed")
    if deepest > shape.rank or (deepest != shape.rank and shape.size and shape.rank):
        raise LiteralError(f"{shape} needs {shape.rank} level(s) of braces, the literal has {deepest}")


def _values(tokens: list[str], element_type: str) -> np.ndarray:
    dtype = dtype_of(element_type)
    if element_type == "pred":
        words = {"true": True, "false": False, "1": True, "0": False}
        if not all(token in words for token in tokens):
            raise ValueError
        return np.array([words[token] for token in tokens], np.bool_)
    if element_type in COMPLEX:
        part = "f32" if element_type == "c64" else "f64"
        pairs = [token[1:-1].split(",") for token in tokens]
        if any(len(pair) != 2 for pair in pairs):
            raise ValueError
        result = np.empty(len(tokens), dtype)
        result.real = _values([pair[0].strip() for pair in pairs], part)
        result.imag = _values([pair[1].strip() for pair in pairs], part)
        return result
    if element_type.startswith(("s", "u")):
        return _integers([int(token) for token in tokens], element_type)
    if any("(" in token for token in tokens):
        return np.array([_parse_nan(token, element_type) if "(" in token else dtype.type(float(token))
                         for token in tokens], dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.array([float(token) for token in tokens], np.float64).astype(dtype)


def _integers(values: list[int], element_type: str) -> np.ndarray:
    bits = int(element_type[1:])
    low, high = (0, 2**bits) if element_type[0] == "u" else (-2**(bits - 1), 2**(bits - 1))
    if any(not low <= value < high for value in values):
        raise OverflowError
    return np.array(values, np.uint64 if element_type[0] == "u" else np.int64).astype(dtype_of(element_type))


def _parse_nan(token: str, element_type: str) -> Any:
    match = _NAN.fullmatch(token)
    if match is None or element_type not in _MANTISSA_BITS:
        raise ValueError(token)
    dtype = dtype_of(element_type)
    width, mantissa_bits = 8 * dtype.itemsize, _MANTISSA_BITS[element_type]
    exponent = ((1 << (width - 1 - mantissa_bits)) - 1) << mantissa_bits
    bits = exponent | int(match[2], 16) | ((1 << (width - 1)) if match[1] else 0)
    return np.array(bits, _BITS[dtype.itemsize]).view(dtype)[()]


def _bad_token(text: str, element_type: str) -> LiteralError:
    for match in _TOKEN.finditer(text):
        try:
            _values([match[0]], element_type)
        except (ValueError, OverflowError):
            return LiteralError(f"{match[0]!r} is not a value of type {element_type}", match.start())
    return LiteralError(f"not a literal of type {element_type}")
