"""What the tests of loops have in common: launches, and values beside `jax.jit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hlofuse
from hlofuse.compiler import compile_function


def launches(fn: Callable, *args: Any) -> int:
    return compile_function(fn, *args, device="h200").launches().total


def assert_same(fn: Callable, *args: Any, tolerance: float = 2e-6) -> None:
    assert_all_same({"": (fn, args, tolerance)})


def assert_all_same(programs: dict[str, tuple[Callable, tuple, float]]) -> None:
    """The values, types and weak types of jax.jit, bits where no float is involved; all in one program, one compile."""

    def everything(arguments):
        return [fn(*arguments[name]) for name, (fn, _, _) in programs.items()]

    arguments = {name: args for name, (_, args, _) in programs.items()}
    results = zip(hlofuse.jit(everything)(arguments), jax.jit(everything)(arguments), strict=True)
    for (name, (_, _, tolerance)), (got, expected) in zip(programs.items(), results, strict=True):
        assert jax.tree.structure(got) == jax.tree.structure(expected), name
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert (a.dtype, a.shape, a.weak_type) == (b.dtype, b.shape, b.weak_type), name
            if jnp.issubdtype(a.dtype, jnp.inexact):
                wide = np.complex128 if jnp.issubdtype(a.dtype, jnp.complexfloating) else np.float64
                coarse = 1e-2 if a.dtype == jnp.bfloat16 else 1e-3 if a.dtype == jnp.float16 else tolerance
                np.testing.assert_allclose(np.asarray(a).astype(wide), np.asarray(b).astype(wide), coarse, coarse,
                                           err_msg=name)  # fmt: skip
            else:
                np.testing.assert_array_equal(a, b, err_msg=name)
