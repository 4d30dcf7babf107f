"""Loops made ready for a kernel: bodies of their own in which nothing but arithmetic is left.

Barriers inside a kernel separate nothing, a branch is a select where computing both sides is cheap, arrays that a body
holds as constants are read from the state, and `carry + sum(f)` over all lanes becomes a sum of each lane that is
folded behind the loop. A loop that is refused afterwards stays as it was written.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hlofuse.codegen.element_reads import splat_literal
from hlofuse.fusion.loop_structure import LoopRefusal, LoopStructure, loop_structure
from hlofuse.hlo.builder import broadcast, constant, element_of, full, make, parameter, tuple_of
from hlofuse.hlo.module import Computation, Instruction, post_order
from hlofuse.hlo.shape import INTEGERS, Shape, TupleShape
from hlofuse.hlo.traverse import clone_computation, with_changes

MAX_BRANCHES = 96     # instructions of all branches of a conditional, where both sides are computed
_SUMMED = INTEGERS | {"f32", "f64"}
New = dict[Instruction, Instruction]
After = Callable[[Instruction, Instruction], Instruction]


@dataclass(frozen=True)
class PreparedLoop:
    """The new `while`, and for elements of its state that are only a part now, what they are of a part and the loop."""

    loop: Instruction
    after: Mapping[int, After] = field(default_factory=dict)

    def result(self, index: int) -> Instruction:
        s = loop_structure(self.loop)
        element = s.initial(index) if index in s.invariants else element_of(self.loop, index)
        return self.after[index](element, self.loop) if index in self.after else element


def prepare_loop(loop: Instruction) -> PreparedLoop:
    """`LoopRefusal` where a loop is none that could be a kernel."""
    loop = with_body(loop, _plain(loop.attrs["body"]))
    loop = _with_constants_as_state(loop)
    loop, after = _with_lane_sums(loop)
    return PreparedLoop(_without_overwritten(loop), after)


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


# --- sums over all lanes ----------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class _Term:
    """What a step adds to a carry: `shapes` (reshape, pad, …, innermost first) of factor * reduce-add(array)."""

    reduction: Instruction
    factors: tuple[Instruction, ...] = ()
    is_negative: bool = False
    shapes: tuple[Instruction, ...] = ()

    @property
    def place(self) -> tuple[object, ...]:
        """Terms of one place are one sum."""
        attrs = self.reduction.attrs["dimensions"], self.reduction.operands[0].shape
        return (*attrs, *((i.opcode, i.shape, tuple(sorted(i.attrs.items()))) for i in self.shapes))


@dataclass(frozen=True)
class _LaneSums:
    """A carry that only sums are added to: `rest` of its chain of additions stays, the terms by place leave."""

    rest: tuple[tuple[Instruction, bool], ...]
    places: tuple[tuple[_Term, ...], ...]


def _with_lane_sums(loop: Instruction) -> tuple[Instruction, dict[int, After]]:
    """carry' = carry + sum(f) with a carry that is used for nothing else => lanes' = lanes + f, and behind the loop
    carry + sum(lanes)."""
    try:
        s = loop_structure(loop)
    except LoopRefusal:
        return loop, {}
    found = {k: sums for k in s.carries if not s.lanes_leave and (sums := _lane_sums(k, s)) is not None}
    if not found:
        return loop, {}
    body, state = s.body, list(loop.operands[0].operands)
    after: dict[int, After] = {}
    for k, sums in found.items():
        after[k] = _folded(sums, len(state))
        state += [full(0, terms[0].reduction.operands[0].array) for terms in sums.places]
    fresh = parameter(0, TupleShape(tuple(o.shape for o in state)), "state")
    new: New = {body.parameters[0]: fresh}
    for i in body.instructions:
        if i not in new and i is not body.root:
            new[i] = renewed(i, new)
    roots = [new[o] for o in body.root.operands]
    for k, sums in found.items():
        roots[k] = element_of(fresh, k)
        for other, is_negative in sums.rest:
            roots[k] = make("subtract" if is_negative else "add", roots[k], new[other])
    for sums in found.values():
        for terms in sums.places:
            lanes = element_of(fresh, len(roots))
            for term in terms:
                lanes = make("subtract" if term.is_negative else "add", lanes, _of_lanes(term, new))
            roots.append(lanes)
    return with_body(loop, Computation(body.name, (fresh,), tuple_of(roots)), state), after


def _folded(sums: _LaneSums, first: int) -> After:
    """`first` is where the lanes' sums begin in the state."""
    def after(rest: Instruction, loop: Instruction) -> Instruction:
        for n, terms in enumerate(sums.places):
            lanes = element_of(loop, first + n)
            total = with_changes(terms[0].reduction, operands=[lanes, full(0, Shape(lanes.element_type))])
            for shape in terms[0].shapes:
                total = with_changes(shape, operands=[total, *shape.operands[1:]])
            rest = make("add", rest, total)
        return rest

    return after


