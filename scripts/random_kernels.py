"""Random programs for calibrating and testing kernels: expression graphs of varied width, depth, type, form and index.

`random_module(seed)` is the same module for the same seed. Nothing here looks at what a kernel will be.
"""
from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from hlofuse.hlo.builder import broadcast, computation, constant, convert, full, make, parameter, tuple_of
from hlofuse.hlo.module import Instruction, Module
from hlofuse.hlo.shape import Shape

_UNARY = {
    "f": ("negate", "abs", "sqrt", "rsqrt", "exponential", "log", "tanh", "logistic", "erf", "floor", "sign", "sine",
          "cosine", "exponential-minus-one", "log-plus-one", "cbrt", "atanh", "tan"),
    "i": ("negate", "abs", "not", "popcnt", "sign"),
    "c": ("negate", "exponential", "conjugate", "tanh"),
}
_BINARY = {
    "f": ("add", "multiply", "subtract", "maximum", "minimum", "divide", "power", "atan2", "remainder"),
    "i": ("add", "multiply", "subtract", "maximum", "minimum", "and", "or", "xor", "shift-left", "divide", "remainder"),
    "c": ("add", "multiply", "subtract", "divide"),
}
_CHEAP = {"f": 5, "i": 9, "c": 3}      # so many of the binary ones, from the left, are the usual case
_TYPES = ("f32",) * 14 + ("bf16", "bf16", "f16", "f64", "s32", "u32", "s8", "s64", "c64")


def _kind(element_type: str) -> str:
    return {"c": "c", "f": "f", "b": "f"}.get(element_type[0], "i")


class _Graph:
    """A growing list of values of one shape and type."""

    def __init__(self, rng: random.Random, dims: tuple[int, ...], element_type: str) -> None:
        self.rng, self.dims, self.element_type = rng, dims, element_type
        self.parameters: list[Instruction] = []
        self.values: list[Instruction] = []
        self.window = rng.choice((1, 2, 3, 4, 6, 10, 16, 24))
        self.special = rng.choice((0.0, 0.1, 0.25, 0.5))
        self.costly = rng.choice((0.0, 0.05, 0.2))

    def parameter(self, dims: Sequence[int], element_type: str | None = None) -> Instruction:
        p = parameter(len(self.parameters), Shape(element_type or self.element_type, tuple(dims)))
        self.parameters.append(p)
        return p

    def input(self) -> Instruction:
        """An operand in the domain's shape: as it is, broadcast, shifted, padded, reversed, gathered or converted."""
        rng, dims = self.rng, self.dims
        ways = ("plain", "vector", "column", "scalar", "slice", "pad", "reverse", "convert", "iota", "gather")
        way = rng.choices(ways, (60, 10, 5, 8, 5, 2, 2, 6, 3, 3))[0]
        if way == "vector":
            return broadcast(self.parameter(dims[-1:]), dims, (len(dims) - 1,))
        if way == "column":
            return broadcast(self.parameter(dims[:1]), dims, (0,))
        if way == "scalar":
            return broadcast(self.parameter(()), dims)
        if way == "slice":
            start = [rng.choice((0, 1, 2)) for _ in dims]
            large = self.parameter([n + s + 1 for n, s in zip(dims, start, strict=True)])
            return make("slice", large, slice=tuple((s, s + n, 1) for n, s in zip(dims, start, strict=True)))
        if way == "pad" and dims[-1] > 2:
            small = self.parameter((*dims[:-1], dims[-1] - 2))
            edges = tuple((0, 0, 0) for _ in dims[:-1]) + ((1, 1, 0),)
            return make("pad", small, constant(np.zeros((), Shape(self.element_type).dtype)), padding=edges)
        if way == "reverse":
            return make("reverse", self.parameter(dims), dimensions=(len(dims) - 1,))
        if way == "convert" and self.element_type not in ("c64", "s64"):
            return convert(self.parameter(dims, rng.choice(("bf16", "s32", "s8", "f16"))), self.element_type)
        if way == "iota" and self.element_type != "c64":
            return make("iota", shape=Shape(self.element_type, dims), iota_dimension=rng.randrange(len(dims)))
        if way == "gather" and len(dims) == 2:
            table, rows = self.parameter((1000, dims[1])), self.parameter((dims[0], 1), "s32")
            return make("gather", table, rows, shape=Shape(self.element_type, dims), offset_dims=(1,),
                        collapsed_slice_dims=(0,), start_index_map=(0,), index_vector_dim=1, slice_sizes=(1, dims[1]),
                        operand_batching_dims=(), start_indices_batching_dims=(), indices_are_sorted=False)
        return self.parameter(dims)

    def pick(self) -> Instruction:
        return self.values[max(0, len(self.values) - 1 - self.rng.randrange(self.window))]

    def grow(self, count: int) -> None:
        rng, kind = self.rng, _kind(self.element_type)
        for _ in range(count):
            if rng.random() < 0.1 and self.element_type not in ("c64",):
                chosen = make("compare", self.pick(), self.pick(), direction=rng.choice(("LT", "GE")))
                self.values.append(make("select", chosen, self.pick(), self.pick()))
            elif rng.random() < self.special:
                opcode = rng.choice(_UNARY[kind])
                if opcode == "conjugate":
                    opcode = "negate"
                self.values.append(make(opcode, self.pick()))
            elif rng.random() < 0.2:
                literal = full(np.asarray(rng.choice((2, 3, 5)), Shape(self.element_type).dtype), self.values[0].array)
                self.values.append(make(rng.choice(("add", "multiply")), self.pick(), literal))
            else:
                names = _BINARY[kind]
                opcode = rng.choice(names if rng.random() < self.costly else names[:_CHEAP[kind]])
                self.values.append(make(opcode, self.pick(), self.pick()))

    def reduce(self, value: Instruction, axes: tuple[int, ...]) -> Instruction:
        opcode = self.rng.choice(("add", "add", "maximum") if self.element_type != "c64" else ("add",))
        shape = Shape(self.element_type)
        a, b = parameter(0, shape, "a"), parameter(1, shape, "b")
        body = computation(f"reduce_{opcode}", (a, b), make(opcode, a, b))
        start = np.zeros((), shape.dtype)
        return make("reduce", value, constant(start), dimensions=axes, to_apply=body)

    def spread(self, value: Instruction, axes: tuple[int, ...]) -> Instruction:
        return broadcast(value, self.dims, tuple(d for d in range(len(self.dims)) if d not in axes))


