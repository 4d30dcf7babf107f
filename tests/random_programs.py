"""Random JAX programs, as Python text, with a bound on how far two right evaluations of them may lie apart.

Each step is one line of Python; a `Value` carries what is known of it: its largest magnitude, and the error that rounding
may have brought (running error analysis). Error 0 means that every right evaluation gives the same bits: only such values
are compared, rounded, or used as indices, so that a difference beyond the bound is wrong code and never bad luck.
Choices come from a seeded generator or from hypothesis; a program is replayed from its text alone.
"""
from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

T = TypeVar("T")
EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52, "complex64": 2.0**-23,
           "complex128": 2.0**-52}
LARGEST = {"float16": 2e3, "bfloat16": 1e6, "float32": 1e6, "float64": 1e6, "complex64": 1e6, "complex128": 1e6}
FLOATS = ("float32", "float16", "bfloat16")
INTEGERS = ("int32", "int8", "uint8", "int16", "uint16", "uint32")
WIDE = ("float64", "int64", "uint64", "complex128")
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 1000, 1025, 5000)
MAX_ELEMENTS = 20_000


class Choices:
    """Where decisions come from: a seed here, hypothesis in `DrawnChoices`."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def number(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def pick(self, items: Sequence[T]) -> T:
        return items[self.number(0, len(items) - 1)]

    def chance(self, percent: int) -> bool:
        return self.number(1, 100) <= percent


class DrawnChoices(Choices):
    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self._draw = draw

    def number(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def chance(self, percent: int) -> bool:
        return self.number(1, 100) > 100 - percent   # shrinks toward "no"


@dataclass(frozen=True)
class Value:
    """What is known of a value. `grain`: an exact floating value is a multiple of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bound: float
    error: float = 0.0
    grain: float = 1.0

    @property
    def kind(self) -> str:
        return "f" if self.dtype in ("float16", "bfloat16", "float32", "float64") else \
            "c" if self.dtype.startswith("complex") else "b" if self.dtype == "bool" else "i"

    @property
    def exact(self) -> bool:
        return self.error == 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Input:
    """An argument: `data` makes it anew, the same for the same seed. `low` and `high` bound integers."""

    value: Value
    seed: int
    low: int = 0
    high: int = 0
    specials: tuple[float, ...] = ()
    given: Any = None

    def data(self) -> np.ndarray:
        if self.given is not None:
            return self.given
        rng, v = np.random.default_rng(self.seed), self.value
        dtype = jnp.dtype(v.dtype)
        if v.kind == "b":
            return rng.random(v.shape) < 0.5
        if v.kind == "i":
            return rng.integers(self.low, self.high, v.shape, endpoint=True, dtype=dtype)
        steps = int(v.bound / v.grain)
        data = rng.integers(-steps, steps, v.shape, endpoint=True) * v.grain
        if v.kind == "c":
            return (data + 1j * rng.integers(-steps, steps, v.shape, endpoint=True) * v.grain).astype(dtype)
        data = np.asarray(data, np.float64)
        for special in self.specials:
            data = np.where(rng.random(v.shape) < 0.05, special, data)
        return data.astype(dtype)


@dataclass(frozen=True)
class Step:
    """`name = text`; `reads` are the names in it."""

    value: Value
    text: str
    reads: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Value, ...]

    @property
    def source(self) -> str:
        body = "".join(f"    {s.value.name} = {s.text}\n" for s in self.steps)
        names = ", ".join(i.value.name for i in self.inputs)
        return f"def program({names}):\n{body}    return ({', '.join(o.name for o in self.outputs)},)\n"

    @property
    def function(self) -> Callable[..., Any]:
        scope: dict[str, Any] = {"jnp": jnp, "lax": lax, "jax": jax, "np": np}
        exec(compile(self.source, "program.py", "exec"), scope)
        return scope["program"]

    @property
    def arguments(self) -> list[np.ndarray]:
        return [i.data() for i in self.inputs]

    def pruned(self, outputs: Sequence[Value] | None = None) -> Program:
        """Only what the outputs need."""
        kept = self.outputs if outputs is None else tuple(outputs)
        needed = {o.name for o in kept}
        steps: list[Step] = []
        for step in reversed(self.steps):
            if step.value.name in needed:
                steps.append(step)
                needed.update(step.reads)
        return Program(tuple(i for i in self.inputs if i.value.name in needed), tuple(reversed(steps)), kept)

    def __repr__(self) -> str:
        arguments = "".join(f"# {i.value.name}: {i.value.dtype}{list(i.value.shape)}\n" for i in self.inputs)
        return f"\n{arguments}{self.source}"


