"""Which block loops are worth a kernel, and what they cost: a block has one part of the machine for all steps, where a
kernel for each step has all of it."""
from __future__ import annotations

from collections.abc import Callable

from hlofuse.fusion.block_loop import BlockLoop, plan_block_loop, terms_of
from hlofuse.fusion.cost_estimate import UNITS, CostEstimate
from hlofuse.fusion.cumulative import is_scanned
from hlofuse.fusion.devices import DeviceSpec
from hlofuse.fusion.element_work import operations_of
from hlofuse.fusion.loop_space import span
from hlofuse.fusion.loop_structure import LoopRefusal, LoopStructure, loop_structure
from hlofuse.fusion.loop_work import trips
from hlofuse.fusion.plan import Plan
from hlofuse.hlo.module import Computation, Instruction
from hlofuse.hlo.shape import FUSIBLE, Shape

MAX_BODY = 600         # instructions of a step, in lanes those of nested loops too
BARRIER_US = 0.05      # what the threads of a block wait for each other, and for the first results of a phase


def plan_in_block(loop: Instruction, alone: Computation, is_fusible: Callable[[Instruction], bool],
                  device: DeviceSpec) -> Plan:
    """The plan of a loop that one block runs for each of its lanes; `LoopRefusal` or `Refusal` where there is none."""
    s = loop_structure(loop)
    _check_values(s, is_fusible)
    plan = plan_block_loop(alone, device.blocks.joined_bytes)
    block, limit = plan.block, device.blocks.block_bytes
    assert block is not None
    if block.shared_bytes > limit:
        raise LoopRefusal("memory", f"a step's arrays need {block.shared_bytes} bytes{_largest(s)}; "
                          f"a block has {limit}")
    ours, apart = _step_us(blocks_of(plan), block, device), _step_apart_us(s, device)
    if ours > apart:
        raise LoopRefusal("cost", f"a step of {blocks_of(plan)} blocks takes about {ours:.1f} µs, as kernels of its "
                          f"own about {apart:.1f} µs")
    return plan


def _largest(s: LoopStructure) -> str:
    if not s.carries:
        return ""
    largest = max((s.shape(k) for k in s.carries), key=lambda shape: shape.byte_size)
    return f", the largest carry {largest.element_type}[{','.join(map(str, largest.dims))}] twice"


def _rates(device: DeviceSpec) -> dict[str, float]:
    return {"fp": device.fp32_rate, "int": device.int_rate, "special": device.special_rate, "div": device.div_rate,
            "f64": device.fp64_rate}


def _step_us(blocks: int, block: BlockLoop, device: DeviceSpec) -> float:
    """One step of all blocks: each has one of the machine's parts to itself, as long as there are enough."""
    rates, rounds = _rates(device), -(-blocks // device.sm_count)
    one = max([block.work.get(u, 0.0) / (rates[u] / device.sm_count) for u in UNITS])
    if not device.busy_lanes:
        return rounds * one
    cached = _shared_reads(block) / (device.l2_bandwidth / device.sm_count)
    return rounds * max(one, cached) + BARRIER_US * block.phases


def _shared_reads(block: BlockLoop) -> int:
    """Bytes that each block reads in every step of what all of them read."""
    s = block.structure
    readers = {reader for reader, k in s.elements.items() if k in s.invariants and reader not in block.turned}
    read = {s.elements[o] for i in s.varying if i not in s.elements and i.opcode != "dynamic-slice" for o in i.operands
            if o in readers}
    return sum(s.shape(k).byte_size for k in read)


def _step_apart_us(s: LoopStructure, device: DeviceSpec) -> float:
    """One step as a kernel, and a library call for each product. Without a library's threads the CPU has one for it."""
    rates, work, calls = _rates(device), dict.fromkeys(UNITS, 0.0), [device.launch_us]
    for i in s.values:
        if i not in s.varying or not isinstance(i.shape, Shape):
            continue
        if i.opcode == "dot":
            flops = 2.0 * terms_of(i) * i.array.size
            calls.append(device.launch_us + flops / device.matmul_rate_of(i.element_type))
        else:
            unit, ops, wide = operations_of(i)
            work[unit] += ops * wide * terms_of(i) * i.array.size
    parts = device.sm_count if device.busy_lanes else 1
    return sum(calls) + max(work[u] * device.sm_count / rates[u] / parts for u in UNITS)


def _check_values(s: LoopStructure, is_fusible: Callable[[Instruction], bool]) -> None:
    size = sum(i.opcode not in ("tuple", "get-tuple-element") for i in s.values)
    if size > MAX_BODY:
        raise LoopRefusal("memory", f"a step has {size} instructions, the limit is {MAX_BODY}")
    for i in s.values:
        if i.opcode in ("tuple", "while", "get-tuple-element"):
            continue
        if i.opcode == "scatter" or is_scanned(i):
            raise LoopRefusal("library", f"the body has a {i.opcode}, which no block computes")
        if i.opcode == "dot":
            if i.element_type not in ("f32", "f64") or any(o.element_type != i.element_type for o in i.operands):
                raise LoopRefusal("library", f"the body has a dot of {i.element_type}, which no block computes")
            if not terms_of(i) or not i.array.size:
                raise LoopRefusal("shape", "the body has a dot without elements")
        elif not is_fusible(i):
            raise LoopRefusal("library", f"the body has a {i.opcode}, which no block computes")
    check_state(s)


def check_state(s: LoopStructure) -> None:
    """Whether kernels compute every element of the state."""
    shapes = [s.shape(k) for k in range(len(s.body.root.operands))]
    if not all(isinstance(shape, Shape) and shape.element_type in FUSIBLE and shape.size for shape in shapes):
        raise LoopRefusal("shape", "an element of the state has a type or a size that no kernel computes")


def block_cost(plan: Plan, moved: int, device: DeviceSpec) -> CostEstimate:
    """All steps of all blocks."""
    block, blocks = plan.block, blocks_of(plan)
    assert block is not None
    steps = trips(block.structure)
    compute = steps * _step_us(blocks, block, device)
    memory = moved / device.bandwidth
    work = {u: block.work.get(u, 0.0) * steps * blocks for u in UNITS}
    time = device.launch_us + max(compute, memory) + device.overlap_loss * min(compute, memory)
    return CostEstimate(time, device.launch_us, compute, memory, moved, sum(work.values()), block_registers(block),
                        0, work)


def block_registers(block: BlockLoop) -> int:
    """Registers of a thread: what one point has under way, and the numbers of the state."""
    s = block.structure
    numbers = sum(s.shape(k).size == 1 for k in s.carries)
    return int(20 + numbers + 1.5 * sum(i.opcode not in ("tuple", "get-tuple-element") for i in s.values) ** 0.5)


def blocks_of(plan: Plan) -> int:
    assert plan.block is not None
    return span(plan.block.lanes, plan.analysis)
