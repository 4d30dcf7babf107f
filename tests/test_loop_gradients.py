"""Gradients through loops: the transposed loop reads in the same kernel what the first one left, and no more of it than
it cannot compute again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from loop_check import assert_all_same, assert_same, launches
from loop_programs import LOOPS, lorenz, pendulum_loss, runge_kutta
from random_loops import random_gradient
from simt_check import check_cases, compile_case

import hlofuse
from hlofuse.codegen.dialect import CUDA
from hlofuse.compiler import Compilation, compile_function
from hlofuse.explore import accuracy, float64_reference
from hlofuse.fusion.minimum_cut import NEVER, cheapest_stores
from hlofuse.runtime.kernel_cache import KernelCache
from hlofuse.runtime.nvrtc import CudaBinary, CudaSource, compile_many, nvrtc_available

N = 137     # lanes: no multiple of a tile
STEPS = 20
R = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return R.standard_normal(shape).astype(np.float32)


X, Y, XS, STATE = normal(N), normal(N), normal(STEPS, N), normal(N, 3)


def steps_of(step: Callable, x: Any, length: int = STEPS, **options: Any) -> Any:
    return lax.scan(lambda s, _: (step(s), None), x, None, length=length, **options)[0]


@dataclass(frozen=True)
class Gradient:
    fn: Callable
    args: tuple
    launches: int
    tolerance: float


CASES: dict[str, Gradient] = {}


def case(*args: Any, launches: int = 1, tolerance: float = 2e-5):
    def add(fn):
        CASES[fn.__name__] = Gradient(fn, args, launches, tolerance)
        return fn

    return add


@case(X)
def by_the_state(x):
    return jax.grad(lambda x: steps_of(lambda s: jnp.sin(s) * 1.1, x).sum())(x)


@case(X, np.float32(1.3), launches=2)
def with_its_value_and_by_a_shared_scalar(x, k):
    return jax.value_and_grad(lambda x, k: (steps_of(lambda s: s + 0.1 * jnp.sin(k * s), x) ** 2).sum(), (0, 1))(x, k)


@case(X, np.float32(0.3), np.float32(0.9), np.float32(-0.2), launches=2)
def by_several_shared_scalars(x, a, b, c):
    def loss(p):
        return steps_of(lambda s: jnp.tanh(s * p["a"] + p["c"]) * p["b"], x).sum()

    return jax.grad(loss)({"a": a, "b": b, "c": c})


@case(X, normal(4), XS, launches=3)
def by_the_elements_of_a_shared_vector(x, p, xs):
    def loss(p):
        def step(h, v):
            return p[2] * h + p[3] * jnp.tanh(p[0] * h - p[1] * v), None

        return (lax.scan(step, x, xs)[0] ** 2).mean()

    return jax.grad(loss)(p)


@case(X, XS)
def by_what_the_steps_read(x, xs):
    def loss(x, xs):
        h, ys = lax.scan(lambda h, v: (h := jnp.tanh(h * 0.9 + v), h * h), x, xs)
        return ys.sum() + h.sum()

    return jax.grad(loss, (0, 1))(x, xs)


@case(X, XS)
def with_cotangents_of_the_outputs(x, ct):
    (h, ys), vjp = jax.vjp(lambda x: lax.scan(lambda h, _: (jnp.sin(h), h * h), x, None, length=STEPS), x)
    return vjp((h, ct))


@case(X, XS)
def an_output_that_is_read_by_the_transposed_loop(x, ct):
    ys, vjp = jax.vjp(lambda x: lax.scan(lambda h, _: (jnp.exp(-h), h), x, None, length=STEPS)[1], x)
    return ys, vjp(ct)


@case(X, XS)
def in_reverse(x, xs):
    return jax.grad(lambda x: lax.scan(lambda h, v: (jnp.sin(h) * v, h), x, xs, reverse=True)[1].sum())(x)


@case(X)
def unrolled_by_two(x):
    return jax.grad(lambda x: steps_of(lambda s: jnp.sin(s) * 1.1, x, unroll=2).sum())(x)


@case(X)
def a_loop_whose_steps_are_counted(x):
    return jax.grad(lambda x: lax.fori_loop(2, 17, lambda i, x: jnp.sin(x) * 0.9 + i * x * 0.01, x).sum())(x)


@case(X)
def through_a_checkpoint(x):
    return jax.grad(lambda x: steps_of(jax.checkpoint(lambda s: jnp.sin(jnp.cos(s)) * 1.1), x).sum())(x)


@jax.custom_vjp
def clipped(x):
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g * jnp.cos(x), -1, 1),))


@case(X)
def with_a_rule_of_the_users_own(x):
    return jax.grad(lambda x: steps_of(lambda s: clipped(s) * 1.5, x).sum())(x)


@case(STATE, tolerance=1e-3)
def a_vector_of_state_in_each_lane(s):
    return jax.grad(lambda s: (steps_of(lambda s: runge_kutta(lorenz, s, 0.005), s) ** 2).sum())(s)


@case(STATE, tolerance=1e-3)
def vmap_of_a_gradient(s):
    return jax.vmap(jax.grad(lambda s: (steps_of(lambda s: runge_kutta(lorenz, s, 0.005), s) ** 2).sum()))(s)


@case(X, Y)
def gradient_of_a_vmap(x, y):
    one = lambda x, y: steps_of(lambda s: jnp.where(s > y, jnp.sin(s), s * 0.9), x)  # noqa: E731
    return jax.grad(lambda x: jax.vmap(one)(x, y).sum())(x)


@case(X, Y)
def a_hessian_vector_product(x, v):
    gradient = jax.grad(lambda x: (steps_of(lambda s: jnp.sin(s) * 1.1, x) ** 2).sum())
    return jax.jvp(gradient, (x,), (v,))


@case(X)
def the_choice_of_a_select(x):
    return jax.grad(lambda x: steps_of(lambda s: jnp.where(s > 0.1, s * 0.9 - 0.3, s * s + 0.2), x).sum())(x)


@case(X, XS)
def through_loops_in_loops(x, xs):
    def step(h, v):
        return lax.fori_loop(0, 4, lambda _, y: y - (y**3 + y - v * h) / (3 * y * y + 1), h), None

    return jax.grad(lambda x, xs: lax.scan(step, x, xs)[0].sum(), (0, 1))(x, xs)


@case(X)
def through_outputs_of_a_loop_in_a_loop(x):
    def step(h, _):
        h, ys = lax.scan(lambda y, _: (jnp.sin(y), y * y), h, None, length=3)
        return h, (ys, ys.sum(0))

    return jax.grad(lambda x: sum(y.sum() for y in jax.tree.leaves(lax.scan(step, x, None, length=7))))(x)


@case(X, R.integers(-3, 4, N).astype(np.int32))
def integers_in_the_state(x, n):
    def step(s):
        x, n = s
        return jnp.where(n % 2 == 0, jnp.sin(x), x * 0.5), n * 3 + 1

    return jax.grad(lambda x: steps_of(step, (x, n))[0].sum())(x)


@case(X[:1])
def one_lane(x):
    return jax.grad(lambda x: steps_of(lambda s: jnp.sin(s) * 1.1, x).sum())(x)


@case(np.float32(0.4))
def no_lanes(x):
    return jax.grad(lambda x: steps_of(lambda s: jnp.sin(s) * 1.1, x))(x)


@case(X.astype(jnp.bfloat16), X.astype(np.float16))
def sixteen_bit_floats(a, b):
    loss = lambda x: steps_of(lambda s: jnp.sin(s) * 1.1, x).sum()  # noqa: E731
    return jax.grad(lambda a: loss(a).astype(jnp.float32))(a)


@case((X + 1j * Y).astype(np.complex64))
def complex_numbers(z):
    return jax.grad(lambda z: jnp.abs(steps_of(lambda s: s * s * 0.3 + 0.2j, z)).sum())(z)


def test_values_are_those_of_jax():
    assert_all_same({name: (c.fn, c.args, c.tolerance) for name, c in CASES.items()})


@pytest.mark.parametrize("name", CASES)
def test_few_launches(name):
    c = CASES[name]
    assert launches(c.fn, *c.args) == c.launches, compile_function(c.fn, *c.args, device="h200").explain()


@pytest.mark.parametrize("length", [0, 1, 2])
def test_short_loops(length):
    def gradient(x, xs):
        return jax.grad(lambda x, xs: lax.scan(lambda h, v: (jnp.sin(h) + v, h * v), x, xs)[1].sum(), (0, 1))(x, xs)

    assert_same(gradient, X, XS[:length], tolerance=2e-5)


def test_arrays_without_elements():
    assert_same(CASES["by_the_state"].fn, X[:0])
    assert_same(CASES["by_what_the_steps_read"].fn, X[:0], XS[:, :0])


@pytest.mark.parametrize("lanes", [1, 15, 16, 17, 63, 64, 65, 300])
def test_any_number_of_lanes(lanes):
    assert_same(CASES["with_cotangents_of_the_outputs"].fn, normal(lanes), normal(STEPS, lanes), tolerance=2e-5)


def test_double_precision():
    with jax.enable_x64(True):
        assert_same(CASES["by_the_state"].fn, X.astype(np.float64), tolerance=1e-13)
        assert_same(CASES["a_loop_whose_steps_are_counted"].fn, X.astype(np.float64), tolerance=1e-13)


def test_random_bodies():
    programs = {seed: random_gradient(np.random.default_rng(seed)) for seed in range(5)}
    arguments = {seed: args for seed, (_, args) in programs.items()}

    def everything(arguments):
        return [fn(*arguments[seed]) for seed, (fn, _) in programs.items()]

    for (fn, args), ours, theirs in zip(programs.values(), hlofuse.jit(everything)(arguments),
                                        jax.jit(everything)(arguments), strict=True):  # fmt: skip
        reference = float64_reference.evaluate(jax.make_jaxpr(fn)(*args), *jax.tree.leaves(args))
        verdict = accuracy.judge(*([np.asarray(x) for x in jax.tree.leaves(r)] for r in (ours, theirs)), reference)
        assert verdict.ok, verdict.reason
        assert launches(fn, *args) <= 4


# --- bytes ------------------------------------------------------------------------------------------------------------


def arguments_and_results(fn: Callable, *args: Any) -> int:
    arrays = [*jax.tree.leaves(args), *jax.tree.leaves(jax.eval_shape(fn, *args))]
    return sum(a.size * a.dtype.itemsize for a in arrays)


@pytest.mark.parametrize("name", ["gradient_by_state", "gradient_through_checkpoints"])
def test_on_a_cpu_residuals_are_never_in_memory(name):
    args = LOOPS[name].arguments(np.random.default_rng(1), 4096)
    count = compile_function(LOOPS[name].fn, *args, device="host").launches()
    assert (count.total, count.bytes) == (1, arguments_and_results(LOOPS[name].fn, *args))


def test_on_a_gpu_residuals_are_a_scratch_array_that_is_counted():
    lanes = 1 << 20
    compilation = compile_function(LOOPS["gradient_by_state"].fn, jax.ShapeDtypeStruct((lanes,), np.float32),
                                   jax.ShapeDtypeStruct((), np.float32), device="h200")  # fmt: skip
    (kernel,) = compilation.clusters
    assert [s.byte_size for s in kernel.text.scratch] == [200 * lanes * 4]
    assert compilation.launches().bytes == 2 * 200 * lanes * 4 + 2 * lanes * 4 + 4


def test_what_does_not_fit_beside_a_thread_is_left_in_memory():
    def long(x):
        return jax.grad(lambda x: steps_of(lambda s: jnp.sin(s) * 1.01, x, 20_000).sum())(x)

    compilation = compile_function(long, X, device="host")
    assert compilation.launches().total == 2
    assert "1280000 bytes in 16 lanes, the limit is 524288" in compilation.explain()
    assert_same(long, X[:5], tolerance=1e-3)


# --- what is computed again -------------------------------------------------------------------------------------------


def notes(fn: Callable, *args: Any, device: str = "h200") -> list[str]:
    compilation = compile_function(fn, *args, device=device)
    found = [line for line in compilation.explain().splitlines() if line.startswith("residual ")]
    assert found == list(compilation.fusion.residual_notes)
    return found


def scratch(compilation: Compilation) -> int:
    return sum(len(k.text_in("cuda").scratch) for k in compilation.clusters)


def test_one_minus_tanh_is_recomputed_from_tanh():
    args = CASES["by_what_the_steps_read"].args
    assert notes(CASES["by_what_the_steps_read"].fn, *args) == ["residual subtract is recomputed from tanh"]
    assert scratch(compile_function(CASES["by_what_the_steps_read"].fn, *args, device="h200")) == 1


def test_sine_and_cosine_are_recomputed_where_functions_are_cheaper_than_bytes():
    def both(x, k):
        return jax.grad(pendulum_loss, (0, 1))(x, k)

    found = notes(both, X, np.float32(1.3))
    assert sorted(found) == ["residual cosine is recomputed from x", "residual sine is recomputed from x"]
    assert not notes(both, X, np.float32(1.3), device="host")


def test_a_count_of_steps_is_never_stored():
    def scaled(x):
        return jax.grad(lambda x: lax.fori_loop(3, 40, lambda i, x: x * (1 - 0.01 * i), x).sum())(x)

    found = notes(scaled, X)
    assert len(found) == 1 and "from what the steps read anyway" in found[0], found
    assert scratch(compile_function(scaled, X, device="h200")) == 0
    assert_same(scaled, X)


def test_recomputed_residuals_are_equal_bit_by_bit():
    def gradient(x):
        return jax.grad(lambda x: steps_of(lambda s: jnp.tanh(s) * jnp.exp(-s * s), x).sum())(x)

    compilation = compile_function(gradient, X, device="host")
    assert compilation.fusion.residual_notes
    one_lane_at_a_time = np.concatenate([hlofuse.jit(gradient)(X[k:k + 16]) for k in range(0, N, 16)])
    np.testing.assert_array_equal(hlofuse.jit(gradient)(X), one_lane_at_a_time)


def test_the_minimum_cut_is_the_cheapest_of_all():
    r = np.random.default_rng(3)
    for _ in range(60):
        n = int(r.integers(2, 8))
        operands = [[int(u) for u in range(v) if r.random() < 0.5] for v in range(n)]
        store = [int(x) for x in r.integers(1, 20, n)]
        compute = [NEVER if not operands[v] or r.random() < 0.2 else int(r.integers(0, 12)) for v in range(n)]
        needed = sorted({n - 1, int(r.integers(n))})

        def price(stored, operands=operands, store=store, compute=compute, needed=needed):
            total, stack, seen = sum(store[v] for v in stored), [*needed], set()
            while stack:
                v = stack.pop()
                if v in stored or v in seen:
                    continue
                seen.add(v)
                total += compute[v]
                stack.extend(operands[v])
            return total

        best = min(price({v for v in range(n) if chosen[v]}) for chosen in product((False, True), repeat=n))
        assert price(cheapest_stores(operands, store, compute, needed)) == best


# --- CUDA -------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(nvrtc_available() is not None, reason=str(nvrtc_available()))
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_cuda_text_compiles_without_spills(arch):
    names = CASES if arch == "sm_90" else ("a_vector_of_state_in_each_lane", "a_hessian_vector_product")
    compiled = [compile_function(CASES[n].fn, *CASES[n].args, device="h200") for n in names]
    texts = {k.text.symbol: k.text for c in compiled for k in c.clusters if k.form == "time loop"}
    built = compile_many([CudaSource(t.symbol, t.text) for t in texts.values()], arch, KernelCache(),
                         prelude=CUDA.prelude)  # fmt: skip
    for symbol, text in texts.items():
        binary = built[symbol]
        assert isinstance(binary, CudaBinary), f"{binary}\n{text.text}"
        assert not binary.kernels[symbol].spill_stores and not binary.kernels[symbol].spill_loads, text.text


def test_the_cuda_text_runs_thread_by_thread():
    names = ("by_what_the_steps_read", "a_vector_of_state_in_each_lane", "a_hessian_vector_product",
             "an_output_that_is_read_by_the_transposed_loop", "a_loop_whose_steps_are_counted",
             "through_outputs_of_a_loop_in_a_loop")  # fmt: skip
    tally = check_cases([compile_case(n, CASES[n].fn, jax.device_put(CASES[n].args)) for n in names], range(5))
    assert not tally.faults, "\n".join(tally.faults)
