"""The verifier finds what is wrong with a module, and shows it under the offending line."""
from __future__ import annotations

import numpy as np
import pytest

from hlofuse.errors import VerifierError
from hlofuse.hlo.builder import broadcast, computation, constant, make, parameter, tuple_of
from hlofuse.hlo.module import Computation, Instruction, Module
from hlofuse.hlo.shape import Shape, TupleShape
from hlofuse.hlo.verifier import verify_module

F2 = Shape("f32", (2,))
F23 = Shape("f32", (2, 3))
X = parameter(0, F23, "x")
SCALARS = [parameter(0, Shape("f32"), "a"), parameter(1, Shape("f32"), "b")]
INTEGERS = [parameter(0, Shape("s32"), "a"), parameter(1, Shape("s32"), "b")]
SUM = computation("sum", SCALARS, make("add", *SCALARS))
INTEGER_SUM = computation("integer_sum", INTEGERS, make("add", *INTEGERS))
LESS = computation("less", SCALARS, make("compare", *SCALARS, direction="LT"))
ONE = computation("one", [SCALARS[0]], SCALARS[0])
ZERO = constant(np.float32(0))
PAIR = tuple_of([X, X])


def raw(opcode: str, shape, *operands: Instruction, **attrs) -> Instruction:
    """An instruction that no rule has looked at."""
    return Instruction(opcode, shape, operands, attrs, name="bad")


def loop(result: Shape, condition: Computation, body: Computation) -> Instruction:
    return raw("while", result, X, condition=condition, body=body)


def always(shape: Shape, result: Shape | None = None) -> Computation:
    """A computation that ignores its parameter and returns pred, or a value of the given shape."""
    value = constant(np.True_) if result is None else broadcast(constant(0, result.element_type), result.dims)
    return computation("always", [parameter(0, shape)], value)


