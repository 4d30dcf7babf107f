"""The fusion pass: graph, coloring, outline, and a plan for every kernel.

A kernel that turns out to have no plan (the search judges by masks, the plan by whole index maps) becomes a constraint
"not all of these", and the graph is colored again, a bounded number of rounds; what is left then runs through JAX. So
does a kernel that spills registers, where somebody measures (feedback.py).
"""
from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from hlofuse.errors import HlofuseWarning
from hlofuse.fusion.block_loop import plan_block_loop
from hlofuse.fusion.called import state_for_xla, with_called
from hlofuse.fusion.coloring import collector_paused, color_graph
from hlofuse.fusion.constraints import Constraint, Pair, Wishes
from hlofuse.fusion.cost_estimate import CostEstimate
from hlofuse.fusion.cost_model import KernelCosts
from hlofuse.fusion.cumulative import cumulatives_for_xla
from hlofuse.fusion.devices import DeviceSpec
from hlofuse.fusion.epilogues import find_epilogues
from hlofuse.fusion.exact import TooLargeError
from hlofuse.fusion.feedback import Finding, Measured, find_spilling
from hlofuse.fusion.forced import color_with_forced
from hlofuse.fusion.graph import FusionGraph, is_fusible
from hlofuse.fusion.loops import find_loops
from hlofuse.fusion.outline import outline
from hlofuse.fusion.partition import Coloring, Kernel
from hlofuse.fusion.peak_memory import MemoryRounds, Peak
from hlofuse.fusion.plan import Plan, Refusal, Segment, make_plan
from hlofuse.fusion.scatter import plan_scatters
from hlofuse.fusion.scatter_cost import scatters_for_xla
from hlofuse.hlo.builder import parameter, tuple_of, with_operands
from hlofuse.hlo.module import Computation, Instruction

ROUNDS = 4
DEPTH = 20_000    # Python frames: planning and writing a kernel recurse along its longest chain


@dataclass(frozen=True)
class PlannedKernel:
    """One launch: the fusion instruction that stands for it, its segments (more than one where independent kernels are
    packed; none where it runs through JAX, and `refusal` says why), and its predicted cost."""

    instruction: Instruction
    segments: tuple[Segment, ...]
    cost: CostEstimate
    kernels: tuple[Kernel, ...]
    refusal: str | None = None


@dataclass(frozen=True)
class Fused:
    """What the fusion pass found for one computation; `findings` are what kernels of earlier rounds measured,
    `peak` is the peak of memory where not all buffers fit together."""

    computation: Computation
    kernels: tuple[PlannedKernel, ...]
    graph: FusionGraph
    costs: KernelCosts
    coloring: Coloring
    loop_refusals: Mapping[Instruction, str]    # why a loop stays a loop
    findings: tuple[Finding, ...] = ()
    peak: Peak | None = None
    residual_notes: tuple[str, ...] = ()        # what later loops compute again


Accept = Callable[[Instruction, Sequence[Segment]], str | None]
Measure = Callable[[Sequence[PlannedKernel]], Sequence[Measured | None]]
FuseCalled = Callable[[Computation, Instruction], Computation]


def fuse_computation(computation: Computation, device: DeviceSpec, method: str = "coloring",
                     accept: Accept = lambda fusion, segments: None, measure: Measure | None = None,
                     wishes: Wishes = Wishes(), fuse_called: FuseCalled = lambda c, caller: c,  # noqa: B008 (frozen)
                     caller: Instruction | None = None) -> Fused:
    """Colors a computation and plans its kernels; `accept` may refuse a launch with a reason, `measure` tells the
    registers of kernels that were accepted, `fuse_called` fuses what is called (called.py), and `caller` is what calls
    this computation. `Refusal` if two that `wishes` force into one kernel may not share one."""
    with collector_paused():
        return _fuse(computation, device, method, accept, measure, wishes, fuse_called, caller)


def _fuse(computation: Computation, device: DeviceSpec, method: str, accept: Accept, measure: Measure | None,
          wishes: Wishes, fuse_called: FuseCalled, caller: Instruction | None) -> Fused:
    found = with_called(find_loops(computation, is_fusible, accept, device), fuse_called)
    computation = found.computation
    # On a GPU the library does more than the product; elsewhere these are instructions like any other.
    epilogues = find_epilogues(computation) if device.library_epilogues else {}
    left = (state_for_xla(computation, caller) | scatters_for_xla(computation, device)
            | cumulatives_for_xla(computation, device))
    graph = FusionGraph(computation, [m for e in epilogues.values() for m in e.members], left, found.loops,
                        found.blocks)
    costs = KernelCosts(graph, device)
    costs.constraints.extend(Constraint(frozenset(pair), 1, "forbidden", "these two were asked to be apart")
                             for pair in wishes.forbid)
    findings: list[Finding] = []
    refusals, measurements = 0, 0
    memory = MemoryRounds(costs, ROUNDS - 1)
    while True:
        coloring = _color(costs, method, wishes.force)
        outlined, planned, constraints = _plan_launches(graph, costs, coloring, accept)
        if constraints and refusals < ROUNDS - 1:
            refusals += 1
        elif memory.look_at(coloring):
            continue
        elif measure is not None and measurements < ROUNDS:
            measurements += 1
            new = find_spilling([k.instruction.name for k in planned], [k.kernels for k in planned], measure(planned),
                                costs.reductions, measurements, measurements == ROUNDS)
            findings += new
            constraints = [c for f in new if (c := f.constraint()) is not None]
        else:
            constraints = []
        if not constraints:
            return Fused(outlined, tuple(planned), graph, costs, coloring, found.refusals, tuple(findings), memory.peak,
                         found.notes)
        costs.constraints.extend(constraints)


