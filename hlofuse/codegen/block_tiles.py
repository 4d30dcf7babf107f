"""What a block holds of a loop: tiles of its carries, arrays of stored values, and how points are read and written.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hlofuse.codegen.block_folds import Atoms, FoldWriter
from hlofuse.codegen.lanes import place_inside
from hlofuse.codegen.nest import Nest
from hlofuse.codegen.scalar_expr import c_type, load_expr, storage_type
from hlofuse.fusion.block_loop import carry_value, item_bytes
from hlofuse.fusion.loop_structure import LoopStructure
from hlofuse.hlo.index_map import Indices, linearize, to_c
from hlofuse.hlo.module import Instruction


@dataclass(frozen=True)
class Tile:
    """Element `index` of the state: a number of the block, or an array of two copies."""

    index: int
    value: Instruction     # whose axes are the tile's
    name: str
    points: int


@dataclass(frozen=True)
class Assignment:
    """What the points of one array become: `value` at each index of `place`, written to `element` of it."""

    place: Instruction
    value: Instruction
    element: Callable[[Indices], str]
    stores: Callable[[str], str]
    once: bool = False     # it reads what it overwrites


class TileWriter(FoldWriter):
    """Declares, reads and writes what a block holds."""

    def __init__(self, nest: Nest) -> None:
        super().__init__(nest)
        self.s: LoopStructure = self.block.structure
        self.arrays: dict[Instruction, str] = {}
        self.tiles: dict[int, Tile] = {}      # of the state's elements
        self.now = self.values.name("now")    # which copy of a tile the step reads

    def tile_of(self, k: int) -> Tile:
        value, initial = carry_value(self.s, k), self.s.initial(k)
        hint = initial.name if initial.opcode == "parameter" and initial.name else "carry"
        points = self.points_of(value)
        hint = f"{hint}_now" if points == 1 else f"{hint}_tile"
        tile = Tile(k, value, self.values.name(hint), points)
        if points > 1:
            self._shared(tile.name, value, points if k in self.block.single else 2 * points)
        return tile

    def has_copies(self, tiles: Sequence[Tile]) -> bool:
        return any(t.points > 1 and t.index not in self.block.single for t in tiles)

    def _shared(self, name: str, value: Instruction, size: int) -> None:
        self.nest.emit(f"SHARED({held_type(value.element_type)}, {name}, {size});")
        self.nest.shared_bytes += size * item_bytes(value)

    def declare_array(self, i: Instruction) -> None:
        if i in self.block.home or self.points_of(i) == 1:
            return
        self.arrays[i] = self.values.name(f"{i.name or i.opcode}_tile")
        self._shared(self.arrays[i], i, self.points_of(i))

    def element_at(self, value: Instruction, name: str, index: Indices, copy: str | None = None) -> str:
        inner, sizes = place_inside(value, index, self.axes, self.lane_atoms(), "block")
        order = self.block.turned.get(value, range(len(inner)))
        place = to_c(linearize([inner[d] for d in order], [sizes[d] for d in order]))
        if copy is None:
            return f"{name}[{place}]"
        start = f"{copy} * {self.points_of(value)}"
        return f"{name}[{start}]" if place == "0" else f"{name}[{start} + {place}]"

    def read_tile(self, tile: Tile, copy: str | None, reader: Instruction) -> Callable[[Indices], str]:
        copy = None if tile.index in self.block.single else copy

        def element(index: Indices) -> str:
            if tile.points == 1:
                place_inside(tile.value, index, self.axes, self.lane_atoms(), "block")
                return tile.name
            return self._read(tile.name, self.element_at(tile.value, tile.name, index, copy), reader)

        return element

    def _read_array(self, i: Instruction) -> Callable[[Indices], str]:
        def element(index: Indices) -> str:
            return self._read(self.arrays[i], self.element_at(i, self.arrays[i], index), i)

        return element

    def _read(self, array: str, element: str, i: Instruction) -> str:
        name = self.values.name(f"{array}_at")
        value = load_expr(element, i.element_type) if i.element_type == "pred" else element
        self.nest.emit(f"const {c_type(i.element_type)} {name} = {value};")
        return name

    def next_of(self, tile: Tile, copy: str | None) -> Callable[[Indices], str]:
        copy = None if tile.index in self.block.single else copy
        return lambda index: self.element_at(tile.value, tile.name, index, copy)

    # --- writing ------------------------------------------------------------------------------------------------------

    def assignment_of(self, i: Instruction) -> Assignment:
        return Assignment(i, i, self.target_of(i), plain)

    def target_of(self, i: Instruction) -> Callable[[Indices], str]:
        if i in self.block.home:
            return self.next_of(self.tiles[self.block.home[i]], f"(1 - {self.now})")
        return lambda index: self.element_at(i, self.arrays[i], index)

    def publish(self, i: Instruction) -> None:
        """From here on a value is read from its array."""
        if i in self.block.home:
            tile = self.tiles[self.block.home[i]]
            self.values.sources[i] = self.read_tile(tile, f"(1 - {self.now})", i)
        else:
            self.values.sources[i] = self._read_array(i)

    def store_value(self, i: Instruction) -> None:
        """Computes a value into its array, or a reduction to a number that every thread has."""
        if not self.is_fold(i):
            self.write_moves([self.assignment_of(i)])
        elif i not in self.values.sources:
            results = [r for r in (*self.block.stored, *self.block.fixed) if r.operands[0] is i.operands[0]] \
                if i.opcode == "get-tuple-element" else [i]
            if self.points_of(i) == 1:
                for result, name in zip(results, self.fold_to_numbers(i, results), strict=True):
                    self.values.sources[result] = always(name)
                return
            self.fold_to_arrays(i, results, [self.target_of(r) for r in results])
            for result in results:
                self.publish(result)
            return
        else:
            return
        self.publish(i)

    def write_moves(self, moves: Sequence[Assignment]) -> None:
        """Assignments over the same axes share a loop."""
        groups: dict[tuple[int, ...], list[Assignment]] = {}
        for m in moves:
            groups.setdefault(self.tile_atoms(m.place), []).append(m)
        for group in groups.values():
            def write(atoms: Atoms, group: list[Assignment] = group) -> None:
                moves = [(self.index_of(m.place, atoms), m) for m in group]
                texts = [m.stores(self.values.at(m.value, index)) for index, m in moves]
                for (index, m), text in zip(moves, texts, strict=True):
                    self.nest.emit(f"{m.element(index)} = {text};")

            self.for_points(group[0].place, write, not any(m.once for m in group))

    def write_guarded(self, m: Assignment) -> None:
        def write(atoms: Atoms) -> None:
            index = self.index_of(m.place, atoms)
            self.nest.emit(f"{m.element(index)} = {m.stores(self.values.at(m.value, index))};")

        self.guarded(m.place, lambda: self.for_points(m.place, write))

    def guarded(self, value: Instruction, write: Callable[[], None]) -> None:
        """What is the same for all blocks is written by the first, and a number by one thread."""
        tests = [] if self.is_everyones(value) else ["BLOCK == 0"]
        tests += ["THREAD == 0"] if self.points_of(value) == 1 else []
        if not tests:
            write()
            return
        with self.nest.block(f"if ({' && '.join(tests)}) {{", guard=True):
            write()

    def is_everyones(self, value: Instruction) -> bool:
        """Whether every block has a part of its own."""
        return not self.block.lanes or self.is_of_lanes(value)


def held_type(element_type: str) -> str:
    """The type of an element in shared memory: as values have it, but bytes for bools."""
    return storage_type(element_type) if element_type == "pred" else c_type(element_type)


def plain(text: str) -> str:
    return text


def always(text: str) -> Callable[[Indices], str]:
    return lambda index: text
