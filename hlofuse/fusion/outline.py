"""Outline: a colored graph becomes a module whose kernels are `fusion` instructions.

Every kernel's members move into a computation of their own; what they read is its parameters, what others read of them
its results. Free instructions are copied to where they are used.
"""
from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hlofuse.codegen.element_reads import splat_literal
from hlofuse.fusion.graph import FREE_SHAPES, FusionGraph
from hlofuse.fusion.loop_results import result_readers
from hlofuse.hlo.builder import computation, element_of, make, parameter, tuple_of, with_operands
from hlofuse.hlo.module import Computation, Instruction

_PLAIN_NAMES = frozenset({"jit", "main", "pjit", "while", "body", "cond", "branch", "vmap", "transpose", "jvp",
                          "remat"})


@dataclass(frozen=True)
class Outlined:
    """The new computation, and for each kernel (in the order given) its fusion instruction."""

    computation: Computation
    fusions: tuple[Instruction, ...]


def outline(graph: FusionGraph, kernels: Sequence[tuple[frozenset[int], frozenset[int]]]) -> Outlined:
    """`kernels` are (members, outputs) as vertex sets; vertices in none of them stay as they are."""
    return _Outliner(graph, kernels).run()


class _Outliner:
    def __init__(self, graph: FusionGraph, kernels: Sequence[tuple[frozenset[int], frozenset[int]]]) -> None:
        self.graph = graph
        self.kernels = kernels
        self.new: dict[Instruction, Instruction] = {}
        self.fusions: dict[int, Instruction] = {}
        self.owner: dict[Instruction, int] = {}
        self.results = [[r for v in sorted(outputs) for r in graph.vertices[v].results if self._is_written(r, k)]
                        for k, (_, outputs) in enumerate(kernels)]
        for k, results in enumerate(self.results):
            self.owner.update(dict.fromkeys(results, k))

    def _is_written(self, result: Instruction, k: int) -> bool:
        """Whether a result of an output of kernel k is read outside of it: of a loop's, not all may be."""
        if result.opcode != "get-tuple-element" or result.operands[0] not in self.graph.loops:
            return True
        readers = result_readers(self.graph, result)
        return readers is None or any(not readers.isdisjoint(members) for n, (members, _) in enumerate(self.kernels)
                                      if n != k)

    def run(self) -> Outlined:
        old = self.graph.computation
        for p in old.parameters:
            self.new[p] = p
        roots = [*old.effects, old.root]
        for root in roots:
            self._ensure(root)
        root = self.new[old.root]
        result = computation(old.name, old.parameters, root, [self.new[e] for e in old.effects])
        return Outlined(result, tuple(self.fusions[k] for k in range(len(self.kernels))))

    def _ensure(self, root: Instruction) -> None:
        """Builds an instruction of the new computation after everything that it needs; iterative."""
        stack = [root]
        opened: set[Instruction] = set()
        while stack:
            i = stack[-1]
            if i in self.new:
                stack.pop()
                continue
            pending = [n for n in self._needs(i) if n not in self.new]
            if pending:
                if i in opened:
                    raise ValueError(f"the kernels wait for each other in a cycle through {i!r}")
                opened.add(i)
                stack.extend(pending)
                continue
            stack.pop()
            self._build(i)

    def _needs(self, i: Instruction) -> Iterable[Instruction]:
        k = self.owner.get(i)
        if k is None:
            return (*i.operands, *i.control)
        return self._members(k)[1]

    def _members(self, k: int) -> tuple[list[Instruction], list[Instruction]]:
        """The kernel's results and what it reads from memory."""
        members, results = self.kernels[k][0], self.results[k]
        inside = {i for v in members for i in (self.graph.vertices[v].instruction, *self.graph.vertices[v].results)}
        reads: dict[Instruction, None] = {}
        seen: set[Instruction] = set()
        stack = list(reversed(results))
        while stack:
            i = stack.pop()
            if i in seen:
                continue
            seen.add(i)
            if i in inside or self._is_copied(i):
                stack.extend(reversed(i.operands))
            else:
                reads[i] = None
        return results, list(reads)

    def _is_copied(self, i: Instruction) -> bool:
        """Free instructions go along; arrays in memory do not."""
        if i in self.graph.loop_states:
            return True
        if i not in self.graph.free:
            return False
        if i.opcode == "constant":
            return splat_literal(i) is not None
        return i.opcode == "iota" or i.opcode in FREE_SHAPES

    def _build(self, i: Instruction) -> None:
        k = self.owner.get(i)
        if k is None:
            self.new[i] = self._relinked(i)
            return
        members, outputs = self.kernels[k]
        results, reads = self._members(k)
        body = self._body(k, results, reads)
        names = self._name(members)
        shape = body.root.shape
        fusion = make("fusion", *(self.new[r] for r in reads), shape=shape, name=names,
                      metadata=results[-1].metadata, kind=self._kind(members), calls=body)
        self.fusions[k] = fusion
        if len(results) == 1:
            self.new[results[0]] = fusion
        else:
            for n, result in enumerate(results):
                self.new[result] = element_of(fusion, n)

    def _relinked(self, i: Instruction) -> Instruction:
        operands = [self.new[o] for o in i.operands]
        control = tuple(self.new[c] for c in i.control)
        if control != i.control:
            return Instruction(i.opcode, i.shape, tuple(operands), i.attrs, i.name, i.metadata, control)
        return with_operands(i, operands)

    def _body(self, k: int, results: Sequence[Instruction], reads: Sequence[Instruction]) -> Computation:
        parameters = [parameter(n, r.shape, r.name or r.opcode) for n, r in enumerate(reads)]
        copies: dict[Instruction, Instruction] = dict(zip(reads, parameters, strict=True))
        stack = list(reversed(results))
        while stack:
            i = stack[-1]
            if i in copies:
                stack.pop()
                continue
            pending = [o for o in i.operands if o not in copies]
            if pending:
                stack.extend(pending)
                continue
            stack.pop()
            copies[i] = with_operands(i, [copies[o] for o in i.operands])
        roots = [copies[r] for r in results]
        root = roots[0] if len(roots) == 1 else tuple_of(roots)
        return computation(f"fused_computation_{k}" if k else "fused_computation", parameters, root)

    def _kind(self, members: frozenset[int]) -> str:
        opcodes = {self.graph.vertices[v].instruction.opcode for v in members}
        return "kLoop" if opcodes.isdisjoint(("reduce", "scatter")) else "kInput"

    def _name(self, members: frozenset[int]) -> str:
        """A readable name: the JAX function that most members come from, or the last operation."""
        votes: dict[str, int] = {}
        for v in members:
            for word in _function_names(self.graph.vertices[v].instruction.metadata.op_name):
                votes[word] = votes.get(word, 0) + 1
        if votes:
            word = max(votes, key=lambda w: (votes[w], w))
        else:
            word = self.graph.vertices[max(members)].instruction.opcode
        return re.sub(r"\W+", "_", word).strip("_") + "_fusion"


def _function_names(op_name: str) -> list[str]:
    """`jit(f)/jit(softmax)/sub` => ["softmax"]: the inner functions of a name stack."""
    words = re.findall(r"\(([A-Za-z_]\w*)\)", op_name)
    return [w.strip("_") for w in words[1:] if w not in _PLAIN_NAMES and w.strip("_")]
