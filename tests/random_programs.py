"""Random JAX programs: the steps that they are made of, chosen by a seed or by hypothesis.

Each step adds a line of Python (or a few, or none where it does not apply) with the bound of its result's error. The
element-wise ones are in elementwise_steps.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from elementwise_steps import (
    any_of,
    arithmetic,
    boolean,
    cast,
    compare,
    complex_,
    inexact,
    integer,
    like,
    rough,
    same,
    select,
    smooth,
)
from hypothesis import strategies as st
from program_values import EPSILON, SIZES, Choices, DrawnChoices, Generator, Program, Value


def reshape(g: Generator) -> None:
    v, c = g.value(), g.choose
    if v is None or not v.size:
        return
    left, dims = v.size, []
    for _ in range(c.number(0, 3)):
        divisors = [d for d in range(1, min(left, 200) + 1) if left % d == 0]
        dims.append(c.pick(divisors))
        left //= dims[-1]
    dims.insert(c.number(0, len(dims)), left)
    if c.chance(25):
        dims = [v.size]
    g.step(f"{{}}.reshape({tuple(dims)})", [v], v)


def transpose(g: Generator) -> None:
    v = g.value(rank=2)
    if v is not None:
        order = list(range(len(v.shape)))
        for k in range(len(order) - 1):  # shrinks toward the identity
            other = g.choose.number(k, len(order) - 1)
            order[k], order[other] = order[other], order[k]
        g.step(f"jnp.transpose({{}}, {tuple(order)})" if g.choose.chance(70) else "{}.T", [v], v)


def slice_(g: Generator) -> None:
    v, c = g.value(rank=1), g.choose
    if v is None or not v.size:
        return
    parts = []
    for n in v.shape:
        kind = c.pick(("all", "all", "range", "stride", "back", "head", "one"))
        start = c.number(0, n - 1)
        parts.append(
            {
                "all": ":",
                "range": f"{start}:{c.number(start, n)}",
                "stride": f"{start}::{c.number(1, 3)}",
                "back": f"::-{c.number(1, 2)}",
                "head": f":{c.number(0, n)}",
                "one": str(start),
            }[kind]
        )
    g.step(f"{{}}[{', '.join(parts)}]", [v], v)


def reverse(g: Generator) -> None:
    v = g.value(rank=1)
    if v is not None:
        g.step(f"jnp.flip({{}}, {g.choose.number(0, len(v.shape) - 1)})", [v], v)


def pad(g: Generator) -> None:
    v, c = g.value(rank=1), g.choose
    if v is None or not v.size:
        return
    config = tuple((c.number(-2, 3), c.number(-2, 3), c.pick((0, 0, 0, 1, 2))) for _ in v.shape)
    text = f"lax.pad({{}}, jnp.array({c.pick((0, 1, 2))}, {{}}.dtype), {config})"
    g.step(text, [v, v], like(v, bound=max(2.0, v.bound), grain=min(1.0, v.grain)))


def join(g: Generator) -> None:
    v, c = g.value(rank=1), g.choose
    if v is None:
        return
    parts = [w for w in g.values if w.dtype == v.dtype and len(w.shape) == len(v.shape)]
    axis = c.number(0, len(v.shape) - 1)
    chosen = [v, *(c.pick(parts) for _ in range(c.number(1, 3)))]
    if c.chance(30):
        chosen = [w for w in chosen if w.shape == v.shape]
        g.step(f"jnp.stack([{', '.join(['{}'] * len(chosen))}], axis={axis})", chosen, any_of(chosen))
        return
    rest = [
        w
        for w in chosen
        if [n for k, n in enumerate(w.shape) if k != axis] == [n for k, n in enumerate(v.shape) if k != axis]
    ]
    g.step(f"jnp.concatenate([{', '.join(['{}'] * len(rest))}], axis={axis})", rest, any_of(rest))


def roll(g: Generator) -> None:
    v, c = g.value(rank=1), g.choose
    if v is not None:
        axis = c.number(0, len(v.shape) - 1)
        text = c.pick(
            (
                f"jnp.roll({{}}, {c.number(-3, 3)}, {axis})",
                f"jnp.repeat({{}}, 2, {axis})",
                f"jnp.tile({{}}, {c.number(1, 3)})",
                f"jnp.expand_dims({{}}, {axis})",
                f"jnp.split({{}}, [{c.number(0, v.shape[axis])}], {axis})[{c.number(0, 1)}]",
                f"jnp.broadcast_to({{}}, ({c.number(1, 4)}, *{{}}.shape))",
                "jnp.triu({})",
            )
        )
        g.step(text, [v] * text.count("{}"), v)


def _indices(g: Generator, n: int, shape: tuple[int, ...] | None = None) -> Value:
    """Integers around [0, n): mostly inside, some beyond both ends."""
    c = g.choose
    wide = n + 3 if c.chance(30) else n - 1
    low = -n - 3 if c.chance(20) else 0
    chosen = (c.pick(SIZES[:12]),) if shape is None else shape
    return g.input(chosen, c.pick(("int32", "int32", "uint32", "int8")), low, max(wide, 0))


def gather(g: Generator) -> None:
    v, c = g.value(rank=1), g.choose
    if v is None or not v.size:
        return
    axis = c.number(0, len(v.shape) - 1)
    if c.chance(25):
        shape = tuple(c.number(1, n) if k == axis else n for k, n in enumerate(v.shape))
        index = _indices(g, v.shape[axis], shape)
        text = f"jnp.take_along_axis({{}}, {{}}, {axis}, mode='{c.pick(('fill', 'clip'))}')"
    elif c.chance(15) and len(v.shape) == 1:  # indices that come from the gathered value itself
        text = "{}[jnp.argsort({})]"
        if not v.exact or g.specials or v.kind == "c":
            return
        index = v
    else:
        index = _indices(g, v.shape[axis])
        text = c.pick(
            (
                f"jnp.take({{}}, {{}}, {axis}, mode='fill')",
                f"jnp.take({{}}, {{}}, {axis}, mode='clip')",
                "{}[{}]",
                "{}.at[{}].get(mode='fill', fill_value=1)",
                f"jnp.take({{}}, {{}}, {axis}, mode='wrap')",
                "{}[{}[0]]",
                "{}[..., {}]",
            )
        )
    if "'fill')" in text and v.kind in "fc":
        g.specials = g.specials or (math.nan,)
    # Filling with NaN is as exact as any other value.
    g.step(
        text,
        [v, index],
        like(v, bound=max(v.bound, 1.0), grain=min(v.grain, 1.0)) if v.kind != "i" else like(v, bound=math.inf),
    )


def dynamic(g: Generator) -> None:
    v, c = g.value(rank=1), g.choose
    if v is None or not v.size:
        return
    starts = [_indices(g, n, ()) if c.chance(60) else None for n in v.shape]
    sizes = tuple(c.number(1, n) if s is not None else n for s, n in zip(starts, v.shape, strict=True))
    kind = next((s.dtype for s in starts if s is not None), "int32")
    places = ", ".join("{}" if s is not None and s.dtype == kind else f"jnp.{kind}({c.number(0, 2)})" for s in starts)
    used = [s for s in starts if s is not None and s.dtype == kind]
    if c.chance(50):
        g.step(f"lax.dynamic_slice({{}}, ({places},), {sizes})", [v, *used], v)
        return
    same_type = [
        w
        for w in g.values
        if w.dtype == v.dtype
        and len(w.shape) == len(v.shape)
        and all(m <= n for m, n in zip(w.shape, v.shape, strict=True))
    ]
    if c.chance(50):
        update = c.pick(same_type)
        g.step(f"lax.dynamic_update_slice({{}}, {{}}, ({places},))", [v, update, *used], any_of([v, update]))
    else:
        corner = ", ".join(f":{n}" for n in sizes)
        g.step(f"lax.dynamic_update_slice({{}}, {{}}[{corner}], ({places},))", [v, v, *used], v)


def scatter(g: Generator) -> None:
    v, c = g.value("fi", rank=1), g.choose
    if v is None or not v.size:
        return
    method = c.pick(("set(2)", "add(2)", "multiply(2)", "max(1)", "set(2)"))
    n = v.shape[0]
    index = _indices(g, n, () if c.chance(60) else None)
    if method.startswith("multiply") and index.size > 3:
        return
    often = 2.0 ** min(index.size, 3) if method.startswith("multiply") else 1.0
    extra = 2.0 * index.size if method.startswith("add") else 2.0
    g.step(f"{{}}.at[{{}}].{method}", [v, index], like(v, v.bound * often + extra, v.error * often, min(v.grain, 1.0)))


def segments(g: Generator) -> None:
    """The rows of a value folded by segment into an array of zeros."""
    v, c = g.value("fi", rank=1), g.choose
    if v is None or not v.size:
        return
    n, count = v.shape[0], c.number(1, 40)
    index = _indices(g, count, (n,))
    shape = (count, *v.shape[1:])
    error = v.error * n + (0 if v.exact else n * EPSILON.get(v.dtype, 0) * v.bound)
    method = c.pick(("add", "set") if g.specials else ("add", "add", "set", "max", "min"))
    text = f"jnp.zeros({shape}, {{}}.dtype).at[{{}}].{method}({{}})"
    bound, wrong = (v.bound * n, error) if method == "add" else (v.bound, v.error)
    g.step(text, [v, index, v], like(v, bound if v.kind == "f" else math.inf, wrong))


def reduction(g: Generator) -> None:
    v, c = g.value(rank=1), g.choose
    if v is None:
        return
    axes = tuple(k for k in range(len(v.shape)) if c.chance(50)) or (c.number(0, len(v.shape) - 1),)
    count = math.prod(v.shape[k] for k in axes)
    keep = f", keepdims={c.chance(40)}"
    where = f"axis={axes}{keep}"
    summed = like(v, v.bound * count, v.error * count + (0 if v.exact else count * EPSILON.get(v.dtype, 0) * v.bound))
    options: list[tuple[str, Value]] = [(f"jnp.sum({{}}, {where})", summed)]
    if v.kind == "b":
        options = [
            (f"jnp.any({{}}, {where})", v),
            (f"jnp.all({{}}, {where})", v),
            (f"jnp.sum({{}}, {where})", like(v, count)),
        ]
    elif v.kind == "f" and count:
        options += [(f"jnp.mean({{}}, {where})", inexact(v, v.bound, 2))]
        if not g.specials:  # XLA:CPU loses NaN in them
            options += [(f"jnp.max({{}}, {where})", v), (f"jnp.min({{}}, {where})", v)]
        axes_are_long = 1 not in (v.shape[k] for k in axes)
        # Of other reducers XLA folds the start value in any number of times, or never.
        options += (
            [
                (
                    f"lax.reduce({{}}, jnp.array(0.5, {{}}.dtype), lax.max, {axes})",
                    like(v, max(v.bound, 0.5), grain=min(v.grain, 0.5)),
                )
            ]
            if axes_are_long and not g.specials
            else []
        )
    elif v.kind == "i" and count:
        options += [
            (f"jnp.max({{}}, {where})", v),
            (f"jnp.min({{}}, {where})", v),
            (f"jnp.prod({{}}, {where})", v),
            (f"lax.reduce({{}}, jnp.array(0, {{}}.dtype), lax.bitwise_xor, {axes})", v),
        ]
    if v.kind in "fi" and v.exact and v.size and not (g.specials and v.kind == "f"):
        where = f"axis={axes[0]}{keep}"
        options += [(f"jnp.argmax({{}}, {where})", like(v, 1e4)), (f"jnp.argmin({{}}, {where})", like(v, 1e4))]
    text, result = c.pick(options)
    g.step(text, [v] * text.count("{}"), result if v.kind in "fc" else like(result, bound=math.inf))


def pair_reduction(g: Generator) -> None:
    """Two operands in one reduction."""
    v, c = g.value("f", rank=1, exact=True), g.choose
    if v is None or not v.size:
        return
    w = next((w for w in reversed(g.values) if w.shape == v.shape and w.dtype == v.dtype and w.exact), v)
    axis = c.number(0, len(v.shape) - 1)
    if v.shape[axis] == 1 or g.specials:
        return
    body = c.pick(
        (
            "lambda a, b: (a[0] + b[0], lax.max(a[1], b[1]))",
            "lambda a, b: (lax.min(a[0], b[0]), lax.max(a[1], b[1]))",
            "lambda a, b: (a[0] + b[0], a[1] + b[1])",
        )
    )
    starts = [0 if "+" in part else 2 for part in body.split("),")]
    text = (
        f"lax.reduce(({{}}, {{}}), (jnp.array({starts[0]}, {{}}.dtype), jnp.array({starts[-1]}, {{}}.dtype)), "
        f"{body}, ({axis},))[{c.number(0, 1)}]"
    )
    bound = (v.bound + w.bound) * v.shape[axis] + 2
    g.step(text, [v, w, v, v], like(v, bound, grain=min(v.grain, w.grain, 1.0)))


def normalization(g: Generator) -> None:
    v = g.value("f", rank=1)
    if v is None or not v.size or v.bound > 50 or g.specials:
        return
    axis = g.choose.number(-len(v.shape), 0) or None    # or over everything
    text, bound, slope = g.choose.pick(
        (
            (f"jax.nn.softmax({{}}, {axis})", 1, 2),
            (f"jax.nn.logsumexp({{}}, {axis})", v.bound + 10, 2),
            (
                f"({{}} - {{}}.mean({axis}, keepdims=True)) / jnp.sqrt({{}}.var({axis}, keepdims=True) + 1)",
                2 * v.bound,
                4 + v.bound,
            ),
            (f"jnp.var({{}}, {axis})", v.bound**2, 4 * v.bound),
            (f"jax.nn.log_softmax({{}}, {axis})", 2 * v.bound + 10, 2),
        )
    )
    result = inexact(v, bound, slope)
    wide = 1 + math.log2(v.size + 1)
    g.step(text, [v] * text.count("{}"), like(result, error=result.error * wide * (1 + v.bound)))


def scan(g: Generator) -> None:
    v = g.value("fi", rank=1)
    if v is None or not v.size:
        return
    axis = g.choose.number(0, len(v.shape) - 1)
    n = v.shape[axis]
    g.step(
        f"jnp.cumsum({{}}, {axis})",
        [v],
        like(v, v.bound * n, v.error * n + (0 if v.exact else n * EPSILON.get(v.dtype, 0) * v.bound)),
    )


def outer(g: Generator) -> None:
    v, w = g.value("f", rank=1), g.value("f", rank=1)
    if v is None or w is None or len(v.shape) != 1 or len(w.shape) != 1 or v.dtype != w.dtype:
        return
    g.step(
        "{}[:, None] * {}[None, :]",
        [v, w],
        like(v, v.bound * w.bound, v.error * w.bound + w.error * v.bound, v.grain * w.grain),
    )


def mirror(g: Generator) -> None:
    """x op x.T, and other reads of one value at two places."""
    v = g.value("f", rank=2)
    if v is None:
        return
    text = g.choose.pick(
        (
            "{} + jnp.swapaxes({}, -1, -2)",
            "{} - {}[..., ::-1]",
            "{} + jnp.roll({}, 1, -1)",
            "{} + {}.reshape(-1).reshape({}.shape[::-1]).T",
        )
    )
    g.step(text, [v] * text.count("{}"), like(v, 2 * v.bound, 2 * v.error))


def iota(g: Generator) -> None:
    c = g.choose
    n = c.pick(g.dims)
    kind = c.pick(("int32", "float32", "int32", "uint8", "bfloat16", "float16"))
    if n < 250:
        v = g.step(f"jnp.arange({n}, dtype=jnp.{kind})", [], Value("", kind, (n,), float(n)))
        if v is not None and c.chance(50):
            g.step(f"lax.broadcasted_iota(jnp.{kind}, ({n}, {c.number(1, 5)}), {c.number(0, 1)})", [], v)


def dot(g: Generator) -> None:
    v = g.value("f", rank=2)
    if v is None or v.dtype != "float32" or len(v.shape) != 2 or not v.size:
        return
    w = g.input((v.shape[1], g.choose.number(1, 16)), v.dtype)
    n = v.shape[1]
    g.step(
        "jnp.dot({}, {}, precision='highest')",
        [v, w],
        like(
            v,
            v.bound * w.bound * n,
            (v.error * w.bound + (0 if v.exact else EPSILON[v.dtype] * v.bound * w.bound)) * n,
            v.grain * w.grain,
        ),
    )


def loop(g: Generator) -> None:
    v = g.value("f", rank=1)
    if v is not None:
        g.step("lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x) + i, {})", [v], inexact(v, 4, 1))


STEPS: tuple[Callable[[Generator], None], ...] = (
    smooth,
    smooth,
    same,
    rough,
    integer,
    boolean,
    complex_,
    arithmetic,
    arithmetic,
    arithmetic,
    compare,
    select,
    cast,
    reshape,
    reshape,
    transpose,
    transpose,
    slice_,
    slice_,
    reverse,
    pad,
    pad,
    join,
    join,
    roll,
    gather,
    gather,
    dynamic,
    dynamic,
    scatter,
    segments,
    reduction,
    reduction,
    reduction,
    pair_reduction,
    normalization,
    scan,
    outer,
    mirror,
    mirror,
    iota,
    dot,
    loop,
)


def random_program(seed: int, x64: bool = False) -> Program:
    """The program of a seed."""
    with jax.enable_x64(x64):
        return Generator(Choices(seed), x64).program(STEPS)


@st.composite
def programs(draw: Callable[[Any], Any]) -> Program:
    """As `random_program`, drawn by hypothesis."""
    return Generator(DrawnChoices(draw)).program(STEPS)
