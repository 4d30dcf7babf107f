"""The float64 interpreter against NumPy in float64, and what must not change: random bits, bitcasts, integers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hlofuse.explore.float64_reference import evaluate

X = np.linspace(-2, 3, 12, dtype=np.float32).reshape(3, 4)


def reference(fn, *args):
    return evaluate(jax.make_jaxpr(fn)(*args), *jax.tree.leaves(args))


def test_results_are_more_accurate_than_float32():
    (result,) = reference(lambda x: jnp.sum(jnp.exp(x) * 0.1), X)
    # The literal 0.1 is the program's own float32 number.
    expected = np.sum(np.exp(X.astype(np.float64)) * np.float64(np.float32(0.1)))
    assert result.dtype == np.float64
    assert abs(result - expected) < 1e-14 * expected
    assert abs(np.float32(expected) - expected) > 1e-9


def test_half_precision_is_not_rounded_on_the_way():
    (result,) = reference(lambda x: ((x.astype(jnp.bfloat16) + 1) * 3).astype(jnp.float32), X)
    assert np.allclose(result, (X.astype(np.float64) + 1) * 3, rtol=1e-15)


def test_complex_is_complex128():
    (result,) = reference(lambda x: lax.complex(x, x) ** 3, X)
    assert result.dtype == np.complex128
    assert np.allclose(result, (X.astype(np.float64) * (1 + 1j)) ** 3, rtol=1e-14)


def test_random_bits_are_the_programs_own():
    def draw(key):
        return jax.random.bits(key, (7,)), jax.random.uniform(key, (7,)), jax.random.bernoulli(key, 0.5, (7,))

    key = jax.random.key(3)
    for got, expected in zip(reference(draw, key), draw(key), strict=True):
        assert np.array_equal(got, np.asarray(expected))


def test_bitcast_sees_the_original_type():
    (result,) = reference(lambda x: lax.bitcast_convert_type(x, jnp.uint32), X)
    assert np.array_equal(result, X.view(np.uint32))


@pytest.mark.parametrize("index", [-1, 0, 5])
def test_cond(index):
    def fn(i, x):
        return lax.switch(i, [jnp.sin, jnp.cos, lambda x: x * 2], x)

    (result,) = reference(fn, np.int32(index), X)
    expected = [np.sin, np.cos, lambda x: x * 2][min(max(index, 0), 2)](X.astype(np.float64))
    assert np.allclose(result, expected, rtol=1e-14)


def test_scan_with_constants_carry_and_outputs():
    def fn(a, xs):
        return lax.scan(lambda c, x: (c * a + x, c), jnp.float32(1), xs, reverse=True)

    final, partial = reference(fn, np.float32(0.9), X[0])
    carry, expected = 1.0, []
    for x in X[0][::-1].astype(np.float64):
        expected.append(carry)
        carry = carry * np.float64(np.float32(0.9)) + x
    assert np.allclose(final, carry, rtol=1e-14)
    assert np.allclose(partial, expected[::-1], rtol=1e-14)


def test_batched_while_freezes_finished_elements():
    def fn(n):
        return lax.while_loop(lambda s: s[0] > 0, lambda s: (s[0] - 1, s[1] * 1.5), (n, jnp.float32(1)))

    count, power = reference(jax.vmap(fn), np.array([0, 3, 5], np.int32))
    assert np.array_equal(count, [0, 0, 0])
    assert np.array_equal(power, 1.5 ** np.array([0, 3, 5]))


def test_reductions_and_scatters_with_their_own_function():
    def fn(x):
        product = lax.reduce(x, np.float32(1), lambda a, b: a * b + 0.5, (1,))
        return product, jnp.zeros(4).at[jnp.array([1, 1, 9])].add(x[:, 0]), jnp.ones(4).at[2].set(x[0, 0])

    product, added, written = reference(fn, X)
    wide = X.astype(np.float64)
    assert product.shape == (3,) and product.dtype == np.float64
    assert np.allclose(added, [0, wide[0, 0] + wide[1, 0], 0, 0])
    assert np.array_equal(written, [1, 1, wide[0, 0], 1])


def test_calls_are_entered():
    def fn(x):
        return jax.nn.relu(jax.checkpoint(jnp.tanh)(x)) + jax.jit(jnp.log1p)(jnp.abs(x))

    (result,) = reference(fn, X)
    wide = X.astype(np.float64)
    assert np.allclose(result, np.maximum(np.tanh(wide), 0) + np.log1p(np.abs(wide)), rtol=1e-14)


def test_a_primitive_that_has_no_float64_form_runs_on_its_own_types():
    def fn(x):
        return jax.pure_callback(lambda v: np.asarray(v) + np.float32(1), jax.ShapeDtypeStruct(x.shape, x.dtype), x) * 2

    (result,) = reference(fn, X)
    assert np.array_equal(result, (X + np.float32(1)).astype(np.float64) * 2)
