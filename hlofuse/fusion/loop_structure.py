"""The structure of a `while`: what each element of its state is, and what a step computes.

An element is *invariant* (every step passes it on), *stacked* (every step writes one slice of it, and reads at most
that one: a scan's ys), or a *carry*. A predicate on the state as a whole counts steps or tests uniform numbers; a
predicate that is "any element is live" lets each lane leave on its own, provided that what is not live stays as it is.
Only data flow is looked at here; which loop over lanes this makes is a matter of axes (loop_space.py).
"""
from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from hlofuse.hlo.builder import make
from hlofuse.hlo.index_map import Index, constant, variable
from hlofuse.hlo.module import Computation, Instruction, post_order
from hlofuse.hlo.shape import Shape
from hlofuse.hlo.traverse import with_changes

MAX_COUNT = 2**31 - 1


class LoopRefusal(Exception):
    """Why a loop stays a loop: `rule` is a word to look for, the message says it with numbers."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule


@dataclass(frozen=True, eq=False)
class Stacked:
    """Element `index` of the state: every step writes `update` at `position` (a number of the body) along `dim`, and
    `reads` are what it reads of the same slice before."""

    index: int
    update: Instruction
    position: Instruction
    dim: int
    is_covered: bool     # every slice is written exactly once, so nothing of the initial value is left
    reads: tuple[Instruction, ...] = ()


@dataclass(frozen=True)
class Counter:
    """Element `index` of the state counts the `trips` steps; each element of `counts` is start + step * t in step t."""

    index: int
    trips: int
    counts: Mapping[int, tuple[int, int]]


@dataclass(frozen=True, eq=False)
class LoopStructure:
    """`elements` maps every reader of the state, in the body, to its number; `carries` and `results` are in the order
    of the state; `values` is what a step computes, in post-order; `varying` is what may differ from step to step."""

    loop: Instruction
    elements: Mapping[Instruction, int]
    readers: Mapping[int, Instruction]
    invariants: frozenset[int]
    carries: tuple[int, ...]
    stacked: tuple[Stacked, ...]
    predicate: Instruction
    lanes_leave: bool
    counter: Counter | None
    values: tuple[Instruction, ...]
    varying: frozenset[Instruction]

    @property
    def body(self) -> Computation:
        return self.loop.attrs["body"]

    def initial(self, index: int) -> Instruction:
        return self.loop.operands[0].operands[index]

    def update(self, index: int) -> Instruction:
        return self.body.root.operands[index]

    def shape(self, index: int) -> Shape:
        return self.update(index).array

    @property
    def nested(self) -> tuple[Instruction, ...]:
        """The loops in the body, in post-order."""
        return tuple(i for i in self.values if i.opcode == "while")

    def position(self, value: Instruction, name: str) -> Index | None:
        """A number of the body as an affine function of the time step, spelled `name`; None where it is not one."""
        if self.counter is None:
            return None
        return _affine(value, self.elements, self.counter, variable(name, self.counter.trips))


@functools.lru_cache(maxsize=256)
def _structure(loop: Instruction) -> LoopStructure | LoopRefusal:
    try:
        return _find_structure(loop)
    except LoopRefusal as refusal:
        return refusal


def loop_structure(loop: Instruction) -> LoopStructure:
    """The structure of a `while`; `LoopRefusal` where it is none of these."""
    found = _structure(loop)
    if isinstance(found, LoopRefusal):
        raise found
    return found


def has_structure(loop: Instruction) -> bool:
    return isinstance(_structure(loop), LoopStructure)


def _find_structure(loop: Instruction) -> LoopStructure:
    body, condition = loop.attrs["body"], loop.attrs["condition"]
    if body.effects or condition.effects or loop.control:
        raise LoopRefusal("side effects", "the body or the condition has effects")
    if loop.operands[0].opcode != "tuple" or body.root.opcode != "tuple":
        raise LoopRefusal("state", "the state is not spelled out element by element")
    if not all(isinstance(o.shape, Shape) for o in body.root.operands):
        raise LoopRefusal("state", "an element of the state is not an array")
    elements, readers = _readers(body)
    roots = body.root.operands
    invariants = frozenset(k for k, r in enumerate(roots) if elements.get(r) == k)
    whole = _on_body(condition, body, elements, readers)
    predicate, lanes_leave = _per_lane(whole)
    if lanes_leave:
        try:
            return _frozen(_structure_by(loop, elements, readers, invariants, predicate, lanes_leave))
        except LoopRefusal:
            pass    # then all elements together are asked before each step
    return _structure_by(loop, elements, readers, invariants, whole, False)


def _structure_by(loop: Instruction, elements: dict[Instruction, int], readers: dict[int, Instruction],
                  invariants: frozenset[int], predicate: Instruction, lanes_leave: bool) -> LoopStructure:
    body = loop.attrs["body"]
    roots = body.root.operands
    changed = [k for k in range(len(roots)) if k not in invariants]
    counter = None if lanes_leave else _counter(loop, predicate, elements, changed)
    stacked = tuple(t for k in changed if (t := _stacked(k, body, elements, predicate, counter)) is not None)
    carries = tuple(k for k in changed if all(t.index != k for t in stacked))
    needed = [*(roots[k] for k in carries), *(t.update for t in stacked), *(t.position for t in stacked), predicate]
    values = tuple(i for i in post_order(tuple(needed)) if i.opcode not in ("parameter", "constant")
                   and i not in elements)
    varying = _varying(values, elements, invariants)
    return LoopStructure(loop, MappingProxyType(elements), MappingProxyType(readers), invariants, carries, stacked,
                         predicate, lanes_leave, counter, values, varying)


def _readers(body: Computation) -> tuple[dict[Instruction, int], dict[int, Instruction]]:
    state = body.parameters[0]
    elements: dict[Instruction, int] = {}
    readers: dict[int, Instruction] = {}
    for user in body.users[state]:
        if user.opcode != "get-tuple-element":
            raise LoopRefusal("state", "the state is used as a whole")
        elements[user] = user.attrs["index"]
        readers.setdefault(user.attrs["index"], user)
    return elements, readers


def _on_body(condition: Computation, body: Computation, elements: dict[Instruction, int],
             readers: dict[int, Instruction]) -> Instruction:
    """The condition's root, computed from the body's own state."""
    state, new = condition.parameters[0], {}
    for i in condition.instructions:
        if i.opcode == "get-tuple-element" and i.operands[0] is state:
            k = i.attrs["index"]
            if k not in readers:
                readers[k] = make("get-tuple-element", body.parameters[0], index=k)
                elements[readers[k]] = k
            new[i] = readers[k]
        elif i is state:
            new[i] = body.parameters[0]
        else:
            new[i] = with_changes(i, operands=[new[o] for o in i.operands]) if i.operands else i
    if condition.root is state:
        raise LoopRefusal("state", "the condition is not a number")
    return new[condition.root]


def _per_lane(predicate: Instruction) -> tuple[Instruction, bool]:
    """reduce-or(live) over all axes => live: the loop goes on while any element is live."""
    if predicate.opcode == "reduce":
        live, init = predicate.operands[0], predicate.operands[1]
        body = predicate.attrs["to_apply"]
        is_any = len(predicate.operands) == 2 and body.root.opcode == "or" and \
            set(body.root.operands) == set(body.parameters) and init.opcode == "constant" and not bool(init.literal)
        if is_any and len(predicate.attrs["dimensions"]) == len(live.dims) and live.dims:
            return live, True
    return predicate, False


def _stacked(k: int, body: Computation, elements: Mapping[Instruction, int], predicate: Instruction,
             counter: Counter | None) -> Stacked | None:
    root = body.root.operands[k]
    if root.opcode != "dynamic-update-slice" or elements.get(root.operands[0]) != k:
        return None
    whole, update, *starts = root.operands
    if root.operands.count(whole) != 1 or any(elements.get(i) == k for i in post_order((predicate,))):
        return None
    if body.users[root] != (body.root,) or body.root.operands.count(root) != 1:
        return None
    touched = [d for d, (n, m) in enumerate(zip(whole.dims, update.dims, strict=True)) if n != m]
    if len(touched) != 1 or update.dims[touched[0]] != 1:
        return None
    position, size = starts[touched[0]], whole.dims[touched[0]]
    users = {user for e, n in elements.items() if n == k for user in body.users.get(e, ())} - {root}
    if not all(u.opcode == "dynamic-slice" and u.dims == update.dims and u.operands[1:] == tuple(starts)
               for u in users):
        return None
    place = None if counter is None else _affine(position, elements, counter, variable("t", counter.trips))
    is_inside = place is not None and 0 <= place.bounds[0] and place.bounds[1] < size
    if is_inside and counter is not None:
        update = _inside(update, elements, counter)
    reads = tuple(i for i in post_order((update,)) if i in users)
    if any(u not in reads and u in post_order((o,)) for u in users for j, o in enumerate(body.root.operands) if j != k):
        return None     # another element has something of it: it may not be what this step writes
    is_covered = place is not None and counter is not None and not reads and counter.trips == size and \
        place.bounds == (0, size - 1)
    return Stacked(k, update, position, touched[0], is_covered, reads)


def _inside(update: Instruction, elements: Mapping[Instruction, int], counter: Counter) -> Instruction:
    """select(in bounds, new, old) => new, where every step is in bounds: `x.at[i].set(new)`."""
    if update.opcode == "select":
        test = update.operands[0]
        while test.opcode in ("broadcast", "reshape"):
            test = test.operands[0]
        if test.array.size == 1 and _known(test, elements, counter, variable("t", counter.trips)):
            return update.operands[1]
    return update


def _counter(loop: Instruction, predicate: Instruction, elements: Mapping[Instruction, int],
             changed: Sequence[int]) -> Counter | None:
    """i = start; while (i < limit) i += step, with numbers that are known and do not overflow."""
    if predicate.opcode != "compare" or predicate.attrs["direction"] != "LT":
        return None
    index, limit = elements.get(predicate.operands[0], -1), predicate.operands[1]
    if index not in changed or limit.opcode != "constant" or limit.element_type != "s32":
        return None
    counts = {k: c for k in changed if (c := _count(loop, k, elements)) is not None}
    if index not in counts:
        return None
    start, step = counts[index]
    trips = -(-(int(limit.literal) - start) // step) if step > 0 else 0
    if trips < 1 or not _stays(start, step, trips):
        return None
    return Counter(index, trips, {k: c for k, c in counts.items() if _stays(*c, trips)})


def _count(loop: Instruction, k: int, elements: Mapping[Instruction, int]) -> tuple[int, int] | None:
    """(start, step) of an s32 that is known before the loop and grows evenly."""
    update, start = loop.attrs["body"].root.operands[k], loop.operands[0].operands[k]
    if update.opcode != "add" or start.opcode != "constant" or start.dims or start.element_type != "s32":
        return None
    steps = [o for o in update.operands if o.opcode == "constant"]
    if len(steps) != 1 or not any(elements.get(o) == k for o in update.operands):
        return None
    return int(start.literal), int(steps[0].literal)


def _stays(start: int, step: int, trips: int) -> bool:
    return max(abs(start), abs(step * trips), abs(start + step * trips)) <= MAX_COUNT


def _varying(values: tuple[Instruction, ...], elements: Mapping[Instruction, int],
             invariants: frozenset[int]) -> frozenset[Instruction]:
    found = {i for i, k in elements.items() if k not in invariants}
    for i in values:
        if i.opcode == "while" or not found.isdisjoint(i.operands):
            found.add(i)
    return frozenset(found)


# --- numbers of the body ----------------------------------------------------------------------------------------------

def _affine(value: Instruction, elements: Mapping[Instruction, int], counter: Counter, step: Index) -> Index | None:
    """An s32 as a function of the time step, if it never overflows."""
    if value.element_type != "s32" or value.dims:
        return None
    found: Index | None = None
    if elements.get(value, -1) in counter.counts:
        start, each = counter.counts[elements[value]]
        found = step * each + start
    elif value.opcode == "constant":
        found = constant(int(value.literal))
    elif value.opcode in ("add", "subtract"):
        a, b = (_affine(o, elements, counter, step) for o in value.operands)
        if a is not None and b is not None:
            found = a + b if value.opcode == "add" else a - b
    elif value.opcode == "select":
        test, yes, no = value.operands
        known = _known(test, elements, counter, step)
        if known is not None:
            found = _affine(yes if known else no, elements, counter, step)
    if found is None or any(abs(n) > MAX_COUNT for n in (*found.bounds, *(found - found.constant).bounds)):
        return None     # neither the number nor what is written for it may overflow
    return found


def _known(test: Instruction, elements: Mapping[Instruction, int], counter: Counter, step: Index) -> bool | None:
    """A comparison, or several, whose answer is the same in every step."""
    if test.opcode == "and":
        sides = [_known(o, elements, counter, step) for o in test.operands]
        return False if False in sides else None if None in sides else True
    if test.opcode != "compare" or test.dims or test.operands[0].element_type != "s32":
        return None
    a, b = (_affine(o, elements, counter, step) for o in test.operands)
    if a is None or b is None:
        return None
    low, high = (a - b).bounds
    answers = {"LT": (high < 0, low >= 0), "GE": (low >= 0, high < 0), "LE": (high <= 0, low > 0),
               "GT": (low > 0, high <= 0)}
    always, never = answers.get(test.attrs["direction"], (False, False))
    return True if always else False if never else None


# --- lanes that leave -------------------------------------------------------------------------------------------------

def _frozen(s: LoopStructure) -> LoopStructure:
    """Where an element is not live, a step changes nothing: then each lane may leave on its own. The body's own copy of
    the condition serves as both."""
    if s.stacked:
        raise LoopRefusal("freeze", "a loop that elements leave one by one writes slices of an array")
    live = s.predicate
    for k in s.carries:
        if not _is_unchanged(s.update(k), k, live, s):
            raise LoopRefusal("freeze", f"element {k} of the state may change where the condition is false")
    twins = [i for i in s.body.instructions if i.shape == live.shape and same_value(i, live)]
    if not twins:
        return s
    needed = (*(s.update(k) for k in s.carries), twins[0])
    values = tuple(i for i in post_order(needed) if i.opcode not in ("parameter", "constant") and i not in s.elements)
    return replace(s, predicate=twins[0], values=values, varying=_varying(values, s.elements, s.invariants))


def _is_unchanged(value: Instruction, k: int, live: Instruction, s: LoopStructure) -> bool:
    """Whether `value` is the old element k wherever `live` is false."""
    while True:
        if s.elements.get(value) == k:
            return True
        if value.opcode != "select":
            return False
        if _is_live(value.operands[0], live):
            value = value.operands[2]
        elif live.opcode == "not" and _is_live(value.operands[0], live.operands[0]):
            value = value.operands[1]
        else:
            return False


def _is_live(test: Instruction, live: Instruction) -> bool:
    """Whether a pred of the body is the condition, perhaps spread over further axes (the leading ones are its own)."""
    while test.opcode in ("broadcast", "reshape"):
        if test.opcode == "broadcast":
            rank = len(test.operands[0].dims)
            if test.attrs["dimensions"] != tuple(range(rank)) and not same_value(test, live):
                return False
        test = test.operands[0]
    return same_value(test, live)


def same_value(a: Instruction, b: Instruction) -> bool:
    """Whether two instructions of one body compute the same; iterative, and nothing is computed twice."""
    pairs, seen = [(a, b)], set()
    while pairs:
        x, y = pairs.pop()
        if x is y or (x, y) in seen:
            continue
        seen.add((x, y))
        if x.opcode != y.opcode or x.shape != y.shape or len(x.operands) != len(y.operands):
            return False
        if x.opcode in ("parameter", "get-tuple-element") and x.operands == y.operands == ():
            return False
        if x.attrs.keys() != y.attrs.keys() or not all(_same_attr(x.attrs[n], y.attrs[n]) for n in x.attrs):
            return False
        pairs.extend(zip(x.operands, y.operands, strict=True))
    return True


def _same_attr(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    return a is b or bool(a == b)
