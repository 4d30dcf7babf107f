"""Edits of the graph: new nodes only where something changed, the same object where nothing did."""
from __future__ import annotations

import numpy as np
import pytest

from hlofuse.hlo.builder import computation, constant, make, parameter, tuple_of
from hlofuse.hlo.module import Computation, Instruction, Module
from hlofuse.hlo.parser import parse_module
from hlofuse.hlo.printer import print_computation
from hlofuse.hlo.shape import Shape
from hlofuse.hlo.traverse import (
    clone_computation,
    copy_instructions,
    has_effect,
    inline_computation,
    map_computations,
    rebuild,
    rebuild_module,
    structurally_equal,
)

F2 = Shape("f32", (2,))


def body_of(computation: Computation) -> list[str]:
    """The lines of a body, without shapes."""
    return [line.strip().replace("f32[2]{0} ", "") for line in print_computation(computation).splitlines()[1:-1]]


def simple() -> tuple[Computation, Instruction, Instruction, Instruction]:
    x, y = parameter(0, F2, "x"), parameter(1, F2, "y")
    left, right = make("negate", x, name="left"), make("exponential", y, name="right")
    return computation("f", [x, y], make("add", left, right, name="sum")), x, left, right


def test_a_replaced_instruction_reaches_its_users_and_the_rest_is_shared():
    f, x, left, right = simple()
    new = rebuild(f, {left: x})
    assert body_of(new)[2:] == ["right = exponential(y)", "ROOT sum = add(x, right)"]
    assert new.root.operands[1] is right and new.parameters == f.parameters
    assert f.root.operands[0] is left


def test_nothing_changed_is_the_same_object():
    f, x, left, _ = simple()
    assert rebuild(f, {}) is f
    assert rebuild(f, {left: left}) is f
    assert rebuild(f, {make("negate", x): x}) is f


def test_replacements_are_replaced_in_turn():
    f, x, left, right = simple()
    tanh = make("tanh", right)
    new = rebuild(f, {left: tanh, right: x})
    assert body_of(new)[2:] == ["tanh = tanh(x)", "ROOT sum = add(tanh, x)"]


def test_a_replacement_may_not_read_what_it_replaces():
    f, _, left, right = simple()
    with pytest.raises(ValueError, match="reads what it replaces"):
        rebuild(f, {left: make("tanh", left)})
    with pytest.raises(ValueError, match="reads what it replaces"):
        rebuild(f, {left: right, right: left})


def test_parameters_are_replaced_by_parameters_only():
    f, x, left, _ = simple()
    renamed = parameter(0, F2, "renamed")
    assert rebuild(f, {x: renamed}).parameters[0] is renamed
    assert rebuild(f, {x: f.parameters[1]}).parameters[0] is f.parameters[1]
    known = make("iota", shape=F2, iota_dimension=0)
    assert rebuild(f, {x: known}).parameters == f.parameters


def test_effects_and_control_edges_follow():
    x = parameter(0, F2, "x")
    old = make("negate", x)
    call = Instruction("custom-call", F2, (old,), {"custom_call_target": "f", "has_side_effect": True})
    root = Instruction("exponential", F2, (x,), control=(old,))
    assert has_effect(call) and not has_effect(old)
    new = rebuild(Computation("f", (x,), root, (call,)), {old: x})
    assert new.effects[0].operands == (x,) and new.root.control == (x,)


def test_clones_share_no_instruction():
    f, *_ = simple()
    copy = clone_computation(f, "g")
    assert copy.name == "g" and structurally_equal(copy, f)
    assert not set(copy.instructions) & set(f.instructions)


def test_inlining_puts_arguments_for_parameters():
    f, *_ = simple()
    a = parameter(0, F2, "a")
    twice = computation("g", [a], inline_computation(f, [a, a]))
    assert body_of(twice) == ["a = parameter(0)", "left = negate(a)", "right = exponential(a)",
                              "ROOT sum = add(left, right)"]
    assert set(copy_instructions(f, {})) == set(f.instructions)


