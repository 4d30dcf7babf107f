"""Loops that once were slow or spilled, and what of a loop's text keeps them from it again."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
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
    """A loop whose lanes hold 256 weights beside their carries spills on a GPU; a CPU has a cache."""
    def lstm(h, c, w, b, xs):
        def step(state, x):
            h, c = state
            i, f, o, u = jnp.split((h + x) @ w + b, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(u)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), c

        return lax.scan(step, (h, c), xs)

    args = normal(9, 8), normal(9, 8), normal(8, 32), normal(32), normal(12, 9, 8)
    assert_same(lstm, *args, tolerance=1e-5)
    [reason] = compile_function(lstm, *args, device="h200").fusion.loop_refusals.values()
    assert reason.startswith("memory: about")
    assert not compile_function(lstm, *args, device="host").fusion.loop_refusals


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
