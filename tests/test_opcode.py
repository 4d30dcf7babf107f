"""The opcode table: XLA's parser knows every row, shape rules agree with jax.eval_shape and explain what they refuse,
and what rows claim about their operations (commutative, associative, identity) is true of jax.lax."""
from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jaxlib._hlo import hlo_module_from_text

from hlofuse.hlo.module import WindowDimension
from hlofuse.hlo.opcode import OPCODES, has_effect, identity_of, infer_shape, is_commutative, is_elementwise
from hlofuse.hlo.shape import TOKEN, AnyShape, Shape, TupleShape, dtype_of, shape_of
from hlofuse.hlo.shape_rules import ShapeError

F = "f32"


@dataclass(frozen=True)
class ShapeCase:
    """An instruction beside the JAX function that says what its shape is."""

    opcode: str
    operands: tuple[Shape, ...]
    function: Callable[..., Any]
    attrs: dict[str, Any]


def case(opcode: str, *operands: Any, like: Callable[..., Any], **attrs: Any) -> Any:
    """Operands are dimensions of an f32 array, or shapes."""
    shapes = tuple(o if isinstance(o, Shape) else Shape(F, o) for o in operands)
    return pytest.param(ShapeCase(opcode, shapes, like, attrs), id=f"{opcode}-{','.join(map(str, shapes))}")


def scalar_computation(*types: str) -> Any:
    """All that shape rules ask of a computation: its root's shape."""
    shapes = tuple(Shape(t) for t in types)
    return SimpleNamespace(root=SimpleNamespace(shape=shapes[0] if len(shapes) == 1 else TupleShape(shapes)))


I32, SCALAR, PRED = Shape("s32"), Shape(F), Shape("pred", (3, 4))
UNARY: dict[str, Callable[..., Any]] = {
    "abs": lax.abs, "cbrt": lax.cbrt, "ceil": lax.ceil, "cosine": lax.cos, "erf": lax.erf, "exponential": lax.exp,
    "exponential-minus-one": lax.expm1, "floor": lax.floor, "is-finite": lax.is_finite, "log": lax.log,
    "log-plus-one": lax.log1p, "logistic": lax.logistic, "negate": lax.neg, "round-nearest-afz": lax.round,
    "round-nearest-even": lax.round, "rsqrt": lax.rsqrt, "sign": lax.sign, "sine": lax.sin, "sqrt": lax.sqrt,
    "tan": lax.tan, "tanh": lax.tanh, "sinh": lax.sinh, "cosh": lax.cosh, "asin": lax.asin, "acos": lax.acos,
    "asinh": lax.asinh, "acosh": lax.acosh, "atanh": lax.atanh, "copy": lambda x: x,
}
BINARY: dict[str, Callable[..., Any]] = {
    "add": lax.add, "atan2": lax.atan2, "complex": lax.complex, "divide": lax.div, "maximum": lax.max,
    "minimum": lax.min, "multiply": lax.mul, "power": lax.pow, "remainder": lax.rem, "subtract": lax.sub,
    "compare": lax.lt,
}
INTEGER: dict[str, Callable[..., Any]] = {
    "and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor, "shift-left": lax.shift_left,
    "shift-right-arithmetic": lax.shift_right_arithmetic, "shift-right-logical": lax.shift_right_logical,
    "not": lax.bitwise_not, "popcnt": lax.population_count, "count-leading-zeros": lax.clz,
}
INT_ARRAY, COMPLEX_ARRAY = Shape("s32", (3, 4)), Shape("c64", (3, 4))


def _gather(x: Any, indices: Any, numbers: lax.GatherDimensionNumbers, sizes: tuple[int, ...]) -> Any:
    return lax.gather(x, indices, numbers, sizes)


def _window(*sizes: tuple[int, int, int, int]) -> tuple[WindowDimension, ...]:
    """(size, stride, low, high) of each dimension."""
    return tuple(WindowDimension(*size) for size in sizes)


