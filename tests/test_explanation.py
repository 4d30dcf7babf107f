"""What `explain` says of small programs: exact lines, the numbers behind them, the rule of every refusal."""

from __future__ import annotations

import json
import time

import jax
import jax.numpy as jnp
import pytest

from hlofuse import cli
from hlofuse.compiler import Compilation, compile_function
from hlofuse.explore.edge_report import report_edges, size_text
from hlofuse.fusion.coloring import MIN_GAIN


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
