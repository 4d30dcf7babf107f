"""What is known of an instruction's value without computing it: uniform constants and integer ranges.

Rules ask these; every answer holds for all inputs. Zeros are told apart by their sign, as the rules need it.
"""
from __future__ import annotations

import math
from typing import Any

import numpy as np

from hlofuse.hlo.builder import full
from hlofuse.hlo.module import Instruction
from hlofuse.hlo.shape import INTEGERS, Shape, dtype_of

_RANGE_DEPTH = 8
_MOVES = frozenset({"broadcast", "reshape", "transpose", "slice", "reverse", "copy", "dynamic-slice", "gather"})

Range = tuple[int, int]


def scalar_source(instruction: Instruction) -> Instruction | None:
    """The scalar that every element of the instruction equals: itself if it is one, or what it broadcasts."""
    if instruction.opcode == "broadcast" and instruction.operands[0].shape.__class__ is Shape \
            and not instruction.operands[0].dims:
        return instruction.operands[0]
    return instruction if isinstance(instruction.shape, Shape) and not instruction.shape.dims else None


def uniform_value(instruction: Instruction) -> Any:
    """The NumPy scalar that every element equals, if it is a constant; else `None`."""
    if instruction.opcode == "broadcast":
        instruction = instruction.operands[0]
    if instruction.opcode != "constant":
        return None
    literal = instruction.literal
    return literal.reshape(())[()] if literal.size == 1 else None


def is_constant_like(instruction: Instruction) -> bool:
    """A literal, or a broadcast of one."""
    if instruction.opcode == "broadcast":
        instruction = instruction.operands[0]
    return instruction.opcode == "constant"


def same_number(value: Any, number: complex) -> bool:
    """Equal, with equal signs of zero; complex values in both parts (a real `number` is what both are)."""
    if value != number:
        return False
    if number != 0 or not np.iscomplexobj(value):
        return number != 0 or _negative(value) == _negative(number)
    real, imaginary = (number.real, number.imag) if np.iscomplexobj(number) else (number, number)
    return _negative(value.real) == _negative(real) and _negative(value.imag) == _negative(imaginary)


def _negative(value: Any) -> bool:
    return math.copysign(1.0, float(value)) < 0


def is_exactly(instruction: Instruction, number: float) -> bool:
    """Every element is the constant `number`; 0.0 and -0.0 differ."""
    value = uniform_value(instruction)
    return value is not None and same_number(value, number)


def all_ones(element_type: str) -> Any:
    """The identity of `and`: every bit set."""
    dtype = dtype_of(element_type)
    return np.bool_(True) if element_type == "pred" else np.invert(dtype.type(0))


def is_integral(instruction: Instruction) -> bool:
    """An array of integers or of truth values."""
    return instruction.element_type in INTEGERS or instruction.element_type == "pred"


def full_like(instruction: Instruction, value: Any) -> Instruction:
    """`value` in the shape of the instruction, as a broadcast scalar."""
    return full(value, instruction.array)


def integer_range(instruction: Instruction, depth: int = _RANGE_DEPTH) -> Range | None:
    """Bounds (inclusive) that every element of an integer array stays in, from the instructions above it.

    `None` where nothing better than the type's own range is known.
    """
    if not isinstance(instruction.shape, Shape) or instruction.element_type not in INTEGERS or depth == 0:
        return None
    opcode, operands = instruction.opcode, instruction.operands
    if opcode == "constant":
        literal = instruction.literal
        return (int(literal.min()), int(literal.max())) if 0 < literal.size <= 1024 else None
    if opcode == "iota":
        last = instruction.dims[instruction.attrs["iota_dimension"]] - 1
        return (0, last) if last <= np.iinfo(instruction.array.dtype).max else None
    if opcode in _MOVES:
        return integer_range(operands[0], depth - 1)
    if opcode == "convert":
        if operands[0].element_type == "pred":
            return (0, 1)
        return _fitting(integer_range(operands[0], depth - 1), instruction)
    if opcode == "select":
        return _hull(*(integer_range(o, depth - 1) for o in operands[1:]))
    if opcode in ("add", "subtract", "multiply"):
        ranges = [integer_range(o, depth - 1) for o in operands]
        return _fitting(_ARITHMETIC[opcode](*ranges), instruction) if None not in ranges else None
    if opcode in ("clamp", "minimum", "maximum"):
        return _bounded(instruction, depth)
    if opcode == "remainder":
        divisor = integer_range(operands[1], depth - 1)
        value = integer_range(operands[0], depth - 1)
        if divisor is not None and divisor[0] > 0 and value is not None and value[0] >= 0:
            return (0, min(value[1], divisor[1] - 1))
    if opcode == "and":
        masks = [r for r in (integer_range(o, depth - 1) for o in operands) if r is not None and r[0] >= 0]
        return (0, min(r[1] for r in masks)) if masks else None
    return None


_ARITHMETIC: dict[str, Any] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "subtract": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "multiply": lambda a, b: (min(p := (a[0] * b[0], a[0] * b[1], a[1] * b[0], a[1] * b[1])), max(p)),
}


def _limits(instruction: Instruction) -> Range:
    info = np.iinfo(instruction.array.dtype)
    return int(info.min), int(info.max)


def _fitting(found: Range | None, instruction: Instruction) -> Range | None:
    """A range that the type can hold; one that wraps says nothing."""
    low, high = _limits(instruction)
    return found if found is not None and low <= found[0] and found[1] <= high else None


def _hull(a: Range | None, b: Range | None) -> Range | None:
    return None if a is None or b is None else (min(a[0], b[0]), max(a[1], b[1]))


def _bounded(instruction: Instruction, depth: int) -> Range | None:
    """minimum, maximum and clamp: one known operand is enough for one side."""
    whole = _limits(instruction)
    ranges = [integer_range(o, depth - 1) or whole for o in instruction.operands]
    if instruction.opcode == "clamp":
        low, value, high = ranges
        value = (max(low[0], value[0]), max(low[1], value[1]))
        found = (min(value[0], high[0]), min(value[1], high[1]))
    else:
        pick = min if instruction.opcode == "minimum" else max
        found = (pick(ranges[0][0], ranges[1][0]), pick(ranges[0][1], ranges[1][1]))
    return found if found != whole else None
