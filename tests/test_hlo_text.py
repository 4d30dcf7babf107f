"""HLO text: what is printed is read back as the same program, XLA reads all of it, and we read all of XLA's.

Every mistake in a text is shown with its line and a caret.
"""
from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from catalog import CATALOG
from catalog_hlo import assert_close, xla_program
from hypothesis import given, settings
from hypothesis import strategies as st
from xla_oracle import XlaError, run_hlo, xla_parses

from hlofuse.errors import ParseError
from hlofuse.hlo.builder import broadcast, computation, constant, element_of, make, parameter, tuple_of
from hlofuse.hlo.module import Computation, Instruction, Metadata, Module
from hlofuse.hlo.parser import parse_module
from hlofuse.hlo.printer import identifier, print_computation, print_instruction, print_module
from hlofuse.hlo.shape import Shape, TupleShape, dtype_of
from hlofuse.hlo.traverse import structurally_equal
from hlofuse.hlo.verifier import verify_module

WORKLOADS = sorted(CATALOG)


def module_of(root: Instruction, *parameters: Instruction, effects: tuple[Instruction, ...] = ()) -> Module:
    return Module("test", Computation("main", parameters, root, effects))


def assert_round_trip(module: Module) -> None:
    """One reading and printing gives an equal program and the very same text."""
    text = print_module(module)
    again = parse_module(text)
    assert structurally_equal(again, module), text
    assert print_module(again) == text


# --- the catalog ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("stage", ["text", "optimized"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_catalog_text_is_read_printed_and_run(name, stage):
    program = xla_program(name)
    module = verify_module(parse_module(getattr(program, stage)))
    assert_round_trip(module)
    assert xla_parses(print_module(module))
    assert_close(run_hlo(print_module(module, fusions="call"), program.arguments), program.results)


def test_compiled_text_tells_source_lines():
    module = parse_module(xla_program("softmax").optimized)
    places = {(i.metadata.source_file.rsplit("/", 1)[-1], i.metadata.source_line)
              for c in module.computations for i in c.instructions if i.metadata.source_line}
    source = Path(CATALOG["softmax"].fn.__code__.co_filename).read_text().splitlines()
    assert places and all(file == "catalog.py" for file, _ in places)
    assert all("softmax" in source[line - 1] for _, line in places)


# --- layouts ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("operand_layout, result, result_layout, expected", [
    ("{0,1}", "3,2", "{1,0}", lambda x: x.T),
    ("{1,0}", "3,2", "{0,1}", lambda x: x.reshape(2, 3).T),
    ("{0,1}", "6", "{0}", lambda x: x.T.reshape(6)),
    ("{1,0}", "6", "{0}", lambda x: x.reshape(6)),
    ("{0,1}", "1,3,2", "{2,1,0}", lambda x: x.T.reshape(1, 3, 2)),
    ("{0,1:T(8,128)S(1)}", "2,3", "{0,1}", lambda x: x),
])
def test_a_bitcast_between_layouts_is_a_transpose(operand_layout, result, result_layout, expected):
    text = f"""HloModule m

ENTRY main {{
  x = s32[2,3]{{1,0}} parameter(0)
  y = s32[2,3]{operand_layout} copy(x)
  ROOT z = s32[{result}]{result_layout} bitcast(y)
}}
"""
    x = np.arange(6, dtype=np.int32).reshape(2, 3)
    (value,) = run_hlo(print_module(parse_module(text), fusions="call"), [x])
    np.testing.assert_array_equal(value, expected(x), strict=True)


def test_unit_axes_make_no_transpose():
    text = """HloModule m

ENTRY main {
  x = f32[4,1]{0,1} parameter(0)
  ROOT y = f32[4]{0} bitcast(x)
}
"""
    assert [i.opcode for i in parse_module(text).entry.instructions] == ["parameter", "bitcast"]


# --- what foreign text brings -----------------------------------------------------------------------------------------

FOREIGN = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[8]{0}, /*index=1*/f32[8]{0})->f32[8]{0}}

%region (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %max = f32[] maximum(f32[] %a, f32[] %b)
}, execution_thread="main"

