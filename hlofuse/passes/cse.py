"""Merges what computes the same: equal opcode, shape, attributes and operands; constants by their bits.

Equal computations become one object first, so calls and loops compare by what they do. Never merged: opt-barrier (a
wall: what was computed before it and what is computed again behind it stay apart), effects, random numbers, opaque
instructions, and whatever calls one of these.
"""
from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from hlofuse.hlo.module import Computation, Instruction, Module
from hlofuse.hlo.opcode import OPCODES, Kind
from hlofuse.hlo.traverse import map_computations, with_changes

_UNIQUE_OPCODES = frozenset({"parameter", "opt-barrier", "fusion"})


def cse(module: Module) -> Module:
    merger = _Merger()
    return map_computations(module, merger.merged)


class _Merger:
    """Knows, over all computations of a module, which are equal and which may not be merged."""

    def __init__(self) -> None:
        self.known: dict[Hashable, Computation] = {}
        self.unique: set[Computation] = set()  # computations whose calls are never merged

    def merged(self, computation: Computation) -> Computation:
        """The computation without duplicates, or an earlier one that equals it."""
        first: dict[Hashable, Instruction] = {}
        new: dict[Instruction, Instruction] = {}
        position: dict[Instruction, int] = {}
        body: list[Hashable] = []
        effects = set(computation.effects)
        for i in computation.instructions:
            rebuilt = _relinked(i, new)
            mergeable = i not in effects and not i.control and self.is_mergeable(i)
            key = _key(rebuilt) if mergeable else None
            if key is not None:
                rebuilt = first.setdefault(key, rebuilt)
            elif i.opcode != "parameter":
                self.unique.add(computation)
            if rebuilt is not i:
                new[i] = rebuilt
            if rebuilt not in position:
                position[rebuilt] = len(position)
                body.append(_place(rebuilt, key, position))
        if new:
            computation = self.renewed(computation, new)
        if computation in self.unique:
            return computation
        signature = (tuple(body), position[computation.root], tuple(position[p] for p in computation.parameters))
        return self.known.setdefault(signature, computation)

    def renewed(self, computation: Computation, new: Mapping[Instruction, Instruction]) -> Computation:
        made = Computation(computation.name, computation.parameters, new.get(computation.root, computation.root),
                           tuple(new.get(e, e) for e in computation.effects))
        if computation in self.unique:
            self.unique.add(made)
        return made

    def is_mergeable(self, i: Instruction) -> bool:
        row = OPCODES.get(i.opcode)
        if row is None or row.effect or i.opcode in _UNIQUE_OPCODES:
            return False
        if row.kind is Kind.OPAQUE and (i.opcode == "custom-call" or i.opcode.startswith("rng")):
            return False
        return not (i.attrs and any(c in self.unique for c in i.called))


def _relinked(i: Instruction, new: Mapping[Instruction, Instruction]) -> Instruction:
    if not any(o in new for o in i.operands) and not any(c in new for c in i.control):
        return i
    return with_changes(i, operands=[new.get(o, o) for o in i.operands], control=[new.get(c, c) for c in i.control])


def _key(i: Instruction) -> Hashable | None:
    """Equal keys mean equal values; `None` if an attribute cannot be compared."""
    operands = i.operands
    if len(operands) == 2 and OPCODES[i.opcode].commutative and id(operands[0]) > id(operands[1]):
        operands = (operands[1], operands[0])
    try:
        attrs = tuple(sorted((key, _comparable(value)) for key, value in i.attrs.items())) if len(i.attrs) > 1 else \
            tuple((key, _comparable(value)) for key, value in i.attrs.items())
        key = (i.opcode, i.shape, operands, attrs)
        hash(key)
    except TypeError:
        return None
    return key


def _comparable(value: Any) -> Hashable:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.dtype.name, value.shape, value.tobytes())
    return value


def _place(i: Instruction, key: Hashable | None, position: Mapping[Instruction, int]) -> Hashable:
    """The instruction as its computation sees it: operands by their position."""
    if i.opcode == "parameter":
        return ("parameter", i.shape, i.attrs["parameter_number"])
    assert key is None or isinstance(key, tuple)
    attrs = None if key is None else key[3]
    return (i.opcode, i.shape, tuple(position[o] for o in i.operands), attrs)
