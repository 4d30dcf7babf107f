"""A function's CUDA kernels tried out: run under SIMT in several orders of blocks and threads, beside jax.jit."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hlofuse.runtime.primitive import Outcome, recorded_outcomes
from hlofuse.runtime.simt import simt_seed

_PREFIX = "hlofuse: SIMT: "


@dataclass(frozen=True)
class Trial:
    """What came out. `report`: the first fault, with the seed that shows it; None where all went well."""

    outcomes: tuple[Outcome, ...]
    seeds: tuple[int, ...]
    report: str | None
    difference: float     # the largest from jax.jit, relative to the largest element of its result

    @property
    def kernels(self) -> int:
        return sum(len(o.executable.kernels) for o in self.outcomes if o.executable is not None)


def try_function(ours: Callable[..., Any], theirs: Callable[..., Any], args: Sequence[Any],
                 seeds: Sequence[int]) -> Trial:
    """`ours` is compiled for device "simt"; `args` may be shapes, for which values are drawn."""
    rng = np.random.default_rng(0)
    values = jax.tree.map(lambda x: _drawn(x, rng), tuple(args))
    with recorded_outcomes() as outcomes:
        compiled = jax.jit(ours).lower(*values).compile()
    first: list[np.ndarray] | None = None
    report = None
    for seed in seeds:
        try:
            with simt_seed(seed):
                results = [np.asarray(x) for x in jax.tree.leaves(compiled(*values))]
        except jax.errors.JaxRuntimeError as error:
            if _PREFIX not in str(error):
                raise
            report = f"seed {seed}: {str(error).partition(_PREFIX)[2]}"
            break
        first = first or results
        if any(a.tobytes() != b.tobytes() for a, b in zip(first, results, strict=True)):
            report = f"seed {seed}: another result than with seed {seeds[0]}"
            break
    difference = 0.0
    if report is None and first is not None:
        expected = [np.asarray(x) for x in jax.tree.leaves(jax.jit(theirs)(*values))]
        difference = max(map(_difference, first, expected), default=0.0)
    return Trial(tuple(outcomes), tuple(seeds), report, difference)


def _drawn(x: Any, rng: np.random.Generator) -> Any:
    if not isinstance(x, jax.ShapeDtypeStruct):
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), x.shape) if x.shape else jax.random.key(0)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.asarray(rng.standard_normal(x.shape), x.dtype)
    return jnp.asarray(rng.integers(0, 2, x.shape), x.dtype)


def _difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    if ours.dtype.kind in "biu":
        return float(np.mean(ours != theirs)) if ours.size else 0.0
    wide = np.complex128 if ours.dtype.kind == "c" else np.float64
    a, b = ours.astype(wide), theirs.astype(wide)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return 0.0
    scale = np.abs(b[np.isfinite(b)]).max(initial=0.0) or 1.0
    return float(np.abs(np.where(same, 0, a - b)).max() / scale)
