"""THE table: one HLO opcode is one row; printer, parser, evaluator, emitters, cost model and tests derive from it.

Names and attributes are those of XLA's text. A row states facts; what is done with instructions lives elsewhere, and a
cell that would need an `if` is a named function (hlo/shape_rules.py for shapes, codegen/scalar_expr.py for spellings).
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from hlofuse.hlo import shape_rules as rules
from hlofuse.hlo.shape import AnyShape, Shape, dtype_of
from hlofuse.hlo.shape_rules import type_class


class Kind(Enum):
    """What a row means for fusion and codegen."""

    LEAF = "leaf"                # parameter, constant, iota
    ELEMENTWISE = "elementwise"  # each result element from the operands' elements at the same index
    SHAPE = "shape"              # moves elements without computing: broadcast, reshape, slice, pad, concatenate, gather
    REDUCTION = "reduction"      # reduce, reduce-window
    CONTRACTION = "contraction"  # dot, convolution
    INDEXING = "indexing"        # scatter, sort, dynamic-update-slice: order or address depends on data
    CONTROL = "control"          # call, while, conditional, fusion
    TUPLE = "tuple"              # tuple, get-tuple-element, opt-barrier
    OPAQUE = "opaque"            # custom-call, fft, cholesky, rng: run by a library


@dataclass(frozen=True)
class Opcode:
    """One row. `expr` spells the scalar operation in C++ with `{0}`, `{1}` … for the operands (`int_expr` and
    `pred_expr` where the spelling for integers and pred differs); functions in it are the prelude's overloads. `unit`
    and `ops` say which unit of the machine an element costs, and how many operations of it (see fusion/devices.py)."""

    name: str
    kind: Kind
    arity: int | None = None     # None: any number
    expr: str = ""
    int_expr: str = ""
    pred_expr: str = ""
    unit: str = "none"           # "none" | "fp" | "int" | "special" (sin, exp, …) | "div"
    ops: float = 0.0
    takes: str = ""              # classes of the (last) operand: p(red) i(nteger) f(loat) c(omplex); "": anything
    commutative: bool = False
    associative: bool = False    # up to rounding: may be the operation of a parallel reduction
    effect: bool = False         # must stay, in order, even if nothing reads it
    attrs: tuple[str, ...] = ()  # in XLA's print order
    shape_rule: Callable[[Sequence[AnyShape], Mapping[str, Any]], AnyShape] | None = None


def _unary(name: str, expr: str, unit: str, ops: float, takes: str, int_expr: str = "", pred_expr: str = "",
           rule: Callable[..., AnyShape] = rules.same_as_operands) -> Opcode:
    return Opcode(name, Kind.ELEMENTWISE, 1, expr, int_expr, pred_expr, unit, ops, takes, shape_rule=rule)


def _binary(name: str, expr: str, unit: str, ops: float, takes: str, int_expr: str = "", pred_expr: str = "",
            commutative: bool = False, associative: bool = False,
            rule: Callable[..., AnyShape] = rules.same_as_operands) -> Opcode:
    return Opcode(name, Kind.ELEMENTWISE, 2, expr, int_expr, pred_expr, unit, ops, takes, commutative, associative,
                  shape_rule=rule)


def _special(name: str, expr: str, ops: float, takes: str = "fc") -> Opcode:
    return _unary(name, expr, "special", ops, takes)


_ELEMENTWISE = (
    _unary("abs", "abs_of({0})", "fp", 1, "ifc", rule=rules.abs_rule),
    _binary("add", "{0} + {1}", "fp", 1, "pifc", "wrap_add({0}, {1})", "{0} | {1}", True, True),
    _binary("subtract", "{0} - {1}", "fp", 1, "ifc", "wrap_sub({0}, {1})"),
    _binary("multiply", "{0} * {1}", "fp", 1, "pifc", "wrap_mul({0}, {1})", "{0} & {1}", True, True),
    _binary("divide", "{0} / {1}", "div", 1, "ifc", "int_div({0}, {1})"),
    _binary("remainder", "float_rem({0}, {1})", "div", 2, "if", "int_rem({0}, {1})"),
    _binary("maximum", "max_nan({0}, {1})", "fp", 1, "pif", "int_max({0}, {1})", "{0} | {1}", True, True),
    _binary("minimum", "min_nan({0}, {1})", "fp", 1, "pif", "int_min({0}, {1})", "{0} & {1}", True, True),
    _binary("power", "float_pow({0}, {1})", "special", 4, "ifc", "int_pow({0}, {1})"),
    _binary("atan2", "atan2_of({0}, {1})", "special", 4, "fc"),
    _unary("negate", "-{0}", "fp", 1, "ifc", "wrap_neg({0})"),
    _unary("sign", "sign_of({0})", "fp", 2, "ifc"),
    _unary("floor", "floor_of({0})", "fp", 1, "f"),
    _unary("ceil", "ceil_of({0})", "fp", 1, "f"),
    _unary("round-nearest-even", "round_even({0})", "fp", 1, "f"),
    _unary("round-nearest-afz", "round_away({0})", "fp", 4, "f"),
    _unary("is-finite", "is_finite({0})", "fp", 1, "f", rule=rules.predicate_of_operand),
    _binary("and", "{0} & {1}", "int", 1, "pi", commutative=True, associative=True),
    _binary("or", "{0} | {1}", "int", 1, "pi", commutative=True, associative=True),
    _binary("xor", "{0} ^ {1}", "int", 1, "pi", commutative=True, associative=True),
    _unary("not", "~{0}", "int", 1, "pi", pred_expr="!{0}"),
    _binary("shift-left", "shift_left({0}, {1})", "int", 1, "i"),
    _binary("shift-right-arithmetic", "shift_right_signed({0}, {1})", "int", 1, "i"),
    _binary("shift-right-logical", "shift_right_logical({0}, {1})", "int", 1, "i"),
    _unary("popcnt", "popcount({0})", "int", 1, "i"),
    _unary("count-leading-zeros", "leading_zeros({0})", "int", 1, "i"),
    _special("exponential", "exp_of({0})", 1),
    _special("exponential-minus-one", "expm1_of({0})", 2),
    _special("log", "log_of({0})", 1.5),
    _special("log-plus-one", "log1p_of({0})", 2),
    _special("logistic", "logistic({0})", 2),
    _special("sqrt", "sqrt_of({0})", 1),
    _special("rsqrt", "rsqrt_of({0})", 1),
    _special("cbrt", "cbrt_of({0})", 3, "f"),
    _special("sine", "sin_of({0})", 3),
    _special("cosine", "cos_of({0})", 3),
    _special("tan", "tan_of({0})", 4),
    _special("tanh", "tanh_of({0})", 2),
    _special("sinh", "sinh_of({0})", 2),
    _special("cosh", "cosh_of({0})", 2),
    _special("asin", "asin_of({0})", 3),
    _special("acos", "acos_of({0})", 3),
    _special("asinh", "asinh_of({0})", 4),
    _special("acosh", "acosh_of({0})", 4),
    _special("atanh", "atanh_of({0})", 4),
    _special("erf", "erf_of({0})", 2.5, "f"),
    _binary("complex", "make_complex({0}, {1})", "none", 0, "f", rule=rules.complex_of_parts),
    _unary("real", "real_of({0})", "none", 0, "fc", rule=rules.part_of_complex),
    _unary("imag", "imag_of({0})", "none", 0, "fc", rule=rules.part_of_complex),
    Opcode("compare", Kind.ELEMENTWISE, 2, unit="int", ops=1, attrs=("direction", "type"),
           shape_rule=rules.predicate_of_operand),
    Opcode("select", Kind.ELEMENTWISE, 3, "{0} ? {1} : {2}", unit="int", ops=1, shape_rule=rules.select_rule),
    Opcode("clamp", Kind.ELEMENTWISE, 3, "clamp_nan({0}, {1}, {2})", "clamp_int({0}, {1}, {2})",
           "({1} | {0}) & {2}", unit="fp", ops=2, takes="pif", shape_rule=rules.clamp_rule),
    Opcode("convert", Kind.ELEMENTWISE, 1, unit="int", ops=1),
    # Element-wise where both types have one width; otherwise the last axis splits or joins.
    Opcode("bitcast-convert", Kind.ELEMENTWISE, 1),
    Opcode("reduce-precision", Kind.ELEMENTWISE, 1, unit="int", ops=4, takes="f",
           attrs=("exponent_bits", "mantissa_bits"), shape_rule=rules.same_as_operands),
    Opcode("stochastic-convert", Kind.OPAQUE, 2),
)

_DIMENSIONS = ("dimensions",)
_DOT = ("lhs_batch_dims", "lhs_contracting_dims", "rhs_batch_dims", "rhs_contracting_dims")
_GATHER = ("offset_dims", "collapsed_slice_dims", "start_index_map", "operand_batching_dims",
           "start_indices_batching_dims", "index_vector_dim", "slice_sizes", "indices_are_sorted")
_SCATTER = ("update_window_dims", "inserted_window_dims", "scatter_dims_to_operand_dims", "input_batching_dims",
            "scatter_indices_batching_dims", "index_vector_dim", "indices_are_sorted", "unique_indices", "to_apply")
_CONVOLUTION = ("window", "dim_labels", "feature_group_count", "batch_group_count", "operand_precision")

_STRUCTURE = (
    Opcode("parameter", Kind.LEAF, 0, attrs=("parameter_number",)),
    Opcode("constant", Kind.LEAF, 0, attrs=("literal",), shape_rule=rules.constant_rule),
    Opcode("iota", Kind.LEAF, 0, unit="int", ops=1, attrs=("iota_dimension",)),
    Opcode("broadcast", Kind.SHAPE, 1, attrs=_DIMENSIONS),
    Opcode("reshape", Kind.SHAPE, 1),
    Opcode("bitcast", Kind.SHAPE, 1),
    Opcode("copy", Kind.SHAPE, 1, shape_rule=rules.same_as_operands),
    Opcode("transpose", Kind.SHAPE, 1, attrs=_DIMENSIONS, shape_rule=rules.transpose_rule),
    Opcode("reverse", Kind.SHAPE, 1, attrs=_DIMENSIONS, shape_rule=rules.reverse_rule),
    Opcode("slice", Kind.SHAPE, 1, attrs=("slice",), shape_rule=rules.slice_rule),
    Opcode("pad", Kind.SHAPE, 2, attrs=("padding",), shape_rule=rules.pad_rule),
    Opcode("concatenate", Kind.SHAPE, None, attrs=_DIMENSIONS, shape_rule=rules.concatenate_rule),
    Opcode("dynamic-slice", Kind.SHAPE, None, unit="int", ops=1, attrs=("dynamic_slice_sizes",),
           shape_rule=rules.dynamic_slice_rule),
    Opcode("gather", Kind.SHAPE, 2, unit="int", ops=4, attrs=_GATHER, shape_rule=rules.gather_rule),
    Opcode("dynamic-update-slice", Kind.INDEXING, None, unit="int", ops=1,
           shape_rule=rules.dynamic_update_slice_rule),
    Opcode("scatter", Kind.INDEXING, None, unit="int", ops=4, attrs=_SCATTER, shape_rule=rules.scatter_rule),
    Opcode("sort", Kind.INDEXING, None, attrs=("dimensions", "is_stable", "to_apply"), shape_rule=rules.sort_rule),
    Opcode("select-and-scatter", Kind.INDEXING, 3, attrs=("window", "select", "scatter"),
           shape_rule=rules.select_and_scatter_rule),
    Opcode("reduce", Kind.REDUCTION, None, attrs=("dimensions", "to_apply"), shape_rule=rules.reduce_rule),
    Opcode("reduce-window", Kind.REDUCTION, None, attrs=("window", "to_apply"), shape_rule=rules.reduce_window_rule),
    Opcode("dot", Kind.CONTRACTION, 2, attrs=(*_DOT, "operand_precision"), shape_rule=rules.dot_rule),
    Opcode("ragged-dot", Kind.CONTRACTION, 3,
           attrs=(*_DOT, "lhs_ragged_dims", "rhs_group_dims", "operand_precision")),
    Opcode("scaled-dot", Kind.CONTRACTION, None, attrs=(*_DOT, "operand_precision")),
    Opcode("convolution", Kind.CONTRACTION, 2, attrs=_CONVOLUTION, shape_rule=rules.convolution_rule),
    Opcode("tuple", Kind.TUPLE, None, shape_rule=rules.tuple_rule),
    Opcode("get-tuple-element", Kind.TUPLE, 1, attrs=("index",), shape_rule=rules.get_tuple_element_rule),
    Opcode("opt-barrier", Kind.TUPLE, None, shape_rule=rules.operand_shapes),
    Opcode("call", Kind.CONTROL, None, attrs=("to_apply",), shape_rule=rules.root_of("to_apply")),
    Opcode("fusion", Kind.CONTROL, None, attrs=("kind", "calls"), shape_rule=rules.root_of("calls")),
    Opcode("map", Kind.CONTROL, None, attrs=("dimensions", "to_apply"), shape_rule=rules.map_rule),
    Opcode("while", Kind.CONTROL, 1, attrs=("condition", "body"), shape_rule=rules.operand_shapes),
    Opcode("conditional", Kind.CONTROL, None, attrs=("branch_computations",), shape_rule=rules.conditional_rule),
    Opcode("scan", Kind.CONTROL, None, attrs=("to_apply",)),
)


def _opaque(name: str, arity: int | None = None, attrs: tuple[str, ...] = (), effect: bool = False,
            rule: Callable[..., AnyShape] | None = None) -> Opcode:
    return Opcode(name, Kind.OPAQUE, arity, effect=effect, attrs=attrs, shape_rule=rule)


_GROUPS = ("channel_id", "replica_groups", "use_global_device_ids")
_CHANNEL = ("channel_id", "is_host_transfer")
_BATCH_NORM = ("epsilon", "feature_index")

_LIBRARY = (
    # A custom-call has an effect where its own attribute `has_side_effect` says so: see `has_effect`.
    _opaque("custom-call", attrs=("custom_call_target", "custom_call_has_side_effect", "api_version",
                                  "output_to_operand_aliasing", "backend_config")),
    _opaque("fft", 1, ("fft_type", "fft_length"), rule=rules.fft_rule),
    _opaque("cholesky", 1, ("lower",), rule=rules.same_as_operands),
    _opaque("triangular-solve", 2, ("left_side", "lower", "unit_diagonal", "transpose_a"),
            rule=rules.shape_of_operand(1)),
    _opaque("topk", 1, ("k", "largest")),
    _opaque("batch-norm-training", 3, _BATCH_NORM),
    _opaque("batch-norm-inference", 5, _BATCH_NORM, rule=rules.shape_of_operand(0)),
    _opaque("batch-norm-grad", 5, _BATCH_NORM),
    _opaque("rng", None, ("distribution",), effect=True),
    _opaque("rng-bit-generator", 1, ("algorithm",)),
    _opaque("rng-get-and-update-state", 0, ("delta",), effect=True),
    _opaque("dynamic-reshape"),
    _opaque("get-dimension-size", 1, _DIMENSIONS),
    _opaque("set-dimension-size", 2, _DIMENSIONS),
    _opaque("after-all", rule=rules.token_rule),
    _opaque("add-dependency", 2, rule=rules.shape_of_operand(0)),
    _opaque("domain", 1, ("domain",), rule=rules.operand_shapes),
    _opaque("partition-id", 0, rule=rules.scalar_u32),
    _opaque("replica-id", 0, rule=rules.scalar_u32),
    _opaque("all-reduce", None, (*_GROUPS, "to_apply"), True, rules.operand_shapes),
    _opaque("all-reduce-start", None, (*_GROUPS, "to_apply"), True),
    _opaque("all-reduce-done", 1, effect=True),
    _opaque("all-gather", None, (*_GROUPS, "dimensions"), True),
    _opaque("all-gather-start", None, (*_GROUPS, "dimensions"), True),
    _opaque("all-gather-done", 1, effect=True),
    _opaque("all-to-all", None, (*_GROUPS, "dimensions"), True),
    _opaque("ragged-all-to-all", None, _GROUPS, True),
    _opaque("reduce-scatter", None, (*_GROUPS, "dimensions", "to_apply"), True),
    _opaque("collective-broadcast", None, _GROUPS, True, rules.operand_shapes),
    _opaque("collective-permute", None, ("channel_id", "source_target_pairs"), True, rules.operand_shapes),
    _opaque("collective-permute-start", None, ("channel_id", "source_target_pairs"), True),
    _opaque("collective-permute-done", 1, effect=True),
    _opaque("send", 2, _CHANNEL, True),
    _opaque("send-done", 1, _CHANNEL, True),
    _opaque("recv", 1, _CHANNEL, True),
    _opaque("recv-done", 1, _CHANNEL, True),
    _opaque("infeed", 1, ("infeed_config",), True),
    _opaque("outfeed", 2, ("outfeed_shape", "outfeed_config"), True, rules.token_rule),
    _opaque("copy-start", 1),
    _opaque("copy-done", 1),
    _opaque("async-start", None, ("calls",), True),
    _opaque("async-update", 1, effect=True),
    _opaque("async-done", 1, effect=True),
)

OPCODES: dict[str, Opcode] = {row.name: row for row in (*_ELEMENTWISE, *_STRUCTURE, *_LIBRARY)}


def is_elementwise(opcode: str) -> bool:
    """Whether a result element needs only the operands' elements at its own index (a `bitcast-convert` between widths
    is the one exception: its shapes differ)."""
    return OPCODES[opcode].kind is Kind.ELEMENTWISE


def is_commutative(opcode: str) -> bool:
    return OPCODES[opcode].commutative


def has_effect(opcode: str, attrs: Mapping[str, Any]) -> bool:
    """Whether an instruction must stay although nothing reads it."""
    return OPCODES[opcode].effect or bool(
        attrs.get("has_side_effect", False) or attrs.get("custom_call_has_side_effect", False))


def identity_of(opcode: str, element_type: str) -> Any:
    """The value e with op(x, e) = x for every x of the type, as a NumPy scalar; `None` where the operation has none."""
    if opcode not in _IDENTITIES:
        return None
    dtype = dtype_of(element_type)
    return _IDENTITIES[opcode](dtype, type_class(element_type))


def _highest(dtype: np.dtype, kind: str) -> Any:
    if kind == "p":
        return np.bool_(True)
    return dtype.type(np.iinfo(dtype).max if kind == "i" else float("inf"))


def _lowest(dtype: np.dtype, kind: str) -> Any:
    if kind == "p":
        return np.bool_(False)
    return dtype.type(np.iinfo(dtype).min if kind == "i" else float("-inf"))


def _zero_for_add(dtype: np.dtype, kind: str) -> Any:
    """-0.0 for floats: -0.0 + 0.0 is 0.0, so that only -0.0 leaves every float as it is."""
    return dtype.type({"f": -0.0, "c": complex(-0.0, -0.0)}.get(kind, 0))


_IDENTITIES: dict[str, Callable[[np.dtype, str], Any]] = {
    "add": _zero_for_add,
    "multiply": lambda dtype, kind: dtype.type(1),
    "maximum": _lowest,
    "minimum": _highest,
    "and": lambda dtype, kind: np.bool_(True) if kind == "p" else np.invert(dtype.type(0)),
    "or": lambda dtype, kind: dtype.type(0),
    "xor": lambda dtype, kind: dtype.type(0),
}


def infer_shape(opcode: str, operands: Sequence[AnyShape], attrs: Mapping[str, Any]) -> AnyShape:
    """The result's shape from the opcode's rule; a `ShapeError` says which operand is wrong and why."""
    row = OPCODES.get(opcode)
    if row is None:
        raise rules.ShapeError(f"unknown opcode {opcode!r}")
    if row.arity is not None and len(operands) != row.arity:
        raise rules.ShapeError(f"{opcode} takes {row.arity} operand(s), got {len(operands)}")
    if row.shape_rule is None:
        raise rules.ShapeError(f"{opcode}: shape must be given, operands and attributes do not determine it")
    if row.takes and isinstance(operands[-1], Shape) and type_class(operands[-1].element_type) not in row.takes:
        names = ", ".join(_CLASS_NAMES[c] for c in row.takes)
        raise rules.ShapeError(f"{opcode} takes {names}; operand {len(operands) - 1} is {operands[-1]}")
    try:
        return row.shape_rule(operands, attrs)
    except KeyError as missing:
        raise rules.ShapeError(f"{opcode}: attribute {missing} is missing") from missing
    except rules.ShapeError as error:
        raise rules.ShapeError(f"{opcode}: {error}") from None


_CLASS_NAMES = {"p": "pred", "i": "integers", "f": "floats", "c": "complex numbers"}
