"""Where each opcode reads its operands: an operation that moves elements is nothing but another index of its operand.

`READS` has a rule for every opcode that is not element-wise: it returns the name of the element at an index, as
`Values.at` does. Every index that a rule asks for is inside its operand.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from hlofuse.codegen.scalar_expr import c_type
from hlofuse.hlo.index_map import ZERO, Condition, Index, Indices, Var, constant, floor_div, reshape_index, to_c
from hlofuse.hlo.module import Instruction

if TYPE_CHECKING:
    from hlofuse.codegen.values import Values


WRITTEN_OUT_WINDOW = 9    # elements of a window that is written out


class EmitError(Exception):
    """The plan and the instructions disagree; the message names the instruction."""


def splat_literal(i: Instruction) -> np.ndarray | None:
    """The scalar that every element of a constant (or of a broadcast of one) is."""
    while i.opcode == "broadcast":
        i = i.operands[0]
    if i.opcode != "constant":
        return None
    literal = i.literal
    if literal.ndim == 0:
        return literal
    flat = literal.reshape(-1)
    if flat.size and flat.size <= 4096 and (flat.view(np.uint8).reshape(flat.size, -1) ==
                                           flat[:1].view(np.uint8)).all():
        return flat[0]
    return None


def _broadcast(v: Values, i: Instruction, index: Indices) -> str:
    return v.at(i.operands[0], tuple(index[d] for d in i.attrs["dimensions"]))


def _moved(v: Values, i: Instruction, index: Indices) -> str:
    return v.at(i.operands[0], moved_index(i, index))


def moved_index(i: Instruction, index: Indices) -> Indices:
    """Where in its operand an element of a reshape, bitcast or transpose is."""
    if i.opcode != "transpose":
        return reshape_index(index, i.dims, i.operands[0].dims)
    source: list[Index] = [ZERO] * len(index)
    for k, d in enumerate(i.attrs["dimensions"]):
        source[d] = index[k]
    return tuple(source)


def _slice(v: Values, i: Instruction, index: Indices) -> str:
    return v.at(i.operands[0], tuple(x * step + start for x, (start, _, step) in
                                     zip(index, i.attrs["slice"], strict=True)))


def _reverse(v: Values, i: Instruction, index: Indices) -> str:
    flipped = i.attrs["dimensions"]
    return v.at(i.operands[0], tuple(constant(n - 1) - x if d in flipped else x
                                     for d, (x, n) in enumerate(zip(index, i.dims, strict=True))))


def _iota(v: Values, i: Instruction, index: Indices) -> str:
    place = index[i.attrs["iota_dimension"]]
    zero = ", 0" if i.element_type in ("c64", "c128") else ""
    real = {"c64": "float", "c128": "double"}.get(i.element_type, c_type(i.element_type))
    cast = f"({real})({to_c(place)})"
    if i.element_type in ("f16", "bf16"):
        cast = f"round_{i.element_type}({cast})"
    return v.declare(i, f"{c_type(i.element_type)}{{{cast}{zero}}}" if zero else cast)


def _pad(v: Values, i: Instruction, index: Indices) -> str:
    operand, fill = i.operands
    conditions, source = [], []
    for x, n, (low, _, interior) in zip(index, operand.dims, i.attrs["padding"], strict=True):
        step = interior + 1
        conditions.append(Condition(x, low, low + (n - 1) * step + 1 if n else low, step))
        source.append(floor_div(x - low, step) if step > 1 else x - low)
    if 0 in operand.dims:
        return v.at(fill, ())
    return v.choose(i, conditions, lambda: v.at(operand, tuple(narrow(s, n) for s, n in
                                                               zip(source, operand.dims, strict=True))),
                    lambda: v.at(fill, ()))


def narrow(index: Index, size: int) -> Index:
    """An index that a branch has shown to be inside [0, size): its variable's range follows."""
    if len(index.terms) == 1 and isinstance(index.terms[0][0], Var) and index.terms[0][1] == 1:
        variable, offset = index.terms[0][0], index.constant
        low, high = max(variable.low, -offset), min(variable.high, size - 1 - offset)
        if (low, high) != (variable.low, variable.high) and low < high:
            return Index(((Var(variable.name, low, high), 1),), offset)
    return index


def _concatenate(v: Values, i: Instruction, index: Indices) -> str:
    axis = i.attrs["dimensions"][0]
    place = index[axis]
    pieces, start = [], 0
    for operand in i.operands:
        pieces.append((operand, start))
        start += operand.dims[axis]
    pieces = [(o, s) for o, s in pieces if o.dims[axis]]

    def piece(k: int) -> str:
        operand, begin = pieces[k]
        size = operand.dims[axis]

        def read() -> str:
            source = list(index)
            source[axis] = narrow(place - begin, size)
            return v.at(operand, tuple(source))

        if k == len(pieces) - 1:
            return read()
        return v.choose(i, [Condition(place, begin if k == 0 else -1 << 60, begin + size)], read, lambda: piece(k + 1))

    low, high = place.bounds
    first = next(k for k, (o, s) in enumerate(pieces) if low < s + o.dims[axis])
    pieces = [p for k, p in enumerate(pieces) if k >= first and p[1] <= high]
    return piece(0)


def _dynamic_slice(v: Values, i: Instruction, index: Indices) -> str:
    operand, *starts = i.operands
    source = [x + v.clamped(s, (), n - m, "start")
              for x, s, n, m in zip(index, starts, operand.dims, i.dims, strict=True)]
    return v.at(operand, tuple(source))