// a comment
ENTRY %main (x: f32[8], y: f32[8]) -> f32[8] {
  %x = f32[8]{0:T(128)} parameter(0), sharding={replicated}, metadata={op_name="x /* no comment */"}
  %y = f32[8]{0} parameter(1)
  %pair = (f32[8]{0}, /*index=1*/ f32[8]{0}) tuple(%x, /*index=1*/ %y), frontend_attributes={note="a, {b}"}
  %left = f32[8]{0} get-tuple-element(%pair), index=0
  %lt = pred[8]{0} compare(%left, %y), direction=LT, order=TOTAL
  %sum = f32[8]{0} add(%left, %y), backend_config={"outer":["2"],"text":"}"}, control-predecessors={%lt}
  ROOT %r = f32[8]{0} select(%lt, %sum, %y)
}
"""


def test_foreign_text_is_read_with_all_its_trimmings():
    module = verify_module(parse_module(FOREIGN))
    named = {i.name: i for i in module.entry.instructions}
    assert named["x"].metadata.op_name == "x /* no comment */"
    assert named["pair"].attrs["frontend_attributes"] == '{note="a, {b}"}'
    assert named["sum"].attrs["backend_config"] == '{"outer":["2"],"text":"}"}'
    assert named["sum"].control == (named["lt"],)
    assert named["lt"].attrs["type"] == "TOTALORDER"
    assert_round_trip(module)
    assert xla_parses(print_module(module))


def test_both_kinds_of_conditional_are_read():
    text = """HloModule m

twice {
  x = f32[] parameter(0)
  ROOT y = f32[] add(x, x)
}

same {
  ROOT x = f32[] parameter(0)
}

