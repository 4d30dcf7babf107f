"""Conversions that can go: to the same type, there and back without loss, chains that one conversion does."""
from __future__ import annotations

from hlofuse.hlo.builder import convert, make
from hlofuse.hlo.module import Instruction, Module
from hlofuse.hlo.shape import COMPLEX, FLOATS, INTEGERS, SIGNED, Shape
from hlofuse.passes.rewrite import RuleTable, rewrite

RULES = RuleTable()

# Exponent bits and mantissa bits (with the leading one) of the float types.
_FLOAT_BITS = {"f16": (5, 11), "bf16": (8, 8), "f32": (8, 24), "f64": (11, 53)}
_PART_OF = {"c64": "f32", "c128": "f64"}


def cast_simplifier(module: Module) -> Module:
    return rewrite(module, RULES)


def holds_all_of(wide: str, narrow: str) -> bool:
    """Whether every value of the type `narrow` is a value of the type `wide`."""
    if wide == narrow or narrow == "pred":
        return wide == narrow or wide in INTEGERS or wide in FLOATS or wide in COMPLEX
    if wide in COMPLEX:
        return narrow not in COMPLEX and holds_all_of(_PART_OF[wide], narrow) or narrow == "c64" and wide == "c128"
    if narrow in INTEGERS:
        digits = int(narrow[1:]) - (narrow in SIGNED)
        if wide in INTEGERS:
            return (wide in SIGNED or narrow not in SIGNED) and int(wide[1:]) - (wide in SIGNED) >= digits
        return wide in FLOATS and _FLOAT_BITS[wide][1] >= digits
    if narrow in FLOATS and wide in FLOATS:
        return all(w >= n for w, n in zip(_FLOAT_BITS[wide], _FLOAT_BITS[narrow], strict=True))
    return False


@RULES.on("convert", "bitcast-convert")
def same_type(i: Instruction) -> Instruction | None:
    """convert(x) => x, of x's own type"""
    return i.operands[0] if i.operands[0].shape == i.shape else None


@RULES.on("convert")
def convert_of_convert(i: Instruction) -> Instruction | None:
    """convert(convert(x)) => convert(x), where the type between holds every value of x, or both only cut off bits"""
    inner = i.operands[0]
    if inner.opcode != "convert":
        return None
    source, between, target = inner.operands[0].element_type, inner.element_type, i.element_type
    if holds_all_of(between, source) and not (source in COMPLEX and target not in COMPLEX):
        return convert(inner.operands[0], target)
    if source in INTEGERS and between in INTEGERS and target in INTEGERS \
            and int(source[1:]) >= int(between[1:]) >= int(target[1:]):
        return convert(inner.operands[0], target)
    return None


@RULES.on("bitcast-convert")
def bitcast_of_bitcast(i: Instruction) -> Instruction | None:
    """bitcast-convert(bitcast-convert(x)) => bitcast-convert(x), all of one width"""
    inner = i.operands[0]
    if inner.opcode != "bitcast-convert" or not inner.operands[0].dims == inner.dims == i.dims:
        return None
    x = inner.operands[0]
    return x if x.shape == i.shape else make("bitcast-convert", x, shape=Shape(i.element_type, i.dims))


@RULES.on("reduce-precision")
def full_precision(i: Instruction) -> Instruction | None:
    """reduce-precision(x) => x, with at least the bits of x's type, or of the type that x was converted from"""
    x = i.operands[0]
    kept = (i.attrs["exponent_bits"], i.attrs["mantissa_bits"] + 1)
    types = [x.element_type]
    if x.opcode == "convert" and holds_all_of(x.element_type, x.operands[0].element_type):
        types.append(x.operands[0].element_type)
    enough = any(t in _FLOAT_BITS and all(k >= b for k, b in zip(kept, _FLOAT_BITS[t], strict=True)) for t in types)
    return x if enough else None


@RULES.on("compare")
def compare_of_widened(i: Instruction) -> Instruction | None:
    """compare(convert(x), convert(y)) => compare(x, y), both widened from one type"""
    left, right = i.operands
    if left.opcode != "convert" or right.opcode != "convert" or i.attrs.get("type") == "TOTALORDER":
        return None
    x, y = left.operands[0], right.operands[0]
    if x.shape != y.shape or x.element_type in COMPLEX or not holds_all_of(left.element_type, x.element_type):
        return None
    attrs = {key: value for key, value in i.attrs.items() if key != "type"}
    return make("compare", x, y, **attrs)
