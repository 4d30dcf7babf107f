"""Matrix products in the cost model: time, layouts, copies, epilogues, and why products of one operand stay apart."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from hlofuse.compiler import compile_function
from hlofuse.fusion.devices import find_device
from hlofuse.fusion.epilogues import find_epilogues
from hlofuse.fusion.library_costs import library_calls, mergings, product_sizes

H200 = find_device("h200")


def spec(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def calls_of(fn, *args, device=H200):
    computation = compile_function(fn, *args, device=device.name).fusion.graph.computation
    return computation, library_calls(computation, find_epilogues(computation), device)


def test_a_large_product_takes_what_its_multiplications_take():
    _, (call,) = calls_of(lambda a, b: a @ b, spec(4096, 2048), spec(2048, 8192))
    assert call.sizes == (1, 4096, 8192, 2048)
    assert call.cost.flops == 2 * 4096 * 8192 * 2048
    assert call.cost.time_us == pytest.approx(H200.launch_us + call.cost.flops / H200.matmul_rate)
    assert call.cost.bytes == 4 * (4096 * 2048 + 2048 * 8192 + 4096 * 8192)


def test_half_precision_is_faster_and_moves_half():
    (_, (single,)), (_, (half,)) = (
        calls_of(lambda a, b: a @ b, spec(4096, 4096, dtype=t), spec(4096, 4096, dtype=t))
        for t in (jnp.float32, jnp.bfloat16))
    assert half.cost.bytes == single.cost.bytes / 2 and half.cost.compute_us < single.cost.compute_us


def test_a_thin_product_takes_what_its_bytes_take():
    _, (call,) = calls_of(lambda a, b: a @ b, spec(8192, 8192), spec(8192, 1))
    assert call.cost.memory_us > call.cost.compute_us
    assert call.cost.time_us == pytest.approx(H200.launch_us + call.cost.bytes / H200.bandwidth)


def test_batches_are_counted_once():
    _, (call,) = calls_of(lambda a, b: jnp.einsum("bmk,bkn->bmn", a, b), spec(6, 32, 64), spec(6, 64, 16))
    assert product_sizes(call.dot) == (6, 32, 16, 64)


def test_an_epilogue_belongs_to_its_product():
    found = compile_function(lambda x, w, b: jax.nn.relu(x @ w + b), spec(512, 256), spec(256, 128), spec(128))
    assert ", epilogue add maximum" in found.explain()
    _, (call,) = calls_of(lambda x, w, b: jax.nn.relu(x @ w + b), spec(512, 256), spec(256, 128), spec(128))
    _, (plain,) = calls_of(lambda x, w: x @ w, spec(512, 256), spec(256, 128))
    assert call.cost.bytes == plain.cost.bytes + 128 * 4


def test_query_key_and_value_are_not_merged_and_the_numbers_say_why():
    def qkv(x, q, k, v):
        return x @ q, x @ k, x @ v

    shapes = [spec(8192, 1024), *[spec(1024, 1024)] * 3]
    computation, calls = calls_of(qkv, *shapes)
    (merging,) = mergings(computation, calls, H200)
    # Weights and results are moved once more, read and written; x is read once instead of three times.
    assert merging.added_bytes == 2 * 3 * 4 * (1024 * 1024 + 8192 * 1024)
    assert merging.saved_bytes == 2 * 4 * 8192 * 1024 < merging.added_bytes
    assert merging.merged_us > merging.apart_us
    found = compile_function(qkv, *shapes)
    assert found.launches().total == 3
    assert "dot, dot.1, dot.2 read x and are not merged, it would add bytes: " in found.explain()


def test_a_product_of_a_product_is_no_candidate():
    computation, calls = calls_of(lambda x, w: x @ (x @ w), spec(64, 64), spec(64, 64))
    assert len(calls) == 2 and not mergings(computation, calls, H200)
