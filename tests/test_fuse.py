"""The fusion pass around the coloring: what it leaves of the process as it was, and the bounds of one kernel."""

from __future__ import annotations

import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hlofuse import HlofuseWarning, Options
from hlofuse.compiler import compile_function
from hlofuse.fusion.cost_model import MAX_ACCUMULATORS
from hlofuse.fusion.fuse import DEPTH, deep_recursion


def test_the_recursion_limit_stays_until_the_last_thread_leaves() -> None:
    limit = sys.getrecursionlimit()
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with deep_recursion():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with deep_recursion():
        thread.start()
        assert inside.wait(10)
    assert sys.getrecursionlimit() >= DEPTH
    leave.set()
    thread.join()
    assert sys.getrecursionlimit() == limit


def test_exact_proves_a_long_chain_optimal() -> None:
    def chain(x):
        for k in range(20):
            x = jnp.tanh(x) * (k + 2.0)
        return x

    compilation = compile_function(chain, jax.ShapeDtypeStruct((1 << 20,), jnp.float32), options=Options("exact"))
    statistics = compilation.fusion.coloring.statistics
    assert (statistics.method, statistics.optimal_over) == ("exact", "clones")
    assert len(compilation.clusters) == 1


def test_exact_on_a_graph_too_large_for_it_becomes_coloring_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hlofuse.fusion.exact.MAX_WORK", 5)
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    with pytest.warns(HlofuseWarning, match="at most 5 placements.*use fusion='coloring', which is taken instead"):
        compilation = compile_function(lambda x: (jnp.tanh(x).sum(0), jnp.sin(x).sum(1)), x, options=Options("exact"))
    assert compilation.fusion.coloring.statistics.method == "coloring"


@pytest.mark.parametrize("device", ["h200", "host"])
@pytest.mark.parametrize(("reduction", "accumulators"), [(jnp.sum, 1), (jnp.argmax, 2)])
def test_a_kernel_has_a_bounded_number_of_accumulators(device, reduction, accumulators) -> None:
    x = np.ones((4, 4096), np.float32)
    found = compile_function(lambda x: [reduction(x * k, axis=1) for k in range(50)], x, device=device)
    results = [len(c.instruction.result_shapes) for c in found.clusters]
    assert sum(results) == 50
    assert max(results) * accumulators <= MAX_ACCUMULATORS
    assert len(results) <= -(-50 * accumulators // (MAX_ACCUMULATORS // 2))


def test_double_precision_costs_what_the_device_has_for_it() -> None:
    def compute(dtype, device):
        found = compile_function(lambda x: jnp.sin(x) * x, jax.ShapeDtypeStruct((1 << 20,), dtype), device=device)
        return found.clusters[0].cost.compute_us

    with jax.enable_x64(True):
        ratio = {d: compute(jnp.float64, d) / compute(jnp.float32, d) for d in ("h200", "rtx4090")}
    assert ratio["rtx4090"] > 10 * ratio["h200"] > 1