SHAPE_CASES = [
    *(case(opcode, (3, 4), like=function) for opcode, function in UNARY.items()),
    *(case(opcode, (3, 4), (3, 4), like=function) for opcode, function in BINARY.items()),
    *(case(opcode, *[INT_ARRAY] * (OPCODES[opcode].arity or 0), like=function) for opcode, function in INTEGER.items()),
    case("abs", COMPLEX_ARRAY, like=lax.abs),
    case("add", Shape("bf16", ()), Shape("bf16", ()), like=lax.add),
    case("compare", COMPLEX_ARRAY, COMPLEX_ARRAY, like=lax.eq),
    case("real", COMPLEX_ARRAY, like=lax.real),
    case("imag", Shape("c128", (0,)), like=lax.imag),
    case("complex", Shape("f64", (2,)), Shape("f64", (2,)), like=lax.complex),
    case("select", PRED, (3, 4), (3, 4), like=lax.select),
    case("select", Shape("pred"), (3, 4), (3, 4), like=lax.select),
    case("clamp", (3, 4), (3, 4), (3, 4), like=lax.clamp),
    case("clamp", SCALAR, (3, 4), SCALAR, like=lax.clamp),
    case("reduce-precision", (3, 4), like=lambda x: lax.reduce_precision(x, 5, 10), exponent_bits=5, mantissa_bits=10),
    case("transpose", (2, 3, 5), like=lambda x: x.transpose(2, 0, 1), dimensions=(2, 0, 1)),
    case("reverse", (2, 3), like=lambda x: lax.rev(x, (1,)), dimensions=(1,)),
    case("slice", (10, 7), like=lambda x: x[1:10:4, 2:2], slice=((1, 10, 4), (2, 2, 1))),
    case("slice", (), like=lambda x: x, slice=()),
    case("pad", (3, 4), SCALAR, like=lambda x, v: lax.pad(x, v, ((1, 2, 3), (-1, 0, 0))),
         padding=((1, 2, 3), (-1, 0, 0))),
    case("pad", (0,), SCALAR, like=lambda x, v: lax.pad(x, v, ((1, 1, 2),)), padding=((1, 1, 2),)),
    case("concatenate", (2, 3), (2, 0), (2, 5), like=lambda *x: lax.concatenate(x, 1), dimensions=(1,)),
    case("dynamic-slice", (8, 9), I32, I32, like=lambda x, i, j: lax.dynamic_slice(x, (i, j), (2, 9)),
         dynamic_slice_sizes=(2, 9)),
    case("dynamic-update-slice", (8, 9), (2, 9), I32, I32,
         like=lambda x, u, i, j: lax.dynamic_update_slice(x, u, (i, j))),
    case("gather", (8, 9, 5), Shape("s32", (3, 6, 2)),
         like=functools.partial(_gather, sizes=(1, 4, 5), numbers=lax.GatherDimensionNumbers(
             offset_dims=(1, 3), collapsed_slice_dims=(0,), start_index_map=(0, 1))),
         offset_dims=(1, 3), collapsed_slice_dims=(0,), start_index_map=(0, 1), index_vector_dim=2,
         slice_sizes=(1, 4, 5)),
    case("gather", (3, 9, 5), Shape("s32", (3, 1)),
         like=functools.partial(_gather, sizes=(1, 4, 5), numbers=lax.GatherDimensionNumbers(
             offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(1,), operand_batching_dims=(0,),
             start_indices_batching_dims=(0,))),
         offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(1,), operand_batching_dims=(0,),
         start_indices_batching_dims=(0,), index_vector_dim=1, slice_sizes=(1, 4, 5)),
    case("scatter", (8, 9), Shape("s32", (5, 1)), (5, 9), like=lambda x, i, u: x.at[i[:, 0]].add(u),
         to_apply=scalar_computation(F)),
    case("sort", (3, 4), like=lax.sort, dimensions=(1,)),
    case("sort", (3, 4), Shape("s32", (3, 4)), like=lambda k, v: lax.sort((k, v), num_keys=1), dimensions=(1,)),
    case("reduce", (2, 3, 5), SCALAR, like=lambda x, i: lax.reduce(x, i, lax.add, (0, 2)), dimensions=(0, 2),
         to_apply=scalar_computation(F)),
    case("reduce", (2, 3), INT_ARRAY.with_dims((2, 3)), SCALAR, I32, dimensions=(1,),
         like=lambda x, n, i, j: lax.reduce((x, n), (i, j), lambda a, b: (a[0] + b[0], a[1] + b[1]), (1,)),
         to_apply=scalar_computation(F, "s32")),
    case("reduce-window", (8, 9), SCALAR,
         like=lambda x, i: lax.reduce_window(x, -np.inf, lax.max, (2, 3), (2, 1), ((0, 0), (1, 1))),
         window=_window((2, 2, 0, 0), (3, 1, 1, 1))),
    case("reduce-window", (8, 9), SCALAR,
         like=lambda x, i: lax.reduce_window(x, -np.inf, lax.max, (2, 3), (2, 1), "VALID", (2, 1), (1, 3)),
         window=(WindowDimension(2, 2, lhs_dilate=2), WindowDimension(3, 1, rhs_dilate=3))),
    case("reduce-window", (2, 9), SCALAR,
         like=lambda x, i: lax.reduce_window(x, -np.inf, lax.max, (3, 3), (1, 1), "VALID"),
         window=_window((3, 1, 0, 0), (3, 1, 0, 0))),
    case("dot", (4, 3, 5), (4, 5, 7), like=lambda x, y: lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,)))),
         lhs_batch_dims=(0,), rhs_batch_dims=(0,), lhs_contracting_dims=(2,), rhs_contracting_dims=(1,)),
    case("dot", (4, 3), (7, 3, 4, 2), like=lambda x, y: lax.dot_general(x, y, (((1, 0), (1, 2)), ((), ()))),
         lhs_contracting_dims=(1, 0), rhs_contracting_dims=(1, 2)),
    case("convolution", (2, 9, 9, 6), (3, 3, 3, 8),
         like=lambda x, k: lax.conv_general_dilated(x, k, (2, 1), ((1, 1), (0, 2)), (1, 2), (2, 1),
                                                    feature_group_count=2, dimension_numbers=("NHWC", "HWIO", "NHWC")),
         window=(WindowDimension(3, 2, 1, 1, 1, 2), WindowDimension(3, 1, 0, 2, 2, 1)),
         dim_labels="b01f_01io->b01f", feature_group_count=2),
    case("fft", COMPLEX_ARRAY, like=lambda x: lax.fft(x, "FFT", (4,)), fft_type="FFT", fft_length=(4,)),
    case("fft", (3, 8), like=lambda x: lax.fft(x, "RFFT", (8,)), fft_type="RFFT", fft_length=(8,)),
    case("fft", Shape("c64", (3, 5)), like=lambda x: lax.fft(x, "IRFFT", (8,)), fft_type="IRFFT", fft_length=(8,)),
    case("cholesky", (5, 4, 4), like=lax.linalg.cholesky, lower=True),
    case("triangular-solve", (4, 4), (4, 2), left_side=True, lower=True,
         like=lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True)),
    case("opt-barrier", (3, 4), like=lax.optimization_barrier),
    case("tuple", (3, 4), I32, like=lambda *x: x),
    case("map", (3, 4), (3, 4), like=lax.eq, dimensions=(0, 1), to_apply=scalar_computation("pred")),
]


