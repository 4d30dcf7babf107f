"""Random HLO programs for hypothesis, and values that break careless rewrites: NaN, infinities, both zeros, wrapping.

A program is grown from a list of drawn numbers: each step picks an operation and operands that fit it from what exists
already. Only operations that every implementation rounds alike are used, so results can be compared bit for bit.
"""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

from hlofuse.hlo.builder import broadcast, computation, constant, full, make, parameter, reshape, tuple_of
from hlofuse.hlo.module import Computation, Instruction, Module
from hlofuse.hlo.opcode import identity_of
from hlofuse.hlo.shape import FLOATS, INTEGERS, Shape

FLOAT_VALUES = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -3.0, 7.25, 1e30, float("inf"), float("-inf"), float("nan"))
INTEGER_VALUES = (0, 1, -1, 2, 3, -7, 31, 32, 2**31 - 1, -(2**31))
CONSTANTS: dict[str, tuple[float | int | bool, ...]] = {
    "f32": (0.0, -0.0, 1.0, -1.0, 2.0, 0.25, 3.0, float("inf"), float("-inf"), float("nan")),
    "s32": (0, 1, -1, 2, 3, 2**31 - 1, -(2**31)),
    "pred": (False, True),
}
PARAMETERS = (Shape("f32", (2, 3)), Shape("f32", (2, 3)), Shape("f32", (3,)), Shape("f32", (2, 1)), Shape("f32"),
              Shape("s32", (2, 3)), Shape("s32", (3,)), Shape("s32"), Shape("pred", (2, 3)))
LARGEST_RANK = 3


def special_values(shape: Shape, seed: int) -> np.ndarray:
    """An array of the shape, drawn from the values that matter."""
    rng = np.random.default_rng(seed)
    if shape.element_type == "pred":
        return np.asarray(rng.random(shape.dims) < 0.5)
    values = INTEGER_VALUES if shape.element_type in INTEGERS else FLOAT_VALUES
    drawn = rng.choice(np.array(values), shape.dims)
    with np.errstate(all="ignore"):
        return np.asarray(drawn).astype(shape.dtype)


class Draws:
    """The drawn numbers, as choices; when they run out the first choice is taken."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = iter(numbers)

    def pick(self, choices: list | tuple):
        return choices[next(self.numbers, 0) % len(choices)]


Grow = Callable[[list[Instruction], Draws], "Instruction | None"]


def _arrays(values: list[Instruction], types: tuple[str, ...] | frozenset[str]) -> list[Instruction]:
    return [v for v in values if v.element_type in types]


def _some(values: list[Instruction], draws: Draws, types: tuple[str, ...] | frozenset[str]) -> Instruction:
    return draws.pick(_arrays(values, types)[::-1])


def _like(x: Instruction, values: list[Instruction], draws: Draws) -> Instruction:
    return draws.pick([v for v in values if v.shape == x.shape][::-1])


NUMBERS = ("f32", "s32")


def unary(values: list[Instruction], draws: Draws) -> Instruction:
    opcode = draws.pick(("negate", "abs", "sign", "floor", "ceil", "not", "is-finite"))
    types = {"not": ("s32", "pred"), "floor": ("f32",), "ceil": ("f32",), "is-finite": ("f32",)}.get(opcode, NUMBERS)
    return make(opcode, _some(values, draws, types))


def binary(values: list[Instruction], draws: Draws) -> Instruction:
    opcode = draws.pick(("add", "subtract", "multiply", "divide", "maximum", "minimum", "and", "or", "xor", "remainder",
                         "shift-left", "shift-right-arithmetic", "shift-right-logical"))
    types = {"and": ("s32", "pred"), "or": ("s32", "pred"), "xor": ("s32", "pred"), "remainder": ("s32",)}.get(
        opcode, ("s32",) if opcode.startswith("shift") else NUMBERS)
    x = _some(values, draws, types)
    return make(opcode, x, _like(x, values, draws))


def binary_with_constant(values: list[Instruction], draws: Draws) -> Instruction:
    made = binary(values, draws)
    c = full(draws.pick(CONSTANTS[made.element_type]), made.array)
    return make(made.opcode, *draws.pick(((made.operands[0], c), (c, made.operands[0]))))


def power(values: list[Instruction], draws: Draws) -> Instruction:
    x = _some(values, draws, ("f32",))
    return make("power", x, full(draws.pick((0.0, 1.0, 2.0, -1.0)), x.array))


def compare(values: list[Instruction], draws: Draws) -> Instruction:
    x = _some(values, draws, ("f32", "s32", "pred"))
    other = draws.pick((_like(x, values, draws), full(draws.pick(CONSTANTS[x.element_type]), x.array)))
    return make("compare", *draws.pick(((x, other), (other, x))),
                direction=draws.pick(("LT", "LE", "GT", "GE", "EQ", "NE")))


def select(values: list[Instruction], draws: Draws) -> Instruction:
    x = _some(values, draws, ("f32", "s32", "pred"))
    predicates = [v for v in values if v.element_type == "pred" and v.dims in ((), x.dims)]
    p = draws.pick([full(draws.pick((True, False)), x.array.with_type("pred")), *predicates][::-1])
    return make("select", p, x, _like(x, values, draws))


def clamp(values: list[Instruction], draws: Draws) -> Instruction:
    x = _some(values, draws, NUMBERS)
    low, high = (constant(draws.pick(CONSTANTS[x.element_type]), x.element_type) for _ in range(2))
    return make("clamp", low, x, high)


def convert(values: list[Instruction], draws: Draws) -> Instruction:
    """Never from a float to an integer: out of range that is the machine's business."""
    x = _some(values, draws, ("f32", "s32", "pred", "bf16", "s8"))
    targets = ("f32", "bf16", "f16") if x.element_type in FLOATS else ("f32", "s8", "u8", "s32", "bf16")
    to = make("convert", x, shape=x.array.with_type(draws.pick(targets)))
    back = ("f32",) if to.element_type in FLOATS else ("s32", "f32")
    return make("convert", to, shape=to.array.with_type(draws.pick(back)))