def _dynamic_update_slice(v: Values, i: Instruction, index: Indices) -> str:
    operand, update, *starts = i.operands
    if 0 in update.dims:
        return v.at(operand, index)
    begins = [v.clamped(s, (), n - m, "start") for s, n, m in zip(starts, operand.dims, update.dims, strict=True)]
    inside = [x - b for x, b in zip(index, begins, strict=True)]
    conditions = [Condition(p, 0, m) for p, m in zip(inside, update.dims, strict=True)]
    place = tuple(ZERO if m == 1 else narrow(p, m) for p, m in zip(inside, update.dims, strict=True))
    return v.choose(i, conditions, lambda: v.at(update, place), lambda: v.at(operand, index))


def _gather(v: Values, i: Instruction, index: Indices) -> str:
    operand, indices = i.operands
    a = i.attrs
    offset_dims, vector_dim = a["offset_dims"], a["index_vector_dim"]
    batching = tuple(a.get("operand_batching_dims", ()))
    indices_batching = tuple(a.get("start_indices_batching_dims", ()))
    batch = [index[k] for k in range(len(index)) if k not in offset_dims]
    source: list[Index] = [ZERO] * len(operand.dims)
    window = [d for d in range(len(operand.dims)) if d not in a["collapsed_slice_dims"] and d not in batching]
    for k, d in zip(offset_dims, window, strict=True):
        source[d] = index[k]
    for component, d in enumerate(a["start_index_map"]):
        place = list(batch)
        if vector_dim < len(indices.dims):
            place.insert(vector_dim, constant(component))
        start = v.clamped(indices, tuple(place), operand.dims[d] - a["slice_sizes"][d], "row")
        source[d] = source[d] + start
    positions = [k for k in range(len(indices.dims)) if k != vector_dim]
    for d, where in zip(batching, indices_batching, strict=True):
        source[d] = source[d] + batch[positions.index(where)]
    return v.at(operand, tuple(source))


def _reduce(v: Values, i: Instruction, index: Indices) -> str:
    return rounded(i, v.inline_reduction(i, index)[0])


def rounded(i: Instruction, accumulator: str) -> str:
    """A reduction's result from its accumulator, which has more bits than a 16-bit type."""
    return f"round_{i.element_type}({accumulator})" if i.element_type in ("f16", "bf16") else accumulator


def _reduce_window(v: Values, i: Instruction, index: Indices) -> str:
    """A small window: each element of it is another place of the operand; what is outside is left out."""
    operand = i.operands[0]

    def element(position: Indices) -> tuple[list[Condition], Callable[[], list[str]]]:
        source, conditions = [], []
        for x, k, w, n in zip(index, position, i.attrs["window"], operand.dims, strict=True):
            source.append(x * w.stride + k * w.rhs_dilate - w.pad_low)
            conditions.append(Condition(source[-1], 0, n))
        return conditions, lambda: [v.at(operand, tuple(map(narrow, source, operand.dims)))]

    return rounded(i, v.inline_fold(i, [w.size for w in i.attrs["window"]], element, WRITTEN_OUT_WINDOW)[0])


def _get_tuple_element(v: Values, i: Instruction, index: Indices) -> str:
    operand = i.operands[0]
    if operand.opcode != "reduce" or operand in v.scheduled:
        raise EmitError(f"{i!r} is read at another place than where it is reduced")
    key = (operand, index)    # all its results are computed together, once
    known = next((scope.memo[key] for scope in v.scope.chain() if key in scope.memo), None)
    if known is None:
        known = v.scope.memo[key] = " ".join(v.inline_reduction(operand, index))
    return rounded(i, known.split()[i.attrs["index"]])


def _dot(v: Values, i: Instruction, index: Indices) -> str:
    """A sum over few terms, in order, each in one rounding."""
    (left, right), attrs = i.operands, i.attrs
    batch = (tuple(attrs.get("lhs_batch_dims", ())), tuple(attrs.get("rhs_batch_dims", ())))
    over = (tuple(attrs["lhs_contracting_dims"]), tuple(attrs["rhs_contracting_dims"]))
    places: list[list[Index]] = [[ZERO] * len(left.dims), [ZERO] * len(right.dims)]
    rest = list(index[len(batch[0]):])
    for side, operand in enumerate(i.operands):
        for d, place in zip(batch[side], index, strict=False):
            places[side][d] = place
        for d in range(len(operand.dims)):
            if d not in batch[side] and d not in over[side]:
                places[side][d] = rest.pop(0)
    text = ""
    for term in np.ndindex(*(left.dims[d] for d in over[0])):
        for side in (0, 1):
            for d, position in zip(over[side], term, strict=True):
                places[side][d] = constant(int(position))
        a, b = v.at(left, tuple(places[0])), v.at(right, tuple(places[1]))
        text = f"mul_add({a}, {b}, {text})" if text else f"{a} * {b}"
    return v.declare(i, text or "0")


def _copy(v: Values, i: Instruction, index: Indices) -> str:
    return v.at(i.operands[0], index)


READS: dict[str, Callable[[Values, Instruction, Indices], str]] = {
    "broadcast": _broadcast, "reshape": _moved, "transpose": _moved,
    "slice": _slice, "reverse": _reverse, "iota": _iota, "pad": _pad, "concatenate": _concatenate,
    "dynamic-slice": _dynamic_slice, "dynamic-update-slice": _dynamic_update_slice, "gather": _gather,
    "dot": _dot, "reduce": _reduce, "reduce-window": _reduce_window, "get-tuple-element": _get_tuple_element,
    "copy": _copy, "bitcast": _moved,
}
