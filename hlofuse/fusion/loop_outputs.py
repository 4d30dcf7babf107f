"""Work on what a loop stacked, done in the step that writes it.

    ys = scan(…); relu(ys * a + b)  =>  a scan whose ys are relu(y * a + b)
    ys = vmap(scan)(…)              =>  a scan that writes [lanes, steps], not a transpose behind it (on the CPU)
    sum(f(ys), steps)               =>  a carry to which each step adds f(y)

A value that exists in memory anyway is written by the loop itself; one that only replaces the arrays that it is made of
is too, if it is no larger. What it needs besides is read in the step, at its place: nothing is read or written twice.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hlofuse.codegen.element_reads import splat_literal
from hlofuse.codegen.scalar_expr import has_scalar_expr
from hlofuse.fusion.devices import DeviceSpec
from hlofuse.fusion.graph import VIEWS, is_fusible
from hlofuse.fusion.lane_sums import SUMMED
from hlofuse.fusion.loop_state import New, renewed, with_body
from hlofuse.fusion.loop_structure import LoopStructure, Stacked, loop_structure
from hlofuse.fusion.residuals import Rewritten
from hlofuse.hlo.builder import constant, element_of, full, make, parameter, reshape, tuple_of
from hlofuse.hlo.module import Computation, Instruction
from hlofuse.hlo.opcode import OPCODES, Kind
from hlofuse.hlo.shape import COMPLEX, FUSIBLE, INTEGERS, Shape, TupleShape
from hlofuse.hlo.traverse import rebuild, with_changes

MAX_WORK = 64    # instructions of one value
MAX_ADDED = 4096    # floats that are added one after the other
MIN_RUN = 8      # steps that are worth a run of neighbors in memory
MAX_PLACES_BEHIND = 4    # elements between neighbor steps in memory
Work = dict[Instruction, int]


def write_from_loops(computation: Computation, loops: frozenset[Instruction], device: DeviceSpec,
                     check: Callable[[Instruction], None], refusals: tuple[type[Exception], ...]) -> Rewritten:
    """Looks at each loop once; `check` raises one of `refusals` where a new loop is no kernel, and then it stays."""
    bodies = frozenset(loop.attrs["body"] for loop in loops)
    done: set[Computation] = set()
    while True:
        first = next((i for i in computation.instructions if i.opcode == "while" and i.attrs["body"] in bodies - done),
                     None)
        if first is None:
            return Rewritten(computation, bodies)
        done.add(first.attrs["body"])
        for with_folds in (True, False):
            sinking = _Sinking(computation, loop_structure(first), bool(device.tile_bytes), with_folds)
            targets = sinking.targets()
            if not targets and not sinking.folds:
                continue
            new = sinking.rewritten(targets)
            try:
                check(new)
            except refusals:
                continue
            computation = rebuild(computation, sinking.replaced(new, targets))
            bodies |= {new.attrs["body"]}
            done.add(new.attrs["body"])
            break


@dataclass(frozen=True)
class _Fold:
    """A reduction of `value` over its dimension `dim`, the steps, and perhaps others."""

    value: Instruction
    dim: int
    opcode: str


@dataclass(eq=False)
class _Sinking:
    """Which values of a program can be computed in the steps of one of its loops."""

    computation: Computation
    structure: LoopStructure
    transposes: bool     # whether slices that lie step by step are written as well as others
    with_folds: bool
    stacked: dict[Instruction, Stacked] = field(default_factory=dict)     # results that share a place
    after: set[Instruction] = field(default_factory=set)                  # what needs the loop
    folds: dict[Instruction, _Fold] = field(default_factory=dict)         # reductions that carries take the place of

    def __post_init__(self) -> None:
        s, users = self.structure, self.computation.users
        if s.counter is None:
            return
        whole = [t for t in s.stacked if t.is_covered and not t.dim and not t.reads]
        self.stacked = {u: t for u in users[s.loop] for t in whole
                        if t.index == u.attrs["index"] and t.position is whole[0].position}
        self.after = {s.loop}
        for i in self.computation.instructions:
            if not self.after.isdisjoint(i.operands):
                self.after.add(i)
        if self.stacked and self.with_folds:
            written = set(self.targets())
            self.folds = {i: f for i in self.computation.instructions if i in self.after and (
                f := self._fold(i, written))}

    def _fold(self, i: Instruction, written: set[Instruction]) -> _Fold | None:
        if i.opcode != "reduce" or len(i.operands) != 2:
            return None
        value, init = i.operands
        opcode, literal = _folding(i), splat_literal(init)
        if opcode is None or literal is None or (opcode == "add" and (literal.any() or np.signbit(literal).any())):
            return None
        for dim in i.attrs["dimensions"]:
            if opcode == "add" and i.element_type not in INTEGERS and value.dims[dim] > MAX_ADDED:
                continue
            if value in self.stacked:
                if dim == 0:
                    return _Fold(value, 0, opcode)
                continue
            work = self._work_along(value, dim)
            if work and not self._is_dear_elsewhere(work, i, written):
                return _Fold(value, dim, opcode)
        return None

    def _is_dear_elsewhere(self, work: Work, i: Instruction, written: set[Instruction]) -> bool:
        """Whether what a fold needs is computed again for others, and not for little."""
        return any(OPCODES[v.opcode].unit in ("special", "div") for v in work) and any(
            v in self.computation.outputs or any(u not in work and u is not i for u in self.computation.users[v])
            for v in work if v not in written)

    def targets(self) -> list[Instruction]:
        """The values that the loop shall write, in post-order, none of them needed by another alone."""
        if not self.stacked:
            return []
        found: dict[Instruction, Work] = {}
        for i in self.computation.instructions:
            if i in self.after and (_is_elementwise(i) or i.opcode == "transpose") and (work := self._work(i)) and (
                    self._is_written(i) or self._replaces(i, work)):
                found[i] = work
        inner = {v for v in found if not self._is_written(v) and any(v in work and w is not v and self._is_private(
            v, work) for w, work in found.items())}
        return [v for v in found if v not in inner]

    def _work(self, value: Instruction) -> Work:
        """The value and everything between it and what the loop stacked, and which dimension of each is the steps';
        nothing where a step cannot compute it."""
        whole = self.structure.counter is not None and self.structure.counter.trips >= MIN_RUN
        for dim in range(len(value.dims) if self.transposes and whole else 1):
            if dim == 0 or math.prod(value.dims[dim + 1:]) <= MAX_PLACES_BEHIND:
                work = self._work_along(value, dim)
                if work:
                    return work
        return {}

    def _work_along(self, value: Instruction, dim: int) -> Work:
        work: Work = {}
        stack, arrays = [(value, dim)], 0
        while stack:
            i, dim = stack.pop()
            if i in self.stacked:
                if dim:
                    return {}
                arrays += 1
            elif i in work:
                if work[i] != dim:
                    return {}
            elif i in self.after:
                moves = i.opcode == "transpose"
                if not (moves or _is_elementwise(i)) or len(work) > MAX_WORK:
                    return {}
                work[i] = dim
                for o in i.operands:
                    if o.dims != i.dims and not moves and (o.dims or o in self.after):
                        return {}
                    if o.opcode == "iota" and o not in self.after and o.attrs["iota_dimension"] == dim:
                        return {}
                    if o.dims:
                        stack.append((o, i.attrs["dimensions"][dim] if moves else dim))
        return work if arrays else {}

    def _is_written(self, v: Instruction) -> bool:
        """Whether a value must exist in memory."""
        if v in self.computation.outputs:
            return True
        return any(self._is_written(u) if u.opcode in VIEWS else not is_fusible(u) and u.opcode != "tuple"
                   for u in self.computation.users[v])

    def _is_private(self, v: Instruction, work: Work) -> bool:
        return v not in self.computation.outputs and all(u in work or u in self.folds
                                                         for u in self.computation.users[v])

    def _replaces(self, value: Instruction, work: Work) -> bool:
        """Whether nothing else needs what the value is made of, and it is no larger."""
        arrays = {o for i in work for o in i.operands if o in self.stacked}
        inner = (work.keys() | arrays) - {value}
        return all(self._is_private(i, work) for i in inner) and value.array.byte_size <= sum(
            a.array.byte_size for a in arrays)

    # --- the new loop -------------------------------------------------------------------------------------------------

    def rewritten(self, targets: Sequence[Instruction]) -> Instruction:
        s = self.structure
        state = [*s.loop.operands[0].operands, *(full(0, v.array) for v in targets)]
        for i, fold in self.folds.items():
            dims = [n for d, n in enumerate(fold.value.dims) if d != fold.dim]
            state.append(full(splat_literal(i.operands[1]), fold.value.array.with_dims(dims)))
        begin, arrays = len(s.loop.operands[0].operands), self._arrays(targets)
        elements = {a: len(state) + n for n, a in enumerate(arrays)}
        state += arrays
        fresh = parameter(0, TupleShape(tuple(o.shape for o in state)), "state")
        new: New = {s.body.parameters[0]: fresh}
        for i in s.body.instructions:
            if i not in new and i is not s.body.root:
                new[i] = renewed(i, new)
        place = new[next(iter(self.stacked.values())).position]
        values: dict[tuple[Instruction, int], Instruction] = {(r, 0): new[t.update] for r, t in self.stacked.items()}
        roots = [new[o] for o in s.body.root.operands]
        for n, v in enumerate(targets):
            work = self._work(v)
            for i in self.computation.instructions:
                if i in work and (i, work[i]) not in values:
                    values[i, work[i]] = self._value(i, work[i], values, elements, fresh, place)
            starts = [place if d == work[v] else constant(0, place.element_type) for d in range(len(v.dims))]
            roots.append(make("dynamic-update-slice", element_of(fresh, begin + n), values[v, work[v]], *starts,
                              shape=v.shape))
        for n, fold in enumerate(self.folds.values()):
            work = {} if fold.value in self.stacked else self._work_along(fold.value, fold.dim)
            for i in self.computation.instructions:
                if i in work and (i, work[i]) not in values:
                    values[i, work[i]] = self._value(i, work[i], values, elements, fresh, place)
            carry = element_of(fresh, begin + len(targets) + n)
            roots.append(make(fold.opcode, carry, reshape(values[fold.value, fold.dim], carry.dims)))
        roots += [element_of(fresh, k) for k in elements.values()]
        return with_body(s.loop, Computation(s.body.name, (fresh,), tuple_of(roots)), state)

    def replaced(self, new: Instruction, targets: Sequence[Instruction]) -> New:
        """What the new loop's results are in the program."""
        s = self.structure
        begin = len(s.loop.operands[0].operands)
        results = {u: element_of(new, u.attrs["index"]) for u in self.computation.users[s.loop]}
        results |= {v: element_of(new, begin + n) for n, v in enumerate(targets)}
        for n, (i, fold) in enumerate(self.folds.items()):
            carry = element_of(new, begin + len(targets) + n)
            rest = tuple(d - (d > fold.dim) for d in i.attrs["dimensions"] if d != fold.dim)
            results[i] = with_changes(i, operands=[carry, i.operands[1]],
                                      attrs={**i.attrs, "dimensions": rest}) if rest else carry
        return results

    def _arrays(self, targets: Sequence[Instruction]) -> list[Instruction]:
        """What the values need of the program besides."""
        work = {i for v in targets for i in self._work(v)}
        work |= {i for f in self.folds.values() if f.value not in self.stacked
                 for i in self._work_along(f.value, f.dim)}
        found = {_source(o): None for i in self.computation.instructions if i in work for o in i.operands
                 if o not in self.after and splat_literal(o) is None and o.opcode != "iota"}
        return list(found)

    def _value(self, i: Instruction, dim: int, values: Mapping[tuple[Instruction, int], Instruction],
               elements: Mapping[Instruction, int], fresh: Instruction, place: Instruction) -> Instruction:
        """A value's slice of one step, from its operands'."""
        inner = i.attrs["dimensions"][dim] if i.opcode == "transpose" else dim
        operands = [values[o, inner] if o in self.after else _slice(o, inner, elements, fresh, place)
                    for o in i.operands]
        return make(i.opcode, *operands, shape=_of_step(i, dim), name=i.name, metadata=i.metadata, **i.attrs)


