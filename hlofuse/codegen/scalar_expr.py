"""The C++ expression of one element of an element-wise instruction, from the opcode table and the prelude.

Values in kernels have the C types of `c_type`; bf16 and f16 are computed in float, always holding a value that the type
can represent, so every operation on them rounds (`round_bf16(a + b)`). The text is the same in every dialect.
"""
from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hlofuse.hlo.module import Instruction
from hlofuse.hlo.opcode import OPCODES, Kind
from hlofuse.hlo.shape import COMPLEX, FUSIBLE, INTEGERS, Shape
from hlofuse.hlo.shape_rules import type_class

_HALVES = frozenset({"bf16", "f16"})
_C_TYPES = {"pred": "bool", "f16": "float", "bf16": "float", "f32": "float", "f64": "double"}
_BITS = {"s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64,
         "f16": 16, "bf16": 16, "f32": 32, "f64": 64}
_INT_SUFFIX = {"s32": "", "u32": "u", "s64": "ll", "u64": "ull"}

# Results that a 16-bit float type represents whenever it represents the operands.
_EXACT = frozenset({"abs", "negate", "sign", "floor", "ceil", "round-nearest-even", "round-nearest-afz", "maximum",
                    "minimum", "select", "clamp", "remainder", "real"})
# What the prelude has for real numbers only.
_NOT_COMPLEX = frozenset({"atan2", "asin", "acos", "asinh", "acosh", "atanh"})
_NARROW_BITWISE = frozenset({"and", "or", "xor", "not"})  # C promotes narrow integers to int
_COMPARISONS = {"EQ": "==", "NE": "!=", "LT": "<", "LE": "<=", "GT": ">", "GE": ">="}


class NoScalarExpr(TypeError):
    """An instruction that no kernel can compute element by element; it runs through JAX instead."""


def c_type(element_type: str) -> str:
    """The type of a value in a kernel; bf16 and f16 are held in float."""
    return _C_TYPES.get(element_type, element_type)


def storage_type(element_type: str) -> str:
    """The type of an array's elements in memory."""
    if element_type == "pred":
        return "u8"  # g++ makes vectors of comparisons of bytes, but not of loads of bool
    return element_type if element_type in _HALVES else c_type(element_type)


def load_expr(element: str, element_type: str) -> str:
    """The value of an element that lies in memory."""
    if element_type == "pred":
        return f"{element} != 0"
    return f"to_float({element})" if element_type in _HALVES else element


def store_expr(value: str, element_type: str) -> str:
    """What to write to memory for a value."""
    return f"pack_{element_type}({value})" if element_type in _HALVES else value


def has_scalar_expr(instruction: Instruction) -> bool:
    """Whether `scalar_expr` can spell this instruction."""
    opcode, shape = instruction.opcode, instruction.shape
    if OPCODES[opcode].kind is not Kind.ELEMENTWISE or not isinstance(shape, Shape):
        return False
    types = [shape.element_type, *(o.element_type if isinstance(o.shape, Shape) else "" for o in instruction.operands)]
    if not FUSIBLE.issuperset(types):
        return False
    if opcode == "bitcast-convert":
        source, target = types[1], types[0]
        return source == target or _BITS.get(source, -1) == _BITS.get(target, -2)
    if opcode == "compare" and types[1] in COMPLEX:
        return instruction.attrs["direction"] in ("EQ", "NE")
    return opcode not in _NOT_COMPLEX or types[0] not in COMPLEX


def scalar_expr(instruction: Instruction, operand_exprs: Sequence[str], operand_types: Sequence[str]) -> str:
    """The C++ expression of an element from its operands' expressions; `operand_types` are HLO element types."""
    if not has_scalar_expr(instruction):
        raise NoScalarExpr(f"{instruction!r} has no scalar expression")
    element_type = instruction.element_type
    spell = _SPELLINGS.get(instruction.opcode)
    if spell is not None:
        return spell(instruction, operand_exprs, operand_types)
    expr = _fill(_template(instruction.opcode, operand_types[-1]), operand_exprs)
    if element_type in _HALVES and instruction.opcode not in _EXACT:
        return f"round_{element_type}({expr})"
    if instruction.opcode in _NARROW_BITWISE and _BITS.get(element_type, 32) < 32:
        return f"({element_type})({expr})"
    return expr


def convert_expr(source: str, target: str, operand: str) -> str:
    """HLO's `convert` of a value: floats to integers toward zero and saturating, complex numbers by their real part."""
    if source == target:
        return operand
    kind, wanted = type_class(source), type_class(target)
    if wanted == "c":
        part = "f32" if target == "c64" else "f64"
        if kind == "c":
            return f"make_complex(({c_type(part)}){_atom(operand)}.re, ({c_type(part)}){_atom(operand)}.im)"
        return f"make_complex({convert_expr(source, part, operand)}, {literal_expr(0, part)})"
    if kind == "c":
        return convert_expr("f32" if source == "c64" else "f64", target, f"{_atom(operand)}.re")
    if wanted == "p":
        return f"{_atom(operand)} != {literal_expr(0, source)}"
    if wanted == "i":
        return f"to_int<{target}>({operand})" if kind == "f" else f"({target}){_atom(operand)}"
    if kind == "p" and wanted == "f":
        return f"{_atom(operand)} ? {literal_expr(1, target)} : {literal_expr(0, target)}"
    if source == "f64" and target == "f16":
        return f"round_f16({operand})"
    real = operand if source in ("f32", *_HALVES) and target != "f64" else f"({c_type(target)}){_atom(operand)}"
    if target in _HALVES and source not in ("s8", "u8"):
        return f"round_{target}({real})"
    return real