def _of_lanes(term: _Term, new: New) -> Instruction:
    value = new[term.reduction.operands[0]]
    axes = [d for d in range(len(value.dims)) if d not in term.reduction.attrs["dimensions"]]
    for factor in term.factors:
        spread = broadcast(new[factor], value.dims, axes if factor.dims else ()) if value.dims else new[factor]
        value = make("multiply", value, spread)
    return value


def _lane_sums(k: int, s: LoopStructure) -> _LaneSums | None:
    chain = _additions(k, s)
    terms: dict[tuple[object, ...], list[_Term]] = {}
    rest = []
    for other, is_negative in chain or ():
        term = _term(other)
        if term is None:
            rest.append((other, is_negative))
        else:
            terms.setdefault(term.place, []).append(replace(term, is_negative=term.is_negative != is_negative))
    return _LaneSums(tuple(rest), tuple(map(tuple, terms.values()))) if terms else None


def _additions(k: int, s: LoopStructure) -> list[tuple[Instruction, bool]] | None:
    """What is added to a carry, or subtracted, one after the other, where nothing else reads it on the way."""
    value, users, root = s.readers.get(k), s.body.users, s.body.root
    if value is None or value.element_type not in _SUMMED or value in post_order((s.predicate,)):
        return None
    found: list[tuple[Instruction, bool]] = []
    while value is not s.update(k):
        readers = users.get(value, ())
        if len(readers) != 1 or readers[0].operands.count(value) != 1:
            return None
        (user,), is_first = readers, readers[0].operands[0] is value
        if user.opcode != "add" and not (user.opcode == "subtract" and is_first):
            return None
        found.append((user.operands[1 if is_first else 0], user.opcode == "subtract"))
        value = user
    return found if users[value] == (root,) and root.operands.count(value) == 1 else None


def _term(value: Instruction) -> _Term | None:
    if _is_sum(value):
        return _Term(value)
    if value.opcode == "negate":
        inner = _term(value.operands[0])
        return None if inner is None else replace(inner, is_negative=not inner.is_negative)
    if value.opcode == "multiply":
        sides = [o for o in value.operands if _leads_to_sum(o)]
        inner = _term(sides[0]) if len(sides) == 1 else None
        factor = value.operands[1] if inner is not None and value.operands[0] is sides[0] else value.operands[0]
        if inner is not None and inner.shapes:     # only one number for all can move inside
            while factor.opcode == "broadcast" and factor.dims:
                factor = factor.operands[0]
        if inner is None or inner.shapes and factor.dims:
            return None
        return replace(inner, factors=(*inner.factors, factor))
    if _is_linear_shape(value):
        inner = _term(value.operands[0])
        return None if inner is None else replace(inner, shapes=(*inner.shapes, value))
    return None


def _is_linear_shape(i: Instruction) -> bool:
    """Moves elements, and has zeros elsewhere."""
    if i.opcode == "pad":
        fill = splat_literal(i.operands[1])
        return fill is not None and not fill.any() and not np.signbit(fill).any()
    return i.opcode in ("reshape", "broadcast", "transpose")


def _leads_to_sum(value: Instruction) -> bool:
    while value.opcode == "negate" or _is_linear_shape(value):
        value = value.operands[0]
    return _is_sum(value) or (value.opcode == "multiply" and any(map(_leads_to_sum, value.operands)))


def _is_sum(value: Instruction) -> bool:
    if value.opcode != "reduce" or len(value.operands) != 2:
        return False
    body, init = value.attrs["to_apply"], value.operands[1]
    return body.root.opcode == "add" and set(body.root.operands) == set(body.parameters) and \
        init.opcode == "constant" and not init.literal.any() and value.element_type in _SUMMED


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
