"""What a device runs for a fused module: kernels, library calls, opaque operations, and the bytes that they move.

Loop bodies count times their trips; where these are unknown once, with the condition, which is not asked otherwise. A
library call is one launch if its operands and result are plain strided-batched layouts, otherwise its copies count too;
its epilogue is part of it (epilogues.py).
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hlofuse.fusion.cost_estimate import CostEstimate
from hlofuse.fusion.epilogues import Epilogue, find_epilogues
from hlofuse.fusion.library_costs import is_plain_operand
from hlofuse.hlo.module import Computation, Instruction, Module
from hlofuse.hlo.opcode import OPCODES, Kind
from hlofuse.hlo.shape import Shape

_FREE = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "reshape", "bitcast", "opt-barrier",
                   "after-all", "add-dependency", "partition-id", "replica-id"})


@dataclass(frozen=True)
class LaunchCount:
    """Launches by kind; `bytes` is all memory traffic."""

    kernels: int = 0
    library_calls: int = 0
    opaque: int = 0
    bytes: float = 0.0

    @property
    def total(self) -> int:
        return self.kernels + self.library_calls + self.opaque

    def __add__(self, other: LaunchCount) -> LaunchCount:
        return LaunchCount(self.kernels + other.kernels, self.library_calls + other.library_calls,
                           self.opaque + other.opaque, self.bytes + other.bytes)

    def __mul__(self, times: int) -> LaunchCount:
        return LaunchCount(self.kernels * times, self.library_calls * times, self.opaque * times, self.bytes * times)


def count_launches(module: Module, clusters: Sequence[Any], has_library_epilogues: bool) -> LaunchCount:
    """Of a fused module; `clusters`, those of all its computations, have `.instruction` and `.cost`."""
    return _Counter({c.instruction: c.cost for c in clusters}, has_library_epilogues).count(module.entry)


class _Counter:
    """Counts every computation once, however often it is called."""

    def __init__(self, costs: Mapping[Instruction, CostEstimate], has_library_epilogues: bool) -> None:
        self.costs = costs
        self.has_library_epilogues = has_library_epilogues
        self.counted: dict[Computation, LaunchCount] = {}

    def count(self, computation: Computation) -> LaunchCount:
        if computation not in self.counted:
            self.counted[computation] = self._count(computation)
        return self.counted[computation]

    def _count(self, computation: Computation) -> LaunchCount:
        total = LaunchCount()
        epilogues = find_epilogues(computation) if self.has_library_epilogues else {}
        absorbed = {m for e in epilogues.values() for m in e.members}
        positions = _positions(computation)
        for i in computation.instructions:
            if i in absorbed or i in positions or _is_read_only_by(i, absorbed, computation):
                continue
            if i in epilogues:
                total += _with_epilogue(epilogues[i], self._standing(i))
            elif i in self.costs:
                total += LaunchCount(kernels=1, bytes=self.costs[i].bytes)
            elif i.opcode not in _FREE and not _is_empty(i) and not is_number(i):
                total += self._standing(i)
        return total

    def _standing(self, i: Instruction) -> LaunchCount:
        if i.opcode == "while":
            trips, body = trip_count(i), self.count(i.attrs["body"])
            return body * trips if trips is not None else body + self.count(i.attrs["condition"])
        if i.opcode == "conditional":
            return max((self.count(b) for b in i.attrs["branch_computations"]), key=lambda c: c.total)
        if i.opcode == "call":
            return self.count(i.attrs["to_apply"])
        moved = float(_bytes_read(i) + i.shape.byte_size)
        if i.opcode == "dynamic-update-slice":    # in place
            moved = 2.0 * i.operands[1].shape.byte_size
        if OPCODES[i.opcode].kind is Kind.CONTRACTION:
            copies = [o for n, o in enumerate(i.operands) if i.opcode == "dot" and not is_plain_operand(i, n)]
            extra = sum(2 * o.shape.byte_size for o in copies)
            return LaunchCount(kernels=len(copies), library_calls=1, bytes=moved + extra)
        return LaunchCount(opaque=1, bytes=moved)


def _positions(computation: Computation) -> set[Instruction]:
    """Numbers that only say where slices are written: they are computed there."""
    found: set[Instruction] = set()
    for i in reversed(computation.instructions):
        users = computation.users[i]
        if not any(s.dims for s in i.result_shapes) and users and all(
                u in found or u.opcode == "dynamic-update-slice" and i not in u.operands[:2] for u in users):
            found.add(i)
    return found


def _is_read_only_by(i: Instruction, readers: set[Instruction], entry: Computation) -> bool:
    """An index map that only epilogues read: they read what it maps."""
    return i.opcode == "broadcast" and bool(entry.users[i]) and all(u in readers for u in entry.users[i])


def _with_epilogue(epilogue: Epilogue, dot: LaunchCount) -> LaunchCount:
    """The same call, which reads the epilogue's arrays too and writes its result in place of the product."""
    more = sum(r.shape.byte_size for r in epilogue.reads)
    change = epilogue.members[-1].shape.byte_size - epilogue.dot.shape.byte_size
    return replace(dot, bytes=dot.bytes + more + change)


def _is_empty(i: Instruction) -> bool:
    return all(s.size == 0 for s in i.result_shapes)


def _bytes_read(i: Instruction) -> int:
    if i.opcode in ("gather", "dynamic-slice", "slice") and isinstance(i.shape, Shape):
        return i.shape.byte_size + sum(o.shape.byte_size for o in i.operands[1:])
    return sum(o.shape.byte_size for o in dict.fromkeys(i.operands) if not is_number(o))


def is_number(i: Instruction) -> bool:
    """One number, however often: it is no array in memory."""
    return i.opcode == "constant" and not i.array.rank or i.opcode == "broadcast" and is_number(i.operands[0])


def trip_count(loop: Instruction) -> int | None:
    """The number of trips where it is known: a scan's length."""
    scan = loop.attrs.get("scan")
    return scan.length if scan is not None else None
