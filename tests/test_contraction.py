"""Products in sums of a loop's step are one fma, in every dialect; elsewhere nothing is contracted."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hlofuse
from hlofuse.compiler import compile_function

X = np.linspace(-1, 1, 96, dtype=np.float32)


def texts(fn):
    return [c.text_in(d).text for c in compile_function(fn, X).clusters for d in ("cuda", "host")]


def steps(body):
    return lambda x: lax.fori_loop(0, 3, lambda i, s: body(s, x), x)


@pytest.mark.parametrize("body, spelled", [
    (lambda s, x: s * s + x, "mul_add(x_now[l], x_now[l], x"),
    (lambda s, x: s * s - x, ", -x"),
    (lambda s, x: x - s * s, "mul_add(-x_now[l], x_now[l], x"),
    (lambda s, x: (s * s).reshape(8, 12).reshape(-1) + x, "mul_add("),
])  # fmt: skip
def test_a_product_that_only_a_sum_reads_is_part_of_it(body, spelled):
    host = texts(steps(body))[1].replace("(x_now[l])", "x_now[l]")
    assert spelled in host, host


@pytest.mark.parametrize("body", [
    lambda s, x: s * s + jnp.sin(s * s),            # the product has another reader
    lambda s, x: s + (x * x),                       # and is known before the loop
    lambda s, x: jnp.maximum(s * s, x) + x,
])  # fmt: skip
def test_other_sums_stay_sums(body):
    for text in texts(steps(body)):
        assert "mul_add" not in text, text


def test_nothing_is_contracted_outside_of_loops():
    for text in texts(lambda x: x * x + 1):
        assert "mul_add" not in text


def test_the_value_is_rounded_once():
    a = np.full(700, 1 + 2**-12, np.float32)

    def f(a, c):
        return lax.fori_loop(0, 1 + (c[0] > 9).astype(int), lambda i, s: s * s - c, a)

    c = a * a    # rounded: what is left is 2**-24
    np.testing.assert_array_equal(hlofuse.jit(f)(a, c), jax.jit(f)(a, c))
    np.testing.assert_array_equal(hlofuse.jit(f)(a, c), np.full(700, 2.0**-24, np.float32))