@dataclass
class Generator:
    """Writes one program, step by step."""

    choose: Choices
    x64: bool = False
    values: list[Value] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    specials: tuple[float, ...] = ()
    dims: tuple[int, ...] = ()

    def program(self) -> Program:
        c = self.choose
        self.dims = tuple(c.pick(SIZES if c.chance(60) else SIZES[:12]) for _ in range(c.number(1, 3)))
        if c.chance(4):
            self.dims = (*self.dims, 0)
        if c.chance(12):
            self.specials = (math.nan, math.inf, -math.inf, -0.0)[:c.number(1, 4)]
        for _ in range(c.number(1, 3)):
            self.input(self.shape(), self.dtype())
        wanted, tries = c.number(1, 16), 0
        while len(self.steps) < wanted and tries < 60:
            tries += 1
            c.pick(STEPS)(self)
        if not self.steps:
            self.step("jnp.negative({})", [self.values[0]], self.values[0])
        computed = [s.value for s in self.steps]
        outputs = {computed[-1].name: computed[-1]}
        for _ in range(c.pick((0, 0, 0, 1, 1, 2, 3))):
            extra = c.pick(computed)
            outputs[extra.name] = extra
        return Program(tuple(self.inputs), tuple(self.steps), tuple(outputs.values())).pruned()

    # --- values -----------------------------------------------------------------------------------------------------

    def dtype(self) -> str:
        c = self.choose
        if self.x64 and c.chance(50):
            return c.pick(WIDE)
        if c.chance(60):
            return "float32"
        return c.pick((*FLOATS, *INTEGERS, "bool", "complex64"))

    def shape(self) -> tuple[int, ...]:
        c = self.choose
        shape = [c.pick((*self.dims, 1) if c.chance(20) else self.dims) for _ in range(c.pick((0, 1, 1, 2, 2, 2, 3, 3, 4)))]
        while math.prod(shape) > MAX_ELEMENTS:
            shape.pop()
        return tuple(shape)

    def input(self, shape: tuple[int, ...], dtype: str, low: int | None = None, high: int | None = None) -> Value:
        name = f"x{len(self.inputs)}"
        value = Value(name, dtype, shape, 1.0)
        if value.kind == "i":
            info = np.iinfo(dtype)
            if low is None or high is None:
                low, high = (info.min, info.max) if self.choose.chance(30) else (max(info.min, -9), 9)
            low, high = max(low, int(info.min)), min(high, int(info.max))
            value = replace(value, bound=float(max(abs(low), abs(high))))
        elif value.kind in "fc":
            coarse = dtype in ("float16", "bfloat16")
            value = replace(value, bound=2.0 if coarse else 4.0, grain=0.25 if coarse else 0.125)
        specials = self.specials if value.kind == "f" else ()
        self.inputs.append(Input(value, self.choose.number(0, 10**6), low or 0, high or 0, specials))
        self.values.append(value)
        return value

    def step(self, text: str, operands: Sequence[Value], result: Value) -> Value | None:
        """Adds `name = text` with the operands' names in its holes; shape and dtype are JAX's own answer. None, and no
        step, for what JAX refuses, what is too large, or where the error says nothing any more."""
        name = f"v{len(self.steps)}"
        filled = text.format(*(o.name for o in operands))
        names = tuple(dict.fromkeys(o.name for o in operands))
        scope = {"jnp": jnp, "lax": lax, "jax": jax}
        by_name = {o.name: o for o in operands}
        code = compile(f"lambda {', '.join(names)}: {filled}", "program.py", "eval")
        try:
            aval = jax.eval_shape(eval(code, scope), *(jax.ShapeDtypeStruct(by_name[n].shape, by_name[n].dtype) for n in names))
        except (TypeError, ValueError, OverflowError):
            return None
        if not hasattr(aval, "shape") or aval.size > MAX_ELEMENTS:
            return None
        value = replace(result, name=name, dtype=str(aval.dtype), shape=aval.shape)
        if value.kind == "b":
            value = replace(value, bound=1.0, error=0.0, grain=1.0)
        elif value.kind == "i":
            value = replace(value, bound=min(value.bound, float(np.iinfo(value.dtype).max)), error=0.0, grain=1.0)
        else:
            value = _rounded(value)
            if value.bound > LARGEST[value.dtype] or value.error > 0.02 * max(value.bound, 1e-3):
                return None
        self.values.append(value)
        self.steps.append(Step(value, filled, names))
        return value

    def value(self, kinds: str = "fibc", rank: int = 0, exact: bool = False) -> Value | None:
        found = [v for v in self.values if v.kind in kinds and len(v.shape) >= rank and (v.exact or not exact)]
        if not found:
            return None
        return self.choose.pick(found[-3:] if self.choose.chance(75) else found)

    def partner(self, v: Value, exact: bool = False) -> Value:
        """Another value of the type whose shape broadcasts with v's; a new input where there is none."""
        c = self.choose
        found = [w for w in self.values if w.dtype == v.dtype and (w.exact or not exact) and _broadcasts(v.shape, w.shape)]
        if len(found) > 1 or (found and c.chance(50)):
            return c.pick(found)
        shape = list(v.shape[c.number(0, len(v.shape)):]) if c.chance(50) else list(v.shape)
        for k in range(len(shape)):
            if c.chance(25):
                shape[k] = 1
        return self.input(tuple(shape), v.dtype)


