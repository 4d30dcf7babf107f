"""The computation that is being imported, and the module around it.

A `Scope` is one computation under construction: it evaluates jaxprs into instructions by the rule table. The `Importer`
holds what the scopes of one module share: rules, computations already made, and the inlining budget. HLO computations
are closed, so arrays that a nested jaxpr closes over are passed down as operands ("captures").
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np

from hlofuse.frontend import jaxpr_compat as compat
from hlofuse.frontend.emitter import Emitter
from hlofuse.hlo.builder import computation, make, parameter
from hlofuse.hlo.module import Computation, Instruction, Metadata
from hlofuse.hlo.shape import AnyShape, Shape, TupleShape, dtype_of
from hlofuse.hlo.traverse import with_changes

# A rule makes an equation's results from its operands; None means that it cannot, and the equation becomes opaque.
Rule = Callable[["Scope", Any, list[Instruction]], "Sequence[Instruction] | None"]

# Equations that may be imported more than once because a jaxpr that is called several times is inlined at each call.
DUPLICATION_BUDGET = 20_000
ALWAYS_INLINED = 32  # equations

# Parameters of call-like equations under which their jaxpr is found.
_CALLED_UNDER = ("jaxpr", "call_jaxpr", "call", "fun_jaxpr")
REMATS = ("remat", "remat2", "checkpoint")
CALLS = ("jit", "pjit", "closed_call", "core_call", "call", "eval_jaxpr", "custom_jvp_call", "custom_vjp_call",
         "custom_vjp_call_jaxpr", "custom_vmap_call", "composite", "hlofuse")


def called_jaxpr(eqn: Any) -> Any:
    """The jaxpr that a call-like equation evaluates."""
    for key in _CALLED_UNDER:
        if key in eqn.params:
            return eqn.params[key]
    return None


class Importer:
    """What all computations of one module share."""

    def __init__(self, rules: Mapping[str, Rule], platform: str | None = None) -> None:
        self.rules = rules
        self.platform = platform
        self.budget = DUPLICATION_BUDGET
        self._sizes: dict[int, int] = {}
        self._captures: dict[int, tuple[Any, ...]] = {}
        self._inlined: set[int] = set()
        self._computations: dict[Any, Computation] = {}
        self._kept: list[Any] = []  # what the dictionaries above know by id must live as long as they do

    def computation(self, key: Any, build: Callable[[], Computation]) -> Computation:
        """The computation under `key`, built once."""
        if key not in self._computations:
            self._computations[key] = build()
        return self._computations[key]

    def keep(self, item: Any) -> int:
        """The identity of an object that keys of this importer mention."""
        self._kept.append(item)
        return id(item)

    def size(self, jaxpr: Any) -> int:
        """Equations of a jaxpr with all calls inlined."""
        body, inlined = compat.open_jaxpr(jaxpr), CALLS + REMATS
        if id(body) not in self._sizes:
            self.keep(body)
            self._sizes[id(body)] = sum(
                self.size(called_jaxpr(eqn)) if eqn.primitive.name in inlined and called_jaxpr(eqn) is not None else 1
                for eqn in body.eqns)
        return self._sizes[id(body)]

    def may_inline(self, jaxpr: Any) -> bool:
        """Whether to inline this call; counts what a repeated one costs."""
        body = compat.open_jaxpr(jaxpr)
        size = self.size(jaxpr)
        if id(body) not in self._inlined:
            self._inlined.add(id(body))
            return True
        if size <= ALWAYS_INLINED:
            return True
        if size > self.budget:
            return False
        self.budget -= size
        return True

    def captures(self, jaxpr: Any) -> tuple[Any, ...]:
        """The arrays that a jaxpr, or one nested in it, closes over, each once."""
        body = compat.open_jaxpr(jaxpr)
        if id(jaxpr) in self._captures:
            return self._captures[id(jaxpr)]
        found: dict[int, Any] = {id(c): c for c in compat.consts_of(jaxpr) if is_captured(c)}
        for eqn in body.eqns:
            for atom in eqn.invars:
                if isinstance(atom, compat.Literal) and is_captured(atom.val):
                    found[id(atom.val)] = atom.val
            for value in eqn.params.values():
                for nested in value if isinstance(value, tuple | list) else (value,):
                    if hasattr(compat.open_jaxpr(nested), "eqns"):
                        found.update((id(c), c) for c in self.captures(nested))
        for atom in body.outvars:
            if isinstance(atom, compat.Literal) and is_captured(atom.val):
                found[id(atom.val)] = atom.val
        self.keep(jaxpr)
        self._captures[id(jaxpr)] = tuple(found.values())
        return self._captures[id(jaxpr)]


def is_captured(value: Any) -> bool:
    """Whether a closed-over value is an operand of the program rather than a literal in it."""
    return compat.is_tracer(value) or np.ndim(value) > 0 or compat.physical_value(value) is not value


class Scope(Emitter):
    """One computation under construction."""

    def __init__(self, importer: Importer, captured: Sequence[Any] = (), values: Sequence[Instruction] = ()) -> None:
        super().__init__()
        self.importer = importer
        self.effects: list[Instruction] = []
        self._captured = {id(c): v for c, v in zip(captured, values, strict=True)}
        self._path: tuple[str, ...] = ()
        self._origin: Metadata | None = None
        self._name_stacks: dict[Any, str] = {}

    # --- jaxprs ----------------------------------------------------------------------------------------------------

    def evaluate(self, jaxpr: Any, arguments: Sequence[Instruction], consts: Sequence[Any] | None = None,
                 name: str = "") -> list[Instruction]:
        """The results of a jaxpr, its equations imported into this computation. `consts` are for an open jaxpr."""
        body = compat.open_jaxpr(jaxpr)
        env: dict[Any, Instruction] = dict(zip(body.invars, arguments, strict=True))
        values = compat.consts_of(jaxpr) if consts is None else consts
        for var, value in zip(body.constvars, values, strict=True):
            env[var] = value if isinstance(value, Instruction) else self.value(value, var.aval)
        rules = self.importer.rules
        with self._within(name):
            for eqn in body.eqns:
                operands = [self.value(a.val, a.aval) if isinstance(a, compat.Literal) else env[a] for a in eqn.invars]
                self.metadata = self._metadata_of(eqn)
                rule = rules.get(eqn.primitive.name)
                results = rule(self, eqn, operands) if rule is not None else None
                if results is None:
                    results = self.opaque(eqn, operands)
                for var, result in zip(eqn.outvars, results, strict=True):
                    if result.shape != compat.physical_shape(var.aval):
                        self._refuse(eqn, f"the rule made {result.shape}, JAX says {var.aval}")
                    env[var] = result
            return [self.value(a.val, a.aval) if isinstance(a, compat.Literal) else env[a] for a in body.outvars]

    def evaluate_here(self, jaxpr: Any, arguments: Sequence[Instruction]) -> list[Instruction]:
        """As `evaluate`, for a jaxpr that is no part of the user's program: it all comes from the current equation."""
        outer, self._origin = self._origin, self.metadata
        try:
            return self.evaluate(jaxpr, arguments)
        finally:
            self._origin = outer

    def inline_or_call(self, jaxpr: Any, operands: Sequence[Instruction], name: str = "") -> list[Instruction]:
        """A call's results: inlined within the budget, else by `call` of a computation that all such calls share."""
        if self.importer.may_inline(jaxpr):
            return self.evaluate(jaxpr, operands, name=name)
        callee = self.flat_computation(jaxpr, name or "called")
        call = self.emit("call", *operands, *self.captured_by(jaxpr), shape=callee.root.shape, to_apply=callee)
        if callee.effects:
            self.effects.append(call)
        return self.elements(call)

    def captured_by(self, jaxpr: Any) -> list[Instruction]:
        """The values here of what a nested jaxpr closes over: trailing operands of whatever calls it."""
        return [self.captured(c) for c in self.importer.captures(jaxpr)]

    def flat_computation(self, jaxpr: Any, name: str) -> Computation:
        """A jaxpr as a computation with one parameter per argument, then one per capture; the root is a tuple."""

        def build() -> Computation:
            shapes = [compat.physical_shape(v.aval) for v in compat.open_jaxpr(jaxpr).invars]
            shapes += [compat.physical_shape_of_value(c) for c in self.importer.captures(jaxpr)]
            return self.build_flat(name, shapes, self.importer.captures(jaxpr),
                                   lambda scope, values: scope.tuple(scope.evaluate(jaxpr, values)))

        return self.importer.computation(("flat", self.importer.keep(jaxpr)), build)

    def build_flat(self, name: str, shapes: Sequence[AnyShape], captured: Sequence[Any],
                   body: Callable[[Scope, list[Instruction]], Instruction]) -> Computation:
        """A new computation with parameters of `shapes`, the last of which hold `captured`."""
        parameters = [parameter(number, shape) for number, shape in enumerate(shapes)]
        split = len(parameters) - len(captured)
        scope = Scope(self.importer, captured, parameters[split:])
        root = body(scope, parameters[:split])
        return computation(name, parameters, root, scope.effects)

    def build_on_tuple(self, name: str, shapes: Sequence[Shape], captured: Sequence[Any], first_captured: int,
                       body: Callable[[Scope, list[Instruction]], Instruction]) -> Computation:
        """A new computation with one tuple parameter, whose elements from `first_captured` on hold `captured`."""
        state = parameter(0, TupleShape(tuple(shapes)), "state")
        values = [make("get-tuple-element", state, shape=shape, index=index) for index, shape in enumerate(shapes)]
        scope = Scope(self.importer, captured, values[first_captured:first_captured + len(captured)])
        root = body(scope, values)
        return computation(name, (state,), root, scope.effects)

    def scalar_computation(self, name: str, element_types: Sequence[str],
                           body: Callable[[Scope, list[Instruction]], Instruction]) -> Computation:
        """What reduce, scatter and sort apply: scalars to a scalar or a tuple of them. Shared by name and types."""
        key = ("scalar", name, tuple(element_types))
        return self.importer.computation(
            key, lambda: self.build_flat(name, [Shape(t) for t in element_types], (), body))

    def scalar_jaxpr(self, jaxpr: Any, name: str, consts: Sequence[Any] | None = None) -> Computation:
        """A jaxpr on scalars as such a computation; the root is a tuple where it has several results."""

        def body(scope: Scope, values: list[Instruction]) -> Instruction:
            results = scope.evaluate(jaxpr, values, consts)
            return results[0] if len(results) == 1 else scope.tuple(results)

        shapes = [compat.physical_shape(v.aval) for v in compat.open_jaxpr(jaxpr).invars]
        return self.importer.computation(("jaxpr", self.importer.keep(jaxpr)),
                                         lambda: self.build_flat(name, shapes, (), body))

    def combiner(self, opcode: str, element_type: str) -> Computation:
        """`(a, b) -> opcode(a, b)` on scalars."""
        return self.scalar_computation(opcode, (element_type,) * 2, lambda scope, ab: scope.binary(opcode, *ab))

    # --- values ----------------------------------------------------------------------------------------------------

    def value(self, value: Any, aval: Any) -> Instruction:
        """What a closed-over value or literal is here: an operand if it is an array, else a constant."""
        if id(value) in self._captured:
            return self._captured[id(value)]
        shape = compat.physical_shape(aval)
        return self.literal(np.asarray(compat.physical_value(value), dtype_of(shape.element_type)), shape.element_type)

    def captured(self, value: Any) -> Instruction:
        return self._captured[id(value)]

    # --- equations without a rule ----------------------------------------------------------------------------------

    def opaque(self, eqn: Any, operands: Sequence[Instruction]) -> list[Instruction]:
        """The equation as an instruction that JAX runs. Its operands are the equation's variables, each once."""
        variables = {atom: operand for atom, operand in zip(eqn.invars, operands, strict=True)
                     if not isinstance(atom, compat.Literal)}
        try:
            shapes = tuple(compat.physical_shape(v.aval) for v in eqn.outvars)
        except compat.JaxprImportError as error:
            self._refuse(eqn, str(error))
        attrs: dict[str, Any] = {"custom_call_target": f"jax.{eqn.primitive.name}", "eqn": eqn}
        instruction = self.emit("custom-call", *variables.values(), shape=TupleShape(shapes), **attrs)
        if eqn.effects:
            instruction = with_changes(instruction, attrs={**instruction.attrs, "has_side_effect": True},
                                       control=tuple(self.effects[-1:]))
            self.effects.append(instruction)
        return self.elements(instruction)

    def _refuse(self, eqn: Any, reason: str) -> NoReturn:
        file, line = compat.source_line(eqn.source_info)
        raise compat.JaxprImportError(f"cannot import {eqn.primitive.name}: {reason}\n  {eqn}\n  {file}:{line}")

    # --- metadata --------------------------------------------------------------------------------------------------

    @contextmanager
    def _within(self, name: str) -> Iterator[None]:
        outer = self.metadata, self._path, self._name_stacks
        if name:
            self._path, self._name_stacks = (*self._path, name), {}
        try:
            yield
        finally:
            self.metadata, self._path, self._name_stacks = outer

    def _metadata_of(self, eqn: Any) -> Metadata:
        if self._origin is not None:
            return self._origin
        info, primitive = eqn.source_info, eqn.primitive.name
        stack = info.name_stack.stack
        if stack not in self._name_stacks:
            parts = (*self._path, compat.name_stack(info))
            self._name_stacks[stack] = "/".join(part for part in parts if part)
        prefix = self._name_stacks[stack]
        file, line = compat.source_line(info)
        return Metadata(primitive, f"{prefix}/{primitive}" if prefix else primitive, file, line)
