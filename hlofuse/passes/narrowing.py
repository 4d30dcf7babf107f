"""How an instruction with several results gives up some of them. Used by dce.

Each narrowable opcode has two functions: `needs` closes a set of read results under what computing them reads, and
`narrow` makes the instruction with only those. What loops and branches call is narrowed with them, once for each set.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from hlofuse.hlo.builder import make, parameter, tuple_of
from hlofuse.hlo.module import Computation, Instruction
from hlofuse.hlo.shape import AnyShape, TupleShape
from hlofuse.hlo.traverse import has_effect, rebuild

Elements = frozenset[int]
Kept = tuple[int, ...]


@dataclass(frozen=True)
class Narrower:
    needs: Callable[[Instruction, Elements], Elements]
    narrow: Callable[[Instruction, Kept, Sequence[Instruction], Memo], Instruction]


class Memo:
    """Narrowed computations, so that loops and branches that shared one still do."""

    def __init__(self) -> None:
        self.made: dict[tuple[Computation, Kept, str], Computation] = {}

    def get(self, computation: Computation, kept: Kept, how: Callable[[Computation, Kept], Computation]) -> Computation:
        key = (computation, kept, how.__name__)
        if key not in self.made:
            self.made[key] = how(computation, kept)
        return self.made[key]


def width(i: Instruction) -> int:
    """How many results; 0 for an array."""
    return len(i.shape.elements) if isinstance(i.shape, TupleShape) else 0


def is_narrowable(i: Instruction) -> bool:
    if not isinstance(i.shape, TupleShape) or i.opcode not in NARROWERS or i.control:
        return False
    if i.opcode == "opt-barrier":
        return len(i.operands) == 1
    if i.opcode == "while":
        return i.attrs["body"].root.opcode == "tuple" and \
            all(_reads_elements_only(i.attrs[key]) for key in ("body", "condition"))
    return i.opcode == "sort" or all(c.root.opcode == "tuple" for c in i.called)


def _reads_elements_only(computation: Computation) -> bool:
    state = computation.parameters[0]
    return all(user.opcode == "get-tuple-element" for user in computation.users[state])


def invariant_carries(i: Instruction) -> Elements:
    """The elements of a loop's state that its body passes through."""
    body: Computation = i.attrs["body"]
    if body.root.opcode != "tuple":
        return frozenset()
    state = body.parameters[0]
    return frozenset(k for k, o in enumerate(body.root.operands)
                     if o.opcode == "get-tuple-element" and o.operands[0] is state and o.attrs["index"] == k)


# --- what results read ------------------------------------------------------------------------------------------------

class _Reads:
    """For every instruction of a computation a bit set of the seeds that it depends on; tuples element by element."""

    def __init__(self, computation: Computation, seeds: Mapping[Instruction, int]) -> None:
        self.bits: dict[Instruction, int] = {}
        for i in computation.instructions:
            bits = seeds.get(i, 0)
            if i.opcode == "get-tuple-element" and not bits:
                bits = self.of_element(i.operands[0], i.attrs["index"])
            else:
                for o in i.operands:
                    bits |= self.bits[o]
            for c in i.control:
                bits |= self.bits[c]
            self.bits[i] = bits
        self.results = [self.bits[o] for o in computation.outputs]
        self.always = 0  # what effects read
        for effect in computation.effects:
            self.always |= self.bits[effect]

    def of_element(self, i: Instruction, k: int) -> int:
        """What element k of a tuple depends on: not all that a loop in the loop reads."""
        if i.opcode == "tuple":
            return self.bits[i.operands[k]]
        if not is_narrowable(i) or has_effect(i):
            return self.bits[i]
        kept = tuple(sorted(NARROWERS[i.opcode].needs(i, frozenset((k,)))))
        bits = 0
        if i.opcode in ELEMENT_BY_ELEMENT:
            for n in kept:
                bits |= self.of_element(i.operands[0], n)
        else:
            for o in kept_operands(i, kept):
                bits |= self.bits[o]
        return bits