def random_module(seed: int) -> Module:
    """One program with one domain; its kind (loop, row, column, full, transpose) is drawn too."""
    rng = random.Random(seed)
    kind = rng.choices(("loop", "row", "column", "full", "transpose"), (42, 25, 18, 8, 7))[0]
    graph = _Graph(rng, _dims(rng, kind), rng.choice(_TYPES))
    graph.values.append(graph.parameter(graph.dims))
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3, 5, 7))):
        graph.values.append(graph.input())
    if kind == "transpose":
        backwards = tuple(reversed(range(len(graph.dims))))
        graph.values.append(make("transpose", graph.parameter(graph.dims[::-1]), dimensions=backwards))
    graph.grow(rng.choice((1, 2, 4, 8, 12, 20, 30, 50)))
    roots = _REDUCTIONS[kind](graph)
    root = roots[0] if len(roots) == 1 else tuple_of(roots)
    return Module(f"random_{seed}", computation("main", graph.parameters, root))


def _dims(rng: random.Random, kind: str) -> tuple[int, ...]:
    if kind == "loop":
        return rng.choice(((1 << 20,), (4096, 1024), (1000003,), (511, 1023), (64, 32, 512), (300, 77), (8, 100, 60),
                           (128, 768)))
    if kind == "row":
        return (rng.choice((64, 3000, 20000)), rng.choice((40, 77, 128, 256, 768, 1000, 1024, 2048, 4096, 16384)))
    if kind == "column":
        return rng.choice(((4096, 256), (100000, 64), (1000, 4096), (513, 77), (40, 1 << 18), (100, 5000),
                           (2000, 1 << 18)))
    if kind == "full":
        return rng.choice(((1 << 20,), (2048, 1000), (1000003,)))
    return rng.choice(((1024, 512), (1000, 77), (16, 128, 96)))


def _elementwise(graph: _Graph) -> list[Instruction]:
    count = graph.rng.choice((1, 1, 1, 2, 3))
    return list(dict.fromkeys(graph.values[-count:]))


def _rows(graph: _Graph, axes: tuple[int, ...]) -> list[Instruction]:
    """Reductions over `axes`, each followed by more values that read it; or their results alone."""
    rng, roots = graph.rng, []
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        result = graph.reduce(graph.pick(), axes)
        if rng.random() < 0.3:
            roots.append(result)
        graph.values.append(graph.spread(result, axes))
        if rng.random() < 0.4:
            graph.values.append(graph.input())
        graph.grow(rng.choice((1, 2, 4, 8, 16)))
    if rng.random() < 0.7:
        roots.append(graph.values[-1])
    return roots or [graph.reduce(graph.values[-1], axes)]


def _sums(axes_of: Callable[[_Graph], tuple[int, ...]]) -> Callable[[_Graph], list[Instruction]]:
    def roots(graph: _Graph) -> list[Instruction]:
        count = graph.rng.choice((1, 1, 2, 3))
        return [graph.reduce(v, axes_of(graph)) for v in dict.fromkeys(graph.pick() for _ in range(count))]
    return roots


_REDUCTIONS: dict[str, Callable[[_Graph], list[Instruction]]] = {
    "loop": _elementwise,
    "transpose": _elementwise,
    "row": lambda graph: _rows(graph, (len(graph.dims) - 1,)),
    "column": _sums(lambda graph: (0,)),
    "full": _sums(lambda graph: tuple(range(len(graph.dims)))),
}
