"""What JAX and XLA make of each catalog workload: its HLO text before and after XLA's passes, and its values."""
from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import numpy as np
from catalog import CATALOG


@dataclass(frozen=True)
class XlaProgram:
    text: str       # as JAX lowers it
    optimized: str  # as XLA compiles it
    arguments: list[np.ndarray]
    results: list[np.ndarray]


@functools.cache
def xla_program(name: str) -> XlaProgram:
    workload = CATALOG[name]
    arguments = workload.args("small")
    lowered = jax.jit(workload.fn, keep_unused=True).lower(*arguments)
    compiled = lowered.compile()
    results = [np.asarray(r) for r in jax.tree.leaves(compiled(*arguments))]
    return XlaProgram(lowered.as_text("hlo"), compiled.as_text(), jax.tree.leaves(arguments), results)


def assert_close(actual, expected, ulps: int = 64) -> None:
    """Same count, types and shapes; floats within a few ulps of the result's largest magnitude, all else equal.

    XLA fuses differently in each program, so that sums may round differently; nothing else may differ.
    """
    assert len(actual) == len(expected)
    for got, want in zip(actual, expected, strict=True):
        got, want = np.asarray(got), np.asarray(want)
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        if not jax.numpy.issubdtype(want.dtype, np.inexact):
            np.testing.assert_array_equal(got, want)
            continue
        epsilon = float(jax.numpy.finfo(want.dtype).eps)
        exact = np.complex128 if np.iscomplexobj(want) else np.float64
        got, want = got.astype(exact), want.astype(exact)
        finite = np.abs(want[np.isfinite(want)])
        np.testing.assert_allclose(got, want, rtol=0, atol=ulps * epsilon * max(finite.max(initial=0), 1e-30))
