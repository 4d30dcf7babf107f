"""The fusion graph of a computation: vertices to color, and what the cost of a kernel needs to know of each.

A vertex is an instruction (a reduction of several results together with its get-tuple-elements). Free instructions
(constants, iota, index maps) have no vertex: they are written at each use, and only a broadcast or a transpose that
must exist in memory is one. A reshape in memory is nothing but another view of its operand. Fixed vertices stand
alone: library calls, control flow, opaque operations and what no kernel can compute.
"""
from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hlofuse.codegen.element_reads import splat_literal
from hlofuse.codegen.scalar_expr import has_scalar_expr
from hlofuse.fusion.axes import Axes
from hlofuse.fusion.cumulative import is_scanned
from hlofuse.fusion.plan import INLINE_REDUCTION, NESTED_REDUCTION, Plan, reduced_size
from hlofuse.fusion.scatter import scatter_of
from hlofuse.hlo.module import Computation, Instruction
from hlofuse.hlo.opcode import OPCODES, Kind
from hlofuse.hlo.shape import FUSIBLE, Shape, TupleShape

SHAPE_OPCODES = frozenset({"broadcast", "reshape", "transpose", "slice", "reverse", "pad", "concatenate",
                           "dynamic-slice", "dynamic-update-slice", "gather", "copy", "bitcast"})
FREE_SHAPES = frozenset({"broadcast", "reshape", "transpose", "bitcast"})
VIEWS = frozenset({"reshape", "bitcast"})
BARRIERS = frozenset({"opt-barrier", "tuple", "get-tuple-element", "parameter", "constant"})


@dataclass(frozen=True)
class Vertex:
    """`results` are what readers see: the instruction itself, or the get-tuple-elements of a variadic reduction."""

    instruction: Instruction
    results: tuple[Instruction, ...]


