"""The answer to "why was this not fused?": clusters with their numbers, then every producer–consumer edge.

Two forms of the same facts: text for people, and a dict for JSON. Times are predictions of the cost model.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hlofuse.explore.edge_report import edge_lines, free_instructions, report_edges, size_text
from hlofuse.explore.launch_count import trip_count
from hlofuse.fusion.called import CALLERS
from hlofuse.fusion.devices import DeviceSpec
from hlofuse.fusion.epilogues import find_epilogues
from hlofuse.fusion.feedback import Finding
from hlofuse.fusion.fuse import Fused, PlannedKernel
from hlofuse.fusion.library_costs import Merging, library_calls, mergings
from hlofuse.fusion.peak_memory import Peak
from hlofuse.hlo.module import Computation, Instruction
from hlofuse.hlo.printer import instruction_names


def explain_parts(entry: Any, bodies: Sequence[Any], device: DeviceSpec) -> str:
    """Text for people: the entry's, then a section for each body that has kernels. A part has `.fusion`, `.clusters`
    and `.computation`, what others call it by."""
    sections = [explain_fusion(entry.fusion, entry.clusters, device)]
    for part, title in _called_parts(entry, bodies):
        if part.clusters:
            sections.append(f"{title}\n{explain_fusion(part.fusion, part.clusters, device)}")
    return "\n\n".join(sections)


def parts_data(entry: Any, bodies: Sequence[Any], device: DeviceSpec) -> dict[str, Any]:
    """The same as numbers, strings, lists and dicts."""
    return {**explanation_data(entry.fusion, entry.clusters, device),
            "bodies": [{"title": title, **explanation_data(part.fusion, part.clusters, device)}
                       for part, title in _called_parts(entry, bodies)]}


_ROLES = {"body": "body", "condition": "condition", "branch_computations": "branch", "to_apply": "computation"}


def _called_parts(entry: Any, bodies: Sequence[Any]) -> Iterator[tuple[Any, str]]:
    """Every body once, callers first, and a title that says whose it is."""
    by_computation = {body.computation: body for body in bodies}
    waiting: list[tuple[Any, str]] = [(entry, "")]
    while waiting:
        part, title = waiting.pop(0)
        if title:
            yield part, title
        graph = part.fusion.graph
        names = instruction_names(graph.computation)
        for i in graph.computation.instructions:
            for key, value in i.attrs.items() if i.opcode in CALLERS and i not in graph.loops else ():
                for number, called in enumerate(value if isinstance(value, tuple) else (value,)):
                    found = by_computation.pop(called, None) if isinstance(called, Computation) else None
                    if found is None:
                        continue
                    role = f"{_ROLES[key]} {number}" if isinstance(value, tuple) else _ROLES[key]
                    trips = trip_count(i) if key == "body" else None
                    times = f", {trips} trips" if trips is not None else ""
                    waiting.append((found, f"{role} of {names[i]}{times}{' in ' if title else ''}{title}"))


def explain_fusion(fused: Fused, clusters: Sequence[Any], device: DeviceSpec) -> str:
    """Of one computation: one paragraph per cluster, one line per edge."""
    lines = [f"{_count(len(clusters), 'kernel')} on {device.name}; {_search(fused)}", ""]
    kernel_names = instruction_names(fused.computation)
    for cluster, planned in zip(clusters, fused.kernels, strict=True):
        lines.extend(_cluster(kernel_names[cluster.instruction], cluster, _Inside.of(fused, planned, device)))
    if fused.graph.left:
        names = instruction_names(fused.graph.computation)
        lines.extend(f"{names[i]}: left to XLA, {reason}" for i, reason in fused.graph.left.items())
        lines.append("")
    if fused.loop_refusals:
        names = instruction_names(fused.graph.computation)
        lines.append("loops that stay loops, and why")
        lines.extend(f"  {names[loop]}: {reason}" for loop, reason in fused.loop_refusals.items())
        lines.append("")
    if fused.residual_notes:
        lines.extend([*fused.residual_notes, ""])
    library = list(_library(fused, device))
    if library:
        lines.extend([*library, ""])
    if fused.findings:
        lines.extend([*_findings(fused), ""])
    if fused.peak is not None:
        lines.extend([_peak(fused, fused.peak, device), ""])
    free = free_instructions(fused)
    if free:
        listed = ", ".join(f"{n} {opcode}" for opcode, n in sorted(free.items()))
        lines.append(f"free, written where they are read: {listed}")
    lines.append("producer -> consumer: what became of the edge")
    lines.extend(edge_lines(report_edges(fused), device.max_registers))
    return "\n".join(lines)


def explanation_data(fused: Fused, clusters: Sequence[Any], device: DeviceSpec) -> dict[str, Any]:
    """Of one computation."""
    kernel_names = instruction_names(fused.computation)
    kernels = []
    for c, planned in zip(clusters, fused.kernels, strict=True):
        inside = _Inside.of(fused, planned, device)
        kernels.append({
            "name": kernel_names[c.instruction], "form": c.form, "refusal": c.refusal,
            "instructions": inside.count, "flops": c.cost.flops, "bytes": c.cost.bytes,
            "registers": c.cost.registers, "time_us": c.cost.time_us, "launch_us": c.cost.launch_us,
            "compute_us": c.cost.compute_us, "memory_us": c.cost.memory_us, "saved_us": inside.saved_us})
    return {"device": device.name, "method": fused.coloring.statistics.method,
            "predicted_us": fused.coloring.predicted_cost, "kernels": kernels, "free": dict(free_instructions(fused)),
            "peak_bytes": None if fused.peak is None else fused.peak.bytes,
            "findings": [{"round": f.round, "kernel": f.kernel, "registers": f.measured.registers,
                          "spilled_bytes": f.measured.spilled_bytes, "limit": f.measured.limit, "at_most": f.at_most,
                          "members": _member_names(fused, f)} for f in fused.findings],
            "edges": [e.to_json(device.max_registers) for e in report_edges(fused)]}


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _search(fused: Fused) -> str:
    statistics = fused.coloring.statistics
    return f"chosen by {statistics.method}, predicted {fused.coloring.predicted_cost:.2f} us in all"


@dataclass(frozen=True)
class _Inside:
    """The instructions of a kernel without the free ones, and T_saved = (n - 1) * T_launch + Q / B: Q are the bytes
    between them, written and read."""

    count: int
    saved_us: float

    @classmethod
    def of(cls, fused: Fused, planned: PlannedKernel, device: DeviceSpec) -> _Inside:
        members = [v for kernel in planned.kernels for v in kernel.members]
        kept = sum(fused.costs.result_bytes(v) for kernel in planned.kernels for v in kernel.members - kernel.outputs)
        return cls(len(members), (len(members) - 1) * device.launch_us + 2 * kept / device.bandwidth)


def _cluster(name: str, cluster: Any, inside: _Inside) -> Iterator[str]:
    cost = cluster.cost
    how = f"form {cluster.form}" if cluster.segments else f"runs through JAX ({cluster.refusal})"
    yield f"{name}: {how}"
    if cluster.segments and cluster.segments[0].plan.block is not None:
        yield f"  {_block_loop(cluster)}"
    yield (f"  {_count(inside.count, 'instruction')}, {cost.flops:.4g} operations W, {cost.bytes} bytes Q, "
           f"intensity W/Q {cost.intensity:.3g}, about {cost.registers} registers")
    yield (f"  T_op {cost.time_us:.2f} us (launch {cost.launch_us:.2f}, compute {cost.compute_us:.2f}, "
           f"memory {cost.memory_us:.2f}); T_saved {inside.saved_us:.2f} us against a kernel for each "
           "instruction")
    yield ""


def _block_loop(cluster: Any) -> str:
    block, text = cluster.segments[0].plan.block, cluster.text
    counter = block.structure.counter
    steps = "steps until data ends them" if counter is None else _count(counter.trips, "step")
    blocks = f"{_count(text.blocks, 'block')} of {_count(text.threads, 'thread')}"
    return (f"{steps} in {blocks}; a block holds arrays of up to {block.points} points in {text.shared_bytes} bytes, "
            f"and waits {_count(block.phases, 'time')} a step")


def _library(fused: Fused, device: DeviceSpec) -> Iterator[str]:
    """Matrix products as the cost model sees them, and why those of one operand are not one product."""
    computation = fused.graph.computation
    names = instruction_names(computation)
    epilogues = find_epilogues(computation) if device.library_epilogues else {}
    calls = library_calls(computation, epilogues, device)
    for call in calls:
        cost, (batch, m, n, k) = call.cost, call.sizes
        extra = "".join(f", {names[o]} is copied first" for o in call.copies)
        if call.epilogue is not None:
            extra += f", epilogue {' '.join(names[i] for i in call.epilogue.members)}"
        yield (f"{names[call.dot]}: library call, {batch} x {m} x {n} x {k}, {cost.flops:.4g} operations W, "
               f"{cost.bytes} bytes Q, T_op {cost.time_us:.2f} us (launch {cost.launch_us:.2f}, "
               f"compute {cost.compute_us:.2f}, memory {cost.memory_us:.2f}){extra}")
    for merging in mergings(computation, calls, device):
        yield _merging(merging, names)


def _merging(m: Merging, names: Mapping[Instruction, str]) -> str:
    dots = ", ".join(names[d] for d in m.dots)
    worse = m.added_bytes >= m.saved_bytes
    verdict = "it would add bytes" if worse else "that is not done, though it would save bytes"
    return (f"{dots} read {names[m.operand]} and are not merged, {verdict}: weights side by side and results apart "
            f"move {size_text(m.added_bytes)}, reading {names[m.operand]} once saves {size_text(m.saved_bytes)}; "
            f"{len(m.dots)} -> {len(m.dots) - m.launches_saved} launches, {m.apart_us:.2f} -> {m.merged_us:.2f} us")


def _peak(fused: Fused, peak: Peak, device: DeviceSpec) -> str:
    names = instruction_names(fused.graph.computation)
    live = [f"{names[fused.graph.vertices[v].instruction]} ({size_text(fused.costs.result_bytes(v))})"
            for v in peak.live[:_LARGEST]]
    return (f"peak memory {size_text(peak.bytes)} of {size_text(device.memory_bytes)}, arguments and "
            f"{', '.join(live) or 'nothing else'}")


_LARGEST = 3  # buffers that are alive at the peak
_LISTED = 8   # instructions of a kernel that is no more


def _findings(fused: Fused) -> Iterator[str]:
    for f in fused.findings:
        m = f.measured
        what = (f"round {f.round}: {f.kernel}: ptxas {m.registers} registers, {m.spilled_bytes} bytes spilled, the "
                f"limit is {m.limit}")
        names = _member_names(fused, f)
        listed = ", ".join(names[:_LISTED]) + (", …" if len(names) > _LISTED else "")
        if f.at_most is None:
            yield f"{what}; it stays so, with {listed}"
        else:
            yield (f"{what}; at most {f.at_most} of {len(names)} of its instructions, {listed}, may share a kernel; "
                   f"coloured again, round {f.round + 1}")


def _member_names(fused: Fused, finding: Finding) -> list[str]:
    names = instruction_names(fused.graph.computation)
    return [names[fused.graph.vertices[v].instruction] for v in sorted(finding.members)]
