"""What a device runs for a fused module: kernels, library calls, opaque operations, and the bytes that they move.

Loop bodies count times their trips (an unknown trip count once). A library call is one launch if its operands and
result are plain strided-batched layouts, otherwise its copies count too; its epilogue is part of it (epilogues.py).
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

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


def count_launches(module: Module, clusters: Sequence[Any], count_body: Callable[[Computation], LaunchCount],
                   has_library_epilogues: bool) -> LaunchCount:
    """`clusters` have `.instruction` and `.cost`; `count_body` counts a computation that is not fused yet."""
    costs = {c.instruction: c.cost for c in clusters}
    total = LaunchCount()
    epilogues = find_epilogues(module.entry) if has_library_epilogues else {}
    absorbed = {m for e in epilogues.values() for m in e.members}
    for i in module.entry.instructions:
        if i in absorbed or _is_read_only_by(i, absorbed, module.entry):
            continue
        if i in epilogues:
            total += _with_epilogue(epilogues[i], _standing(i, count_body))
        elif i in costs:
            total += LaunchCount(kernels=1, bytes=costs[i].bytes)
        elif i.opcode not in _FREE and not _is_empty(i) and not is_number(i):
            total += _standing(i, count_body)
    return total


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


def _standing(i: Instruction, count_body: Callable[[Computation], LaunchCount]) -> LaunchCount:
    if i.opcode == "while":
        trips = trip_count(i)
        return (count_body(i.attrs["body"]) + count_body(i.attrs["condition"])) * (1 if trips is None else trips)
    if i.opcode == "conditional":
        return max((count_body(b) for b in i.attrs["branch_computations"]), key=lambda c: c.total)
    if i.opcode == "call":
        return count_body(i.attrs["to_apply"])
    moved = float(_bytes_read(i) + i.shape.byte_size)
    if OPCODES[i.opcode].kind is Kind.CONTRACTION:
        copies = [o for n, o in enumerate(i.operands) if i.opcode == "dot" and not is_plain_operand(i, n)]
        extra = sum(2 * o.shape.byte_size for o in copies)
        return LaunchCount(kernels=len(copies), library_calls=1, bytes=moved + extra)
    return LaunchCount(opaque=1, bytes=moved)


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