class FusionGraph:
    """Vertices of one computation in post-order, with their edges."""

    def __init__(self, computation: Computation, epilogues: Collection[Instruction] = (),
                 left: Mapping[Instruction, str] | None = None, loops: Collection[Instruction] = (),
                 blocks: Mapping[Instruction, Plan] | None = None) -> None:
        """`epilogues` are computed by the library call before them (see epilogues.py): they are fixed too, and so is
        what is `left` to XLA for a reason. `loops` may be members of kernels (see loops.py), other `while` instructions
        may not; of `blocks` each is a kernel of its own."""
        self.computation = computation
        self.epilogues = frozenset(epilogues)
        self.left = left or {}
        self.loops = frozenset(loops)
        self.blocks = blocks or {}
        users = computation.users
        self.loop_states = {loop.operands[0] for loop in self.loops
                            if all(u in self.loops for u in users[loop.operands[0]])}
        self.axes = Axes(computation.instructions, self.loops)
        self.vertices: list[Vertex] = []
        self.vertex_of: dict[Instruction, int] = {}
        self.free: set[Instruction] = set()
        self._collect()
        n = len(self.vertices)
        self.operands: list[list[int]] = [[] for _ in range(n)]
        self.users: list[list[int]] = [[] for _ in range(n)]
        self.is_output = [False] * n
        self.is_fixed = [self._stands_alone(v.instruction) for v in self.vertices]
        self.externals: list[tuple[Instruction, ...]] = [()] * n   # arrays in memory that are not vertices
        self._connect()

    def _collect(self) -> None:
        demanded = self._demanded()
        for i in self.computation.instructions:
            if self._is_free(i):
                self.free.add(i)
                if i not in demanded or i.opcode in BARRIERS or i.opcode in VIEWS:
                    continue
            elif i.opcode == "get-tuple-element" and i.operands[0].opcode != "reduce" and \
                    i.operands[0] not in self.loops:
                self.free.add(i)   # an element of a tuple in memory
                continue
            elif i.opcode == "get-tuple-element":
                self.vertex_of[i] = self.vertex_of[i.operands[0]]
                continue
            elif i.opcode == "tuple":
                continue
            self.vertex_of[i] = len(self.vertices)
            has_elements = isinstance(i.shape, TupleShape) and (i.opcode == "reduce" or i in self.loops)
            results = self.computation.users[i] if has_elements else (i,)
            self.vertices.append(Vertex(i, tuple(results)))

    def _demanded(self) -> set[Instruction]:
        """What must exist in memory: outputs, and operands of what no kernel computes, as what they are views of."""
        found = set(self.computation.outputs)
        for i in self.computation.instructions:
            if i in self.loops or i in self.loop_states:
                continue
            if i.opcode in ("tuple", "get-tuple-element"):
                if i is not self.computation.root and self.loops.isdisjoint(i.operands):    # () too
                    found.update(i.operands)
            elif i in self.epilogues:
                found.update(indexed(o) for o in i.operands)
            elif i in self.left or not is_fusible(i):
                found.update(o for k, o in enumerate(i.operands) if not is_absorbed(i, k))
        return {viewed(i) for i in found}

    def _stands_alone(self, i: Instruction) -> bool:
        return i in self.epilogues or i in self.left or (not is_fusible(i) and i not in self.loops)

    def _is_free(self, i: Instruction) -> bool:
        if i.opcode in ("parameter", "constant"):
            return True
        if i.opcode == "iota":
            return i.element_type in FUSIBLE
        return i.opcode in FREE_SHAPES and is_fusible(i)

    def _connect(self) -> None:
        outputs = {viewed(o) for o in self.computation.outputs}
        for v, vertex in enumerate(self.vertices):
            producers: dict[int, None] = {}
            arrays: dict[Instruction, None] = {}
            # A kernel writes what is free once more; anything else reads it from memory.
            fixed = self.is_fixed[v]
            for operand in self._operands_in_memory(vertex.instruction) if fixed else self._reads(vertex.instruction):
                u = self.vertex_of.get(operand)
                if u is None or (operand in self.free and not fixed):
                    arrays[operand] = None
                    u = self._tuple_producer(operand)
                if u is not None and u != v:
                    producers[u] = None
            for before in vertex.instruction.control:
                u = self.vertex_of.get(before, self._tuple_producer(before))
                if u is not None and u != v:
                    producers[u] = None
            self.operands[v] = list(producers)
            self.externals[v] = tuple(arrays)
            for u in producers:
                self.users[u].append(v)
            self.is_output[v] = any(r in outputs for r in vertex.results)
        for i in self.computation.instructions:   # a tuple that is not the root keeps its operands in memory
            if i.opcode == "tuple" and i is not self.computation.root and i not in self.loop_states:
                for o in map(viewed, i.operands):
                    if o in self.vertex_of:
                        self.is_output[self.vertex_of[o]] = True
        for v, vertex in enumerate(self.vertices):
            if vertex.instruction in self.free:
                self.is_output[v] = True

    def _tuple_producer(self, element: Instruction) -> int | None:
        """The vertex that an element of a tuple in memory waits for."""
        while element.opcode == "get-tuple-element":
            element = element.operands[0]
            if element in self.vertex_of:
                return self.vertex_of[element]
        return None

    def _operands_in_memory(self, instruction: Instruction) -> list[Instruction]:
        """The operands of an instruction that no kernel computes, tuples taken apart."""
        found: dict[Instruction, None] = {}
        through = indexed if instruction in self.epilogues else viewed
        stack = list(reversed(instruction.operands))
        while stack:
            operand = through(stack.pop())
            if operand.opcode == "tuple":
                stack.extend(reversed(operand.operands))
            else:
                found[operand] = None
        return list(found)

    def _reads(self, instruction: Instruction) -> list[Instruction]:
        """The vertices' results and the arrays that an instruction reads, through what is free."""
        found: dict[Instruction, None] = {}
        stack = list(reversed(instruction.operands))
        while stack:
            operand = stack.pop()
            if operand.opcode == "tuple":
                stack.extend(reversed(operand.operands))
            elif operand in self.free and operand.opcode in FREE_SHAPES:
                stack.extend(operand.operands)
            elif operand.opcode not in ("constant", "iota"):
                found[operand] = None
            elif operand.opcode == "constant" and operand.array.rank and not _is_splat(operand):
                found[operand] = None
        return list(found)