@pytest.mark.parametrize("given", SHAPE_CASES)
def test_shape_rule_agrees_with_eval_shape(given: ShapeCase) -> None:
    with jax.enable_x64(True):
        avals = [jax.ShapeDtypeStruct(s.dims, dtype_of(s.element_type)) for s in given.operands]
        wanted = jax.eval_shape(given.function, *avals)
    shapes = tuple(shape_of(aval) for aval in jax.tree.leaves(wanted))
    one = len(shapes) == 1 and not isinstance(wanted, (list, tuple))
    expected: AnyShape = shapes[0] if one or given.opcode == "sort" and len(shapes) == 1 else TupleShape(shapes)
    assert infer_shape(given.opcode, given.operands, given.attrs) == expected


# Rules that no jax.lax function stands for.
def test_shapes_of_tuples_and_calls() -> None:
    pair = TupleShape((Shape(F, (2,)), Shape("s32")))
    root = SimpleNamespace(root=SimpleNamespace(shape=pair))
    assert infer_shape("get-tuple-element", (pair,), {"index": 1}) == Shape("s32")
    assert infer_shape("call", (), {"to_apply": root}) == pair
    assert infer_shape("fusion", (), {"calls": root}) == pair
    assert infer_shape("while", (pair,), {"condition": root, "body": root}) == pair
    assert infer_shape("conditional", (I32, pair), {"branch_computations": (root, root)}) == pair
    assert infer_shape("constant", (), {"literal": np.zeros((2, 3), np.int8)}) == Shape("s8", (2, 3))
    assert infer_shape("after-all", (TOKEN, TOKEN), {}) == TOKEN
    assert infer_shape("select-and-scatter", (Shape(F, (8,)), Shape(F, (4,)), SCALAR),
                       {"window": _window((2, 2, 0, 0))}) == Shape(F, (8,))


