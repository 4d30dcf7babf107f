"""`judge`: what counts as right."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from hlofuse.explore.accuracy import judge, ulp_of

REFERENCE = np.linspace(1, 2, 101)
EXACT = REFERENCE.astype(np.float32)
ULP = np.float32(2**-23)


def verdict(ours, theirs=EXACT, reference=REFERENCE):
    return judge([jnp.asarray(ours)], [jnp.asarray(theirs)], [reference])


def test_ulp_is_numpys_spacing():
    values = np.array([1.0, 1.999, 2.0, 3e-5, 1e30, 0.1])
    assert np.array_equal(ulp_of(values, np.float32), np.spacing(values.astype(np.float32)))
    assert np.array_equal(ulp_of(values, np.float64), np.spacing(values))
    assert ulp_of(np.array([1.0]), jnp.bfloat16)[0] == 2**-7


@pytest.mark.parametrize(("off", "ok"), [(0, True), (4, True), (6, False)])
def test_four_ulp_are_allowed_beside_an_exact_jax(off, ok):
    ours = EXACT.copy()
    ours[50] += off * ULP
    result = verdict(ours)
    assert result.ok is ok
    assert result.max_error == pytest.approx(off / 2, abs=0.6)  # in ulp of the largest element, 2.0
    assert ok or "result 0 at (50,)" in result.reason


def test_twice_jaxs_own_error_is_allowed():
    theirs = EXACT.copy()
    theirs[3] += 20 * ULP
    ours = EXACT.copy()
    ours[50] += 40 * ULP
    assert verdict(ours, theirs).ok
    ours[50] += 10 * ULP
    assert not verdict(ours, theirs).ok


def test_small_elements_count_beside_a_large_one():
    reference = np.concatenate([[1e9], np.full(100, 1e-3)])
    theirs = reference.astype(np.float32)
    theirs[0] += 1000
    ours = theirs.copy()
    ours[1:] *= 2
    assert not verdict(ours, theirs, reference).ok


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinities_stand_where_jax_has_them(value):
    special = EXACT.copy()
    special[7] = value
    assert verdict(special, special).ok
    assert "(7,)" in verdict(special).reason
    assert "(7,)" in verdict(EXACT, special).reason
    assert verdict(-special, special).ok is False


def test_integers_by_the_share_that_differs():
    reference = np.arange(100)
    theirs = reference.astype(np.int32)
    ours = theirs.copy()
    assert verdict(ours, theirs, reference).ok
    ours[5] = 77
    assert "1.000%" in verdict(ours, theirs, reference).reason
    theirs[9] = 3
    ours[6] = 77
    assert verdict(ours, theirs, reference).ok  # 2 % beside jax.jit's 1 %


def test_types_shapes_and_weak_types_are_jaxs():
    assert "dtype" in verdict(EXACT.astype(np.float16)).reason
    assert "shape" in verdict(EXACT[None]).reason
    assert "weak_type" in judge([jnp.asarray(1.0)], [jnp.float32(1.0)], [np.array(1.0)]).reason
    assert "results" in judge([], [jnp.float32(1.0)], [np.array(1.0)]).reason


def test_empty_results():
    empty = np.zeros((0, 3), np.float32)
    assert verdict(empty, empty, empty).ok
