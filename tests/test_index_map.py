"""Index expressions against brute force: every simplification keeps every value, and C prints what Python means."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hlofuse.hlo.index_map import (
    ZERO,
    Index,
    constant,
    delinearize,
    floor_div,
    linearize,
    mod,
    reshape_groups,
    reshape_index,
    to_c,
    var,
    variable,
)

FACTORS = st.sampled_from((1, 2, 3, 4, 5, 6, 8, 12, 16))
RANGES = {"i": (0, 5), "j": (0, 3), "k": (-4, 2), "m": (1, 7)}


class C(int):
    """An int that divides as C does: toward zero."""

    def __add__(self, other):
        return C(int(self) + int(other))

    def __sub__(self, other):
        return C(int(self) - int(other))

    def __mul__(self, other):
        return C(int(self) * int(other))

    def __neg__(self):
        return C(-int(self))

    def __truediv__(self, other):
        return C(math.trunc(int(self) / int(other)))

    def __mod__(self, other):
        return C(int(self) - int(other) * math.trunc(int(self) / int(other)))


@st.composite
def expressions(draw, depth=4):
    """(Index, the same in Python)."""
    kind = (
        draw(st.sampled_from(("var", "var", "constant", "add", "sub", "mul", "div", "div", "mod", "mod")))
        if depth
        else "var"
    )
    if kind == "var":
        name = draw(st.sampled_from(sorted(RANGES)))
        return var(name, *RANGES[name]), name
    if kind == "constant":
        value = draw(st.integers(-20, 20))
        return constant(value), str(value)
    a, text = draw(expressions(depth - 1))
    if kind in ("add", "sub"):
        b, other = draw(expressions(depth - 1))
        return (a + b, f"({text} + {other})") if kind == "add" else (a - b, f"({text} - {other})")
    n = draw(FACTORS)
    if kind == "mul":
        n = draw(st.sampled_from((-1, 1))) * n
        return a * n, f"({text} * {n})"
    return (floor_div(a, n), f"({text} // {n})") if kind == "div" else (mod(a, n), f"({text} % {n})")


def in_c(index: Index, place: dict[str, int]) -> int:
    return int(eval(to_c(index), {name: C(value) for name, value in place.items()}))


def places(ranges=RANGES):
    for values in itertools.product(*(range(low, high + 1) for low, high in ranges.values())):
        yield dict(zip(ranges, values, strict=True))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(expressions())
def test_expressions_keep_their_values_in_c(pair):
    index, text = pair
    code, low, high = compile(text, "expression", "eval"), *index.bounds
    compiled = compile(to_c(index), "index", "eval")
    for place in itertools.islice(places(), 0, None, 7):
        expected = eval(code, dict(place))
        assert int(eval(compiled, {n: C(v) for n, v in place.items()})) == expected, (to_c(index), place)
        assert low <= expected <= high


@pytest.mark.parametrize("divisor", [2, 3, 4, 5])
@pytest.mark.parametrize("size", [1, 4, 7, 12])
def test_reversed_indices_divide_downward(size, divisor):
    """n - 1 - i, as a reverse reads: C's division toward zero must not show."""
    i = var("i", 0, size - 1)
    for offset in (-1, 0, size - 1, size):
        index = constant(offset) - i
        for value in range(size):
            if not index.is_constant:
                assert in_c(floor_div(index, divisor), {"i": value}) == (offset - value) // divisor
                assert in_c(mod(index, divisor), {"i": value}) == (offset - value) % divisor


SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=4)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(SHAPES)
def test_delinearize_is_numpys_unravel_index(dims):
    size = math.prod(dims)
    indices = delinearize(variable("p", size), dims)
    for p in range(size):
        assert (
            tuple(in_c(i, {"p": p}) for i in indices) == tuple(int(x) for x in np.unravel_index(p, dims))
            if dims
            else True
        )


@settings(max_examples=100, deadline=None, derandomize=True)
@given(SHAPES)
def test_linearize_undoes_delinearize(dims):
    position = variable("p", math.prod(dims))
    assert linearize(delinearize(position, dims), dims) == position


@st.composite
def reshapes(draw):
    """Two shapes of one size."""
    primes = draw(st.lists(st.sampled_from((1, 2, 2, 3, 5)), max_size=6))

    def grouped():
        dims, left = [], list(draw(st.permutations(primes)))
        while left:
            n = draw(st.integers(1, len(left)))
            dims.append(math.prod(left[:n]))
            left = left[n:]
        return tuple(dims)

    return grouped(), grouped()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(reshapes(), st.booleans())
def test_reshape_index_is_numpys_reshape(shapes, flipped):
    result, operand = shapes
    names = [f"a{k}" for k in range(len(result))]
    indices = [variable(name, n) for name, n in zip(names, result, strict=True)]
    if flipped:  # what a reverse in front of the reshape reads
        indices = [constant(n - 1) - i for i, n in zip(indices, result, strict=True)]
    source = reshape_index(indices, result, operand)
    data = np.arange(math.prod(operand)).reshape(operand)
    expected = np.flip(data.reshape(result)) if flipped else data.reshape(result)
    for place in itertools.product(*map(range, result)):
        env = dict(zip(names, place, strict=True))
        assert data[tuple(in_c(i, env) for i in source)] == expected[place]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(reshapes())
def test_reshape_groups_pair_equal_products(shapes):
    a, b = shapes
    groups = reshape_groups(a, b)
    assert [k for (i0, i1), _ in groups for k in range(i0, i1)] == list(range(len(a)))
    assert [k for _, (j0, j1) in groups for k in range(j0, j1)] == list(range(len(b)))
    for (i0, i1), (j0, j1) in groups:
        assert math.prod(a[i0:i1]) == math.prod(b[j0:j1])


@pytest.mark.parametrize(("a", "b"), [((0,), (3, 0)), ((2, 0, 3), (0,)), ((0, 1), (1, 0)), ((1, 1), ()), ((), (1,))])
def test_reshape_of_nothing_and_of_units(a, b):
    source = reshape_index([variable(f"a{k}", max(n, 1)) for k, n in enumerate(a)], a, b)
    assert source == tuple(ZERO for _ in b)


def test_a_position_taken_apart_and_put_together_is_itself():
    v = variable("v", 60) + variable("w", 4) * 60
    assert floor_div(v, 12) * 12 + mod(v, 12) == v
    assert (floor_div(v, 12) * 12 + mod(v, 12)) * 5 + 3 == v * 5 + 3


def test_what_may_be_negative_is_never_divided():
    from hlofuse.hlo.index_map import FloorDiv

    with pytest.raises(AssertionError, match="toward zero"):
        to_c(Index(((FloorDiv(var("k", -3, 3), 2), 1),)))
