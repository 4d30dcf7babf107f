"""Element-wise work moves above broadcasts, reshapes and transposes of its operands.

Below a broadcast the same number is computed many times; above it once. Reshapes and transposes sink so that they meet
what undoes or absorbs them (another reshape, a broadcast, a dot's dimension numbers). Nothing is computed twice.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

from hlofuse.hlo.builder import reshape
from hlofuse.hlo.module import Instruction, Module
from hlofuse.hlo.opcode import OPCODES, Kind
from hlofuse.hlo.shape import Shape
from hlofuse.passes.known import scalar_source
from hlofuse.passes.reshape_mover import spread, transpose
from hlofuse.passes.rewrite import Readers, RuleTable, rewrite

RULES = RuleTable()
_ELEMENTWISE = tuple(name for name, row in OPCODES.items() if row.kind is Kind.ELEMENTWISE)


def broadcast_sinking(module: Module) -> Module:
    return rewrite(module, RULES)


def _on(i: Instruction, operands: Sequence[Instruction], dims: Sequence[int]) -> Instruction:
    """The same element-wise operation in other dimensions."""
    return Instruction(i.opcode, i.array.with_dims(dims), tuple(operands), i.attrs, i.name, i.metadata)


def _keeps_dims(i: Instruction) -> bool:
    """False for a bitcast-convert between widths, which is element-wise only in name."""
    return isinstance(i.shape, Shape) and bool(i.shape.dims) and (
        i.opcode != "bitcast-convert" or i.operands[0].dims == i.dims)


@RULES.on(*_ELEMENTWISE)
def sink_broadcast(i: Instruction) -> Instruction | None:
    """op(broadcast(x), broadcast(y)) => broadcast(op(x, y)); sources that differ are broadcast to what both need"""
    if any(o.opcode != "broadcast" and o.dims for o in i.operands) or not _keeps_dims(i):
        return None
    needed: set[int] = set()
    for o in i.operands:
        if o.opcode == "broadcast":
            needed.update(o.attrs["dimensions"])
    axes = sorted(needed)
    dims = [i.dims[d] for d in axes]
    if math.prod(dims) >= i.array.size or any(list(o.attrs["dimensions"]) != sorted(o.attrs["dimensions"])
                                              for o in i.operands if o.opcode == "broadcast"):
        return None
    sources = [spread(o.operands[0], dims, [axes.index(d) for d in o.attrs["dimensions"]])
               if o.opcode == "broadcast" else o for o in i.operands]
    return spread(_on(i, sources, dims), i.dims, axes)


def _sources(i: Instruction, opcode: str) -> list[Instruction] | None:
    """What the operands of the opcode read, scalars where operands are uniform; `None` if any operand is another."""
    sources, found = [], False
    for o in i.operands:
        if o.opcode == opcode:
            sources.append(o.operands[0])
            found = True
        elif (scalar := scalar_source(o)) is not None:
            sources.append(scalar)
        else:
            return None
    return sources if found and _keeps_dims(i) else None


def _spread_scalars(i: Instruction, sources: list[Instruction], dims: Sequence[int]) -> list[Instruction]:
    """The sources with scalars broadcast to `dims`, except where the operation takes a scalar as it is."""
    return [s if s.dims or not o.dims else spread(s, dims, ()) for s, o in zip(sources, i.operands, strict=True)]


@RULES.on(*_ELEMENTWISE)
def sink_reshape(i: Instruction) -> Instruction | None:
    """op(reshape(x), reshape(y)) => reshape(op(x, y)), x and y of equal dimensions; also with uniform operands"""
    sources = _sources(i, "reshape")
    if sources is None:
        return None
    shapes = {o.operands[0].dims for o in i.operands if o.opcode == "reshape"}
    if len(shapes) != 1:
        return None
    dims = shapes.pop()
    return reshape(_on(i, _spread_scalars(i, sources, dims), dims), i.dims)


@RULES.on_readers(*_ELEMENTWISE)
def sink_transpose(i: Instruction, readers: Readers) -> Instruction | None:
    """op(transpose(x), transpose(y)) => transpose(op(x, y)), transposed alike and read by nothing else"""
    sources = _sources(i, "transpose")
    if sources is None:
        return None
    moved = [o for o in i.operands if o.opcode == "transpose"]
    orders = {o.attrs["dimensions"] for o in moved}
    if len(orders) != 1 or any(readers(o) > i.operands.count(o) for o in moved):
        return None
    dims = moved[0].operands[0].dims
    return transpose(_on(i, _spread_scalars(i, sources, dims), dims), orders.pop())
