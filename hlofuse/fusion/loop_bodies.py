"""Loops made ready for a kernel: bodies of their own in which nothing but arithmetic is left.

Barriers inside a kernel separate nothing, a branch is a select where computing both sides is cheap, arrays that a body
holds as constants are read from the state, and `carry + sum(f)` over all lanes becomes a sum of each lane that is
folded behind the loop. A loop that is refused afterwards stays as it was written.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hlofuse.codegen.element_reads import splat_literal
from hlofuse.fusion.loop_structure import LoopRefusal, loop_structure
from hlofuse.hlo.builder import broadcast, constant, element_of, full, make, parameter, tuple_of
from hlofuse.hlo.module import Computation, Instruction, post_order
from hlofuse.hlo.shape import INTEGERS, Shape, TupleShape
from hlofuse.hlo.traverse import clone_computation, with_changes

MAX_BRANCHES = 96     # instructions of all branches of a conditional, where both sides are computed
_SUMMED = INTEGERS | {"f32", "f64"}
New = dict[Instruction, Instruction]


@dataclass(frozen=True)
class PreparedLoop:
    """The new `while`, and for elements of its state that mean something else now, what the old ones are."""

    loop: Instruction
    after: Mapping[int, Callable[[Instruction], Instruction]] = field(default_factory=dict)

    def result(self, index: int) -> Instruction:
        s = loop_structure(self.loop)
        if index in s.invariants and index not in self.after:
            return s.initial(index)
        element = element_of(self.loop, index)
        return self.after[index](element) if index in self.after else element


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
    """factor * reduce-add(array): what a step adds to a carry."""

    reduction: Instruction
    factors: tuple[Instruction, ...]
    is_negative: bool


def _with_lane_sums(loop: Instruction) -> tuple[Instruction, dict[int, Callable[[Instruction], Instruction]]]:
    """carry' = carry + sum(f) with a carry that is used for nothing else => lanes' = lanes + f, and behind the loop
    carry + sum(lanes)."""
    try:
        s = loop_structure(loop)
    except LoopRefusal:
        return loop, {}
    body = s.body
    found: dict[int, _Term] = {}
    for k in s.carries:
        terms = _sum_of_step(s.update(k), k, s.elements, body.users) if not s.lanes_leave else None
        if terms is not None and len(terms) == 1 and _is_used_once(k, s.readers, body, s.predicate):
            found[k] = terms[0]
    if not found:
        return loop, {}
    state = list(loop.operands[0].operands)
    after: dict[int, Callable[[Instruction], Instruction]] = {}
    for k, term in found.items():
        after[k] = _folded(state[k], term.reduction)
        state[k] = full(0, term.reduction.operands[0].array)
    fresh = parameter(0, TupleShape(tuple(o.shape for o in state)), "state")
    new: New = {body.parameters[0]: fresh}
    updates = {s.update(k): (k, term) for k, term in found.items()}
    for i in body.instructions:
        if i in new:
            continue
        if i in updates:
            new[i] = _lane_sum(*updates[i], fresh, new)
        elif i is not body.root and any(o.shape != new[o].shape for o in i.operands if o is not body.parameters[0]):
            new[i] = i     # nothing reads it any more
        else:
            new[i] = renewed(i, new)
    root = tuple_of([new[o] for o in body.root.operands])
    return with_body(loop, Computation(body.name, (fresh,), root), state), after


def _folded(initial: Instruction, reduction: Instruction) -> Callable[[Instruction], Instruction]:
    def after(lanes: Instruction) -> Instruction:
        total = with_changes(reduction, operands=[lanes, full(0, Shape(lanes.element_type))])
        return make("add", initial, total)

    return after


def _lane_sum(k: int, term: _Term, fresh: Instruction, new: New) -> Instruction:
    value = new[term.reduction.operands[0]]
    axes = [d for d in range(len(value.dims)) if d not in term.reduction.attrs["dimensions"]]
    for factor in term.factors:
        value = make("multiply", value, broadcast(new[factor], value.dims, axes) if value.dims else new[factor])
    return make("subtract" if term.is_negative else "add", element_of(fresh, k), value)


def _is_used_once(k: int, readers: Mapping[int, Instruction], body: Computation, predicate: Instruction) -> bool:
    reader = readers.get(k)
    return reader is not None and len(body.users.get(reader, ())) == 1 and reader not in post_order((predicate,)) and \
        body.root.operands.count(body.root.operands[k]) == 1 and body.users[body.root.operands[k]] == (body.root,)


def _sum_of_step(update: Instruction, k: int, elements: Mapping[Instruction, int],
                 users: Mapping[Instruction, tuple[Instruction, ...]]) -> list[_Term] | None:
    if update.opcode not in ("add", "subtract") or update.element_type not in _SUMMED:
        return None
    left, right = update.operands
    if elements.get(left) == k:
        return _terms(right, update.opcode == "subtract")
    return _terms(left, False) if elements.get(right) == k and update.opcode == "add" else None


def _terms(value: Instruction, is_negative: bool) -> list[_Term] | None:
    factors: list[Instruction] = []
    while True:
        if value.opcode == "negate":
            value, is_negative = value.operands[0], not is_negative
        elif value.opcode == "multiply":
            sides = [o for o in value.operands if _leads_to_sum(o)]
            if len(sides) != 1:
                return None
            factors.append(value.operands[1] if value.operands[0] is sides[0] else value.operands[0])
            value = sides[0]
        elif _is_sum(value):
            return [_Term(value, tuple(factors), is_negative)]
        else:
            return None


def _leads_to_sum(value: Instruction) -> bool:
    while value.opcode == "negate":
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
