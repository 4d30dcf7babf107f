"""Values: the C++ statements that compute one element of an instruction at an index.

`Values.at(instruction, index)` is the whole of it: it returns the name of a constant that holds the element, and writes
the statements where the index's variables are known: once per (instruction, index), outside the loops that it does not
depend on. An operation that reads its operand elsewhere (slice, gather, pad) is nothing but another index.
"""
from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from hlofuse.codegen.element_reads import READS, EmitError, moved_index, splat_literal
from hlofuse.codegen.prelude import reserved_names
from hlofuse.codegen.scalar_expr import c_type, literal_expr, load_expr, scalar_expr
from hlofuse.fusion.plan import UNROLLED_REDUCTION
from hlofuse.hlo.index_map import ZERO, Condition, Index, Indices, Var, constant, linearize, to_c, var
from hlofuse.hlo.module import Computation, Instruction
from hlofuse.hlo.opcode import OPCODES, Kind

Key = tuple[Instruction, Indices]


@dataclass(frozen=True)
class Request:
    """One reading of a value: `caller` needs it (None: a form does), `guarded` where only one side of a branch does."""

    caller: Key | None
    key: Key
    guarded: bool


@dataclass
class Scope:
    """A block of statements in which `variables` are declared. Values are written in the innermost scope that their
    index needs, but never outside a `guard`: what a branch protects stays inside."""

    parent: Scope | None
    variables: frozenset[str] = frozenset()
    guard: bool = False
    lines: list[str] = field(default_factory=list)
    memo: dict[tuple[Instruction, Indices], str] = field(default_factory=dict)
    starts: dict[tuple[Instruction, Indices, int], str] = field(default_factory=dict)
    owned: frozenset[Instruction] = frozenset()   # values that change with this block: they are written in no outer one

    def chain(self) -> Iterator[Scope]:
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent


