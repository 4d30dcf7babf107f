"""Is one program's result as good as another's? Both are measured against a float64 evaluation of the same jaxpr.

`judge` accepts floating results that are no further from the reference than twice JAX's own error plus 4 ulp of their
type, and integer results of which no larger a share differs than twice JAX's share; NaN and infinities have to stand
where JAX has them. Types and shapes have to be JAX's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

ULP_ALLOWANCE = 4.0
JAX_ERROR_FACTOR = 2.0


@dataclass(frozen=True)
class Verdict:
    """`ok` or the first `reason` against it. max_error: the largest error of any result: for a floating one in ulp of
    its largest element, for an integer one the share of elements that differ."""

    ok: bool
    max_error: float
    reason: str = ""


def judge(ours: Sequence[Any], theirs: Sequence[Any], reference: Sequence[np.ndarray]) -> Verdict:
    """Flat results of the program, of jax.jit, and of `float64_reference.evaluate`."""
    if len(ours) != len(theirs):
        return Verdict(False, math.inf, f"{len(ours)} results, jax.jit has {len(theirs)}")
    verdicts = [judge_result(*triple, number=i) for i, triple in enumerate(zip(ours, theirs, reference, strict=True))]
    refused = next((v for v in verdicts if not v.ok), None)
    max_error = max((v.max_error for v in verdicts), default=0.0)
    return Verdict(refused is None, max_error, refused.reason if refused else "")


def judge_result(ours: Any, theirs: Any, reference: np.ndarray, number: int = 0) -> Verdict:
    """One result."""
    for what in ("shape", "dtype", "weak_type"):
        got, expected = getattr(ours, what, None), getattr(theirs, what, None)
        if got != expected:
            return Verdict(False, math.inf, f"result {number}: {what} {got}, jax.jit has {expected}")
    if jnp.issubdtype(ours.dtype, jnp.inexact):
        return _judge_floating(_as_float64(ours), _as_float64(theirs), reference, ours.dtype, number)
    return _judge_exact(np.asarray(ours), np.asarray(theirs), reference, number)


def _as_float64(value: Any) -> np.ndarray:
    wide = np.complex128 if jnp.issubdtype(value.dtype, jnp.complexfloating) else np.float64
    return np.asarray(value).astype(wide)


def _judge_exact(ours: np.ndarray, theirs: np.ndarray, reference: np.ndarray, number: int) -> Verdict:
    if ours.size == 0:
        return Verdict(True, 0.0)
    our_share, their_share = float(np.mean(ours != reference)), float(np.mean(theirs != reference))
    if our_share <= JAX_ERROR_FACTOR * their_share:
        return Verdict(True, our_share)
    index = _index_of(np.logical_and(ours != reference, ours != theirs))
    return Verdict(False, our_share,
                   f"result {number}: {our_share:.3%} of the elements differ, of jax.jit's {their_share:.3%}; "
                   f"first at {index}: {ours[index]}, jax.jit {theirs[index]}")  # fmt: skip


def _judge_floating(ours: np.ndarray, theirs: np.ndarray, reference: np.ndarray, dtype: Any, number: int) -> Verdict:
    misplaced = _misplaced(ours, theirs)
    if misplaced.any():
        index = _index_of(misplaced)
        return Verdict(False, math.inf, f"result {number} at {index}: {ours[index]}, jax.jit has {theirs[index]}")
    comparable = np.isfinite(ours) & np.isfinite(theirs) & np.isfinite(reference)
    if not comparable.any():
        return Verdict(True, 0.0)
    # Where there is no comparing, all three are the same zero.
    ours, theirs, reference = (np.where(comparable, x, 0) for x in (ours, theirs, reference))
    ulp = ulp_of(reference, dtype)
    our_error, their_error = np.abs(ours - reference), np.abs(theirs - reference)
    max_error = float(our_error.max() / ulp.max())
    excess = our_error - (JAX_ERROR_FACTOR * their_error.max() + ULP_ALLOWANCE * ulp)
    if (excess > 0).any():
        index = _index_of(excess == excess.max())
        return Verdict(False, max_error,
                       f"result {number} at {index}: {ours[index]:.9g}, float64 {reference[index]:.9g}"
                       f" ({our_error[index] / ulp[index]:.3g} ulp off, jax.jit {their_error[index] / ulp[index]:.3g}, "
                       f"at most {their_error.max() / ulp.max():.3g} ulp of the largest)")  # fmt: skip
    # The largest error says nothing of small elements beside large ones; the typical one in own ulps does.
    ours_typical, theirs_typical = (float(np.median((e / ulp)[comparable])) for e in (our_error, their_error))
    if ours_typical > JAX_ERROR_FACTOR * theirs_typical + ULP_ALLOWANCE:
        return Verdict(False, max_error,
                       f"result {number}: half of the elements are more than {ours_typical:.3g} ulp off, "
                       f"of jax.jit's {theirs_typical:.3g}")  # fmt: skip
    return Verdict(True, max_error)


def _misplaced(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Where only one of the two is NaN, or an infinity is not the other's."""
    if np.iscomplexobj(ours):
        return _misplaced(ours.real, theirs.real) | _misplaced(ours.imag, theirs.imag)
    infinite = np.isinf(ours) | np.isinf(theirs)
    return (np.isnan(ours) != np.isnan(theirs)) | (infinite & (ours != theirs) & ~np.isnan(ours))


def ulp_of(values: np.ndarray, dtype: Any) -> np.ndarray:
    """The distance of neighbors of `dtype` around each value (complex: around its modulus), in float64.

    Below the normal range of float32 and float64, which XLA flushes to zero, it is that of the smallest normal number,
    so that 4 ulp cover a flush.
    """
    info = jnp.finfo(dtype)
    smallest = float(info.smallest_subnormal) if info.nexp < 8 else float(info.tiny) / ULP_ALLOWANCE
    exponent = np.frexp(np.abs(values))[1]
    return np.maximum(np.ldexp(1.0, exponent - 1 - info.nmant), smallest)


def _index_of(mask: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(mask)[0]) if mask.any() else ()
