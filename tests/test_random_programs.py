"""Random programs against `jax.jit`, and the shapes of wrong code that were found, each as a small program.

scripts/fuzz.py runs the same for longer; what it finds becomes a line in CASES.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from jax import lax
from program_check import MODES, check, difference, shrink, weak_types_agree
from program_values import Input, Program, Step, Value
from random_programs import programs, random_program

import hlofuse
from hlofuse.codegen import element_reads
from hlofuse.compiler import compile_function


@pytest.mark.parametrize("mode", MODES)
def test_random_programs(mode):
    faults = check([random_program(seed) for seed in range(900, 912)], (mode,))
    assert not faults, "\n".join(map(str, faults))


def test_random_programs_with_64_bits():
    faults = check([random_program(seed, x64=True) for seed in range(40, 54)], ("forced",), x64=True)
    assert not faults, "\n".join(map(str, faults))


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_random_programs_whose_arguments_are_donated():
    faults = check([random_program(seed) for seed in range(960, 972)], ("coloring",), donate=True)
    assert not faults, "\n".join(map(str, faults))


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(programs())
def test_drawn_programs(program):
    faults = check([program], ("coloring", "forced"))
    assert not faults, str(faults[0])


@pytest.mark.parametrize("seed", range(30))
def test_types_and_weak_types_are_jaxs(seed):
    assert weak_types_agree(random_program(seed), hlofuse.jit)


# --- what was wrong once, or could be -------------------------------------------------------------

F = np.float32
MATRIX = (np.arange(35 * 6, dtype=F).reshape(35, 6) % 11) / 4
SQUARE = (np.arange(64 * 64, dtype=F).reshape(64, 64) % 13) - 6
LONG = (np.arange(6 * 300, dtype=F).reshape(6, 300) % 7) - 3
TWO = np.int32(2)


CASES = {
    # XLA:CPU gives 1 1 1 1: it absorbs the shifted slice into the update in place.
    "an update that reads its operand shifted": (
        lambda x: lax.dynamic_update_slice(x + 1, (x + 1)[:3], (1,)),
        (np.arange(4, dtype=F),),
        np.array([1, 1, 2, 3], F),
    ),
    "reverse, then a reshape that splits": (
        lambda x: jnp.flip(x, 0).reshape(4, 6) * 2,
        (np.arange(24, dtype=F),),
        np.flip(np.arange(24, dtype=F)).reshape(4, 6) * 2,
    ),
    "reverse, then interior padding": (
        lambda x: lax.pad(jnp.flip(x), 0.0, ((-2, 1, 2),)),
        (np.arange(1, 5, dtype=F),),
        None,
    ),
    "a reshape without common factors": (lambda x: jnp.sin(x).reshape(6, 35) + 1, (MATRIX,), None),
    "a value read at two places": (lambda x: jnp.exp(x)[1:] - jnp.exp(x)[:-1], (MATRIX,), None),
    "x + x.T": (lambda x: x + x.T, (SQUARE,), SQUARE + SQUARE.T),
    "indices along the gathered axis": (lambda x: x[jnp.argsort(x)] + x, (MATRIX[:, 0],), None),
    "a short reduction beside a transposed result": (lambda x: (x / x.sum(1, keepdims=True)).T, (MATRIX,), None),
    "a reduction of two arrays that lie across": (
        lambda x: lax.reduce((x, x.T), (0.0, 0.0), lambda a, b: (a[0] + b[0] * b[1], a[1] + b[1]), (1,))[1],
        (SQUARE,),
        SQUARE.sum(0),
    ),
    "accumulators that change places": (
        lambda x: lax.reduce((x, x * 2), (0.0, 0.0), lambda a, b: (a[1] + b[0], a[0]), (0,)),
        (F([3, 4, 5]),),
        (F(8), F(4)),
    ),
    "a start value, once": (lambda x: lax.reduce(x, F(1.5), lax.add, (1,)), (LONG,), LONG.sum(1) + F(1.5)),
    "a start value, once, down the columns": (
        lambda x: lax.reduce(x, F(1.5), lax.add, (0,)),
        (LONG.T,),
        LONG.T.sum(0) + F(1.5),
    ),
    "NaN in minima": (lambda x: x.min(0), (np.where(LONG.T == 2, F("nan"), LONG.T),), np.full(6, F("nan"))),
    "halves in a reduction of two": (
        lambda x: lax.reduce(
            (x, x), (jnp.bfloat16(0), jnp.bfloat16(0)), lambda a, b: (a[0] + b[0], lax.max(a[1], b[1])), (1,)
        ),
        (jnp.asarray(MATRIX, jnp.bfloat16),),
        None,
    ),
    "starts beyond the end": (
        lambda x, i: lax.dynamic_slice(x * 2, (i * 100, -i), (3, 4)),
        (MATRIX, TWO),
        2 * MATRIX[32:35, 2:6],
    ),
    "indices beyond both ends": (
        lambda x, i: jnp.take(x * 2, i, 0, mode="fill"),
        (MATRIX, np.array([0, 34, 35, -1, -36])),
        None,
    ),
    "a loop between": (
        lambda x: ((s := (x * x).sum()), jnp.sin(x) + lax.fori_loop(0, 3, lambda i, y: jnp.tanh(y), s)),
        (MATRIX,),
        None,
    ),
    "a reshape of what is in no memory": (
        lambda: jnp.arange(6.0).reshape(2, 3),
        (),
        np.arange(6, dtype=F).reshape(2, 3),
    ),
    "nothing": (lambda x: (x.sum(0), (x + 1).T), (np.zeros((0, 3), F),), (np.zeros(3, F), np.zeros((3, 0), F))),
    "units": (lambda x: (x + x.T).reshape(1, 1, 1) * 2, (np.ones((1, 1), F),), np.full((1, 1, 1), 4, F)),
    "negative padding": (lambda x: lax.pad(x, 0.0, ((-1, -2, 0), (2, -1, 1))), (MATRIX,), None),
}


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    function, arguments, expected = CASES[name]
    ours = jax.tree.leaves(hlofuse.jit(function)(*arguments))
    theirs = jax.tree.leaves(jax.jit(function)(*arguments) if expected is None else expected)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=2e-6, atol=1e-6)


def test_a_result_takes_only_memory_that_no_later_result_reads():
    """x may become the second result, not the first: the second would read what the first has written."""

    def two(z, x):
        t = jnp.tanh(z.astype(jnp.float32))
        return t * 2, t + x

    shapes = jax.ShapeDtypeStruct((64,), jnp.int32), jax.ShapeDtypeStruct((64,), jnp.float32)
    (cluster,) = compile_function(two, *shapes, device="host").clusters
    assert [p.name for p in cluster.instruction.attrs["calls"].parameters] == ["z", "x"]
    assert dict(cluster.text_in("host").aliases) == {1: 1}


# --- sizes beyond 32 bits, without the memory -----------------------------------------------------

BIG = {
    "rows": lambda x, i: jax.nn.softmax(x, -1),
    "columns": lambda x, i: x.sum(0),
    "transpose": lambda x, i: x.T + 1,
    "short reductions": lambda x, i: x.reshape(-1, 16).sum(1),
    "slices": lambda x, i: x[::2, 3:] * 2,
    "gather": lambda x, i: x[i] * 2,
    "update": lambda x, i: lax.dynamic_update_slice(x + 1, x[:3], (i[0], 0)),
    "a padding that is large itself": lambda x, i: jnp.pad(x[0], (2**31, 5)),
    "everything": lambda x, i: x.sum(),
}


@pytest.mark.parametrize("device", ["host", "h200"])
@pytest.mark.parametrize("name", BIG)
def test_indices_of_large_arrays_have_64_bits(name, device):
    x, i = jax.ShapeDtypeStruct((70000, 40000), jnp.float32), jax.ShapeDtypeStruct((5,), jnp.int32)
    compilation = compile_function(BIG[name], x, i, device=device)
    assert all(c.segments for c in compilation.clusters)
    text = "".join(c.text_in("host" if device == "host" else "cuda").text for c in compilation.clusters)
    assert "long long" in text
    # Narrow are only the number of a block of the GPU, and what a tile, the lanes or the chunks count.
    narrow = {
        line.strip().partition("int ")[2].split()[0]
        for line in text.splitlines()
        if line.strip().startswith(("const int ", "for (int "))
    }
    assert narrow <= {"BLOCK", "rows", "columns", "l", "chunk", "k"}


def test_indices_of_small_arrays_have_32():
    compilation = compile_function(lambda x: x.T + 1, jax.ShapeDtypeStruct((70, 40), jnp.float32), device="h200")
    assert "const long long" not in compilation.clusters[0].text.text.replace("const long long BLOCK", "")


# --- the check itself -----------------------------------------------------------------------------


def _program(text: str) -> Program:
    x = Value("x", "float32", (12,), 4.0, grain=0.125)
    tanh = Value("a", "float32", (12,), 1.0, error=1e-6)
    y = Value("y", "float32", (12,), 4.0, error=1e-6)
    return Program((Input(x, 7),), (Step(tanh, "jnp.tanh(x)", ("x",)), Step(y, text, ("a",))), (y, tanh))


def test_wrong_code_is_found_and_shrunk(monkeypatch):
    """A reverse that does nothing is a fault, of a program that is only the reverse."""
    monkeypatch.setitem(element_reads.READS, "reverse", element_reads.READS["copy"])
    faults = check([_program("jnp.flip(a)")], ("none",))
    assert len(faults) == 1 and "y: 12 of 12 elements" in faults[0].reason
    smallest = shrink(faults[0])
    assert [s.text for s in smallest.program.steps] == ["jnp.flip(a)"]


def test_differences_are_judged_by_the_stated_error():
    value = Value("y", "float32", (2,), 1.0, error=1e-5)
    ones = np.ones(2, np.float32)
    assert difference(value, ones + np.float32(2e-5), ones) is None
    assert difference(value, ones + np.float32(1e-4), ones) is not None
    assert difference(value, np.array([np.nan, 1], np.float32), ones) is not None
    assert difference(Value("n", "int32", (2,), 9.0), np.array([1, 2]), np.array([1, 3])) is not None
