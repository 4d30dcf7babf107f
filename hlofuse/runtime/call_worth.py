"""Which kernels are not worth a custom call on the CPU, because XLA writes the same into the program itself, faster.

A call costs about 0.1 µs more, which only steps of a loop are short enough to notice. There a kernel has to save
something: passes over the data, elements that XLA moves one by one, or time on more threads.
"""
from __future__ import annotations

from hlofuse.codegen.kernel import KernelText
from hlofuse.hlo.module import Computation, Instruction
from hlofuse.hlo.opcode import OPCODES, Kind

CALL_WORK = 512         # operations that are worth a custom call
TASK_WORK = 500_000     # those that are worth a task of their own: threads take long to wake
MAX_TASKS = 64          # of one call: enough to share the work evenly, and long runs of memory for each thread

# What one step of a loop has to compute, measured for steps of 1 to 512 rows of 64 to 512 elements beside `jax.jit`.
SAVING_WORK = range(4_000, 2_000_000)     # elements are moved, which XLA does one by one, or read once for two results
REDUCING_WORK = range(20_000, 60_000)     # one reduction and what needs it; for more, XLA starts threads sooner than we
REDUCING_TWICE_WORK = range(0, 60_000)    # several reductions
THREADS_WORK = 2_000_000                  # and here our threads win
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
    if not is_entry and work < THREADS_WORK and work not in _worth_in_a_step(cluster.attrs["calls"]):
        return f"{work} operations are no quicker in a call, within a loop"
    return None


def _worth_in_a_step(body: Computation) -> range:
    opcodes = [i.opcode for i in body.instructions]
    reductions = sum(opcode in _REDUCTIONS for opcode in opcodes)
    is_light = all(OPCODES[opcode].unit != "special" for opcode in opcodes)
    if len(body.outputs) > 1 and (reductions or is_light):
        return SAVING_WORK
    if reductions:
        return REDUCING_WORK if reductions == 1 else REDUCING_TWICE_WORK
    moves = any(opcode not in _PLAIN and OPCODES[opcode].kind is not Kind.ELEMENTWISE for opcode in opcodes)
    return SAVING_WORK if moves else range(0)


def _laid_out_for(cluster: Instruction, computation: Computation) -> Instruction | None:
    """The library call whose operand or result a cluster only transposes. XLA gives that array another layout instead,
    but what enters or leaves a custom call lies row by row."""
    body: Computation = cluster.attrs["calls"]
    if any(i.opcode not in _LAYOUT_OPCODES for i in body.instructions):
        return None
    neighbors = (*cluster.operands, *computation.users.get(cluster, ()))
    return next((i for i in neighbors if i.opcode in _LIBRARY_CALLS), None)
