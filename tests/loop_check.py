"""What the tests of loops have in common: launches, values beside `jax.jit`, and what ptxas says of their kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hlofuse
from hlofuse.codegen.dialect import CUDA
from hlofuse.compiler import Compilation, compile_function
from hlofuse.runtime.kernel_cache import KernelCache
from hlofuse.runtime.nvrtc import CudaBinary, CudaSource, compile_many


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


def assert_no_spills(compilations: dict[str, Compilation], arch: str) -> None:
    """Compiles the CUDA of all loop kernels, prints their registers, and fails where one spills."""
    texts = {name: [c.text for c in compiled.clusters if c.form in ("time loop", "block loop")]
             for name, compiled in compilations.items()}  # fmt: skip
    sources = {t.symbol: CudaSource(t.symbol, t.text) for found in texts.values() for t in found}
    built = compile_many(list(sources.values()), arch, KernelCache(), prelude=CUDA.prelude)
    for name, found in texts.items():
        for t in found:
            binary = built[t.symbol]
            assert isinstance(binary, CudaBinary), f"{binary}\n{t.text}"
            resources = binary.kernels[t.symbol]
            print(f"{arch} {name}: {resources.registers} registers")
            assert not resources.spill_stores and not resources.spill_loads, name