def _plan_launches(graph: FusionGraph, costs: KernelCosts, coloring: Coloring,
                   accept: Accept) -> tuple[Computation, list[PlannedKernel], list[Constraint]]:
    """The program with a coloring's launches, and what must not be coloured so again because it has no plan."""
    launches = [launch for launch in coloring.launches
                if not any(costs.is_fixed[v] for kernel in launch for v in kernel.members)]
    outlined = outline(graph, [_union(launch) for launch in launches])
    planned: list[PlannedKernel] = []
    refused: list[Constraint] = []
    for launch, fusion in zip(launches, outlined.fusions, strict=True):
        segments, reason = _plan(fusion, costs, launch, accept)
        if not segments:
            why = f"an earlier round found no plan for a kernel of these ({reason})"
            refused.extend(Constraint.not_all(k.members, "producer-consumer", why)
                           for k in launch if len(k.members) > 1)
        planned.append(PlannedKernel(fusion, segments, _launch_cost(costs, launch), launch, reason))
    return outlined.computation, planned, refused


def _color(costs: KernelCosts, method: str, forced: Sequence[Pair]) -> Coloring:
    color = partial(color_with_forced, costs, forced) if forced else partial(color_graph, costs)
    try:
        return color(method)
    except TooLargeError as error:
        warnings.warn(f"{error}, which is taken instead", HlofuseWarning, stacklevel=2)
        return color("coloring")


def _union(launch: Sequence[Kernel]) -> tuple[frozenset[int], frozenset[int]]:
    return frozenset().union(*(k.members for k in launch)), frozenset().union(*(k.outputs for k in launch))


def _launch_cost(costs: KernelCosts, launch: Sequence[Kernel]) -> CostEstimate:
    parts = [costs.estimate(k.members, k.outputs, constrained=False) for k in launch]
    return parts[0] if len(parts) == 1 else CostEstimate.packed(parts)


def _plan(fusion: Instruction, costs: KernelCosts, launch: Sequence[Kernel],
          accept: Accept) -> tuple[tuple[Segment, ...], str | None]:
    body: Computation = fusion.attrs["calls"]
    try:
        segments = tuple(_segments(body, costs, launch))
    except Refusal as refusal:
        return (), f"{refusal.rule}: {refusal}"
    with deep_recursion():
        reason = accept(fusion, segments)
    return (segments, None) if reason is None else ((), reason)


def _segments(body: Computation, costs: KernelCosts, launch: Sequence[Kernel]) -> Iterator[Segment]:
    graph = costs.graph
    if len(launch) == 1:
        in_block = any(graph.vertices[v].instruction in graph.blocks for v in launch[0].members)
        plan = plan_block_loop(body, costs.device.blocks.joined_bytes) if in_block else plan_cluster(body)
        yield Segment(plan, tuple(range(len(body.parameters))), tuple(range(len(body.outputs))))
        return
    position = {r: n for n, r in enumerate(r for v in sorted(_union(launch)[1]) for r in graph.vertices[v].results)}
    for kernel in launch:
        results = [position[r] for v in sorted(kernel.outputs) for r in graph.vertices[v].results]
        part, operands = _restricted(body, results)
        yield Segment(plan_cluster(part), operands, tuple(results))


def plan_cluster(body: Computation) -> Plan:
    """The plan of a cluster, with scatters or without; `Refusal` where there is none."""
    return plan_scatters(body) if any(i.opcode == "scatter" for i in body.instructions) else make_plan(body)


def _restricted(body: Computation, results: Sequence[int]) -> tuple[Computation, tuple[int, ...]]:
    """The part of a computation that some of its results need, and the numbers of the parameters that it reads."""
    roots = [body.outputs[n] for n in results]
    needed = set(roots)
    for i in reversed(body.instructions):
        if i in needed:
            needed.update(i.operands)
    operands = tuple(n for n, p in enumerate(body.parameters) if p in needed)
    copies: dict[Instruction, Instruction] = {}
    for n, old in enumerate(operands):
        p = body.parameters[old]
        copies[p] = parameter(n, p.shape, p.name)
    for i in body.instructions:
        if i in needed and i not in copies:
            copies[i] = with_operands(i, [copies[o] for o in i.operands])
    new = [copies[r] for r in roots]
    return Computation(body.name, tuple(copies[body.parameters[n]] for n in operands),
                       new[0] if len(new) == 1 else tuple_of(new)), operands


_deep = threading.Lock()
_deep_limits: list[int] = []    # the process's own limit, once for each thread that is inside


@contextmanager
def deep_recursion() -> Iterator[None]:
    """Allows recursion along the chains of a kernel. The limit is the process's: the last thread to leave restores it,
    and not while another is still deep in a chain."""
    with _deep:
        _deep_limits.append(_deep_limits[0] if _deep_limits else sys.getrecursionlimit())
        sys.setrecursionlimit(max(_deep_limits[0], DEPTH))
    try:
        yield
    finally:
        with _deep:
            limit = _deep_limits.pop()
            if not _deep_limits:
                sys.setrecursionlimit(limit)
