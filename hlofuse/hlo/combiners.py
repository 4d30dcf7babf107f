"""Reducers of several accumulators that passes make and kernels know: what two parts of a whole have together.

They are plain HLO, so that XLA runs them too. A reducer is known by its structure, never by its name: one that was read
from text is as good.
"""
from __future__ import annotations

import functools

from hlofuse.hlo.builder import computation, constant, make, parameter, tuple_of
from hlofuse.hlo.module import Computation, Instruction
from hlofuse.hlo.shape import Shape
from hlofuse.hlo.traverse import structurally_equal


@functools.cache
def moments(element_type: str) -> Computation:
    """(mean, sum of squared deviations from it, count) of two parts => of both (Chan et al.). A part of no elements is
    (0, 0, 0). The count of a part comes first into the product: it may be 0 where the square is infinite."""
    mean_a, m2_a, count_a, mean_b, m2_b, count_b = _parameters(element_type, "mean", "m2", "count")
    count = make("add", count_a, count_b)
    share = make("divide", count_b, make("maximum", count, constant(1, element_type)))
    delta = make("subtract", mean_b, mean_a)
    step = make("multiply", delta, share)
    between = make("multiply", make("multiply", delta, count_a), step)
    root = tuple_of([make("add", mean_a, step), make("add", make("add", m2_a, m2_b), between), count])
    return computation("moments", (mean_a, m2_a, count_a, mean_b, m2_b, count_b), root)


def is_moments(body: Computation) -> bool:
    return _is(body, 6, moments)


@functools.cache
def online(element_type: str) -> Computation:
    """(max m of x, sum of exp(x - m)) of two parts => of both. A part of no elements is (-inf, 0). Equal maxima, also
    infinite ones, need no scaling; where m is not finite, the sum is of no use."""
    max_a, sum_a, max_b, sum_b = _parameters(element_type, "max", "sum")
    upper, lower = make("maximum", max_a, max_b), make("minimum", max_a, max_b)
    equal = make("compare", lower, upper, direction="EQ")
    distance = make("select", equal, constant(0, element_type), make("subtract", lower, upper))
    first = make("compare", max_a, max_b, direction="GE")
    scaled = make("multiply", make("select", first, sum_b, sum_a), make("exponential", distance))
    root = tuple_of([upper, make("add", make("select", first, sum_a, sum_b), scaled)])
    return computation("online", (max_a, sum_a, max_b, sum_b), root)


def is_online(body: Computation) -> bool:
    return _is(body, 4, online)


def _is(body: Computation, parameters: int, make_body: functools._lru_cache_wrapper[Computation]) -> bool:
    if len(body.parameters) != parameters or body.parameters[0].element_type not in ("f32", "f64"):
        return False
    known = make_body(body.parameters[0].element_type)
    return body is known or structurally_equal(body, known)


def _parameters(element_type: str, *names: str) -> list[Instruction]:
    shape, n = Shape(element_type), len(names)
    return [parameter(k + n * side, shape, f"{name}_{'ab'[side]}") for side in range(2) for k, name in enumerate(names)]
