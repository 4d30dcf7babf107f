"""The text of kernels: natural names, one comment for each operation, and statements where they belong."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from hlofuse.codegen.element_reads import splat_literal
from hlofuse.compiler import compile_function
from hlofuse.hlo.builder import make
from hlofuse.hlo.parser import parse_module
from hlofuse.hlo.shape import Shape


def host_text(function, *shapes) -> str:
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    return "\n".join(c.text_in("host").text for c in compile_function(function, *arguments, device="host").clusters)


def test_names_are_the_users():
    text = host_text(lambda x, b: x + b * x, (64,), (64,))
    assert "IN(float) x," in text and "IN(float) b," in text
    assert "x[i]" in text and "b[i]" in text


def test_a_name_that_the_prelude_needs_is_changed():
    """`tanh` is a function that a kernel may call after the variable is declared."""
    assert "const float tanh_ = tanh_of(" in host_text(lambda x: jnp.tanh(x) * 2, (64,))


def test_each_operation_is_named_once_with_its_line():
    def twice(x):
        y = jnp.exp(x)
        return y[1:] - y[:-1]  # exp is computed at two places

    text = host_text(twice, (65,))
    line = twice.__code__.co_firstlineno
    assert text.count("exp_of(") == 2
    assert text.count(f"// exponential  test_values.py:{line + 1}") == 1
    assert text.count(f"// subtract  test_values.py:{line + 2}") == 1


def test_files_are_named_without_their_folders():
    """The text goes into a content hash, and must not depend on where a checkout lies."""
    text = host_text(lambda x: jnp.sin(x).sum(0) + 1, (64, 8))
    assert "test_values.py" in text and "/test_values.py" not in text


def test_what_a_branch_protects_stays_inside():
    """A padded read is never made outside of its branch, where its index would be out of bounds."""
    text = host_text(lambda x, i: jnp.pad(x[i.astype(jnp.int32)], (1, 1)) + 1, (7,), (5,))
    branch = text[text.index("if (") :] if "if (" in text else text
    assert text.count("= x[") == branch.count("= x[")


def test_a_splat_is_one_literal():
    ones = make("constant", shape=Shape("f32", (2, 3)), literal=jnp.ones((2, 3)).__array__())
    mixed = make("constant", shape=Shape("f32", (3,)), literal=jnp.arange(3.0).__array__())
    assert splat_literal(ones) == 1 and splat_literal(mixed) is None
    zero = "c = f32[] constant(-0.0)\n ROOT b = f32[2] broadcast(c), dimensions={}"
    module = parse_module(f"HloModule m\nENTRY main {{\n {zero}\n}}")
    assert str(splat_literal(module.entry.root)) == "-0.0"


def test_short_reductions_are_written_out():
    text = host_text(lambda x: x.sum(1), (64, 3))
    assert text.count("reduce_add(") >= 3 and "for (int r" not in text
    assert "for (int r" in host_text(lambda x: lax.reduce(x, 0.0, lax.add, (1,)), (64, 20))
