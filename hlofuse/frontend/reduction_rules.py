"""Import rules of reductions: over axes, over windows, cumulative, and the index of an extreme value."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hlofuse.frontend import jaxpr_compat as compat
from hlofuse.frontend.scope import Rule, Scope
from hlofuse.frontend.structure_rules import extremum_combiner
from hlofuse.hlo.module import Computation, Instruction, WindowDimension
from hlofuse.hlo.shape import COMPLEX, FLOATS, TupleShape, dtype_of


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(int(v) for v in values)


def identity_value(opcode: str, element_type: str) -> Any:
    """What the operation leaves alone: the initial value of a reduction."""
    if opcode in ("add", "or", "xor"):
        return 0
    if opcode == "multiply":
        return 1
    if opcode == "and":
        return -1 if element_type[0] == "s" else highest(element_type)
    return lowest(element_type) if opcode == "maximum" else highest(element_type)


def lowest(element_type: str) -> Any:
    if element_type == "pred":
        return False
    if element_type in FLOATS or element_type in COMPLEX:
        return -np.inf
    if element_type[0] == "f":
        return _finite_limit(element_type, "min")
    return np.iinfo(dtype_of(element_type)).min


def highest(element_type: str) -> Any:
    if element_type == "pred":
        return True
    if element_type in FLOATS or element_type in COMPLEX:
        return np.inf
    if element_type[0] == "f":
        return _finite_limit(element_type, "max")
    return np.iinfo(dtype_of(element_type)).max


def _finite_limit(element_type: str, which: str) -> Any:
    import ml_dtypes

    info = ml_dtypes.finfo(dtype_of(element_type))
    infinite = np.array(np.inf if which == "max" else -np.inf).astype(dtype_of(element_type))
    return infinite if np.isinf(infinite.astype(np.float32)) else getattr(info, which)


def combiner(scope: Scope, opcode: str, element_type: str) -> Computation:
    if element_type in COMPLEX and opcode in ("maximum", "minimum"):
        return extremum_combiner(scope, opcode, element_type)
    return scope.combiner(opcode, element_type)


def reduce_rule(opcode: str) -> Rule:
    def rule(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
        x = operands[0]
        init = scope.scalar(identity_value(opcode, x.element_type), x.element_type)
        return [scope.reduce(x, init, _ints(eqn.params["axes"]), combiner(scope, opcode, x.element_type))]

    return rule


def collective_rule(opcode: str) -> Rule:
    """psum and its like over axes of the array, which is what vmap makes of an axis name; else JAX runs it."""
    over_axes = reduce_rule(opcode)

    def rule(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction] | None:
        axes = eqn.params["axes"]
        if len(operands) != 1 or not all(isinstance(axis, int) for axis in axes) or eqn.params["axis_index_groups"]:
            return None
        return list(over_axes(scope, eqn, operands) or ()) if axes else operands

    return rule


def reduce(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    """`lax.reduce` with a computation of the user's."""
    to_apply = scope.scalar_jaxpr(eqn.params["jaxpr"], "reducer", eqn.params.get("consts"))
    return _variadic(scope, operands, _ints(eqn.params["dimensions"]), to_apply)