def spread(values: list[Instruction], draws: Draws) -> Instruction | None:
    x = _some(values, draws, ("f32", "s32", "pred"))
    targets = [(dims, axes) for dims in ((2, 3), (3,), (2, 3, 1), (1, 2, 3), (2, 1), (2, 1, 3))
               for axes in _placements(x.dims, dims)]
    return broadcast(x, *draws.pick(targets)) if targets else None


def _placements(source: tuple[int, ...], dims: tuple[int, ...]) -> list[tuple[int, ...]]:
    if not source:
        return [()]
    return [(d, *(d + 1 + r for r in rest)) for d, size in enumerate(dims) if size == source[0]
            for rest in _placements(source[1:], dims[d + 1:])]


def reshaped(values: list[Instruction], draws: Draws) -> Instruction | None:
    x = _some(values, draws, ("f32", "s32", "pred"))
    shapes = ((2, 3), (3, 2), (6,), (1, 2, 3), (2, 1, 3), (2, 3, 1), (3,), (3, 1), (2,), (2, 1), (1, 1), ())
    targets = [d for d in shapes if np.prod(d) == x.array.size]
    return reshape(x, draws.pick(targets)) if targets else None


def transposed(values: list[Instruction], draws: Draws) -> Instruction | None:
    x = _some(values, draws, ("f32", "s32", "pred"))
    orders = {1: ((0,),), 2: ((1, 0), (0, 1)), 3: ((0, 2, 1), (2, 0, 1), (1, 0, 2), (2, 1, 0))}
    return make("transpose", x, dimensions=draws.pick(orders[len(x.dims)])) if x.dims else None


def sliced(values: list[Instruction], draws: Draws) -> Instruction | None:
    x = _some(values, draws, ("f32", "s32", "pred"))
    bounds = tuple((start := draws.pick((0, 1)) % size, draws.pick(range(start + 1, size + 1)), draws.pick((1, 2)))
                   for size in x.dims)
    return make("slice", x, slice=bounds) if x.dims else None


def padded(values: list[Instruction], draws: Draws) -> Instruction | None:
    x = _some(values, draws, NUMBERS)
    low_high = ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (-1, 1, 0), (1, -1, 0))
    padding = tuple(draws.pick(low_high) for _ in x.dims)
    if not x.dims or x.array.size > 40:
        return None
    return make("pad", x, constant(draws.pick(CONSTANTS[x.element_type]), x.element_type), padding=padding)


def concatenated(values: list[Instruction], draws: Draws) -> Instruction | None:
    x = _some(values, draws, ("f32", "s32", "pred"))
    if not x.dims or x.array.size > 20:
        return None
    return make("concatenate", x, _like(x, values, draws), dimensions=(draws.pick(range(len(x.dims))),))


def reversed_(values: list[Instruction], draws: Draws) -> Instruction | None:
    x = _some(values, draws, ("f32", "s32", "pred"))
    return make("reverse", x, dimensions=(draws.pick(range(len(x.dims))),)) if x.dims else None


def counted(values: list[Instruction], draws: Draws) -> Instruction:
    dims = draws.pick(((3,), (2, 3), (1, 3)))
    return make("iota", shape=Shape(draws.pick(NUMBERS), dims), iota_dimension=draws.pick(range(len(dims))))


