"""Module, Computation, Instruction: the HLO graph.

Nodes are frozen and compared by identity; a rewrite makes new nodes and shares the rest. Names are hints: printing
gives the unique ones in post-order, so that text is stable. Instructions of a computation are what its root reaches
(and its `effects`, which stay whether or not the root reads them), in post-order.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from hlofuse.hlo.shape import AnyShape, Shape, TupleShape

NO_ATTRS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Metadata:
    """Where an instruction comes from: JAX's name stack and the user's source line."""

    op_type: str = ""
    op_name: str = ""
    source_file: str = ""
    source_line: int = 0


NO_METADATA = Metadata()


@dataclass(frozen=True, slots=True)
class WindowDimension:
    """One dimension of a `window={...}` attribute, in XLA's terms."""

    size: int
    stride: int = 1
    pad_low: int = 0
    pad_high: int = 0
    lhs_dilate: int = 1
    rhs_dilate: int = 1
    reversed: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class Instruction:
    """One HLO instruction. `attrs` holds XLA's attributes under XLA's names (see hlo/opcode.py for each one's type)."""

    opcode: str
    shape: AnyShape
    operands: tuple[Instruction, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=lambda: NO_ATTRS)
    name: str = ""
    metadata: Metadata = NO_METADATA
    control: tuple[Instruction, ...] = ()  # control-predecessors

    @property
    def array(self) -> Shape:
        """The shape of an instruction that has one array as its result."""
        assert isinstance(self.shape, Shape), f"{self.opcode} has a tuple shape"
        return self.shape

    @property
    def dims(self) -> tuple[int, ...]:
        return self.array.dims

    @property
    def element_type(self) -> str:
        return self.array.element_type

    @property
    def literal(self) -> np.ndarray:
        """The value of a `constant`."""
        return self.attrs["literal"]

    @property
    def called(self) -> tuple[Computation, ...]:
        """The computations that this instruction calls, in attribute order."""
        found: list[Computation] = []
        for value in self.attrs.values():
            if isinstance(value, Computation):
                found.append(value)
            elif isinstance(value, tuple) and value and isinstance(value[0], Computation):
                found.extend(value)
        return tuple(found)

    @property
    def result_shapes(self) -> tuple[Shape, ...]:
        """The array shapes of the result, one for an array, several for a flat tuple."""
        if isinstance(self.shape, TupleShape):
            return tuple(s for s in self.shape.elements if isinstance(s, Shape))
        return (self.shape,)

    def __repr__(self) -> str:
        operands = ", ".join(o.name or o.opcode for o in self.operands)
        return f"<{self.name or '_'} = {self.shape} {self.opcode}({operands})>"


@dataclass(frozen=True, eq=False)
class Computation:
    """A named function: parameters and a root; several results are a `tuple` root."""

    name: str
    parameters: tuple[Instruction, ...]
    root: Instruction
    effects: tuple[Instruction, ...] = ()

    @cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        """Every instruction, operands before users; all parameters first, read or not."""
        return tuple(post_order((*self.parameters, *self.effects, self.root)))

    @property
    def outputs(self) -> tuple[Instruction, ...]:
        """The results: the operands of a tuple root, or the root itself."""
        return self.root.operands if self.root.opcode == "tuple" else (self.root,)

    @cached_property
    def users(self) -> dict[Instruction, tuple[Instruction, ...]]:
        """For each instruction its readers, each once, in post-order."""
        users: dict[Instruction, list[Instruction]] = {i: [] for i in self.instructions}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                users[operand].append(instruction)
        return {i: tuple(u) for i, u in users.items()}

    def __repr__(self) -> str:
        return f"<computation {self.name}>"


@dataclass(frozen=True, eq=False)
class Module:
    """A whole program: the entry computation and everything it calls."""

    name: str
    entry: Computation

    @cached_property
    def computations(self) -> tuple[Computation, ...]:
        """Every reachable computation once, called before callers, the entry last."""
        done: dict[Computation, None] = {}
        stack: list[tuple[Computation, Iterator[Computation]]] = [(self.entry, _callees(self.entry))]
        on_stack = {self.entry}
        while stack:
            computation, callees = stack[-1]
            for callee in callees:
                if callee not in done and callee not in on_stack:
                    on_stack.add(callee)
                    stack.append((callee, _callees(callee)))
                    break
            else:
                stack.pop()
                done[computation] = None
        return tuple(done)


def _callees(computation: Computation) -> Iterator[Computation]:
    for instruction in computation.instructions:
        if instruction.attrs:
            yield from instruction.called


def post_order(roots: tuple[Instruction, ...]) -> list[Instruction]:
    """Every instruction that `roots` reach, operands (and control predecessors) first; iterative."""
    done: set[Instruction] = set()
    order: list[Instruction] = []
    for root in roots:
        stack = [root]
        while stack:
            instruction = stack[-1]
            if instruction in done:
                stack.pop()
                continue
            pending = [o for o in instruction.operands if o not in done]
            if instruction.control:
                pending += [c for c in instruction.control if c not in done]
            if pending:
                stack.extend(reversed(pending))
                continue
            stack.pop()
            done.add(instruction)
            order.append(instruction)
    return order
