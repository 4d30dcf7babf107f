"""The scatter form: a block owns a tile of rows x columns of the result and reads a chunk of the updates.

Every cell of the tile has one owner, who folds the updates in their order: no atomics, and the same result in every
run. Where a block folds all updates of its cells in one thread it begins with the array's own elements, else with the
operation's identity, and the array's elements and the chunks' partial results are folded in order at the end. Of an
assignment a cell keeps the number of the last update. What is element-wise after the scatter is computed at the end.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from hlofuse.codegen.nest import Nest
from hlofuse.codegen.scalar_expr import c_type, literal_expr, scalar_expr, storage_type
from hlofuse.codegen.scatter_sizing import ROUND, tile_scatters
from hlofuse.codegen.values import EmitError
from hlofuse.fusion.scatter import ASSIGN, PARTIAL, Scatter
from hlofuse.hlo.index_map import Index, constant, delinearize, linearize, to_c, var
from hlofuse.hlo.module import Instruction, post_order
from hlofuse.hlo.opcode import identity_of
from hlofuse.hlo.shape import INTEGERS, Shape


@dataclass
class _Cells:
    """The accumulators of one scatter: `width` to a row of the tile, `kind` their C type. They are in the array `name`,
    at `base`, or where the result lies if that is `direct`."""

    scatter: Scatter
    kind: str
    width: int
    name: str
    base: str = ""
    direct: bool = False
    partial: str = ""


def write_scatter(nest: Nest) -> int:
    return _Writer(nest).write()


class _Writer:
    def __init__(self, nest: Nest) -> None:
        self.nest, self.plan, self.values = nest, nest.plan, nest.values
        self.tiling = tile_scatters(self.plan.scatters, nest.dialect)
        nest.sizing = replace(nest.sizing, threads=nest.dialect.threads, lanes=1, groups=1)
        self.sequential = nest.dialect.threads == 1 and self.tiling.chunks == 1
        self.type = nest.index_type
        self.n = self.values.name("update")
        self.batch, self.target, self.element = (a.name for a in self.plan.axes)
        self.cells: list[_Cells] = []
        self.places: set[str] = set()      # lines that say where a cell lies, dropped where nothing reads them

    # --- the text, from top to bottom -------------------------------------------------------------------------------

    def write(self) -> int:
        tiling, nest = self.tiling, self.nest
        self.values.scheduled = {s.instruction for s in self.plan.scatters}
        self._begin()
        self.cells = [self._new_cells(s) for s in self.plan.scatters]
        for c in self.cells:
            with self._each_cell(c.width):
                start = self._array_element(c) if self.sequential else self._identity(c)
                nest.emit(f"{self._cell(c)} = {start};")
        nest.emit("BARRIER();")
        self._row_of()
        self._fold_row()
        wide = [c for c in self.cells if c.width > 1 and tiling.by_column]
        if wide:
            self._fold(wide)
            columns = self._int("columns")
            nest.emit(f"for_wide_updates<THREADS, {ROUND}, {tiling.columns}>(first, last, {columns}, row_of, fold_row, "
                      "read, fold);")
        else:
            nest.emit(f"for_updates<THREADS, {ROUND}>(first, last, row_of, fold_row);")
        nest.emit("BARRIER();")
        if tiling.chunks == 1:
            self._finish()
            return tiling.items
        for c in self.cells:
            if not c.partial:
                self._leave_partial(c)
        nest.counters = tiling.items
        with nest.block(f"if (is_last_block(counters + BLOCK / {tiling.chunks}, {tiling.chunks})) {{", guard=True):
            self._finish()
        return tiling.items * tiling.chunks

    def _begin(self) -> None:
        """Takes BLOCK apart into the batch element, the tile of rows, the tile of columns and the chunk."""
        nest, t, z = self.nest, self.type, self.tiling
        texts, rest = [], "BLOCK"
        for count in (z.chunks, z.column_tiles, z.row_tiles, z.batches):
            texts.append(f"({t})({rest} % {count})" if count > 1 else "0")
            rest = rest if count == 1 else f"({rest} / {count})"
        chunk, column_tile, row_tile, batch = texts
        nest.where[self.batch] = var(self.batch, 0, z.batches - 1)
        if z.batches > 1:
            nest.emit(f"const {t} {self.batch} = {batch};")
        for what, tile, size, total, tiles in (("row", row_tile, z.rows, z.row_count, z.row_tiles),
                                               ("column", column_tile, z.columns, z.column_count, z.column_tiles)):
            if tiles == 1:
                nest.emit(f"const {t} {what}s = {total};")
            elif total % size == 0:
                nest.emit(f"const {t} {what}0 = {tile} * {size}, {what}s = {size};")
            else:
                nest.emit(f"const {t} {what}0 = {tile} * {size}, {what}s = {total} - {what}0 < {size} ? "
                          f"{total} - {what}0 : {size};")
        if z.chunks == 1:
            nest.emit(f"const {t} first = 0, last = {z.updates};")
        else:
            size = z.chunk_size
            nest.emit(f"const {t} first = {chunk} * {size}, last = {z.updates} - first < {size} ? {z.updates} : "
                      f"first + {size};")

    def _new_cells(self, s: Scatter) -> _Cells:
        nest, z = self.nest, self.tiling
        kind, width = c_type(s.instruction.element_type), z.width(s)
        if z.keeps_number(s):
            kind = "s32" if self.type == "int" else "s64"
        count = z.rows * width
        outputs = self.plan.computation.outputs
        if self.sequential and s.instruction in outputs and storage_type(s.instruction.element_type) == kind and \
                (s.column_count > 1 or z.column_tiles == 1):
            k = outputs.index(s.instruction)
            if s.array.opcode == "parameter" and self._is_read_once(s.array):
                nest.aliases[self.plan.computation.parameters.index(s.array)] = k
            return _Cells(s, kind, width, nest.output_names[k], direct=True)
        if nest.dialect.threads > 1:
            name = self.values.name(f"{s.instruction.name or 'scatter'}_tile")
            nest.emit(f"SHARED({kind}, {name}, {count});")
            nest.shared_bytes += count * _size(kind)
            return _Cells(s, kind, width, name)
        name = nest.new_scratch(kind, z.items * z.chunks * count)
        base = self.values.name("cell0")
        nest.emit(f"const long long {base} = (long long)BLOCK * {count};")
        return _Cells(s, kind, width, name, base=f"{base} + ", partial=name if z.chunks > 1 else "")

    def _is_read_once(self, p: Instruction) -> bool:
        users = self.plan.computation.users[p]
        return len(users) == 1 and sum(o is p for o in users[0].operands) == 1

    def _row_of(self) -> None:
        """Which row of the tile an index vector names; -1 if none."""
        nest, t, s = self.nest, self.type, self.plan.scatters[0]
        with nest.block(f"const auto row_of = [&](const {t} {self.n}) INLINE -> int {{", (self.n,), "};"):
            vector_dim = s.instruction.attrs["index_vector_dim"]
            place = self._update_place(s)
            conditions, row, stride = [], [], 1
            for d, component in reversed(list(zip(s.rows, s.components, strict=True))):
                where = list(place)
                if vector_dim < len(s.indices.dims):
                    where.insert(vector_dim, constant(component))
                value = self.values.at(s.indices, tuple(where))
                conditions += _inside(value, s.indices.element_type, s.instruction.dims[d])
                whole = value if (t, s.indices.element_type) == ("int", "s32") else f"({t}){value}"
                row.append(whole + (f" * {stride}" if stride > 1 else ""))
                stride *= s.instruction.dims[d]
            test, text = " && ".join(conditions), " + ".join(reversed(row)) or "0"
            if self.tiling.row_tiles == 1:
                text = text if t == "int" else f"(int)({text})"
                nest.emit(f"return {test} ? {text} : -1;" if test else f"return {text};")
            else:
                nest.emit(f"const {t} {self.target} = " + (f"{test} ? {text} : -1;" if test else f"{text};"))
                inside = f"{self.target} >= row0 && {self.target} < row0 + rows"
                nest.emit(f"return {inside} ? {self._int(f'{self.target} - row0')} : -1;")

    def _fold_row(self) -> None:
        """What is folded for a whole update: where a row has one cell, or threads do not lie along it."""
        nest, t = self.nest, self.type
        with self._block(f"const auto fold_row = [&](const {t} {self.n}, const int row) INLINE {{",
                         (self.n, "row", self.target), "};"):
            self._declare_target()
            for c in self.cells:
                if self.tiling.keeps_number(c.scatter):
                    nest.emit(f"{c.name}[{c.base}row] = {self.n};")
                elif c.width == 1:
                    nest.where[self.element] = constant(0)
                    self._fold_one(c, self._update(c.scatter))
                elif not self.tiling.by_column:
                    limit = self.tiling.columns if self.tiling.column_tiles == 1 else "columns"
                    header = f"for (int column = 0; column < {limit}; column++) {{"
                    with self._block(header, ("column", self.element), "}"):
                        self._declare_element()
                        self._fold_one(c, self._update(c.scatter))

    def _fold(self, cells: Sequence[_Cells]) -> None:
        """`read` an update's elements of one column, and `fold` them: apart, so that several reads are under way."""
        nest, t = self.nest, self.type
        kind = self.values.name("Update")
        fields = [self.values.name("value") for _ in cells]
        nest.emit(f"struct {kind} {{ {' '.join(f'{c.kind} {f};' for c, f in zip(cells, fields, strict=True))} }};")
        with self._block(f"const auto read = [&](const {t} {self.n}, const int column) INLINE {{",
                         (self.n, "column", self.element), "};"):
            self._declare_element()
            nest.emit(f"return {kind}{{{', '.join(self._update(c.scatter) for c in cells)}}};")
        with self._block(f"const auto fold = [&](const int row, const int column, const {kind}& read_value) INLINE {{",
                         ("row", "column", self.target, self.element), "};"):
            self._declare_target()
            self._declare_element()
            for c, f in zip(cells, fields, strict=True):
                self._fold_one(c, f"read_value.{f}")

    def _fold_one(self, c: _Cells, value: str) -> None:
        self.nest.emit(f"{self._cell(c)} = {self._folded(c.scatter, self._cell(c), value)};")

    def _leave_partial(self, c: _Cells) -> None:
        nest, z = self.nest, self.tiling
        count = z.rows * c.width
        c.partial = nest.new_scratch(c.kind, z.items * z.chunks * count)
        cell = f"row * {c.width} + column" if c.width > 1 else "row"
        with self._each_cell(c.width):
            nest.emit(f"{c.partial}[(long long)BLOCK * {count} + {cell}] = {self._cell(c)};")

    def _finish(self) -> None:
        """The totals of every cell, and what is computed from them."""
        nest, computation = self.nest, self.plan.computation
        mask, domain = self.plan.analysis.mask, self.plan.domain_mask
        direct = {c.scatter.instruction for c in self.cells if c.direct}
        stores = [k for k, o in enumerate(computation.outputs)
                  if o not in direct or computation.outputs.index(o) != k]
        whole = [k for k in stores if mask(computation.outputs[k]) == domain]
        rows = [k for k in stores if k not in whole]
        if whole:
            with self._each_cell(self.tiling.columns):
                self._totals(whole)
                for k in whole:
                    nest.store(k)
        if rows:
            with self._when_first_columns(), self._each_cell(1):
                self._totals(rows)
                for k in rows:
                    nest.store(k)

    @contextmanager
    def _when_first_columns(self) -> Iterator[None]:
        if self.tiling.column_tiles == 1:
            yield
            return
        with self.nest.block("if (column0 == 0) {", guard=True):
            yield

    # --- pieces -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _each_cell(self, width: int) -> Iterator[None]:
        """Every cell of the tile, or of its first column."""
        columns = self._int("columns") if width > 1 else "1"
        with self._block(f"for_cells<THREADS, {width}>({self._int('rows')}, {columns}, "
                         "[&](const int row, const int column) INLINE {",
                         ("row", "column", self.target, self.element), "});"):
            self._declare_target()
            if width > 1:
                self._declare_element()
            else:
                self.nest.where[self.element] = constant(0)
            yield

    def _int(self, text: str) -> str:
        return text if self.type == "int" else f"(int)({text})"

    def _declare_target(self) -> None:
        z = self.tiling
        self.nest.where[self.target] = var(self.target, 0, z.row_count - 1)
        if z.row_count > 1:
            self._emit_place(self.target, "row")

    def _declare_element(self) -> None:
        z = self.tiling
        self.nest.where[self.element] = var(self.element, 0, z.column_count - 1)
        if z.column_count > 1:
            self._emit_place(self.element, "column")

    def _emit_place(self, name: str, what: str) -> None:
        first = f"{what}0 + " if getattr(self.tiling, f"{what}_tiles") > 1 else ""
        line = f"const {self.type} {name} = {first}{what};"
        self.places.add(line)
        self.nest.emit(line)

    @contextmanager
    def _block(self, header: str, variables: Sequence[str], footer: str = "};") -> Iterator[None]:
        """As the nest's, without the places that nothing in it reads."""
        with self.values.inside(variables) as scope:
            yield
        lines = scope.lines
        for k in reversed(range(len(lines))):
            if lines[k] in self.places:
                name = lines[k].split()[2] if not self.type.startswith("long") else lines[k].split()[3]
                if not any(re.search(rf"\b{name}\b", other) for other in lines[k + 1:]):
                    del lines[k]
        self.nest.emit(header)
        self.values.scope.lines.extend("  " + line for line in lines)
        self.nest.emit(footer)

    def _cell(self, c: _Cells) -> str:
        if c.direct:
            i = c.scatter.instruction
            return f"{c.name}[{to_c(linearize(self.plan.canonical(i, self.nest.where), i.dims))}]"
        return f"{c.name}[{c.base}row * {c.width} + column]" if c.width > 1 else f"{c.name}[{c.base}row]"

    def _identity(self, c: _Cells) -> str:
        if self.tiling.keeps_number(c.scatter):
            return "-1"
        kind = c.scatter.instruction.element_type
        return literal_expr(np.asarray(identity_of(PARTIAL[c.scatter.combine], kind)), kind)

    def _array_element(self, c: _Cells) -> str:
        if self.tiling.keeps_number(c.scatter):
            return "-1"
        return self.values.at(c.scatter.array, self.plan.canonical(c.scatter.instruction, self.nest.where))

    def _update_place(self, s: Scatter) -> list[Index]:
        """The updates' own dimensions at the update `n` of this batch element."""
        own = [k for k in range(len(s.update_dims)) if k not in s.batch_at]
        flat = var(self.n, 0, s.update_count - 1)
        place = dict(zip(own, delinearize(flat, [s.update_dims[k] for k in own]), strict=True))
        batch = delinearize(self.nest.where[self.batch], s.sizes(s.batch))
        place.update(zip(s.batch_at, batch, strict=True))
        return [place[k] for k in range(len(s.update_dims))]

    def _update(self, s: Scatter) -> str:
        """The element of an update at this column."""
        window = sorted(s.instruction.attrs["update_window_dims"])
        columns = dict(zip(window, delinearize(self.nest.where[self.element], s.sizes(s.columns)), strict=True))
        rest = iter(self._update_place(s))
        return self.values.at(s.updates, tuple(columns[k] if k in columns else next(rest)
                                               for k in range(len(s.updates.dims))))

    def _folded(self, s: Scatter, cell: str, value: str) -> str:
        """One update folded into a cell, rounded as HLO does."""
        if s.combine == ASSIGN:
            return value
        root = s.instruction.attrs["to_apply"].root
        kind = s.instruction.element_type
        return scalar_expr(root, [cell, value], [kind, kind])

    def _folded_partials(self, s: Scatter, cell: str, value: str) -> str:
        root = s.instruction.attrs["to_apply"].root
        kind = s.instruction.element_type
        same = Instruction(PARTIAL[s.combine], Shape(kind), root.operands, {})
        return scalar_expr(same, [cell, value], [kind, kind])

    def _totals(self, outputs: Sequence[int]) -> None:
        """Declares what the scatters that these outputs need come to at this cell."""
        roots = tuple(self.plan.computation.outputs[k] for k in outputs)
        needed = set(post_order(roots))
        for c in self.cells:
            i = c.scatter.instruction
            if i not in needed:
                continue
            place = self.plan.canonical(i, self.nest.where)
            make: Callable[[_Cells, tuple[Index, ...]], str] = \
                self._assigned if self.tiling.keeps_number(c.scatter) else self._total
            self.values.scope.memo[(i, place)] = make(c, place)

    def _total(self, c: _Cells, place: tuple[Index, ...]) -> str:
        nest, s, z = self.nest, c.scatter, self.tiling
        name = self.values.name(f"{s.instruction.name or 'scatter'}_total")
        if self.sequential:
            nest.emit(f"const {c.kind} {name} = {self._cell(c)};")
            return name
        nest.emit(f"{c.kind} {name} = {self.values.at(s.array, place)};")
        if z.chunks == 1:
            nest.emit(f"{name} = {self._folded_partials(s, name, self._cell(c))};")
            return name
        with nest.block(f"for (int chunk = 0; chunk < {z.chunks}; chunk++) {{"):
            nest.emit(f"{name} = {self._folded_partials(s, name, self._partial(c))};")
        return name

    def _partial(self, c: _Cells) -> str:
        z = self.tiling
        column = f" * {c.width} + column" if c.width > 1 else ""
        return (f"{c.partial}[((long long)BLOCK / {z.chunks} * {z.chunks} + chunk) * {z.rows * c.width} + row{column}]")

    def _assigned(self, c: _Cells, place: tuple[Index, ...]) -> str:
        """The last update's element, or what the array has."""
        nest, s, z, v = self.nest, c.scatter, self.tiling, self.values
        if z.chunks == 1:
            nest.emit(f"const {c.kind} {self.n} = {self._cell(c)};")
        else:
            nest.emit(f"{c.kind} {self.n} = -1;")
            with nest.block(f"for (int chunk = 0; chunk < {z.chunks}; chunk++) {{"):
                partial = self._partial(c)
                nest.emit(f"if ({partial} >= 0) {self.n} = {partial};")
        name = v.name(s.instruction.name or "scatter")
        with v.inside((self.n,), guard=True) as yes:
            v.scope.lines.append(f"{name} = {self._update(s)};")
        with v.inside(guard=True) as no:
            v.scope.lines.append(f"{name} = {v.at(s.array, place)};")
        nest.emit(f"{c_type(s.instruction.element_type)} {name};{v.comment(s.instruction)}")
        nest.emit(f"if ({self.n} >= 0) {{")
        v.scope.lines.extend("  " + line for line in yes.lines)
        nest.emit("} else {")
        v.scope.lines.extend("  " + line for line in no.lines)
        nest.emit("}")
        return name


def _inside(value: str, element_type: str, size: int) -> list[str]:
    """The conditions under which an index is in [0, size)."""
    if element_type not in INTEGERS:
        raise EmitError(f"an index of type {element_type}")
    limits = np.iinfo(Shape(element_type).dtype)
    tests = [f"{value} >= 0"] if limits.min < 0 else []
    if size <= limits.max:
        tests.append(f"{value} < {literal_expr(np.asarray(size, Shape(element_type).dtype), element_type)}")
    return tests


def _size(kind: str) -> int:
    return {"float": 4, "double": 8, "bool": 1}.get(kind) or Shape(kind).dtype.itemsize
