"""Random loop bodies: a scan, a fori or a vmapped while over carries of mixed types, shapes and positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LANES = 70
TABLE = np.linspace(-1, 1, 7, dtype=np.float32)
OPERATIONS = 19
DIFFERENTIABLE = 17    # in reverse: the last are loops of unknown length


def _value(r: np.random.Generator, values: list[Any]) -> Any:
    return values[r.integers(len(values))]


def _step_program(r: np.random.Generator, kinds: list[str], width: int, operations: int = OPERATIONS) -> Callable:
    """A function of (index, carries, slice) that makes new carries and an output; the same for every call."""
    draw = lambda: (int(r.integers(operations)), int(r.integers(1 << 30)), int(r.integers(1 << 30)))  # noqa: E731
    plan = [draw() for _ in range(r.integers(3, 9))]
    order = r.permutation(len(kinds))
    keep = r.random(len(kinds)) < 0.2

    def run(index: Any, carries: tuple, extra: Any) -> tuple[tuple, Any]:
        values = {"f": [extra], "i": [jnp.broadcast_to(index, extra.shape) if extra.ndim else index], "p": [extra > 0]}
        for kind, c in zip(kinds, carries, strict=True):
            values[kind].append(c)
        for op, a, b in plan:
            f, i, p = values["f"], values["i"], values["p"]
            x, y, m, n, t = f[a % len(f)], f[b % len(f)], i[a % len(i)], i[b % len(i)], p[b % len(p)]
            if op == 0:
                f.append(x * 0.5 + y)
            elif op == 1:
                f.append(jnp.sin(x) - y * 0.25)
            elif op == 2:
                f.append(jnp.where(t, x, jnp.clip(y, -3, 3)))
            elif op == 3:
                i.append(m * 3 + n)
            elif op == 4:
                i.append(jnp.where(t, m ^ n, m - 1))
            elif op == 5:
                p.append((m > n) ^ t)
            elif op == 6:
                p.append(jnp.clip(x, -1e3, 1e3) < jnp.clip(y, -1e3, 1e3))
            elif op == 7 and width > 1:
                f.append(jnp.roll(jnp.tanh(x), 1 + a % (width - 1), axis=-1))
            elif op == 8:
                f.append(x + jnp.asarray(TABLE)[m % 7])
            elif op == 9:
                f.append(lax.fori_loop(0, 3, lambda j, z: z * 0.5 + jnp.sin(x) * j, y))    # noqa: B023
            elif op == 11 and width > 1:
                f.append(jnp.sin(x[..., :, None] - y[..., None, :]).sum(-1) * 0.3)
            elif op == 17:
                f.append(lax.fori_loop(index % 2, index % 4, lambda j, z: jnp.tanh(z) + x, y))    # noqa: B023
            elif op == 18:
                f.append(_halved(x))
            elif op == 12:
                f.append(lax.switch(index % 3, [jnp.sin, lambda z: z * 0.5, lambda z: jnp.cos(z) - 1], x))
            elif op == 13 and width > 1:
                f.append(x - y.mean(-1, keepdims=True))
            elif op == 14 and width > 1:
                i.append(m + jnp.argmax(x, -1, keepdims=True))
            elif op == 15:
                i.append((m.astype(jnp.int8) * 3 - n.astype(jnp.uint8).astype(jnp.int8)).astype(jnp.int32))
            elif op == 16:
                u = m.astype(jnp.uint32) * np.uint32(2654435761)
                i.append((u ^ (u >> (n % 31).astype(jnp.uint32))).astype(jnp.int32))
            elif op == 10:
                i.append(lax.population_count(m) + m // (1 + (n & 7)) + n % (1 + (m & 3)))
            else:
                f.append(jnp.tanh(x) + (n % 5).astype(jnp.float32))
        new = [carries[k] if keep[k] else jnp.tanh(values[kind][-1]) if kind == "f" else values[kind][-1]
               for k, kind in enumerate(kinds)]  # fmt: skip
        same = [k for k in order if kinds[k] == "f"]
        for k, other in zip(same, same[1:], strict=False):   # carries trade places
            new[k], new[other] = new[other], new[k]
        return tuple(new), values["f"][-1]

    return run


@jnp.vectorize
def _halved(x: Any) -> Any:
    """A loop of its own for each lane."""
    return lax.while_loop(lambda z: jnp.abs(z) > 0.7, lambda z: z * 0.5, jnp.clip(x, -9, 9))


def random_loop(r: np.random.Generator) -> tuple[Callable, tuple]:
    """A function with one loop, and its arguments."""
    width = int(r.choice([1, 3]))
    shape = (LANES, width) if width > 1 else (LANES,)
    kinds = ["f", *r.choice(["f", "i", "p"], r.integers(0, 3))]
    step = _step_program(r, kinds, width)
    draw = {"f": lambda: r.standard_normal(shape).astype(np.float32),
            "i": lambda: r.integers(-50, 50, shape).astype(np.int32), "p": lambda: r.random(shape) < 0.5}  # fmt: skip
    carries = tuple(draw[k]() for k in kinds)
    xs = r.standard_normal((5, *shape)).astype(np.float32)
    form = r.integers(7)
    reverse = bool(r.integers(2))
    after = int(r.integers(4))

    def scan(carries: tuple, xs: Any) -> Any:
        def body(s: Any, x: Any) -> Any:
            new, out = step(s[0], s[1:], x)
            return (s[0] + 1, *new), out

        last, ys = lax.scan(body, (jnp.int32(0), *carries), xs, reverse=reverse)
        if after == 1:      # work on what the steps gave
            return last, jax.nn.relu(ys) * xs[0] - jnp.float32(0.5)
        if after == 2:
            return last, ys, jnp.where(ys > xs, ys, xs + last[1].mean()), ys.astype(jnp.bfloat16)
        if after == 3:
            return last, (ys * xs).sum(0), jnp.moveaxis(jnp.tanh(ys), 0, -1)
        return last, ys

    def fori(carries: tuple, xs: Any) -> Any:
        return lax.fori_loop(0, 6, lambda i, s: step(i, s, xs[i % 5])[0], carries)

    def dynamic(carries: tuple, xs: Any) -> Any:
        trips = (jnp.abs(xs[0].reshape(-1)[0]) * 5).astype(jnp.int32)
        return lax.fori_loop(1, trips, lambda i, s: step(i, s, xs[1])[0], tuple(map(jnp.negative, carries[:1])) +
                             carries[1:])  # fmt: skip

    def lanes(carries: tuple, xs: Any) -> Any:
        def one(carries: tuple, limit: Any, extra: Any) -> Any:
            test = lambda s: (s[0] < 12) & (jnp.sum(jnp.abs(s[1]) * 0.1) < limit + s[0])  # noqa: E731
            return lax.while_loop(test, lambda s: (s[0] + 1, *step(s[0], s[1:], extra)[0]), (jnp.int32(0), *carries))

        return jax.vmap(one)(carries, jnp.abs(xs[0].reshape(LANES, -1)[:, 0]), xs[1])

    def buffer(carries: tuple, xs: Any) -> Any:
        def body(i: Any, s: Any) -> Any:
            new, out = step(i, s[1:], s[0][i + 1])
            return (s[0].at[i + 1].set(out), *new)

        return lax.fori_loop(0, 4, body, (xs, *carries))

    def frozen(carries: tuple, xs: Any) -> Any:
        def body(s: Any) -> Any:
            new, out = step(s[0], s[2:], xs[1])
            live = s[1] > 0
            kept = [jnp.where(live, a, b) for a, b in zip(new, s[2:], strict=True)]
            return (s[0] + 1, jnp.where(live, s[1] - 1 - (jnp.abs(out) > 1), s[1]), *kept)

        trips = (jnp.abs(xs[0]) * 4).astype(jnp.int32)
        return lax.while_loop(lambda s: (s[1] > 0).any(), body, (jnp.int32(0), trips, *carries))

    def bounds(carries: tuple, xs: Any) -> Any:
        def one(carries: tuple, limits: Any, extra: Any) -> Any:
            return lax.fori_loop(limits[0], limits[1], lambda i, s: step(i, s, extra)[0], carries)

        limits = (xs[:2].reshape(2, LANES, -1)[:, :, 0] * 4).astype(jnp.int32)
        return jax.vmap(one, (0, 1, 0))(carries, limits, xs[1])

    return [scan, fori, dynamic, lanes, buffer, frozen, bounds][form], (carries, xs)


def random_gradient(r: np.random.Generator) -> tuple[Callable, tuple]:
    """The gradient of a scan over such a body by its float carries, what its steps read, and numbers that all lanes
    share, with cotangents of everything that it returns."""
    width = int(r.choice([1, 3]))
    shape = (LANES, width) if width > 1 else (LANES,)
    kinds = ["f", *r.choice(["f", "i", "p"], r.integers(0, 3))]
    step = _step_program(r, kinds, width, DIFFERENTIABLE)
    draw = {"f": lambda: r.standard_normal(shape).astype(np.float32),
            "i": lambda: r.integers(-50, 50, shape).astype(np.int32), "p": lambda: r.random(shape) < 0.5}  # fmt: skip
    carries = tuple(draw[k]() for k in kinds)
    length = int(r.choice([1, 2, 5, 7]))
    xs = r.standard_normal((length, *shape)).astype(np.float32)
    weights = r.standard_normal((length, *shape)).astype(np.float32)
    shared = r.standard_normal(3).astype(np.float32)
    reverse, counted, checkpointed, keeps = (bool(b) for b in r.integers(0, 2, 4))
    unroll, inner = int(r.choice([1, 1, 2])), int(r.choice([0, 0, 1, 3]))

    def body(s: Any, x: Any, p: Any) -> Any:
        index, carries = s
        new, out = step(index if counted else jnp.int32(3), carries, x * p[0] + p[1])
        if inner:     # a loop in each step
            new, seen = lax.scan(lambda c, _: (step(index, c, x)[0], c[0]), new, None, length=inner)
            out = out + seen.sum(0)
        new = tuple(jnp.tanh(c * p[2]) if kind == "f" else c for kind, c in zip(kinds, new, strict=True))
        return (index + 1, new), jnp.sin(out)

    def loss(floats: tuple, xs: Any, p: Any, others: tuple, weights: Any) -> Any:
        left, rest = list(floats), list(others)
        start = tuple((left if kind == "f" else rest).pop(0) for kind in kinds)
        run = jax.checkpoint(body) if checkpointed else body
        (_, last), ys = lax.scan(lambda s, x: run(s, x, p), (jnp.int32(0), start), xs, reverse=reverse, unroll=unroll)
        total = sum((c * c).sum() for kind, c in zip(kinds, last, strict=True) if kind == "f")
        return total + (ys * weights).sum(), ys

    def gradient(carries: tuple, xs: Any, p: Any, weights: Any) -> Any:
        floats = tuple(c for kind, c in zip(kinds, carries, strict=True) if kind == "f")
        others = tuple(c for kind, c in zip(kinds, carries, strict=True) if kind != "f")
        found, ys = jax.grad(loss, (0, 1, 2), has_aux=True)(floats, xs, p, others, weights)
        return (found, ys) if keeps else found

    return gradient, (carries, xs, shared, weights)
