"""Random loop bodies: a scan, a fori or a vmapped while over carries of mixed types, shapes and positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LANES = 70


def _value(r: np.random.Generator, values: list[Any]) -> Any:
    return values[r.integers(len(values))]


def _step_program(r: np.random.Generator, kinds: list[str], width: int) -> Callable:
    """A function of (index, carries, slice) that makes new carries and an output; the same for every call."""
    plan = [(int(r.integers(9)), int(r.integers(1 << 30)), int(r.integers(1 << 30))) for _ in range(r.integers(3, 9))]
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
            else:
                f.append(jnp.tanh(x) + (n % 5).astype(jnp.float32))
        new = [carries[k] if keep[k] else jnp.tanh(values[kind][-1]) if kind == "f" else values[kind][-1]
               for k, kind in enumerate(kinds)]  # fmt: skip
        same = [k for k in order if kinds[k] == "f"]
        for k, other in zip(same, same[1:], strict=False):   # carries trade places
            new[k], new[other] = new[other], new[k]
        return tuple(new), values["f"][-1]

    return run


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
    form = r.integers(4)
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

    return [scan, fori, dynamic, lanes][form], (carries, xs)


def random_gradient(r: np.random.Generator) -> tuple[Callable, tuple]:
    """The gradient of a scan over such a body by its float carries, what its steps read, and numbers that all lanes
    share, with cotangents of everything that it returns."""
    width = int(r.choice([1, 3]))
    shape = (LANES, width) if width > 1 else (LANES,)
    kinds = ["f", *r.choice(["f", "i", "p"], r.integers(0, 3))]
    step = _step_program(r, kinds, width)
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
