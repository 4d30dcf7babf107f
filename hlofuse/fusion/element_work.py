"""What one element of an instruction costs: operations by unit, its bytes, and where it has branches."""
from __future__ import annotations

from hlofuse.fusion.cost_estimate import UNITS
from hlofuse.fusion.cumulative import is_scanned
from hlofuse.fusion.graph import window_size
from hlofuse.hlo.module import Instruction
from hlofuse.hlo.opcode import OPCODES
from hlofuse.hlo.shape import Shape

DOUBLE_STEPS = {"special": 20, "div": 8}   # there is no unit for these in double precision: polynomials and iterations
_FACTORS = {"c64": 3.0, "c128": 3.0, "s64": 2.0, "u64": 2.0}


def itemsize_of(i: Instruction) -> int:
    shape = i.result_shapes[0] if i.result_shapes else i.shape
    return shape.dtype.itemsize if isinstance(shape, Shape) else 4


def arrays_of(i: Instruction) -> list[Shape]:
    return [s for s in i.result_shapes if isinstance(s, Shape) and s.element_type != "token"]


def operations_of(i: Instruction) -> tuple[str, float, float]:
    """(unit, operations of one element, factor for wide types)."""
    if i.opcode in ("reduce", "reduce-window"):
        body = i.attrs["to_apply"]
        unit, ops = "fp", float(max(1, sum(1 for b in body.instructions if b.operands and b.opcode != "tuple")))
        if i.opcode == "reduce-window":
            ops *= 2 if is_scanned(i) else window_size(i)
    else:
        row = OPCODES[i.opcode]
        if row.unit not in UNITS:
            return "int", 0.0, 1.0
        unit, ops = row.unit, row.ops
    element_type = i.result_shapes[0].element_type
    if element_type in ("f64", "c128") and unit != "int":
        unit, ops = "f64", ops * DOUBLE_STEPS.get(unit, 1)
    return unit, ops, _FACTORS.get(element_type, 1.0)


def branch_axes(i: Instruction) -> tuple[int, ...]:
    """The axes along which an instruction reads now one operand, now another."""
    if i.opcode == "concatenate":
        return tuple(i.attrs["dimensions"])
    return tuple(d for d, p in enumerate(i.attrs["padding"]) if any(p)) if i.opcode == "pad" else ()
