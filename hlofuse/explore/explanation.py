"""The answer to "why was this not fused?": clusters with their numbers, then every producer–consumer edge."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hlofuse.fusion.devices import DeviceSpec
from hlofuse.fusion.fuse import Fused
from hlofuse.fusion.partition import Coloring
from hlofuse.hlo.printer import print_instruction


def explain_fusion(fused: Fused, clusters: Sequence[Any], device: DeviceSpec) -> str:
    """Text for people: one paragraph per cluster, one line per edge."""
    lines = [f"{len(clusters)} kernels on {device.name}"]
    for cluster in clusters:
        cost = cluster.cost
        where = f"form {cluster.form}" if cluster.segments else f"runs through JAX ({cluster.refusal})"
        lines.append(f"{cluster.name}: {where}, {len(cluster.instruction.attrs['calls'].instructions)} instructions, "
                     f"{cost.bytes} bytes, {cost.flops:.4g} operations, intensity {cost.intensity:.3g}, "
                     f"predicted {cost.time_us:.3f} us")
    lines.append("")
    lines.extend(_edges(fused))
    return "\n".join(lines)


def _edges(fused: Fused) -> list[str]:
    graph, coloring = fused.graph, fused.coloring
    homes = _homes(coloring)
    lines = []
    for v, operands in enumerate(graph.operands):
        for u in operands:
            together = homes.get(u, set()) & homes.get(v, set())
            a, b = (print_instruction(graph.vertices[x].instruction).split(" = ")[0].strip() for x in (u, v))
            if together:
                state = "fused" if len(homes.get(u, ())) == 1 else "recomputed"
            else:
                state = "separate: " + _reason(fused, u, v)
            lines.append(f"{a} -> {b}: {state}")
    return lines


def _homes(coloring: Coloring) -> dict[int, set[int]]:
    homes: dict[int, set[int]] = {}
    for k, kernel in enumerate(coloring.kernels):
        for v in kernel.members:
            homes.setdefault(v, set()).add(k)
    return homes


def _reason(fused: Fused, u: int, v: int) -> str:
    from hlofuse.fusion.plan import Refusal

    costs = fused.costs
    for x in (u, v):
        if costs.is_fixed[x]:
            return f"no side effects: {fused.graph.vertices[x].instruction.opcode} stands alone"
    if costs.conflict(u, v):
        return "producer-consumer: reductions of different axes"
    try:
        together = costs.estimate({u, v}, {v} if not fused.graph.is_output[u] else {u, v}).time_us
    except Refusal as refusal:
        return f"{refusal.rule}: {refusal}"
    apart = sum(k.cost or 0.0 for k in fused.coloring.kernels if u in k.members or v in k.members)
    return f"no gain: {together:.3f} us for the pair, the two kernels take {apart:.3f} us"
