"""Peak memory: a fusion that keeps a large buffer alive past the device's memory is refused, with the numbers."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from hlofuse.compiler import compile_function
from hlofuse.explore.edge_report import report_edges
from hlofuse.fusion.devices import find_device
from hlofuse.fusion.fuse import Fused, fuse_computation
from hlofuse.fusion.peak_memory import peak_memory

ROWS, WIDE = 1024, 4096
LARGE = ROWS * WIDE * 4     # bytes of an f32 array


def mask_used_late(x, w):
    """The product is read by a cheap comparison whose small result is needed after two more products."""
    h = x @ w
    mask = h > 0
    late = (jnp.sort(h, axis=0) @ w.T) @ w
    return jnp.where(mask, jnp.sort(late, axis=0), 0.0)


def fuse(fn, memory: float, *dims) -> Fused:
    shapes = [jax.ShapeDtypeStruct(d, jnp.float32) for d in dims]
    computation = compile_function(fn, *shapes).fusion.graph.computation
    return fuse_computation(computation, replace(find_device("h200"), memory_bytes=int(memory)))


DIMS = ((ROWS, WIDE), (WIDE, WIDE))
ARGUMENTS = LARGE + WIDE * WIDE * 4


def test_where_memory_is_plenty_nothing_changes():
    fused = fuse(mask_used_late, 141e9, *DIMS)
    assert fused.peak is None and not fused.costs.constraints


def test_a_fusion_that_keeps_a_large_buffer_alive_is_refused():
    roomy = fuse(mask_used_late, 141e9, *DIMS)
    tight_memory = ARGUMENTS + 2.5 * LARGE
    tight = fuse(mask_used_late, tight_memory, *DIMS)
    (constraint, *_) = tight.costs.constraints
    assert constraint.rule == "memory" and "GB alive" in constraint.reason and "the device has" in constraint.reason
    # The mask is a quarter of what it is computed from.
    limited = replace(roomy.costs.device, memory_bytes=int(tight_memory))
    roomy.costs.device = limited
    before, after = (peak_memory(f.costs, f.coloring) for f in (roomy, tight))
    assert after.bytes <= tight_memory < before.bytes
    assert before.bytes - after.bytes == pytest.approx(LARGE * 3 / 4, rel=0.01)
    assert tight.coloring.predicted_cost >= roomy.coloring.predicted_cost
    (edge,) = (e for e in report_edges(tight) if e.rule == "memory")
    assert (edge.producer, edge.status) == ("compare", "refused") and "GB at the peak" in edge.reason


def test_what_no_fusion_lengthens_is_left_alone_and_said():
    def plain(x):
        return jnp.sort(x, axis=0), jnp.tanh(x)

    fused = fuse(plain, LARGE, (ROWS, WIDE))
    assert fused.peak is not None and fused.peak.bytes == 3 * LARGE
    assert not fused.costs.constraints
