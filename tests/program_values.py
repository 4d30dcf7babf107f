"""Generated programs: JAX functions as Python text, with a bound on how far two right evaluations may lie apart.

A `Value` carries what is known of it: its largest magnitude, and the error that rounding may have brought (running
error analysis). Error 0 means that every right evaluation gives the same bits: only such values are compared, rounded,
or used as indices, so that a difference beyond the bound is wrong code and never bad luck.
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
EPSILON = {
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float32": 2.0**-23,
    "float64": 2.0**-52,
    "complex64": 2.0**-23,
    "complex128": 2.0**-52,
}
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
        return self.number(1, 100) > 100 - percent  # shrinks toward "no"


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
        return (
            "f"
            if self.dtype in ("float16", "bfloat16", "float32", "float64")
            else "c"
            if self.dtype.startswith("complex")
            else "b"
            if self.dtype == "bool"
            else "i"
        )

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

    def program(self, steps: Sequence[Callable[[Generator], None]]) -> Program:
        c = self.choose
        self.dims = tuple(c.pick(SIZES if c.chance(60) else SIZES[:12]) for _ in range(c.number(1, 3)))
        if c.chance(4):
            self.dims = (*self.dims, 0)
        if c.chance(12):
            self.specials = (math.nan, math.inf, -math.inf, -0.0)[: c.number(1, 4)]
        for _ in range(c.number(1, 3)):
            self.input(self.shape(), self.dtype())
        wanted, tries = c.number(1, 24), 0
        while len(self.steps) < wanted and tries < 60:
            tries += 1
            c.pick(steps)(self)
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
        shape = [
            c.pick((*self.dims, 1) if c.chance(20) else self.dims) for _ in range(c.pick((0, 1, 1, 2, 2, 2, 3, 3, 4)))
        ]
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
            aval = jax.eval_shape(
                eval(code, scope), *(jax.ShapeDtypeStruct(by_name[n].shape, by_name[n].dtype) for n in names)
            )
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
        found = [
            w for w in self.values if w.dtype == v.dtype and (w.exact or not exact) and broadcasts(v.shape, w.shape)
        ]
        if len(found) > 1 or (found and c.chance(50)):
            return c.pick(found)
        shape = list(v.shape[c.number(0, len(v.shape)) :]) if c.chance(50) else list(v.shape)
        for k in range(len(shape)):
            if c.chance(25):
                shape[k] = 1
        return self.input(tuple(shape), v.dtype)


def broadcasts(a: Sequence[int], b: Sequence[int]) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(a), reversed(b), strict=False))


def _rounded(v: Value) -> Value:
    """The value after rounding to its type: still exact where its multiples of the grain fit."""
    epsilon = EPSILON[v.dtype]
    if v.error == 0 and v.grain > 0 and v.bound / v.grain <= 0.5 / epsilon:
        return v
    return replace(v, error=v.error + epsilon * v.bound, grain=0.0)
