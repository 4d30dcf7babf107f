"""`hlofuse.jit` under every transformation of JAX: values and types of `jax.jit`, and kernels where they belong.

A case runs once with `hlofuse.jit` and once with `jax.jit` as its argument `J`. Its decorator says what became of the
functions in it: KERNELS, the reason why they were lowered plain, or nothing, where JAX differentiates or evaluates the
plain function and the primitive is never lowered.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental
import jax.experimental.jet
import jax.experimental.sparse
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import hlofuse
from hlofuse.runtime.primitive import recorded_outcomes

KERNELS = "kernels"
NOTHING_TO_GENERATE = "no kernels"  # the pipeline ran and left everything to libraries
CASES: list[Any] = []


@dataclass(frozen=True)
class Case:
    run: Any
    expected: frozenset[str]


def case(*expected: str):
    def add(run):
        CASES.append(pytest.param(Case(run, frozenset(expected)), id=run.__name__))
        return run

    return add


def f(a, b):
    return jnp.sin(a) * b + jnp.cos(a) * 2.0


def f_sum(a, b):
    return f(a, b).sum()


x = np.linspace(0, 1, 64, dtype=np.float32)
y = x + 1
xx, yy = x.reshape(8, 8), y.reshape(8, 8)


# ---------------------------------------------------------------- calls


@case(KERNELS)
def call(J):
    return J(f)(x, y)


@case(KERNELS)
def keyword_arguments(J):
    return J(f)(b=y, a=x)


@case(KERNELS)
def jax_arrays(J):
    return J(f)(jnp.asarray(x), jnp.asarray(y))


@case(KERNELS)
def scalars_and_weak_types(J):
    return J(lambda a: a * 2)(3), J(lambda a: a * 2)(3.0), J(lambda a: a + 1)(np.float32(2)), J(lambda a: a * 2)(True)


@case(KERNELS)
def weak_type_of_a_result_beside_a_strong_one(J):
    return J(lambda a, s: (a * s, s * 2, s + 1.0))(x, 2)


@case(KERNELS)
def static_arguments(J):
    g = J(lambda a, n, m: a * n if m == "a" else a, static_argnums=1, static_argnames="m")
    return g(x, 3, m="a")


@case(KERNELS)
def static_argument_with_a_dtype(J):
    # A NumPy scalar is hashable: it is static because it is said to be, though it looks like an array.
    return J(lambda a, n: a[: int(n)] * 2, static_argnums=1)(x, np.int32(5))


@case(KERNELS)
def static_arguments_only(J):
    return J(lambda n: jnp.arange(float(n)) * 2, static_argnums=0)(5)


@case(KERNELS)
def pytrees_and_none(J):
    return J(lambda d: {"a": d["a"] * 2, "n": None, "t": (d["b"][0] + 1,)})({"a": x, "b": [y, None], "e": {}})


@case(KERNELS)
def donated_by_number(J):
    return J(lambda a: a * 2 + 1, donate_argnums=0)(x + 0)


@case(KERNELS)
def donated_by_name(J):
    return J(lambda a: a * 2 + 1, donate_argnames="a")(a=x + 0)


@case(KERNELS)
def unused_argument(J):
    return J(lambda a, unused: a * 2)(x, y)


@case("no equations")
def arguments_passed_through(J):
    return J(lambda a, b: (b, a, a))(x, y)


@case("no equations")
def constant_results(J):
    return J(lambda a: (1.0, 2, np.float32(3)))(x)


@case(KERNELS)
def passed_through_beside_computed(J):
    return J(lambda a, b: (b, a + b, a, a + b, 1.0))(x, y)


@case(KERNELS)
def one_result_twice(J):
    def g(a):
        b = a * 2
        return b, b

    return J(g)(x)


@case(KERNELS)
def no_arguments(J):
    return J(lambda: jnp.arange(3.0) * 2)()


@case("no equations")
def no_results(J):
    assert J(lambda a: None)(x) is None


@case(NOTHING_TO_GENERATE)
def zero_size(J):
    return J(f)(x[:0], y[:0])


@case(KERNELS)
def method(J):
    class M:
        h = J(lambda self, a: a * 2, static_argnums=0)

    return M().h(x)


@case(KERNELS)
def partial_object(J):
    return J(functools.partial(f, b=y))(x)


@case(KERNELS)
def callable_object(J):
    class Scale:
        def __call__(self, a):
            return a * 3

    return J(Scale())(x)


@case(KERNELS)
def random_key(J):
    return J(lambda key, a: a * jax.random.normal(key, a.shape))(jax.random.key(0), x)


@case(KERNELS)
def random_key_as_result(J):
    return jax.random.key_data(J(lambda key: jax.random.split(key)[0])(jax.random.key(0)))


@case(KERNELS)
def integers_and_booleans(J):
    return J(lambda i, b: (i // 3, i % 3, ~b, b & (i > 4)))(np.arange(-8, 8), np.arange(16) % 2 == 0)


@case(KERNELS)
def complex_numbers(J):
    return J(lambda a: (a * 1j + 1, jnp.abs(a * 1j)))(x)


@case(KERNELS)
def half_precision(J):
    return J(lambda a: (a * 2 + 1, a.sum()))(jnp.asarray(x, jnp.bfloat16))


@case(KERNELS)
def x64(J):
    with jax.enable_x64(True):
        return J(lambda a: a * 2 + 1)(np.linspace(0, 1, 5)), J(f)(x, y)


@case(NOTHING_TO_GENERATE)
def matmul_precision(J):
    g = J(lambda a: a @ a)
    default = g(xx)
    with jax.default_matmul_precision("highest"):
        return default, g(xx)


@case(KERNELS)
def outer_jit(J):
    return jax.jit(lambda a, b: J(f)(a, b) + 1)(x, y)


@case(KERNELS)
def nested(J):
    return J(lambda a, b: J(f)(a, b) + J(f)(b, a))(x, y)


@case(KERNELS)
def of_a_jitted_function(J):
    return J(jax.jit(f))(x, y)


@case(KERNELS)
def named_scope_and_nested_jit(J):
    def g(a):
        with jax.named_scope("scope"):
            return jax.jit(lambda b: b * 2)(a) + jax.nn.relu(a)

    return J(g)(x)


# ---------------------------------------------------------------- closures


@case(KERNELS)
def closed_over_tracer(J):
    return jax.jit(lambda a, b: J(lambda c: c * b + 1)(a))(x, y)


@case()
def closed_over_tracer_under_grad(J):
    return jax.grad(lambda a: J(lambda c: c * a * 2)(y).sum())(x)


@case(KERNELS)
def closed_over_tracer_under_vmap(J):
    return jax.vmap(lambda a: J(lambda c: c * a * 2)(y))(x)


@case(KERNELS)
def closed_over_array(J):
    b = jnp.asarray(y)
    return J(lambda a: a * b)(x)


@case(KERNELS)
def closed_over_numpy_array(J):
    return J(lambda a: a * y)(x)


@case(KERNELS)
def closed_over_array_as_result(J):
    b = jnp.asarray(y)
    return J(lambda a: (a * 2, b))(x)


# ---------------------------------------------------------------- derivatives


@case()
def grad(J):
    return jax.grad(lambda a, b: J(f)(a, b).sum())(x, y)


@case()
def grad_of_scalar_function(J):
    return jax.grad(J(f_sum), argnums=(0, 1))(x, y)


@case()
def grad_under_jit(J):
    return jax.jit(jax.grad(J(f_sum)))(x, y)


@case(KERNELS)
def gradient_inside(J):
    return J(jax.grad(f_sum))(x, y)


@case(KERNELS)
def gradient_of_it_inside(J):
    return J(jax.grad(J(f_sum)))(x, y)


@case()
def value_and_grad_with_auxiliary(J):
    return jax.value_and_grad(J(lambda a, b: (f_sum(a, b), {"k": a * 2})), has_aux=True)(x, y)


@case()
def hessian(J):
    return jax.hessian(J(lambda a: f_sum(a, a)))(x[:5])


@case()
def jacfwd(J):
    return jax.jacfwd(J(lambda a: f(a, a)))(x[:5])


@case()
def jacrev(J):
    return jax.jacrev(J(lambda a: f(a, a)))(x[:5])


@case()
def jvp(J):
    return jax.jvp(J(f), (x, y), (y, x))


@case()
def jvp_with_unused_tangent(J):
    return jax.jvp(lambda a: J(f)(a, y), (x,), (x,))


@case()
def jvp_of_constant_result(J):
    return jax.jvp(lambda a: J(lambda a, b: (a * 2, b * 3))(a, y), (x,), (x,))


@case()
def jvp_with_integers(J):
    return jax.jvp(J(lambda a, i: (a * 2, i + 1)), (x, jnp.arange(3)), (x, np.zeros(3, jax.dtypes.float0)))


@case()
def vjp(J):
    return jax.vjp(J(f), x, y)[1](x)


@case()
def linearize(J):
    return jax.linearize(J(f), x, y)[1](y, x)


@case()
def linear_transpose(J):
    return jax.linear_transpose(J(lambda v: v * 3.0 + v), x)(y)


@case()
def linear_transpose_of_one_operand(J):
    return jax.linear_transpose(lambda v: J(lambda v, w: v * w)(v, y), x)(y)


@case()
def gradient_beside_integer_result(J):
    return jax.grad(lambda a: J(lambda b: (b * 2, (b > 0.5).astype(jnp.int32)))(a)[0].sum())(x)


@case()
def checkpoint(J):
    return jax.grad(lambda a: jax.checkpoint(J(f))(a, y).sum())(x)


@case()
def checkpoint_with_policy(J):
    policy = jax.checkpoint_policies.dots_saveable
    return jax.grad(lambda a: jax.checkpoint(J(f), policy=policy)(a, y).sum())(x)


@case()
def checkpoint_inside(J):
    return jax.grad(J(lambda a: jax.checkpoint(f)(a, y).sum()))(x)


@case(KERNELS)
def checkpoint_gradient_inside(J):
    return J(jax.grad(lambda a: jax.checkpoint(f)(a, y).sum()))(x)


@jax.custom_vjp
def hundredfold(a):
    return jnp.sin(a)


hundredfold.defvjp(lambda a: (jnp.sin(a), a), lambda residual, g: (g * 100.0,))


@jax.custom_jvp
def tenfold(a):
    return jnp.sin(a)


tenfold.defjvp(lambda primals, tangents: (jnp.sin(*primals), 10.0 * tangents[0]))


@case(KERNELS)
def custom_rules_not_differentiated(J):
    return J(lambda a: hundredfold(a) + tenfold(a))(x)


@case()
def custom_vjp_inside(J):
    return jax.grad(J(lambda a: (hundredfold(a) * 2).sum()))(x)


@case()
def custom_jvp_inside(J):
    return jax.grad(J(lambda a: (tenfold(a) * 2).sum()))(x), jax.jvp(J(tenfold), (x,), (y,))


@case()
def custom_vjp_inside_vmap(J):
    return jax.vmap(jax.grad(J(lambda a: (hundredfold(a) * 2).sum())))(xx)


@case(KERNELS)
def conjugate_gradient(J):
    return jax.scipy.sparse.linalg.cg(J(lambda v: v * 3.0), x)[0]


@case(KERNELS)
def gradient_of_conjugate_gradient(J):
    return jax.grad(lambda b: jax.scipy.sparse.linalg.cg(J(lambda v: v * 3.0), b)[0].sum())(jnp.asarray(x))


@case()
def jet(J):
    return jax.experimental.jet.jet(J(lambda a: jnp.exp(a) * a), (x,), ((y, x, x * x),))


# ---------------------------------------------------------------- batching


@case(KERNELS)
def vmap(J):
    return jax.vmap(J(f))(xx, yy)


@case(KERNELS)
def vmap_with_axes(J):
    return jax.vmap(J(f), in_axes=(1, None), out_axes=1)(xx, y[:8])


@case(KERNELS)
def vmap_with_unbatched_result(J):
    return jax.vmap(J(lambda a, b: (a * 2, b * 3)), in_axes=(0, None))(x, y)


@case(KERNELS)
def vmap_with_nothing_batched_inside(J):
    return jax.vmap(lambda a: a + J(f)(y, y).sum())(x)


@case(KERNELS)
def vmap_of_vmap(J):
    return jax.vmap(jax.vmap(J(f)), in_axes=(0, 1))(xx, yy)


@case(KERNELS)
def vmap_inside(J):
    return J(jax.vmap(f_sum))(xx, yy)


@case()
def vmap_of_grad(J):
    return jax.vmap(jax.grad(J(f_sum)))(xx, yy)


@case()
def grad_of_vmap(J):
    return jax.grad(lambda a, b: jax.vmap(J(f))(a, b).sum())(xx, yy)


@case(KERNELS)
def vmap_with_psum(J):
    return jax.vmap(J(lambda a: a * 2 / jax.lax.psum(a, "i")), axis_name="i")(x)


@case(KERNELS)
def vmap_with_axis_index(J):
    return jax.vmap(J(lambda a: a * jax.lax.axis_index("i")), axis_name="i")(x)


@case(KERNELS)
def sparsify(J):
    dense = np.diag(x[:8])
    sparse = jax.experimental.sparse.BCOO.fromdense(dense)
    return jax.experimental.sparse.sparsify(J(lambda m: (m * 2.0) @ y[:8]))(sparse) + J(lambda v: v * 2)(x[:8])


# ---------------------------------------------------------------- control flow


@case(KERNELS)
def scan(J):
    # Two steps: each one triples what sine and cosine round differently.
    return jax.lax.scan(lambda carry, _: (J(f)(carry, y), carry.sum()), x, None, 2)


@case(KERNELS)
def scan_inside(J):
    return J(lambda a: jax.lax.scan(lambda carry, b: (carry * b + 1, carry.sum()), a, y))(x)


@case(KERNELS)
def cond(J):
    return jax.lax.cond(True, J(f), lambda a, b: a, x, y)


@case(KERNELS)
def while_loop(J):
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, J(f)(c[1], y)), (0, x))


@case()
def grad_of_scan(J):
    return jax.grad(lambda a: jax.lax.scan(lambda carry, _: (J(f)(carry, y), None), a, None, 5)[0].sum())(x)


# ---------------------------------------------------------------- effects, and not running at all


@case("effects: DebugEffect")
def debug_callback(J):
    return J(lambda a: (jax.debug.callback(lambda v: None, a[0]), a * 2)[1])(x)


@case(KERNELS)
def pure_callback(J):
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return J(lambda a: jax.pure_callback(lambda v: np.asarray(v) * 2, result, a) + 1)(x)


@case("effects: OrderedIOEffect")
def ordered_io_callback(J):
    return J(lambda a: (jax.experimental.io_callback(lambda v: None, None, a, ordered=True), a * 3)[1])(x)


@case("effects: WriteEffect")
def reference(J):
    ref = jax.new_ref(jnp.asarray(x))
    J(lambda r: r.__setitem__(0, 5.0))(ref)
    return ref[...]


@case("effects: ReadEffect")
def closed_over_reference(J):
    ref = jax.new_ref(jnp.asarray(x))
    return J(lambda a: a + ref[...])(y)


@case()
def eval_shape(J):
    result = jax.eval_shape(J(f), x, y)
    return np.zeros(result.shape, result.dtype)


@case()
def make_jaxpr(J):
    assert jax.make_jaxpr(J(f))(x, y).out_avals[0].shape == x.shape


@case()
def disable_jit(J):
    with jax.disable_jit():
        return J(f)(x, y)


@case()
def disable_jit_under_grad(J):
    with jax.disable_jit():
        return jax.grad(lambda a: J(f)(a, y).sum())(x)


@case()
def disable_jit_under_vmap(J):
    with jax.disable_jit():
        return jax.vmap(J(f))(xx, yy)


# ---------------------------------------------------------------- sharding


@functools.cache
def mesh(*shape: int, kind: AxisType = AxisType.Auto):
    return jax.make_mesh(shape, ("d", "e")[: len(shape)], axis_types=(kind,) * len(shape))


def sharded(a):
    return jax.device_put(a, NamedSharding(mesh(8), P("d")))


BY_D = P("d")


def shard_map(g, check_vma, in_specs=BY_D):
    return jax.shard_map(g, mesh=mesh(8), in_specs=in_specs, out_specs=BY_D, check_vma=check_vma)


AUTOMATIC = "automatic sharding over 8 devices"


@case(AUTOMATIC)
def sharded_operands(J):
    return J(f)(sharded(x), sharded(y))


@case(AUTOMATIC)
def sharded_by_arguments_of_jit(J):
    sharding = NamedSharding(mesh(8), P("d"))
    return J(f, in_shardings=(sharding, sharding), out_shardings=sharding)(x, y)


@case(AUTOMATIC)
def sharding_constraint(J):
    sharding = NamedSharding(mesh(8), P("d"))
    return jax.jit(lambda a, b: jax.lax.with_sharding_constraint(J(f)(a, b), sharding))(sharded(x), sharded(y))


@case(AUTOMATIC)
def explicit_mesh(J):
    explicit = mesh(8, kind=AxisType.Explicit)
    with jax.set_mesh(explicit):
        sharding = NamedSharding(explicit, P("d"))
        return J(f)(jax.device_put(x, sharding), jax.device_put(y, sharding))


@case("partly manual mesh")
def partly_manual_mesh(J):
    return jax.jit(
        jax.shard_map(J(f), mesh=mesh(4, 2), in_specs=P("d"), out_specs=P("d"), axis_names={"d"})
    )(x, y)


def case_with_and_without_check_vma(*expected: str):
    def add(run):
        for check_vma in (True, False):
            bound = functools.partial(run, check_vma=check_vma)
            name = f"{run.__name__}-{'checked' if check_vma else 'unchecked'}"
            CASES.append(pytest.param(Case(bound, frozenset(expected)), id=name))
        return run

    return add


@case_with_and_without_check_vma(KERNELS)
def in_shard_map(J, check_vma):
    return shard_map(J(f), check_vma)(sharded(x), sharded(y))


@case_with_and_without_check_vma(KERNELS)
def in_jitted_shard_map(J, check_vma):
    return jax.jit(shard_map(J(f), check_vma))(sharded(x), sharded(y))


@case_with_and_without_check_vma(AUTOMATIC)
def of_shard_map(J, check_vma):
    return J(shard_map(f, check_vma))(sharded(x), sharded(y))


@case_with_and_without_check_vma(KERNELS, AUTOMATIC)
def of_shard_map_of_it(J, check_vma):
    return J(shard_map(J(f), check_vma))(sharded(x), sharded(y))


@case_with_and_without_check_vma(KERNELS)
def psum_in_shard_map(J, check_vma):
    def g(a, b):
        return f(a, b) / jax.lax.psum(a.sum(), "d")

    return jax.jit(shard_map(J(g), check_vma))(sharded(x), sharded(y))


@case_with_and_without_check_vma()
def grad_of_shard_map(J, check_vma):
    return jax.grad(lambda a: jax.jit(shard_map(J(f), check_vma))(a, sharded(y)).sum())(sharded(x))


@case_with_and_without_check_vma(KERNELS)
def vmap_of_shard_map(J, check_vma):
    return jax.vmap(jax.jit(shard_map(J(f), check_vma)))(np.stack([x, x]), np.stack([y, y]))


@case_with_and_without_check_vma(KERNELS)
def replicated_operand_in_shard_map(J, check_vma):
    return jax.jit(shard_map(J(lambda a, b: a * b + b), check_vma, in_specs=(P("d"), P())))(x, y[:8])


@case(KERNELS)
def pmap(J):
    return jax.pmap(J(f))(xx, yy)


@case(KERNELS)
def pmap_with_psum(J):
    return jax.pmap(J(lambda a: a / jax.lax.psum(a, "i")), axis_name="i")(xx)


@case(KERNELS)
def on_another_device(J):
    device = jax.devices()[3]
    return J(f)(jax.device_put(x, device), jax.device_put(y, device))


# ---------------------------------------------------------------- ahead of time


@case("export")
def export(J):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.export.export(J(f))(shape, shape).call(x, y)


@case("export")
def export_and_serialize(J):
    pytest.importorskip("flatbuffers", reason="JAX serializes with it")
    return jax.export.deserialize(jax.export.export(J(f))(x, y).serialize()).call(x, y)


@case("export")
def export_with_symbolic_shape(J):
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n"), x.dtype)
    return jax.export.export(J(lambda a: f(a, a)))(shape).call(x)


@case("export")
def export_for_several_platforms(J):
    return jax.export.export(J(f), platforms=("cpu", "cuda"))(x, y).call(x, y)


@case(KERNELS)
def lower_for_cuda(J):
    J(f).trace(x, y).lower(lowering_platforms=("cuda",))


@case("platform rocm")
def lower_for_rocm(J):
    J(f).trace(x, y).lower(lowering_platforms=("rocm",))


@case(KERNELS)
def lower_and_compile(J):
    return J(f).lower(x, y).compile()(x, y)


# ---------------------------------------------------------------- the test


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    """hlofuse.jit of one function compiles once per process; each case shall see it compile."""
    for function in (f, f_sum):
        vars(function).clear()


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_jax_jit(case, any_pipeline):
    with recorded_outcomes() as outcomes:
        actual = case.run(hlofuse.jit)
    assert_same(actual, case.run(jax.jit))

    assert {_what_happened(o) for o in outcomes} == case.expected


def _what_happened(outcome):
    return outcome.plain_reason or (KERNELS if outcome.executable.kernels else NOTHING_TO_GENERATE)


def assert_same(actual, expected) -> None:
    """The same tree of results: shapes, dtypes and weak types equal, values within a few rounding errors."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype, getattr(a, "weak_type", None)) == (e.shape, e.dtype, getattr(e, "weak_type", None))
        if a.dtype == jax.dtypes.float0:
            continue
        precision = float(jnp.finfo(a.dtype).eps) if jnp.issubdtype(a.dtype, jnp.inexact) else 0.0
        wide = np.complex128 if jnp.issubdtype(a.dtype, jnp.complexfloating) else np.float64
        np.testing.assert_allclose(np.asarray(a, wide), np.asarray(e, wide), rtol=16 * precision, atol=16 * precision)


@pytest.mark.parametrize("derivative", [jax.grad, jax.hessian, jax.value_and_grad])
def test_a_compiled_derivative_is_that_of_jax_jit(derivative, any_pipeline):
    """Differentiating through the primitive leaves no trace of it: XLA gets as many instructions."""

    def instructions(J):
        text = jax.jit(derivative(J(f_sum))).lower(x[:4], y[:4]).compile().as_text()
        return sum(" = " in line for line in text.splitlines())

    assert instructions(hlofuse.jit) == instructions(jax.jit)


def test_equal_results_and_arguments_do_not_reach_the_pipeline(set_pipeline):
    seen = []

    def pipeline(closed, options, platform):
        seen.append(closed)
        raise AssertionError("not needed to run")

    set_pipeline(pipeline)

    def g(a, b, unused):
        dead = jnp.sin(unused)
        del dead
        c = operator.add(a, b)
        return c, a, c

    with pytest.raises(AssertionError, match="not needed to run"):
        hlofuse.jit(g)(x, y, x)
    (closed,) = seen
    assert len(closed.jaxpr.invars) == 2
    assert len(closed.jaxpr.outvars) == 1
    assert [e.primitive.name for e in closed.jaxpr.eqns] == ["add"]
