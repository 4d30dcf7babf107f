"""Element-wise steps of random programs, and what they do to the bounds and errors of values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from program_values import EPSILON, LARGEST, Generator, Value, broadcasts


def like(v: Value, bound: float | None = None, error: float | None = None, grain: float | None = None) -> Value:
    return replace(
        v,
        bound=v.bound if bound is None else bound,
        error=v.error if error is None else error,
        grain=v.grain if grain is None else grain,
    )


def any_of(values: Sequence[Value]) -> Value:
    """What holds of any of several values."""
    return replace(
        values[0],
        bound=max(v.bound for v in values),
        error=max(v.error for v in values),
        grain=min(v.grain for v in values),
    )


def inexact(v: Value, bound: float, slope: float) -> Value:
    """The value of a function with the given largest magnitude and slope, computed within a few ulp."""
    ulp = EPSILON.get(v.dtype, 2.0**-23)
    return replace(v, bound=bound, error=slope * v.error + 8 * ulp * bound, grain=0.0)


SMOOTH = {  # text, largest magnitude and slope as functions of the bound
    "jnp.tanh({})": (lambda b: 1, lambda b: 1),
    "jnp.sin({})": (lambda b: 1, lambda b: 1),
    "jnp.exp(jnp.minimum({}, 3))": (lambda b: 21, lambda b: 21),
    "jnp.exp(-jnp.abs({}))": (lambda b: 1, lambda b: 1),
    "jax.nn.sigmoid({})": (lambda b: 1, lambda b: 1),
    "jnp.log1p(jnp.abs({}))": (lambda b: math.log1p(b), lambda b: 1),
    "jnp.sqrt(jnp.abs({}) + 1)": (lambda b: math.sqrt(b + 1), lambda b: 1),
    "lax.erf({})": (lambda b: 1, lambda b: 1.2),
    "lax.rsqrt(jnp.square({}) + 1)": (lambda b: 1, lambda b: 2),
    "jax.nn.gelu({})": (lambda b: b + 1, lambda b: 1.2),
    "jax.nn.softplus({})": (lambda b: b + 1, lambda b: 1),
    "1 / (jnp.abs({}) + 1)": (lambda b: 1, lambda b: 1),
    "jnp.arctan({})": (lambda b: 2, lambda b: 1),
}
SAME = ("-{}", "jnp.abs({})", "jax.nn.relu({})", "{} + 0", "jnp.maximum({}, 0.5)", "jnp.where({} == {}, {}, 0)")


def smooth(g: Generator) -> None:
    v = g.value("f")
    if v is not None:
        text = g.choose.pick(list(SMOOTH))
        bound, slope = SMOOTH[text]
        g.step(text, [v], inexact(v, bound(v.bound), slope(v.bound)))


def same(g: Generator) -> None:
    v = g.value("f")
    if v is not None:
        text = g.choose.pick(SAME)
        if "==" not in text or v.exact:
            g.step(text, [v] * text.count("{}"), like(v, bound=max(v.bound, 0.5), grain=min(v.grain, 0.5)))


def rough(g: Generator) -> None:
    """Functions with jumps, of exact values only."""
    v = g.value("f", exact=True)
    if v is not None:
        text = g.choose.pick(
            (
                "jnp.floor({})",
                "jnp.sign({})",
                "jnp.round({})",
                "jnp.ceil({})",
                "jnp.trunc({})",
                "{} > 0",
                "{} != {}",
                "jnp.isfinite({})",
                "jnp.isnan({})",
                "jnp.signbit({}) | ({} > 1)",
            )
        )
        g.step(text, [v] * text.count("{}"), like(v, bound=v.bound + 1, grain=min(v.grain, 1.0)))


def integer(g: Generator) -> None:
    v = g.value("i")
    if v is None:
        return
    text = g.choose.pick(
        (
            "-{}",
            "~{}",
            "lax.population_count({})",
            "lax.clz({})",
            "jnp.abs({})",
            "{} // 3",
            "{} % 5",
            "{} >> 1",
            "{} * 3 + 1",
            "jnp.clip({}, 0, 7)",
            "{} << 2",
            "{} == {}",
            "{} > 2",
            "lax.rem({}, {})",
            "lax.div({}, {})",
            "lax.shift_left({}, {})",
            "lax.shift_right_logical({}, {})",
            "lax.shift_right_arithmetic({}, {})",
            "{} ^ {}",
            "{} & {}",
            "{} | {}",
            "{} - {}",
        )
    )
    other = g.partner(v)
    operands = [v, other] if text.count("{}") == 2 and other.shape == v.shape else [v] * text.count("{}")
    if text.startswith(("lax.div", "lax.rem")) and not any(o.name.startswith("x") for o in operands):
        return  # of constants: XLA's folding divides the least integer by -1 and dies
    g.step(text, operands, like(v, bound=math.inf))


def boolean(g: Generator) -> None:
    v = g.value("b")
    if v is not None:
        other = g.partner(v)
        g.step(g.choose.pick(("{} & {}", "{} | {}", "{} ^ {}", "~{} | {}", "{} == {}")), [v, other], v)


def complex_(g: Generator) -> None:
    v = g.value("c")
    if v is not None:
        text = g.choose.pick(("jnp.conj({})", "{}.real", "{}.imag", "-{}", "{} * 1j", "{} + jnp.conj({})"))
        g.step(text, [v] * text.count("{}"), like(v, bound=2 * v.bound, error=2 * v.error))


def arithmetic(g: Generator) -> None:
    v = g.value("fic")
    if v is None:
        return
    w = g.partner(v)
    operator = g.choose.pick(("+", "-", "*", "max", "/", "+", "*"))
    if operator == "max" and v.kind != "c":
        g.step(g.choose.pick(("jnp.maximum({}, {})", "jnp.minimum({}, {})")), [v, w], any_of([v, w]))
    elif operator == "/" and v.kind == "f":
        g.step("{} / (1 + jnp.abs({}))", [v, w], inexact(replace(v, error=v.error + w.error * v.bound), v.bound, 1))
    elif operator == "*":
        factor = 2.0 if v.kind == "c" else 1.0
        g.step(
            "{} * {}",
            [v, w],
            like(v, factor * v.bound * w.bound, factor * (v.error * w.bound + w.error * v.bound), v.grain * w.grain),
        )
    elif operator in "+-":
        g.step(f"{{}} {operator} {{}}", [v, w], like(v, v.bound + w.bound, v.error + w.error, min(v.grain, w.grain)))


def compare(g: Generator) -> None:
    v = g.value("fi", exact=True)
    if v is not None:
        w = g.partner(v, exact=True)
        g.step(g.choose.pick(("{} < {}", "{} >= {}", "{} == {}", "{} != {}")), [v, w], v)


def select(g: Generator) -> None:
    p, v = g.value("b"), g.value()
    if p is None or v is None:
        return
    if not broadcasts(p.shape, v.shape):
        p = g.input(v.shape, "bool")
    w = g.partner(v)
    g.step("jnp.where({}, {}, {})", [p, v, w], any_of([v, w]))


def cast(g: Generator) -> None:
    v = g.value()
    if v is None:
        return
    target = g.dtype()
    if v.kind == "f" and not v.exact and not target.startswith(("float", "bfloat", "complex")):
        return
    if v.kind == "c" and not target.startswith("complex"):
        return
    if v.kind == "i" and v.bound > LARGEST.get(target, math.inf):
        return
    if (
        v.kind == "f"
        and (g.specials or v.bound > 100)
        and not target.startswith(("float", "bfloat", "complex", "bool"))
    ):
        return  # what NaN is as an integer, and which way it saturates, is not JAX's promise
    g.step(f"{{}}.astype(jnp.{target if target != 'bool' else 'bool_'})", [v], v)
