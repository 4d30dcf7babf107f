"""What `explain` says of small programs: exact lines, the numbers behind them, the rule of every refusal."""

from __future__ import annotations

import json
import re
import time

import jax
import jax.numpy as jnp
import pytest

from hlofuse import HlofuseError, Options, cli
from hlofuse.compiler import Compilation, compile_function
from hlofuse.explore.edge_report import report_edges, size_text
from hlofuse.fusion.coloring import MIN_GAIN
from hlofuse.fusion.devices import find_device
from hlofuse.fusion.feedback import Measured
from hlofuse.fusion.fuse import ROUNDS, fuse_computation
from hlofuse.runtime.nvrtc import nvrtc_available
from hlofuse.runtime.ptxas import measure_kernels


def spec(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def softmax_of_product(a, b):
    return jax.nn.softmax(a @ b * 0.5)


def edge_lines(compilation: Compilation) -> dict[str, str]:
    """The text of each edge by `producer -> consumer`."""
    text = compilation.explain().split("what became of the edge\n")[1]
    parts = [line.strip().split("  ", 1) for line in text.splitlines()]
    return {pair: facts.strip() for pair, facts in parts}


def test_a_chain_is_one_kernel_that_saves_a_launch_and_the_bytes_between():
    found = compile_function(lambda x: jnp.tanh(x) + 1.0, spec(1024, 1024))
    (line,) = edge_lines(found).values()
    # 4 MiB written and 4 MiB read are saved of 16 MiB.
    assert line == ("fused       8.05 -> 4.10 us, saves 1 launch, 8.39 MB (ratio 0.500, delta 0.029), "
                    "24 of 255 registers")
    numbers = report_edges(found.fusion)[0].numbers
    assert numbers.bytes_saved == 2 * 4 * 1024 * 1024 and numbers.bytes_unfused == 2 * numbers.bytes_saved
    assert numbers.fused_us == pytest.approx(found.clusters[0].cost.time_us)
    assert numbers.delta == pytest.approx(MIN_GAIN * found.device.bandwidth / numbers.bytes_unfused)
    # T_saved = (n - 1) * T_launch + bytes between / B
    saved = found.device.launch_us + numbers.bytes_saved / found.device.bandwidth
    assert f"T_saved {saved:.2f} us" in found.explain()


def test_a_library_call_is_refused_by_name_and_free_instructions_are_named():
    found = compile_function(softmax_of_product, spec(512, 64), spec(64, 512))
    lines = edge_lines(found)
    assert lines["dot -> multiply"] == "refused     no side effects: dot is a call of its own; moves 2.1 MB"
    (through,) = (pair for pair in lines if pair.startswith("reduce -> subtract"))
    assert through.startswith("reduce -> subtract (broadcast")
    assert "free, written where they are read: " in found.explain()


def test_two_reductions_of_different_axes_are_refused_with_both_names():
    def rows_then_columns(x):
        return (x * x.sum(1, keepdims=True)).sum(0)

    found = compile_function(rows_then_columns, spec(4096, 4096))
    assert any(line.startswith("refused     producer-consumer: ") and " reduce" in line
               for line in edge_lines(found).values())


def test_a_cheap_producer_of_two_kernels_is_recomputed():
    found = compile_function(lambda x: (jnp.negative(x).sum(1), jnp.negative(x).sum(0)), spec(8192, 8192))
    lines = list(edge_lines(found).values())
    assert any(line.startswith("recomputed  computed in 2 kernels; ") for line in lines), lines


def test_json_has_the_numbers_of_the_text(capsys, tmp_path):
    target = tmp_path / "model.py"
    target.write_text("import jax\ndef f(x):\n    return jax.nn.softmax(x) * 2\n")
    assert cli.main(["explain", f"{target}:f", "--args", "f32[128,256]", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"] == "h200" and len(found["kernels"]) == 1
    assert {e["status"] for e in found["edges"]} == {"fused"}
    assert all(e["registers"] <= e["max_registers"] == 255 for e in found["edges"])


def test_every_edge_of_a_large_program_in_seconds():
    def long(x):
        for k in range(2000):
            x = jnp.tanh(x) * (k + 2.0) + x
        return x

    found = compile_function(long, spec(1024))
    start = time.perf_counter()
    edges = report_edges(found.fusion)
    assert len(edges) > 5000 and time.perf_counter() - start < 5


@pytest.mark.parametrize(("size", "text"), [(0, "0 bytes"), (999, "999 bytes"), (4096, "4.1 kB"), (5e12, "5e+03 GB")])
def test_sizes_are_short(size, text):
    assert size_text(size) == text


# ---- forcing and forbidding ------------------------------------------------------------------------------------------


def standardize(x):
    centered = x - x.mean(0)
    return centered / jnp.sqrt(jnp.square(centered).mean(0))


@pytest.fixture(scope="module")
def standardized():
    return compile_function(standardize, spec(65536, 512))


def refused_edge(compilation: Compilation) -> tuple[str, str]:
    return next((e.producer, e.consumer) for e in report_edges(compilation.fusion) if e.rule == "no gain")


def test_a_forced_pair_is_in_one_kernel_and_costs_what_the_model_says(standardized):
    pair = refused_edge(standardized)
    wished = standardized.recolored(force=[pair])
    (edge,) = (e for e in report_edges(wished.fusion) if (e.producer, e.consumer) == pair)
    assert edge.status == "fused"
    wished.fusion.coloring.validate()
    before, after = (c.fusion.coloring.predicted_cost for c in (standardized, wished))
    assert after >= before
    text = standardized.explain(force=[pair])
    assert text.startswith(f"force {','.join(pair)} on h200\n")
    assert f"predicted us  {before:.2f}  {after:.2f}" in text
    assert f"{pair[0]} -> {pair[1]}: fused, was refused" in text


def test_a_forbidden_pair_is_apart(standardized):
    text = standardized.explain(forbid=[("subtract.1", "reduce.1")])
    assert "kernels            2       3          +1" in text
    assert "subtract.1 -> reduce.1: refused, was fused (forbidden: these two were asked to be apart)" in text


def test_forced_kernels_compute_the_same(standardized):
    import numpy as np

    from hlofuse.hlo.to_jax import evaluate_computation

    x = np.random.default_rng(0).normal(size=(64, 96)).astype(np.float32)
    small = compile_function(standardize, x)
    wished = small.recolored(force=[refused_edge(small)] if any(e.rule == "no gain" for e in report_edges(small.fusion))
                             else [("reduce", "multiply")])
    (result,) = evaluate_computation(wished.fused.entry, [x])
    np.testing.assert_allclose(result, standardize(x), rtol=2e-5, atol=2e-5)


def test_siblings_and_what_lies_between_can_be_forced():
    def f(x, y):
        a = jnp.exp(x)
        return a @ y, jnp.tanh(a) + 1.0, jnp.sin(y)

    found = compile_function(f, spec(512, 512), spec(512, 512))
    names = {e.producer for e in report_edges(found.fusion)} | {e.consumer for e in report_edges(found.fusion)}
    wished = found.recolored(force=[("exponential", "add")])
    wished.fusion.coloring.validate()
    assert {"exponential", "tanh", "add"} <= names
    shared = [k.members for k in wished.fusion.coloring.kernels if len(k.members) >= 3]
    assert shared, wished.explain()


@pytest.mark.parametrize(("pair", "message"), [
    (("dot", "multiply"), "no side effects: dot is a call of its own"),
    (("dott", "multiply"), "no instruction is called 'dott' in the optimized program; near: dot"),
    (("multiply", "multiply"), "one instruction"),
    (("a", "multiply"), "a is an argument"),
    (("broadcast", "multiply"), "broadcast is free"),
])  # fmt: skip
def test_what_cannot_be_forced_says_why(pair, message):
    found = compile_function(softmax_of_product, spec(512, 64), spec(64, 512))
    with pytest.raises(HlofuseError) as error:
        found.explain(force=[pair])
    assert message in str(error.value)


def test_a_forced_pair_around_a_call_is_a_cycle():
    found = compile_function(lambda x: x.sum(1) + jnp.sort(x.sum(1)), spec(512, 4096))
    with pytest.raises(HlofuseError, match="cannot force .*: no cycle: between reduce and .* stands sort"):
        found.explain(force=[("reduce", "add")])


def test_two_reductions_of_different_axes_cannot_be_forced():
    found = compile_function(lambda x: (x.sum(0), x.sum(1)), spec(4096, 4096))
    with pytest.raises(HlofuseError, match="producer-consumer: reduce and reduce.1 reduce different axes"):
        found.explain(force=[("reduce", "reduce.1")])


@pytest.mark.parametrize(("options", "status", "said"), [
    (["--forbid", "exponential,divide"], 0, "difference"),
    (["--force", "exponential"], 2, "is not a pair of names, A,B"),
    (["--forbid", "exponentia,divide"], 2, "near: exponential"),
    (["--force", "x,divide"], 2, "x is an argument"),
])  # fmt: skip
def test_force_and_forbid_on_the_command_line(options, status, said, capsys, tmp_path):
    target = tmp_path / "model.py"
    target.write_text("import jax\ndef f(x):\n    return jax.nn.softmax(x) * 2\n")
    assert cli.main(["explain", f"{target}:f", "--args", "f32[128,256]", *options]) == status
    captured = capsys.readouterr()
    assert said in captured.out + captured.err


# ---- feedback --------------------------------------------------------------------------------------------------------


def many_sums(x):
    values = [jnp.exp(x * (k + 1.0)) for k in range(24)]
    return sum(v / v.sum(1, keepdims=True) for v in values)


@pytest.mark.skipif(nvrtc_available() is not None, reason=str(nvrtc_available()))
def test_a_kernel_that_spills_is_colored_again_and_the_explanation_says_so():
    plain = compile_function(many_sums, spec(512, 16384))
    assert max(m.spilled_bytes for m in measure(plain)) > 0, "this program is to spill"
    found = compile_function(many_sums, spec(512, 16384), options=Options(feedback=True))
    assert not any(m.is_too_large for m in measure(found))
    assert found.timings["feedback"] > 0 and "feedback" not in plain.timings
    finding = found.fusion.findings[0]
    assert finding.round == 1 and 0 < finding.at_most < len(finding.members)
    assert re.search(r"round 1: \w+: ptxas \d+ registers, \d+ bytes spilled, the limit is \d+; at most \d+ of \d+ of "
                     r"its instructions, .* may share a kernel; coloured again, round 2", found.explain())


def measure(compilation: Compilation) -> list[Measured]:
    return [m for m in measure_kernels([c.text_in("cuda") for c in compilation.clusters], compilation.device) if m]


def test_feedback_is_bounded_and_says_what_stays():
    """A measurement that never fits ends with single instructions or with the rounds."""
    computation = compile_function(lambda x: jnp.tanh(jnp.exp(x) + 1.0) * x, spec(4096)).fusion.graph.computation
    calls = []

    def never(planned):
        calls.append(len(planned))
        return [Measured(300, 40, 255) for _ in planned]

    fused = fuse_computation(computation, find_device("h200"), measure=never)
    assert len(calls) == ROUNDS and calls[-1] > calls[0] == 1
    assert fused.findings[-1].at_most is None and fused.findings[0].at_most is not None


def test_a_device_with_fewer_registers_splits_more():
    """The measured registers count, whatever was estimated."""
    computation = compile_function(lambda x: jnp.tanh(jnp.exp(x) + 1.0) * x, spec(4096)).fusion.graph.computation
    fused = fuse_computation(computation, find_device("h200"),
                             measure=lambda planned: [Measured(16 * len(k.kernels[0].members), 0, 32) for k in planned])
    assert all(len(k.kernels[0].members) <= 2 for k in fused.kernels)


def test_a_forced_copy_leaves_no_dead_original():
    """The kernel of a forced copy reads it for its other members too."""
    import catalog

    workload = catalog.CATALOG["softmax_cross_entropy"]
    found = compile_function(workload.fn, *workload.avals("full"))
    for edge in report_edges(found.fusion):
        if edge.producer == "select":
            found.recolored(force=[(edge.producer, edge.consumer)]).fusion.coloring.validate()


def test_pairs_beside_a_loop_that_is_a_kernel():
    def f(x):
        y = jax.lax.fori_loop(0, 10, lambda _, c: jnp.tanh(c), x)
        return jnp.exp(y) * 2.0

    found = compile_function(f, spec(4096))
    edge = next(e for e in report_edges(found.fusion) if e.status == "fused")
    wished = found.recolored(forbid=[(edge.producer, edge.consumer)])
    wished.fusion.coloring.validate()
    assert len(wished.clusters) == len(found.clusters) + 1
