"""Which loops of a computation become part of a kernel, and why the others stay loops.

A loop is tried by itself: its structure, its space, a plan and a kernel. What passes is a vertex of the fusion graph
like any instruction, so that the work before and after it may join; what does not has a refusal with a name.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hlofuse.fusion.block_cost import MAX_BODY, check_state, plan_in_block
from hlofuse.fusion.block_loop import terms_of
from hlofuse.fusion.cumulative import is_scanned
from hlofuse.fusion.devices import DeviceSpec
from hlofuse.fusion.loop_bodies import PreparedLoop, prepare_loop
from hlofuse.fusion.loop_outputs import write_from_loops
from hlofuse.fusion.loop_space import MAX_PLACES, loops_of, span
from hlofuse.fusion.loop_structure import LoopRefusal, LoopStructure, loop_structure
from hlofuse.fusion.loop_work import LoopCost, loop_registers
from hlofuse.fusion.plan import NESTED_REDUCTION, Plan, Refusal, Segment, make_plan, reduced_size
from hlofuse.fusion.residuals import Rewritten, recompute_residuals
from hlofuse.hlo.builder import element_of, full, make, parameter, tuple_of
from hlofuse.hlo.module import Computation, Instruction
from hlofuse.hlo.opcode import OPCODES, Kind
from hlofuse.hlo.traverse import clone_computation, rebuild, with_changes


@dataclass(frozen=True)
class FoundLoops:
    """`loops` of the new `computation` may be members of kernels, and of these a block runs each of `blocks`, which
    stands alone; `refusals` says why the others stay loops, `notes` what later loops compute again (residuals.py)."""

    computation: Computation
    loops: frozenset[Instruction] = frozenset()
    refusals: Mapping[Instruction, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    blocks: Mapping[Instruction, Plan] = field(default_factory=dict)


Fusible = Callable[[Instruction], bool]
Accept = Callable[[Instruction, tuple[Segment, ...]], str | None]


def find_loops(computation: Computation, is_fusible: Fusible, accept: Accept, device: DeviceSpec) -> FoundLoops:
    """Tries every `while` by itself, in the lanes of threads or else in a block; `accept` writes its kernel."""
    prepared: dict[Instruction, PreparedLoop] = {}
    blocks: dict[Instruction, Plan] = {}
    refusals: dict[Instruction, str] = {}
    outputs = set(computation.outputs)
    for i in computation.instructions:
        if i.opcode != "while":
            continue
        try:
            _check_use(i, computation, outputs)
            _check_opcodes(i)
        except (LoopRefusal, Refusal) as refusal:
            refusals[i] = str(refusal)
            continue
        reasons = []
        # A block folds its whole tile in every step; lanes leave that to a kernel behind the loop.
        for plan_loop, cache_bytes in ((_plan_in_lanes, device.l2_bytes), (plan_in_block, 0)):
            try:
                ready = prepare_loop(i, cache_bytes)
                alone = _alone(ready.loop)
                plan = plan_loop(ready.loop, alone, is_fusible, device)
                _check_text(ready.loop, alone, plan, accept)
            except (LoopRefusal, Refusal) as refusal:
                reasons.append(str(refusal))
                continue
            prepared[i] = ready
            if plan.block is not None:
                blocks[i] = plan
            elif _leaves_vectors_empty(plan, device):
                continue      # a block may do better
            break
        if i not in prepared:
            refusals[i] = "; in a block: ".join(dict.fromkeys(reasons))
    return _with_less_written(_replaced(computation, prepared, refusals, blocks), is_fusible, accept, device)


def _leaves_vectors_empty(plan: Plan, device: DeviceSpec) -> bool:
    """Whether one or two lanes hold much each. On the CPU vectors are made of lanes, in a block of what a lane holds.
    Measured: products of 8 terms and more are faster so, other steps of 32 elements and more."""
    if device.busy_lanes:
        return False
    for loop in plan.loops:
        cost = LoopCost(loop, plan.analysis)
        products = [terms_of(i) for s in loops_of(loop) for i in s.values if i.opcode == "dot"]
        if cost.lanes <= 2 and max(products, default=0) >= 8:
            return True
        if cost.lanes == 1 and span(cost.space.inner, plan.analysis) >= MAX_PLACES:
            return True
    return False


def _check_text(loop: Instruction, alone: Computation, plan: Plan, accept: Accept) -> None:
    reason = accept(loop, (Segment(plan, tuple(range(len(alone.parameters))), tuple(range(len(alone.outputs)))),))
    if reason is not None:
        raise LoopRefusal("text", reason)


def _check_in_lanes(loop: Instruction, is_fusible: Fusible, accept: Accept, device: DeviceSpec) -> None:
    """`LoopRefusal` or `Refusal` where the lanes of no kernel run a loop."""
    alone = _alone(loop)
    _check_text(loop, alone, _plan_in_lanes(loop, alone, is_fusible, device), accept)


def _with_less_written(found: FoundLoops, is_fusible: Fusible, accept: Accept, device: DeviceSpec) -> FoundLoops:
    def check(loop: Instruction) -> None:
        _check_in_lanes(loop, is_fusible, accept, device)

    found = _known_again(found, write_from_loops(found.computation, found.loops - found.blocks.keys(), device, check,
                                                  (LoopRefusal, Refusal)))
    lanes = found.loops - found.blocks.keys()
    if len(lanes) < 2:
        return found
    return _known_again(found, recompute_residuals(found.computation, lanes, device, check, (LoopRefusal, Refusal)))


def _known_again(found: FoundLoops, new: Rewritten) -> FoundLoops:
    """The loops of a computation in which some were made anew."""
    if new.computation is found.computation:
        return found
    loops = [i for i in new.computation.instructions if i.opcode == "while"]
    reasons = {i.attrs["body"]: reason for i, reason in found.refusals.items()}
    bodies = {i.attrs["body"]: plan for i, plan in found.blocks.items()}
    blocks = {i: bodies[i.attrs["body"]] for i in loops if i.attrs["body"] in bodies}
    return FoundLoops(new.computation, frozenset(blocks) | {i for i in loops if i.attrs["body"] in new.bodies},
                      {i: reasons[i.attrs["body"]] for i in loops if i.attrs["body"] in reasons},
                      found.notes + new.notes, blocks)


def _plan_in_lanes(loop: Instruction, alone: Computation, is_fusible: Fusible, device: DeviceSpec) -> Plan:
    for s in loops_of(loop):
        _check_values(s, is_fusible)
    plan = make_plan(alone)
    registers = max(loop_registers(found, plan.analysis) for found in plan.loops)
    if registers > device.max_registers:
        raise LoopRefusal("memory", f"about {registers} registers, a thread has at most {device.max_registers}")
    return plan


def _replaced(computation: Computation, prepared: Mapping[Instruction, PreparedLoop],
              refusals: Mapping[Instruction, str], blocks: Mapping[Instruction, Plan]) -> FoundLoops:
    if not prepared:
        return FoundLoops(computation, frozenset(), refusals)
    ready = dict(prepared)
    results: dict[Instruction, Instruction] = {}
    for i, p in ready.items():
        results.update((user, p.result(user.attrs["index"])) for user in computation.users[i])
    new = rebuild(computation, results)
    # A loop that reads another's results was made again; so are those that stay loops.
    found = [i for i in new.instructions if i.opcode == "while"]
    bodies = {p.loop.attrs["body"]: blocks.get(i) for i, p in ready.items()}
    named = {i.attrs["body"]: reason for i, reason in refusals.items()}
    loops = frozenset(i for i in found if i.attrs["body"] in bodies)
    return FoundLoops(new, loops, {i: named[i.attrs["body"]] for i in found if i not in loops}, (),
                      {i: plan for i in found if (plan := bodies.get(i.attrs["body"])) is not None})


def _check_use(loop: Instruction, computation: Computation, outputs: set[Instruction]) -> None:
    users = computation.users[loop]
    if loop in outputs or loop is computation.root or not users or any(u.opcode != "get-tuple-element" for u in users):
        raise LoopRefusal("state", "the result is used as a whole")
    if any(u.opcode == "tuple" and u is not computation.root for u in users):
        raise LoopRefusal("state", "the result is used as a whole")


def _check_opcodes(loop: Instruction) -> None:
    """What needs no closer look: most loops that stay loops are large."""
    body = loop.attrs["body"].instructions
    for i in body:
        if OPCODES[i.opcode].kind is Kind.OPAQUE or i.opcode in ("convolution", "sort", "call"):
            raise LoopRefusal("library", f"the body has a {i.opcode}, which no lane computes")
    if len(body) > 4 * MAX_BODY:
        raise LoopRefusal("memory", f"a step has {len(body)} instructions, the limit is {MAX_BODY}")


def _check_values(s: LoopStructure, is_fusible: Callable[[Instruction], bool]) -> None:
    size = 0
    for i in s.values:
        size += 1
        if i.opcode in ("tuple", "while") or (i.opcode == "get-tuple-element" and i.operands[0].opcode == "while"):
            continue
        if i.opcode == "scatter" or is_scanned(i):
            raise LoopRefusal("library", f"the body has a {i.opcode}, which no lane computes")
        if i.opcode == "reduce" and is_fusible(i):
            if reduced_size(i) > NESTED_REDUCTION:
                raise LoopRefusal("reduction", f"a step reduces {reduced_size(i)} elements, the limit in a lane is "
                                  f"{NESTED_REDUCTION}")
        elif i.opcode == "dot":
            _check_dot(i)
        elif i.opcode != "get-tuple-element" and not is_fusible(i):
            raise LoopRefusal("library", f"the body has a {i.opcode}, which no lane computes")
    check_state(s)
    if size > MAX_BODY:
        raise LoopRefusal("memory", f"a step has {size} instructions, the limit is {MAX_BODY}")


def _check_dot(i: Instruction) -> None:
    """A product that one lane computes: a loop over a few terms."""
    terms = math.prod(i.operands[0].dims[d] for d in i.attrs["lhs_contracting_dims"])
    if i.element_type not in ("f32", "f64") or any(o.element_type != i.element_type for o in i.operands):
        raise LoopRefusal("library", f"the body has a dot of {i.element_type}, which no lane computes")
    if terms > MAX_PLACES:
        raise LoopRefusal("library", f"the body has a dot over {terms} terms, the limit in a lane is {MAX_PLACES}")


def _alone(loop: Instruction) -> Computation:
    """The loop as a program of its own."""
    s = loop_structure(loop)
    covered = {t.index for t in s.stacked if t.is_covered}
    state = loop.operands[0].operands
    parameters: list[Instruction] = []
    operands: list[Instruction] = []
    for k, o in enumerate(state):
        if k in covered or (s.counter is not None and k in s.counter.counts):
            operands.append(o if o.opcode == "constant" else full(0, o.array))
        else:
            parameters.append(parameter(len(parameters), o.shape))
            operands.append(parameters[-1])
    new = with_changes(loop, operands=[make("tuple", *operands, shape=loop.operands[0].shape)],
                       attrs={**loop.attrs, "body": clone_computation(s.body)})
    changed = [*s.carries, *(t.index for t in s.stacked)]
    counts = set() if s.counter is None else set(s.counter.counts)
    changed = [k for k in changed if k not in counts] or changed
    results = [element_of(new, k) for k in sorted(changed)]
    return Computation("loop", tuple(parameters), results[0] if len(results) == 1 else tuple_of(results))


