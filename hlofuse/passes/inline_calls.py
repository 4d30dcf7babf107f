"""Calls become the instructions of what they call, so that all other passes and fusion see through them.

A computation called once, or a small one, is always inlined; others as long as the module stays below a size, because
nested doublings grow exponentially. Opaque instructions (custom-call, fusion) stay. Effects keep their order.
"""
from __future__ import annotations

from collections import Counter

from hlofuse.hlo.module import NO_METADATA, Computation, Instruction, Module
from hlofuse.hlo.traverse import rebuild_module, with_changes
from hlofuse.passes.lift import lift

ALWAYS_INLINED = 32      # instructions of the called computation
LARGEST_MODULE = 20_000  # instructions up to which computations that are called more than once are inlined


def inline_calls(module: Module) -> Module:
    callers = Counter(i.attrs["to_apply"] for c in module.computations for i in c.instructions
                      if i.opcode in ("call", "map"))
    if not callers:
        return module
    inliner = _Inliner(callers, LARGEST_MODULE - sum(len(c.instructions) for c in module.computations))
    for computation in module.computations:  # called ones first
        inliner.inline_in(computation)
    return rebuild_module(module, inliner.new) if inliner.new else module


class _Inliner:
    """Inlines within one budget of added instructions; `new` holds the computations that changed."""

    def __init__(self, callers: Counter[Computation], budget: int) -> None:
        self.callers = callers
        self.budget = budget
        self.new: dict[Computation, Computation] = {}

    def inline_in(self, computation: Computation) -> None:
        new: dict[Instruction, Instruction] = {}
        effects: dict[Instruction, list[Instruction]] = {}  # of the calls that were inlined
        for i in computation.instructions:
            rebuilt = i
            if any(o in new for o in i.operands) or any(c in new or c in effects for c in i.control):
                # What ran after a call runs after the call's last effect.
                control = [(effects[c] or [new[c]])[-1] if c in effects else new.get(c, c) for c in i.control]
                rebuilt = with_changes(i, operands=[new.get(o, o) for o in i.operands], control=control)
            if i.opcode == "call" and self.may_inline(i):
                rebuilt, effects[i] = _body_of(rebuilt, self.new.get(i.attrs["to_apply"], i.attrs["to_apply"]))
            elif i.opcode == "map" and not i.control:
                rebuilt = lift(i.attrs["to_apply"], rebuilt.operands, i.dims) or rebuilt
            if rebuilt is not i:
                new[i] = rebuilt
        if new:
            kept = [e for old in computation.effects for e in effects.get(old, [new.get(old, old)])]
            self.new[computation] = Computation(computation.name, computation.parameters,
                                                new.get(computation.root, computation.root), tuple(kept))

    def may_inline(self, call: Instruction) -> bool:
        """Whether to inline one more call; counts what a repeated one costs."""
        callee: Computation = call.attrs["to_apply"]
        if call.control and not callee.effects:
            return False
        size = len(self.new.get(callee, callee).instructions)
        if self.callers[callee] <= 1 or size <= ALWAYS_INLINED:
            return True
        if size > self.budget:
            return False
        self.budget -= size
        return True


def _body_of(call: Instruction, callee: Computation) -> tuple[Instruction, list[Instruction]]:
    """A copy of the callee on the call's operands: its root and its effects; the first waits for what the call did."""
    new = dict(zip(callee.parameters, call.operands, strict=True))
    effects = set(callee.effects)
    for i in callee.instructions:
        if i in new:
            continue
        control = tuple(new[c] for c in i.control)
        if i in effects and not control:
            control = call.control
        metadata = call.metadata if i.metadata is NO_METADATA else i.metadata
        new[i] = Instruction(i.opcode, i.shape, tuple(new[o] for o in i.operands), i.attrs, i.name, metadata, control)
    return new[callee.root], [new[e] for e in callee.effects]
