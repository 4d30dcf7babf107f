"""The register estimates: near ptxas's figures, and moving the way that registers do."""

from __future__ import annotations

import functools
import statistics

import pytest
from calibrate import Sample, error, guess_registers, measure

from hlofuse.fusion.plan import make_plan
from hlofuse.fusion.registers import LEAST, MOST, PRECISE, QUICK, Model, estimate_registers, quick_registers
from hlofuse.hlo.builder import computation, make, parameter, tuple_of
from hlofuse.hlo.module import Computation
from hlofuse.hlo.shape import Shape
from hlofuse.runtime.nvrtc import nvrtc_available

needs_nvrtc = pytest.mark.skipif(nvrtc_available() is not None, reason=str(nvrtc_available()))


@functools.cache
def measured() -> list[Sample]:
    return measure(random=40, arch="sm_90")


def estimated(sample: Sample) -> int:
    return estimate_registers(sample.plans)


@needs_nvrtc
def test_the_mean_error_is_below_a_fifth():
    for held_out in (False, True):
        chosen = [s for s in measured() if s.held_out == held_out]
        errors = [error(estimated(s), s.found.registers) for s in chosen]
        assert len(errors) > 30
        assert statistics.mean(errors) <= 0.20, f"held out: {held_out}; scripts/calibrate.py --all shows every kernel"


@needs_nvrtc
def test_the_quick_estimate_is_nearly_as_good():
    errors = [error(guess_registers(s), s.found.registers) for s in measured()]
    assert statistics.mean(errors) <= 0.25


@needs_nvrtc
def test_the_estimate_beats_any_single_number():
    figures = [s.found.registers for s in measured()]
    best = min(statistics.mean(error(guess, f) for f in figures) for guess in range(8, 65))
    assert statistics.mean(error(estimated(s), s.found.registers) for s in measured()) < 0.75 * best


def many_sums(count: int, element_type: str = "f32", results: int = 1) -> Computation:
    """`results` different sums of products of `count` arrays, all of which are live at once."""
    xs = [parameter(n, Shape(element_type, (4096, 256))) for n in range(count)]
    roots = []
    for shift in range(results):
        terms = [make("multiply", xs[n], xs[(n + 1 + shift) % count]) for n in range(count)]
        roots.append(functools.reduce(lambda a, b: make("add", a, b), terms))
    return computation("sums", xs, tuple_of(roots) if results > 1 else roots[0])


def registers_of(computation: Computation) -> int:
    return estimate_registers([make_plan(computation)])


def test_more_live_values_and_wider_ones_need_more():
    few, many = registers_of(many_sums(2)), registers_of(many_sums(16))
    assert LEAST <= few < many <= MOST
    assert registers_of(many_sums(4)) < registers_of(many_sums(4, results=4))
    assert registers_of(many_sums(8)) < registers_of(many_sums(8, "f64"))
    assert estimate_registers([make_plan(many_sums(2)), make_plan(many_sums(16))]) == many    # packed: the largest


def test_the_quick_estimate_grows_with_each_count():
    base = quick_registers("loop", 2, 1, 8, 1, 0, wide=False)
    assert base < quick_registers("loop", 12, 1, 8, 1, 0, wide=False)
    assert base < quick_registers("loop", 2, 8, 8, 1, 0, wide=False)
    assert base < quick_registers("loop", 2, 1, 8, 1, 0, wide=True)
    assert base < quick_registers("row", 2, 1, 40, 3, 3, wide=False)


@pytest.mark.parametrize("model", [PRECISE, QUICK])
def test_the_curve_never_falls(model):
    values = [model.registers(need / 4) for need in range(480)]
    assert all(a <= b + 1e-9 for a, b in zip(values, values[1:], strict=False))


def test_a_model_is_linear_between_its_points():
    model = Model({"a": 2.0, "b": 1.0}, ((10.0, 10.0), (20.0, 30.0), (30.0, 30.0)))
    assert model({"a": 5.0}) == 10
    assert model({"a": 5.0, "b": 5.0}) == 20
    assert model({"a": 12.5}) == 30
    assert model({"a": 1000.0}) == 30
    assert model({"b": -50.0}) == LEAST
    assert model({"a": 10.0}, most=24) == 24
