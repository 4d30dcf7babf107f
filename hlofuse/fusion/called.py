"""What a computation calls and no kernel computes: bodies and conditions of loops, branches, and calls not inlined.

Each is fused as a program of its own, once, and called in the place of what it was. Of a loop's step two things stay
XLA's: the count of trips by which it knows their number, and a slice written into the state, which it writes in place.
"""
from __future__ import annotations

from collections.abc import Callable

from hlofuse.fusion.loops import FoundLoops
from hlofuse.hlo.module import Computation, Instruction
from hlofuse.hlo.opcode import OPCODES, Kind
from hlofuse.hlo.traverse import rebuild, replaced_callees, with_changes

CALLERS = frozenset({"while", "conditional", "call"})
COUNTED = "it counts the trips of a loop"
IN_PLACE = "it writes a slice into a loop's state, in place"
POSITION = "it says where a slice of a loop's state is written"


def with_called(found: FoundLoops, fuse: Callable[[Computation, Instruction], Computation]) -> FoundLoops:
    """The same program, with what its calls (and loops that stay loops) run replaced by `fuse(callee, caller)`."""
    replace: dict[Instruction, Instruction] = {}
    became: dict[Computation, Computation] = {}
    for i in found.computation.instructions:
        if i.opcode in CALLERS and i not in found.loops:
            became.update((c, fuse(c, i)) for c in i.called if c not in became)
            if any(became[c] is not c for c in i.called):
                attrs = {key: replaced_callees(value, became) for key, value in i.attrs.items()}
                replace[i] = with_changes(i, attrs=attrs)
    if not replace:
        return found
    new = rebuild(found.computation, replace)
    kernels = {i.attrs["body"] for i in found.loops}
    reasons = {became[i.attrs["body"]]: reason for i, reason in found.refusals.items()}
    whiles = [i for i in new.instructions if i.opcode == "while"]
    blocks = {i.attrs["body"]: plan for i, plan in found.blocks.items()}
    return FoundLoops(new, frozenset(i for i in whiles if i.attrs["body"] in kernels),
                      {i: reasons[i.attrs["body"]] for i in whiles if i.attrs["body"] in reasons}, found.notes,
                      {i: blocks[i.attrs["body"]] for i in whiles if i.attrs["body"] in blocks})


def state_for_xla(computation: Computation, caller: Instruction | None) -> dict[Instruction, str]:
    """What of a loop's body or condition is left to XLA, each with the reason."""
    if caller is None or caller.opcode != "while":
        return {}
    compared = _counters(caller.attrs["condition"])
    if computation.root.opcode != "tuple":
        return {computation.root: COUNTED} if compared and computation.root.opcode == "compare" else {}
    left: dict[Instruction, str] = {}
    for k, update in enumerate(computation.root.operands):
        if k in compared and _counts(update, k):
            left[update] = COUNTED
        while update.opcode == "dynamic-update-slice" and _ends_in_element(update, k):
            left[update] = IN_PLACE
            update = update.operands[0]
    for i in reversed(computation.instructions):
        users = computation.users[i]
        if _is_integer(i) and OPCODES[i.opcode].kind is Kind.ELEMENTWISE and users and i not in left and \
                all(left.get(u) in (IN_PLACE, POSITION) for u in users):
            left[i] = POSITION
    return left


def _counters(condition: Computation) -> list[int]:
    """The elements of the state that a condition compares with an end, by which XLA knows the number of trips."""
    compared = condition.root.operands
    if condition.root.opcode != "compare" or not all(
            _is_integer(o) and o.opcode in ("get-tuple-element", "constant") for o in compared):
        return []
    return [o.attrs["index"] for o in compared if o.opcode == "get-tuple-element"]


def _is_integer(i: Instruction) -> bool:
    shape = i.result_shapes
    return len(shape) == 1 and shape[0] is i.shape and not shape[0].dims and shape[0].element_type[0] in "su"


def _is_element(i: Instruction, k: int) -> bool:
    return i.opcode == "get-tuple-element" and i.operands[0].opcode == "parameter" and i.attrs["index"] == k


def _counts(update: Instruction, k: int) -> bool:
    if update.opcode != "add" or not _is_integer(update):
        return False
    return any(_is_element(a, k) and b.opcode == "constant" for a, b in (update.operands, update.operands[::-1]))


def _ends_in_element(update: Instruction, k: int) -> bool:
    while update.opcode == "dynamic-update-slice":
        update = update.operands[0]
    return _is_element(update, k)
