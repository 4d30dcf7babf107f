"""Lanes: a run of neighbor elements that one thread computes in step, and what it holds of each of them.

Values of a lane lie in arrays of LANES elements, one for each place of the small axes that a lane holds in full, and a
complex number in two, because the compiler makes vectors of them. What is written for each lane stands in a block of
its own; where a plan has no lanes, everything is one number and there is no block.
"""
from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from hlofuse.codegen.nest import Nest
from hlofuse.codegen.scalar_expr import c_type, store_expr
from hlofuse.codegen.values import EmitError
from hlofuse.fusion.axes import Axes
from hlofuse.hlo.index_map import Index, Indices, constant, delinearize, is_run, linearize, to_c
from hlofuse.hlo.module import Instruction
from hlofuse.hlo.shape import COMPLEX


@dataclass(frozen=True)
class Carry:
    """Element `index` of a loop's state while it runs: one variable, or one for each place and lane."""

    index: int
    name: str
    value: Instruction            # whose axes are the carry's
    places: tuple[dict[int, Index], ...]   # the atoms beyond the lanes', for each place
    parts: tuple[str, ...]        # of a complex number two arrays, which the compiler makes vectors of
    has_lanes: bool               # else all lanes have the same

    @property
    def is_number(self) -> bool:
        return self.value.array.size == 1


class LaneWriter:
    """Writes values of lanes into the scopes of a nest."""

    def __init__(self, nest: Nest) -> None:
        self.nest, self.values, self.plan = nest, nest.values, nest.plan
        self.axes = nest.plan.analysis
        self.has_lanes = bool(nest.plan.axes)
        self.before_lanes: list[str] = []     # what the block of lanes that is being written declares before itself

    @contextmanager
    def lanes(self) -> Iterator[None]:
        """A block for each lane of the run; nothing where there are no lanes."""
        nest = self.nest
        if not self.has_lanes:
            yield
            return
        name = nest.lane_variable()
        outer, self.before_lanes = self.before_lanes, []
        with self.values.inside((name, "l")) as scope:
            yield
        for line in self.before_lanes:
            nest.emit(line)
        self.before_lanes = outer
        if scope.lines:
            nest.emit("FOR_LANES(l, count) {")
            if any(re.search(rf"\b{name}\b", line) for line in scope.lines):
                nest.emit(f"  const {nest.index_type} {name} = {name}0 + l;")
            self.values.scope.lines.extend("  " + line for line in scope.lines)
            nest.emit("}")

    def is_of_lanes(self, value: Instruction) -> bool:
        """Whether each lane has elements of its own."""
        return bool(self.axes.mask(value) & self.plan.domain_mask)

    def lane_atoms(self) -> dict[int, Index]:
        return self.plan._atom_index(self.nest.where)

    def places_of(self, value: Instruction) -> tuple[dict[int, Index], ...]:
        lanes = self.plan.domain_mask
        inner = [a for a in self.axes.atoms(value) if not lanes >> a & 1]
        sizes = [range(self.axes.size(a)) for a in inner]
        return tuple(dict(zip(inner, map(constant, place), strict=True)) for place in itertools.product(*sizes))

    def index_of(self, value: Instruction, place: Mapping[int, Index]) -> Indices:
        atoms = {**self.lane_atoms(), **place}
        size = self.axes.size
        return tuple(linearize([atoms[a] for a in dim], [size(a) for a in dim]) for dim in self.axes.dims(value))

    def element_of_carry(self, carry: Carry, index: Indices) -> str:
        """Where a carry's element at an index lies."""
        if carry.is_number:
            return carry.name
        inner, sizes = self.inside_lane(carry.value, index)
        where = f"[{to_c(linearize(inner, sizes))}]" if len(carry.places) > 1 else ""
        where += "[l]" if carry.has_lanes else ""
        return joined([f"{carry.name}{part}{where}" for part in carry.parts])

    def inside_lane(self, value: Instruction, index: Indices) -> tuple[list[Index], list[int]]:
        """Where in its lane an element is, and the sizes of these axes; `EmitError` if it is another lane's."""
        return place_inside(value, index, self.axes, self.lane_atoms(), "lane")

    def new_array(self, hint: str, element_type: str) -> str:
        """Declares an array of the lanes, one number where there are none; the text of its element."""
        name, kind = self.values.name(hint), c_type(element_type)
        if not self.has_lanes:
            self.nest.emit(f"{kind} {name};")
            return name
        parts = ("_re", "_im") if element_type in COMPLEX else ("",)
        for part in parts:
            self.nest.emit(f"{part_type(kind, parts)} {name}{part}[LANES];")
        return joined([f"{name}{part}[l]" for part in parts])

    def has_stride(self, place: Index) -> bool:
        name, lanes = self.nest.lane_variable(), self.nest.sizing.lanes
        moves = lanes > 1 and any(x.name == name for x in place.variables)
        return moves and not is_run(place + -place.constant, name, 1)

    def assign(self, moves: Sequence[tuple[str, str]]) -> None:
        for target, text in moves:
            parts = _COMPLEX_PARTS.fullmatch(target)
            if parts is None:
                self.nest.emit(f"{target} = {text};")
            else:
                self.nest.emit(f"{parts[1]} = {text}.re;")
                self.nest.emit(f"{parts[2]} = {text}.im;")

    def first_lane(self) -> str:
        return f"BLOCK == 0 && {self.nest.lane_variable()}0 == 0"

    def store(self, k: int, output: Instruction, place: Mapping[int, Index]) -> None:
        index = self.index_of(output, place)
        value = store_expr(self.values.at(output, index), output.element_type)
        self.nest.emit(f"{self.nest.output_names[k]}[{to_c(linearize(index, output.dims))}] = {value};")


_COMPLEX_PARTS = re.compile(r"make_complex\((\w+_re[^,]*), (\w+_im[^,]*)\)")


def place_inside(value: Instruction, index: Indices, axes: Axes, outer: Mapping[int, Index],
                 owner: str) -> tuple[list[Index], list[int]]:
    """Where an element is within what an `owner` at the atoms `outer` has of a value, and the sizes of these axes;
    `EmitError` if it is another one's."""
    inner: list[Index] = []
    sizes: list[int] = []
    for dim, at, whole in zip(axes.dims(value), index, value.dims, strict=True):
        if not any(atom in outer for atom in dim):
            inner.append(at)
            sizes.append(whole)
            continue
        for atom, place in zip(dim, delinearize(at, [axes.size(a) for a in dim]), strict=True):
            if atom not in outer:
                inner.append(place)
                sizes.append(axes.size(atom))
            elif place != outer[atom]:
                raise EmitError(f"{value!r} is read at the place of another {owner}")
    return inner, sizes


def joined(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"make_complex({', '.join(parts)})"


def part_type(kind: str, parts: Sequence[str]) -> str:
    """The C type of one part of a number."""
    return {"c64": "float", "c128": "double"}[kind] if len(parts) > 1 else kind