def nested() -> Module:
    f, *_ = simple()
    x = parameter(0, F2, "x")
    g = computation("g", [x], make("call", x, x, shape=F2, to_apply=f))
    z = parameter(0, F2, "z")
    twice = [make("call", z, shape=F2, to_apply=g) for _ in range(2)]
    return Module("m", computation("main", [z], tuple_of(twice)))


def test_a_changed_computation_reaches_its_callers():
    module = nested()
    f, g, main = module.computations
    h = clone_computation(f, "h")
    new = rebuild_module(module, {f: h})
    assert [c.name for c in new.computations] == ["h", "g", "main"] and structurally_equal(new, module)
    assert rebuild_module(module, {}) is module


def test_a_replacement_may_call_what_is_replaced():
    module = nested()
    f, g, _ = module.computations
    p = parameter(0, F2, "p")
    wrapper = computation("wrapper", [p], make("call", p, p, shape=F2, to_apply=f))
    new = rebuild_module(module, {g: wrapper, f: clone_computation(f, "h")})
    assert [c.name for c in new.computations] == ["h", "wrapper", "main"]


def test_each_computation_is_changed_once_after_what_it_calls():
    module = nested()
    seen: list[str] = []

    def change(c: Computation) -> Computation:
        seen.append(c.name)
        return Computation(c.name + "_", c.parameters, c.root, c.effects)

    new = map_computations(module, change)
    assert seen == ["f", "g", "main"]
    assert [c.name for c in new.computations] == ["f_", "g_", "main_"]
    assert map_computations(module, lambda c: c) is module


@pytest.mark.parametrize("old, new", [
    ("add(left, right)", "subtract(left, right)"), ("add(left, right)", "add(right, left)"),
    ("constant(0)", "constant(-0.0)"), ("f32[2]", "f32[3]"), ("direction=LT", "direction=LE"),
    ("to_apply=max", "to_apply=other"), ("left = f32[2]{0} negate(x)", "left = f32[2]{0} abs(x)"),
])
def test_programs_that_differ_are_not_equal(old, new):
    text = """HloModule m

max {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT m = f32[] maximum(a, b)
}

other {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT m = f32[] minimum(a, b)
}

ENTRY main {
  x = f32[2]{0} parameter(0)
  left = f32[2]{0} negate(x)
  right = f32[2]{0} exponential(x)
  sum = f32[2]{0} add(left, right)
  zero = f32[] constant(0)
  total = f32[] reduce(sum, zero), dimensions={0}, to_apply=max
  less = pred[] compare(total, zero), direction=LT
  ROOT t = (f32[2]{0}, pred[]) tuple(sum, less)
}
"""
    module = parse_module(text)
    assert structurally_equal(module, parse_module(text.replace("left", "l")))
    assert not structurally_equal(module, parse_module(text.replace(old, new)))


def test_equality_ignores_defaults_and_facts_without_text():
    x = parameter(0, F2)
    y = constant(np.float32([1, 2]))
    dims = {"lhs_contracting_dims": (0,), "rhs_contracting_dims": (0,)}
    plain = computation("f", [x], make("dot", x, y, **dims))
    more = computation("f", [x], make("dot", x, y, lhs_batch_dims=(), rhs_batch_dims=(), plan=object(),
                                      operand_precision=("default", "default"), **dims))
    assert structurally_equal(plain, more)
    precise = computation("f", [x], make("dot", x, y, operand_precision=("highest", "highest"), **dims))
    assert not structurally_equal(plain, precise)


def test_edits_do_not_recurse():
    x = parameter(0, F2)
    value = first = make("negate", x)
    for _ in range(12_000):
        value = make("negate", value)
    deep = computation("deep", [x], value)
    new = rebuild(deep, {first: x})
    assert len(new.instructions) == len(deep.instructions) - 1
    assert structurally_equal(clone_computation(deep), deep)
