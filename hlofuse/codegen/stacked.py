"""Stacked results: the arrays that loops write slice by slice, and what later loops of the kernel read of them.

Each lane reads only what it wrote itself, so nothing has to wait. An array that is no result of the kernel lies in a
tile of the thread's lanes and all steps, where the dialect has room beside a thread, else in a scratch array.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from hlofuse.codegen.lanes import LaneWriter
from hlofuse.codegen.nest import Nest
from hlofuse.codegen.scalar_expr import load_expr, storage_type, store_expr
from hlofuse.codegen.values import EmitError
from hlofuse.fusion.loop_space import span
from hlofuse.fusion.loop_structure import LoopStructure, Stacked
from hlofuse.fusion.plan import left_to_loops, stacked_results
from hlofuse.hlo.index_map import ZERO, Index, Indices, linearize, to_c, variable
from hlofuse.hlo.module import Instruction
from hlofuse.hlo.shape import COMPLEX, Shape


@dataclass(frozen=True)
class Home:
    """Where a loop writes `result` slice by slice: an array in memory, or a `tile` of a thread's lanes and steps."""

    result: Instruction
    name: str
    tile: bool = False
    has_lanes: bool = False     # of a tile: whether each lane has its own


@dataclass(frozen=True)
class Waiting:
    """Elements of one place of each lane, of the last steps, in the array `name`: the present step's in `slot`, which
    goes to `place` of its home."""

    name: str
    slot: str
    place: Index


