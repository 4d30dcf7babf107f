"""How a vertex reads its operands: each at the vertex's own place, or how often elsewhere."""
from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hlofuse.fusion.graph import FREE_SHAPES, FusionGraph, window_size
from hlofuse.fusion.loop_space import mixed_by
from hlofuse.fusion.loop_work import element_reads
from hlofuse.fusion.plan import INLINE_REDUCTION, reduced_size
from hlofuse.hlo.module import Instruction


class Edge(NamedTuple):
    """An operand of a vertex: the number of the value, which operand, and how often it is evaluated elsewhere than at
    the reader's own place (0: there)."""

    target: int
    operand: int
    often: int
    mixed: int = -1     # the atoms along which it is read elsewhere; -1: any


def read_edges(graph: FusionGraph, i: Instruction, outside: dict[Instruction, int]) -> list[Edge]:
    """The edges of a vertex. `outside` numbers the arrays that are no vertices, behind the vertices; it grows."""
    found: list[Edge] = []
    axes = graph.axes
    folds = i.opcode in ("reduce", "reduce-window")
    arrays = i.operands[:len(i.operands) // 2] if folds else i.operands
    often_read: dict[int, tuple[int, int]] = {}
    if i in graph.loops:
        arrays = i.operands[0].operands
        often_read = dict.fromkeys(range(len(arrays)), (0, 0)) if i in graph.blocks else element_reads(i, axes)
    for k, operand in enumerate(arrays):
        shifted = (i, k) in axes.shifted
        source, through = operand, operand
        while source in graph.free and source.opcode in FREE_SHAPES:
            shifted = shifted or (source, 0) in axes.shifted
            source = source.operands[0]
        if source.opcode == "iota" or (source.opcode == "constant" and not source.array.rank):
            continue
        target = graph.vertex_of.get(source, -1)
        if target == -1 or source in graph.free:
            target = outside.setdefault(source, len(graph.vertices) + len(outside))
        inline = i.opcode == "reduce" and 0 < reduced_size(i) <= INLINE_REDUCTION
        if i in graph.loops:
            often, mixed = often_read[k]
            if shifted:
                often, mixed = often or through.array.size, -1
            found.append(Edge(target, k, often, mixed))
        elif not shifted and not inline:
            found.append(Edge(target, k, 0, 0))
        else:
            size = through.array.size
            result = i.result_shapes[0].size
            if i.opcode == "reduce-window":
                often = result * window_size(i)
            elif i.opcode in ("gather", "dynamic-slice", "reshape"):
                often = result
            else:
                often = size if inline or i.opcode == "scatter" else min(size, result)
            through_moves = any((f, 0) in axes.shifted for f in _free_chain(graph, operand))
            found.append(Edge(target, k, often, -1 if through_moves else mixed_by(i, k, axes)))
    return found


def _free_chain(graph: FusionGraph, i: Instruction) -> Iterator[Instruction]:
    while i in graph.free and i.opcode in FREE_SHAPES:
        yield i
        i = i.operands[0]