# Computations are frozen, so what a loop's body reads is found once.
_state_reads_of: WeakKeyDictionary[Computation, _Reads] = WeakKeyDictionary()


def _state_reads(computation: Computation) -> _Reads:
    """What a loop's body or condition reads of the state."""
    if computation not in _state_reads_of:
        state = computation.parameters[0]
        seeds = {u: 1 << u.attrs["index"] for u in computation.users[state]}
        _state_reads_of[computation] = _Reads(computation, seeds)
    return _state_reads_of[computation]


def _closed(live: Elements, reads_of: Sequence[int]) -> Elements:
    """`live` with all that reading its elements reads, transitively."""
    closed, pending = set(live), list(live)
    while pending:
        for k in _members(reads_of[pending.pop()]):
            if k not in closed:
                closed.add(k)
                pending.append(k)
    return frozenset(closed)


def _members(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def _while_needs(i: Instruction, live: Elements) -> Elements:
    body = _state_reads(i.attrs["body"])
    condition = _state_reads(i.attrs["condition"])
    always = frozenset(_members(condition.results[0] | condition.always | body.always))
    return _closed(live | always, body.results)


def _reduce_needs(i: Instruction, live: Elements) -> Elements:
    combiner: Computation = i.attrs["to_apply"]
    count = width(i)
    reads = _Reads(combiner, {p: 1 << number % count for number, p in enumerate(combiner.parameters)})
    return _closed(live, reads.results)


def _sort_needs(i: Instruction, live: Elements) -> Elements:
    comparator: Computation = i.attrs["to_apply"]
    reads = _Reads(comparator, {p: 1 << number // 2 for number, p in enumerate(comparator.parameters)})
    return live | frozenset(_members(reads.results[0]))


def _own(i: Instruction, live: Elements) -> Elements:
    return live


# --- narrower instructions --------------------------------------------------------------------------------------------

def _shape(i: Instruction, kept: Kept) -> AnyShape:
    assert isinstance(i.shape, TupleShape)
    return TupleShape(tuple(i.shape.elements[k] for k in kept))


def _again(i: Instruction, shape: AnyShape, operands: Sequence[Instruction], **attrs: Any) -> Instruction:
    return make(i.opcode, *operands, shape=shape, name=i.name, metadata=i.metadata, **{**i.attrs, **attrs})


def _kept_root(computation: Computation, kept: Kept) -> Computation:
    """A computation that returns only some elements of its tuple."""
    root = tuple_of([computation.root.operands[k] for k in kept])
    return rebuild(computation, {computation.root: root})


def _kept_state(computation: Computation, kept: Kept) -> Computation:
    """A loop's body or condition with only some elements of the state."""
    old = computation.parameters[0]
    assert isinstance(old.shape, TupleShape)
    state = parameter(0, TupleShape(tuple(old.shape.elements[k] for k in kept)), old.name)
    replace = {old: state}
    for user in computation.users[old]:
        if user.attrs["index"] in kept:
            replace[user] = make("get-tuple-element", state, shape=user.shape, name=user.name, metadata=user.metadata,
                                 index=kept.index(user.attrs["index"]))
    if computation.root.opcode == "tuple":
        replace[computation.root] = tuple_of([computation.root.operands[k] for k in kept])
    return rebuild(computation, replace)


def _kept_parameters(computation: Computation, kept: Kept, numbers: Sequence[int]) -> Computation:
    """A scalar computation with the parameters of these numbers, and of a tuple root the kept elements."""
    new = [parameter(n, computation.parameters[old].shape, computation.parameters[old].name)
           for n, old in enumerate(numbers)]
    replace = {computation.parameters[old]: p for old, p in zip(numbers, new, strict=True)}
    root = computation.root
    if root.opcode == "tuple":
        results = [root.operands[k] for k in kept]
        # A root that is a replaced instruction itself is looked up by `rebuild` as any other.
        replace[root] = tuple_of(results) if len(results) > 1 else results[0]
    return Computation(computation.name, tuple(new), rebuild(computation, replace).root)


def _kept_combiner(computation: Computation, kept: Kept) -> Computation:
    count = len(computation.parameters) // 2
    return _kept_parameters(computation, kept, [*kept, *(count + k for k in kept)])


def _kept_comparator(computation: Computation, kept: Kept) -> Computation:
    return _kept_parameters(computation, kept, [number for k in kept for number in (2 * k, 2 * k + 1)])


def _narrow_while(i: Instruction, kept: Kept, operands: Sequence[Instruction], memo: Memo) -> Instruction:
    attrs = {key: memo.get(i.attrs[key], kept, _kept_state) for key in ("condition", "body")}
    made = _again(i, _shape(i, kept), [tuple_of(operands)], **attrs)
    facts = i.attrs.get("scan")
    if facts is None:
        return made
    narrowed = None if kept[:1] != (0,) else _narrowed_facts(facts, kept)
    others = {key: value for key, value in made.attrs.items() if key != "scan"}
    if narrowed is not None:
        others["scan"] = narrowed
    return make("while", *made.operands, shape=made.shape, name=i.name, metadata=i.metadata, **others)


def _narrowed_facts(facts: Any, kept: Kept) -> Any:
    """What a scan knows of its state (i, constants, carries, xs, ys), with fewer of each."""
    counts, start = {}, 1
    for field in ("num_consts", "num_carry", "num_xs", "num_ys"):
        end = start + getattr(facts, field)
        counts[field] = sum(start <= k < end for k in kept)
        start = end
    return dataclasses.replace(facts, **counts)


def _narrow_reduce(i: Instruction, kept: Kept, operands: Sequence[Instruction], memo: Memo) -> Instruction:
    shape = _shape(i, kept)
    assert isinstance(shape, TupleShape)
    return _again(i, shape if len(kept) > 1 else shape.elements[0], operands,
                  to_apply=memo.get(i.attrs["to_apply"], kept, _kept_combiner))


def _narrow_sort(i: Instruction, kept: Kept, operands: Sequence[Instruction], memo: Memo) -> Instruction:
    shape = _shape(i, kept)
    assert isinstance(shape, TupleShape)
    return _again(i, shape if len(kept) > 1 else shape.elements[0], operands,
                  to_apply=memo.get(i.attrs["to_apply"], kept, _kept_comparator))


def _narrow_conditional(i: Instruction, kept: Kept, operands: Sequence[Instruction], memo: Memo) -> Instruction:
    branches = tuple(memo.get(c, kept, _kept_root) for c in i.attrs["branch_computations"])
    return _again(i, _shape(i, kept), operands, branch_computations=branches)


def _narrow_call(i: Instruction, kept: Kept, operands: Sequence[Instruction], memo: Memo) -> Instruction:
    return _again(i, _shape(i, kept), operands, to_apply=memo.get(i.attrs["to_apply"], kept, _kept_root))


def _narrow_barrier(i: Instruction, kept: Kept, operands: Sequence[Instruction], memo: Memo) -> Instruction:
    return _again(i, _shape(i, kept), [tuple_of(operands)])


# The operands given to `narrow` are, for a loop or barrier, the kept elements of its one operand.
NARROWERS: dict[str, Narrower] = {
    "while": Narrower(_while_needs, _narrow_while),
    "conditional": Narrower(_own, _narrow_conditional),
    "call": Narrower(_own, _narrow_call),
    "opt-barrier": Narrower(_own, _narrow_barrier),
    "reduce": Narrower(_reduce_needs, _narrow_reduce),
    "sort": Narrower(_sort_needs, _narrow_sort),
}
ELEMENT_BY_ELEMENT = frozenset({"while", "opt-barrier"})  # one tuple operand, whose elements are the results


def kept_operands(i: Instruction, kept: Kept) -> Sequence[Instruction]:
    """The operands that the narrowed reduce or sort still has; all of them for other opcodes."""
    if i.opcode == "sort":
        return [i.operands[k] for k in kept]
    if i.opcode == "reduce":
        count = width(i)
        return [*(i.operands[k] for k in kept), *(i.operands[count + k] for k in kept)]
    return i.operands
