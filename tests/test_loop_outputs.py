"""What is done with a scan's outputs behind it is done in the step that writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from loop_check import assert_all_same, launches
from simt_check import check_cases, compile_case

import hlofuse
from hlofuse.compiler import compile_function

N, STEPS = 137, 12
R = np.random.default_rng(1)
X = R.standard_normal(N).astype(np.float32)
XS = R.standard_normal((STEPS, N)).astype(np.float32)
TARGET = R.standard_normal((STEPS, N)).astype(np.float32)
LONG, TARGETS = R.standard_normal((2, 50, N)).astype(np.float32)
CASES: dict[str, tuple[Callable, tuple, int, int]] = {}


def case(*args: Any, launches: int = 1, arrays: int):
    """`arrays`: how many arrays of all steps and lanes the kernels read or write."""

    def add(fn):
        CASES[fn.__name__] = (fn, args, launches, arrays)
        return fn

    return add


def decayed(x, xs):
    return lax.scan(lambda h, v: (h * 0.9 + v, h * v), x, xs)


@case(X, XS, arrays=2)
def relu(x, xs):
    return jax.nn.relu(decayed(x, xs)[1])


@case(X, XS, arrays=3)
def an_output_and_work_on_it(x, xs):
    ys = decayed(x, xs)[1]
    return ys, jnp.tanh(ys) * 2 + 1


@case(X, XS, TARGET, arrays=3)
def with_another_array(x, xs, target):
    return (decayed(x, xs)[1] - target) ** 2


@case(X, XS, np.float32(0.3), arrays=2)
def with_a_number_for_all_and_one_for_each_lane(x, xs, a):
    return decayed(x, xs)[1] * a + x


@case(X, XS, arrays=2)
def with_a_number_for_each_step(x, xs):
    return decayed(x, xs)[1] * jnp.sin(jnp.arange(STEPS, dtype=jnp.float32))[:, None]


@case(X, XS, arrays=2)
def of_two_outputs_one_array(x, xs):
    a, b = lax.scan(lambda h, v: (h * 0.9 + v, (jnp.sin(h), h * v)), x, xs)[1]
    return jnp.where(a > b, a, b)


@case(X, XS, arrays=2)
def in_reverse(x, xs):
    return jnp.exp(lax.scan(lambda h, v: (h * 0.9 + v, h), x, xs, reverse=True)[1])


@case(X, XS, launches=2, arrays=1)
def before_a_sum_of_all(x, xs):
    return jnp.tanh(decayed(x, xs)[1]).sum()


@case(X, LONG, TARGETS, arrays=2)
def a_sum_over_the_steps(x, xs, targets):
    return ((decayed(x, xs)[1] - targets) ** 2).mean(0)


@case(X, LONG, arrays=1)
def the_largest_and_the_least_of_the_steps(x, xs):
    ys = decayed(x, xs)[1]
    return ys.max(0), ys.min(0), (ys > 0).sum(0)


@case(X, LONG, arrays=2)
def an_output_and_its_sum(x, xs):
    ys = decayed(x, xs)[1]
    return ys, ys.sum(0)


@case(X, LONG, launches=2, arrays=4)
def a_function_that_is_needed_besides(x, xs):
    e = jnp.exp(decayed(x, xs)[1] * 0.1)
    return e / e.sum(0)


@case(X, XS, launches=2, arrays=4)
def not_what_waits_for_a_sum(x, xs):
    ys = decayed(x, xs)[1]
    return ys - ys.sum(0)


@case(X, XS, arrays=2)
def with_the_state_behind_the_loop(x, xs):
    h, ys = decayed(x, xs)
    return jnp.sin(h), jnp.cos(ys)


def test_values_are_those_of_jax():
    assert_all_same({name: (fn, args, 1e-5) for name, (fn, args, _, _) in CASES.items()})


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_written_or_read_twice(name):
    fn, args, expected, arrays = CASES[name]
    compilation = compile_function(fn, *args, device="h200")
    assert launches(fn, *args) == expected, compilation.explain()
    assert compilation.launches().bytes // args[1].nbytes == arrays, compilation.explain()


def test_sums_of_half_floats_are_not_carries():
    """A reduction of them is rounded once, a carry in every step."""

    def total(x, xs):
        return lax.reduce(decayed(x, xs)[1].astype(jnp.bfloat16), jnp.bfloat16(0), lax.add, (0,))

    assert launches(total, X, LONG) == 2


def test_floats_are_not_added_one_by_one_without_end():
    def total(x):
        return lax.scan(lambda h, _: (h * 0.999 + 1e-4, h), x, None, length=20_000)[1].sum(0)

    assert launches(total, X) == 2
    assert_all_same({"": (total, (X[:5],), 2e-5)})


def test_the_largest_of_the_steps_is_nan_where_one_is():
    def largest(x, xs):
        return lax.scan(lambda h, v: (h + v, jnp.where(v > 2, jnp.nan, h)), x, xs)[1].max(0)

    assert launches(largest, X, LONG) == 1
    np.testing.assert_array_equal(np.isnan(hlofuse.jit(largest)(X, LONG)), (LONG > 2).any(0))


def test_fewer_bytes_are_kept():
    def narrow(x, xs):
        return decayed(x, xs)[1].astype(jnp.bfloat16)

    compilation = compile_function(narrow, X, XS, device="h200")
    assert compilation.launches().bytes == XS.nbytes * 3 // 2 + X.nbytes


# --- a vmapped scan's outputs lie step by step ------------------------------------------------------------------------


def vmapped(x, xs):
    return jax.vmap(lambda h, v: lax.scan(lambda h, v: (h * 0.9 + v, h * v), h, v))(x, xs)


def vmapped_vectors(x, xs):
    def one(h, v):
        return lax.scan(lambda h, v: (h * 0.9 + v, jnp.stack([h, jnp.sin(h), v])), h, v, reverse=True)[1]

    return jnp.tanh(jax.vmap(one)(x, xs)) * 2


def vmapped_gradient(x, xs):
    def loss(h, v):
        h, ys = lax.scan(lambda h, v: (jnp.sin(h) + v, h * v), h, v)
        return h + (ys * ys).sum()

    return jax.vmap(jax.value_and_grad(loss, (0, 1)))(x, xs)


def test_on_a_cpu_they_are_written_so():
    for fn in (vmapped, vmapped_vectors):
        assert compile_function(fn, X, XS.T, device="host").launches().total == 1
    count = compile_function(vmapped, X, XS.T, device="host").launches()
    assert count.bytes == 2 * XS.nbytes + 2 * X.nbytes
    few = compile_function(vmapped, X, XS.T[:, :5], device="host")
    assert few.launches().total == 2, "a run of neighbors is worth it from 8 steps on"


def test_their_values_are_those_of_jax_for_any_number_of_steps_and_lanes():
    programs = {}
    for lanes, steps in ((1, 16), (5, 8), (16, 17), (70, 31), (137, 32), (300, 5)):
        args = R.standard_normal(lanes).astype(np.float32), R.standard_normal((lanes, steps)).astype(np.float32)
        for fn in (vmapped, vmapped_vectors, vmapped_gradient):
            programs[f"{fn.__name__} {lanes} {steps}"] = fn, args, 2e-5
    half = X.astype(jnp.bfloat16), XS.T.astype(jnp.bfloat16)
    programs["bfloat16"] = vmapped, half, 2e-2
    assert_all_same(programs)


def test_the_cuda_text_runs_thread_by_thread():
    names = ("with_another_array", "of_two_outputs_one_array", "with_a_number_for_each_step")
    tally = check_cases([compile_case(n, CASES[n][0], jax.device_put(CASES[n][1])) for n in names], range(5))
    assert not tally.faults, "\n".join(tally.faults)