ENTRY main {
  p = pred[] parameter(0)
  n = s32[] parameter(1)
  x = f32[] parameter(2)
  a = f32[] conditional(p, x, x), true_computation=twice, false_computation=same
  b = f32[] conditional(n, a, x), branch_computations={same, twice}
  ROOT c = f32[] add(a, b)
}
"""
    module = verify_module(parse_module(text))
    assert [c.name for c in module.entry.root.operands[0].attrs["branch_computations"]] == ["twice", "same"]
    assert_round_trip(module)
    np.testing.assert_equal(run_hlo(print_module(module), [True, np.int32(1), np.float32(3)]), [np.float32(12)])


# --- literals ---------------------------------------------------------------------------------------------------------

def _all_bits(element_type: str) -> np.ndarray:
    dtype = dtype_of(element_type)
    if element_type == "pred":
        return np.array([True, False])
    if element_type in ("c64", "c128"):
        part = np.array([np.nan, -np.nan, 0.0, -0.0, np.inf, -np.inf, 1.1], f"f{dtype.itemsize // 2}")
        values = np.empty((part.size, part.size), dtype)
        values.real, values.imag = part[:, None], part
        return values
    if element_type in ("s2", "s4", "u2", "u4", "f4e2m1fn"):
        return np.array({"s2": [-2, 1], "s4": [-8, 7], "u2": [0, 3], "u4": [0, 15]}.get(element_type, [-6, 0.5]), dtype)
    unsigned = np.dtype(f"uint{8 * dtype.itemsize}")
    if dtype.itemsize == 1:
        return np.arange(256).astype(unsigned).view(dtype)
    return np.random.default_rng(0).integers(0, 2**(8 * dtype.itemsize), 5000, unsigned).view(dtype)


ELEMENT_TYPES = ["pred", "s2", "s4", "s8", "s16", "s32", "s64", "u2", "u4", "u8", "u16", "u32", "u64", "f16", "bf16",
                 "f32", "f64", "c64", "c128", "f4e2m1fn", "f8e3m4", "f8e4m3", "f8e4m3b11fnuz", "f8e4m3fn",
                 "f8e4m3fnuz", "f8e5m2", "f8e5m2fnuz", "f8e8m0fnu"]


@pytest.mark.parametrize("element_type", ELEMENT_TYPES)
def test_literals_keep_every_bit_in_our_parser_and_xlas(element_type):
    literal = _all_bits(element_type)
    module = module_of(constant(literal))
    assert_round_trip(module)
    (value,) = run_hlo(print_module(module))
    assert value.dtype == literal.dtype
    assert value.tobytes() == literal.tobytes()


@pytest.mark.parametrize("value, text", [
    (np.float32(1), "1"), (np.float32(0.1), "0.1"), (np.float32(-0.0), "-0.0"), (np.float32(-np.inf), "-inf"),
    (np.float32(np.nan), "nan"), (np.bool_(True), "true"), (np.int8(-3), "-3"), (np.complex64(1 - 2j), "(1, -2)"),
    (ml_dtypes.bfloat16(0.5), "0.5"), (np.int32([[1, 2], [3, 4]]), "{ {1, 2}, {3, 4} }"),
    (np.zeros((2, 0), np.float32), "{ {}, {} }"), (np.zeros((0, 2), np.float32), "{  }"),
])
def test_literals_are_written_as_xla_writes_them(value, text):
    root = constant(value)
    assert f"constant({text})" in print_module(module_of(root))
    assert_round_trip(module_of(root))


def test_people_get_short_constants_and_the_parser_refuses_them():
    module = module_of(constant(np.arange(100, dtype=np.int32)))
    text = print_module(module, max_elements=16)
    assert "constant({...})" in text
    with pytest.raises(ParseError, match="left out when the text was written") as error:
        parse_module(text)
    assert error.value.source[error.value.column - 1:].startswith("...")


# --- names ------------------------------------------------------------------------------------------------------------

HINTS = ["x", "x", "x.1", "x.1", "params['w'][0]", "1x2", "", "true", "nan", "f32", "s4", "u1", "bf16", "f8e4m3fn",
         "ENTRY", "ROOT", "HloModule", "token", "maximal", "é", "a b", "-y", "add", "jit(f)/mul", "unknown",
         "c64", "opaque"]


def test_any_hint_becomes_a_unique_name_that_xla_reads():
    total = parameter(0, Shape("f32", (2,)))
    for hint in HINTS:
        total = make("add", total, total, name=hint)
    module = Module("weird module name!", Computation("nan", (total_parameter(total),), total))
    text = print_module(module)
    assert xla_parses(text)
    assert_round_trip(module)
    assert "  x = f32[2]{0} add(" in text and "  x.2 = f32[2]{0} add(" in text


def total_parameter(instruction: Instruction) -> Instruction:
    while instruction.opcode != "parameter":
        instruction = instruction.operands[0]
    return instruction


@given(st.text(st.characters(codec="ascii"), max_size=12))
@settings(max_examples=60, deadline=None)
def test_identifiers_stay_as_they_are_when_given_again(hint):
    assert identifier(identifier(hint)) == identifier(hint)


# --- printed forms ----------------------------------------------------------------------------------------------------

def _fused() -> Module:
    inner_x = parameter(0, Shape("f32", (4,)), "x")
    twice = make("add", inner_x, inner_x, name="twice")
    body = computation("fused", [inner_x], tuple_of([twice, make("negate", twice)]))
    x = parameter(0, Shape("f32", (4,)), "x")
    fusion = make("fusion", x, shape=body.root.shape, kind="kLoop", calls=body, plan=object(), name="f")
    return module_of(make("subtract", element_of(fusion, 0), element_of(fusion, 1)), x)


def test_a_fusion_is_a_call_where_the_text_shall_run():
    module = _fused()
    assert "fusion(x), kind=kLoop, calls=fused" in print_module(module)
    assert_round_trip(module)
    text = print_module(module, fusions="call")
    assert "call(x), to_apply=fused" in text and "kind=" not in text
    np.testing.assert_array_equal(run_hlo(text, [np.float32([1, 2, 3, 4])]), [np.float32([4, 8, 12, 16])])


def test_text_of_a_whole_module():
    x = parameter(0, Shape("f32", (2, 3)), "x")
    a, b = parameter(0, Shape("f32"), "a"), parameter(1, Shape("f32"), "b")
    region = computation("sum", [a, b], make("add", a, b))
    metadata = Metadata(op_name='jit(f)/"sum"', source_file="model.py", source_line=7)
    total = make("reduce", x, constant(np.float32(0)), dimensions=(1,), to_apply=region, metadata=metadata)
    module = module_of(broadcast(total, (2, 3), (0,)), x)
    assert print_module(module) == """HloModule test, entry_computation_layout={(f32[2,3]{1,0})->f32[2,3]{1,0}}

sum {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT add = f32[] add(a, b)
}

