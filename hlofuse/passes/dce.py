"""Drops results that nobody reads: loop carries, branch results, outputs of variadic reduce and sort, barrier elements.

An instruction without readers is gone by itself, because a computation is what its root and effects reach; what is left
to do is inside tuples. One backward walk finds which elements are read, one forward walk makes the narrower
instructions. Effects and parameters stay. A loop carry that never changes is read from before the loop.
"""
from __future__ import annotations

from collections.abc import Iterable

from hlofuse.hlo.builder import make, tuple_of
from hlofuse.hlo.module import Computation, Instruction, Module
from hlofuse.hlo.traverse import rebuild_module, with_changes
from hlofuse.passes.narrowing import (
    ELEMENT_BY_ELEMENT,
    NARROWERS,
    Elements,
    Memo,
    invariant_carries,
    is_narrowable,
    kept_operands,
    width,
)


def dce(module: Module) -> Module:
    memo = Memo()
    new: dict[Computation, Computation] = {}
    # Callers first: a loop in a loop loses its carries once the outer one has lost those that it feeds.
    pending, seen = [module.entry], {module.entry}
    while pending:
        computation = pending.pop()
        live = _with_live_results(computation, memo)
        if live is not computation:
            new[computation] = live
        for callee in (c for i in live.instructions if i.attrs for c in i.called):
            if callee not in seen:
                seen.add(callee)
                pending.append(callee)
    return rebuild_module(module, new) if new else module


def _with_live_results(computation: Computation, memo: Memo) -> Computation:
    if not any(i.opcode in NARROWERS and width(i) for i in computation.instructions):
        return computation
    reads = _Reads(computation)
    if not any(len(elements) < width(i) for i, elements in reads.elements.items()) and not reads.passed_by:
        return computation
    return _Narrowing(reads, memo).result(computation)


class _Reads:
    """Which elements of each tuple are read, and which instructions at all; found backwards from the root."""

    def __init__(self, computation: Computation) -> None:
        self.elements: dict[Instruction, set[int]] = {}  # of live instructions; empty for arrays
        self.narrowable: set[Instruction] = set()
        self.invariants: dict[Instruction, Elements] = {}
        self.passed_by = False  # whether an element is read from before a loop instead of behind it
        effects = set(computation.effects)
        for i in computation.instructions:
            if is_narrowable(i) and i not in effects:
                self.narrowable.add(i)
            if i.opcode == "while":
                self.invariants[i] = invariant_carries(i)
        for end in (computation.root, *computation.effects):
            self.demand(end, range(width(end)))
        for i in reversed(computation.instructions):
            if i in self.elements:
                self.demand_operands(i)

    def demand(self, i: Instruction, elements: Iterable[int]) -> None:
        everything = range(width(i)) if i not in self.narrowable else elements
        self.elements.setdefault(i, set()).update(everything)

    def demand_operands(self, i: Instruction) -> None:
        for c in i.control:
            self.demand(c, range(width(c)))
        if i.opcode == "get-tuple-element":
            self.demand_element(i.operands[0], i.attrs["index"])
            return
        if i not in self.narrowable:
            for o in i.operands:
                self.demand(o, range(width(o)))
            return
        live = NARROWERS[i.opcode].needs(i, frozenset(self.elements[i]))
        self.elements[i] |= live
        if i.opcode in ELEMENT_BY_ELEMENT:
            for k in live:
                self.demand_element(i.operands[0], k)
            return
        for o in kept_operands(i, tuple(sorted(live))):
            self.demand(o, range(width(o)))

    def demand_element(self, i: Instruction, k: int) -> None:
        """Element k of a tuple: looks through `tuple`, and past a loop that does not change it."""
        while True:
            if i.opcode == "tuple":
                return self.demand(i.operands[k], range(width(i.operands[k])))
            if i.opcode != "while" or k not in self.invariants[i]:
                return self.demand(i, (k,))
            self.passed_by = True
            i = i.operands[0]


class _Narrowing:
    """The forward walk."""

    def __init__(self, reads: _Reads, memo: Memo) -> None:
        self.reads = reads
        self.memo = memo
        self.new: dict[Instruction, Instruction] = {}
        self.kept: dict[Instruction, tuple[int, ...]] = {}
        self.elements: dict[tuple[Instruction, int], Instruction] = {}

    def result(self, computation: Computation) -> Computation:
        for i in computation.instructions:
            if i in self.reads.elements:
                self.new[i] = self.renewed(i)
        return Computation(computation.name, computation.parameters, self.new[computation.root],
                           tuple(self.new[e] for e in computation.effects))

    def renewed(self, i: Instruction) -> Instruction:
        if i.opcode == "get-tuple-element":
            found = self.element(i.operands[0], i.attrs["index"])
            is_same = found.opcode == i.opcode and found.operands == i.operands and found.attrs["index"] == i.attrs[
                "index"]
            return i if is_same else found
        live = self.reads.elements[i]
        if i in self.reads.narrowable and len(live) < width(i):
            kept = self.kept[i] = tuple(sorted(live))
            if i.opcode in ELEMENT_BY_ELEMENT:
                operands = [self.element(i.operands[0], k) for k in kept]
            else:
                operands = [self.new[o] for o in kept_operands(i, kept)]
            return NARROWERS[i.opcode].narrow(i, kept, operands, self.memo)
        operands = [self.operand(o) for o in i.operands]
        control = [self.new[c] for c in i.control]
        if tuple(operands) == i.operands and tuple(control) == i.control:
            return i
        return with_changes(i, operands=operands, control=control)

    def operand(self, i: Instruction) -> Instruction:
        """The whole of an operand; a tuple that only loops read, element by element, is made again if it changed."""
        if i in self.new and i not in self.kept:
            return self.new[i]
        elements = tuple(self.element(i, k) for k in range(width(i)))
        return i if i.opcode == "tuple" and elements == i.operands else tuple_of(elements)

    def element(self, i: Instruction, k: int) -> Instruction:
        """What element k of the old tuple is now."""
        while i.opcode == "while" and k in self.reads.invariants[i]:
            i = i.operands[0]
        if i.opcode == "tuple":
            return self.new[i.operands[k]]
        source = self.new[i]
        kept = self.kept.get(i)
        if kept is not None:
            if width(source) == 0:
                return source
            k = kept.index(k)
        if (source, k) not in self.elements:
            self.elements[source, k] = make("get-tuple-element", source, index=k)
        return self.elements[source, k]
