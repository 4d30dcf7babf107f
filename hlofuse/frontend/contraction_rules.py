"""Import rules of contractions (dot, convolution) and of what libraries compute with an HLO opcode of its own (fft,
cholesky, triangular solve)."""
from __future__ import annotations

from typing import Any

from hlofuse.frontend import jaxpr_compat as compat
from hlofuse.frontend.scope import Rule, Scope
from hlofuse.hlo.module import Instruction, WindowDimension
from hlofuse.hlo.shape import COMPLEX


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(int(v) for v in values)


def _precision(precision: Any) -> dict[str, Any] | None:
    """The attribute for a pair of `lax.Precision`; None for an algorithm that HLO's precisions cannot say."""
    if precision is None:
        return {}
    pair = precision if isinstance(precision, tuple) else (precision, precision)
    names = [getattr(p, "name", "").lower() for p in pair]
    if not all(name in ("default", "high", "highest") for name in names):
        return None
    return {} if set(names) == {"default"} else {"operand_precision": tuple(names)}


def dot_general(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction] | None:
    """Operands of two types are first brought to the result's, which is never narrower."""
    precision = _precision(eqn.params["precision"])
    if precision is None:
        return None
    shape = compat.physical_shape(eqn.outvars[0].aval)
    lhs, rhs = operands
    if lhs.element_type != rhs.element_type:
        lhs, rhs = scope.convert(lhs, shape.element_type), scope.convert(rhs, shape.element_type)
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    return [scope.emit(
        "dot", lhs, rhs, shape=shape, lhs_batch_dims=_ints(lhs_batch), lhs_contracting_dims=_ints(lhs_contracting),
        rhs_batch_dims=_ints(rhs_batch), rhs_contracting_dims=_ints(rhs_contracting), **precision)]


def conv_general_dilated(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction] | None:
    params = eqn.params
    precision = _precision(params["precision"])
    lhs, rhs = operands
    if precision is None or lhs.element_type != rhs.element_type:
        return None
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    window = tuple(
        WindowDimension(rhs.dims[axis], int(stride), int(low), int(high), int(base), int(dilation))
        for axis, stride, (low, high), base, dilation in zip(
            rhs_spec[2:], params["window_strides"], params["padding"], params["lhs_dilation"], params["rhs_dilation"],
            strict=True))
    labels = f"{_labels(lhs_spec, 'bf')}_{_labels(rhs_spec, 'oi')}->{_labels(out_spec, 'bf')}"
    return [scope.emit(
        "convolution", lhs, rhs, shape=compat.physical_shape(eqn.outvars[0].aval), window=window, dim_labels=labels,
        feature_group_count=int(params["feature_group_count"]), batch_group_count=int(params["batch_group_count"]),
        **precision)]


def _labels(axes: Any, first_two: str) -> str:
    """Which role each axis plays, as `b01f`: `axes` lists the axes of two roles and then of the spatial ones."""
    labels = [""] * len(axes)
    for role, axis in enumerate(axes):
        labels[axis] = first_two[role] if role < 2 else str(role - 2)
    return "".join(labels)


def fft(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    return [scope.emit("fft", operands[0], shape=compat.physical_shape(eqn.outvars[0].aval),
                       fft_type=eqn.params["fft_type"].name, fft_length=_ints(eqn.params["fft_lengths"]))]


def cholesky(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    """Of the lower triangle; what is above it in the result is not said, and its readers mask it."""
    return [scope.emit("cholesky", operands[0], shape=operands[0].array, lower=True)]


def triangular_solve(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    params = eqn.params
    a, b = operands
    if params["conjugate_a"] and not params["transpose_a"] and a.element_type in COMPLEX:
        part = a.array.with_type("f32" if a.element_type == "c64" else "f64")
        real, imaginary = scope.emit("real", a, shape=part), scope.emit("imag", a, shape=part)
        a = scope.emit("complex", real, scope.emit("negate", imaginary, shape=part), shape=a.array)
    transpose = "NO_TRANSPOSE" if not params["transpose_a"] else "ADJOINT" if params["conjugate_a"] else "TRANSPOSE"
    return [scope.emit("triangular-solve", a, b, shape=b.array, left_side=bool(params["left_side"]),
                       lower=bool(params["lower"]), unit_diagonal=bool(params["unit_diagonal"]), transpose_a=transpose)]


RULES: dict[str, Rule] = {
    "dot_general": dot_general,
    "conv_general_dilated": conv_general_dilated,
    "fft": fft,
    "cholesky": cholesky,
    "triangular_solve": triangular_solve,
}
