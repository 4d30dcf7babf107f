"""Loops whose steps read their neighbors: one kernel in which a block holds the whole tile, with jax.jit's values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_loop_programs import BLOCKS, laplacian, life_step
from jax import lax
from loop_check import assert_all_same, assert_no_spills, assert_same, launches
from random_stencils import random_stencil
from simt_check import check_cases, compile_case
from test_loops import refusal

from hlofuse.compiler import compile_function
from hlofuse.runtime.nvrtc import nvrtc_available

RNG = np.random.default_rng(0)
U = RNG.standard_normal(48).astype(np.float32)
BOARD = (RNG.random((12, 16)) < 0.4).astype(np.int32)


def forms(fn: Callable, *args: Any) -> list[str]:
    return [c.form for c in compile_function(fn, *args, device="h200").clusters]


def heat(u: Any) -> Any:
    return u + 0.1 * laplacian(u)


def test_values():
    assert_all_same({name: (b.fn, b.args, b.tolerance) for name, b in BLOCKS.items()})


@pytest.mark.parametrize("name", BLOCKS)
def test_a_loop_is_one_launch(name):
    b = BLOCKS[name]
    compilation = compile_function(b.fn, *b.args, device="h200")
    assert "block loop" in [c.form for c in compilation.clusters], compilation.explain()
    assert compilation.launches().total == b.launches, compilation.explain()


def test_arguments_are_read_and_results_written_once():
    board = np.zeros((256, 32, 32), np.int32)
    batch = lambda b: jax.vmap(lambda b: lax.fori_loop(0, 200, lambda i, b: life_step(b), b))(b)  # noqa: E731
    compilation = compile_function(batch, board, device="h200")
    assert (compilation.launches().total, compilation.launches().bytes) == (1, 2 * board.nbytes)
    assert compilation.clusters[0].text.blocks == 256
    assert ("200 steps in 256 blocks of 512 threads; a block holds arrays of up to 1024 points in 8192 bytes, "
            "and waits 1 time a step") in compilation.explain()  # fmt: skip


def test_the_cuda_text_runs_thread_by_thread():
    cases = [compile_case(name, b.fn, jax.device_put(b.args)) for name, b in BLOCKS.items()]
    tally = check_cases(cases, range(5), judged=False)
    assert not tally.faults, "\n".join(tally.faults)
    assert tally.forms["block loop"] >= len(cases)


@pytest.mark.skipif(nvrtc_available() is not None, reason=str(nvrtc_available()))
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_cuda_text_compiles_without_spills(arch):
    assert_no_spills({n: compile_function(b.fn, *b.args, device="h200") for n, b in BLOCKS.items()}, arch)


# --- edges ------------------------------------------------------------------------------------------------------------


def test_few_trips():
    programs = {}
    for n in (0, 1, 2, 3):
        programs[f"scan of {n}"] = (lambda u, xs: lax.scan(lambda u, x: (heat(u) + x, u.max()), u, xs),
                                    (U, np.tile(U, (n, 1))), 1e-5)  # fmt: skip
        programs[f"fori of {n}"] = (lambda u, n=n: lax.fori_loop(0, n, lambda i, u: heat(u), u), (U,), 1e-5)
        programs[f"dynamic {n}"] = (lambda u, n: lax.fori_loop(0, n, lambda i, u: heat(u), u), (U, np.int32(n)), 1e-5)
    assert_all_same(programs)


def test_arrays_without_elements():
    assert_same(lambda u: lax.fori_loop(0, 3, lambda i, u: u + jnp.roll(u, 1), u), U[:0])
    assert_same(lambda u: jax.vmap(lambda u: lax.fori_loop(0, 3, lambda i, u: heat(u), u))(u), np.zeros((0, 48)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8", "uint16", "bool", "complex64"])
def test_types(dtype):
    u = jnp.asarray(BOARD.ravel() if dtype in ("int8", "uint16", "bool") else U).astype(dtype)
    step = (lambda i, u: jnp.roll(u, 1, 0) ^ jnp.roll(u, -1, 0)) if dtype in ("int8", "uint16", "bool") else \
        (lambda i, u: u * jnp.asarray(0.5, dtype) + jnp.roll(u, 1) * jnp.asarray(0.25, dtype))  # fmt: skip
    run = lambda u: lax.fori_loop(0, 7, step, u)  # noqa: E731
    assert_same(run, u)
    assert forms(run, u) == ["block loop"]


def test_double_precision_and_long_integers():
    with jax.enable_x64(True):
        def run(u, n, m):
            step = lambda i, s: (heat(s[0]), s[1] + jnp.roll(s[1], 1) * i, jnp.tanh(s[2] @ m))  # noqa: E731
            return lax.fori_loop(0, n, step, (u, jnp.arange(48), u))

        args = (U.astype(np.float64), np.int64(9), RNG.standard_normal((48, 48)))
        assert_same(run, *args)
        assert launches(run, *args) == 1


def test_nan_and_infinity():
    u = U.copy()
    u[5], u[20] = np.nan, np.inf
    assert_same(lambda u: lax.fori_loop(0, 3, lambda i, u: heat(u), u), u)
    assert_same(lambda u: lax.while_loop(lambda u: u.max() > 0, lambda u: heat(u), u), u)    # NaN > 0 is false
    assert_same(lambda u: lax.fori_loop(0, 3, lambda i, u: jnp.maximum(u, jnp.roll(u, 1)) - u.min(), u), u)


def test_numbers_beside_a_tile():
    """Scalars of the state: sums, counters, a value that the tile is scaled by, two that trade places."""

    def run(u):
        def step(s, _):
            u, a, b, n = s
            return (heat(u) * (1 + 0.01 * a), b, u.sum() * 0.1, n + (u[0] > 0)), a

        return lax.scan(step, (u, jnp.float32(0), jnp.float32(1), 0), None, length=9)

    assert_same(run, U, tolerance=1e-5)
    assert launches(run, U) == 1
    assert_same(jax.vmap(run), np.stack([U, U * 2]), tolerance=1e-5)


def test_what_all_blocks_share():
    """A table and a counter that do not depend on the lanes, results that one block writes."""

    def run(u, table):
        def step(s, x):
            u, n = s
            return (u + x * table[n % 8] + jnp.roll(u, 1, -1) * 0.1, n + 1), n

        return lax.scan(step, (u, jnp.int32(3)), jnp.arange(9.0))

    assert_same(run, np.stack([U, U * 2, -U]), np.arange(8, dtype=np.float32))
    assert_same(jax.vmap(run, (0, None)), np.stack([U, U * 2, -U]), np.arange(8, dtype=np.float32))


def test_sums_of_bools():
    """Of 52 and 66, which g++ 12 adds up wrongly in runs of 8 and 16."""
    run = lambda u, xs: lax.scan(lambda u, x: (jnp.tanh(jnp.roll(u, 1)), (x > u.max() - 2).sum()), u, xs)  # noqa: E731
    assert_same(run, np.tile(U, 2)[:52], RNG.standard_normal((5, 52)).astype(np.float32))
    seeds = {f"seed {seed}": random_stencil(np.random.default_rng(seed)) for seed in (4002, 4014, 4051)}
    assert_all_same({name: (fn, args, 1e-3) for name, (fn, args) in seeds.items()})


def test_random_numbers_of_every_step():
    def run(u, key):
        def step(s, _):
            u, key = s
            key, new = jax.random.split(key)
            return (heat(u) + 0.1 * jax.random.normal(new, u.shape), key), None

        return lax.scan(step, (u, key), None, length=4)[0][0]

    assert_same(run, U, jax.random.PRNGKey(1), tolerance=1e-5)


def test_a_table_that_is_read_where_it_was_just_written():
    def run(t):
        def step(i, s):
            t, total = s
            t = t.at[i].set(t[i - 1] * 0.5)
            t = lax.dynamic_update_slice(t, t[3:5] + 1, (i + 5,))
            return t, total + t[i] + t[2 * i]

        return lax.fori_loop(1, 30, step, (t, jnp.float32(0)))

    def counted(t):
        return lax.fori_loop(1, 30, lambda i, s: (s[0].at[i].set(s[1]), s[1] + s[0][i - 1] * 0.1), (t, jnp.float32(1)))

    for fn in (run, counted):
        assert_same(fn, U, tolerance=1e-5)
        assert launches(fn, U) == 1


def test_initial_values_are_written_into_the_tile():
    assert_same(lambda n: lax.fori_loop(0, n, lambda i, u: heat(u) + jnp.arange(40.0), jnp.zeros(40)), np.int32(4))
    assert_same(lambda u: lax.fori_loop(0, 3, lambda i, u: heat(u), u.T), np.outer(U, U[:36]), tolerance=1e-5)


def test_under_transformations():
    def run(u, xs):
        return lax.scan(lambda u, x: (jnp.sin(heat(u)) + x, u.max()), u, xs)

    xs = np.tile(U, (5, 1)) * 0.1
    loss = lambda u, xs: sum(map(jnp.sum, run(u, xs)))  # noqa: E731
    assert_same(jax.grad(loss, (0, 1)), U, xs, tolerance=1e-5)
    assert_same(jax.vmap(jax.grad(loss), (0, None)), np.stack([U, -U, U * 2]), xs, tolerance=1e-5)
    assert_same(lambda u, xs: jax.jvp(run, (u, xs), (u, xs)), U, xs, tolerance=1e-5)


# --- what stays a loop ------------------------------------------------------------------------------------------------


def test_refusals():
    big = np.zeros((128, 128), np.float32)
    why = refusal(lambda u: lax.fori_loop(0, 3, lambda i, u: heat(u), u), big)
    assert "memory: a step's arrays need 131072 bytes, the largest carry f32[128,128] twice; a block has 49152" in why
    assert "library: the body has a sort" in refusal(lambda u: lax.fori_loop(0, 3, lambda i, u: jnp.sort(u), u), U)
    product = lambda h, c: lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ c), h)  # noqa: E731
    assert "cost: a step of 2048 blocks takes about" in refusal(product, np.zeros((2048, 128)), np.zeros((128, 128)))
    nested = lambda u: lax.fori_loop(0, 3, lambda i, u: lax.fori_loop(0, 2, lambda j, u: heat(u), u) * 0.5, u)  # noqa: E731
    assert "a step has a loop of its own" in refusal(nested, U)


def test_random_stencils():
    programs = {f"seed {seed}": random_stencil(np.random.default_rng(seed)) for seed in range(24)}
    assert_all_same({name: (fn, args, 1e-3) for name, (fn, args) in programs.items()})


def test_random_stencils_run_thread_by_thread():
    programs = {f"seed {seed}": random_stencil(np.random.default_rng(seed)) for seed in range(100, 106)}
    cases = [compile_case(name, fn, jax.device_put(args)) for name, (fn, args) in programs.items()]
    tally = check_cases(cases, range(2), judged=False)
    assert not tally.faults, "\n".join(tally.faults)
    assert tally.forms["block loop"] >= 4


def test_on_the_cpu_a_block_makes_vectors_of_what_one_lane_holds():
    def network(h, w, xs):
        return lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), h, xs)[0]

    def forms(rows, device):
        args = np.ones((rows, 8), np.float32), np.ones((8, 8), np.float32), np.ones((9, rows, 8), np.float32)
        return [c.form for c in compile_function(network, *args, device=device).clusters]

    assert forms(1, "host") == ["block loop"]
    assert forms(64, "host") == ["time loop"]
    assert forms(1, "h200") == ["time loop"]


def test_a_whole_axis_of_small_neighbors_is_one_block():
    def run(u):
        return lax.fori_loop(0, 3, lambda i, u: u + 0.1 * jnp.roll(u, 1, -1) * jnp.roll(u, 2, -2), u)

    for shape in ((64, 32, 12, 8), (1, 32, 12, 8), (300, 4, 9, 9)):
        assert_same(run, np.random.default_rng(0).standard_normal(shape).astype(np.float32), tolerance=1e-5)
