"""A loop made anew: with another body, or on another state."""
from __future__ import annotations

from collections.abc import Sequence

from hlofuse.hlo.builder import element_of, make, parameter, tuple_of
from hlofuse.hlo.module import Computation, Instruction
from hlofuse.hlo.shape import TupleShape
from hlofuse.hlo.traverse import clone_computation, with_changes

New = dict[Instruction, Instruction]


def with_body(loop: Instruction, body: Computation, state: Sequence[Instruction] | None = None) -> Instruction:
    """The loop with another body, on another state if one is given."""
    condition = loop.attrs["condition"]
    if state is None:
        return with_changes(loop, attrs={**loop.attrs, "body": body, "condition": clone_computation(condition)})
    shape = TupleShape(tuple(o.shape for o in state))
    old, parameter_ = condition.parameters[0], parameter(0, shape, "state")
    new: New = {old: parameter_}
    for i in condition.instructions:
        if i is not old:
            new[i] = renewed(i, new)
    attrs = {**loop.attrs, "body": body, "condition": Computation(condition.name, (parameter_,), new[condition.root])}
    return make("while", tuple_of(state), shape=shape, name=loop.name, metadata=loop.metadata, **attrs)


def renewed(i: Instruction, new: New) -> Instruction:
    """An instruction of a body on the operands that its own became."""
    operands = [new[o] for o in i.operands]
    if i.opcode == "get-tuple-element":
        return element_of(operands[0], i.attrs["index"])
    return with_changes(i, operands=operands, control=[new[c] for c in i.control])
