"""Fewer launches and bytes than XLA:GPU on the catalog's full shapes, for an H200; a worse count is explained.

XLA's counts (xla_gpu.json) are its real compiler's; ours are what the fused module would run there.
"""
from __future__ import annotations

import json
from pathlib import Path

import pytest
from catalog import CATALOG

from hlofuse.compiler import compile_function
from hlofuse.config import Options

XLA = json.loads((Path(__file__).parent / "xla_gpu.json").read_text())
GROUPS = {"elementwise", "reduction", "broadcast", "layout", "indexing", "stencil", "simulation"}
NAMES = [name for name, workload in CATALOG.items() if workload.group in GROUPS]

PARTIALS = {"segment_mean": 0.1}      # what a scatter in a fixed order leaves between its blocks, of XLA's bytes


@pytest.mark.parametrize("name", NAMES)
def test_no_more_launches_and_bytes_than_xla(name):
    compilation = compile_function(CATALOG[name].fn, *CATALOG[name].avals("full"))
    ours, theirs = compilation.launches(), XLA[name]
    assert ours.total <= theirs["launches"], compilation.explain()
    assert ours.bytes <= (1.001 + PARTIALS.get(name, 0.0)) * theirs["bytes"], compilation.explain()


ONE_LAUNCH = ["softmax", "layer_norm", "residual_rms_norm", "l2_norm", "adam_update", "rotary_embedding", "heat_step",
              "kmeans_assign", "embedding_scale", "transpose_add_tanh", "normalize_images_nchw", "black_scholes",
              "segment_mean"]


@pytest.mark.parametrize("name", ONE_LAUNCH)
def test_one_kernel_is_enough(name):
    compilation = compile_function(CATALOG[name].fn, *CATALOG[name].avals("full"))
    assert compilation.launches().total == 1, compilation.explain()


@pytest.mark.parametrize("name", ["layer_norm_vjp", "decoder_layer", "lennard_jones_forces"])
def test_the_coloring_is_predicted_no_slower_than_the_baselines(name):
    def predicted(method):
        compilation = compile_function(CATALOG[name].fn, *CATALOG[name].avals("full"), options=Options(fusion=method))
        return compilation.fusion.coloring.predicted_cost

    coloring = predicted("coloring")
    assert coloring <= predicted("greedy") + 1e-9
    assert coloring < predicted("none")


def test_every_kernel_has_a_plan():
    for name, workload in CATALOG.items():
        compilation = compile_function(workload.fn, *workload.avals("full"))
        assert not [c.refusal for c in compilation.clusters if not c.segments], name
