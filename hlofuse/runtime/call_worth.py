"""Which kernels are not worth a custom call on the CPU, because XLA writes the same into the program itself, faster.

A call costs about 0.1 µs more, which only steps of a loop are short enough to notice. There a kernel has to save
something: passes over the data, elements that XLA moves one by one, results it computes apart, or time on more threads.
"""
from __future__ import annotations

from hlofuse.codegen.kernel import KernelText
from hlofuse.hlo.module import Computation, Instruction
from hlofuse.hlo.opcode import OPCODES, Kind

CALL_WORK = 512         # operations that are worth a custom call
MOVING_WORK = 4_000     # those of a step of a loop that are, where elements are moved, or several results computed
REDUCING_WORK = 20_000  # … where one pass over the data reduces it and another one reads it again
TASK_WORK = 500_000     # operations that are worth a task of their own: threads take long to wake
PLAIN_WORK = 2 * TASK_WORK    # what of a step XLA would do in one pass too is worth a call on several threads
MAX_TASKS = 64          # of one call: enough to share the work evenly, and long runs of memory for each thread
_REDUCTIONS = frozenset({"reduce", "reduce-window", "scatter"})
_PLAIN = frozenset({"parameter", "constant", "iota", "broadcast", "reshape", "bitcast", "slice", "dynamic-slice",
                    "tuple", "copy"})
_LAYOUT_OPCODES = frozenset({"parameter", "transpose", "reshape", "bitcast", "copy"})
_LIBRARY_CALLS = frozenset({"dot", "convolution"})


def why_not_called(cluster: Instruction, text: KernelText, computation: Computation, is_entry: bool) -> str | None:
    """The reason, None for a kernel that is called; `cluster` is in `computation`."""
    work = text.work * text.blocks
    if work < CALL_WORK:
        return f"{work} operations are less than a call costs"
    library_call = _laid_out_for(cluster, computation)
    if library_call is not None:
        return f"XLA lays out the data of {library_call.opcode} itself, without a copy"
    if not is_entry and work < _least_work(cluster.attrs["calls"]):
        return f"{work} operations of one pass are no quicker in a call, within a loop"
    return None


def _least_work(body: Computation) -> int:
    """What is worth a call in a step of a loop."""
    reductions = sum(i.opcode in _REDUCTIONS for i in body.instructions)
    moves = any(i.opcode not in _PLAIN and OPCODES[i.opcode].kind is not Kind.ELEMENTWISE for i in body.instructions
                if i.opcode not in _REDUCTIONS)
    if reductions > 1:
        return 0
    if reductions == 1:
        return REDUCING_WORK
    return MOVING_WORK if moves or len(body.outputs) > 1 else PLAIN_WORK


def _laid_out_for(cluster: Instruction, computation: Computation) -> Instruction | None:
    """The library call whose operand or result a cluster only transposes. XLA gives that array another layout instead,
    but what enters or leaves a custom call lies row by row."""
    body: Computation = cluster.attrs["calls"]
    if any(i.opcode not in _LAYOUT_OPCODES for i in body.instructions):
        return None
    neighbors = (*cluster.operands, *computation.users.get(cluster, ()))
    return next((i for i in neighbors if i.opcode in _LIBRARY_CALLS), None)