ENTRY main {
  x = f32[2,3]{1,0} parameter(0)
  constant = f32[] constant(0)
  reduce = f32[2]{0} reduce(x, constant), dimensions={1}, to_apply=sum, metadata={op_name="jit(f)/\\"sum\\"" \
source_file="model.py" source_line=7}
  ROOT broadcast = f32[2,3]{1,0} broadcast(reduce), dimensions={0}
}
"""
    assert print_instruction(total) == "reduce = f32[2]{0} reduce(x, constant), dimensions={1}, to_apply=sum"
    assert print_computation(region).startswith("sum {\n  a = ")


def test_effects_and_control_edges_are_kept():
    x = parameter(0, Shape("f32", (2,)), "x")
    first = make("custom-call", x, shape=Shape("f32", (2,)), name="first", custom_call_target="jax.debug_callback",
                 has_side_effect=True, eqn=object())
    attrs = {"custom_call_target": 'jax."odd"', "has_side_effect": True}
    second = Instruction("custom-call", TupleShape(()), (x,), attrs, "second", control=(first,))
    module = module_of(make("negate", x), x, effects=(first, second))
    again = parse_module(print_module(module))
    assert [i.name for i in again.entry.effects] == ["first", "second"]
    assert_round_trip(module)
    assert xla_parses(print_module(module))


def test_a_deep_chain_neither_recurses_nor_takes_long():
    value = x = parameter(0, Shape("f32", (2,)), "x")
    for _ in range(12_000):
        value = make("add", value, x)
    assert_round_trip(module_of(value, x))


# --- random programs --------------------------------------------------------------------------------------------------

_TYPES = st.sampled_from(["f32", "s32", "bf16", "u8", "f64"])


@st.composite
def modules(draw) -> Module:
    """A few parameters and up to 12 instructions of many kinds, each on operands drawn from those before it."""
    dims = draw(st.lists(st.integers(0, 4), max_size=3).map(tuple))
    element_type = draw(_TYPES)
    parameters = [parameter(n, Shape(element_type, dims), draw(st.sampled_from(HINTS))) for n in range(2)]
    values = list(parameters)

    def any_value(with_shape: Shape | None = None) -> Instruction:
        return draw(st.sampled_from([v for v in values if with_shape is None or v.shape == with_shape]))

    for _ in range(draw(st.integers(0, 12))):
        x = any_value()
        kind = draw(st.sampled_from(["binary", "broadcast", "reshape", "transpose", "slice", "pad", "reduce", "convert",
                                     "concatenate", "select", "call", "constant", "reverse", "iota"]))
        axis = draw(st.integers(0, max(x.array.rank - 1, 0)))
        if kind in ("slice", "concatenate", "reverse", "iota") and not x.array.rank:
            kind = "reshape"
        values.append(_random_instruction(draw, kind, x, any_value(x.array), axis))
    return Module("random", computation("main", parameters, tuple_of([any_value(), values[-1]])))


def _random_instruction(draw, kind: str, x: Instruction, y: Instruction, axis: int) -> Instruction:
    shape = x.array
    match kind:
        case "broadcast":
            return broadcast(x, (*shape.dims, draw(st.integers(0, 3))), range(shape.rank))
        case "reshape":
            return make("reshape", x, shape=shape.with_dims((1, *shape.dims)))
        case "transpose":
            return make("transpose", x, dimensions=tuple(draw(st.permutations(range(shape.rank)))))
        case "reverse":
            return make("reverse", x, dimensions=(axis,))
        case "slice":
            limits = [draw(st.integers(0, d)) for d in shape.dims]
            return make("slice", x, slice=tuple((draw(st.integers(0, n)), n, draw(st.integers(1, 2))) for n in limits))
        case "pad":
            padding = tuple((draw(st.integers(0, 2)), draw(st.integers(0, 2)), draw(st.integers(0, 1)))
                            for _ in shape.dims)
            return make("pad", x, constant(1, shape.element_type), padding=padding) if padding else x
        case "reduce":
            a, b = parameter(0, Shape(shape.element_type)), parameter(1, Shape(shape.element_type))
            dimensions = tuple(d for d in range(shape.rank) if draw(st.booleans()))
            return make("reduce", x, constant(0, shape.element_type), dimensions=dimensions,
                        to_apply=computation("region", [a, b], make("maximum", a, b)))
        case "convert":
            return make("convert", x, shape=shape.with_type(draw(_TYPES)))
        case "concatenate":
            return make("concatenate", x, y, dimensions=(axis,))
        case "select":
            return make("select", make("compare", x, y, direction=draw(st.sampled_from(["LT", "EQ"]))), x, y)
        case "call":
            inner = parameter(0, shape)
            return make("call", x, shape=shape, to_apply=computation("f", [inner], make("add", inner, inner)))
        case "constant":
            return constant(np.asarray(draw(st.floats(width=32)), np.float32))
        case "iota":
            return make("iota", shape=shape, iota_dimension=axis)
    opcode = draw(st.sampled_from(["add", "multiply", "maximum", "subtract"]))
    return make(opcode, x, y, name=draw(st.sampled_from(HINTS)))


@given(modules())
@settings(max_examples=80, deadline=None)
def test_random_programs_round_trip(module):
    verify_module(module)
    assert_round_trip(module)


@given(modules())
@settings(max_examples=25, deadline=None)
def test_xla_reads_random_programs(module):
    assert xla_parses(print_module(module))


# --- mistakes ---------------------------------------------------------------------------------------------------------

VALID = """HloModule m

region {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT sum = f32[] add(a, b)
}