REFUSED = [
    ("frobnicate", (), {}, "unknown opcode 'frobnicate'"),
    ("add", (SCALAR,), {}, "add takes 2 operand"),
    ("add", (Shape(F, (3,)), Shape(F, (4,))), {}, r"operand 1 is f32\[4\]\{0\}, but operand 0 is f32\[3\]"),
    ("add", (Shape(F, (3,)), Shape("f64", (3,))), {}, r"operand 1 is f64\[3\]"),
    ("and", (SCALAR, SCALAR), {}, "and takes pred, integers"),
    ("sine", (I32,), {}, "sine takes floats, complex numbers; operand 0 is s32"),
    ("negate", (TupleShape((SCALAR,)),), {}, "operand 0 is the tuple"),
    ("select", (SCALAR, SCALAR, SCALAR), {}, "operand 0 is f32.*pred is needed"),
    ("select", (Shape("pred", (2,)), Shape(F, (3,)), Shape(F, (3,))), {}, "operand 0 .*neither a scalar nor"),
    ("clamp", (Shape(F, (2,)), Shape(F, (3,)), SCALAR), {}, "operand 0 is"),
    ("broadcast", (SCALAR,), {"dimensions": ()}, "broadcast: shape must be given"),
    ("transpose", (Shape(F, (2, 3)),), {"dimensions": (0, 0)}, "do not permute operand 0"),
    ("transpose", (Shape(F, (2, 3)),), {}, "transpose: attribute 'dimensions' is missing"),
    ("slice", (Shape(F, (4,)),), {"slice": ((0, 5, 1),)}, r"range \[0:5:1\] of axis 0 is not in operand 0"),
    ("pad", (Shape(F, (2,)), I32), {"padding": ((0, 0, 0),)}, "operand 1 is s32"),
    ("concatenate", (Shape(F, (2, 3)), Shape(F, (3, 3))), {"dimensions": (1,)}, "operand 1 .* does not continue"),
    ("dynamic-slice", (Shape(F, (4, 4)), I32), {"dynamic_slice_sizes": (1, 1)}, "1 start indices .* rank 2"),
    ("dynamic-update-slice", (Shape(F, (4,)), Shape(F, (5,)), I32), {}, "operand 1 .* does not fit"),
    ("reduce", (Shape(F, (4,)), Shape(F, (1,))), {"dimensions": (0,)}, "operand 1 is .* a scalar is needed"),
    ("reduce", (Shape(F, (4,)), SCALAR), {"dimensions": (1,)}, "not all in an array of rank 1"),
    ("dot", (Shape(F, (2, 3)), Shape(F, (4, 5))), {"lhs_contracting_dims": (1,), "rhs_contracting_dims": (0,)},
     "contracting dims"),
    ("dot", (Shape(F, (2,)), Shape("bf16", (2,))), {"lhs_contracting_dims": (0,), "rhs_contracting_dims": (0,)},
     "shape must be given"),
    ("get-tuple-element", (TupleShape((SCALAR,)),), {"index": 1}, "index 1 is not in a tuple of 1"),
    ("get-tuple-element", (SCALAR,), {"index": 0}, "a tuple is needed"),
]


