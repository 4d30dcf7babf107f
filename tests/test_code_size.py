"""What is read at several places is shared or stored: text grows with the program, not with the ways through it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hlofuse
from hlofuse.compiler import compile_function

SQUARE = jax.ShapeDtypeStruct((256, 256), jnp.float32)


def scattered_rows(n):
    def f(x, rows, updates):
        for k in range(n):
            x = x.at[rows[k]].add(updates[k])
        return x.sum()

    return f, (jax.ShapeDtypeStruct((512, 16), jnp.float32), jax.ShapeDtypeStruct((n, 40), jnp.int32),
               jax.ShapeDtypeStruct((n, 40, 16), jnp.float32))


def updated_places(n):
    def f(x):
        for k in range(n):
            x = x.at[k].add(1.0)
        return x.sum()

    return f, (jax.ShapeDtypeStruct((512, 16), jnp.float32),)


def sines_in_a_row(n):
    def f(x, a, b):
        for _ in range(n):
            x = jnp.sin(x) * a + b
        return x

    return f, (SQUARE,) * 3


def sines_side_by_side(n):
    return lambda x: sum(jnp.sin(x * (k + 1.0)) for k in range(n)), (SQUARE,)


def padded_stencil(n):
    def f(u):
        for _ in range(n):
            p = jnp.pad(u, 1)
            u = u + 0.1 * (p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * u)
        return u

    return f, (SQUARE,)


def rolled_stencil(n):
    def f(u):
        for _ in range(n):
            u = u + 0.1 * (jnp.roll(u, 1, 0) + jnp.roll(u, -1, 0) + jnp.roll(u, 1, 1) + jnp.roll(u, -1, 1) - 4 * u)
        return u

    return f, (SQUARE,)


def mirrored(n):
    def f(x):
        for _ in range(n):
            x = jnp.concatenate([x[::-1], x])
        return x * 2

    return f, (jax.ShapeDtypeStruct((100,), jnp.float32),)


# Program by size, two sizes, and how many times the statements may grow between them.
PROGRAMS = {
    "scattered rows": (scattered_rows, 4, 8, 2.5),
    "updated places": (updated_places, 4, 8, 2.5),
    "sines in a row": (sines_in_a_row, 50, 400, 9.0),
    "sines side by side": (sines_side_by_side, 50, 400, 9.0),
    "padded stencil": (padded_stencil, 4, 8, 2.5),
    "rolled stencil": (rolled_stencil, 4, 8, 2.5),
    "mirrored": (mirrored, 3, 6, 12.0),    # the array itself has eight times the pieces
}


def statements(program, n, device):
    f, arguments = program(n)
    compilation = compile_function(f, *arguments, device=device)
    dialect = "host" if device == "host" else "cuda"
    return sum(c.kernel.sources[dialect].count(";") for c in compilation.clusters)


@pytest.mark.parametrize("device", ["h200", "host"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_text_grows_with_the_program(name, device):
    program, small, large, most = PROGRAMS[name]
    assert statements(program, large, device) <= most * statements(program, small, device)


@pytest.mark.parametrize("name", PROGRAMS)
def test_values(name):
    program, small, *_ = PROGRAMS[name]
    f, shapes = program(small)
    rng = np.random.default_rng(0)
    arguments = [rng.integers(0, 512, s.shape).astype(np.int32) if s.dtype == np.int32
                 else 0.3 * rng.standard_normal(s.shape).astype(np.float32) for s in shapes]
    np.testing.assert_allclose(hlofuse.jit(f)(*arguments), jax.jit(f)(*arguments), rtol=2e-3, atol=2e-3)


def test_many_long_functions_are_called_and_few_are_written_out():
    few, many = ([c.kernel.sources["cuda"] for c in compile_function(*_unpacked(sines_in_a_row(n))).clusters]
                 for n in (10, 50))
    assert not any("call_sin_of" in text for text in few)
    assert all("call_sin_of(" in text and " sin_of(" not in text for text in many)


def _unpacked(program):
    f, arguments = program
    return f, *arguments
