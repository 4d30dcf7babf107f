"""Library calls as rows of the cost model: a matrix product with its layouts, its copies and its epilogue.

T = T_launch + max(2 M N K / rate, bytes / bandwidth), and for every operand that the library cannot read as it lies a
launch and a copy. Products of one operand could be one product: `merging` weighs that. The weights would have to be
put side by side at run time, and the results taken apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hlofuse.fusion.cost_estimate import CostEstimate
from hlofuse.fusion.devices import DeviceSpec
from hlofuse.fusion.epilogues import Epilogue
from hlofuse.fusion.graph import FREE_SHAPES, is_fusible, viewed
from hlofuse.hlo.module import Computation, Instruction


@dataclass(frozen=True)
class LibraryCall:
    """A matrix product: batch x M x N x K, the operands that are copied first, and what is computed at its end."""

    dot: Instruction
    sizes: tuple[int, int, int, int]
    copies: tuple[Instruction, ...]
    epilogue: Epilogue | None
    cost: CostEstimate


@dataclass(frozen=True)
class Merging:
    """Products of one operand beside one product of it: bytes that merging adds and saves, and both times."""

    dots: tuple[Instruction, ...]
    operand: Instruction
    added_bytes: int
    saved_bytes: int
    launches_saved: int
    apart_us: float
    merged_us: float


def library_calls(computation: Computation, epilogues: Mapping[Instruction, Epilogue],
                  device: DeviceSpec) -> list[LibraryCall]:
    """Every dot of a computation."""
    return [library_call(i, epilogues.get(i), device) for i in computation.instructions
            if i.opcode == "dot" and i.array.size]


def library_call(dot: Instruction, epilogue: Epilogue | None, device: DeviceSpec) -> LibraryCall:
    copies = tuple(o for n, o in enumerate(dot.operands) if not is_plain_operand(dot, n))
    sizes = product_sizes(dot)
    flops = 2.0 * math.prod(sizes)
    moved = sum(o.shape.byte_size for o in dict.fromkeys(dot.operands)) + dot.shape.byte_size
    if epilogue is not None:
        moved += sum(r.shape.byte_size for r in epilogue.reads)
        moved += epilogue.members[-1].shape.byte_size - dot.shape.byte_size
    copied = sum(2 * o.shape.byte_size for o in copies)
    launch = device.launch_us * (1 + len(copies))
    compute, memory = flops / device.matmul_rate_of(dot.element_type), moved / device.bandwidth
    copying = copied / device.bandwidth
    time = launch + max(compute, memory) + copying
    cost = CostEstimate(time, launch, compute, memory + copying, moved + copied, flops, registers=0)
    return LibraryCall(dot, sizes, copies, epilogue, cost)


def product_sizes(dot: Instruction) -> tuple[int, int, int, int]:
    """Batch, M, N, K."""
    lhs, rhs = (o.dims for o in dot.operands)
    batch = math.prod(lhs[d] for d in dot.attrs.get("lhs_batch_dims", ()))
    inner = math.prod(lhs[d] for d in dot.attrs.get("lhs_contracting_dims", ()))
    return (batch, *(math.prod(dims) // max(1, batch * inner) for dims in (lhs, rhs)), inner)


def mergings(computation: Computation, calls: Sequence[LibraryCall], device: DeviceSpec) -> list[Merging]:
    """For each operand of several independent products, contracted alike, what one product would cost."""
    groups: dict[tuple[int, Instruction, tuple[object, ...]], list[LibraryCall]] = {}
    for call in calls:
        dot = call.dot
        for n, side in enumerate(("lhs", "rhs")):
            shared, contracted = viewed(dot.operands[n]), dot.attrs.get(f"{side}_contracting_dims", ())
            if not dot.attrs.get("lhs_batch_dims") and dot.operands[1 - n] is not dot.operands[n]:
                key = (n, shared, (dot.operands[n].dims, tuple(contracted), dot.element_type))
                groups.setdefault(key, []).append(call)
    found = []
    for (n, shared, _), group in groups.items():
        if len(group) > 1 and not _depend(computation, [c.dot for c in group]):
            found.append(_merging(computation, n, shared, group, device))
    return found


def _depend(computation: Computation, dots: Sequence[Instruction]) -> bool:
    """Whether a product is computed from another one."""
    tainted: set[Instruction] = set()
    chosen = set(dots)
    for i in computation.instructions:
        if any(o in tainted or o in chosen for o in i.operands):
            if i in chosen:
                return True
            tainted.add(i)
    return False


def _merging(computation: Computation, n: int, shared: Instruction, group: Sequence[LibraryCall],
             device: DeviceSpec) -> Merging:
    weights = sum(c.dot.operands[1 - n].shape.byte_size for c in group)
    apart = sum(c.dot.shape.byte_size for c in group if _is_taken_whole(computation, c.dot))
    added = 2 * weights + 2 * apart
    saved = (len(group) - 1) * shared.shape.byte_size
    launches = len(group) - 1 - 1 - (1 if apart else 0)
    before = sum(c.cost.time_us for c in group)
    compute = sum(c.cost.compute_us for c in group)
    merged_bytes = sum(c.cost.bytes for c in group) - saved
    after = device.launch_us * (len(group) - launches) + max(compute, merged_bytes / device.bandwidth) + \
        added / device.bandwidth
    return Merging(tuple(c.dot for c in group), shared, added, saved, launches, before, after)


def _is_taken_whole(computation: Computation, value: Instruction) -> bool:
    """Whether the program or a library reads a product as an array of its own; a kernel would read it as a slice."""
    outputs = set(computation.outputs)
    stack = [value]
    while stack:
        i = stack.pop()
        if i in outputs:
            return True
        for user in computation.users[i]:
            if not is_fusible(user):
                return True
            if user.opcode in FREE_SHAPES:
                stack.append(user)
    return False


def is_plain_operand(dot: Instruction, number: int) -> bool:
    """Whether a strided-batched library call can read this operand as it lies: one run of rows, one of columns, one
    batch run that is outermost (or strided around the rows)."""
    side = "lhs" if number == 0 else "rhs"
    rank = len(dot.operands[number].dims)
    batch = tuple(dot.attrs.get(f"{side}_batch_dims", ()))
    contracting = tuple(dot.attrs.get(f"{side}_contracting_dims", ()))
    free = tuple(d for d in range(rank) if d not in batch and d not in contracting)
    groups = [g for g in (contracting, free) if g]
    if not all(_is_run(g) for g in groups) or not _is_run(batch):
        return False
    return not batch or max(batch) < rank - 1


def _is_run(dims: Sequence[int]) -> bool:
    return all(b == a + 1 for a, b in zip(dims, dims[1:], strict=False))