BROKEN = {
    "unknown opcode": (raw("ad", F23, X, X), "unknown opcode 'ad'"),
    "arity": (raw("add", F23, X), "add takes 2 operand"),
    "operand shapes": (raw("add", F23, X, ZERO), r"operand 1 is f32\[\], but operand 0"),
    "operand type": (raw("is-finite", Shape("pred"), constant(np.int32(1))), "is-finite takes floats"),
    "result shape": (raw("negate", F2, X), r"negate of these operands is f32\[2,3\]\{1,0\}, not f32\[2\]"),
    "missing attribute": (raw("transpose", F23, X), "attribute 'dimensions' is missing"),
    "attribute's type": (raw("reverse", F23, X, dimensions=[0]), r"dimensions=\[0\] is not of the form"),
    "transpose": (raw("transpose", F23, X, dimensions=(0, 0)), "transpose"),
    "broadcast's axes": (raw("broadcast", F23, ZERO, dimensions=(0,)), "must name one axis"),
    "broadcast's sizes": (raw("broadcast", Shape("f32", (5, 2)), X, dimensions=(0, 1)), "other sizes"),
    "broadcast's order": (raw("broadcast", Shape("f32", (3, 2)), X, dimensions=(1, 0)), "ascending"),
    "broadcast's type": (raw("broadcast", Shape("s32", (2,)), ZERO, dimensions=()), "keeps the element type"),
    "reshape": (raw("reshape", F2, X), "element count and type must stay"),
    "iota": (raw("iota", F2, iota_dimension=1), "not an axis"),
    "convert": (raw("convert", Shape("s32", (3,)), X), "convert keeps the dimensions"),
    "bitcast-convert": (raw("bitcast-convert", Shape("u8", (2, 3, 2)), X), "only the last axis"),
    "bitcast": (raw("bitcast", Shape("u8", (6,)), X), "the bytes must stay"),
    "compare": (raw("compare", F23.with_type("pred"), X, X, direction="LESS"), "none of EQ"),
    "literal": (raw("constant", Shape("s32"), literal=np.float32(0)), "f32"),
    "reduce takes": (raw("reduce", F2, X, ZERO, dimensions=(1,), to_apply=INTEGER_SUM), "takes s32.* f32.* is given"),
    "reduce count": (raw("reduce", F2, X, ZERO, dimensions=(1,), to_apply=ONE), r"takes 1 parameter\(s\), 2 are given"),
    "reduce returns": (raw("reduce", F2, X, ZERO, dimensions=(1,), to_apply=LESS), "returns pred"),
    "reduce axes": (raw("reduce", F2, X, ZERO, dimensions=(2,), to_apply=SUM), "not all in an array of rank 2"),
    "sort": (raw("sort", F23, X, dimensions=(1,), is_stable=True, to_apply=SUM), "'sum' returns f32.* pred.* expected"),
    "call": (raw("call", F23, X, to_apply=SUM), "call of these operands"),
    "call's parameters": (raw("call", Shape("f32"), X, to_apply=SUM), "to_apply 'sum' takes 2"),
    "fusion": (raw("fusion", Shape("f32"), X, kind="kLoop", calls=ONE), r"calls 'one' takes f32\[\] as parameter\(0\)"),
    "map": (raw("map", F23.with_type("s32"), X, X, dimensions=(0, 1), to_apply=INTEGER_SUM), "'integer_sum' takes s32"),
    "while body": (loop(F23, always(F23), always(F2)), "body 'always' takes"),
    "while condition": (loop(F23, always(F23, F23), always(F23, F23)), "condition 'always' returns"),
    "conditional index": (raw("conditional", F23, X, X, branch_computations=(always(F23, F23),)), "pred or s32"),
    "conditional branches": (raw("conditional", F23, constant(np.True_), X, branch_computations=(always(F23, F23),)),
                             "2 branches, not 1"),
    "conditional operands": (raw("conditional", F23, constant(np.int32(0)), branch_computations=(always(F23, F23),)),
                             "as many operands"),
    "tuple element": (raw("get-tuple-element", F23, PAIR, index=2), "index 2 is not in a tuple of 2"),
    "tuple": (raw("tuple", TupleShape((F23,)), X, X), "not"),
    "dot": (raw("dot", F23, X, X, lhs_contracting_dims=(1,), rhs_contracting_dims=(0,)), "contracting dims"),
    "gather": (raw("gather", F23, X, X, offset_dims=(), collapsed_slice_dims=(), start_index_map=(0,),
                   index_vector_dim=1, slice_sizes=(1, 1)), "gather"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_the_message_stands_under_the_offending_instruction(case):
    bad, message = BROKEN[case]
    with pytest.raises(VerifierError, match=message) as caught:
        verify_module(Module("m", Computation("main", (X,), tuple_of([bad, bad]))))
    lines = (caught.value.program or "").splitlines()
    marked = [number for number, line in enumerate(lines) if line.startswith("  ^^^")]
    assert len(marked) == 1 and lines[marked[0] - 1].startswith("  bad = ")


def test_valid_modules_are_answered():
    module = Module("m", Computation("main", (X,), make("reduce", X, ZERO, dimensions=(1,), to_apply=SUM)))
    assert verify_module(module) is module


def test_a_mixed_precision_dot_may_choose_its_result_type():
    x = parameter(0, Shape("bf16", (2, 3)))
    y = parameter(1, Shape("f32", (3, 2)))
    dot = make("dot", x, y, shape=Shape("f32", (2, 2)), lhs_contracting_dims=(1,), rhs_contracting_dims=(0,))
    verify_module(Module("m", Computation("main", (x, y), dot)))


def test_an_operand_of_another_computation():
    foreign = parameter(0, F2, "theirs")
    module = Module("m", Computation("main", (X,), make("negate", foreign, name="bad")))
    with pytest.raises(VerifierError, match="reads theirs, which is a parameter of another computation"):
        verify_module(module)


@pytest.mark.parametrize("parameters", [(parameter(1, F2),), (parameter(0, F2), parameter(0, F2)), (ZERO,)])
def test_parameters_are_numbered_by_their_place(parameters):
    with pytest.raises(VerifierError, match=r"this stands for parameter\(\d\)"):
        verify_module(Module("m", Computation("main", parameters, ZERO)))


def test_a_cycle_of_instructions():
    first = make("negate", X, name="first")
    second = make("negate", first, name="second")
    object.__setattr__(first, "operands", (second,))
    with pytest.raises(VerifierError, match="cycle in computation 'main'"):
        verify_module(Module("m", Computation("main", (X,), second)))


def test_a_computation_that_calls_itself():
    attrs: dict = {}
    call = Instruction("call", F23, (X,), attrs)
    attrs["to_apply"] = Computation("again", (X,), call)
    with pytest.raises(VerifierError, match="'again' calls itself"):
        verify_module(Module("m", attrs["to_apply"]))


def test_a_message_shows_the_program():
    bad = raw("add", F23, X, ZERO)
    with pytest.raises(VerifierError) as caught:
        verify_module(Module("m", Computation("main", (X,), bad)))
    assert str(caught.value) == """\
bad = f32[2,3]{1,0} add(x, constant), in computation 'main': add: operand 1 is f32[], but operand 0 is f32[2,3]{1,0}
HloModule m, entry_computation_layout={(f32[2,3]{1,0})->f32[2,3]{1,0}}

ENTRY main {
  x = f32[2,3]{1,0} parameter(0)
  constant = f32[] constant(0)
  ROOT bad = f32[2,3]{1,0} add(x, constant)
  ^^^ add: operand 1 is f32[], but operand 0 is f32[2,3]{1,0}
}
"""


def test_ten_thousand_instructions():
    value = X
    for _ in range(10_000):
        value = make("negate", value)
    verify_module(Module("m", Computation("main", (X,), value)))
