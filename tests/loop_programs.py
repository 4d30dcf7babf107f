"""Loops as users write them: a catalog of scans and whiles beside catalog.py's, each with arguments for any number of
lanes and the launches that it takes on a GPU. `scripts/scoreboard.py` runs both catalogs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Arguments = Callable[[np.random.Generator, int], tuple]


@dataclass(frozen=True)
class Loop:
    """A workload; `arguments(generator, lanes)` draws its inputs, `full` are the lanes of the full size."""

    name: str
    fn: Callable
    arguments: Arguments
    launches: int
    tolerance: float
    full: int
    group: str = "loop"

    def args(self, size: str = "small", seed: int = 0) -> tuple:
        """Concrete NumPy inputs of the given size."""
        return self.arguments(np.random.default_rng(seed), self.full if size == "full" else 64)

    def avals(self, size: str = "full") -> tuple:
        """The inputs' shapes and dtypes, without data."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), self.args(size))


CATALOG: dict[str, Loop] = {}


def loop(arguments: Arguments, launches: int = 1, tolerance: float = 1e-5, full: int = 1 << 18) -> Callable:
    def register(fn: Callable) -> Callable:
        CATALOG[fn.__name__] = Loop(fn.__name__, fn, arguments, launches, tolerance, full)
        return fn

    return register


def normal(r: np.random.Generator, *shape: int) -> np.ndarray:
    return r.standard_normal(shape).astype(np.float32)


def lorenz(s: Any) -> Any:
    x, y, z = s[..., 0], s[..., 1], s[..., 2]
    return jnp.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z], -1)


def runge_kutta(f: Callable, s: Any, dt: float) -> Any:
    k1 = f(s)
    k2 = f(s + dt / 2 * k1)
    k3 = f(s + dt / 2 * k2)
    k4 = f(s + dt * k3)
    return s + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


@loop(lambda r, n: (normal(r, n, 3),), tolerance=1e-3)
def ode_ensemble(s):
    """A Lorenz system for each lane, by RK4: a state vector that mixes in every step."""
    return lax.fori_loop(0, 200, lambda _, s: runge_kutta(lorenz, s, 0.005), s)


@loop(lambda r, n: (normal(r, n, 3),), tolerance=1e-3)
def vmapped_ode(s):
    """The same as users write it: one system, vmapped."""
    return jax.vmap(lambda s: lax.scan(lambda s, _: (runge_kutta(lorenz, s, 0.005), None), s, None, length=200)[0])(s)


