"""Sums over all lanes in every step, as the gradient of a number that lanes share: each lane adds up its own.

    carry + sum(f)  =>  lanes + f in each step, and carry + sum(lanes) behind the loop

A step's sum may be scaled, negated, and put into a place of a vector; several sums may be added to one carry.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from hlofuse.codegen.element_reads import splat_literal
from hlofuse.fusion.loop_state import New, renewed, with_body
from hlofuse.fusion.loop_structure import LoopRefusal, LoopStructure, loop_structure
from hlofuse.hlo.builder import broadcast, element_of, full, make, parameter, tuple_of
from hlofuse.hlo.module import Computation, Instruction, post_order
from hlofuse.hlo.shape import INTEGERS, Shape, TupleShape
from hlofuse.hlo.traverse import with_changes

MAX_TERMS = 64
SUMMED = INTEGERS | {"f32", "f64"}
After = Callable[[Instruction, Instruction], Instruction]


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


def with_lane_sums(loop: Instruction) -> tuple[Instruction, dict[int, After]]:
    """carry' = carry + sum(f) with a carry that is used for nothing else => lanes' = lanes + f, and behind the loop
    carry + sum(lanes)."""
    try:
        s = loop_structure(loop)
    except LoopRefusal:
        return loop, {}
    if s.lanes_leave:
        return loop, {}
    known = _Sums(s.body)
    found = {k: sums for k in s.carries if (sums := _lane_sums(k, s, known)) is not None} if known.leading else {}
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


def _lane_sums(k: int, s: LoopStructure, sums: _Sums) -> _LaneSums | None:
    terms: dict[tuple[object, ...], list[_Term]] = {}
    rest: list[tuple[Instruction, bool]] = []
    pending = list(reversed(_additions(k, s) or ()))
    while pending and len(terms) + len(rest) <= MAX_TERMS:
        value, is_negative = pending.pop()
        found = sums.terms(value)
        if found:
            for term in found:
                terms.setdefault(term.place, []).append(replace(term, is_negative=term.is_negative != is_negative))
        elif value.opcode in ("add", "subtract") and not sums.leading.isdisjoint(value.operands):
            left, right = value.operands
            pending += [(right, is_negative != (value.opcode == "subtract")), (left, is_negative)]
        else:
            rest.append((value, is_negative))
    return _LaneSums(tuple(rest), tuple(map(tuple, terms.values()))) if terms and not pending else None


def _additions(k: int, s: LoopStructure) -> list[tuple[Instruction, bool]] | None:
    """What is added to a carry, or subtracted, one after the other, where nothing else reads it on the way."""
    value, users, root = s.readers.get(k), s.body.users, s.body.root
    if value is None or value.element_type not in SUMMED or value in post_order((s.predicate,)):
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


class _Sums:
    """The values of a body that are sums over lanes, and what is made of such."""

    def __init__(self, body: Computation) -> None:
        self.leading: set[Instruction] = set()
        self._terms: dict[Instruction, list[_Term]] = {}
        for i in body.instructions:
            if _is_sum(i) or (_keeps_sums(i) and not self.leading.isdisjoint(i.operands)):
                self.leading.add(i)

    def terms(self, value: Instruction) -> list[_Term]:
        """The sums that a value consists of, if it is nothing else."""
        if value not in self.leading:
            return []
        if value not in self._terms:
            found = self._found(value)
            self._terms[value] = found if len(found) <= MAX_TERMS else []
        return self._terms[value]

    def _found(self, value: Instruction) -> list[_Term]:
        if _is_sum(value):
            return [_Term(value)]
        left, *others = value.operands
        if value.opcode in ("add", "subtract"):
            first, second = self.terms(left), self.terms(others[0])
            return first + (_negated(second) if value.opcode == "subtract" else second) if first and second else []
        if value.opcode == "multiply":
            factors = [o for o in value.operands if o not in self.leading]
            sums = [o for o in value.operands if o in self.leading]
            return _scaled(self.terms(sums[0]), factors[0]) if len(factors) == 1 else []
        inner = self.terms(left)
        return _negated(inner) if value.opcode == "negate" else [replace(t, shapes=(*t.shapes, value)) for t in inner]


def _keeps_sums(i: Instruction) -> bool:
    return i.opcode in ("add", "subtract", "multiply", "negate") or _is_linear_shape(i)


def _negated(terms: list[_Term]) -> list[_Term]:
    return [replace(t, is_negative=not t.is_negative) for t in terms]


def _scaled(terms: list[_Term], factor: Instruction) -> list[_Term]:
    if any(t.shapes for t in terms):     # only one number for all can move inside
        while factor.opcode == "broadcast" and factor.dims:
            factor = factor.operands[0]
        if factor.dims:
            return []
    return [replace(t, factors=(*t.factors, factor)) for t in terms]


def _is_linear_shape(i: Instruction) -> bool:
    """Moves elements, and has zeros elsewhere."""
    if i.opcode == "pad":
        fill = splat_literal(i.operands[1])
        return fill is not None and not fill.any() and not np.signbit(fill).any()
    return i.opcode in ("reshape", "broadcast", "transpose")


def _is_sum(value: Instruction) -> bool:
    if value.opcode != "reduce" or len(value.operands) != 2:
        return False
    body, init = value.attrs["to_apply"], value.operands[1]
    return body.root.opcode == "add" and set(body.root.operands) == set(body.parameters) and \
        init.opcode == "constant" and not init.literal.any() and value.element_type in SUMMED
