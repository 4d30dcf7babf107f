"""The importer: jaxpr to HLO, judged by evaluating the module beside the function itself."""
from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalog import CATALOG
from import_cases import CASES, MATRIX, TABLE
from jax import lax

from hlofuse.frontend.control_rules import ScanFacts
from hlofuse.frontend.import_jaxpr import Imported, import_jaxpr
from hlofuse.frontend.jaxpr_compat import JaxprImportError
from hlofuse.hlo.module import Instruction
from hlofuse.hlo.to_jax import evaluate_computation
from hlofuse.hlo.verifier import verify_module

# Cases with equations that JAX is meant to run.
OPAQUE_CASES = {"random_rbg": "jax.rng_bit_generator"}


def imported(function, *arguments) -> Imported:
    module = import_jaxpr(jax.make_jaxpr(function)(*arguments))
    verify_module(module.module)
    return module


def instructions(result: Imported) -> list[Instruction]:
    return [i for computation in result.module.computations for i in computation.instructions]


def opcodes(result: Imported) -> list[str]:
    return [i.opcode for i in result.module.entry.instructions]


def opaque_targets(result: Imported) -> set[str]:
    return {i.attrs["custom_call_target"] for i in instructions(result) if i.opcode == "custom-call"}


def physical(x):
    """Random keys as their words, float0 as pred: what the importer makes of them."""
    if x.dtype == jax.dtypes.float0:
        return np.zeros(x.shape, bool)
    return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) else x


def assert_same_results(result: Imported, function, arguments) -> None:
    """The module and the function, evaluated in one program (which compiles once), agree in type and value."""

    def both(*xs):
        operands = [physical(jnp.asarray(x)) for x in jax.tree.leaves(xs)]
        return function(*xs), evaluate_computation(result.module.entry, [*operands, *result.consts])

    want, got = jax.jit(both, compiler_options={"xla_backend_optimization_level": 0})(*arguments)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(want)]
    assert len(got) == len(paths)
    for path, w, g in zip(paths, jax.tree.leaves(want), got, strict=True):
        assert_close(np.asarray(g), np.asarray(physical(w)), path)


def assert_close(got: np.ndarray, want: np.ndarray, path: str) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape), path
    if not np.issubdtype(want.dtype, np.inexact) and want.dtype != jnp.bfloat16:
        np.testing.assert_array_equal(got, want, err_msg=path)
        return
    eps = float(jnp.finfo(want.dtype).eps)
    wide = np.complex128 if np.iscomplexobj(want) else np.float64
    np.testing.assert_allclose(got.astype(wide), want.astype(wide), rtol=8 * eps, atol=eps, err_msg=path)


@pytest.mark.parametrize("name", CASES)
def test_rule(name):
    function, arguments = CASES[name]
    result = imported(function, *arguments)
    assert opaque_targets(result) <= {OPAQUE_CASES.get(name)}
    assert_same_results(result, function, arguments)


@pytest.mark.parametrize("name", CATALOG)
def test_workload_has_no_opaque_instruction(name):
    workload = CATALOG[name]
    arguments = workload.args("small")
    result = imported(workload.fn, *arguments)
    assert not opaque_targets(result)
    assert_same_results(result, workload.fn, arguments)


# --- accuracy -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float64])
@pytest.mark.parametrize("name", ["erfc", "erf_inv"])
def test_special_function_is_as_accurate_as_jax(name, dtype):
    special = pytest.importorskip("scipy.special")
    x = np.linspace(-5, 9, 2001) if name == "erfc" else np.concatenate(
        [np.linspace(-0.999, 0.999, 1001), 1 - 2.0 ** -np.linspace(1, 23, 400)])
    with jax.enable_x64(dtype == np.float64):
        x = x.astype(dtype)
        function = getattr(lax, name)
        exact = {"erfc": special.erfc, "erf_inv": special.erfinv}[name](x.astype(np.float64))
        inside = np.isfinite(exact)
        spacing = np.abs(exact[inside]) * float(jnp.finfo(dtype).eps)
        (ours,) = evaluate_computation(imported(function, x).module.entry, [x])
        errors = [np.abs(np.asarray(y).astype(np.float64)[inside] - exact[inside]) / spacing
                  for y in (ours, jax.jit(function)(x))]
    assert errors[0].max() <= 2 * errors[1].max() + 1
    assert errors[0].mean() <= 2 * errors[1].mean() + 0.1


# --- signature ----------------------------------------------------------------------------------------------------

