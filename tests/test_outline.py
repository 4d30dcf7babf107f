"""The fusion graph and its outline: what waits for what, and what goes along into a kernel."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hlofuse.fusion.graph import FusionGraph
from hlofuse.fusion.outline import Outlined, outline
from hlofuse.hlo.module import Instruction, Module
from hlofuse.hlo.parser import parse_module
from hlofuse.hlo.printer import print_module
from hlofuse.hlo.verifier import verify_module

LOOP = """HloModule m
condition { s = (s32[], f32[1]) parameter(0)
  n = s32[] get-tuple-element(s), index=0
  three = s32[] constant(3)
  ROOT c = pred[] compare(n, three), direction=LT
}
body { s = (s32[], f32[1]) parameter(0)
  n = s32[] get-tuple-element(s), index=0
  x = f32[1] get-tuple-element(s), index=1
  y = f32[1] tanh(x)
  one = s32[] constant(1)
  m = s32[] add(n, one)
  ROOT t = (s32[], f32[1]) tuple(m, y)
}
ENTRY main { x = f32[1] parameter(0)
  zero = s32[] constant(0)
  a = f32[1] multiply(x, x)
  t = (s32[], f32[1]) tuple(zero, a)
  w = (s32[], f32[1]) while(t), condition=condition, body=body
  e = f32[1] get-tuple-element(w), index=1
  b = f32[1] sine(x)
  ROOT c = f32[1] add(b, e)
}
"""


def graph_of(text: str) -> tuple[FusionGraph, dict[str, int]]:
    """The graph, and the vertex of each instruction by its name."""
    graph = FusionGraph(parse_module(text.replace("{ ", "{\n  ")).entry)
    return graph, {i.name: v for i, v in graph.vertex_of.items()}


def outlined(graph: FusionGraph, kernels: Sequence[tuple[set[int], set[int]]]) -> Outlined:
    return outline(graph, [(frozenset(members), frozenset(outputs)) for members, outputs in kernels])


def opcodes(fusion: Instruction | None) -> list[str]:
    assert fusion is not None
    return sorted(i.opcode for i in fusion.attrs["calls"].instructions)


def test_an_element_of_a_loops_result_waits_for_the_loop():
    """The get-tuple-element is free, what it is taken from is not: a kernel with `a` and `c` would wait for itself."""
    graph, v = graph_of(LOOP)
    assert v["w"] in graph.operands[v["c"]]
    assert v["c"] in graph.users[v["w"]]
    with pytest.raises(ValueError, match="wait for each other in a cycle"):
        outlined(graph, [({v["a"], v["b"], v["c"]}, {v["a"], v["c"]})])


def test_control_predecessors_are_waited_for():
    text = """HloModule m
ENTRY main { x = f32[4] parameter(0)
  a = f32[4] tanh(x)
  first = f32[4] custom-call(a), custom_call_target="first", custom_call_has_side_effect=true
  second = f32[4] custom-call(x), custom_call_target="second", control-predecessors={first}
  ROOT t = (f32[4], f32[4]) tuple(first, second)
}
"""
    graph, v = graph_of(text)
    assert v["first"] in graph.operands[v["second"]]


def test_free_instructions_are_copied_to_where_they_are_used():
    text = """HloModule m
ENTRY main { x = f32[4,3] parameter(0)
  b = f32[3] parameter(1)
  wide = f32[4,3] broadcast(b), dimensions={1}
  y = f32[4,3] add(x, wide)
  z = f32[4,3] multiply(x, wide)
  ROOT t = (f32[4,3], f32[4,3]) tuple(y, z)
}
"""
    graph, v = graph_of(text)
    assert "wide" not in v
    result = outlined(graph, [({v["y"]}, {v["y"]}), ({v["z"]}, {v["z"]})])
    assert [opcodes(f) for f in result.fusions] == [
        ["add", "broadcast", "parameter", "parameter"],
        ["broadcast", "multiply", "parameter", "parameter"],
    ]


@pytest.mark.parametrize("source", ["x = f32[6] parameter(0)", "x = f32[6] iota(), iota_dimension=0"])
def test_a_reshape_in_memory_is_a_view_and_no_kernel(source):
    graph, v = graph_of(f"HloModule m\nENTRY main {{ {source}\n  ROOT y = f32[2,3] reshape(x)\n}}\n")
    assert "y" not in v
    result = outlined(graph, [({k}, {k}) for k in v.values()])
    assert result.computation.root.opcode == "reshape"


def test_an_intermediate_that_is_a_result_too_is_written_once():
    text = """HloModule m
ENTRY main { x = f32[5] parameter(0)
  a = f32[5] tanh(x)
  b = f32[5] add(a, x)
  ROOT t = (f32[5], f32[5]) tuple(b, a)
}
"""
    graph, v = graph_of(text)
    result = outlined(graph, [({v["a"], v["b"]}, {v["a"], v["b"]})])
    assert opcodes(result.fusions[0]) == ["add", "parameter", "tanh", "tuple"]
    assert [o.opcode for o in result.computation.outputs] == ["get-tuple-element"] * 2
    assert [o.attrs["index"] for o in result.computation.outputs] == [1, 0]


def test_the_outlined_module_is_well_formed():
    graph, v = graph_of(LOOP)
    result = outlined(graph, [({v["a"]}, {v["a"]}), ({v["b"], v["c"]}, {v["c"]})])
    module = Module("m", result.computation)
    verify_module(module)
    assert print_module(module).count(" fusion(") == 2
