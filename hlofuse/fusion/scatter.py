"""Scatters as kernels: how a scatter's arrays lie, and the plan of a kernel that holds some.

A scatter adds *updates* to the *cells* of an array: `rows` are the cells' dimensions that an index vector names,
`columns` those that an update covers whole. A kernel's blocks own tiles of rows x columns, and in a block every cell
has one owner, who folds its updates in their order. All scatters of a kernel read the same index vectors.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hlofuse.fusion.axes import Axes
from hlofuse.fusion.plan import INLINE_REDUCTION, Axis, Plan, Refusal, check_axes, reduced_size
from hlofuse.hlo.module import Computation, Instruction
from hlofuse.hlo.opcode import identity_of
from hlofuse.hlo.shape import FUSIBLE, Shape

ASSIGN = "assign"     # the last update stays: its number is what a cell remembers
# How partial results are folded, by what folds an update.
PARTIAL = {"subtract": "add", "add": "add", "multiply": "multiply", "minimum": "minimum", "maximum": "maximum",
           "and": "and", "or": "or", "xor": "xor", ASSIGN: "maximum"}


@dataclass(frozen=True, eq=False)
class Scatter:
    """The dimensions of a scatter by role. Of the array: `batch`, `rows` (with the `component` of the index vector that
    names each) and `columns`. `batch_at` are the batch's positions among the updates' own dimensions, of which
    `update_dims` are the sizes."""

    instruction: Instruction
    batch: tuple[int, ...]
    rows: tuple[int, ...]
    components: tuple[int, ...]
    columns: tuple[int, ...]
    batch_at: tuple[int, ...]
    update_dims: tuple[int, ...]
    combine: str

    @property
    def array(self) -> Instruction:
        return self.instruction.operands[0]

    @property
    def indices(self) -> Instruction:
        return self.instruction.operands[1]

    @property
    def updates(self) -> Instruction:
        return self.instruction.operands[2]

    def sizes(self, dims: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.instruction.dims[d] for d in dims)

    @property
    def row_count(self) -> int:
        return math.prod(self.sizes(self.rows))

    @property
    def column_count(self) -> int:
        return math.prod(self.sizes(self.columns))

    @property
    def batch_count(self) -> int:
        return math.prod(self.sizes(self.batch))

    @property
    def update_count(self) -> int:
        """Index vectors of one batch element."""
        return math.prod(n for k, n in enumerate(self.update_dims) if k not in self.batch_at)

    @property
    def has_runs(self) -> bool:
        """Whether neighbors in the updates' memory are neighboring columns."""
        rank = len(self.updates.dims)
        return bool(self.columns) and rank - 1 in self.instruction.attrs["update_window_dims"]

    @property
    def layout(self) -> tuple[object, ...]:
        """Equal for scatters that may share a kernel: the same index vectors name rows of the same sizes."""
        return (self.indices, self.sizes(self.batch), self.sizes(self.rows), self.components, self.batch_at,
                self.update_dims)


def scatter_of(i: Instruction) -> Scatter | str:
    """The dimensions of a scatter that a kernel can compute, else why none can."""
    attrs = i.attrs
    arrays = [i.shape, *(o.shape for o in i.operands)]
    if len(i.operands) != 3 or not all(isinstance(s, Shape) and s.element_type in FUSIBLE and s.size for s in arrays):
        return "it scatters several arrays, none, or elements of a type that kernels do not compute"
    combine = _combine(i)
    if combine is None:
        return "its computation is neither one operation with an identity nor an assignment"
    array, indices, updates = i.operands
    window = tuple(sorted(attrs["update_window_dims"]))
    batch = tuple(attrs.get("input_batching_dims", ()))
    removed = {*attrs["inserted_window_dims"], *batch}
    columns = tuple(d for d in range(len(array.dims)) if d not in removed)
    named = dict(zip(attrs["scatter_dims_to_operand_dims"], range(array.array.rank), strict=False))
    if set(columns) & set(named) or set(attrs["inserted_window_dims"]) != set(named):
        return "its windows begin inside of dimensions that they cover"
    if any(updates.dims[k] != array.dims[d] for k, d in zip(window, columns, strict=True)):
        return "its windows do not cover whole dimensions"
    rows = tuple(sorted(named))
    positions = [k for k in range(len(indices.dims)) if k != attrs["index_vector_dim"]]
    batch_at = tuple(positions.index(k) for k in attrs.get("scatter_indices_batching_dims", ()))
    return Scatter(i, batch, rows, tuple(named[d] for d in rows), columns, batch_at,
                   tuple(indices.dims[k] for k in positions), combine)


