"""Softmax in one read less: in every form, with NaN and infinities where JAX has them, by CUDA's text on the CPU."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_cuda import kernels, resources

import hlofuse
from hlofuse.compiler import Compilation, compile_function
from hlofuse.hlo.combiners import is_online, online
from hlofuse.hlo.parser import parse_module
from hlofuse.hlo.printer import print_module
from hlofuse.hlo.to_jax import evaluate_module

RNG = np.random.default_rng(0)
INF, NAN = np.inf, np.nan
Function = Callable[[Any], Any]


def onlines(compilation: Compilation) -> list[Any]:
    return [i for i in compilation.snapshots["optimized"].entry.instructions
            if i.opcode == "reduce" and is_online(i.attrs["to_apply"])]


def compiled(function: Function, *shape: int, dtype: Any = jnp.float32) -> Compilation:
    return compile_function(function, jax.ShapeDtypeStruct(shape, dtype), device="h200")


def by_hand(x: Any) -> Any:
    """Each operation on its own: XLA:CPU loses NaN in maxima that it fuses."""
    m = np.max(x, 0)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        softmax_sum = np.sum(np.exp(x - m), 0)
        guarded = np.where(np.isfinite(m), m, 0)
        return m, softmax_sum, np.log(np.sum(np.exp(x - guarded), 0)) + guarded


def special_columns(rows: int) -> np.ndarray:
    """Columns in which infinities and NaN come first, last, alone, together, or are all there is."""
    x = (RNG.standard_normal((rows, 16)) * 3).astype(np.float64)
    x[:, 0], x[:, 1], x[:, 2] = -INF, INF, NAN
    x[3, 3], x[0, 4], x[-1, 5], x[-1, 6] = NAN, NAN, INF, -INF
    x[:-1, 7], x[1:, 8] = -INF, -INF
    x[2:4, 9], x[4:6, 10] = (INF, -INF), (NAN, INF)
    x[:, 11], x[:, 12] = -3e38, 1e30
    x[rows // 2, 13] = 3e38
    x[: rows // 2, 14], x[:, 15] = -INF, np.linspace(-50, 50, rows)
    return x


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("rows", [37, 700, 5000])
def test_nan_and_infinities(rows, dtype):
    def function(x: Any) -> Any:
        m = x.max(0)
        return m, jnp.exp(x - m).sum(0), jax.nn.logsumexp(x, 0)

    with jax.enable_x64(dtype == jnp.float64):
        x = special_columns(rows).astype(dtype)
        assert len(onlines(compiled(function, *x.shape, dtype=dtype))) == 1
        for ours, expected in zip(hlofuse.jit(function, device="simt")(x), by_hand(x.astype(np.float64)), strict=True):
            assert ours.dtype == dtype
            np.testing.assert_allclose(ours, expected.astype(dtype), rtol=1e-6 if dtype == jnp.float32 else 1e-13)


SHAPES = [((3, 40000), 1), ((50, 17, 33), (0, 1)), ((7, 100, 9, 11), (0, 2)), ((40000, 1), 0), ((33, 5), 0),
          ((1, 70000), (0, 1)), ((640, 1, 3), 0), ((300, 257), None)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_every_form(shape, axis, dtype):
    x = jnp.asarray(RNG.standard_normal(shape) * 3, dtype)
    tolerance = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}[dtype]
    for function in (lambda x: jax.nn.softmax(x, axis), lambda x: jax.nn.log_softmax(x, axis),
                     lambda x: jax.nn.logsumexp(x, axis, keepdims=True)):
        assert onlines(compiled(function, *shape, dtype=dtype))
        ours, expected = hlofuse.jit(function, device="simt")(x), function(x.astype(jnp.float32))
        assert ours.dtype == x.dtype and ours.shape == expected.shape
        np.testing.assert_allclose(np.asarray(ours, np.float32), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("first", [0, 1])
def test_masks(first):
    """Column 1 is masked wholly, column 2 where it is not -inf."""
    x = special_columns(90).astype(np.float32)
    x[:, 2:6] = RNG.standard_normal((90, 4))
    x[5:8, 2] = -INF
    mask = RNG.random(x.shape) < 0.7
    mask[:, 1], mask[:, 2] = False, x[:, 2] == -INF
    mask[0] = bool(first)

    def summed(x: Any) -> Any:
        chosen = jnp.where(mask, x, -jnp.inf)
        return jnp.where(mask, jnp.exp(chosen - chosen.max(0)), 0).sum(0)

    for function in (summed, lambda x: jax.nn.softmax(x, 0, where=mask), lambda x: jax.nn.logsumexp(x, 0, where=mask)):
        assert len(onlines(compiled(function, *x.shape))) == 1
        with jax.disable_jit():
            expected = function(x)
        np.testing.assert_allclose(hlofuse.jit(function, device="simt")(x), expected, rtol=2e-6, atol=1e-30)


def test_gradients():
    x = RNG.standard_normal((900, 24)).astype(np.float32)
    for function in (lambda x: (jax.nn.softmax(x, 0) * x).sum(), lambda x: jax.nn.logsumexp(x),
                     lambda x: (jax.nn.log_softmax(x, 0) * x).sum()):
        gradient = jax.grad(function)
        assert onlines(compiled(gradient, *x.shape))
        np.testing.assert_allclose(hlofuse.jit(gradient, device="simt")(x), jax.jit(gradient)(x), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(("function", "launches"), [
    (lambda x: jax.nn.softmax(x, 0), 2),
    (lambda x: jax.nn.log_softmax(x, 0), 2),
    (lambda x: jax.nn.softmax(x.astype(jnp.bfloat16), 0), 2),
    (jax.nn.logsumexp, 1),
    (lambda x: jax.nn.logsumexp(x, 0), 1),
    (lambda x: (x.max(0), jax.nn.logsumexp(x, 0)), 1),
    (lambda x: jax.nn.softmax(x, 1), 1),                                 # a row that is kept
])  # fmt: skip
def test_launches(function, launches):
    assert compiled(function, 2048, 1024).launches().total == launches


@pytest.mark.parametrize("function", [
    lambda x: jax.nn.softmax(x, 1),                                      # a row that is kept
    lambda x: jnp.exp(x - 2 * x.max(0)).sum(0),
    lambda x: jnp.exp(x * 2 - x.max(0)).sum(0),
    lambda x: jnp.exp(x - x.min(0)).sum(0),
    lambda x: jnp.exp(x - x.max()).sum(0),
    lambda x: jnp.where(x > 0, jnp.exp(x - x.max(0)), 0).sum(0),         # the maximum is of other elements
    lambda x: jax.nn.logsumexp(x, 0, b=x),                               # weights that may overflow alone
])  # fmt: skip
def test_what_is_no_softmax_stays(function):
    assert not onlines(compiled(function, 8192, 64))


def test_the_host_reads_its_cache_again():
    x = jax.ShapeDtypeStruct((2048, 1024), jnp.float32)
    assert not onlines(compile_function(lambda x: jax.nn.softmax(x, 0), x, device="host"))


def test_the_text_is_right_in_jax_and_on_the_host():
    x = special_columns(300).astype(np.float32)
    module = compiled(lambda x: (jax.nn.softmax(x, 0), jax.nn.logsumexp(x, 0)), *x.shape).snapshots["optimized"]
    again = parse_module(print_module(module))
    (found,) = [i for i in again.entry.instructions if i.opcode == "reduce"]
    assert found.attrs["to_apply"] is not online("f32") and is_online(found.attrs["to_apply"])

    def function(x: Any) -> Any:
        return evaluate_module(again, (x,))

    _, total, logsumexp = by_hand(x.astype(np.float64))
    with np.errstate(invalid="ignore"):
        softmax = np.exp(x - x.max(0)) / total
    for results in (jax.jit(function)(x), hlofuse.jit(function)(x)):
        for ours, expected in zip(results, (softmax, logsumexp), strict=True):
            np.testing.assert_allclose(ours, expected, rtol=2e-6, atol=1e-37)


def test_kernels_compile_without_spills():
    texts = [kernel for function, shape in ((lambda x: jax.nn.softmax(x, 0), (2048, 1024)),
                                            (jax.nn.logsumexp, (1024, 1024)),
                                            (lambda x: jax.nn.softmax(x, 1), (50, 40000)),
                                            (lambda x: jax.nn.softmax(x, 0, where=x > 0), (2048, 1024)))
             for dtype in (jnp.float32, jnp.bfloat16) for kernel in kernels(compiled(function, *shape, dtype=dtype))]
    for form in ("add_online<", "add_online_by_lane<"):
        assert any(form in text.text for text in texts)
    found = resources(texts, "sm_90")
    assert not [symbol for symbol, figures in found.items() if figures.spill_stores]
