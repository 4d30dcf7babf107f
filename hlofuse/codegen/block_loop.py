"""The block loop form: a loop in which a block holds the tile of each carry twice and swaps the copies every step.

    tile[0] = initial value; for each step { stored values, phase by phase; tile[1 - now] = body(tile[now]); swap }

All threads of the block compute the points of an array together, with a barrier after every phase. Time is outside,
so that on the CPU the points of one step are a vector; a loop over an axis is cut where a branch of its body changes
(the borders of a roll or a pad).
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from hlofuse.codegen.block_folds import Atoms
from hlofuse.codegen.block_tiles import Assignment, Tile, TileWriter, always, plain
from hlofuse.codegen.contraction import products_in_sums
from hlofuse.codegen.loop_counters import place_counters
from hlofuse.codegen.nest import Nest
from hlofuse.codegen.scalar_expr import c_type, literal_expr, store_expr
from hlofuse.codegen.values import EmitError
from hlofuse.fusion.block_loop import INLINE_TERMS
from hlofuse.fusion.loop_structure import Stacked
from hlofuse.hlo.index_map import Indices, linearize, to_c, variable
from hlofuse.hlo.module import Instruction

MAX_STATEMENTS = 1500    # of one kernel: compilers slow down beyond


def write_block_loop(nest: Nest) -> int:
    """The loop, its results, and what it writes on the way."""
    nest.begin_item()
    nest.values.unrolled = INLINE_TERMS
    writer = _Writer(nest)
    writer.run()
    statements = sum(line.rstrip().endswith(";") or "//" in line for line in nest.values.root.lines)
    if statements > MAX_STATEMENTS:
        raise EmitError(f"{statements} statements, the limit is {MAX_STATEMENTS}")
    return nest.sizing.items


class _Writer(TileWriter):
    """Writes the loop of one plan."""

    def run(self) -> None:
        nest, v, s = self.nest, self.values, self.s
        v.contracted = dict(self._contracted())
        nest.sizing = replace(nest.sizing, lanes=self.lane_count([*self.block.stored, *self.block.fixed]))
        for reader, k in s.elements.items():
            if k in s.invariants and reader not in self.block.turned:
                v.aliases[reader] = s.initial(k)
        counts = s.counter.counts if s.counter is not None else {}
        tiles = [self.tile_of(k) for k in s.carries if k not in counts]
        tiles = [t for t in tiles if t.points == 1] + [t for t in tiles if t.points > 1]
        self.tiles = {t.index: t for t in tiles}
        for i in self.block.stored:
            self.declare_array(i)
        for i in (*self.block.fixed, *(i for i in self.block.turned if i in s.elements)):
            self.declare_array(i)
        self._initialize(tiles)
        step = v.name("t")
        if s.counter is not None:
            header = f"for (int {step} = 0; {step} < {s.counter.trips}; {step}++) {{"
        else:
            header = "for (;;) {"
        if self.has_copies(tiles):
            nest.emit(f"int {self.now} = 0;")
        nest.emit("BARRIER();")
        with nest.block(header, (step,)):
            self._step(tiles, step)
        self._results(tiles)

    def _contracted(self) -> Iterator[tuple[Instruction, int]]:
        """Products of sums, but those that have an array of their own."""
        for i, number in products_in_sums([self.s]):
            product = i.operands[number]
            while product.opcode != "multiply" and product not in self.block.stored:
                product = product.operands[0]
            if product not in self.block.stored:
                yield i, number

    # --- before the loop ----------------------------------------------------------------------------------------------

    def _initialize(self, tiles: Sequence[Tile]) -> None:
        nest, v, s = self.nest, self.values, self.s
        for t in tiles:
            if t.points == 1:
                text = v.at(s.initial(t.index), self.index_of(t.value, {}))
                nest.emit(f"{c_type(t.value.element_type)} {t.name} = {text};")
        self.write_moves([Assignment(t.value, s.initial(t.index), self.next_of(t, None), plain)
                          for t in tiles if t.points > 1])
        for stacked in s.stacked:
            if not stacked.is_covered:
                self._prefill(stacked)
        copied = [i for i in self.block.turned if i in s.elements]
        self.write_moves([Assignment(i, s.initial(s.elements[i]), self.target_of(i), plain) for i in copied])
        for i in copied:
            self.publish(i)
        if copied and self.block.fixed:
            nest.emit("BARRIER();")
        for i in self.block.fixed:
            self.store_value(i)
            nest.emit("BARRIER();")     # the next may read it

    def _prefill(self, t: Stacked) -> None:
        """What no step may write keeps its initial value."""
        name = self._stacked_name(t)
        if name is None:
            return
        nest, initial = self.nest, self.s.initial(t.index)
        at = self.values.name("at")
        place = variable(at, initial.dims[t.dim])

        def element(index: Indices) -> str:
            source = list(index)
            source[t.dim] = place
            return f"{name}[{to_c(linearize(tuple(source), initial.dims))}]"

        def write(atoms: Atoms) -> None:
            index = list(self.index_of(t.update, atoms))
            index[t.dim] = place
            value = store_expr(self.values.at(initial, tuple(index)), initial.element_type)
            nest.emit(f"{element(tuple(index))} = {value};")

        with nest.block(f"for (int {at} = 0; {at} < {initial.dims[t.dim]}; {at}++) {{", (at,)):
            self.guarded(t.update, lambda: self.for_points(t.update, write))

    def _stacked_name(self, t: Stacked) -> str | None:
        """The array that a stacked element is written to; None where nothing reads it."""
        for output, name in zip(self.plan.computation.outputs, self.nest.output_names, strict=True):
            if output.attrs["index"] == t.index:
                return name
        return None

    # --- a step -------------------------------------------------------------------------------------------------------

    def _step(self, tiles: Sequence[Tile], step: str) -> None:
        nest, v, s = self.nest, self.values, self.s
        v.scope.owned = s.varying | frozenset(self.block.stored)
        for reader, k in s.elements.items():
            if k in self.tiles:
                v.sources[reader] = self.read_tile(self.tiles[k], self.now, reader)
        place_counters(v, s, step)
        early = self._needed(s.predicate) if s.counter is None else frozenset()
        self._phases([i for i in self.block.stored if i in early])
        if s.counter is None:
            nest.emit(f"if (!({v.at(s.predicate, self.index_of(s.predicate, {}))})) break;")
        self._phases([i for i in self.block.stored if i not in early])
        apart = {*self.block.home.values(), *self.block.in_place}
        whole = [t for t in tiles if t.points > 1 and t.index not in apart]
        moves = [Assignment(t.value, s.update(t.index), self.next_of(t, f"(1 - {self.now})"), plain,
                            t.index in self.block.single) for t in whole]
        for stacked in s.stacked:
            moves += self._slices(stacked)
        self.write_moves(moves)
        parts = [self._part(self.tiles[k], i) for k, chain in self.block.in_place.items() for i in chain]
        self._numbers([t for t in tiles if t.points == 1])
        nest.emit("BARRIER();")
        for write in parts:     # when all threads have read what they overwrite
            write()
            nest.emit("BARRIER();")
        if self.has_copies(tiles):
            nest.emit(f"{self.now} = 1 - {self.now};")

    def _part(self, tile: Tile, i: Instruction) -> Callable[[], None]:
        """What writes a part of a carry in its place, from a number or an array that is known by now."""
        part, starts = i.operands[1], i.operands[2:]
        begins = [self.values.clamped(s, (), n - m, "start") for s, n, m in zip(starts, i.dims, part.dims, strict=True)]
        number = ""
        if self.points_of(part) == 1:
            number = self.values.name("entry")
            text = self.values.at(part, self.index_of(part, {}))
            self.nest.emit(f"const {c_type(part.element_type)} {number} = {text};")

        def write(atoms: Atoms) -> None:
            index = self.index_of(part, atoms)
            element = self.element_at(tile.value, tile.name, tuple(x + b for x, b in zip(index, begins, strict=True)))
            self.nest.emit(f"{element} = {number or self.values.at(part, index)};")

        def write_all() -> None:
            if number:
                with self.nest.block("if (THREAD == 0) {", guard=True):
                    write({})
            else:
                self.for_points(part, write)

        return write_all

    def _needed(self, root: Instruction) -> frozenset[Instruction]:
        found, stack = {root}, [root]
        while stack:
            for o in stack.pop().operands:
                if o not in found:
                    found.add(o)
                    stack.append(o)
        return frozenset(found)

    def _phases(self, stored: Sequence[Instruction]) -> None:
        """Arrays of one phase, and a barrier before the next phase reads them."""
        levels = self.block.stored
        for level in sorted({levels[i] for i in stored}):
            now = [i for i in stored if levels[i] == level]
            for i in now:
                if self.is_fold(i):
                    self.store_value(i)
            points = [i for i in now if not self.is_fold(i)]
            self.write_moves([self.assignment_of(i) for i in points])
            for i in points:
                self.publish(i)
            if any(self.points_of(i) > 1 for i in now):
                self.nest.emit("BARRIER();")

    def _slices(self, t: Stacked) -> list[Assignment]:
        """What a step writes of a stacked array; a number of all points is written by one thread at once."""
        name = self._stacked_name(t)
        if name is None:
            return []
        dims = self.s.update(t.index).dims
        position = self.values.clamped(t.position, (), dims[t.dim] - 1, "position")

        def element(index: Indices) -> str:
            place = list(index)
            place[t.dim] = position
            return f"{name}[{to_c(linearize(tuple(place), dims))}]"

        def stores(text: str) -> str:
            return store_expr(text, t.update.element_type)

        move = Assignment(t.update, t.update, element, stores)
        if self.is_everyones(t.update) and self.points_of(t.update) > 1:
            return [move]
        self.write_guarded(move)
        return []

    def _numbers(self, tiles: Sequence[Tile]) -> None:
        """The next values of numbers; all are computed before the first old one is lost."""
        moves, targets = [], {t.name for t in tiles}
        for t in tiles:
            text = self.values.at(self.s.update(t.index), self.index_of(t.value, {}))
            if text in targets and text != t.name:
                name = self.values.name("moved")
                self.nest.emit(f"const {c_type(t.value.element_type)} {name} = {text};")
                text = name
            moves.append((t.name, text))
        for name, text in moves:
            if name != text:
                self.nest.emit(f"{name} = {text};")

    # --- behind the loop ----------------------------------------------------------------------------------------------

    def _results(self, tiles: Sequence[Tile]) -> None:
        s = self.s
        stacked = {t.index for t in s.stacked}
        moves = []
        for output, name in zip(self.plan.computation.outputs, self.nest.output_names, strict=True):
            k = output.attrs["index"]
            if k in stacked:
                continue
            if k in self.tiles:
                tile = self.tiles[k]
                self.values.sources[output] = self.read_tile(tile, self.now, output)
                place = tile.value
            elif s.counter is not None and k in s.counter.counts:
                start, step = s.counter.counts[k]
                self.values.sources[output] = always(literal_expr(start + step * s.counter.trips, output.element_type))
                place = output
            else:
                self.values.aliases[output] = s.initial(k)
                place = output

            def element(index: Indices, name: str = name, output: Instruction = output) -> str:
                return f"{name}[{to_c(linearize(index, output.dims))}]"

            def stores(text: str, output: Instruction = output) -> str:
                return store_expr(text, output.element_type)

            if self.is_everyones(place) and self.points_of(place) > 1:
                moves.append(Assignment(place, output, element, stores))
                continue

            self.write_guarded(Assignment(place, output, element, stores))
        self.write_moves(moves)