def combiner(opcode: str, element_type: str) -> Computation:
    a, b = parameter(0, Shape(element_type)), parameter(1, Shape(element_type))
    return computation(opcode, (a, b), make(opcode, a, b))


def reduced(values: list[Instruction], draws: Draws) -> Instruction | None:
    """Sums go over one axis of at most three elements, in order, so that they round alike."""
    x = _some(values, draws, NUMBERS)
    if not x.dims:
        return None
    opcode = draws.pick(("add", "maximum", "minimum"))
    axes = draws.pick([(d,) for d in range(len(x.dims))] + [()])
    init = constant(identity_of(opcode, x.element_type), x.element_type)  # XLA does not apply another one
    return make("reduce", x, init, dimensions=axes, to_apply=combiner(opcode, x.element_type))


def _index(values: list[Instruction], draws: Draws) -> Instruction:
    scalars = [v for v in values if v.shape == Shape("s32")]
    return draws.pick((constant(draws.pick((0, 1, 9, -5)), "s32"), *scalars[::-1]))


def dynamically_sliced(values: list[Instruction], draws: Draws) -> Instruction | None:
    x = _some(values, draws, ("f32", "s32", "pred"))
    sizes = tuple(draws.pick(range(1, size + 1)) for size in x.dims)
    return make("dynamic-slice", x, *(_index(values, draws) for _ in x.dims), dynamic_slice_sizes=sizes) \
        if x.dims else None


def updated(values: list[Instruction], draws: Draws) -> Instruction | None:
    part = dynamically_sliced(values, draws)
    if part is None:
        return None
    return make("dynamic-update-slice", part.operands[0], part, *(_index(values, draws) for _ in part.dims))


def scattered(values: list[Instruction], draws: Draws) -> Instruction | None:
    """One row stored or combined at one index, in bounds or not."""
    x = draws.pick([v for v in values if v.shape == Shape("f32", (2, 3))])
    row = draws.pick([v for v in values if v.shape == Shape("f32", (3,))])
    return make("scatter", x, reshape(_index(values, draws), (1,)), row, shape=x.shape, update_window_dims=(0,),
                inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,), index_vector_dim=0,
                to_apply=combiner(draws.pick(("add", "maximum")), "f32"))


def scattered_rows(values: list[Instruction], draws: Draws) -> Instruction | None:
    """Two rows combined with those that two indices name, which may be one, or none."""
    pool = [v for v in values if v.shape == Shape("f32", (2, 3))]
    first, second = (reshape(_index(values, draws), (1,)) for _ in range(2))
    if first.element_type != second.element_type:
        return None
    rows = make("concatenate", first, second, dimensions=(0,))
    return make("scatter", draws.pick(pool), rows, draws.pick(pool), shape=Shape("f32", (2, 3)),
                update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,),
                index_vector_dim=1, to_apply=combiner(draws.pick(("add", "maximum", "multiply", "subtract")), "f32"))


def barred(values: list[Instruction], draws: Draws) -> Instruction:
    packed = tuple_of([_some(values, draws, ("f32",)), _some(values, draws, NUMBERS)])
    return make("get-tuple-element", make("opt-barrier", packed, shape=packed.shape), index=draws.pick((0, 1)))


def called(values: list[Instruction], draws: Draws) -> Instruction:
    x = _some(values, draws, ("f32",))
    p, q = parameter(0, x.array), parameter(1, x.array)
    body = computation("called", (p, q), make(draws.pick(("add", "subtract")), p, make("abs", q)))
    return make("call", x, _like(x, values, draws), to_apply=body)


STEPS: tuple[Grow, ...] = (
    binary, unary, binary_with_constant, binary_with_constant, spread, spread, reshaped, transposed, compare, select,
    reduced, sliced, convert, padded, concatenated, power, clamp, counted, dynamically_sliced, updated, scattered,
    scattered_rows,
    barred, reversed_, called)


def program(numbers: list[int], steps: int) -> Module:
    """The program that the numbers say: its results are the last values and some in between."""
    draws = Draws(numbers)
    values: list[Instruction] = [parameter(n, shape) for n, shape in enumerate(PARAMETERS)]
    for _ in range(steps):
        made = draws.pick(STEPS)(values, draws)
        if made is not None and made.array.size <= 200 and made.array.rank <= LARGEST_RANK:
            values.append(made)
    grown = values[len(PARAMETERS):]
    root = tuple_of([*grown[-3:], *grown[::5]] or values[:1])
    return Module("random", computation("main", tuple(values[:len(PARAMETERS)]), root))


programs = st.builds(program, st.lists(st.integers(0, 2**16), min_size=20, max_size=250), st.integers(1, 30))
