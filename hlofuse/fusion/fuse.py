"""The fusion pass: graph, coloring, outline, and a plan for every kernel.

A kernel that turns out to have no plan (the search judges by masks, the plan by whole index maps) becomes a constraint
"not all of these", and the graph is colored again, a bounded number of rounds; what is left then runs through JAX.
"""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hlofuse.fusion.coloring import color_graph
from hlofuse.fusion.cost_model import CostEstimate, KernelCosts
from hlofuse.fusion.devices import DeviceSpec
from hlofuse.fusion.graph import FusionGraph
from hlofuse.fusion.outline import outline
from hlofuse.fusion.partition import Coloring
from hlofuse.fusion.plan import Plan, Refusal, make_plan
from hlofuse.hlo.module import Computation, Instruction

ROUNDS = 4
DEPTH = 20_000    # Python frames: planning and writing a kernel recurse along its longest chain


@dataclass(frozen=True)
class PlannedKernel:
    """One kernel: the fusion instruction that stands for it, its plan (None: it runs through JAX, `refusal` says why)."""

    instruction: Instruction
    plan: Plan | None
    cost: CostEstimate
    members: frozenset[int]
    outputs: frozenset[int]
    refusal: str | None = None


@dataclass(frozen=True)
class Fused:
    """What the fusion pass found for one computation."""

    computation: Computation
    kernels: tuple[PlannedKernel, ...]
    graph: FusionGraph
    costs: KernelCosts
    coloring: Coloring


def fuse_computation(computation: Computation, device: DeviceSpec, method: str = "coloring",
                     accept: Callable[[Plan], str | None] = lambda plan: None) -> Fused:
    """Colors a computation and plans its kernels; `accept` may refuse a plan with a reason."""
    graph = FusionGraph(computation)
    costs = KernelCosts(graph, device)
    for last in [False] * (ROUNDS - 1) + [True]:
        coloring = color_graph(costs, method)
        pairs = [(k.members, k.outputs) for k in coloring.kernels if not any(costs.is_fixed[v] for v in k.members)]
        outlined = outline(graph, pairs)
        kernels: list[PlannedKernel] = []
        refused: list[frozenset[int]] = []
        for (members, outputs), fusion in zip(pairs, outlined.fusions, strict=True):
            if fusion is None:
                continue
            plan, reason = _plan(fusion.attrs["calls"], accept)
            if plan is None and len(members) > 1 and not last:
                refused.append(members)
            kernels.append(PlannedKernel(fusion, plan, costs.estimate(members, outputs), members, outputs, reason))
        if not refused:
            break
        costs.forbidden.extend(refused)
    return Fused(outlined.computation, tuple(kernels), graph, costs, coloring)


def _plan(body: Computation, accept: Callable[[Plan], str | None]) -> tuple[Plan | None, str | None]:
    try:
        plan = make_plan(body)
    except Refusal as refusal:
        return None, f"{refusal.rule}: {refusal}"
    with deep_recursion():
        reason = accept(plan)
    return (plan, None) if reason is None else (None, reason)


@contextmanager
def deep_recursion() -> Iterator[None]:
    """Allows recursion along the chains of a kernel."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, DEPTH))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)
