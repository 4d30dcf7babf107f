"""Floors of real programs: what is known of a coloring's kernels at any point never costs more than the whole."""
from __future__ import annotations

import pytest
from catalog import CATALOG

from hlofuse.compiler import compile_function


@pytest.mark.parametrize("device", ["h200", "host"])
@pytest.mark.parametrize("name", ["softmax_cross_entropy", "layer_norm_vjp", "batch_norm_relu", "heat_step",
                                  "segment_mean", "lennard_jones_forces", "attention_vjp", "embedding_scale"])
def test_floors_are_below_the_cost_of_the_coloring(name: str, device: str) -> None:
    workload = CATALOG[name]
    fusion = compile_function(workload.fn, *workload.avals("full"), device=device).fusion
    costs, coloring = fusion.costs, fusion.coloring
    for start in range(costs.num_vertices + 1):
        floor = slack = 0.0
        for kernel in coloring.kernels:
            members = frozenset(v for v in kernel.members if v >= start)
            outputs = kernel.outputs & members
            if members and outputs and not coloring.is_fixed(kernel.id):
                reads = {u for v in members for u in costs.operands[v] if u >= start} - members
                found = costs.kernel_floor(members, outputs, frozenset(reads))
                assert found is not None, f"vertices {sorted(members)} seem to have no plan"
                floor, slack = floor + found[0], slack + found[1]
        assert floor + costs.remaining_floor(start, slack) <= coloring.total_cost * (1 + 1e-9)
