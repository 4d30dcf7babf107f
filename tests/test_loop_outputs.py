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

from hlofuse.compiler import compile_function

N, STEPS = 137, 12
R = np.random.default_rng(1)
X = R.standard_normal(N).astype(np.float32)
XS = R.standard_normal((STEPS, N)).astype(np.float32)
TARGET = R.standard_normal((STEPS, N)).astype(np.float32)
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


@case(X, XS, launches=2, arrays=3)
def before_a_sum_of_all(x, xs):
    return jnp.tanh(decayed(x, xs)[1]).sum()


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
    assert compilation.launches().bytes // XS.nbytes == arrays, compilation.explain()


def test_fewer_bytes_are_kept():
    def narrow(x, xs):
        return decayed(x, xs)[1].astype(jnp.bfloat16)

    compilation = compile_function(narrow, X, XS, device="h200")
    assert compilation.launches().bytes == XS.nbytes * 3 // 2 + X.nbytes


def test_the_cuda_text_runs_thread_by_thread():
    names = ("with_another_array", "of_two_outputs_one_array", "with_a_number_for_each_step")
    tally = check_cases([compile_case(n, CASES[n][0], jax.device_put(CASES[n][1])) for n in names], range(5))
    assert not tally.faults, "\n".join(tally.faults)