@loop(lambda r, n: (normal(r, 32, 8, n // 8), normal(r, 32, 8, n // 8), normal(r, n // 8, 16), normal(r, 32, 8, 16),
                    normal(r, 32, 8, 16)))
def selective_scan(x, dt, a, b, c):
    """A selective state-space model: a state vector for every channel, and what it shows in each step."""

    def step(h, inputs):
        x, dt, b, c = inputs
        dt = jax.nn.softplus(dt)
        h = jnp.exp(-dt[..., None] * jnp.exp(a)) * h + (dt * x)[..., None] * b[:, None, :]
        return h, (h * c[:, None, :]).sum(-1)

    return lax.scan(step, jnp.zeros((*x.shape[1:], a.shape[1])), (x, dt, b, c))[1]


@loop(lambda r, n: (normal(r, n, 6), normal(r, 6, 6), normal(r, 30, n, 6)))
def hidden_markov_forward(start, transitions, observed):
    """The forward pass in logarithms: a logsumexp over the states before, for each state."""
    log_p = jax.nn.log_softmax(transitions)

    def step(alpha, likelihood):
        return jax.nn.logsumexp(alpha[:, :, None] + log_p, axis=1) + likelihood, None

    return jax.nn.logsumexp(lax.scan(step, start, observed)[0], axis=-1)


@loop(lambda r, n: (np.abs(normal(r, n, 4, 4)),))
def sinkhorn(cost):
    """Balanced transport between four points and four others, for every pair of clouds."""
    kernel = jnp.exp(-cost)

    def step(uv, _):
        _, v = uv
        u = 1 / jnp.einsum("bij,bj->bi", kernel, v)
        return (u, 1 / jnp.einsum("bij,bi->bj", kernel, u)), None

    ones = jnp.ones(cost.shape[:2])
    u, v = lax.scan(step, (ones, ones), None, length=20)[0]
    return u[:, :, None] * kernel * v[:, None, :]


@loop(lambda r, n: (normal(r, n, 4), normal(r, 4, 4), normal(r, 40, n, 4)))
def small_rnn(h, w, xs):
    """A recurrent net with few units."""

    def step(h, x):
        h = jnp.tanh(h @ w * 0.3 + x)
        return h, h

    return lax.scan(step, h, xs)


def pendulum_loss(theta, k):
    def step(state, _):
        theta, omega = state
        omega = omega - 0.01 * k * jnp.sin(theta)
        return (theta + 0.01 * omega, omega), None

    theta, _ = lax.scan(step, (theta, jnp.zeros_like(theta)), None, length=200)[0]
    return (theta**2).sum()


@loop(lambda r, n: (normal(r, n), np.float32(1.3)))
def gradient_by_state(theta, k):
    """Through 200 steps: a loop that leaves residuals, and the transposed one."""
    return jax.grad(pendulum_loss)(theta, k)


@loop(lambda r, n: (normal(r, n), np.float32(1.3)), launches=2, tolerance=1e-4)
def gradient_by_shared_scalar(theta, k):
    """The same, with a sum over all lanes in every step of the transposed loop."""
    return jax.grad(pendulum_loss, (0, 1))(theta, k)


@loop(lambda r, n: (np.abs(normal(r, n)),))
def adaptive_steps(x):
    """A step size for each lane, and each lane leaves when it is there."""

    def solve(x):
        def step(s):
            x, t, dt, n = s
            k1 = -x * x
            k2 = -((x + dt * k1) ** 2)
            good = jnp.abs(k2 - k1) * dt < 1e-3
            return (jnp.where(good, x + dt * (k1 + k2) / 2, x), jnp.where(good, t + dt, t),
                    jnp.where(good, dt * 1.5, dt * 0.5), n + 1)  # fmt: skip

        return lax.while_loop(lambda s: s[1] < 1.0, step, (x, 0.0, 0.1, 0))

    return jax.vmap(solve)(x)


@loop(lambda r, n: (normal(r, n),))
def branches(x):
    def step(i, x):
        return lax.switch(i % 3, [jnp.sin, lambda x: x * 0.5, lambda x: lax.cond(i > 9, jnp.cos, jnp.tanh, x)], x)

    return lax.fori_loop(0, 20, step, x)


@loop(lambda r, n: (normal(r, n),))
def gradient_through_checkpoints(x):
    @jax.checkpoint
    def step(s, _):
        return jnp.sin(s) * 1.1, None

    return jax.grad(lambda x: lax.scan(step, x, None, length=30)[0].sum())(x)


@loop(lambda r, n: (normal(r, n), normal(r, 5, n)))
def loops_in_loops(x, coefficients):
    """Newton's iterations in every step of a scan."""

    def step(x, c):
        y = lax.fori_loop(0, 4, lambda _, y: y - (y**3 + y - c * x) / (3 * y * y + 1), x)
        return y, y * c

    return lax.scan(step, x, coefficients)


@loop(lambda r, n: (normal(r, 20, n), normal(r, n)))
def kalman_filter(observed, start):
    def step(state, z):
        mean, variance = state
        variance = variance + 0.01
        gain = variance / (variance + 0.5)
        mean = mean + gain * (z - mean)
        return (mean, (1 - gain) * variance), mean

    return lax.scan(step, (start, jnp.ones_like(start)), observed)


# --- steps that read their neighbors ----------------------------------------------------------------------------------


def square(n: int) -> tuple[int, int]:
    side = int(np.sqrt(n))
    return side, side


def life_step(board: Any) -> Any:
    moves = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if (i, j) != (0, 0)]
    neighbors = sum(jnp.roll(board, move, (0, 1)).astype(jnp.int8) for move in moves)
    return (neighbors == 3) | (board & (neighbors == 2))


def life(board: Any) -> Any:
    return lax.fori_loop(0, 100, lambda _, b: life_step(b), board)


@loop(lambda r, n: (r.random(square(n)) < 0.35,), full=1 << 14)
def game_of_life(board):
    """One board, on a torus."""
    return life(board)


@loop(lambda r, n: (r.random((max(1, n // 1024), 32, 32)) < 0.35,))
def boards_of_life(boards):
    return jax.vmap(life)(boards)


def laplacian(u: Any) -> Any:
    return sum(jnp.roll(u, shift, axis) for shift in (-1, 1) for axis in range(u.ndim)) - 2 * u.ndim * u


@loop(lambda r, n: (normal(r, n),), full=4096)
def heat_rod(u):
    """The heat equation in one dimension, between ends that stay as they are."""
    return lax.fori_loop(0, 500, lambda _, u: u.at[1:-1].add(0.2 * (u[2:] - 2 * u[1:-1] + u[:-2])), u)


@loop(lambda r, n: (normal(r, *square(n)),), full=1 << 20)
def heat_plate(u):
    """In two, on more than a block holds: a kernel for every step."""
    return lax.fori_loop(0, 100, lambda _, u: u + 0.1 * laplacian(u), u)


@loop(lambda r, n: (1 + 0.1 * normal(r, *square(n)), np.abs(0.1 * normal(r, *square(n)))), full=4096, tolerance=1e-4)
def gray_scott(u, v):
    """Two substances that react and diffuse."""

    def step(_, state):
        u, v = state
        reaction = u * v * v
        return (u + 0.1 * laplacian(u) - reaction + 0.04 * (1 - u), v + 0.05 * laplacian(v) + reaction - 0.1 * v)

    return lax.fori_loop(0, 100, step, (u, v))


LOOPS = CATALOG