@pytest.mark.parametrize(("opcode", "operands", "attrs", "message"), REFUSED)
def test_refused_shapes_say_which_operand_and_why(opcode: str, operands: tuple[AnyShape, ...], attrs: dict[str, Any],
                                                   message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        infer_shape(opcode, operands, attrs)


def test_every_elementwise_row_has_a_shape_case() -> None:
    tested = {param.values[0].opcode for param in SHAPE_CASES}
    given = {"convert", "bitcast-convert"}  # no rule: the shape must be given
    assert {name for name in OPCODES if is_elementwise(name)} <= tested | given


def test_xla_knows_every_opcode() -> None:
    """The operand does not exist, so that XLA's parser reads the opcode and stops before it makes the instruction."""
    for name in (*OPCODES, "frobnicate"):
        shape = "(f32[])" if name == "tuple" else "f32[]"  # the parser aborts the process on a tuple that is none
        with pytest.raises(Exception) as refused:
            hlo_module_from_text(f"HloModule m\nENTRY e {{\n  ROOT r = {shape} {name}(missing)\n}}\n")
        assert (f"Unknown opcode: {name}" in str(refused.value)) == (name == "frobnicate"), name


COMBINING: dict[str, Callable[..., Any]] = {
    "add": lax.add, "multiply": lax.mul, "maximum": lax.max, "minimum": lax.min, "and": lax.bitwise_and,
    "or": lax.bitwise_or, "xor": lax.bitwise_xor}
SAMPLES: dict[str, Any] = {
    "f32": np.array([0.0, -0.0, 1.5, -2.0, np.inf, -np.inf, np.nan, 3e38], np.float32),
    "s32": np.array([0, 1, -1, 7, 2**31 - 1, -2**31], np.int32),
    "u8": np.array([0, 1, 7, 255], np.uint8),
    "pred": np.array([False, True]),
}


def _combinations() -> list[tuple[str, str]]:
    return [(opcode, t) for opcode in COMBINING for t in SAMPLES
            if t in ("s32", "u8") or (opcode in ("and", "or", "xor")) == (t == "pred")]


@pytest.mark.parametrize(("opcode", "element_type"), _combinations())
def test_identities_change_nothing(opcode: str, element_type: str) -> None:
    values = SAMPLES[element_type]
    identity = np.full_like(values, identity_of(opcode, element_type))
    result = np.asarray(COMBINING[opcode](values, identity))
    np.testing.assert_array_equal(result, values)
    if element_type == "f32":
        np.testing.assert_array_equal(np.signbit(result), np.signbit(values))


@pytest.mark.parametrize(("opcode", "element_type"), _combinations())
def test_commutative_rows_commute(opcode: str, element_type: str) -> None:
    left, right = (g.ravel() for g in np.meshgrid(SAMPLES[element_type], SAMPLES[element_type]))
    assert is_commutative(opcode) and OPCODES[opcode].associative
    np.testing.assert_array_equal(COMBINING[opcode](left, right), COMBINING[opcode](right, left))


def test_nothing_else_claims_to_commute_or_associate() -> None:
    assert {name for name, row in OPCODES.items() if row.commutative or row.associative} == set(COMBINING)
    assert identity_of("subtract", F) is None


def test_effects() -> None:
    assert has_effect("outfeed", {}) and has_effect("all-reduce", {})
    assert has_effect("custom-call", {"has_side_effect": True})
    assert not has_effect("custom-call", {}) and not has_effect("add", {})


def test_rows_are_consistent() -> None:
    for name, row in OPCODES.items():
        assert row.name == name
        assert row.unit in ("none", "fp", "int", "special", "div"), name
        assert (row.ops > 0) or row.unit == "none", name
        for expr in (row.expr, row.int_expr, row.pred_expr):
            numbers = {n for n in range(4) if f"{{{n}}}" in expr}
            assert not expr or numbers == set(range(row.arity or 0)), (name, expr)
