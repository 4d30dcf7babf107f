"""What stays a loop, a branch or a call runs kernels in its body: the values of `jax.jit`, and where the state lies."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from random_loops import random_gradient, random_loop

import hlofuse
from hlofuse.compiler import compile_function
from hlofuse.explore.dump import stage_text
from hlofuse.fusion import loops
from hlofuse.fusion.loop_structure import LoopRefusal
from hlofuse.runtime import call_worth, loop_state, xla_runtime

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _no_block_loops(monkeypatch: pytest.MonkeyPatch):
    """Arrays of these tests are small: a block would run the loops that larger ones leave loops."""

    def refuse(*args):
        raise LoopRefusal("memory", "no block runs a loop in these tests")

    monkeypatch.setattr(loops, "plan_in_block", refuse)




def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@dataclass(frozen=True)
class Program:
    fn: Callable
    args: tuple
    tolerance: float


PROGRAMS: dict[str, Program] = {}


def program(*args: Any, tolerance: float = 2e-5):
    def add(fn):
        PROGRAMS[fn.__name__] = Program(fn, args, tolerance)
        return fn

    return add


W, U, B, H, XS = normal(64, 64) / 8, normal(64, 64) / 8, normal(64), normal(8, 64), normal(6, 8, 64)
GRID = normal(48, 48)
BOARD = (RNG.random((64, 64)) < 0.4).astype(np.int32)


def layer_norm(x):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)


def recurrent(h, w, u, b, xs):
    def step(h, x):
        h = layer_norm(jnp.tanh(h @ w + x @ u + b))
        return h, h * 2

    return lax.scan(step, h, xs)


def heat(u, trips):
    def step(_, u):
        p = jnp.pad(u, 1, mode="edge")
        return u + 0.1 * (p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * u)

    return lax.fori_loop(0, trips, step, u)


def wave(u, trips):
    def step(_, state):
        u, before = state
        p = jnp.pad(u, 1)
        return 2 * u - before + 0.1 * (p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * u), u

    return lax.fori_loop(0, trips, step, (u, u))


def life(board, trips):
    def step(_, b):
        near = sum(jnp.roll(b, (i, j), (0, 1)) for i in (-1, 0, 1) for j in (-1, 0, 1) if (i, j) != (0, 0))
        return ((near == 3) | ((b == 1) & (near == 2))).astype(b.dtype)

    return lax.fori_loop(0, trips, step, board)


program(H, W, U, B, XS)(recurrent)


@program(GRID)
def stencils_of_zero_one_odd_and_even_trips(u):
    return [heat(u, trips) for trips in (0, 1, 2, 5, 6)]


@program(GRID, np.int32(5))
def a_stencil_of_trips_known_late(u, n):
    return heat(u, n)


@program(GRID)
def states_that_move_on(u):
    def step(_, s):
        a, b, c = s
        return jnp.roll(a, 1, 0) * 0.5 + c, a, b

    return [wave(u, trips) for trips in (1, 2, 7, 8)], [
        lax.fori_loop(0, trips, step, (u, u + 1, u + 2)) for trips in (2, 3, 4, 6, 11)]


@program(normal(16, 64))
def steps_that_are_one_kernel_whose_operands_are_the_state(x):
    """XLA must not take what a step reads first for what the next step reads."""

    def body(s):
        x, n = s
        return jax.nn.softmax(x) * 4 - jnp.roll(x, 1, 1) * 0.1, n + 1

    def other(s):
        x, y, n = s
        return jnp.roll(x, 1, 0) * 0.5 + y, jnp.sin(jnp.roll(x, 1, 1)), n * 0.9

    some = [lax.while_loop(lambda s, n=n: (jnp.max(s[0]) > 1e-9) & (s[1] < n), body, (x, 0)) for n in (1, 2, 3)]
    return some, lax.while_loop(lambda s: jnp.max(s[2]) > 0.5, other, (x, x + 1, jnp.abs(x)))


@program(GRID, GRID.T.copy(), H)
def states_that_rotate(a, b, c):
    def step(i, s):
        return s[1] + i, s[0], jnp.tanh(s[2] @ W)

    return lax.fori_loop(0, 5, step, (a, b, c))


@program(BOARD)
def game_of_life(board):
    return [life(board, trips) for trips in (20, 21)]


@program(normal(16, 64))
def a_softmax_until_it_is_flat(x):
    def body(s):
        x, n = s
        return jax.nn.softmax(x) * 4 - jnp.roll(x, 1, 1) * 0.1, n + 1

    return lax.while_loop(lambda s: (jnp.max(s[0]) - jnp.min(s[0]) > 1e-2) & (s[1] < 40), body, (x, 0))


@program(normal(64, 64), normal(64))
def power_iteration(a, v):
    def step(_, v):
        v = a @ v
        return v / jnp.linalg.norm(v)

    return lax.fori_loop(0, 9, step, v)


@program(normal(32, 32), tolerance=1e-3)
def conjugate_gradient(b):
    def operator(x):
        p = jnp.pad(x, 1)
        return 5 * x - p[2:, 1:-1] - p[:-2, 1:-1] - p[1:-1, 2:] - p[1:-1, :-2]

    def body(s):
        x, r, p, rs, n = s
        ap = operator(p)
        alpha = rs / jnp.vdot(p, ap)
        x, r = x + alpha * p, r - alpha * ap
        new = jnp.vdot(r, r)
        return x, r, r + new / rs * p, new, n + 1

    return lax.while_loop(lambda s: (s[3] > 1e-4) & (s[4] < 30), body, (jnp.zeros_like(b), b, b, jnp.vdot(b, b), 0))


@program(normal(5, 300))
def a_sort_in_the_body(x):
    return lax.fori_loop(0, 4, lambda i, x: jnp.sort(jnp.sin(x) * (i + 1), axis=-1), x)


@program(np.uint32(7), normal(32, 64))
def dropout_in_every_step(seed, x):
    def step(x, key):
        keep = jax.random.bernoulli(key, 0.8, x.shape)
        return layer_norm(jnp.where(keep, x @ W[:64] / 0.8, 0)), keep.sum()

    return lax.scan(step, x, jax.random.split(jax.random.key(seed), 5))


@program(H, np.bool_(True), np.int32(2))
def heavy_branches(x, p, n):
    a = lax.cond(p, lambda x: layer_norm(jnp.tanh(x @ W)), lambda x: jax.nn.softmax(x @ U), x)
    b = lax.switch(n, [lambda x: x @ W, lambda x: layer_norm(x) @ U, lambda x: jax.nn.softmax(x)], x)
    return a, b, lax.cond(~p, layer_norm, jax.nn.softmax, a)


@program(H, XS)
def branches_in_a_loop(h, xs):
    def step(h, x):
        h = lax.cond(x.sum() > 0, lambda h: layer_norm(h @ W + x), lambda h: jnp.tanh(h) * x.mean(0), h)
        return h, h[:, :3]

    return lax.scan(step, h, xs)


@program(H, XS)
def scan_in_scan(h, xs):
    def outer(h, x):
        h, ys = lax.scan(lambda h, v: (layer_norm(h @ W + v), h.sum(-1)), h, xs[:3] * x.mean())
        return jnp.tanh(h) + x, ys

    return lax.scan(outer, h, xs, reverse=True)


@program(np.stack([H, H + 1, H * 2]), XS)
def vmapped(hs, xs):
    return jax.vmap(lambda h: recurrent(h, W, U, B, xs))(hs)


@program(normal(3, 16, 64))
def vmapped_while(x):
    def solve(x):
        return lax.while_loop(lambda s: jnp.abs(s).max() > 0.5, lambda s: layer_norm(s @ W) * jnp.abs(s).max() * 0.3, x)

    return jax.vmap(solve)(x)


@program(W, H, XS, tolerance=1e-4)
def gradient_of_a_scan(w, h, xs):
    def loss(w, h):
        return jnp.square(lax.scan(lambda h, x: (layer_norm(jnp.tanh(h @ w + x)), None), h, xs)[0] - 1).mean()

    return jax.value_and_grad(loss, (0, 1))(w, h)


@program(W, H, XS, tolerance=1e-4)
def gradient_of_checkpointed_steps(w, h, xs):
    def loss(w):
        step = jax.checkpoint(lambda h, x: (layer_norm(jnp.tanh(h @ w + x)), None))
        return jnp.square(lax.scan(step, h, xs)[0]).mean()

    return jax.grad(loss)(w)


@program(H.astype(jnp.bfloat16), XS.astype(jnp.bfloat16))
def bfloat16(h, xs):
    return lax.scan(lambda h, x: (jnp.tanh(h @ W.astype(h.dtype) + x), x.sum(-1)), h, xs)


@program(RNG.integers(-99, 99, (64, 64)).astype(np.int32))
def integers_wrap(n):
    return lax.fori_loop(0, 7, lambda i, n: (n @ n) * 3 + jnp.roll(n, i, 0), n)


@program(H, XS)
def functions_that_are_called(h, xs):
    block = jax.jit(lambda h, x: layer_norm(jnp.tanh(h @ W + x)))
    return lax.scan(lambda h, x: (block(block(h, x), x), None), block(h, xs[0]), xs)[0]


@program(H, XS[:0], np.int32(0))
def no_trips(h, xs, n):
    step = lambda h, x: (layer_norm(h @ W + x), h)  # noqa: E731
    return lax.scan(step, h, xs), lax.fori_loop(0, n, lambda i, h: step(h, 1)[0], h)


@program(normal(40, 64), np.int32(3))
def slices_are_written_and_read(table, start):
    def step(i, table):
        row = layer_norm(table[i] @ W)
        table = lax.dynamic_update_slice(table, row[None] + table[i + 1], (i + 2, 0))
        return table.at[i].add(jnp.tanh(row))

    return lax.fori_loop(start, 30, step, table)


@program(normal(12, 64))
def a_slice_is_read_after_it_is_written(x):
    def step(i, s):
        x, total = s
        x = lax.dynamic_update_slice(x, jnp.tanh(x[:1] @ W), (i, 0))
        return x, total + jnp.abs(layer_norm(x)).mean() + x[i, 0]

    return lax.fori_loop(0, 9, step, (x, jnp.float32(0)))


@program(GRID, W)
def the_same_value_twice_and_the_old_one_too(u, w):
    def step(s, _):
        a, b, c = s
        new = jnp.roll(a, 1, 0) + b * 0.5
        return (new, new, a), (c.sum(), new[0])

    return lax.scan(step, (u, u, u), None, length=5)


def assert_same(got: Any, expected: Any, tolerance: float, name: str = "") -> None:
    """Types and weak types too; bits where no float is involved."""
    assert jax.tree.structure(got) == jax.tree.structure(expected), name
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape, a.weak_type) == (b.dtype, b.shape, b.weak_type), name
        if jnp.issubdtype(a.dtype, jnp.inexact):
            coarse = 2e-2 if a.dtype == jnp.bfloat16 else tolerance
            x, y = np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)
            np.testing.assert_allclose(x, y, coarse, coarse, err_msg=name)
        else:
            np.testing.assert_array_equal(a, b, err_msg=name)


def test_values(monkeypatch):
    """Small states have several steps a trip too."""
    monkeypatch.setattr(loop_state, "LARGE_STATE", 0)

    def everything(arguments):
        return {name: p.fn(*arguments[name]) for name, p in PROGRAMS.items()}

    arguments = {name: p.args for name, p in PROGRAMS.items()}
    got, expected = hlofuse.jit(everything)(arguments), jax.jit(everything)(arguments)
    for name, p in PROGRAMS.items():
        assert_same(got[name], expected[name], p.tolerance, name)


@pytest.mark.parametrize("method", ["greedy", "none"])
def test_values_of_other_searches(method):
    assert_same(hlofuse.jit(recurrent, fusion=method)(H, W, U, B, XS), jax.jit(recurrent)(H, W, U, B, XS), 2e-5)


def test_values_with_64_bits():
    with jax.enable_x64(True):
        x = RNG.standard_normal((32, 32))
        n = RNG.integers(-9, 9, (32, 32))

        def f(x, n):
            step = lambda i, s: (jnp.tanh(s[0] @ x + jnp.roll(s[0], i, 0)), s[1] @ n + i)  # noqa: E731
            return lax.fori_loop(0, 5, step, (x, n)), heat(x, 3), lax.cond(x[0, 0] > 0, layer_norm, jax.nn.softmax, x)

        got = hlofuse.jit(f)(x, n)
        assert got[0][1].dtype == np.int64 and got[1].dtype == np.float64
        assert_same(got, jax.jit(f)(x, n), 1e-10)


def test_values_in_the_array_runtime():
    step = hlofuse.jit(branches_in_a_loop, runtime="numpy")
    assert [k.name for k in step.executable(H, XS).kernels if "/" in k.name]
    expected = jax.jit(branches_in_a_loop)(H, XS)
    for a, b in zip(step(H, XS), expected, strict=True):
        assert isinstance(a, np.ndarray)
        np.testing.assert_allclose(a, b, 2e-5, 2e-5)


def test_values_thread_by_thread():
    """The CUDA kernels in a body, executed on the CPU."""
    def f(u, h, xs):
        return wave(u, 3), recurrent(h, W, U, B, xs)

    args = GRID[:12, :12], H, XS[:2]
    assert_same(hlofuse.jit(f, device="simt")(*args), jax.jit(f)(*args), 2e-5)


def test_values_on_shards():
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")

    def of(jit):
        def f(h, xs):
            step = lambda h, x: (layer_norm(jnp.tanh(h @ W + x)), h.sum(0))  # noqa: E731
            return lax.scan(step, h, xs)[0], wave(h, 5), lax.cond(xs.sum() > 0, layer_norm, jax.nn.softmax, h)

        spread = jax.sharding.PartitionSpec(None, "i")
        return jax.jit(jax.shard_map(jit(f), mesh=mesh, in_specs=(spec, spread), out_specs=spec))(H, XS)

    assert_same(of(hlofuse.jit), of(jax.jit), 2e-5)


def test_donated_state():
    f = hlofuse.jit(heat, donate_argnums=0, static_argnums=1)
    u = jnp.asarray(GRID)
    expected = jax.jit(heat, static_argnums=1)(GRID, 5)
    np.testing.assert_allclose(f(u, 5), expected, 2e-5, 2e-5)


def test_closed_over_tracers_and_transformations():
    def of(jit):
        def outer(w, h, xs):
            f = jit(lambda h: lax.scan(lambda h, x: (layer_norm(jnp.tanh(h @ w + x)), h.sum()), h, xs))
            return f(h), jax.vmap(f)(jnp.stack([h, h + 1])), jax.grad(lambda h: jnp.square(f(h)[0] - 1).sum())(h)

        return jax.jit(outer)(W, H, XS)

    assert_same(of(hlofuse.jit), of(jax.jit), 1e-4)


def test_effects_in_a_body_stay_plain(capfd):
    def f(h, xs):
        def step(h, x):
            jax.debug.print("sum {}", x.sum() > 1e9)
            return layer_norm(h @ W + x), None

        return lax.scan(step, h, xs)[0]

    compiled = hlofuse.jit(f).lower(H, XS).compile()
    assert not compiled.kernels
    assert_same(compiled(H, XS), jax.jit(f)(H, XS), 0.0)


# --- what one sees of it ----------------------------------------------------------------------------------------------


def test_kernels_of_bodies_are_shown():
    compiled = hlofuse.jit(scan_in_scan).lower(H, XS).compile()
    names = [k.name for k in compiled.kernels]
    assert len(names) == len(set(names))
    inside = [name for name in names if "/" in name]
    assert inside and all(k.sources["cuda"] for k in compiled.kernels)
    text = compiled.explain()
    assert "body of while, 6 trips\n" in text
    assert "body of while, 3 trips in body of while, 6 trips\n" in text
    fused = stage_text(compiled.executables[0].compilation, "fused", metadata=False)
    for name in inside:
        body, kernel = name.split("/")
        assert re.search(rf"^{re.escape(body)} {{(?:(?!^}}).)* {re.escape(kernel)} = ", fused, re.S | re.M), name
    cuda = stage_text(compiled.executables[0].compilation, "cuda")
    assert all(k.sources["cuda"] in cuda for k in compiled.kernels)


def test_explanation_as_data_has_the_bodies():
    data = compile_function(heavy_branches, H, np.bool_(True), np.int32(2), device="h200").explanation()
    titles = [body["title"] for body in data["bodies"]]
    assert {"branch 0 of conditional", "branch 1 of conditional.1", "branch 2 of conditional.1"} <= set(titles)
    assert all(body["kernels"] for body in data["bodies"] if "of conditional.2" in body["title"])


@pytest.mark.parametrize("device", ["host", "h200"])
def test_launches_count_the_kernels_of_bodies(device):
    compilation = compile_function(recurrent, H, W, U, B, XS, device=device)
    (body,) = [b for b in compilation.bodies if b.clusters]
    count = compilation.launches()
    assert count.kernels == len(compilation.entry.clusters) + 6 * len(body.clusters)
    assert count.library_calls == 6 * 2
    nested = compile_function(scan_in_scan, H, XS, device=device)
    kernels = {title: len(b["kernels"]) for b in nested.explanation()["bodies"] for title in [b["title"]]}
    outer, inner = kernels["body of while, 6 trips"], kernels["body of while, 3 trips in body of while, 6 trips"]
    assert nested.launches().kernels == len(nested.entry.clusters) + 6 * (outer + 3 * inner)


def test_a_body_that_is_called_often_is_fused_once():
    def f(x):
        step = lambda i, x: layer_norm(x @ W)  # noqa: E731
        for _ in range(4):
            x = lax.fori_loop(0, 3, step, x) + 1
        return x

    compilation = compile_function(f, H, device="host")
    assert len([b for b in compilation.bodies if b.clusters]) == 1
    assert compilation.recolored(forbid=[]).bodies == compilation.bodies


def test_what_xla_does_better_is_left_to_it():
    """It counts the trips, and writes slices of the state in place."""
    text = compile_function(recurrent, H, W, U, B, XS, device="h200").explain()
    assert "left to XLA, it counts the trips of a loop" in text
    assert "left to XLA, it writes a slice into a loop's state, in place" in text
    compiled = hlofuse.jit(recurrent).lower(H, W, U, B, XS).compile().as_text()
    assert '"known_trip_count":{"n":"6"}' in compiled


def test_a_step_that_xla_computes_as_fast_is_left_to_it(monkeypatch):
    monkeypatch.setattr(call_worth, "THREADS_WORK", 2_000_000)

    def f(h, u):
        return lax.fori_loop(0, 5, lambda i, h: jnp.tanh(h @ W), h), heat(u, 5)

    kernels = hlofuse.jit(f).lower(H, GRID).compile().kernels
    plain, stencil = sorted((k for k in kernels if "/" in k.name), key=lambda k: k.problem is None)
    assert "no quicker in a call, within a loop" in plain.problem and stencil.problem is None


def test_a_kernel_that_cannot_be_built_warns_once(monkeypatch):
    from hlofuse.runtime.unit_builder import BuildFailure

    build = xla_runtime.build_host_kernels

    def failing(sources, *args):
        found = build(sources, *args)
        return {s: BuildFailure(s, "no way") if s.startswith("tanh") else k for s, k in found.items()}

    monkeypatch.setattr(xla_runtime, "build_host_kernels", failing)
    monkeypatch.setattr(xla_runtime, "_warned", set())
    monkeypatch.setenv("HLOFUSE_STRICT", "0")

    def f(h):
        for _ in range(2):
            h = lax.fori_loop(0, 6, lambda i, h: jnp.tanh(h @ W), h) + 1
        return h

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = hlofuse.jit(f).lower(np.tile(H, (8, 1))).compile()
    assert len([w for w in caught if "no way" in str(w.message)]) == 1
    assert [k.problem for k in compiled.kernels if k.name.startswith("body/")] == ["no way"]
    x = np.tile(H, (8, 1))
    assert_same(compiled(x), jax.jit(f)(x), 2e-5)


# --- where the state lies ---------------------------------------------------------------------------------------------


def body_text(fn: Callable, *args: Any) -> str:
    """The largest loop body of the compiled program."""
    text = hlofuse.jit(fn).lower(*args).compile().as_text()
    bodies = re.findall(r"body=%?([\w.]+)", text)
    return max((text[text.index(f"%{name} ("):].split("\n}")[0] for name in bodies), key=len)


BIG = normal(128, 128)


@pytest.mark.parametrize("trips", [8, 9])
@pytest.mark.parametrize("fn", [heat, wave])
def test_a_stencil_has_two_buffers_and_no_copies(fn, trips):
    text = body_text(lambda u: fn(u, trips), BIG)
    assert len(re.findall(r"custom-call\(", text)) == 2
    assert not re.search(r"= f32\[128,128\]\S* copy\(", text)


def test_states_that_move_on_take_as_many_steps_as_they_have_places():
    def f(u):
        def step(_, s):
            a, b, c = s
            return jnp.roll(a, 1, 0) * 0.5 + c, a, b

        return lax.fori_loop(0, 12, step, (u, u + 1, u + 2))

    text = body_text(f, BIG)
    assert len(re.findall(r"custom-call\(", text)) == 3
    assert not re.search(r"= f32\[128,128\]\S* copy\(", text)


def test_an_element_is_updated_in_place():
    def f(x, w):
        return lax.fori_loop(0, 9, lambda i, s: (s[0] * 0.9 + jnp.tanh(s[1] @ w), s[1] + 1), (x, x * 2))[0]

    text = body_text(f, BIG[:, :64], W)
    assert "output_to_operand_aliasing" in text
    assert not re.search(r"= f32\[128,64\]\S* copy\(", text)


def test_stacked_results_stay_in_place():
    text = body_text(lambda h, xs: recurrent(h, W, U, B, xs), np.tile(H, (16, 1)), np.tile(XS, (1, 16, 1)))
    assert not re.search(r"= f32\[6,128,64\]\S* copy\(", text)
    assert not re.search(r"= f32\[6,128,64\]\S* custom-call\(", text)


@pytest.mark.parametrize("make", [random_loop, random_gradient])
def test_random_loops_that_stay_loops(make, monkeypatch):
    monkeypatch.setattr(loops, "MAX_BODY", 0)
    programs = {f"seed {seed}": make(np.random.default_rng(seed)) for seed in range(6)}

    def everything(arguments):
        return {name: fn(*arguments[name]) for name, (fn, _) in programs.items()}

    arguments = {name: arguments for name, (_, arguments) in programs.items()}
    compiled = hlofuse.jit(everything).lower(arguments).compile()
    assert sum("/" in k.name for k in compiled.kernels) >= 6
    got, expected = compiled(arguments), jax.jit(everything)(arguments)
    for name in programs:
        assert_same(got[name], expected[name], 1e-4, name)


def test_branches_without_operands():
    def f(x):
        def step(s, x):
            k = lax.cond(s.sum() > 0, lambda: 1.0, lambda: lax.fori_loop(0, 3, lambda i, y: y * 0.5 + i, 2.0))
            return jnp.sort(s + k * x), k

        return lax.scan(step, x[0], x)

    x = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    for got, expected in zip(jax.tree.leaves(hlofuse.jit(f)(x)), jax.tree.leaves(jax.jit(f)(x)), strict=True):
        assert_same(got, expected, 1e-6)