def _broadcasts(a: Sequence[int], b: Sequence[int]) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a), reversed(b), strict=False))


def _rounded(v: Value) -> Value:
    """The value after rounding to its type: still exact where its multiples of the grain fit."""
    epsilon = EPSILON[v.dtype]
    if v.error == 0 and v.grain > 0 and v.bound / v.grain <= 0.5 / epsilon:
        return v
    return replace(v, error=v.error + epsilon * v.bound, grain=0.0)


def _like(v: Value, bound: float | None = None, error: float | None = None, grain: float | None = None) -> Value:
    return replace(v, bound=v.bound if bound is None else bound, error=v.error if error is None else error,
                   grain=v.grain if grain is None else grain)


def _join(values: Sequence[Value]) -> Value:
    """What holds of any of several values."""
    return replace(values[0], bound=max(v.bound for v in values), error=max(v.error for v in values),
                   grain=min(v.grain for v in values))


def _inexact(v: Value, bound: float, slope: float) -> Value:
    """The value of a function with the given largest magnitude and slope, computed within a few ulp."""
    ulp = EPSILON.get(v.dtype, 2.0**-23)
    return replace(v, bound=bound, error=slope * v.error + 8 * ulp * bound, grain=0.0)


# --- steps: each adds one or a few lines, or nothing where it does not apply ---------------------------------------------

