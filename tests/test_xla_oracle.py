"""The oracle itself: it runs text, says what XLA refuses, and outlives a crash of XLA."""
from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from xla_oracle import XlaError, run_hlo, xla_parses

ADD = """HloModule add

ENTRY main {
  x = f32[2]{0} parameter(0)
  y = f32[2]{0} parameter(1)
  ROOT sum = f32[2]{0} add(x, y)
}
"""


def test_runs_text_on_numpy_arrays():
    (result,) = run_hlo(ADD, [np.float32([1, 2]), np.float32([10, 20])])
    np.testing.assert_array_equal(result, np.float32([11, 22]), strict=True)


def test_carries_types_that_numpy_lacks():
    x = np.array([1.5, -2], ml_dtypes.bfloat16)
    (result,) = run_hlo(ADD.replace("f32", "bf16"), [x, x])
    assert result.dtype == x.dtype and result.tolist() == [3, -4]


def test_parsing_answers_xlas_own_text():
    assert "add(%x, %y)" in xla_parses(ADD)


def test_a_refusal_is_xlas_message():
    with pytest.raises(XlaError, match="unexpected attribute"):
        xla_parses(ADD.replace("add(x, y)", "add(x, y), colour=red"))


def test_a_crash_is_reported_and_the_next_request_is_served():
    # A fusion of several results that was not made by XLA's own passes ends the process.
    crash = """HloModule crash

region {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT s = f32[] add(a, b)
}

fused {
  x = f32[8,8]{1,0} parameter(0)
  zero = f32[] constant(0)
  sum = f32[8]{0} reduce(x, zero), dimensions={1}, to_apply=region
  twice = f32[8,8]{1,0} add(x, x)
  ROOT both = (f32[8]{0}, f32[8,8]{1,0}) tuple(sum, twice)
}

ENTRY main {
  x = f32[8,8]{1,0} parameter(0)
  ROOT f = (f32[8]{0}, f32[8,8]{1,0}) fusion(x), kind=kLoop, calls=fused
}
"""
    with pytest.raises(XlaError, match="died"):
        run_hlo(crash, [np.ones((8, 8), np.float32)])
    assert len(run_hlo(ADD, [np.float32([1, 2]), np.float32([1, 2])])) == 1
