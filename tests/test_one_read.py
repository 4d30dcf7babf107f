"""Variances in one read: the accuracy of two passes, in every form, with NaN and infinities where jax.jit has them."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hlofuse
from hlofuse.compiler import compile_function
from hlofuse.hlo.combiners import is_moments, moments
from hlofuse.hlo.parser import parse_module
from hlofuse.hlo.printer import print_module

RNG = np.random.default_rng(0)
NORMAL = RNG.standard_normal((2048, 96)).astype(np.float32)


def reference(x: np.ndarray, axis: object) -> np.ndarray:
    return np.var(np.asarray(x, np.float64), axis)


def moments_of(compilation: hlofuse.compiler.Compilation) -> list[object]:
    return [i for i in compilation.snapshots["optimized"].entry.instructions
            if i.opcode == "reduce" and is_moments(i.attrs["to_apply"])]


@pytest.mark.parametrize("axis", [0, None])
@pytest.mark.parametrize("mean", [0.0, 1e4, -1e6])
def test_no_cancellation_far_from_zero(mean, axis):
    x = NORMAL + np.float32(mean)
    np.testing.assert_allclose(hlofuse.jit(lambda x: x.var(axis))(x), reference(x, axis), rtol=2e-6)


@pytest.mark.parametrize("row", [0, 1, 1000, 2047])
def test_one_huge_element(row):
    x = NORMAL.copy()
    x[row] = 1e15
    np.testing.assert_allclose(hlofuse.jit(lambda x: x.var(0))(x), reference(x, 0), rtol=5e-6)


@pytest.mark.parametrize("axis", [0, None])
def test_constants_have_no_variance(axis):
    x = np.full((2048, 96), 0.1, np.float32)
    assert not np.asarray(hlofuse.jit(lambda x: x.var(axis))(x)).any()


@pytest.mark.parametrize("values", [(np.nan,), (np.inf,), (-np.inf, np.inf), (np.inf, np.inf)])
@pytest.mark.parametrize("row", [0, 700])
def test_nan_and_infinities_stand_where_jax_has_them(values, row):
    x = NORMAL.copy()
    x[row : row + len(values), 5] = values
    for ours, theirs in zip(hlofuse.jit(lambda x: (x.mean(0), x.var(0)))(x),
                            jax.jit(lambda x: (x.mean(0), x.var(0)))(x), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


SHAPES = [((3, 40000), 1), ((50, 17, 33), (0, 1)), ((7, 100, 9, 11), (0, 2, 3)), ((300, 20, 9, 11), (0, 2, 3)),
          ((40000, 1), 0), ((33, 5), 0), ((20, 20000), 1), ((1, 70000), (0, 1)), ((64, 1, 3), 0)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_every_form(shape, axis, dtype):
    with jax.enable_x64(dtype == "float64"):
        x = jnp.asarray(RNG.standard_normal(shape) * 3 + 10, dtype)
        tolerance = {"float32": 2e-6, "float64": 1e-13, "bfloat16": 5e-3, "float16": 1e-3}[dtype]
        for function in (lambda x: jnp.std(x, axis, ddof=1, keepdims=True), lambda x: x.var(axis)):
            expected = function(np.asarray(x, np.float64)) if dtype != "float64" else jax.jit(function)(x)
            ours = hlofuse.jit(function)(x)
            assert ours.dtype == x.dtype
            np.testing.assert_allclose(np.asarray(ours, np.float64), np.asarray(expected, np.float64), rtol=tolerance)


def test_a_users_own_variance_is_one():
    shape = jax.ShapeDtypeStruct((8192, 64), jnp.float32)
    for function in (lambda x: ((x - x.mean(0, keepdims=True)) ** 2).mean(0), lambda x: (x.mean(0), x.var(0)),
                     lambda x: jnp.std(x)):
        compilation = compile_function(function, shape)
        assert compilation.launches().total == 1 and len(moments_of(compilation)) == 1


@pytest.mark.parametrize("function", [
    lambda x: x.var(1),                                   # a row that is kept
    lambda x: ((x - x.mean(0) * 2) ** 2).sum(0),          # another center
    lambda x: ((x - x.sum(0) / 100) ** 2).sum(0),
    lambda x: ((x * 2 - x.mean(0)) ** 2).sum(0),
    lambda x: (x + 1j).var(0),
])  # fmt: skip
def test_what_is_no_variance_stays(function):
    assert not moments_of(compile_function(function, jax.ShapeDtypeStruct((8192, 64), jnp.float32)))


def test_the_reducer_is_known_again_from_text():
    compilation = compile_function(lambda x: x.var(0), jax.ShapeDtypeStruct((8192, 64), jnp.float32))
    again = parse_module(print_module(compilation.snapshots["optimized"]))
    (found,) = [i for i in again.entry.instructions if i.opcode == "reduce"]
    assert found.attrs["to_apply"] is not moments("f32") and is_moments(found.attrs["to_apply"])