ENTRY main {
  x = f32[2,3]{1,0} parameter(0)
  zero = f32[] constant(0)
  total = f32[2]{0} reduce(x, zero), dimensions={1}, to_apply=region
  ROOT y = f32[2,2]{1,0} broadcast(total), dimensions={0}
}
"""

# (what to replace, by what, what the message says, the text that the caret stands under)
MISTAKES = {
    "no header": ("HloModule m\n", "", "expected 'HloModule'", "region"),
    "no entry": ("ENTRY main", "main", "no ENTRY", ""),
    "two entries": ("region {", "ENTRY region {", "a second ENTRY computation", "ENTRY main"),
    "unknown opcode": ("reduce(x", "redcue(x", "unknown opcode 'redcue'; did you mean 'reduce'?", "redcue"),
    "unknown operand": ("broadcast(total)", "broadcast(totl)", "unknown operand 'totl'.*did you mean 'total'", "totl"),
    "unknown computation": ("to_apply=region", "to_apply=regoin", "unknown computation 'regoin'.*'region'", "regoin"),
    "unknown type": ("f32[2]{0} reduce", "g32[2]{0} reduce", "unknown element type 'g32'", "g32"),
    "bad layout": ("f32[2,3]{1,0}", "f32[2,3]{1,1}", "not a permutation", "1,1"),
    "dynamic size": ("f32[2,3]{1,0}", "f32[<=2,3]{1,0}", "dynamic sizes are not supported", "<=2,3"),
    "no shape": ("zero = f32[] ", "zero = ", "expected a shape", "constant"),
    "no opcode": ("f32[] constant(0)", "f32[] ", "expected an opcode", "total"),
    "bad literal": ("constant(0)", "constant(zero)", "'zero' is not a value of type f32", "zero)"),
    "literal of another size": ("constant(0)", "constant({1, 2})", "needs 0 level", "{1, 2}"),
    "bad dimensions": ("dimensions={1}", "dimensions={a}", r"expected dimensions= such as \{0,1\}", "{a}"),
    "missing value": ("dimensions={1}", "dimensions=", "expected a value", ", to_apply"),
    "missing attribute": (", dimensions={1}", "", "attribute 'dimensions' is missing", "reduce"),
    "wrong shape": ("ROOT y = f32[2,2]", "ROOT y = f32[3,2]", "other sizes", "broadcast"),
    "wrong number of operands": ("add(a, b)", "add(a)", "add takes 2", "add"),
    "wrong types": ("zero = f32[]", "zero = s32[]", r"is s32\[2\]\{0\}, not f32\[2\]", "reduce"),
    "unclosed brace": ("dimensions={1}", "dimensions={1", "expected dimensions= such as", "{1, to"),
    "unclosed parenthesis": ("constant(0)", "constant(0", "is never closed", "(0"),
    "unclosed body": ("{0}\n}\n", "{0}\n", "expected an instruction", ""),
    "two of one name": ("zero = f32[]", "x = f32[]", "a second instruction named 'x'", "x = f32[] constant"),
    "two roots": ("  total =", "  ROOT total =", "a second ROOT", "y ="),
    "parameter numbers": ("b = f32[] parameter(1)", "b = f32[] parameter(2)", r"no parameter\(1\)", "region"),
    "same parameter": ("b = f32[] parameter(1)", "b = f32[] parameter(0)", r"a second parameter\(0\)", "b ="),
    "no number": ("parameter(1)", "parameter(one)", "expected the parameter's number", "one"),
    "operand of another computation": ("broadcast(total)", "broadcast(sum)", "unknown operand 'sum'", "sum"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_shown_where_they_stand(mistake):
    old, new, message, under_caret = MISTAKES[mistake]
    assert VALID.count(old) == 1
    text = VALID.replace(old, new)
    with pytest.raises(ParseError, match=message) as caught:
        parse_module(text)
    error = caught.value
    lines = text.split("\n")
    assert error.source == lines[error.line - 1]
    assert "\n".join([error.source[error.column - 1:], *lines[error.line:]]).startswith(under_caret)


def test_the_message_of_a_mistake():
    with pytest.raises(ParseError) as caught:
        parse_module(VALID.replace("add(a, b)", "add(a, c)"), file="model.hlo")
    assert str(caught.value) == (
        "unknown operand 'c': expected an instruction that stands above in this computation\n"
        "  model.hlo, line 6, column 27:\n"
        "      ROOT sum = f32[] add(a, c)\n"
        "                              ^")


def test_what_is_accepted_for_people_is_no_mistake():
    parse_module(VALID)
    with pytest.raises(XlaError):
        xla_parses(VALID.replace("reduce(x", "redcue(x"))