SMOOTH = {  # text, largest magnitude and slope as functions of the bound
    "jnp.tanh({})": (lambda b: 1, lambda b: 1), "jnp.sin({})": (lambda b: 1, lambda b: 1),
    "jnp.exp(jnp.minimum({}, 3))": (lambda b: 21, lambda b: 21), "jnp.exp(-jnp.abs({}))": (lambda b: 1, lambda b: 1),
    "jax.nn.sigmoid({})": (lambda b: 1, lambda b: 1), "jnp.log1p(jnp.abs({}))": (lambda b: math.log1p(b), lambda b: 1),
    "jnp.sqrt(jnp.abs({}) + 1)": (lambda b: math.sqrt(b + 1), lambda b: 1), "lax.erf({})": (lambda b: 1, lambda b: 1.2),
    "lax.rsqrt(jnp.square({}) + 1)": (lambda b: 1, lambda b: 2), "jax.nn.gelu({})": (lambda b: b + 1, lambda b: 1.2),
    "jax.nn.softplus({})": (lambda b: b + 1, lambda b: 1), "1 / (jnp.abs({}) + 1)": (lambda b: 1, lambda b: 1),
    "jnp.arctan({})": (lambda b: 2, lambda b: 1),
}
SAME = ("-{}", "jnp.abs({})", "jax.nn.relu({})", "{} + 0", "jnp.maximum({}, 0.5)", "jnp.where({} == {}, {}, 0)")


def smooth(g: Generator) -> None:
    v = g.value("f")
    if v is not None:
        text = g.choose.pick(list(SMOOTH))
        bound, slope = SMOOTH[text]
        g.step(text, [v], _inexact(v, bound(v.bound), slope(v.bound)))


def same(g: Generator) -> None:
    v = g.value("f")
    if v is not None:
        text = g.choose.pick(SAME)
        if "==" not in text or v.exact:
            g.step(text, [v] * text.count("{}"), _like(v, bound=max(v.bound, 0.5), grain=min(v.grain, 0.5)))


def rough(g: Generator) -> None:
    """Functions with jumps, of exact values only."""
    v = g.value("f", exact=True)
    if v is not None:
        text = g.choose.pick(("jnp.floor({})", "jnp.sign({})", "jnp.round({})", "jnp.ceil({})", "jnp.trunc({})",
                              "{} > 0", "{} != {}", "jnp.isfinite({})", "jnp.isnan({})", "jnp.signbit({}) | ({} > 1)"))
        g.step(text, [v] * text.count("{}"), _like(v, bound=v.bound + 1, grain=min(v.grain, 1.0)))


def integer(g: Generator) -> None:
    v = g.value("i")
    if v is None:
        return
    text = g.choose.pick(("-{}", "~{}", "lax.population_count({})", "lax.clz({})", "jnp.abs({})", "{} // 3", "{} % 5",
                          "{} >> 1", "{} * 3 + 1", "jnp.clip({}, 0, 7)", "{} << 2", "{} == {}", "{} > 2", "lax.rem({}, {})",
                          "lax.div({}, {})", "lax.shift_left({}, {})", "lax.shift_right_logical({}, {})",
                          "lax.shift_right_arithmetic({}, {})", "{} ^ {}", "{} & {}", "{} | {}", "{} - {}"))
    other = g.partner(v)
    operands = [v, other] if text.count("{}") == 2 and other.shape == v.shape else [v] * text.count("{}")
    g.step(text, operands, _like(v, bound=math.inf))


def boolean(g: Generator) -> None:
    v = g.value("b")
    if v is not None:
        other = g.partner(v)
        g.step(g.choose.pick(("{} & {}", "{} | {}", "{} ^ {}", "~{} | {}", "{} == {}")), [v, other], v)


def complex_(g: Generator) -> None:
    v = g.value("c")
    if v is not None:
        text = g.choose.pick(("jnp.conj({})", "{}.real", "{}.imag", "-{}", "{} * 1j", "{} + jnp.conj({})"))
        g.step(text, [v] * text.count("{}"), _like(v, bound=2 * v.bound, error=2 * v.error))


def arithmetic(g: Generator) -> None:
    v = g.value("fic")
    if v is None:
        return
    w = g.partner(v)
    operator = g.choose.pick(("+", "-", "*", "max", "/", "+", "*"))
    if operator == "max" and v.kind != "c":
        g.step(g.choose.pick(("jnp.maximum({}, {})", "jnp.minimum({}, {})")), [v, w], _join([v, w]))
    elif operator == "/" and v.kind == "f":
        g.step("{} / (1 + jnp.abs({}))", [v, w],
               _inexact(replace(v, error=v.error + w.error * v.bound), v.bound, 1))
    elif operator == "*":
        factor = 2.0 if v.kind == "c" else 1.0
        g.step("{} * {}", [v, w], _like(v, factor * v.bound * w.bound,
                                        factor * (v.error * w.bound + w.error * v.bound), v.grain * w.grain))
    elif operator in "+-":
        g.step(f"{{}} {operator} {{}}", [v, w], _like(v, v.bound + w.bound, v.error + w.error, min(v.grain, w.grain)))


