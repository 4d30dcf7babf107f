"""A dot as one strided-batched matrix product, on operands as they lie in memory: what BLAS libraries compute.

`plan_gemm` finds strides for `C[b, m, n] = sum over k of A[b, m, k] * B[b, k, n]`, all row-major; an operand whose axes
are no such runs has to be copied first, in the order that the plan gives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hlofuse.hlo.module import Instruction


@dataclass(frozen=True)
class Matrix:
    """A batch of matrices in elements: `rows` apart, `batch` apart, and of neighbors one. `is_transposed`: the
    neighbors are those of a column. `order`: the axes in the order to copy them in before; None where they may stay."""

    rows: int
    batch: int
    is_transposed: bool
    order: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Gemm:
    """Row-major: the lhs is m x k, the rhs k x n, the result m x n and dense."""

    batch: int
    m: int
    n: int
    k: int
    lhs: Matrix
    rhs: Matrix


def plan_gemm(dot: Instruction) -> Gemm:
    """The product that a `dot` instruction is; every dot is one."""
    sides = []
    sizes: list[tuple[int, int, int]] = []
    for number, side in enumerate(("lhs", "rhs")):
        dims = dot.operands[number].dims
        batch = tuple(dot.attrs.get(f"{side}_batch_dims", ()))
        contracting = tuple(dot.attrs.get(f"{side}_contracting_dims", ()))
        free = tuple(d for d in range(len(dims)) if d not in batch and d not in contracting)
        sizes.append(tuple(math.prod(dims[d] for d in axes) for axes in (batch, free, contracting)))  # type: ignore
        rows, columns = (free, contracting) if number == 0 else (contracting, free)
        sides.append(_matrix(dims, batch, rows, columns))
    (batch_size, m, k), (_, n, _) = sizes
    return Gemm(batch_size, m, n, k, *sides)


@dataclass(frozen=True)
class BlasArguments:
    """A product in BLAS's own terms, which counts by columns: the transposed result from the operands in the other
    order. `transposes` are of its first and second operand, `leading` and `strides` of these and of the result."""

    transposes: tuple[bool, bool]
    m: int
    n: int
    k: int
    leading: tuple[int, int, int]
    strides: tuple[int, int, int]


def blas_arguments(plan: Gemm) -> BlasArguments:
    """The first operand is the plan's rhs, the second its lhs."""
    return BlasArguments((plan.rhs.is_transposed, plan.lhs.is_transposed), plan.n, plan.m, plan.k,
                         (plan.rhs.rows, plan.lhs.rows, plan.n), (plan.rhs.batch, plan.lhs.batch, plan.m * plan.n))


def _matrix(dims: Sequence[int], batch: Sequence[int], rows: Sequence[int], columns: Sequence[int]) -> Matrix:
    groups = {name: tuple(d for d in axes if dims[d] != 1)
              for name, axes in (("batch", batch), ("rows", rows), ("columns", columns))}
    places = {name: axes for name, axes in groups.items() if axes}
    order = sorted(places, key=lambda name: places[name][0])
    laid_out = [d for name in order for d in places[name]]
    if laid_out != sorted(laid_out) or order[-1:] == ["batch"]:
        row_count, column_count = (math.prod(dims[d] for d in axes) for axes in (rows, columns))
        return Matrix(column_count, row_count * column_count, False, (*batch, *rows, *columns))
    strides: dict[str, int] = {}
    stride = 1
    for name in reversed(order):
        strides[name] = stride
        stride *= math.prod(dims[d] for d in places[name])
    is_transposed = order[-1:] == ["rows"]
    inner = "rows" if is_transposed else "columns"
    outer = "columns" if is_transposed else "rows"
    least = math.prod(dims[d] for d in groups[inner])
    return Matrix(strides.get(outer, max(1, least)), strides.get("batch", 0), is_transposed)
