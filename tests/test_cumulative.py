"""Cumulative operations in kernels: values beside jax.jit, what fuses with them, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_cuda import kernels, resources

import hlofuse
from hlofuse.compiler import compile_function
from hlofuse.runtime.nvrtc import nvrtc_available

OPERATIONS = {"cumsum": lax.cumsum, "cumprod": lax.cumprod, "cummax": lax.cummax, "cummin": lax.cummin,
              "cumlogsumexp": lax.cumlogsumexp}
SHAPES = [((1000,), 0), ((37, 33), 1), ((33, 37), 0), ((3, 500, 70), 1), ((5, 4, 129), 2), ((64, 5000), 1)]


def draw(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    if np.issubdtype(dtype, np.integer):
        return jnp.asarray(rng.integers(-3, 4, shape).astype(dtype))
    return jnp.asarray(1 + 0.01 * rng.standard_normal(shape), dtype)


def close(got, expected, tolerance=2e-5):
    got, expected = jax.tree.leaves(got), jax.tree.leaves(expected)
    for g, e in zip(got, expected, strict=True):
        assert g.dtype == e.dtype and g.shape == e.shape
        if jnp.issubdtype(e.dtype, jnp.integer):
            np.testing.assert_array_equal(g, e)
        else:
            np.testing.assert_allclose(np.asarray(g, np.complex128), np.asarray(e, np.complex128), rtol=tolerance,
                                       atol=tolerance)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_values_over_shapes(name, reverse):
    for shape, axis in SHAPES:
        def f(x, axis=axis):
            return jnp.tanh(OPERATIONS[name](x * 0.99, axis, reverse)) + x

        x = draw(shape, jnp.float32)
        compiled = hlofuse.jit(f).lower(x).compile()
        assert [k.problem for k in compiled.kernels] == [None]
        close(compiled(x), jax.jit(f)(x))


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 64, 65])
@pytest.mark.parametrize("name", OPERATIONS)
def test_lengths_around_the_short_ones(name, length):
    def f(x):
        return OPERATIONS[name](x, 1) * 2, OPERATIONS[name](x.T, 0, reverse=True)

    x = draw((5, length), jnp.float32)
    close(hlofuse.jit(f)(x), jax.jit(f)(x))


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32, jnp.uint16, jnp.complex64, jnp.bfloat16, jnp.float16])
def test_values_over_types(dtype):
    def f(x):
        return lax.cumsum(x, 1), lax.cumprod(x, 0, reverse=True)

    x = draw((70, 90), np.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32).astype(dtype)
    close(hlofuse.jit(f)(x), jax.jit(f)(x), {jnp.bfloat16: 0.1, jnp.float16: 2e-2}.get(dtype, 1e-4))


def test_doubles():
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).standard_normal((40, 700)))
        close(hlofuse.jit(lambda x: jnp.cumsum(x, 1))(x), jnp.cumsum(x, 1), 1e-12)


def test_infinities_and_nan():
    x = np.zeros((3, 100), np.float32)
    x[0, 50], x[1, 20], x[2, 60], x[2, 70] = np.nan, np.inf, -np.inf, np.inf
    for operation in OPERATIONS.values():
        def f(x, operation=operation):
            return operation(x, 1)

        np.testing.assert_allclose(hlofuse.jit(f)(x), jax.jit(f)(x), rtol=1e-5)    # NaN and infinities in place


def test_a_long_sum_is_as_accurate_as_in_jax():
    x = np.random.default_rng(0).random((4, 100_000)).astype(np.float32)
    exact = np.cumsum(x.astype(np.float64), 1)
    for axis, array in ((1, x), (0, np.ascontiguousarray(x.T))):
        def cumsum(a, axis=axis):
            return jnp.cumsum(a, axis)

        ours, theirs = (np.abs(np.asarray(jit(cumsum)(array)) - (exact if axis else exact.T))
                        for jit in (hlofuse.jit, jax.jit))
        assert np.median(ours) <= 2 * np.median(theirs) + 4 * np.spacing(np.float32(exact.max()))


PROGRAMS = {
    "producer and consumer": (lambda x: jnp.exp(-jnp.cumsum(jnp.log1p(jnp.abs(x)), 1)) * 2, 1),
    "two in a row": (lambda x: lax.cummax(jnp.cumsum(x, 1), 1), 1),
    "side by side": (lambda x: (jnp.cumsum(x, 1), lax.cummax(x, 1), jnp.cumsum(x * x, 1)), 1),
    "share of the whole": (lambda x: jnp.cumsum(x, 1) / x.sum(1, keepdims=True), 1),
    "of a softmax": (lambda x: jnp.cumsum(jax.nn.softmax(x, 1), 1), 1),
    "reduced again": (lambda x: lax.cummax(x, 1).sum(1), 1),
    "its last": (lambda x: jnp.cumsum(x, 1) / jnp.cumsum(x, 1)[:, -1:], None),
    "columns reduced again": (lambda x: jnp.cumsum(x, 0).max(0), None),
    "both directions": (lambda x: jnp.cumsum(x, 1) + lax.cumsum(x, 1, reverse=True), None),
    "both axes": (lambda x: jnp.cumsum(jnp.cumsum(x, 0), 1), None),
    "transposed": (lambda x: jnp.cumsum(x.T, 1) + 1, None),
    "reshaped": (lambda x: jnp.cumsum(x.reshape(8, -1), 1).reshape(x.shape) * x, None),
    "shifted": (lambda x: jnp.cumsum(x, 1)[:, 1:] - x[:, :-1], None),
    "with a scatter": (lambda x: jnp.cumsum(x, 1).at[3].add(1.0), None),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_neighbors(name):
    f, launches = PROGRAMS[name]
    x = draw((40, 300), jnp.float32)
    close(hlofuse.jit(f)(x), jax.jit(f)(x), 1e-4)
    if launches is not None:
        compilation = compile_function(f, jax.ShapeDtypeStruct((4096, 8192), jnp.float32), device="h200")
        assert compilation.launches().total == launches, compilation.explain()


def test_gradient_and_vmap():
    def loss(x):
        return (jnp.sin(jnp.cumsum(x, 1)) ** 2).sum()

    x = draw((40, 300), jnp.float32)
    close(hlofuse.jit(jax.grad(loss))(x), jax.jit(jax.grad(loss))(x), 1e-3)
    for operation in OPERATIONS.values():
        def total(x, operation=operation):
            return operation(x, 1).sum()

        close(hlofuse.jit(jax.grad(total))(x), jax.jit(jax.grad(total))(x), 1e-3)
    rows = jax.vmap(lambda row: jnp.cumsum(row) * row)
    close(hlofuse.jit(rows)(x), jax.jit(rows)(x), 1e-4)


def test_one_long_row_stays_with_xla_on_a_gpu():
    compilation = compile_function(jnp.cumsum, jax.ShapeDtypeStruct((1 << 22,), jnp.float32), device="h200")
    assert not compilation.clusters


@pytest.mark.skipif(nvrtc_available() is not None, reason=str(nvrtc_available()))
def test_cuda_compiles_without_spills():
    texts = []
    for f, _ in PROGRAMS.values():
        for shape in ((4096, 8192), (65536, 40), (40, 65536)):
            texts += kernels(compile_function(f, jax.ShapeDtypeStruct(shape, jnp.float32), device="h200"))
    texts = [t for t in texts if t.form.startswith("scanned")]
    assert {t.form for t in texts} == {"scanned row", "scanned column"}
    assert not [r for r in resources(texts, "sm_90").values() if r.spill_stores or r.spill_loads]
