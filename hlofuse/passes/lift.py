"""Applies a scalar computation (a reducer, a combiner) to whole arrays, element by element."""
from __future__ import annotations

from collections.abc import Sequence

from hlofuse.hlo.builder import broadcast
from hlofuse.hlo.module import Computation, Instruction
from hlofuse.hlo.opcode import OPCODES, Kind
from hlofuse.hlo.shape import Shape, TupleShape

_LARGEST = 32  # instructions; a larger computation stays a call


def lift(computation: Computation, arguments: Sequence[Instruction], dims: Sequence[int]) -> Instruction | None:
    """The computation's root with arrays of `dims` for its scalars; `None` if it is not all element-wise."""
    if len(computation.instructions) > _LARGEST or computation.effects:
        return None
    new: dict[Instruction, Instruction] = dict(zip(computation.parameters, arguments, strict=True))
    for i in computation.instructions:
        if i in new:
            continue
        lifted = _lifted(i, [new[o] for o in i.operands], tuple(dims))
        if lifted is None:
            return None
        new[i] = lifted
    return new[computation.root]


def _lifted(i: Instruction, operands: list[Instruction], dims: tuple[int, ...]) -> Instruction | None:
    if i.opcode == "tuple":
        return Instruction("tuple", TupleShape(tuple(o.shape for o in operands)), tuple(operands))
    if not isinstance(i.shape, Shape) or i.shape.dims or i.control:
        return None
    if i.opcode == "constant":
        return broadcast(i, dims) if dims else i
    if OPCODES[i.opcode].kind is not Kind.ELEMENTWISE:
        return None
    return Instruction(i.opcode, i.shape.with_dims(dims), tuple(operands), i.attrs, i.name, i.metadata)
