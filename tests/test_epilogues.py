"""What a matrix library computes behind its product, and what it does not."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hlofuse.compiler import compile_function
from hlofuse.fusion.epilogues import find_epilogues
from hlofuse.hlo.to_jax import evaluate_module

X, W, B, R = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 32), (32, 48), (48,), (64, 48)))


def relu(x):
    return jnp.maximum(x, 0.0)


CASES = {
    "bias": (lambda x, w, b, r: x @ w + b, 1),
    "bias and ReLU": (lambda x, w, b, r: relu(x @ w + b), 1),
    "bias and GELU": (lambda x, w, b, r: jax.nn.gelu(x @ w + b), 1),
    "GELU alone": (lambda x, w, b, r: jax.nn.gelu(x @ w), 1),
    "residual": (lambda x, w, b, r: r + x @ w, 1),
    "residual, bias and GELU": (lambda x, w, b, r: jax.nn.gelu(x @ w + r + b), 1),
    "a product that is a result too stays whole": (lambda x, w, b, r: (x @ w, x @ w + b), 2),
    "a second reader of what GELU reads": (lambda x, w, b, r: (lambda h: (jax.nn.gelu(h), h * 3))(x @ w + b), 2),
    "exact GELU is none": (lambda x, w, b, r: jax.nn.gelu(x @ w + b, approximate=False), 2),
    "another bound than zero": (lambda x, w, b, r: jnp.maximum(x @ w + b, 0.5), 2),
    "a bias along rows": (lambda x, w, b, r: x @ w + r[:, :1], 2),
    "twice the product": (lambda x, w, b, r: (lambda p: p + p)(x @ w), 2),
}


@pytest.mark.parametrize("name", CASES)
def test_launches_of_a_product_and_what_follows(name):
    fn, launches = CASES[name]
    compilation = compile_function(fn, X, W, B, R, device="h200")
    assert compilation.launches().total == launches, compilation.explain()


@pytest.mark.parametrize("name", CASES)
def test_values_stay(name):
    fn = CASES[name][0]
    rng = np.random.default_rng(0)
    arguments = [rng.standard_normal(s.shape).astype(np.float32) for s in (X, W, B, R)]
    compilation = compile_function(fn, *arguments, device="h200")
    expected = jax.tree.leaves(fn(*arguments))
    for got, want in zip(evaluate_module(compilation.fused, list(compilation.operands)), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_on_the_cpu_there_are_none():
    compilation = compile_function(CASES["bias and GELU"][0], X, W, B, R, device="host")
    assert compilation.launches().kernels == 1


def test_bytes_are_those_of_one_call():
    compilation = compile_function(CASES["residual, bias and GELU"][0], X, W, B, R, device="h200")
    assert compilation.launches().bytes == 4 * (64 * 32 + 32 * 48 + 48 + 2 * 64 * 48)


def test_wide_floats_have_none():
    with jax.enable_x64(True):
        avals = [jax.ShapeDtypeStruct(s.shape, jnp.float64) for s in (X, W, B, R)]
        compilation = compile_function(CASES["bias"][0], *avals, device="h200")
    assert not find_epilogues(compilation.snapshots["optimized"].entry)