class Values:
    """Writes the elements of one computation's instructions into scopes."""

    def __init__(self, computation: Computation, index_type: str, names: Mapping[Instruction, str]) -> None:
        self.computation = computation
        self.index_type = index_type
        self.argument_names = names
        self.root = Scope(None)
        self.scope = self.root
        self.used: dict[str, int] = {}
        self.element_readers: dict[Instruction, Callable[[Indices], str]] = {}  # parameters read through a tile
        self.scheduled: set[Instruction] = set()
        self.reducers: dict[Computation, str] = {}
        self.breakpoints: dict[str, set[int]] | None = None
        self.reads: dict[Instruction, set[Indices]] = {}
        self.commented: set[Instruction] = set()
        self.sources: dict[Instruction, Callable[[Indices], str]] = {}    # what loops hold of their states
        self.aliases: dict[Instruction, Instruction] = {}    # what a loop reads of its state, and never changes
        self.positions: dict[Instruction, Index] = {}   # start indices that are known as functions of a time step
        self.contracted: dict[Instruction, int] = {}   # sums with an operand that is a product (contraction.py)
        self.requests: list[Request] | None = None      # kept while a loop asks what its steps need
        self.unrolled = 0    # inline reductions of at most so many elements are written out whatever they are
        self._callers: list[Key] = []

    # --- scopes and names -------------------------------------------------------------------------------------------

    def name(self, hint: str) -> str:
        base = _identifier(hint)
        count = self.used.get(base, 0)
        self.used[base] = count + 1
        return base if not count else self.name(f"{base}_{count}")

    @contextmanager
    def inside(self, variables: Sequence[str] = (), guard: bool = False) -> Iterator[Scope]:
        """A new innermost scope; the caller places its lines."""
        outer = self.scope
        self.scope = Scope(outer, frozenset(variables), guard)
        try:
            yield self.scope
        finally:
            self.scope = outer

    @contextmanager
    def dry_run(self) -> Iterator[None]:
        """Everything that is written inside is dropped again."""
        saved = [(s, list(s.lines), dict(s.memo), dict(s.starts), s.variables) for s in self.scope.chain()]
        used, reducers, commented = dict(self.used), dict(self.reducers), set(self.commented)
        reads = {p: set(r) for p, r in self.reads.items()}
        try:
            yield
        finally:
            for scope, lines, memo, starts, variables in saved:
                scope.lines, scope.memo, scope.starts, scope.variables = lines, memo, starts, variables
            self.used, self.reducers, self.reads, self.commented = used, reducers, reads, commented

    def _home(self, instruction: Instruction, index: Indices) -> Scope:
        """The outermost scope in which the element can be computed."""
        names = {v.name for i in index for v in i.variables}
        for scope in self.scope.chain():
            if scope.guard or scope.parent is None or names & scope.variables or instruction in scope.owned:
                return scope
        return self.root

    # --- elements ---------------------------------------------------------------------------------------------------

    def at(self, instruction: Instruction, index: Indices) -> str:
        """The C++ expression (a name or a literal) of one element."""
        while instruction in self.aliases:
            instruction = self.aliases[instruction]
        splat = splat_literal(instruction)
        if splat is not None:
            return literal_expr(splat, instruction.element_type)
        key = (instruction, index)
        if self.requests is not None:
            guarded = any(s.guard for s in self.scope.chain())
            self.requests.append(Request(self._callers[-1] if self._callers else None, key, guarded))
        for scope in self.scope.chain():
            if key in scope.memo:
                return scope.memo[key]
        home, outer = self._home(instruction, index), self.scope
        self.scope = home
        self._callers.append(key)
        try:
            text = self._compute(instruction, index)
        finally:
            self.scope = outer
            self._callers.pop()
        home.memo[key] = text
        return text

    def declare(self, instruction: Instruction, expression: str) -> str:
        name, comment = self.name(instruction.name or instruction.opcode), self.comment(instruction)
        self.scope.lines.append(f"const {c_type(instruction.element_type)} {name} = {expression};{comment}")
        return name

    def comment(self, instruction: Instruction) -> str:
        """The end of a line: which operation of the user's program this is; said once."""
        where = instruction.metadata
        if not where.source_line or instruction in self.commented:
            return ""
        self.commented.add(instruction)
        return f"  // {instruction.opcode}  {os.path.basename(where.source_file)}:{where.source_line}"

    def _compute(self, i: Instruction, index: Indices) -> str:
        if i in self.scheduled:
            raise EmitError(f"{i!r} is read at another place than where it is reduced")
        if i.opcode == "parameter":
            return self.parameter(i, index)
        if i in self.sources:
            return self.sources[i](index)
        rule = READS.get(i.opcode)
        if rule is not None:
            return rule(self, i, index)
        if i in self.contracted:
            return self.declare(i, self._fused_product(i, index))
        if OPCODES[i.opcode].kind is Kind.ELEMENTWISE:
            operands = [self.at(o, index if o.dims == i.dims else ()) for o in i.operands]
            return self.declare(i, scalar_expr(i, operands, [o.element_type for o in i.operands]))
        raise EmitError(f"no element rule for {i!r}")

    def _fused_product(self, i: Instruction, index: Indices) -> str:
        """a * b + c, a * b - c or c - a * b in one rounding."""
        number = self.contracted[i]
        product, place = i.operands[number], index
        while product.opcode != "multiply":
            product, place = product.operands[0], moved_index(product, place)
        a, b = (self.at(o, place) for o in product.operands)
        c = self.at(i.operands[1 - number], index)
        if i.opcode == "subtract":
            a, c = (f"-{a}", c) if number else (a, f"-{c}")
        return f"mul_add({a}, {b}, {c})"

    def parameter(self, i: Instruction, index: Indices) -> str:
        reader = self.element_readers.get(i)
        self.reads.setdefault(i, set()).add(index)
        place = reader(index) if reader else f"{self.argument_names[i]}[{to_c(linearize(index, i.dims))}]"
        name = self.name(f"{self.argument_names[i]}_value")
        self.scope.lines.append(f"const {c_type(i.element_type)} {name} = {load_expr(place, i.element_type)};")
        return name

    # --- branches ---------------------------------------------------------------------------------------------------

    def choose(self, i: Instruction, conditions: Sequence[Condition], then: Callable[[], str],
               otherwise: Callable[[], str]) -> str:
        """The value of `then` where all conditions hold, else of `otherwise`; only the taken side is computed."""
        open_ = [c for c in conditions if c.known is not True]
        if not open_:
            return then()
        if any(c.known is False for c in open_):
            return otherwise()
        self._note_breakpoints(open_)
        name, comment = self.name(i.name or i.opcode), self.comment(i)
        with self.inside(guard=True) as yes:
            yes.lines.append(f"{name} = {then()};")
        with self.inside(guard=True) as no:
            no.lines.append(f"{name} = {otherwise()};")
        lines = self.scope.lines
        lines.append(f"{c_type(i.element_type)} {name};{comment}")
        lines.append(f"if ({' && '.join(c.text() for c in open_)}) {{")
        lines.extend("  " + line for line in yes.lines)
        lines.append("} else {")
        lines.extend("  " + line for line in no.lines)
        lines.append("}")
        return name

    def _note_breakpoints(self, conditions: Sequence[Condition]) -> None:
        """Remembers where along a loop variable a branch changes, so that the loop can be cut there."""
        if self.breakpoints is None:
            return
        for c in conditions:
            if len(c.index.terms) == 1 and isinstance(c.index.terms[0][0], Var) and c.index.terms[0][1] == 1:
                variable, offset = c.index.terms[0][0], c.index.constant
                for bound in (c.low - offset, c.high - offset):
                    if variable.low < bound <= variable.high:
                        self.breakpoints.setdefault(variable.name, set()).add(bound)

    def clamped(self, operand: Instruction, index: Indices, high: int, hint: str) -> Index:
        """A runtime start index as a variable with range [0, high], as HLO clamps it."""
        if high <= 0:
            return ZERO
        known = self.positions.get(operand)
        if known is not None and 0 <= known.bounds[0] and known.bounds[1] <= high:
            return known
        literal = splat_literal(operand)
        if literal is not None:
            return constant(min(max(int(literal.item()), 0), high))
        key = (operand, index, high)
        for scope in self.scope.chain():
            if key in scope.starts:
                return var(scope.starts[key], 0, high)
        value = self.at(operand, index)
        home = self._home(operand, index)
        name = self.name(hint)
        home.lines.append(f"const {self.index_type} {name} = {_clamp_expr(operand, value, high, self.index_type)};")
        home.starts[key] = name
        home.variables = home.variables | {name}
        return var(name, 0, high)

    # --- reductions inside a thread ---------------------------------------------------------------------------------

    def inline_reduction(self, i: Instruction, index: Indices) -> list[str]:
        """A loop over a small reduction, one accumulator per operand; returns the accumulators' names."""
        operands, axes = i.operands[:len(i.operands) // 2], i.attrs["dimensions"]
        sizes = [operands[0].dims[d] for d in axes]
        return self.inline_fold(i, sizes, lambda p: ((), lambda: self._reduced_operands(operands, index, axes, p)),
                                UNROLLED_REDUCTION)

    def inline_fold(self, i: Instruction, sizes: Sequence[int],
                    element: Callable[[Indices], tuple[Sequence[Condition], Callable[[], list[str]]]],
                    written_out: int) -> list[str]:
        """Folds the elements at all positions below `sizes` in order, each where its conditions hold; at most
        `written_out` of them without a loop. Returns the accumulators' names."""
        n = len(i.operands) // 2
        reducer = self.reducer(i)
        accumulators = []
        for operand, init in zip(i.operands[:n], i.operands[n:], strict=True):
            name, start = self.name(i.name or "sum"), self.at(init, ())
            self.scope.lines.append(f"{c_type(operand.element_type)} {name} = {start};{self.comment(i)}")
            accumulators.append(name)

        def fold(position: Indices) -> None:
            conditions, values = element(position)
            open_ = [c for c in conditions if c.known is not True]
            if any(c.known is False for c in open_):
                return
            lines = self.scope.lines
            if not open_:
                lines.append(f"{reducer}({', '.join([*accumulators, *values()])});")
                return
            self._note_breakpoints(open_)
            with self.inside(guard=True) as taken:
                taken.lines.append(f"{reducer}({', '.join([*accumulators, *values()])});")
            lines.append(f"if ({' && '.join(c.text() for c in open_)}) {{")
            lines.extend("  " + line for line in taken.lines)
            lines.append("}")

        if math.prod(sizes) <= max(written_out, self.unrolled):
            for position in np.ndindex(*sizes):
                fold(tuple(constant(int(p)) for p in position))
            return accumulators
        names = [self.name("r") for _ in sizes]
        with self.inside(names) as body:
            fold(tuple(var(name, 0, size - 1) if size > 1 else constant(0)
                       for name, size in zip(names, sizes, strict=True)))
        for depth, (name, size) in enumerate(zip(names, sizes, strict=True)):
            self.scope.lines.append("  " * depth + f"for ({self.index_type} {name} = 0; {name} < {size}; {name}++) {{")
        self.scope.lines.extend("  " * len(names) + line for line in body.lines)
        for depth in reversed(range(len(names))):
            self.scope.lines.append("  " * depth + "}")
        return accumulators

    def _reduced_operands(self, operands: Sequence[Instruction], index: Indices, axes: Sequence[int],
                          places: Sequence[Index]) -> list[str]:
        full = insert(index, axes, places)
        return [self.at(o, full) for o in operands]

    def reducer(self, i: Instruction) -> str:
        """The name of the lambda that folds a reduction's values into its accumulators."""
        body: Computation = i.attrs["to_apply"]
        if body not in self.reducers:
            self.reducers[body] = self._write_reducer(body)
        return self.reducers[body]

    def _write_reducer(self, body: Computation) -> str:
        n = len(body.parameters) // 2
        types = [c_type(p.element_type) for p in body.parameters]
        letters = [f"{side}{k}" if n > 1 else side for side in "ab" for k in range(n)]
        names: dict[Instruction, str] = dict(zip(body.parameters, letters, strict=True))
        lines: list[str] = []
        for i in body.instructions:
            if i in names or i.opcode == "tuple":
                continue
            if i.opcode == "constant":
                names[i] = literal_expr(i.literal, i.element_type)
                continue
            text = scalar_expr(i, [names[o] for o in i.operands], [o.element_type for o in i.operands])
            if i.element_type in ("f16", "bf16"):
                text = scalar_expr_wide(i, [names[o] for o in i.operands])
            if i is body.root:
                names[i] = text
                continue
            names[i] = f"t{len(lines)}"
            lines.append(f"const {c_type(i.element_type)} {names[i]} = {text}; ")
        results = [names[o] for o in body.outputs]
        for k, result in enumerate(results):
            if result in letters[:k]:   # an accumulator that the stores before this one change
                results[k] = f"t{len(lines)}"
                lines.append(f"const {types[k]} {results[k]} = {result}; ")
        stores = "".join(f"{a} = {r}; " for a, r in zip(letters[:n], results, strict=True) if a != r)
        parameters = ", ".join([f"{types[k]}& {letters[k]}" for k in range(n)] +
                               [f"const {types[n + k]} {letters[n + k]}" for k in range(n)])
        single = body.root.opcode if n == 1 and len(body.instructions) == 3 else "combine"
        name = self.name(f"reduce_{single}")
        self.root.lines.insert(0, f"const auto {name} = []({parameters}) {{ {''.join(lines)}{stores}}};")
        return name


@functools.lru_cache(maxsize=16384)
def _identifier(hint: str) -> str:
    """The C identifier that is closest to a name."""
    base = re.sub(r"\W+", "_", hint).strip("_") or "value"
    base = base if not base[0].isdigit() else "v" + base
    return base if base not in _RESERVED else base + "_"


def _clamp_expr(operand: Instruction, value: str, high: int, index_type: str) -> str:
    """`value` clamped to [0, high], in the index type."""
    if operand.element_type.startswith("u"):
        return f"{value} > {high}u ? {high} : ({index_type}){value}"
    return f"{value} < 0 ? 0 : {value} > {high} ? {high} : ({index_type}){value}"


def scalar_expr_wide(i: Instruction, operands: Sequence[str]) -> str:
    """The operation in float without rounding to a 16-bit type: accumulators keep their bits."""
    wide = Instruction(i.opcode, i.array.with_type("f32"), i.operands, i.attrs)
    return scalar_expr(wide, list(operands), ["f32" if o.element_type in ("f16", "bf16") else o.element_type
                                              for o in i.operands])


def insert(index: Indices, axes: Sequence[int], places: Sequence[Index]) -> Indices:
    """The operand's index from a reduction's: `places` at the reduced dimensions `axes`."""
    full = list(index)
    for axis, place in sorted(zip(axes, places, strict=True), key=lambda pair: pair[0]):
        full.insert(axis, place)
    return tuple(full)


# With what the forms declare themselves.
_RESERVED = reserved_names() | {"l", "begin", "end", "count", "first", "last", "row", "column", "rows", "columns"}

__all__ = ["EmitError", "Scope", "Values"]