def compare(g: Generator) -> None:
    v = g.value("fi", exact=True)
    if v is not None:
        w = g.partner(v, exact=True)
        g.step(g.choose.pick(("{} < {}", "{} >= {}", "{} == {}", "{} != {}")), [v, w], v)


def select(g: Generator) -> None:
    p, v = g.value("b"), g.value()
    if p is None or v is None:
        return
    if not _broadcasts(p.shape, v.shape):
        p = g.input(v.shape, "bool")
    w = g.partner(v)
    g.step("jnp.where({}, {}, {})", [p, v, w], _join([v, w]))


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
    if v.kind == "f" and (g.specials or v.bound > 100) and not target.startswith(("float", "bfloat", "complex", "bool")):
        return   # what NaN is as an integer, and which way it saturates, is not JAX's promise
    g.step(f"{{}}.astype(jnp.{target if target != 'bool' else 'bool_'})", [v], v)


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
        for k in range(len(order) - 1):   # shrinks toward the identity
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
        parts.append({"all": ":", "range": f"{start}:{c.number(start, n)}", "stride": f"{start}::{c.number(1, 3)}",
                      "back": f"::-{c.number(1, 2)}", "head": f":{c.number(0, n)}", "one": str(start)}[kind])
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
    g.step(text, [v, v], _like(v, bound=max(2.0, v.bound), grain=min(1.0, v.grain)))


def join(g: Generator) -> None:
    v, c = g.value(rank=1), g.choose
    if v is None:
        return
    parts = [w for w in g.values if w.dtype == v.dtype and len(w.shape) == len(v.shape)]
    axis = c.number(0, len(v.shape) - 1)
    chosen = [v, *(c.pick(parts) for _ in range(c.number(1, 3)))]
    if c.chance(30):
        chosen = [w for w in chosen if w.shape == v.shape]
        g.step(f"jnp.stack([{', '.join(['{}'] * len(chosen))}], axis={axis})", chosen, _join(chosen))
        return
    rest = [w for w in chosen if [n for k, n in enumerate(w.shape) if k != axis] ==
            [n for k, n in enumerate(v.shape) if k != axis]]
    g.step(f"jnp.concatenate([{', '.join(['{}'] * len(rest))}], axis={axis})", rest, _join(rest))


def roll(g: Generator) -> None:
    v, c = g.value(rank=1), g.choose
    if v is not None:
        axis = c.number(0, len(v.shape) - 1)
        text = c.pick((f"jnp.roll({{}}, {c.number(-3, 3)}, {axis})", f"jnp.repeat({{}}, 2, {axis})",
                       f"jnp.tile({{}}, {c.number(1, 3)})", f"jnp.expand_dims({{}}, {axis})",
                       f"jnp.split({{}}, [{c.number(0, v.shape[axis])}], {axis})[{c.number(0, 1)}]",
                       f"jnp.broadcast_to({{}}, ({c.number(1, 4)}, *{{}}.shape))", "jnp.triu({})"))
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
    elif c.chance(15) and len(v.shape) == 1:   # indices that come from the gathered value itself
        text = "{}[jnp.argsort({})]"
        if not v.exact or g.specials or v.kind == "c":
            return
        index = v
    else:
        index = _indices(g, v.shape[axis])
        text = c.pick((f"jnp.take({{}}, {{}}, {axis}, mode='fill')", f"jnp.take({{}}, {{}}, {axis}, mode='clip')",
                       "{}[{}]", "{}.at[{}].get(mode='fill', fill_value=1)", f"jnp.take({{}}, {{}}, {axis}, mode='wrap')",
                       "{}[{}[0]]", "{}[..., {}]"))
    # Filling with NaN is as exact as any other value.
    g.step(text, [v, index], _like(v, bound=max(v.bound, 1.0), grain=min(v.grain, 1.0)) if v.kind != "i" else
           _like(v, bound=math.inf))


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
    same_type = [w for w in g.values if w.dtype == v.dtype and len(w.shape) == len(v.shape) and
                 all(m <= n for m, n in zip(w.shape, v.shape, strict=True))]
    if c.chance(50):
        update = c.pick(same_type)
        g.step(f"lax.dynamic_update_slice({{}}, {{}}, ({places},))", [v, update, *used], _join([v, update]))
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
    g.step(f"{{}}.at[{{}}].{method}", [v, index], _like(v, v.bound * often + extra, v.error * often, min(v.grain, 1.0)))