def test_captured_arrays_are_trailing_operands():
    weights = np.linspace(0, 1, 6, dtype=np.float32)
    function = jax.jit(lambda x: x * TABLE + jax.jit(lambda y: y * TABLE * weights)(x))
    result = imported(lambda x: function(x) + 2.0, MATRIX)
    assert [p.dims for p in result.module.entry.parameters] == [(4, 6), (6,), (6,)]
    assert [np.shape(c) for c in result.consts] == [(6,), (6,)]
    assert all(not i.dims for i in result.module.entry.instructions if i.opcode == "constant")


def test_captured_scalar_is_a_constant():
    scalar = jnp.float32(3)
    result = imported(lambda x: x * scalar, MATRIX)
    assert not result.consts
    assert any(i.opcode == "constant" and i.literal == 3 for i in result.module.entry.instructions)


def test_captured_key_is_its_words():
    key = jax.random.key(3)
    result = imported(lambda x: x + jax.random.uniform(key), MATRIX)
    np.testing.assert_array_equal(result.consts[0], jax.random.key_data(key))


def test_capture_reaches_a_loop_body_and_a_branch():
    def function(x):
        def body(carry, row):
            return lax.cond(row[0] > 0, jax.jit(lambda c: c + TABLE), lambda c: c, carry), None
        return lax.scan(body, x[0], x)[0]

    result = imported(function, MATRIX)
    assert_same_results(result, function, (MATRIX,))


def test_parameters_have_the_names_of_arguments():
    closed = jax.make_jaxpr(lambda params, x: params["w"] * x)({"w": MATRIX}, MATRIX)
    assert [p.name for p in import_jaxpr(closed).module.entry.parameters] == ["params_w", "x"]
    named = import_jaxpr(closed, "step", parameter_names=["a", "b[0]"])
    assert named.module.name == "step"
    assert [p.name for p in named.module.entry.parameters] == ["a", "b_0"]


@pytest.mark.parametrize("results", [0, 1, 2])
def test_root_is_a_tuple_unless_there_is_one_result(results):
    result = imported(lambda x: [x + n for n in range(results)], MATRIX)
    assert (result.module.entry.root.opcode == "tuple") == (results != 1)
    assert len(result.module.entry.outputs) == results


# --- metadata -----------------------------------------------------------------------------------------------------

def test_metadata_is_the_users_line_and_name_stack():
    @jax.jit
    def inner(x):
        with jax.named_scope("block"):
            return jnp.sin(x)

    result = imported(lambda x: inner(x) + 1, MATRIX)
    (sine,) = (i for i in result.module.entry.instructions if i.opcode == "sine")
    assert sine.metadata.op_type == "sin"
    assert sine.metadata.op_name == "jit(inner)/block/sin"
    assert sine.metadata.source_file == __file__
    assert sine.metadata.source_line == inner.__wrapped__.__code__.co_firstlineno + 3


# --- control ------------------------------------------------------------------------------------------------------

def test_scan_is_a_while_with_facts():
    result = imported(lambda x, w: lax.scan(lambda c, r: (c + w * r, (c, r * w)), x[0], x, reverse=True),
                      MATRIX, MATRIX[0])
    (loop,) = (i for i in result.module.entry.instructions if i.opcode == "while")
    assert loop.attrs["scan"] == ScanFacts(length=4, num_consts=1, num_carry=1, num_xs=1, num_ys=2, reverse=True)
    body = loop.attrs["body"]
    assert len(body.outputs) == 1 + 1 + 1 + 1 + 2
    assert body.outputs[1].opcode == "get-tuple-element" and body.outputs[1].attrs["index"] == 1


def test_scan_of_length_one_is_its_body():
    assert "while" not in opcodes(imported(lambda x: lax.scan(lambda c, r: (c + r, c), x[0], x[:1]), MATRIX))


def test_equal_loops_share_their_body():
    step = jax.jit(lambda x: lax.fori_loop(0, 9, lambda i, c: c * 2, x))
    result = imported(lambda x: step(step(x)), MATRIX)
    loops = [i for i in result.module.entry.instructions if i.opcode == "while"]
    assert len(loops) == 2 and loops[0].attrs["body"] is loops[1].attrs["body"]


def test_branches_on_a_bool_use_it_as_predicate():
    result = imported(lambda p, x: lax.cond(p, lambda y: y + 1, lambda y: y * 2, x), np.True_, MATRIX)
    (branch,) = (i for i in result.module.entry.instructions if i.opcode == "conditional")
    assert branch.operands[0].element_type == "pred"