def _combine(i: Instruction) -> str | None:
    body: Computation = i.attrs["to_apply"]
    if len(body.parameters) != 2:
        return None
    root, (old, new) = body.root, body.parameters
    if root is new:
        return ASSIGN
    if root.opcode == "subtract" and root.operands == (old, new):
        return "subtract"
    simple = root.opcode in PARTIAL and len(root.operands) == 2 and set(root.operands) == {old, new}
    return root.opcode if simple and identity_of(root.opcode, i.element_type) is not None else None


def check_scatters(scatters: Sequence[Scatter]) -> None:
    """All scatters of a kernel read the same index vectors, and their arrays have the same rows."""
    first = scatters[0]
    for other in scatters[1:]:
        if other.layout != first.layout:
            raise Refusal("producer-consumer", "{} and {} scatter to other rows", first.instruction, other.instruction)
    widths = {s.sizes(s.columns) for s in scatters if s.column_count > 1}
    if len(widths) > 1:
        raise Refusal("shape", "{} and other scatters have different windows", first.instruction)


def widest(scatters: Sequence[Scatter]) -> Scatter:
    return max(scatters, key=lambda s: s.column_count)


def plan_scatters(computation: Computation) -> Plan:
    """The plan of a kernel with scatters: axes are the batch, the rows and the columns of their arrays."""
    instructions = computation.instructions
    analysis = Axes(instructions)
    for output in computation.outputs[1:]:
        analysis.align(computation.outputs[0], output)
    scatters: list[Scatter] = []
    depth: set[Instruction] = set()     # what waits for a scatter
    for i in instructions:
        waits = any(o in depth for o in i.operands)
        if i.opcode == "reduce" and (waits or reduced_size(i) > INLINE_REDUCTION):
            raise Refusal("producer-consumer", "{} is reduced in a kernel that scatters", i)
        if i.opcode == "scatter":
            found = scatter_of(i)
            if isinstance(found, str) or waits:
                raise Refusal("producer-consumer", "{} waits for another scatter", i)
            scatters.append(found)
        if waits or i.opcode == "scatter":
            depth.add(i)
    check_scatters(scatters)
    main = widest(scatters)
    axes = tuple(Axis(name, math.prod(main.sizes(dims)), False, _atoms(analysis, main, dims))
                 for name, dims in (("batch", main.batch), ("target", main.rows), ("element", main.columns)))
    domain = analysis.mask(main.instruction)
    outside = sum(1 << a for a in (*axes[0].atoms, *axes[1].atoms))
    for s in scatters:
        check_axes(s.instruction, analysis)
        if analysis.mask(s.instruction) not in (domain, outside) or s.column_count not in (1, main.column_count):
            raise Refusal("shape", "{} has other axes than {}", s.instruction, main.instruction)
        if [_atoms(analysis, s, d) for d in (s.batch, s.rows)] != [axes[0].atoms, axes[1].atoms]:
            raise Refusal("shape", "the rows of {} are others than those of {}", s.instruction, main.instruction)
    for output in computation.outputs:
        check_axes(output, analysis)
        if analysis.mask(output) not in (domain, outside):
            raise Refusal("shape", "{} covers other axes than the kernel's domain", output)
    return Plan(computation, analysis, axes, {}, (), tuple(scatters))


def _atoms(analysis: Axes, s: Scatter, dims: Sequence[int]) -> tuple[int, ...]:
    found = analysis.dims(s.instruction)
    return tuple(a for d in dims for a in found[d])
