"""Loops whose steps read their neighbors' last values, as users write them: boards, stencils, small mixing matrices.

`BLOCKS` maps a name to a `Block`: the function, its arguments, and whether floats may differ by rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass(frozen=True)
class Block:
    fn: Callable
    args: tuple
    launches: int
    tolerance: float


BLOCKS: dict[str, Block] = {}
_RNG = np.random.default_rng(0)


def block(*args: Any, launches: int = 1, tolerance: float = 1e-5):
    def register(fn: Callable) -> Callable:
        BLOCKS[fn.__name__] = Block(fn, args, launches, tolerance)
        return fn

    return register


def normal(*shape: int) -> np.ndarray:
    return _RNG.standard_normal(shape).astype(np.float32)


def board(*shape: int, dtype: Any = np.int32) -> np.ndarray:
    return (_RNG.random(shape) < 0.35).astype(dtype)


def life_step(b: Any) -> Any:
    moves = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if (i, j) != (0, 0)]
    n = sum(jnp.roll(b, move, (0, 1)).astype(jnp.int8) for move in moves)
    return ((n == 3) | ((b == 1) & (n == 2))).astype(b.dtype)


def run_life(b: Any) -> Any:
    return lax.scan(lambda b, _: (life_step(b), None), b, None, length=12)[0]


def laplacian(u: Any) -> Any:
    return sum(jnp.roll(u, s, a) for s in (-1, 1) for a in range(u.ndim)) - 2 * u.ndim * u


# --- boards -----------------------------------------------------------------------------------------------------------


@block(board(32, 32))
def life(b):
    return run_life(b)


@block(board(6, 16, 16, dtype=np.int8))
def life_batch(b):
    return jax.vmap(run_life)(b)


@block(board(2, 3, 16, 16))
def life_vmap_of_vmap(b):
    return jax.vmap(jax.vmap(run_life))(b)


@block(board(20, 24, dtype=bool))
def life_of_bools(b):
    """With the number of the living in every step."""
    return lax.scan(lambda b, _: (life_step(b), b.sum()), b, None, length=9)


@block(board(70))
def rule_110(s):
    def step(s, _):
        return (110 >> (4 * jnp.roll(s, 1) + 2 * s + jnp.roll(s, -1))) & 1, s

    return lax.scan(step, s, None, length=21)


# --- stencils ---------------------------------------------------------------------------------------------------------


@block(normal(1000))
def heat_roll(u):
    return lax.fori_loop(0, 40, lambda i, u: u + 0.1 * laplacian(u), u)


@block(normal(100))
def heat_pad(u):
    def step(u, _):
        p = jnp.pad(u, 1)
        return u + 0.1 * (p[2:] - 2 * u + p[:-2]), u[0]

    return lax.scan(step, u, None, length=31)


@block(normal(40, 50))
def heat_set(u):
    def step(i, u):
        inner = u[1:-1, 1:-1]
        around = u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * inner
        return u.at[1:-1, 1:-1].set(inner + 0.1 * around)

    return lax.fori_loop(0, 20, step, u)


@block(normal(40, 50))
def heat_concatenate(u):
    """Along one axis only: the other one makes blocks."""

    def step(i, u):
        return u + 0.1 * (jnp.concatenate([u[1:], u[-1:]], 0) + jnp.concatenate([u[:1], u[:-1]], 0) - 2 * u)

    return lax.fori_loop(0, 20, step, u)


@block(normal(64), normal(64))
def wave(u, v):
    def step(c, _):
        u, v = c
        return (2 * u - v + 0.2 * laplacian(u), u), u[3]

    return lax.scan(step, (u, v), None, length=40)


@block(normal(24, 24) * 0.1 + 1, normal(24, 24) * 0.1)
def gray_scott(u, v):
    def step(c, _):
        u, v = c
        r = u * v * v
        return (u + 0.16 * laplacian(u) - r + 0.035 * (1 - u), v + 0.08 * laplacian(v) + r - 0.1 * v), None

    return lax.scan(step, (u, v), None, length=20)[0]


@block(normal(100), normal(30, 100))
def diffusion_with_a_source(u, source):
    return lax.scan(lambda u, s: (u + 0.1 * laplacian(u) + s, u.sum()), u, source)


@block(normal(24, 24))
def biharmonic(u):
    """A stencil of a stencil, which has an array of its own."""
    return lax.fori_loop(0, 9, lambda i, u: u - 0.01 * laplacian(laplacian(u)), u)


@block(normal(64), normal(21, 64))
def reversed_steps(u, xs):
    return lax.scan(lambda u, x: (u * 0.5 + jnp.roll(u, 2) * 0.4 + x, u), u, xs, reverse=True)


@block(normal(48), normal(48))
def swapped_carries(a, b):
    return lax.fori_loop(0, 5, lambda i, s: (jnp.roll(s[1], 1), s[0]), (a, b))


@block(normal(64), normal(20, 64), launches=4, tolerance=1e-4)
def gradient_of_heat(u, source):
    def loss(u, source, k):
        return (lax.scan(lambda u, s: (jnp.sin(u + k * laplacian(u)) + s, None), u, source)[0] ** 2).sum()

    return jax.grad(loss, (0, 1, 2))(u, source, 0.1)


# --- small matrices and reductions ------------------------------------------------------------------------------------


@block(normal(128), normal(128, 128) / 12, normal(9, 128))
def recurrent_network(h, c, xs):
    return lax.scan(lambda h, x: (jnp.tanh(h @ c + x), h), h, xs)


@block(normal(5, 64), normal(64, 64) / 8, normal(9, 5, 64))
def recurrent_network_of_a_transpose(h, c, xs):
    return lax.scan(lambda h, x: (jnp.tanh(h @ c.T + x), None), h, xs)[0]


@block(normal(4, 100), normal(100, 100), normal(7, 4, 100), launches=2)
def hidden_markov(a, transitions, observed):
    transitions = jax.nn.log_softmax(transitions, -1)
    step = lambda a, o: (jax.nn.logsumexp(a[:, :, None] + transitions[None], axis=1) + o, None)  # noqa: E731
    return lax.scan(step, a, observed)[0]


@block(normal(160, 40), normal(6, 160, 40))
def softmax_of_many_rows(a, xs):
    """On the CPU a block has several of them, and the numbers of each."""

    def step(s, x):
        a, n = s
        a = jax.nn.softmax(a * 2 + x)
        return (a, n + a[:, 0]), a.max(-1)

    return lax.scan(step, (a, jnp.zeros(160)), xs)


@block(normal(40, 256))
def columns_that_shift(u):
    """The blocks' axis is the inner one."""
    return lax.scan(lambda u, _: (u + 0.1 * (jnp.roll(u, 1, 0) - u), u[3]), u, None, length=9)


