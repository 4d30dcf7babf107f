"""The answer to "why was this not fused?": clusters with their numbers, then every producer–consumer edge.

Names are those of the optimized module's text. A refused edge names its rule (producer-consumer, no cycle, shape, no
side effects, memory) or says that joining gains nothing, always with the numbers that decided.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hlofuse.fusion.devices import DeviceSpec
from hlofuse.fusion.edge_decisions import EdgeDecision, explain_edges
from hlofuse.fusion.fuse import Fused
from hlofuse.fusion.plan import Refusal
from hlofuse.hlo.printer import instruction_names


def explain_fusion(fused: Fused, clusters: Sequence[Any], device: DeviceSpec) -> str:
    """Text for people: one paragraph per cluster, one line per edge."""
    names = instruction_names(fused.graph.computation)
    lines = [f"{_count(len(clusters), 'kernel')} on {device.name}; {_search(fused)}", ""]
    kernel_names = instruction_names(fused.computation)
    for cluster in clusters:
        lines.extend(_cluster(kernel_names[cluster.instruction], cluster, device))
    if fused.graph.left:
        lines.extend(f"{names[i]}: left to XLA, {reason}" for i, reason in fused.graph.left.items())
        lines.append("")
    if fused.loop_refusals:
        lines.append("loops that stay loops, and why")
        lines.extend(f"  {names[loop]}: {reason}" for loop, reason in fused.loop_refusals.items())
        lines.append("")
    lines.append("producer -> consumer: what became of the edge")
    lines.extend(f"  {names[_instruction(fused, d.producer)]} -> {names[_instruction(fused, d.consumer)]}: "
                 f"{_decision(fused, d, names)}" for d in explain_edges(fused.coloring))
    return "\n".join(lines)


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _search(fused: Fused) -> str:
    statistics = fused.coloring.statistics
    return f"chosen by {statistics.method}, predicted {fused.coloring.predicted_cost:.2f} us in all"


def _cluster(name: str, cluster: Any, device: DeviceSpec) -> Iterator[str]:
    cost, body = cluster.cost, cluster.instruction.attrs["calls"]
    inside = [i for i in body.instructions if i.opcode not in ("parameter", "constant", "tuple")]
    how = f"form {cluster.form}" if cluster.segments else f"runs through JAX ({cluster.refusal})"
    yield f"{name}: {how}"
    yield (f"  {_count(len(inside), 'instruction')}, {cost.flops:.4g} operations W, {cost.bytes} bytes Q, "
           f"intensity W/Q {cost.intensity:.3g}, about {cost.registers} registers")
    kept = sum(s.byte_size for i in inside if i not in body.outputs for s in i.result_shapes)
    saved = (len(inside) - 1) * device.launch_us + 2 * kept / device.bandwidth
    yield (f"  T_op {cost.time_us:.2f} us (launch {cost.launch_us:.2f}, compute {cost.compute_us:.2f}, "
           f"memory {cost.memory_us:.2f}); T_saved {saved:.2f} us against a kernel for each instruction")
    yield ""


def _instruction(fused: Fused, vertex: int) -> Any:
    return fused.graph.vertices[vertex].instruction


def _decision(fused: Fused, d: EdgeDecision, names: Any) -> str:
    if d.status == "cloned":
        return "recomputed by each reader"
    if d.status == "fused":
        return "fused"
    if _instruction(fused, d.consumer) in fused.graph.epilogues and d.reason == "fixed":
        producer = _instruction(fused, d.producer)
        if producer.opcode == "dot" or producer in fused.graph.epilogues:
            return "the epilogue of a library call"
    reasons = {"fixed": _fixed, "conflict": _conflict, "cycle": _cycle, "no plan": _no_plan, "no gain": _no_gain}
    return "separate, " + reasons[d.reason or "no plan"](fused, d, names)


def _fixed(fused: Fused, d: EdgeDecision, names: Any) -> str:
    alone = d.producer if fused.costs.is_fixed[d.producer] else d.consumer
    if _instruction(fused, alone) in fused.graph.epilogues:
        return f"no side effects: {names[_instruction(fused, alone)]} is computed by its dot's library call"
    reason = fused.graph.left.get(_instruction(fused, alone))
    if reason is not None:
        return f"no side effects: {names[_instruction(fused, alone)]} is left to XLA: {reason}"
    return f"no side effects: {names[_instruction(fused, alone)]} is a call of its own"


def _conflict(fused: Fused, d: EdgeDecision, names: Any) -> str:
    u, v = d.conflict or (d.producer, d.consumer)
    if _instruction(fused, u) in fused.graph.loops or _instruction(fused, v) in fused.graph.loops:
        return f"producer-consumer: {fused.costs.loop_conflict(u, v)}"
    return (f"producer-consumer: {names[_instruction(fused, u)]} and {names[_instruction(fused, v)]} reduce different "
            "axes")


def _cycle(fused: Fused, d: EdgeDecision, names: Any) -> str:
    return "no cycle: between them stands " + ", ".join(names[_instruction(fused, v)] for v in d.path[1:] or d.path)


def _no_plan(fused: Fused, d: EdgeDecision, names: Any) -> str:
    homes = [k for k in fused.coloring.kernels if d.producer in k.members or d.consumer in k.members]
    try:
        fused.costs.estimate(frozenset().union(*(k.members for k in homes)),
                             frozenset().union(*(k.outputs for k in homes)))
    except Refusal as refusal:
        return f"{refusal.rule}: {refusal.text(names)}"
    return "shape: no kernel form covers both"


def _no_gain(fused: Fused, d: EdgeDecision, names: Any) -> str:
    return f"no gain: one kernel would take {d.delta or 0.0:.2f} us more than two"
