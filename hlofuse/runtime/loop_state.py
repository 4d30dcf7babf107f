"""Where the state of a loop lies: which kernels write it in place, and how many steps a trip takes to need no copies.

XLA gives each element of the state one buffer. A step that cannot write an element in place (a stencil reads the
neighbors' old values) leaves it elsewhere, and XLA copies it back. Two steps a trip write there and back again. An
element that only moves on to another place (the state before the last) comes back after as many steps as it has places.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hlofuse.codegen.kernel import KernelText
from hlofuse.explore.launch_count import trip_count
from hlofuse.fusion.called import CALLERS
from hlofuse.hlo.module import Computation, Instruction

MAX_STEPS = 4           # of one trip: each is compiled by itself
MAX_TRIP = 400          # instructions, of all its steps
LARGE_STATE = 1 << 14   # bytes whose copy costs more than a longer program

Aliases = Mapping[Instruction, Mapping[int, int]]    # by kernel: operand -> the result that takes its memory
Choice = Callable[[Instruction, Instruction, int], bool]    # whether a kernel's result may take what is free


@dataclass(frozen=True)
class StatePlan:
    """`steps` of one trip. `aliases` of the kernels in a step."""

    steps: int = 1
    aliases: Aliases = field(default_factory=dict)


def plan_state(loop: Instruction, texts: Mapping[Instruction, KernelText]) -> StatePlan:
    """`texts` are the kernels that are called."""
    body: Computation = loop.attrs["body"]
    if body.root.opcode != "tuple" or body.parameters[0].shape != body.root.shape:
        return StatePlan()
    elements = _elements(body)
    moves = _moves(body)
    places = _places(body)
    free = {e: k for k, e in elements.items() if body.root.operands[k] is not e}

    def own(element: Instruction, kernel: Instruction, result: int) -> bool:
        return free[element] in places.get((kernel, result), ())

    def coming(element: Instruction, kernel: Instruction, result: int) -> bool:
        """Where the result itself, or after further steps, is the element."""
        return any(free[element] in moves.get(k, (k,)) for k in places.get((kernel, result), ()))

    in_place = free_aliases(body, texts, free, [own])
    steps = _steps(loop, body, texts, elements, in_place)
    return StatePlan(steps, in_place if steps == 1 else free_aliases(body, texts, free, [own, coming]))


def free_aliases(computation: Computation, texts: Mapping[Instruction, KernelText], free: Collection[Instruction],
                 choices: Sequence[Choice]) -> dict[Instruction, Mapping[int, int]]:
    """Of kernels that read memory which is free for the last time; earlier `choices` come first."""
    if not free:
        return {}
    last = {o: i for i in computation.instructions for o in i.operands}
    found: dict[Instruction, Mapping[int, int]] = {}
    for i, text in texts.items():
        chosen: dict[int, int] = {}
        for choice in choices:
            for operand, result in text.aliases.items():
                source = i.operands[operand]
                if source in free and last[source] is i and i.operands.count(source) == 1 and \
                        operand not in chosen and result not in chosen.values() and choice(source, i, result):
                    chosen[operand] = result
        if chosen:
            found[i] = chosen
    return found


def _elements(body: Computation) -> dict[int, Instruction]:
    """The readers of the state by their number; none of an element that has several, or if it is read as a whole."""
    state = body.parameters[0]
    readers: dict[int, list[Instruction]] = {}
    for user in body.users[state]:
        if user.opcode != "get-tuple-element":
            return {}
        readers.setdefault(user.attrs["index"], []).append(user)
    return {k: found[0] for k, found in readers.items() if len(found) == 1}


def _places(computation: Computation) -> dict[tuple[Instruction, int], list[int]]:
    """Which outputs the results of kernels are, through reshapes."""
    found: dict[tuple[Instruction, int], list[int]] = {}
    for k, output in enumerate(computation.outputs):
        found.setdefault(_producer(output), []).append(k)
    return found


def _producer(value: Instruction) -> tuple[Instruction, int]:
    while value.opcode in ("reshape", "bitcast"):
        value = value.operands[0]
    if value.opcode == "get-tuple-element":
        return value.operands[0], value.attrs["index"]
    return value, 0


def _steps(loop: Instruction, body: Computation, texts: Mapping[Instruction, KernelText],
           elements: Mapping[int, Instruction], in_place: Aliases) -> int:
    trips = trip_count(loop)
    if trips is None or trips < 2:
        return 1
    needed = 1
    for k, update in enumerate(body.root.operands):
        if update.shape.byte_size < LARGE_STATE:
            continue
        producer, result = _producer(update)
        if producer in texts and elements.get(k) in producer.operands:
            if result not in in_place.get(producer, {}).values():
                needed = max(needed, 2)
        elif producer is body.parameters[0]:
            needed = max(needed, len(_moves(body)[result]))
    is_short = needed <= MAX_STEPS and needed * _size(body) <= MAX_TRIP
    return min(needed, trips) if is_short else 1


def _size(computation: Computation) -> int:
    """Its instructions, a kernel being one, with those of what it calls."""
    called = [c for i in computation.instructions if i.opcode in CALLERS for c in i.called]
    return len(computation.instructions) + sum(map(_size, called))


def _moves(body: Computation) -> dict[int, list[int]]:
    """For each element of the state, where it is after each step, for as long as steps only move it on; itself first.
    """
    goes: dict[int, int] = {}
    for k, update in enumerate(body.root.operands):
        producer, source = _producer(update)
        if producer is body.parameters[0] and source != k:
            goes.setdefault(source, k)
    found: dict[int, list[int]] = {}
    for start in range(len(body.root.operands)):
        path = [start]
        while path[-1] in goes and goes[path[-1]] not in path:
            path.append(goes[path[-1]])
        found[start] = path
    return found