def reduction(g: Generator) -> None:
    v, c = g.value(rank=1), g.choose
    if v is None:
        return
    axes = tuple(k for k in range(len(v.shape)) if c.chance(50)) or (c.number(0, len(v.shape) - 1),)
    count = math.prod(v.shape[k] for k in axes)
    keep = f", keepdims={c.chance(40)}"
    where = f"axis={axes}{keep}"
    summed = _like(v, v.bound * count, v.error * count + (0 if v.exact else count * EPSILON.get(v.dtype, 0) * v.bound))
    options: list[tuple[str, Value]] = [(f"jnp.sum({{}}, {where})", summed)]
    if v.kind == "b":
        options = [(f"jnp.any({{}}, {where})", v), (f"jnp.all({{}}, {where})", v), (f"jnp.sum({{}}, {where})", _like(v, count))]
    elif v.kind == "f" and count:
        options += [(f"jnp.mean({{}}, {where})", _inexact(v, v.bound, 2))]
        if not g.specials:   # XLA:CPU loses NaN in them
            options += [(f"jnp.max({{}}, {where})", v), (f"jnp.min({{}}, {where})", v)]
        # Of other reducers XLA folds the start value in any number of times, or never.
        options += [(f"lax.reduce({{}}, jnp.array(0.5, {{}}.dtype), lax.max, {axes})",
                     _like(v, max(v.bound, 0.5), grain=min(v.grain, 0.5)))] if 1 not in (v.shape[k] for k in axes) else []
    elif v.kind == "i" and count:
        options += [(f"jnp.max({{}}, {where})", v), (f"jnp.min({{}}, {where})", v), (f"jnp.prod({{}}, {where})", v),
                    (f"lax.reduce({{}}, jnp.array(0, {{}}.dtype), lax.bitwise_xor, {axes})", v)]
    if v.kind in "fi" and v.exact and v.size and not (g.specials and v.kind == "f"):
        where = f"axis={axes[0]}{keep}"
        options += [(f"jnp.argmax({{}}, {where})", _like(v, 1e4)), (f"jnp.argmin({{}}, {where})", _like(v, 1e4))]
    text, result = c.pick(options)
    g.step(text, [v] * text.count("{}"), result if v.kind in "fc" else _like(result, bound=math.inf))


def pair_reduction(g: Generator) -> None:
    """Two operands in one reduction."""
    v, c = g.value("f", rank=1, exact=True), g.choose
    if v is None or not v.size:
        return
    w = next((w for w in reversed(g.values) if w.shape == v.shape and w.dtype == v.dtype and w.exact), v)
    axis = c.number(0, len(v.shape) - 1)
    if v.shape[axis] == 1 or g.specials:
        return
    body = c.pick(("lambda a, b: (a[0] + b[0], lax.max(a[1], b[1]))", "lambda a, b: (lax.min(a[0], b[0]), lax.max(a[1], b[1]))",
                   "lambda a, b: (a[0] + b[0], a[1] + b[1])"))
    starts = [0 if "+" in part else 2 for part in body.split("),")]
    text = (f"lax.reduce(({{}}, {{}}), (jnp.array({starts[0]}, {{}}.dtype), jnp.array({starts[-1]}, {{}}.dtype)), {body}, ({axis},))"
            f"[{c.number(0, 1)}]")
    bound = (v.bound + w.bound) * v.shape[axis] + 2
    g.step(text, [v, w, v, v], _like(v, bound, grain=min(v.grain, w.grain, 1.0)))


