"""Loops that once were slow or spilled, and what of a loop's text keeps them from it again."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_loops import assert_all_same, assert_same

from hlofuse.compiler import compile_function

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def test_of_a_switch_without_lanes_one_side_is_computed():
    def run(x):
        return lax.fori_loop(0, 9, lambda i, x: lax.switch(i % 3, [jnp.sin, jnp.cos, jnp.tanh], x), x)

    x = np.float32(0.7)
    assert_same(run, x)
    text = compile_function(run, x, device="host").clusters[0].text.text
    sides = [line for line in text.splitlines() if "_of(" in line]
    assert len(sides) == 3 and all(line.startswith(" " * 8) for line in sides), text
    assert "wrap_add" in text and text.count("if (") == 2, text   # i % 3 itself is no branch: it is needed for the test


def test_a_carry_that_is_read_at_places_of_its_own_is_read_before_it_changes():
    def jump(p):
        return lax.fori_loop(0, 3, lambda _, p: p[p], p)

    def both(p, x):
        return lax.fori_loop(0, 3, lambda _, s: (s[0][s[0]], s[1][s[0]] + 1, s[2][s[0]]), (p, x, x * 1j))

    orders = [np.array(p) for p in ([3, 4, 0, 1, 2], [1, 2, 3, 4, 0], [4, 4, 1, 0, 2])]
    programs = {f"{n} {p}": (fn, (p, *more), 1e-6) for p in orders for n, fn, more in
                (("jump", jump, ()), ("both", both, (normal(5),)))}    # fmt: skip
    assert_all_same(programs)
    for fn, args, _ in list(programs.values())[:2]:
        assert not compile_function(fn, *args).fusion.loop_refusals


def test_weights_that_a_lane_would_hold_are_counted():
    """A loop whose lanes hold 256 weights beside their carries would spill on a GPU: a block runs it. A CPU has a
    cache."""
    def lstm(h, c, w, b, xs):
        def step(state, x):
            h, c = state
            i, f, o, u = jnp.split((h + x) @ w + b, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(u)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), c

        return lax.scan(step, (h, c), xs)

    args = normal(9, 8), normal(9, 8), normal(8, 32), normal(32), normal(12, 9, 8)
    assert_same(lstm, *args, tolerance=1e-5)
    forms = {device: [c.form for c in compile_function(lstm, *args, device=device).clusters]
             for device in ("h200", "host")}  # fmt: skip
    assert forms == {"h200": ["block loop"], "host": ["time loop"]}


def test_counters_over_the_whole_range_of_an_int():
    def least(x):
        return lax.fori_loop(np.int32(-2**31), np.int32(3 - 2**31), lambda i, x: x + i, x)

    def greatest(x):
        return lax.fori_loop(2**31 - 4, 2**31 - 1, lambda i, x: x ^ (i + 3), x)

    def wide(x):
        def step(s):
            x, i = s
            return x ^ i ^ (i - 5), i + 1_000_000_000

        return lax.while_loop(lambda s: s[1] < 2_000_000_000, step, (x, -2_000_000_000))

    x = np.arange(5, dtype=np.int32)
    assert_all_same({f.__name__: (f, (x,), 0) for f in (least, greatest, wide)})


def test_numbers_of_all_lanes_that_a_step_only_writes_are_made_behind_the_loop():
    def every(x, xs):
        def step(h, v):
            h = jnp.tanh(h + v)
            return h, (h.mean(), (h > 0).sum(), (h > 2).any(), jnp.sqrt((h * v).sum(keepdims=True) ** 2 + 1), h.max())

        return lax.scan(step, x, xs)

    def reverse(x, xs):
        return lax.scan(lambda h, v: (h * 0.5 + v, (h.astype(jnp.float16).sum(), v.argmax())), x, xs, reverse=True)

    def shapes(x, xs):
        return lax.scan(lambda h, v: (h * 0.5 + v, (h.sum(), h.sum(0, keepdims=True), h)), x, xs)

    def used(x, xs):
        return lax.scan(lambda h, v: (h * 0.5 + v, (h.sum(), h.sum(0, keepdims=True), h)), x, xs)[1][0].min() * x

    x, xs = normal(90), normal(7, 90)
    assert_all_same({f.__name__: (f, (x, xs), 1e-5) for f in (every, reverse, shapes, used)})
    assert_all_same({"axes": (shapes, (normal(9, 10), normal(7, 9, 10)), 1e-5)})
    with jax.enable_x64(True):
        assert_same(every, x.astype(np.float64), xs.astype(np.float64))
    compilation = compile_function(lambda x, xs: lax.scan(lambda h, v: (h + v, (h * h).sum()), x, xs), x, xs)
    assert [c.form for c in compilation.clusters].count("time loop") == 1 and not compilation.fusion.loop_refusals


def test_what_lanes_would_write_for_such_numbers_stays_in_the_cache():
    def energy(x):
        return lax.scan(lambda h, _: (h * 0.9, (h * h).sum()), x, None, length=5000)

    x = jax.ShapeDtypeStruct((1000,), np.float32)
    for device in ("host", "h200"):
        assert [c.form for c in compile_function(energy, x, device=device).clusters] == ["block loop"]


def outer_mean(x):
    return (jnp.sin(x[:, :, None] - x[:, None, :]).sum(2) * 0.1 + x) * 0.5


BESIDE_ITSELF = {
    "a matrix plus its transpose": (lambda x: (x + jnp.swapaxes(x, 1, 2)) * 0.5 + 1, normal(50, 3, 3)),
    "a matrix minus its transpose": (lambda x: x - jnp.swapaxes(x, 1, 2) * 0.5, normal(50, 3, 3)),
    "a product with the transpose": (lambda x: 1.5 * x - 0.5 * x @ jnp.swapaxes(x, 1, 2) @ x, normal(50, 3, 3) * 0.1),
    "a Gram matrix": (jax.vmap(lambda x: x @ x.T @ x * 0.1), normal(50, 2, 3)),
    "all pairs": (outer_mean, normal(50, 4)),
    "an outer product": (lambda x: (x[:, :, None] * x[:, None, :]).sum(2) * 0.1 + x, normal(50, 4)),
    "a permutation of its own": (jax.vmap(lambda p: p[p]), RNG.integers(0, 5, (50, 5)).astype(np.int32)),
}


def loop_of(name):
    body, x = BESIDE_ITSELF[name]
    return (lambda x: lax.fori_loop(0, 4, lambda _, x: body(x), x)), (x,)


def test_the_values_of_arrays_beside_themselves_with_other_axes():
    assert_all_same({name: (*loop_of(name), 1e-5) for name in BESIDE_ITSELF})


@pytest.mark.parametrize("name", BESIDE_ITSELF)
def test_an_array_beside_itself_with_other_axes_keeps_its_lanes(name):
    fn, args = loop_of(name)
    compilation = compile_function(fn, *args, device="h200")
    assert [c.form for c in compilation.clusters] == ["time loop"], compilation.explain()


def test_lanes_that_are_mixed_by_a_transpose_are_no_lanes():
    def mixed(x):
        return lax.fori_loop(0, 4, lambda _, x: (x + jnp.swapaxes(x, 0, 1)) * 0.5, x)

    assert_same(mixed, normal(40, 40, 3))
    assert [c.form for c in compile_function(mixed, normal(40, 40, 3), device="h200").clusters] == ["block loop"]
    [reason] = compile_function(mixed, normal(90, 90, 3), device="h200").fusion.loop_refusals.values()
    assert "places" in reason and "a block has" in reason