def literal_expr(value: Any, element_type: str) -> str:
    """A constant of the element's C type, that the compiler reads back as the same bits (NaN apart)."""
    kind = type_class(element_type)
    if kind == "p":
        return "true" if value else "false"
    if kind == "i":
        return _int_literal(int(value), element_type)
    if kind == "c":
        part = "f32" if element_type == "c64" else "f64"
        number = np.complex128(value)
        return f"make_complex({literal_expr(number.real, part)}, {literal_expr(number.imag, part)})"
    return _float_literal(value, double=element_type == "f64")


def _int_literal(value: int, element_type: str) -> str:
    if element_type not in _INT_SUFFIX:
        return f"({element_type}){value}"
    if element_type in ("s32", "s64") and value == -(1 << (_BITS[element_type] - 1)):
        return f"({value + 1}{_INT_SUFFIX[element_type]} - 1)"  # C reads the digits first, and they do not fit
    return f"{value}{_INT_SUFFIX[element_type]}"


def _float_literal(value: Any, double: bool) -> str:
    """Shortest digits that read back as the same number."""
    number = np.float64(value) if double else np.float32(value)
    letter = "D" if double else "F"
    if np.isnan(number):
        return f"NAN_{letter}"
    if np.isinf(number):
        return f"{'-' if number < 0 else ''}INF_{letter}"
    return str(number) + ("" if double else "f")


def _compare(instruction: Instruction, exprs: Sequence[str], types: Sequence[str]) -> str:
    left, right = exprs
    operator = _COMPARISONS[instruction.attrs["direction"]]
    if instruction.attrs.get("type") == "TOTALORDER" and type_class(types[0]) == "f":
        return f"total_order({left}) {operator} total_order({right})"
    return f"{_atom(left)} {operator} {_atom(right)}"


def _convert(instruction: Instruction, exprs: Sequence[str], types: Sequence[str]) -> str:
    return convert_expr(types[0], instruction.element_type, exprs[0])


def _bitcast_convert(instruction: Instruction, exprs: Sequence[str], types: Sequence[str]) -> str:
    """Through the unsigned integer of the width: floats are unpacked from it and packed into it."""
    source, target, bits = types[0], instruction.element_type, exprs[0]
    if source == target:
        return bits
    if source in _HALVES:
        bits = f"pack_{source}({bits}).bits"
    elif source in ("f32", "f64"):
        bits = f"bits_of({bits})"
    if target in _HALVES:
        return f"to_float({target}{{(u16){_atom(bits)}}})"
    if target in ("f32", "f64"):
        return f"{'float' if target == 'f32' else 'double'}_of_bits({bits})"
    return f"({target}){_atom(bits)}"


def _reduce_precision(instruction: Instruction, exprs: Sequence[str], types: Sequence[str]) -> str:
    exponent, mantissa = instruction.attrs["exponent_bits"], instruction.attrs["mantissa_bits"]
    if types[0] == "f16" and exponent >= 5:
        exponent = 8  # f16's own exponents all stay, its subnormals too
    return f"reduce_precision<{exponent}, {mantissa}>({exprs[0]})"


_SPELLINGS: dict[str, Callable[[Instruction, Sequence[str], Sequence[str]], str]] = {
    "compare": _compare,
    "convert": _convert,
    "bitcast-convert": _bitcast_convert,
    "reduce-precision": _reduce_precision,
}


@functools.cache
def _template(opcode: str, element_type: str) -> str:
    row = OPCODES[opcode]
    if element_type in INTEGERS and row.int_expr:
        return row.int_expr
    if element_type == "pred" and row.pred_expr:
        return row.pred_expr
    return row.expr


_CALL = re.compile(r"\w+\(\{0\}(, \{\d\})*\)")
_ATOM = re.compile(r"[A-Za-z_][\w.]*|\d[\w.]*([eE][+-]?\d+f?)?")
_CALLED = re.compile(r"[A-Za-z_]\w*(<[\w, ]*>)?[(\[{]")


def _fill(template: str, exprs: Sequence[str]) -> str:
    """Puts operands into a template, in parentheses where it is more than one function call."""
    if _CALL.fullmatch(template):
        return template.format(*exprs)
    return template.format(*map(_atom, exprs))


def _atom(expr: str) -> str:
    """The expression as an operand of any operator."""
    if _ATOM.fullmatch(expr) or _is_one_bracket(expr):
        return expr
    return f"({expr})"


def _is_one_bracket(expr: str) -> bool:
    """Whether this is f(…), x[…] or (…), closed by its very last character."""
    opening = _CALLED.match(expr) or re.match(r"\(", expr)
    if opening is None:
        return False
    depth = 0
    for position in range(opening.end() - 1, len(expr)):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(expr[position], 0)
        if depth == 0:
            return position == len(expr) - 1
    return False