def _folding(reduction: Instruction) -> str | None:
    """The operation of a reduction, if it is one that steps do as well one after the other."""
    body = reduction.attrs["to_apply"]
    opcode: str = body.root.opcode
    if set(body.root.operands) != set(body.parameters) or len(body.instructions) != 3:
        return None
    if opcode == "add":
        return opcode if reduction.element_type in SUMMED else None
    return opcode if opcode in ("maximum", "minimum") and reduction.element_type not in COMPLEX else None


def _of_step(i: Instruction, dim: int) -> Shape:
    return i.array.with_dims([1 if d == dim else n for d, n in enumerate(i.dims)])


def _slice(array: Instruction, dim: int, elements: Mapping[Instruction, int], fresh: Instruction,
           place: Instruction) -> Instruction:
    """Of an array that is there before the loop, what a step reads; the steps are its dimension `dim`."""
    literal, shape = splat_literal(array), _of_step(array, dim)
    if literal is not None:
        return full(literal, shape)
    if array.opcode == "iota":
        return make("iota", shape=shape, **array.attrs)
    source = element_of(fresh, elements[_source(array)])
    if array.opcode != "broadcast":
        return source if not array.dims else _at(source, dim, place)
    dimensions = array.attrs["dimensions"]
    if dim in dimensions:
        source = _at(source, dimensions.index(dim), place)
    return make("broadcast", source, shape=shape, dimensions=dimensions)


def _source(array: Instruction) -> Instruction:
    return array.operands[0] if array.opcode == "broadcast" else array


def _at(array: Instruction, dim: int, place: Instruction) -> Instruction:
    sizes = [1 if d == dim else n for d, n in enumerate(array.dims)]
    starts = [place if d == dim else constant(0, place.element_type) for d in range(len(sizes))]
    return make("dynamic-slice", array, *starts, shape=array.array.with_dims(sizes), dynamic_slice_sizes=tuple(sizes))


def _is_elementwise(i: Instruction) -> bool:
    return OPCODES[i.opcode].kind is Kind.ELEMENTWISE and isinstance(i.shape, Shape) and bool(i.dims) and \
        i.element_type in FUSIBLE and has_scalar_expr(i)