def test_platform_dependent_is_settled_by_the_platform():
    closed = jax.make_jaxpr(lambda x: lax.platform_dependent(x, cuda=lambda y: y * 2, default=jnp.sin))(MATRIX)
    assert opaque_targets(import_jaxpr(closed)) == {"jax.platform_index", "jax.cond"}
    assert opcodes(import_jaxpr(closed, platform="cpu"))[-1] == "sine"
    assert opcodes(import_jaxpr(closed, platform="cuda"))[-1] == "multiply"


def test_differentiated_checkpoint_leaves_a_barrier():
    def loss(x):
        return jax.checkpoint(lambda y: jnp.sin(jnp.sin(y)).sum())(x)

    assert "opt-barrier" in opcodes(imported(jax.grad(loss), MATRIX))
    assert "opt-barrier" not in opcodes(imported(loss, MATRIX))
    relaxed = jax.grad(lambda x: jax.checkpoint(lambda y: jnp.sin(jnp.sin(y)).sum(), prevent_cse=False)(x))
    assert "opt-barrier" not in opcodes(imported(relaxed, MATRIX))


def test_nested_doubling_does_not_explode():
    function = jax.jit(lambda x: jnp.sin(x) + 1)
    for _ in range(16):
        function = jax.jit(lambda x, f=function: f(f(x)))
    result = imported(function, np.float32(0.5))
    assert len(instructions(result)) < 60_000
    assert any(i.opcode == "call" for i in instructions(result))


def test_call_beyond_the_budget_computes_the_same(monkeypatch):
    monkeypatch.setattr("hlofuse.frontend.scope.DUPLICATION_BUDGET", 0)
    monkeypatch.setattr("hlofuse.frontend.scope.ALWAYS_INLINED", 0)
    inner = jax.jit(lambda x: (x * TABLE, x.sum()))
    result = imported(lambda x: inner(inner(x)[0]), MATRIX)
    assert "call" in opcodes(result)
    assert_same_results(result, lambda x: inner(inner(x)[0]), (MATRIX,))


def test_mutable_arrays_become_pure():
    def function(x):
        cell = jax.new_ref(x)
        cell[0] = cell[1] * 2
        return cell[...]

    assert_same_results(imported(function, MATRIX), function, (MATRIX,))


def test_own_primitive_is_inlined():
    hlofuse = pytest.importorskip("hlofuse")
    fused = hlofuse.jit(lambda x: jnp.sin(x) * 2)
    assert "sine" in opcodes(imported(lambda x: fused(x) + 1, MATRIX))


# --- what has no rule ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, target, function", [
    ("library", "jax.qr", lambda x: jnp.linalg.qr(x)[1] * 2),
    ("callback", "jax.pure_callback", lambda x: jax.pure_callback(lambda v: v * 2, x, x) + 1),
    ("literal_operand", "jax.pure_callback", lambda x: jax.pure_callback(lambda a, b, c: a * b + c, x, x, 3.0, x)),
    ("top_k", "jax.top_k", lambda x: lax.top_k(x, 2)),
    ("in_loop", "jax.qr", lambda x: lax.fori_loop(0, 3, lambda i, c: c + jnp.linalg.qr(c)[0] @ c[:4], x[:, :4])),
    ("keys", "jax.rng_bit_generator", lambda x: x + jax.random.normal(jax.random.key(1, impl="rbg"), x.shape)),
])
def test_opaque_equation_runs_through_jax(name, target, function):
    result = imported(function, MATRIX)
    assert target in opaque_targets(result)
    assert_same_results(result, function, (MATRIX,))


def test_effects_are_kept_in_order():
    def function(x):
        jax.debug.callback(lambda v: None, x)
        jax.debug.callback(lambda v: None, x + 1)
        return x * 2

    entry = imported(function, MATRIX).module.entry
    first, second = entry.effects
    assert first.attrs["has_side_effect"] and second.control == (first,)
    assert set(entry.effects) <= set(entry.instructions)


def test_reference_argument_is_refused_by_name():
    cell = jax.new_ref(jnp.asarray(MATRIX))
    closed = jax.make_jaxpr(lambda x: cell[0] + x)(MATRIX[0])
    with pytest.raises(JaxprImportError, match="Ref"):
        import_jaxpr(closed)


# --- speed --------------------------------------------------------------------------------------------------------

def test_ten_thousand_equations_import_quickly():
    def function(x):
        for _ in range(3400):
            x = jnp.sin(x) * 1.5 + x
        return x

    closed = jax.make_jaxpr(function)(MATRIX)
    start = time.process_time()
    import_jaxpr(closed)
    assert time.process_time() - start < 2
