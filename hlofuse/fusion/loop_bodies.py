"""Loops made ready for a kernel: bodies of their own in which nothing but arithmetic is left.

Barriers inside a kernel separate nothing, a branch is a select where computing both sides is cheap, arrays that a body
holds as constants are read from the state, and `carry + sum(f)` over all lanes becomes a sum of each lane that is
folded behind the loop. A loop that is refused afterwards stays as it was written.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hlofuse.codegen.element_reads import splat_literal
from hlofuse.fusion.lane_sums import After, with_lane_sums
from hlofuse.fusion.loop_metrics import with_lane_metrics
from hlofuse.fusion.loop_state import New, renewed, with_body
from hlofuse.fusion.loop_structure import LoopRefusal, loop_structure
from hlofuse.hlo.builder import constant, element_of, full, make, parameter, tuple_of
from hlofuse.hlo.module import Computation, Instruction
from hlofuse.hlo.shape import TupleShape
from hlofuse.hlo.traverse import with_changes

MAX_BRANCHES = 96     # instructions of all branches of a conditional, where both sides are computed


@dataclass(frozen=True)
class PreparedLoop:
    """The new `while`, and for elements of its state that are only a part now, what they are of a part and the loop."""

    loop: Instruction
    after: Mapping[int, After] = field(default_factory=dict)

    def result(self, index: int) -> Instruction:
        s = loop_structure(self.loop)
        element = s.initial(index) if index in s.invariants else element_of(self.loop, index)
        return self.after[index](element, self.loop) if index in self.after else element


def prepare_loop(loop: Instruction, cache_bytes: int) -> PreparedLoop:
    """`LoopRefusal` where a loop is none that could be a kernel. `cache_bytes` are the device's last cache."""
    loop = with_body(loop, _plain(loop.attrs["body"]))
    loop = _with_constants_as_state(loop)
    loop, after = with_lane_sums(loop)
    loop, metrics = with_lane_metrics(loop, cache_bytes // 8)
    return PreparedLoop(_without_overwritten(loop), {**after, **metrics})


# --- barriers, branches, loops in loops -------------------------------------------------------------------------------

def _plain(body: Computation) -> Computation:
    """A copy of a body without barriers and cheap branches; so are the loops in it."""
    new: New = {p: parameter(n, p.shape, p.name) for n, p in enumerate(body.parameters)}
    _copy_plain(body, new)
    return Computation(body.name, tuple(new[p] for p in body.parameters), new[body.root],
                       tuple(new[e] for e in body.effects))


def _copy_plain(body: Computation, new: New) -> None:
    for i in body.instructions:
        if i in new:
            continue
        if i.opcode == "opt-barrier":
            new[i] = new[i.operands[0]]
        elif i.opcode == "conditional" and _is_cheap(i):
            new[i] = _selected(i, new)
        elif i.opcode == "while":
            new[i] = with_body(renewed(i, new), _plain(i.attrs["body"]))
        else:
            new[i] = renewed(i, new)


def _is_cheap(conditional: Instruction) -> bool:
    branches: tuple[Computation, ...] = conditional.attrs["branch_computations"]
    inside = [i for b in branches for i in b.instructions]
    return len(inside) <= MAX_BRANCHES and not any(b.effects for b in branches) and not any(
        i.opcode in ("while", "custom-call", "call") for i in inside)


def _selected(conditional: Instruction, new: New) -> Instruction:
    """Every branch is computed, and selects choose. An index out of range means the last branch."""
    index, results = new[conditional.operands[0]], []
    for branch, packed in zip(conditional.attrs["branch_computations"], conditional.operands[1:], strict=True):
        inner: New = {branch.parameters[0]: new[packed]}
        _copy_plain(branch, inner)
        root = inner[branch.root]
        results.append(root.operands if root.opcode == "tuple" else (root,))
    if index.element_type == "pred":
        chosen = [make("select", index, yes, no, shape=yes.shape) for yes, no in zip(*results, strict=True)]
    else:
        chosen = list(results[-1])
        for k in reversed(range(len(results) - 1)):
            test = make("compare", index, constant(k, index.element_type), direction="EQ")
            chosen = [make("select", test, yes, no, shape=yes.shape)
                      for yes, no in zip(results[k], chosen, strict=True)]
    return tuple_of(chosen) if isinstance(conditional.shape, TupleShape) else chosen[0]


# --- constants --------------------------------------------------------------------------------------------------------

def _with_constants_as_state(loop: Instruction) -> Instruction:
    body: Computation = loop.attrs["body"]
    arrays = [i for i in body.instructions if i.opcode == "constant" and i.dims and splat_literal(i) is None]
    if not arrays or loop.operands[0].opcode != "tuple" or body.root.opcode != "tuple":
        return loop
    state = [*loop.operands[0].operands, *arrays]
    first = len(loop.operands[0].operands)
    old, fresh = body.parameters[0], parameter(0, TupleShape(tuple(o.shape for o in state)), "state")
    new: New = {old: fresh, **{c: element_of(fresh, first + n) for n, c in enumerate(arrays)}}
    for i in body.instructions:
        if i not in new:
            new[i] = renewed(i, new)
    root = tuple_of([*new[body.root].operands, *(new[c] for c in arrays)])
    return with_body(loop, Computation(body.name, (fresh,), root), state)


# --- stacked arrays ---------------------------------------------------------------------------------------------------

def _without_overwritten(loop: Instruction) -> Instruction:
    """What a loop overwrites slice by slice starts as zeros, which no one need read."""
    try:
        covered = {t.index for t in loop_structure(loop).stacked if t.is_covered}
    except LoopRefusal:
        return loop
    state = loop.operands[0].operands
    if all(_is_zeros(state[k]) for k in covered):
        return loop
    return with_changes(loop, operands=[tuple_of([full(0, o.array) if k in covered else o
                                                  for k, o in enumerate(state)])])


def _is_zeros(i: Instruction) -> bool:
    return i.opcode == "broadcast" and i.operands[0].opcode == "constant"
