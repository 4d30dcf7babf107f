"""The text of scalar expressions: parentheses, rounding, what has no expression, names that kernels must avoid."""
from __future__ import annotations

import pytest

from hlofuse.codegen import scalar_expr as scalar
from hlofuse.codegen.prelude import reserved_names
from hlofuse.hlo import builder
from hlofuse.hlo.shape import Shape


def test_operands_get_parentheses_where_they_need_them() -> None:
    x = builder.parameter(0, Shape("f32"))
    halves = builder.parameter(0, Shape("bf16"))
    bytes_ = builder.parameter(0, Shape("u8"))
    product = builder.make("multiply", x, x)
    assert scalar.scalar_expr(product, ["a + b", "f(x)[1]"], ["f32"] * 2) == "(a + b) * (f(x)[1])"
    assert scalar.scalar_expr(product, ["max_nan(a, b)", "x[i]"], ["f32"] * 2) == "max_nan(a, b) * x[i]"
    assert scalar.scalar_expr(product, ["(a) + (b)", "1e-05f"], ["f32"] * 2) == "((a) + (b)) * 1e-05f"
    assert scalar.scalar_expr(builder.make("maximum", x, x), ["a + b", "-1.0f"], ["f32"] * 2) == "max_nan(a + b, -1.0f)"
    assert scalar.scalar_expr(builder.make("add", halves, halves), ["a", "b"], ["bf16"] * 2) == "round_bf16(a + b)"
    assert scalar.scalar_expr(builder.make("and", bytes_, bytes_), ["a", "b"], ["u8"] * 2) == "(u8)(a & b)"


def test_what_has_no_expression_says_so() -> None:
    angle = builder.make("acos", builder.parameter(0, Shape("c64")))
    widened = builder.make("bitcast-convert", builder.parameter(0, Shape("f64")), shape=Shape("u32", (2,)))
    eighth = builder.make("negate", builder.parameter(0, Shape("f8e5m2")))
    for instruction in (angle, widened, eighth, builder.make("reshape", angle, shape=Shape("c64", (1,)))):
        assert not scalar.has_scalar_expr(instruction)
        with pytest.raises(scalar.NoScalarExpr):
            scalar.scalar_expr(instruction, ["x"], [instruction.operands[0].element_type])


def test_names_of_the_prelude_are_reserved() -> None:
    assert {"max_nan", "logistic", "c64", "BARRIER", "float", "operator", "tanh", "threadIdx"} <= reserved_names()
    inside_functions = {"x", "b", "reduce", "value", "x_norm"}
    assert reserved_names().isdisjoint(inside_functions)
