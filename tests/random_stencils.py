"""Random loop bodies that read their neighbors: rolls, slices, pads, updates, reductions and products of a tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def random_stencil(r: np.random.Generator) -> tuple[Callable, tuple]:
    """A function with one loop over carries of one shape, and its arguments."""
    rank = int(r.integers(1, 3))
    shape = tuple(int(n) for n in r.integers(*((33, 90) if rank == 1 else (6, 14)), rank))
    kinds = ["f", *r.choice(["f", "i", "p"], r.integers(0, 3))]
    step = _step(r, kinds, shape)
    draw = {"f": lambda *s: r.standard_normal((*s, *shape)).astype(np.float32),
            "i": lambda *s: r.integers(-50, 50, (*s, *shape)).astype(np.int32),
            "p": lambda *s: r.random((*s, *shape)) < 0.5}  # fmt: skip
    xs = draw["f"](5)
    form, reverse = r.integers(5), bool(r.integers(2))

    def scan(carries: tuple, xs: Any) -> Any:
        def body(s: Any, x: Any) -> Any:
            new, out = step(s[0], s[1:], x)
            return (s[0] + 1, *new), out

        return lax.scan(body, (jnp.int32(0), *carries), xs, reverse=reverse)

    def fori(carries: tuple, xs: Any) -> Any:
        return lax.fori_loop(0, 6, lambda i, s: step(i, s, xs[i % 5])[0], carries)

    def dynamic(carries: tuple, xs: Any) -> Any:
        trips = (jnp.abs(xs[0].reshape(-1)[0]) * 5).astype(jnp.int32)
        return lax.fori_loop(1, trips, lambda i, s: step(i, s, xs[1])[0], carries)

    def until(carries: tuple, xs: Any) -> Any:
        test = lambda s: (s[0] < 9) & (jnp.abs(s[1]).max() * 3 > jnp.abs(s[1]).mean() + s[0] * 0.3)  # noqa: E731
        return lax.while_loop(test, lambda s: (s[0] + 1, *step(s[0], s[1:], xs[0])[0]), (jnp.int32(0), *carries))

    if form == 4:
        many = int(r.choice([3, 32]))
        batch = tuple(draw[k](many) for k in kinds)
        inner = scan if reverse else until
        return lambda carries, xs: jax.vmap(inner, (0, None))(carries, xs), (batch, xs)
    return [scan, fori, dynamic, until][form], (tuple(draw[k]() for k in kinds), xs)


def _step(r: np.random.Generator, kinds: list[str], shape: tuple[int, ...]) -> Callable:
    """A function of (index, carries, slice) that makes new carries and an output; the same for every call."""
    plan = [(int(r.integers(12)), int(r.integers(1 << 30)), int(r.integers(1 << 30))) for _ in range(r.integers(3, 9))]
    out_kind = int(r.integers(3))

    def run(index: Any, carries: tuple, extra: Any) -> tuple[tuple, Any]:
        values: dict[str, list] = {"f": [extra], "i": [jnp.broadcast_to(index, shape)], "p": [extra > 0]}
        for kind, c in zip(kinds, carries, strict=True):
            values[kind].append(c)
        for op, a, b in plan:
            f, i, p = values["f"], values["i"], values["p"]
            x, y, m, t = f[a % len(f)], f[b % len(f)], i[a % len(i)], p[b % len(p)]
            axis = a % len(shape)
            size = shape[axis]
            shift = 1 + b % (size - 2)
            if op == 0:
                f.append(jnp.roll(x, shift, axis) * 0.5 - y * 0.25)
            elif op == 1:
                f.append(jnp.sin(x) * 0.5 + y)
            elif op == 2:
                low = lax.slice_in_dim(x, 0, size - shift, axis=axis)
                pad = [(shift, 0) if d == axis else (0, 0) for d in range(len(shape))]
                f.append(jnp.pad(low, pad, constant_values=0.5) * 0.5 + y)
            elif op == 3:
                low, high = lax.slice_in_dim(x, 0, shift, axis=axis), lax.slice_in_dim(y, shift, size, axis=axis)
                f.append(jnp.concatenate([low, high], axis) * 0.9)
            elif op == 4:
                inner = lax.slice_in_dim(y, 1, size - 1, axis=axis) * 0.5
                f.append(lax.dynamic_update_slice_in_dim(x, inner, 1, axis))
            elif op == 5:
                f.append(x - x.mean(axis, keepdims=True))
            elif op == 6:
                f.append(y / (1 + jnp.abs(x).max()))
            elif op == 7:
                i.append(jnp.roll(m, shift, axis) * 3 + t)
            elif op == 8:
                p.append(jnp.flip(t, axis) ^ (m > 3))
            elif op == 9:
                f.append(jnp.where(t, jnp.flip(x, axis), y))
            elif op == 10:
                c = jnp.cos(jnp.arange(shape[-1] ** 2, dtype=jnp.float32)).reshape(shape[-1], -1) / shape[-1]
                f.append(jnp.tanh(x) @ (c if b % 2 else c.T))
            else:
                f.append(x * 0.5 + jnp.take(y, (jnp.arange(size) * 3 + index) % size, axis=axis) * 0.25)
        new = [jnp.tanh(values[k][-1]) if k == "f" else values[k][-1] for k in kinds]
        outs = [values["f"][-1], values["i"][-1].sum(), values["f"][-1].reshape(-1)[0]]
        return tuple(new), outs[out_kind]

    return run
