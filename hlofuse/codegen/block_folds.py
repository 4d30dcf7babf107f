"""What all threads of a block compute together of one tile: its points, and reductions over it.

A reduction has a thread (a run of lanes on the CPU) for each result, which folds in order, or a warp for each result,
or the whole block for the only one, in a fixed tree.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hlofuse.codegen.lanes import LaneWriter
from hlofuse.codegen.nest import MAX_VARIANTS, Nest
from hlofuse.codegen.reduction import initial_values, rounded
from hlofuse.codegen.scalar_expr import c_type
from hlofuse.codegen.values import insert
from hlofuse.fusion.block_loop import terms_of, tile_axes
from hlofuse.fusion.loop_space import span
from hlofuse.fusion.plan import Axis
from hlofuse.hlo.index_map import ZERO, Index, Indices, constant, delinearize, var, variable
from hlofuse.hlo.module import Instruction

Atoms = dict[int, Index]
WARP = 32
LEAST_LANES = 32     # fewer are written out, see FOR_RUN
TOGETHER = 4         # terms of a product that a lane folds at once
FOLD_STEPS = 12      # what folding a warp costs, in steps of a thread's loop


class FoldWriter(LaneWriter):
    """Writes the loops of a block over parts of its tile."""

    def __init__(self, nest: Nest) -> None:
        super().__init__(nest)
        assert nest.plan.block is not None
        self.block = nest.plan.block
        self._points = "for_points"
        self._axes: dict[tuple[int, ...], tuple[Axis, ...]] = {}
        for n in range(8):
            for name in (f"r{n}", f"r{n}0"):
                self.values.name(name)
        for axis in ("v", "row", *(a for value in self._arrays() for a in (x.name for x in self.axes_of(value)))):
            if axis not in self.values.used:
                self.values.name(axis)
                self.values.name(f"{axis}0")

    def _arrays(self) -> Iterator[Instruction]:
        yield from self.block.stored
        yield from self.block.fixed
        yield from self.block.structure.elements
        yield from (self.block.structure.update(k) for k in self.block.structure.carries)
        yield from (t.update for t in self.block.structure.stacked)

    # --- axes ---------------------------------------------------------------------------------------------------------

    def tile_atoms(self, value: Instruction) -> tuple[int, ...]:
        return tuple(a for a in self.axes.atoms(value) if not self.block.lanes >> a & 1)

    def axes_of(self, value: Instruction) -> tuple[Axis, ...]:
        atoms = self.tile_atoms(value)
        if atoms not in self._axes:
            self._axes[atoms] = tile_axes(self.plan, value)
        return self._axes[atoms]

    def points_of(self, value: Instruction) -> int:
        return span(self.axes.mask(value) & ~self.block.lanes, self.axes)

    def split(self, sizes: Sequence[int]) -> int:
        """Where the axes begin that threads, or the lanes of a vector, run over together."""
        cut, size = len(sizes), 1
        while cut and size < self.nest.dialect.block_minimum:
            cut -= 1
            size *= sizes[cut]
        return cut

    def atoms_at(self, axes: Sequence[Axis], where: Sequence[Index]) -> Atoms:
        found: Atoms = {}
        for axis, index in zip(axes, where, strict=True):
            sizes = [self.axes.size(a) for a in axis.atoms]
            found.update(zip(axis.atoms, delinearize(index, sizes), strict=True))
        return found

    # --- points -------------------------------------------------------------------------------------------------------

    def for_points(self, value: Instruction, write: Callable[[Atoms], None], again: bool = True) -> None:
        """`write` at each point of a value; one thread has several, and computes some `again` if that is allowed."""
        axes = self.axes_of(value)
        if not axes:
            write({})
            return
        cut = self.split([a.size for a in axes])
        outer, vector = axes[:cut], axes[cut:]
        name = vector[0].name if len(vector) == 1 else "v"
        loops = [*((a.name, a.size) for a in outer), (name, math.prod(a.size for a in vector))]
        pieces = self._pieces(loops, lambda where: write(self._atoms_of(outer, vector, where)))
        self._points = "for_points_again" if again else "for_points"
        self._loops(loops, pieces, [], lambda where: write(self._atoms_of(outer, vector, where)))

    def _atoms_of(self, outer: Sequence[Axis], vector: Sequence[Axis], where: Sequence[Index]) -> Atoms:
        inner = delinearize(where[-1], [a.size for a in vector])
        return self.atoms_at((*outer, *vector), (*where[:-1], *inner))

    def _pieces(self, loops: Sequence[tuple[str, int]], write: Callable[[Sequence[Index]], None]) -> list[list[int]]:
        """Where each loop is cut: where a branch of its body changes, so that most points take none. Threads that run
        side by side take branches instead."""
        whole = [[0, size] for _, size in loops]
        if self.nest.sizing.threads > 1:
            return whole
        v = self.values
        v.breakpoints = {}
        with v.dry_run(), v.inside([name for name, _ in loops]):
            write([variable(name, size) for name, size in loops])
        found, v.breakpoints = v.breakpoints, None
        cuts = [[0, *sorted(b for b in found.get(name, ()) if 0 < b < size), size] for name, size in loops]
        if math.prod(len(c) - 1 for c in cuts) <= MAX_VARIANTS:
            return cuts
        return [*whole[:-1], cuts[-1]] if len(cuts[-1]) <= MAX_VARIANTS else whole

    def _loops(self, loops: Sequence[tuple[str, int]], pieces: Sequence[Sequence[int]], where: list[Index],
               write: Callable[[Sequence[Index]], None]) -> None:
        depth, nest, t = len(where), self.nest, self.nest.index_type
        name, edges = loops[depth][0], pieces[depth]
        is_last = depth == len(loops) - 1
        for low, high in zip(edges[:-1], edges[1:], strict=True):
            here = [*where, var(name, low, high - 1)]
            if is_last:
                if high - low == 1:
                    with nest.block("if (THREAD == 0) {"):
                        write(here)
                    continue
                with nest.block(f"{self._points}<THREADS>(({t}){low}, ({t}){high}, [&](const {t} {name}) INLINE {{",
                                (name,), "});"):
                    write(here)
            elif high - low == 1:
                with nest.block("{"):
                    self._loops(loops, pieces, here, write)
            else:
                with nest.block(f"for ({t} {name} = {low}; {name} < {high}; {name}++) {{", (name,)):
                    self._loops(loops, pieces, here, write)

    # --- reductions ---------------------------------------------------------------------------------------------------

    def is_fold(self, i: Instruction) -> bool:
        producer = i.operands[0] if i.opcode == "get-tuple-element" else i
        return producer.opcode in ("reduce", "dot")

    def lane_count(self, stored: Sequence[Instruction]) -> int:
        """LANES of the kernel: accumulators of one thread, few enough that folding them is the smaller part."""
        folds = [self._fold_of(i).sizes for i in stored if self.is_fold(i) and self._folds_along(i)]
        runs = [math.prod(sizes[self.split(sizes):]) for sizes in folds]
        if self.nest.sizing.threads > 1:
            return 1
        return max(LEAST_LANES, min([self.nest.dialect.row_lanes, *(1 << (n // 4 | 1).bit_length() - 1 for n in runs)]))

    def _fold_of(self, i: Instruction) -> _Fold:
        producer = i.operands[0] if i.opcode == "get-tuple-element" else i
        return _Fold(self, producer)

    def _folds_along(self, i: Instruction) -> bool:
        """Whether the lanes or threads run over what is folded, not over the results."""
        results, terms, threads = self.points_of(i), terms_of(self._fold_of(i).instruction), self.nest.sizing.threads
        if results == 1:
            return True
        if not self.block.turned.keys().isdisjoint(self._fold_of(i).instruction.operands):
            return False
        if threads == 1:
            return self._fold_of(i).is_along or self.axes_of(i)[-1].size < 8 <= terms
        if threads < WARP:
            return False
        by_thread = terms * -(-results // threads)
        by_warp = -(-results // (threads // WARP)) * (-(-terms // WARP) + FOLD_STEPS)
        return by_warp < by_thread

    def fold_to_numbers(self, i: Instruction, results: Sequence[Instruction]) -> list[str]:
        """A reduction with one result for the whole block; the names of numbers that all threads have."""
        fold = self._fold_of(i)
        names = self._fold_row(fold, self.index_of(i, {}), "THREADS")
        return [rounded(r.element_type, names[r.attrs["index"] if r.opcode == "get-tuple-element" else 0])
                for r in results]

    def fold_to_arrays(self, i: Instruction, results: Sequence[Instruction],
                       targets: Sequence[Callable[[Indices], str]]) -> None:
        fold, nest, axes = self._fold_of(i), self.nest, self.axes_of(i)

        def store(index: Indices, names: Sequence[str]) -> None:
            for r, target in zip(results, targets, strict=True):
                text = rounded(r.element_type, names[r.attrs["index"] if r.opcode == "get-tuple-element" else 0])
                nest.emit(f"{target(index)} = {text};")

        if self._folds_along(i):
            rows = self.points_of(i)
            group = min(WARP, nest.sizing.threads)
            with nest.block(f"for_rows<THREADS, {group}>({rows}, [&](const int row) INLINE {{", ("row",), "});"):
                where = delinearize(variable("row", rows), [a.size for a in axes])
                index = self.index_of(i, self.atoms_at(axes, where))
                names = self._fold_row(fold, index, str(group))
                with nest.block(f"if (THREAD % {group} == 0) {{", guard=True):
                    store(index, names)
            return
        self._fold_columns(fold, i, axes, store)

    def _fold_columns(self, fold: _Fold, i: Instruction, axes: Sequence[Axis],
                      store: Callable[[Indices, Sequence[str]], None]) -> None:
        """A lane for each result, which folds in order."""
        nest, t = self.nest, self.nest.index_type
        cut = self.split([a.size for a in axes])
        outer, vector = axes[:cut], axes[cut:]
        name, size = vector[0].name if len(vector) == 1 else "v", math.prod(a.size for a in vector)
        where = [*(variable(a.name, a.size) for a in outer), variable(name, size)]
        index = self.index_of(i, self._atoms_of(outer, vector, where))
        lanes = min(nest.dialect.block_lanes, max(LEAST_LANES, 1 << (size.bit_length() - 1)))
        with self._for_each(outer):
            with nest.block(f"for_tiles<THREADS, {lanes}>(({t})0, ({t}){size}, [&](const {t} {name}0, const int count) "
                            "INLINE {", footer="});"):
                if lanes != nest.sizing.lanes:
                    nest.emit(f"enum {{ LANES = {lanes} }};")
                fold.declare()
                self._terms(fold, index, name)
                with self._each_lane(name):
                    fold.add_initial()
                    store(index, [f"{a}[l]" for a in fold.names])

    def _terms(self, fold: _Fold, index: Indices, name: str) -> None:
        """Each lane's terms, in order; several at once, so that accumulators stay in registers for longer."""
        *outer, last = fold.sizes
        together = TOGETHER if fold.is_dot and last >= 2 * TOGETHER else 1
        places = [variable(f"r{n}", k) for n, k in enumerate(outer)]
        inner = f"r{len(outer)}"
        with self._for_terms(outer):
            with self._for_terms([last // together], len(outer)), self._each_lane(name):
                for k in range(together):
                    fold.accumulate(index, [*places, variable(inner, last // together) * together + k])
            if last % together:
                with self._each_lane(name):
                    for k in range(last - last % together, last):
                        fold.accumulate(index, [*places, constant(k)])

    @contextmanager
    def _for_each(self, axes: Sequence[Axis]) -> Iterator[None]:
        if not axes:
            yield
            return
        a, t = axes[0], self.nest.index_type
        with self.nest.block(f"for ({t} {a.name} = 0; {a.name} < {a.size}; {a.name}++) {{", (a.name,)):
            with self._for_each(axes[1:]):
                yield

    @contextmanager
    def _for_terms(self, sizes: Sequence[int], first: int = 0) -> Iterator[None]:
        """Loops over sizes, with variables from number `first` on."""
        if not sizes:
            yield
            return
        name, t = f"r{first}", self.nest.index_type
        if sizes[0] == 1:
            with self._for_terms(sizes[1:], first + 1):
                yield
            return
        with self.nest.block(f"for ({t} {name} = 0; {name} < {sizes[0]}; {name}++) {{", (name,)):
            with self._for_terms(sizes[1:], first + 1):
                yield

    @contextmanager
    def _each_lane(self, name: str) -> Iterator[None]:
        with self.nest.block("FOR_RUN(l, count) {", (name, "l")):
            self.nest.emit(f"const {self.nest.index_type} {name} = {name}0 + l;")
            yield

    def _fold_row(self, fold: _Fold, index: Indices, group: str) -> list[str]:
        """Lanes and threads over what one result folds; the names of the results."""
        nest, t = self.nest, self.nest.index_type
        fold.declare()
        cut = self.split(fold.sizes)
        outer, vector = fold.sizes[:cut], fold.sizes[cut:]
        name = f"r{cut}"
        inner = delinearize(variable(name, math.prod(vector)), vector)
        places = [*(variable(f"r{n}", k) for n, k in enumerate(outer)), *inner]
        with self._for_terms(outer):
            with nest.block(f"for_tiles<{group}, LANES>(({t})0, ({t}){math.prod(vector)}, "
                            f"[&](const {t} {name}0, const int count) INLINE {{", footer="});"), self._each_lane(name):
                fold.accumulate(index, places)
        names, reducer = fold.names, fold.folder()
        nest.emit(f"fold_lanes<LANES>({', '.join([reducer, *names])});")
        nest.emit(f"fold_threads<{group}>({', '.join([reducer, *(f'{a}[0]' for a in names)])});")
        if group == "THREADS" and nest.sizing.threads > WARP:
            nest.shared_bytes += 32 * 8 * len(names)
        fold.add_initial("0")
        return [f"{a}[0]" for a in names]


class _Fold:
    """A reduction, or a product, while it is written: its accumulators, and what they fold at a place."""

    def __init__(self, writer: FoldWriter, i: Instruction) -> None:
        self.writer, self.instruction, self.values = writer, i, writer.values
        self.names: list[str] = []
        self.late: list[str] = []
        self.is_dot = i.opcode == "dot"
        n = len(i.operands) // 2
        if self.is_dot:
            self.over = tuple(i.attrs["lhs_contracting_dims"]), tuple(i.attrs["rhs_contracting_dims"])
            self.sizes = [i.operands[0].dims[d] for d in self.over[0]]
            self.folded: tuple[Instruction, ...] = (i,)
        else:
            self.sizes = [i.operands[0].dims[d] for d in i.attrs["dimensions"]]
            self.folded = i.operands[:n]

    @property
    def is_along(self) -> bool:
        """Whether the neighbors in memory are folded, not neighboring results."""
        i = self.instruction
        if not self.is_dot:
            return len(i.operands[0].dims) - 1 in i.attrs["dimensions"]
        left, right = i.operands
        if left in self.writer.block.turned or right in self.writer.block.turned:
            return False
        batch = len(i.attrs.get("rhs_batch_dims", ()))
        side = 1 if len(right.dims) > batch + len(self.over[1]) else 0
        return len(i.operands[side].dims) - 1 in self.over[side]

    def declare(self) -> None:
        emit, v, i = self.writer.nest.emit, self.values, self.instruction
        types = [c_type(o.element_type) for o in self.folded]
        starts = ["0"]
        self.late = []
        if not self.is_dot:
            starts = []
            for init in i.operands[len(self.folded):]:
                start, late = initial_values(i.attrs["to_apply"], init.element_type, v.at(init, ()))
                starts.append(start)
                self.late += late
        self.names = [v.name(i.name or ("product" if self.is_dot else "sum")) for _ in types]
        for name, kind, start in zip(self.names, types, starts, strict=True):
            emit(f"{kind} {name}[LANES];")
            emit(f"for (int l = 0; l < LANES; l++) {name}[l] = {start};")

    def accumulate(self, index: Indices, places: Sequence[Index]) -> None:
        emit, v, i = self.writer.nest.emit, self.values, self.instruction
        if self.is_dot:
            left, right = (v.at(o, p) for o, p in zip(i.operands, self._factors(index, places), strict=True))
            emit(f"{self.names[0]}[l] = mul_add({left}, {right}, {self.names[0]}[l]);{v.comment(i)}")
            return
        full = insert(index, i.attrs["dimensions"], places)
        values = [v.at(o, full) for o in self.folded]
        emit(f"{v.reducer(i)}({', '.join([*(f'{a}[l]' for a in self.names), *values])});{v.comment(i)}")

    def _factors(self, index: Indices, places: Sequence[Index]) -> tuple[Indices, Indices]:
        i, attrs = self.instruction, self.instruction.attrs
        batch = (tuple(attrs.get("lhs_batch_dims", ())), tuple(attrs.get("rhs_batch_dims", ())))
        rest = list(index[len(batch[0]):])
        found: list[Indices] = []
        for side, operand in enumerate(i.operands):
            place: list[Index] = [ZERO] * len(operand.dims)
            for d, at in zip(batch[side], index, strict=False):
                place[d] = at
            for d, at in zip(self.over[side], places, strict=True):
                place[d] = at
            for d in range(len(operand.dims)):
                if d not in batch[side] and d not in self.over[side]:
                    place[d] = rest.pop(0)
            found.append(tuple(place))
        return found[0], found[1]

    def folder(self) -> str:
        """What folds two accumulators."""
        if not self.is_dot:
            return self.values.reducer(self.instruction)
        kind = c_type(self.instruction.element_type)
        name = f"add_{kind}"
        if name not in self.values.used:
            name = self.values.name(name)
            self.values.root.lines.insert(0, f"const auto {name} = []({kind}& a, const {kind} b) {{ a = a + b; }};")
        return name

    def add_initial(self, lane: str = "l") -> None:
        """An initial value that is not the identity is folded in once."""
        for name, init in zip(self.names, self.late, strict=False):
            self.writer.nest.emit(f"{self.values.reducer(self.instruction)}({name}[{lane}], {init});")