def _variadic(scope: Scope, operands: Sequence[Instruction], axes: Sequence[int],
              to_apply: Computation) -> list[Instruction]:
    """Operands and then as many initial values."""
    arrays = operands[:len(operands) // 2]
    shapes = tuple(x.array.with_dims([d for axis, d in enumerate(x.dims) if axis not in axes]) for x in arrays)
    dimensions = tuple(sorted(axes))
    if len(arrays) == 1:
        return [scope.emit("reduce", *operands, shape=shapes[0], dimensions=dimensions, to_apply=to_apply)]
    return scope.elements(
        scope.emit("reduce", *operands, shape=TupleShape(shapes), dimensions=dimensions, to_apply=to_apply))


def argument_rule(direction: str) -> Rule:
    """The first index of the largest ("GT") or smallest ("LT") value; the first NaN wins over everything."""

    def rule(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
        x = operands[0]
        (axis,) = _ints(eqn.params["axes"])
        index_type = compat.physical_shape(eqn.outvars[0].aval).element_type
        positions = scope.iota(x.array.with_type(index_type), axis)
        start = lowest(x.element_type) if direction == "GT" else highest(x.element_type)
        inits = scope.scalar(start, x.element_type), scope.scalar(0, index_type)
        types = (x.element_type, index_type) * 2
        to_apply = scope.scalar_computation(f"argument_{direction}", types,
                                            lambda inner, values: _better(inner, direction, *values))
        return [_variadic(scope, (x, positions, *inits), (axis,), to_apply)[1]]

    return rule


def _better(scope: Scope, direction: str, value: Instruction, index: Instruction, other: Instruction,
            other_index: Instruction) -> Instruction:
    """Of two (value, index) pairs the one with the better value; of equal ones the lower index."""
    wins = scope.binary("or", scope.compare(direction, value, other), scope.compare("NE", value, value))
    ties = scope.binary("and", scope.compare("EQ", value, other), scope.compare("LT", index, other_index))
    return scope.tuple([scope.select(wins, value, other),
                        scope.select(scope.binary("or", wins, ties), index, other_index)])


# --- windows ------------------------------------------------------------------------------------------------------

def _window(params: dict[str, Any]) -> tuple[WindowDimension, ...]:
    sizes = _ints(params["window_dimensions"])
    ones = (1,) * len(sizes)
    return tuple(
        WindowDimension(size, stride, int(low), int(high), base, dilation)
        for size, stride, (low, high), base, dilation in zip(
            sizes, _ints(params["window_strides"]), params["padding"], _ints(params.get("base_dilation", ones)),
            _ints(params.get("window_dilation", ones)), strict=True))


def reduce_window_rule(opcode: str) -> Rule:
    def rule(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
        x = operands[0]
        init = scope.scalar(identity_value(opcode, x.element_type), x.element_type)
        return [scope.emit("reduce-window", x, init, shape=compat.physical_shape(eqn.outvars[0].aval),
                           window=_window(eqn.params), to_apply=combiner(scope, opcode, x.element_type))]

    return rule


def reduce_window(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    """`lax.reduce_window` with a computation of the user's."""
    to_apply = scope.scalar_jaxpr(eqn.params["jaxpr"], "reducer", eqn.params.get("consts"))
    return _windowed(scope, eqn, operands, to_apply)


def _windowed(scope: Scope, eqn: Any, operands: Sequence[Instruction], to_apply: Computation) -> list[Instruction]:
    dims = tuple(eqn.outvars[0].aval.shape)
    shapes = tuple(x.array.with_dims(dims) for x in operands[:len(operands) // 2])
    window = _window(eqn.params)
    if len(shapes) == 1:
        return [scope.emit("reduce-window", *operands, shape=shapes[0], window=window, to_apply=to_apply)]
    return scope.elements(
        scope.emit("reduce-window", *operands, shape=TupleShape(shapes), window=window, to_apply=to_apply))


def select_and_gather_add(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    """Of every window the tangent at the selected position: a window reduction of (value, tangent) pairs."""
    tangents, x = operands
    direction = "GE" if eqn.params["select_prim"].name == "ge" else "LE"
    inits = (scope.scalar(-np.inf if direction == "GE" else np.inf, x.element_type),
             scope.scalar(0, tangents.element_type))
    types = (x.element_type, tangents.element_type) * 2

    def body(inner: Scope, values: list[Instruction]) -> Instruction:
        which = inner.compare(direction, values[0], values[2])
        return inner.tuple([inner.select(which, values[0], values[2]), inner.select(which, values[1], values[3])])

    to_apply = scope.scalar_computation(f"select_{direction}", types, body)
    return [_windowed(scope, eqn, (x, tangents, *inits), to_apply)[1]]


def select_and_scatter_add(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    """Adds each source element at the selected position of its window. Padding is explicit, since XLA's CPU and GPU
    compilers take windows without padding only."""
    source, x = operands
    direction = "GE" if eqn.params["select_prim"].name == "ge" else "LE"
    margins = tuple((int(low), int(high), 0) for low, high in eqn.params["padding"])
    dims = tuple(d + low + high for d, (low, high, _) in zip(x.dims, margins, strict=True))
    least = scope.scalar(lowest(x.element_type) if direction == "GE" else highest(x.element_type), x.element_type)
    padded = scope.emit("pad", x, least, shape=x.array.with_dims(dims), padding=margins) if dims != x.dims else x
    window = tuple(WindowDimension(size, stride) for size, stride in zip(
        _ints(eqn.params["window_dimensions"]), _ints(eqn.params["window_strides"]), strict=True))
    select = scope.scalar_computation(f"select_{direction}_only", (x.element_type,) * 2,
                                      lambda inner, ab: inner.compare(direction, ab[0], ab[1]))
    scattered = scope.emit("select-and-scatter", padded, source, scope.scalar(0, x.element_type), shape=padded.shape,
                           window=window, select=select, scatter=scope.combiner("add", x.element_type))
    starts = [low for low, _, _ in margins]
    return [scope.slice(scattered, starts, [low + d for low, d in zip(starts, x.dims, strict=True)])]


def cumulative_rule(opcode: str) -> Rule:
    """A window that ends (or, reversed, begins) at every element and holds all before it: XLA's own pattern for a
    cumulative operation, which it and hlofuse recognize by that shape."""

    def rule(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
        x, axis, reverse = operands[0], int(eqn.params["axis"]), bool(eqn.params["reverse"])
        length = x.dims[axis]
        if length <= 1 or not x.array.size:
            return [x]
        if opcode == "logaddexp":
            start: Any = -np.inf
            to_apply = scope.scalar_computation(opcode, (x.element_type,) * 2, lambda inner, ab: logaddexp(inner, *ab))
        else:
            start, to_apply = identity_value(opcode, x.element_type), combiner(scope, opcode, x.element_type)
        window = [WindowDimension(1)] * x.array.rank
        window[axis] = WindowDimension(length, 1, 0 if reverse else length - 1, length - 1 if reverse else 0)
        return [scope.emit("reduce-window", x, scope.scalar(start, x.element_type), shape=x.shape,
                           window=tuple(window), to_apply=to_apply)]

    return rule


def logaddexp(scope: Scope, x: Instruction, y: Instruction) -> Instruction:
    """max + log1p(exp(-|x - y|)); the sum where that difference is NaN, as for equal infinities."""
    if x.element_type in COMPLEX:
        return _complex_logaddexp(scope, x, y)
    difference = scope.sub(x, y)
    tail = scope.unary("exponential", scope.unary("negate", scope.unary("abs", difference)))
    result = scope.add(scope.binary("maximum", x, y), scope.unary("log-plus-one", tail))
    return scope.select(scope.compare("NE", difference, difference), scope.add(x, y), result)


def _complex_logaddexp(scope: Scope, x: Instruction, y: Instruction) -> Instruction:
    """The same with the larger by real part in front, the imaginary part brought to (-π, π]."""
    x_first = scope.compare("GE", scope.real(x), scope.real(y))
    larger, smaller = scope.select(x_first, x, y), scope.select(x_first, y, x)
    difference = scope.sub(smaller, larger)
    result = scope.add(larger, scope.unary("log-plus-one", scope.unary("exponential", difference)))
    result = scope.select(scope.compare("NE", difference, difference), scope.add(x, y), result)
    angle = scope.imag(result)
    wrapped = scope.binary("atan2", scope.unary("sine", angle), scope.unary("cosine", angle))
    return scope.complex(scope.real(result), wrapped)


_REDUCTIONS = {"sum": "add", "prod": "multiply", "max": "maximum", "min": "minimum", "and": "and", "or": "or",
               "xor": "xor"}
_CUMULATIVE = {"cumsum": "add", "cumprod": "multiply", "cummax": "maximum", "cummin": "minimum",
               "cumlogsumexp": "logaddexp"}

RULES: dict[str, Rule] = {
    **{f"reduce_{name}": reduce_rule(opcode) for name, opcode in _REDUCTIONS.items()},
    **{f"reduce_window_{name}": reduce_window_rule(_REDUCTIONS[name]) for name in ("sum", "max", "min")},
    **{name: cumulative_rule(opcode) for name, opcode in _CUMULATIVE.items()},
    "psum": collective_rule("add"),
    "pmax": collective_rule("maximum"),
    "pmin": collective_rule("minimum"),
    "reduce": reduce,
    "reduce_window": reduce_window,
    "argmax": argument_rule("GT"),
    "argmin": argument_rule("LT"),
    "select_and_gather_add": select_and_gather_add,
    "select_and_scatter_add": select_and_scatter_add,
}
