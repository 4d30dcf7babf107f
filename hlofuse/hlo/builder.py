"""Makes instructions: `make("add", x, y)` with the shape from the opcode's rule, or given.

The functions at the end spell the few instructions that passes and rules build all the time.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from hlofuse.hlo.module import NO_ATTRS, NO_METADATA, Computation, Instruction, Metadata
from hlofuse.hlo.opcode import infer_shape
from hlofuse.hlo.shape import AnyShape, Shape, TupleShape, element_type_of


def make(opcode: str, *operands: Instruction, shape: AnyShape | None = None, name: str = "",
         metadata: Metadata = NO_METADATA, **attrs: Any) -> Instruction:
    """An instruction; its shape follows from the opcode's rule unless it is given."""
    frozen: Mapping[str, Any] = MappingProxyType(attrs) if attrs else NO_ATTRS
    if shape is None:
        shape = infer_shape(opcode, tuple(o.shape for o in operands), frozen)
    return Instruction(opcode, shape, operands, frozen, name, metadata)


def with_operands(instruction: Instruction, operands: Sequence[Instruction]) -> Instruction:
    """The same instruction on other operands of the same shapes; itself if they are the same."""
    if tuple(operands) == instruction.operands:
        return instruction
    return Instruction(instruction.opcode, instruction.shape, tuple(operands), instruction.attrs, instruction.name,
                       instruction.metadata, instruction.control)


def parameter(number: int, shape: AnyShape, name: str = "") -> Instruction:
    return make("parameter", shape=shape, name=name or f"p{number}", parameter_number=number)


def constant(value: Any, element_type: str | None = None, metadata: Metadata = NO_METADATA) -> Instruction:
    """A literal; `element_type` converts it."""
    literal = np.asarray(value) if element_type is None else np.asarray(value, Shape(element_type).dtype)
    shape = Shape(element_type or element_type_of(literal.dtype), literal.shape)
    return make("constant", shape=shape, literal=literal, metadata=metadata)


def broadcast(operand: Instruction, dims: Sequence[int], dimensions: Sequence[int] = (),
              metadata: Metadata = NO_METADATA) -> Instruction:
    """Axis i of the operand becomes axis `dimensions[i]` of the result, the other axes repeat."""
    return make("broadcast", operand, shape=operand.array.with_dims(dims), dimensions=tuple(dimensions),
                metadata=metadata)


def full(value: Any, shape: Shape) -> Instruction:
    """A scalar constant, broadcast to `shape` where it is not a scalar."""
    scalar = constant(value, shape.element_type)
    return broadcast(scalar, shape.dims) if shape.dims else scalar


def reshape(operand: Instruction, dims: Sequence[int], metadata: Metadata = NO_METADATA) -> Instruction:
    if tuple(dims) == operand.dims:
        return operand
    return make("reshape", operand, shape=operand.array.with_dims(dims), metadata=metadata)


def convert(operand: Instruction, element_type: str, metadata: Metadata = NO_METADATA) -> Instruction:
    if element_type == operand.element_type:
        return operand
    return make("convert", operand, shape=operand.array.with_type(element_type), metadata=metadata)


def tuple_of(operands: Sequence[Instruction]) -> Instruction:
    return make("tuple", *operands, shape=TupleShape(tuple(o.shape for o in operands)))


def element_of(operand: Instruction, index: int) -> Instruction:
    """`get-tuple-element`, or the tuple's own operand where it is at hand."""
    if operand.opcode == "tuple":
        return operand.operands[index]
    assert isinstance(operand.shape, TupleShape)
    return make("get-tuple-element", operand, shape=operand.shape.elements[index], index=index)


def computation(name: str, parameters: Sequence[Instruction], root: Instruction,
                effects: Sequence[Instruction] = ()) -> Computation:
    return Computation(name, tuple(parameters), root, tuple(effects))