class StackedWriter(LaneWriter):
    """Writes and reads the stacked results of a plan's loops."""

    def __init__(self, nest: Nest) -> None:
        super().__init__(nest)
        self.homes: dict[tuple[Instruction, int], list[Home]] = {}     # of element k of a loop's state
        self.waiting: dict[tuple[Instruction, int, int, str], Waiting] = {}    # by loop, element, place and home
        self.tile_bytes = 0

    def place_results(self) -> None:
        """Declares what loops leave to later ones: in memory, or in a tile of the thread's lanes."""
        computation, nest = self.plan.computation, self.nest
        for r in stacked_results(computation):
            key = r.operands[0], r.attrs["index"]
            self.homes[key] = [Home(r, name) for o, name in zip(computation.outputs, nest.output_names, strict=True)
                               if o is r]
        for r in left_to_loops(computation):
            homes, is_shared = self.homes[r.operands[0], r.attrs["index"]], self.has_lanes and not self.is_of_lanes(r)
            if homes and not is_shared:
                continue
            if is_shared and not nest.dialect.tile_bytes:
                raise EmitError(f"{r!r} is the same for all lanes, and one of them writes it")
            homes.append(self.new_home(r, is_shared))
        if self.tile_bytes > nest.dialect.tile_bytes:
            raise EmitError(f"what loops leave to later ones is {self.tile_bytes} bytes, the limit is "
                            f"{nest.dialect.tile_bytes}")

    def place_nested(self, s: LoopStructure, readers: Sequence[Instruction]) -> None:
        """Declares what a loop leaves to the rest of a step around it: few places of each lane."""
        for t in s.stacked:
            read = [r for r in readers if r.attrs["index"] == t.index]
            self.homes[s.loop, t.index] = [self._local_home(read[0])] if read else []

    def _local_home(self, result: Instruction) -> Home:
        name, kind = self.values.name("steps_of_lane"), storage_type(result.element_type)
        has_lanes = self.has_lanes and self.is_of_lanes(result)
        self.nest.emit(f"{kind} {name}[{self._tile_size(result, has_lanes)}];")
        return Home(result, name, True, has_lanes)

    def _tile_size(self, result: Instruction, has_lanes: bool) -> int:
        places = span(self.axes.mask(result) & ~self.plan.domain_mask, self.axes)
        return places * (self.nest.sizing.lanes if has_lanes else 1)

    def homes_of(self, s: LoopStructure, t: Stacked) -> list[Home]:
        """The arrays that a stacked element is written to: none where nothing reads it."""
        return self.homes.get((s.loop, t.index), [])

    def new_home(self, result: Instruction, is_shared: bool) -> Home:
        """Declares an array that only the kernel's own loops read."""
        nest, shape = self.nest, result.array
        name, kind = self.values.name(f"{result.name or 'steps'}_kept"), storage_type(result.element_type)
        if not nest.dialect.tile_bytes:
            nest.scratch.append((name, kind, Shape(result.element_type, (shape.size,))))
            return Home(result, name)
        has_lanes = self.has_lanes and not is_shared
        size = self._tile_size(result, has_lanes)
        self.tile_bytes += size * shape.dtype.itemsize
        nest.emit(f"SHARED({kind}, {name}, {size});")
        return Home(result, name, True, has_lanes)

    def element_of_home(self, home: Home, index: Indices) -> str:
        """Where an element of the whole array lies."""
        if not home.tile:
            return f"{home.name}[{to_c(linearize(index, home.result.dims))}]"
        inner, sizes = self.inside_lane(home.result, index)
        place = linearize(inner, sizes)
        if home.has_lanes:
            place = place * self.nest.sizing.lanes + variable("l", self.nest.sizing.lanes)
        return f"{home.name}[{to_c(place)}]"

    def prefill(self, s: LoopStructure, t: Stacked) -> None:
        """What no step may write keeps its initial value."""
        homes = self.homes_of(s, t)
        if not homes:
            return
        nest, initial = self.nest, s.initial(t.index)
        at = self.values.name("at")
        place = variable(at, initial.dims[t.dim])

        def fill(homes: Sequence[Home]) -> None:
            if not homes:
                return
            with nest.block(f"for (int {at} = 0; {at} < {initial.dims[t.dim]}; {at}++) {{", (at,)), block():
                for inner in self.places_of(t.update):
                    index = list(self.index_of(t.update, inner))
                    index[t.dim] = place
                    value = store_expr(self.values.at(initial, tuple(index)), initial.element_type)
                    for home in homes:
                        nest.emit(f"{self.element_of_home(home, tuple(index))} = {value};")

        block: Callable[[], AbstractContextManager[None]] = self.lanes
        if self.has_lanes and not self.is_of_lanes(t.update):
            block = nullcontext
            fill([home for home in homes if home.tile])
            with nest.block(f"if ({self.first_lane()}) {{", guard=True):
                fill([home for home in homes if not home.tile])
        else:
            fill(homes)

    def write_numbers(self, s: LoopStructure) -> None:
        """Slices of one number, which one lane of all writes."""
        numbers = [t for t in s.stacked if self.has_lanes and not self.is_of_lanes(t.update)]
        homes = {t: self.homes_of(s, t) for t in numbers}
        for t in numbers:
            self.write_slice(s, t, [home for home in homes[t] if home.tile])
        if any(not home.tile for t in numbers for home in homes[t]):
            with self.nest.block(f"if ({self.first_lane()}) {{", guard=True):
                for t in numbers:
                    self.write_slice(s, t, [home for home in homes[t] if not home.tile])

    def write_slice(self, s: LoopStructure, t: Stacked, homes: Sequence[Home]) -> list[tuple[str, str]]:
        """Writes a slice; of a strided one the answer tells (element, value) for an own loop over the lanes."""
        late: list[tuple[str, str]] = []
        if not homes:
            return late
        dims = s.update(t.index).dims
        position = self.values.clamped(t.position, (), dims[t.dim] - 1, "position")
        for n, place in enumerate(self.places_of(t.update)):
            source = list(self.index_of(t.update, place))
            source[t.dim] = ZERO
            value = store_expr(self.values.at(t.update, tuple(source)), t.update.element_type)
            source[t.dim] = position
            strided = self.has_stride(linearize(tuple(source), dims)) and t.update.element_type not in COMPLEX
            for home in homes:
                element = self.element_of_home(home, tuple(source))
                waiting = self.waiting.get((s.loop, t.index, n, home.name))
                if self.has_lanes and strided and not home.tile and waiting is None:
                    late.append((element, value))
                else:
                    self.nest.emit(f"{element if waiting is None else waiting.slot} = {value};")
        return late

    def wait(self, late: Sequence[tuple[str, str, str]]) -> list[tuple[str, str]]:
        """Puts values into arrays of the lanes, from where they are written in a loop of its own."""
        moves = []
        for kind, element, value in late:
            name = self.values.name("slice")
            self.before_lanes.append(f"{kind} {name}[LANES];")
            self.nest.emit(f"{name}[l] = {value};")
            moves.append((element, f"{name}[l]"))
        return moves

    def slice_reader(self, s: LoopStructure, t: Stacked, read: Instruction) -> Callable[[Indices], str]:
        """What a step reads of the slice that it writes: the lane's own elements, in memory."""
        homes, dims = self.homes_of(s, t), s.update(t.index).dims

        def element(index: Indices) -> str:
            self.inside_lane(t.update, index)
            source = list(index)
            source[t.dim] = self.values.clamped(t.position, (), dims[t.dim] - 1, "position")
            value = load_expr(self.element_of_home(homes[-1], tuple(source)), read.element_type)
            return self.values.declare(read, value)

        return element

    def result_reader(self, result: Instruction, home: Home) -> Callable[[Indices], str]:
        """What a later loop reads of what this one wrote: the lane's own elements."""
        def element(index: Indices) -> str:
            self.inside_lane(result, index)
            return self.values.declare(result, load_expr(self.element_of_home(home, index), result.element_type))

        return element
