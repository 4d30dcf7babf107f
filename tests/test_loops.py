"""Whole loops in one kernel: what becomes one, with the values of `jax.jit`, and what stays a loop with its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalog import CATALOG
from jax import lax
from loop_check import assert_all_same, assert_no_spills, assert_same, launches
from loop_programs import LOOPS
from random_loops import random_loop
from simt_check import check_cases, compile_case

import hlofuse
from hlofuse.compiler import compile_function
from hlofuse.runtime.nvrtc import nvrtc_available

N = 137
RNG = np.random.default_rng(0)
X = RNG.standard_normal(N).astype(np.float32)
Y = RNG.standard_normal(N).astype(np.float32)
INTS = RNG.integers(-100, 100, N).astype(np.int32)
XS = RNG.standard_normal((7, N)).astype(np.float32)


@pytest.mark.parametrize("name", ["euler_pendulum", "linear_recurrence", "newton_sqrt_while", "mandelbrot"])
def test_a_loop_of_the_catalog_is_one_launch_that_moves_its_arguments_and_results_once(name):
    w = CATALOG[name]
    compilation = compile_function(w.fn, *w.avals("full"), device="h200")
    count = compilation.launches()
    arrays = [*w.avals("full"), *jax.tree.leaves(jax.eval_shape(w.fn, *w.avals("full")))]
    assert count.total == 1, compilation.explain()
    assert count.bytes == sum(a.size * a.dtype.itemsize for a in arrays)
    assert_same(w.fn, *w.args("small"))


# --- what becomes a kernel --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    fn: Callable
    args: tuple
    launches: int


CASES: list[Any] = []


def case(*args: Any, launches: int = 1):
    def add(fn):
        CASES.append(pytest.param(Case(fn, args, launches), id=fn.__name__))
        return fn

    return add


@case(X)
def a_counted_loop_whose_body_uses_its_index(x):
    return lax.fori_loop(0, 10, lambda i, x: x * 0.5 + i, x)


@case(X, np.int32(9))
def a_loop_with_dynamic_bounds(x, n):
    return lax.fori_loop(2, n, lambda i, x: x * 0.5 + i.astype(jnp.float32), x)


@case(X, np.int32(0))
def a_loop_that_never_runs(x, n):
    return lax.fori_loop(0, n, lambda i, x: x + 1, x)


@case(X, Y)
def carries_that_are_swapped(x, y):
    return lax.fori_loop(0, 5, lambda i, s: (s[1], s[0]), (x, y))


@case(X, Y)
def carries_that_rotate_and_change(x, y):
    return lax.fori_loop(0, 6, lambda i, s: (s[1], s[2], s[0] * 0.5), (x, y, x + y))


@case(XS, X)
def a_reversed_scan_with_outputs(xs, x):
    return lax.scan(lambda h, v: (h * 0.5 + v, (h, v * h)), x, xs, reverse=True)


@case(X, XS)
def a_scan_without_a_carry(x, xs):
    return lax.scan(lambda _, v: (None, v * x), None, xs)[1]


@case(X, Y)
def work_before_and_after_joins(x, y):
    a = jnp.sin(x) + y
    b = lax.fori_loop(0, 4, lambda i, a: a * y + 1, a)
    return jnp.tanh(b) - x


@case(X)
def two_loops_in_a_row(x):
    a = lax.fori_loop(0, 4, lambda i, a: a * 0.9 + 1, x)
    return lax.fori_loop(0, 3, lambda i, a: jnp.cos(a), a + 1)


@case(INTS)
def integers_wrap(n):
    return lax.fori_loop(0, 40, lambda i, n: n * 3 + i, n)


@case(INTS > 0, INTS)
def bools_are_carried(p, n):
    return lax.fori_loop(0, 9, lambda i, s: (s[0] ^ (s[1] > i), s[1] - 1), (p, n))


@case(X.astype(np.float16), X.astype(jnp.bfloat16))
def sixteen_bit_floats_are_rounded_in_every_step(a, b):
    return lax.fori_loop(0, 9, lambda i, s: (s[0] * 0.5 - 1, s[1] * 0.5 + 1), (a, b))


@case((X + 1j * Y).astype(np.complex64))
def complex_numbers_are_carried(z):
    return lax.fori_loop(0, 4, lambda i, z: z * z * 0.1 + 1j, z)


@case(INTS.astype(np.uint8), X, INTS)
def dtypes_are_mixed(a, x, n):
    def body(i, s):
        a, x, n = s
        return a + n.astype(jnp.uint8), x + a, (n ^ 5) + x.astype(jnp.int32)

    return lax.fori_loop(0, 6, body, (a, x, n))


@case(X)
def lanes_leave_on_their_own(x):
    def solve(a):
        return lax.while_loop(lambda s: s[0] < 10, lambda s: (s[0] * 1.5 + 0.1, s[1] + 1), (jnp.abs(a), 0))

    return jax.vmap(solve)(x)


@case(XS)
def lanes_of_two_axes_leave_on_their_own(x):
    return jax.vmap(jax.vmap(lambda a: lax.while_loop(lambda s: s < 10, lambda s: s * 2 + 1, jnp.abs(a))))(x)


@case(X)
def lanes_whose_condition_never_holds(x):
    return jax.vmap(lambda a: lax.while_loop(lambda s: s > 1e9, lambda s: s * 2, a))(x)


@case(np.where(INTS > 50, np.nan, X).astype(np.float32))
def a_nan_in_the_condition_ends_a_lane(x):
    return jax.vmap(lambda a: lax.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 1, s[1] + 1), (a, 0)))(x)


@case(X)
def a_condition_on_a_uniform_number(x):
    def body(s):
        x, dt, n = s
        return x + dt, dt * 0.5, n + 1

    return lax.while_loop(lambda s: s[1] > 1e-3, body, (x, jnp.float32(1), 0))


@case(XS, INTS % 7)
def a_table_that_never_changes_is_read_anywhere(table, n):
    return lax.fori_loop(0, 5, lambda i, s: (s + table[i, jnp.abs(s.astype(jnp.int32)) % N]), n.astype(jnp.float32))


@case(XS)
def numbers_are_scanned(xs):
    return lax.scan(lambda h, v: (h * 0.9 + v, h), jnp.float32(0), xs[:, 0])


@case(X, XS)
def a_number_and_an_array_are_carried_together(x, xs):
    def step(s, v):
        x, total = s
        return (x * 0.9 + total, total + v), total * 2

    return lax.scan(step, (x, jnp.float32(0)), xs[:, 3])


@case(X)
def a_switch_of_selects_in_the_body(x):
    return lax.fori_loop(0, 12, lambda i, x: jnp.where(i % 3 == 0, x + 1, jnp.where(x > 0, -x, x * 2)), x)


@case(X)
def a_loop_in_a_loop(x):
    def outer(i, x):
        y = lax.fori_loop(0, 3, lambda j, y: y * 0.5 + x + i, x)
        return y - x

    return lax.fori_loop(0, 4, outer, x)


@case(X, Y)
def a_loop_whose_result_is_invariant_in_the_outer_loop(x, y):
    def outer(i, x):
        return x + lax.fori_loop(0, 3, lambda j, z: z * 0.5 + 1, y)

    return lax.fori_loop(0, 4, outer, x)


@case(X, Y)
def lanes_leave_an_inner_loop_on_their_own(x, y):
    def one(x, y):
        inner = lambda y: lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + s[1], s[1] * 1.1), (y, 0.5))[0]  # noqa: E731
        return lax.fori_loop(0, 3, lambda i, s: (s[0] * 0.5 + inner(s[1]), s[1] - 1), (x, y))

    return jax.vmap(one)(x, y)


@case(INTS, launches=2)
def a_sum_over_all_lanes_of_integers(n):
    return lax.fori_loop(0, 5, lambda i, s: (s[0] * 3 + 1, s[1] - s[0].sum() * 2), (n, np.int32(7)))


@case(X, np.array([3, 5], np.uint32))
def a_generators_key_is_carried_with_the_lanes(x, key):
    def step(i, s):
        x, key = s
        key, now = jax.random.split(key)
        return x + jax.random.normal(now, x.shape), key

    return lax.fori_loop(0, 5, step, (x, key))


@case(X, XS[:, :3])
def a_small_vector_is_carried_with_the_lanes_and_kept(x, xs):
    def step(s, v):
        x, w = s
        w = w[::-1] * 0.5 + v
        return (x * w[0] + w[2], w), (w, x)

    return lax.scan(step, (x, xs[0]), xs)


@case(XS)
def the_lanes_have_several_axes(x):
    return lax.fori_loop(0, 3, lambda i, a: a * a - 1 + jnp.arange(7.0)[:, None], x)


def test_the_values_are_those_of_jax():
    assert_all_same({c.id: (c.values[0].fn, c.values[0].args, 1e-5) for c in CASES})


@pytest.mark.parametrize("c", CASES)
def test_a_loop_is_a_kernel(c):
    assert launches(c.fn, *c.args) == c.launches, compile_function(c.fn, *c.args, device="h200").explain()


# --- workloads --------------------------------------------------------------------------------------------------------


def test_the_workloads_values_are_those_of_jax():
    r = np.random.default_rng(1)
    assert_all_same({name: (w.fn, w.arguments(r, 160), w.tolerance) for name, w in LOOPS.items()})


@pytest.mark.parametrize("name", LOOPS)
def test_a_workload_is_few_launches(name):
    work = LOOPS[name]
    args = work.arguments(np.random.default_rng(1), 160)
    assert launches(work.fn, *args) == work.launches, compile_function(work.fn, *args, device="h200").explain()


@pytest.mark.skipif(nvrtc_available() is not None, reason=str(nvrtc_available()))
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_cuda_text_of_every_loop_compiles_without_spills(arch):
    compiled = {name: compile_function(w.fn, *w.arguments(np.random.default_rng(1), 1 << 14), device="h200")
                for name, w in LOOPS.items()}  # fmt: skip
    compiled |= {c.id: compile_function(c.values[0].fn, *c.values[0].args, device="h200") for c in CASES}
    assert_no_spills(compiled, arch)


def test_the_cuda_text_runs_thread_by_thread():
    r = np.random.default_rng(1)
    names = ("adaptive_steps", "gradient_by_shared_scalar")
    cases = [compile_case(n, LOOPS[n].fn, jax.device_put(LOOPS[n].arguments(r, 64))) for n in names]
    chosen = [c for c in CASES if c.id in ("a_small_vector_is_carried_with_the_lanes_and_kept", "numbers_are_scanned")]
    cases += [compile_case(c.id, c.values[0].fn, jax.device_put(c.values[0].args)) for c in chosen]
    tally = check_cases(cases, range(5))
    assert not tally.faults, "\n".join(tally.faults)
    assert tally.forms["time loop"] >= len(cases)


# --- what stays a loop ------------------------------------------------------------------------------------------------


def refusal(fn: Callable, *args: Any) -> str:
    """Why the first loop of a function stays one; its values are those of jax.jit all the same."""
    assert_same(fn, *args)
    compilation = compile_function(fn, *args, device="h200")
    assert compilation.fusion.loop_refusals, "the loop became a kernel"
    assert (reason := next(iter(compilation.fusion.loop_refusals.values()))) in compilation.explain()
    return reason


def test_a_step_that_mixes_more_than_a_block_holds_stays_a_loop():
    big = np.tile(X, 200)
    assert "places" in (why := refusal(lambda x: lax.fori_loop(0, 5, lambda i, a: jnp.roll(a, 1) + a, x), big))
    assert "memory: a step's arrays need 219200 bytes, the largest carry f32[27400] twice; a block has 49152" in why


def test_library_calls_keep_the_loop():
    assert "library" in refusal(lambda x: lax.fori_loop(0, 3, lambda i, x: jnp.sort(x) * 0.5, x), X)


def test_effects_keep_the_loop():
    seen: list[int] = []

    def step(i, x):
        jax.debug.callback(lambda i: seen.append(int(i)), i, ordered=True)
        return x + 1

    def run(x):
        return lax.fori_loop(0, 3, step, x)

    np.testing.assert_array_equal(hlofuse.jit(run)(X), X + 1 + 1 + 1)
    jax.effects_barrier()
    assert seen == [0, 1, 2]


def test_more_carries_than_registers_keep_the_loop():
    many = tuple(X + i for i in range(150))
    rotate = lambda x: lax.fori_loop(0, 3, lambda i, s: (*s[1:], s[0] * 0.5), x)  # noqa: E731
    assert "words" in refusal(rotate, many)


# --- edges ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_short_scans(length):
    xs = XS[:length]
    assert_same(lambda x, xs: lax.scan(lambda h, v: (h + v, h * v), x, xs), X, xs)
    assert_same(lambda x: lax.fori_loop(0, length, lambda i, h: h * 2 + i, x), X)


def test_arrays_without_elements():
    assert_same(lambda x: lax.fori_loop(0, 5, lambda i, h: h * 2 + i, x), X[:0])
    assert_same(lambda x: lax.scan(lambda h, v: (h + v, h), x, jnp.zeros((4, 0))), X[:0])


def test_a_counter_that_overflows_wraps_as_in_jax():
    def count(x, start):
        def step(s):
            i, x, n = s
            return i + np.int32(1 << 29), x + 1, n + 1

        return lax.while_loop(lambda s: (s[0] > 0) & (s[2] < 20), step, (start, x, 0))

    assert_same(count, X, np.int32(1))
    assert_same(count, X, np.int32(2**31 - 5))


def test_a_very_long_loop():
    assert_same(lambda n: lax.fori_loop(0, 1_000_000, lambda i, n: (n * 5 + i) ^ (n >> 3), n), INTS[:5])


def test_double_precision_and_long_integers():
    with jax.enable_x64(True):
        def run(x, n):
            return lax.fori_loop(0, n.shape[0] - 100, lambda i, s: (s[0] * 0.9 + i, s[1] * 3 + i), (x, n))

        assert_same(run, X.astype(np.float64), INTS.astype(np.int64))
        assert launches(run, X.astype(np.float64), INTS.astype(np.int64)) == 1


def test_slices_that_are_not_all_written_keep_their_initial_values():
    def some(x, buffer, n):
        def step(i, s):
            x, buffer = s
            return x * 0.5, lax.dynamic_update_index_in_dim(buffer, x, 2 * i, 0)

        return lax.fori_loop(0, n, step, (x, buffer))

    assert_same(some, X, XS, np.int32(2))
    assert_same(some, X, XS, np.int32(0))
    assert_same(some, X, XS, np.int32(9))     # behind the end: dynamic_update_slice clamps
    assert launches(some, X, XS, np.int32(2)) == 1


def test_the_initial_value_of_a_loop_may_be_a_transpose():
    assert_same(lambda x: lax.fori_loop(0, 3, lambda i, a: a * 0.5 + x.T, x), XS[:, :7])


def test_a_condition_that_is_not_the_same_for_the_body():
    """The body freezes by another test than the condition's: such lanes may not leave on their own, so that a block
    asks all of them before each step."""

    def odd(x):
        def step(s):
            x, n = s
            return jnp.where(x < 5, x + 1, x * 0.99), n + (x < 5)

        return lax.while_loop(lambda s: ((s[0] < 4.9) & (s[1] < 9)).any(), step, (x, jnp.zeros(N, jnp.int32)))

    assert_same(odd, np.abs(X))
    assert [c.form for c in compile_function(odd, np.abs(X), device="h200").clusters] == ["block loop"]


def test_under_transformations():
    def run(x, y):
        return lax.scan(lambda h, v: (h * 0.5 + jnp.sin(v), h), x, y)[0]

    fast, plain = hlofuse.jit(run), jax.jit(run)
    batch = np.stack([XS, XS * 2])
    gradient = lambda f: jax.jit(lambda x, y: jax.grad(lambda x: (f(x, y[0]) ** 2).sum())(x))  # noqa: E731
    for transform in (lambda f: jax.vmap(f, (None, 0)), lambda f: jax.jit(lambda x, y: f(x, y[0]) + 1), gradient):
        np.testing.assert_allclose(transform(fast)(X, batch), transform(plain)(X, batch), rtol=1e-5, atol=1e-5)


def test_two_loops_of_one_body():
    def run(x, y):
        step = lambda h, v: (h * 0.5 + v, h)  # noqa: E731
        first, out = lax.scan(step, x, y)
        return lax.scan(step, first, out * 2)

    assert_same(run, X, XS)


def test_array_constants_of_a_body():
    table = np.linspace(0, 1, N, dtype=np.float32)
    assert_same(lambda x: lax.fori_loop(0, 3, lambda i, h: h * table + i, x), X)
    assert launches(lambda x: lax.fori_loop(0, 3, lambda i, h: h * table + i, x), X) == 1


def test_random_bodies():
    programs = {f"seed {seed}": random_loop(np.random.default_rng(seed)) for seed in range(16)}
    assert_all_same({name: (fn, args, 1e-4) for name, (fn, args) in programs.items()})


def test_a_buffer_that_is_filled_by_its_own_index():
    def trajectory(x):
        def step(i, s):
            x, buffer = s
            x = jnp.sin(x) + 0.1
            return x, buffer.at[i].set(x)

        return lax.fori_loop(0, 90, step, (x, jnp.zeros((90, N))))

    assert_same(trajectory, X)
    assert launches(trajectory, X) == 1
    count = compile_function(trajectory, X, device="h200").launches()
    assert count.bytes == X.nbytes * 92   # nothing of the zeros


def test_a_step_may_read_the_slice_that_it_writes():
    table = np.tile(XS, (10, 1))
    for fn in (lambda x, b: lax.fori_loop(0, 70, lambda i, b: b.at[i].add(x * i), b),
               lambda x, b: lax.fori_loop(0, 65, lambda i, b: b.at[i + 2].multiply(b[i + 2] + x), b),
               lambda x, b: lax.fori_loop(0, 90, lambda i, b: b.at[i].set(x), b)):  # the last are out of bounds
        assert_same(fn, X, table)
        assert launches(fn, X, table) == 1
    before = lambda x, b: lax.fori_loop(1, 70, lambda i, b: b.at[i].set(b[i - 1] + x), b)  # noqa: E731
    beside = lambda x, b: lax.fori_loop(0, 70, lambda i, s: (s[0].at[i].set(s[1]), s[0][i]), (b, x))  # noqa: E731
    for fn in (before, beside):     # a block holds the table
        assert_same(fn, X, table)
        assert launches(fn, X, table) == 1
    assert "reads the slice" in refusal(lambda b: lax.fori_loop(0, 70, lambda i, b: b.at[i].set(b[i][::-1]), b), table)