def normalization(g: Generator) -> None:
    v = g.value("f", rank=1)
    if v is None or not v.size or v.bound > 50 or g.specials:
        return
    axis = g.choose.number(-len(v.shape), -1)
    text, bound, slope = g.choose.pick((
        (f"jax.nn.softmax({{}}, {axis})", 1, 2), (f"jax.nn.logsumexp({{}}, {axis})", v.bound + 10, 2),
        (f"({{}} - {{}}.mean({axis}, keepdims=True)) / jnp.sqrt({{}}.var({axis}, keepdims=True) + 1)", 2 * v.bound, 4 + v.bound),
        (f"jnp.var({{}}, {axis})", v.bound**2, 4 * v.bound), (f"jax.nn.log_softmax({{}}, {axis})", 2 * v.bound + 10, 2)))
    result = _inexact(v, bound, slope)
    wide = 1 + math.log2(v.size + 1)
    g.step(text, [v] * text.count("{}"), _like(result, error=result.error * wide * (1 + v.bound)))


def scan(g: Generator) -> None:
    v = g.value("fi", rank=1)
    if v is None or not v.size:
        return
    axis = g.choose.number(0, len(v.shape) - 1)
    n = v.shape[axis]
    g.step(f"jnp.cumsum({{}}, {axis})", [v], _like(v, v.bound * n, v.error * n + (0 if v.exact else n * EPSILON.get(v.dtype, 0) * v.bound)))


def outer(g: Generator) -> None:
    v, w = g.value("f", rank=1), g.value("f", rank=1)
    if v is None or w is None or len(v.shape) != 1 or len(w.shape) != 1 or v.dtype != w.dtype:
        return
    g.step("{}[:, None] * {}[None, :]", [v, w], _like(v, v.bound * w.bound, v.error * w.bound + w.error * v.bound,
                                                      v.grain * w.grain))


def mirror(g: Generator) -> None:
    """x op x.T, and other reads of one value at two places."""
    v = g.value("f", rank=2)
    if v is None:
        return
    text = g.choose.pick(("{} + jnp.swapaxes({}, -1, -2)", "{} - {}[..., ::-1]", "{} + jnp.roll({}, 1, -1)",
                          "{} + {}.reshape(-1).reshape({}.shape[::-1]).T"))
    g.step(text, [v] * text.count("{}"), _like(v, 2 * v.bound, 2 * v.error))


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
    g.step("jnp.dot({}, {}, precision='highest')", [v, w], _like(v, v.bound * w.bound * n, (v.error * w.bound + (
        0 if v.exact else EPSILON[v.dtype] * v.bound * w.bound)) * n, v.grain * w.grain))


def loop(g: Generator) -> None:
    v = g.value("f", rank=1)
    if v is not None:
        g.step("lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x) + i, {})", [v], _inexact(v, 4, 1))


STEPS: tuple[Callable[[Generator], None], ...] = (
    smooth, smooth, same, rough, integer, boolean, complex_, arithmetic, arithmetic, arithmetic, compare, select, cast, reshape,
    reshape, transpose, transpose, slice_, slice_, reverse, pad, pad, join, join, roll, gather, gather, dynamic, dynamic, scatter,
    reduction, reduction, reduction, pair_reduction, normalization, scan, outer, mirror, mirror, iota, dot, loop,
)


def random_program(seed: int, x64: bool = False) -> Program:
    """The program of a seed."""
    with jax.enable_x64(x64):
        return Generator(Choices(seed), x64).program()


@st.composite
def programs(draw: Callable[[Any], Any]) -> Program:
    """As `random_program`, drawn by hypothesis."""
    return Generator(DrawnChoices(draw)).program()