def viewed(i: Instruction) -> Instruction:
    """What a chain of reshapes is a view of."""
    while i.opcode in VIEWS and is_fusible(i):
        i = i.operands[0]
    return i


def indexed(i: Instruction) -> Instruction:
    """What a chain of index maps reads."""
    while i.opcode in FREE_SHAPES and is_fusible(i):
        i = i.operands[0]
    return i


def _is_splat(constant: Instruction) -> bool:
    return splat_literal(constant) is not None


def is_absorbed(i: Instruction, number: int) -> bool:
    """Whether XLA writes this operand into the operation itself: one number as all updates of a scatter."""
    operand = i.operands[number]
    return i.opcode == "scatter" and number >= (len(i.operands) + 1) // 2 and operand.opcode == "broadcast" and \
        operand.operands[0].opcode == "constant"


def is_fusible(i: Instruction) -> bool:
    """Whether a generated kernel can compute this instruction."""
    shapes = [i.shape, *(o.shape for o in i.operands)]
    if i.opcode == "reduce":
        return _is_fusible_reduction(i)
    if not all(isinstance(s, Shape) and s.element_type in FUSIBLE and s.size for s in shapes):
        return False
    if is_scanned(i):
        return _is_scalar_body(i.attrs["to_apply"])
    if i.opcode == "reduce-window":
        return window_size(i) <= INLINE_REDUCTION and all(
            w.lhs_dilate == 1 and not w.reversed for w in i.attrs["window"]) and _is_scalar_body(i.attrs["to_apply"])
    if i.opcode == "scatter":
        return not isinstance(scatter_of(i), str)
    if i.opcode in SHAPE_OPCODES or i.opcode == "iota":
        return i.opcode != "gather" or _is_plain_gather(i)
    if i.opcode in ("parameter", "constant"):
        return True
    return OPCODES[i.opcode].kind is Kind.ELEMENTWISE and has_scalar_expr(i)


def _is_plain_gather(i: Instruction) -> bool:
    return i.operands[1].element_type not in ("f32", "f64")


def _is_fusible_reduction(i: Instruction) -> bool:
    arrays = [*i.result_shapes, *(o.shape for o in i.operands)]
    if len(i.operands) > 6 or not all(isinstance(s, Shape) and s.element_type in FUSIBLE and s.size for s in arrays):
        return False
    return _is_scalar_body(i.attrs["to_apply"]) and reduced_size(i) > 0


def _is_scalar_body(body: Computation) -> bool:
    return all(b.opcode in ("parameter", "tuple") or (b.opcode == "constant" and not b.dims) or
               (OPCODES[b.opcode].kind is Kind.ELEMENTWISE and has_scalar_expr(b)) for b in body.instructions)


def window_size(i: Instruction) -> int:
    """How many elements the window of a reduce-window has."""
    return math.prod(w.size for w in i.attrs["window"])


def conflicting_reductions(u: Instruction, v: Instruction, axes: Axes) -> bool:
    """Two large reductions of different axes: no kernel form runs both."""
    if u.opcode != "reduce" or v.opcode != "reduce":
        return False
    a, b = reduced_size(u), reduced_size(v)
    if min(a, b) <= INLINE_REDUCTION or (min(a, b) <= NESTED_REDUCTION):
        return False
    return reduced_mask(u, axes) != reduced_mask(v, axes)


def reduced_mask(reduction: Instruction, axes: Axes) -> int:
    return axes.mask(reduction.operands[0]) & ~axes.mask(reduction)