@block(normal(100))
def softmax_of_every_step(x):
    return lax.fori_loop(0, 9, lambda i, x: jax.nn.softmax(x * 3) + 0.1 * x, x)


@block(np.abs(normal(48, 48)), np.ones(48, np.float32))
def power_iteration(a, v):
    def step(v, _):
        w = a @ v
        n = jnp.linalg.norm(w)
        return w / n, n

    return lax.scan(step, v, None, length=30)


@block(np.abs(normal(40, 40)), launches=3)
def page_rank(a):
    a = a / a.sum(0)
    return lax.fori_loop(0, 20, lambda i, r: 0.85 * a @ r + 0.15 / 40, jnp.full(40, 1 / 40))


@block(normal(40, 40))
def normalized_by_its_maximum(u):
    return lax.fori_loop(0, 12, lambda i, u: (u + 0.1 * jnp.roll(u, 1, 0)) / jnp.max(jnp.abs(u)), u)


@block(normal(33, 40))
def rows_and_columns(u):
    """Sums along both axes in one step."""
    return lax.fori_loop(0, 7, lambda i, u: jnp.tanh(u - u.mean(0) - 0.5 * u.mean(1, keepdims=True)), u)


@block(normal(64))
def the_place_of_the_maximum(u):
    def step(u, _):
        k = jnp.argmax(u)
        return jnp.roll(u, 1) * 0.9 + jnp.where(jnp.arange(64) == k, 0.1, 0.0), k

    return lax.scan(step, u, None, length=17)


# --- conditions and indices -------------------------------------------------------------------------------------------


@block(np.abs(normal(64)))
def until_it_rests(u):
    def step(s):
        u, _, n = s
        w = u + 0.2 * laplacian(u)
        return w, jnp.max(jnp.abs(w - u)), n + 1

    return lax.while_loop(lambda s: (s[1] > 1e-3) & (s[2] < 200), step, (u, jnp.float32(1), 0))


@block(np.abs(normal(5, 48)))
def until_each_rests(u):
    """Each block leaves on its own."""
    return jax.vmap(BLOCKS["until_it_rests"].fn)(u)


@block(np.abs(normal(64)))
def until_all_are_near(u):
    return lax.while_loop(lambda u: jnp.any(jnp.abs(u - u.mean()) > 0.3), lambda u: u + 0.2 * laplacian(u), u)


@block(normal(40), np.int32(13))
def steps_by_an_argument(u, n):
    return lax.fori_loop(0, n, lambda i, u: u + 0.1 * (jnp.roll(u, 1) - u) * i, u)


@block(normal(64))
def gathered(u):
    return lax.fori_loop(0, 9, lambda i, u: u * 0.5 + u[(jnp.arange(64) * 3 + i) % 64], u)


@block(normal(200))
def a_table_filled_from_its_last_entries(t):
    """In its place: a step writes one element."""
    return lax.fori_loop(2, 200, lambda i, t: t.at[i].set(t[i - 1] * 0.5 + t[i - 2] * 0.3), t)


@block(normal(20, 30), normal(30))
def rows_filled_from_the_row_before(t, x):
    return lax.fori_loop(1, 20, lambda i, t: t.at[i].set(jnp.maximum(jnp.roll(t[i - 1], 1), t[i - 1]) * 0.5 + x), t)
