"""Every opcode means as jax.lax what it means to XLA.

Three sources of programs, each with an independent answer: the catalog (jax.jit's values), JAX functions (jax.jit's
values), and HLO text for what JAX never writes (XLA's values).
"""
from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from catalog import CATALOG
from catalog_hlo import assert_close, xla_program
from jax import lax
from xla_oracle import run_hlo

from hlofuse.errors import HlofuseError
from hlofuse.hlo import to_jax
from hlofuse.hlo.builder import computation, make, parameter, tuple_of
from hlofuse.hlo.module import Computation, Instruction, Module
from hlofuse.hlo.opcode import OPCODES, Kind
from hlofuse.hlo.parser import parse_module
from hlofuse.hlo.printer import print_module
from hlofuse.hlo.shape import FLOATS, Shape, TupleShape, dtype_of
from hlofuse.hlo.shape_rules import type_class
from hlofuse.hlo.sort_order import natural_keys, sort_keys
from hlofuse.hlo.to_jax import TO_JAX, evaluate_computation, evaluate_module
from hlofuse.hlo.verifier import verify_module


def evaluate(module: Module, arguments) -> list:
    """Under jit, as the runtime does it (but quick to compile)."""
    lowered = jax.jit(lambda *values: evaluate_module(module, values)).lower(*arguments)
    return lowered.compile(compiler_options={"xla_backend_optimization_level": 0})(*arguments)


@pytest.mark.parametrize("name", sorted(CATALOG))
def test_catalog_values(name):
    program = xla_program(name)
    assert_close(evaluate(parse_module(program.text), program.arguments), program.results)


@pytest.mark.parametrize("name", ["softmax", "attention_vjp", "dropout", "segment_mean", "cumulative_returns"])
def test_catalog_values_of_xlas_optimized_text(name):
    program = xla_program(name)
    assert_close(evaluate(parse_module(program.optimized), program.arguments), program.results)


def test_every_opcode_has_a_meaning_or_is_known_to_have_none():
    without = {name for name in OPCODES if name not in TO_JAX}
    assert not any(OPCODES[name].kind in (Kind.ELEMENTWISE, Kind.SHAPE, Kind.REDUCTION, Kind.TUPLE) for name in without)
    collectives = {name for name in without if OPCODES[name].effect or name.startswith(("all-", "collective-"))}
    assert without - collectives <= {
        "stochastic-convert", "ragged-dot", "scaled-dot", "scan", "batch-norm-training", "batch-norm-inference",
        "batch-norm-grad", "dynamic-reshape", "set-dimension-size", "partition-id", "replica-id"}


# --- JAX functions ----------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
F = RNG.standard_normal((6, 8)).astype(np.float32)
WITH_NANS = np.array([3, np.nan, -0.0, 0.0, -np.inf, 1, -np.nan, np.inf, 3, -2], np.float32)
I = RNG.integers(-5, 9, (6, 8)).astype(np.int32)  # noqa: E741  as F
POSITIVE = (F[:, :6] @ F[:, :6].T + 8 * np.eye(6)).astype(np.float32)
IMAGE = RNG.standard_normal((2, 8, 9, 4)).astype(np.float32)
KERNEL = RNG.standard_normal((3, 2, 4, 6)).astype(np.float32)
KEYS = np.array([[3, 1, 2, 1, 3, 2, 1, 1]] * 2, np.int32)


def conv(x, k, **options):
    return lax.conv_general_dilated(x, k, options.pop("strides", (1, 1)), options.pop("padding", "SAME"),
                                    dimension_numbers=options.pop("numbers", ("NHWC", "HWIO", "NHWC")), **options)


def max_pool(x):
    return lax.reduce_window(x, -np.inf, lax.max, (1, 3, 2, 1), (1, 2, 2, 1), "SAME")


FUNCTIONS = {
    "sort": (lambda x: jnp.sort(x), [WITH_NANS]),
    "sort descending": (lambda x: jnp.sort(x, descending=True), [WITH_NANS]),
    "argsort": (lambda x: jnp.argsort(x, axis=0), [F]),
    "sort of several by two keys": (lambda a, b, c: lax.sort((a, b, c), num_keys=2), [KEYS, I[:2], F[:2]]),
    "sort of complex": (lambda x: jnp.sort(x), [(F + 1j * F[::-1]).astype(np.complex64)]),
    "unstable sort": (lambda x: lax.sort(x, is_stable=False), [I]),
    "top_k": (lambda x: lax.top_k(x, 3), [F]),
    "approximate median": (lambda x: jnp.median(x, axis=1), [F]),
    "argmax": (lambda x: (jnp.argmax(x, 1), jnp.argmin(x)), [F]),
    "argmax with nan": (jnp.argmax, [WITH_NANS]),
    "cumulative": (lambda x: (jnp.cumsum(x, 1), jnp.cumprod(x, 0), lax.cummax(x), lax.cumlogsumexp(x, 1)), [F]),
    "reductions": (lambda x: (x.sum(0), x.prod(1), x.max(), x.min(0), (x > 0).any(1), (x > 0).all()), [F]),
    "integer reductions": (lambda x: (x.sum(), lax.reduce_and(x, (0,)), lax.reduce_or(x, (1,)),
                                      lax.reduce_xor(x, (0,))), [I]),
    "own reduction": (lambda x: lax.reduce(x, np.float32(1), lambda a, b: a + b + a * b, (1,)), [F / 8]),
    "gather rows": (lambda x, i: x[i], [F, np.int32([0, -1, 5, 9])]),
    "gather out of bounds": (lambda x, i: x.at[i, i].get(mode="fill", fill_value=7), [F, np.int32([0, 3, 99])]),
    "take along": (lambda x, i: jnp.take_along_axis(x, i, 1), [F, np.abs(I) % 8]),
    "scatter set": (lambda x, i: x.at[i].set(2.0), [F, np.int32([0, 3, 99])]),
    "scatter add": (lambda x, i: x.at[:, i].add(x[:, :3]), [F, np.int32([1, 1, -1])]),
    "scatter others": (lambda x, i: (x.at[i].mul(x[:3]), x.at[i].min(x[:3]), x.at[i].max(x[:3])),
                       [F, np.int32([2, 2, 4])]),
    "scatter apply": (lambda x, i: x.at[i].apply(jnp.sin), [F, np.int32([2, 0])]),
    "scatter of bool": (lambda x, i: x.at[i].max(True), [F > 0, np.int32([2, 0])]),
    "batched scatter": (jax.vmap(lambda x, i, v: x.at[i].add(v)), [F, np.abs(I[:, :2]) % 8, F[:, :2]]),
    "segment sum": (lambda x, i: jax.ops.segment_sum(x, i, 4), [F, np.int32([0, 1, 1, 3, 0, 2])]),
    "dynamic slices": (lambda x, i: lax.dynamic_update_slice(x, lax.dynamic_slice(x, (i, i), (2, 3)), (i - 3, 6)),
                       [F, np.int32(5)]),
    "dot": (lambda a, b: lax.dot_general(a, b, (((1,), (1,)), ((0,), (0,))), precision="highest"),
            [IMAGE.reshape(2, 8, 36), IMAGE.reshape(2, 8, 36)]),
    "dot of bfloat16 in float32": (lambda a: jnp.matmul(a, a.T, preferred_element_type=jnp.float32),
                                   [F.astype(ml_dtypes.bfloat16)]),
    "dot of int8": (lambda a: lax.dot_general(a, a, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32),
                    [I.astype(np.int8)]),
    "convolution": (conv, [IMAGE, KERNEL]),
    "strided, dilated convolution": (lambda x, k: conv(x, k, strides=(2, 1), padding=((1, 2), (0, -1)),
                                                       lhs_dilation=(1, 2), rhs_dilation=(2, 1)), [IMAGE, KERNEL]),
    "grouped convolution": (lambda x, k: conv(x, k, feature_group_count=2), [IMAGE, KERNEL[:, :, :2]]),
    "convolution's gradients": (jax.grad(lambda x, k: (conv(x, k, strides=(2, 2)) ** 2).sum(), (0, 1)),
                                [IMAGE, KERNEL]),
    "transposed convolution": (lambda x, k: lax.conv_transpose(x, k, (2, 2), "SAME"), [IMAGE, KERNEL]),
    "max pool": (max_pool, [IMAGE]),
    "max pool's gradient": (jax.grad(lambda x: (max_pool(x) ** 2).sum()), [IMAGE]),
    "mean pool": (lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 1, 1, 1), "VALID"), [IMAGE]),
    "fft": (lambda x: (jnp.fft.fft(x), jnp.fft.irfft(jnp.fft.rfft2(x)), jnp.fft.ifftn(x + 0j)), [F]),
    "while": (lambda x: lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * 1.5), (0, x)), [F]),
    "scan": (lambda x: lax.scan(lambda c, r: (c * 0.5 + r, c.sum()), x[0], x), [F]),
    "cond": (lambda p, x: lax.cond(p > 0, jnp.sin, jnp.cos, x), [np.int32(1), F]),
    "switch": (lambda i, x: lax.switch(i, [jnp.sin, jnp.cos, lambda v: v * 2], x), [np.int32(7), F]),
    "barrier": (lambda x: lax.optimization_barrier((x, x + 1)), [F]),
    "checkpoint": (jax.grad(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)).sum())), [F]),
    "bitcast": (lambda x: (lax.bitcast_convert_type(x, np.uint8), lax.bitcast_convert_type(
        lax.bitcast_convert_type(x, np.uint16), np.float32)), [F]),
    "threefry": (lambda k: jax.random.normal(jax.random.wrap_key_data(k), (5,)), [np.uint32([1, 2])]),
    "rng bits": (lambda k: lax.rng_bit_generator(k, (3, 4), np.uint32), [np.uint32([1, 2, 3, 4])]),
    "special functions": (lambda x: (lax.lgamma(x), lax.erf_inv(x), jnp.sinh(x), jnp.arctanh(x)), [abs(F) % 1]),
    "small types": (lambda x: (x.astype(jnp.float8_e4m3fn).astype(np.float32), x.astype(jnp.int4).astype(np.int8)),
                    [F]),
    "reduce precision": (lambda x: lax.reduce_precision(x, 5, 7), [F]),
    "complex": (lambda x: (abs(x), jnp.angle(x), jnp.conj(x) * x, jnp.exp(x), x.real), [F + 1j * F[::-1]]),
    "clip and nan_to_num": (lambda x: (jnp.clip(x, -1, 1), jnp.nan_to_num(x)), [WITH_NANS]),
    "empty": (lambda x: (x.sum(1), jnp.sort(x, 1), jnp.concatenate([x, x])), [np.zeros((3, 0), np.float32)]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_jax_functions(name):
    function, arguments = FUNCTIONS[name]
    lowered = jax.jit(function, keep_unused=True).lower(*arguments)
    module = verify_module(parse_module(lowered.as_text("hlo")))
    expected = jax.tree.leaves(lowered.compile()(*arguments))
    assert_close(evaluate(module, arguments), expected)


def test_64_bit_types_are_computed_as_such_without_x64_mode():
    with jax.enable_x64(True):
        lowered = jax.jit(lambda x: jnp.cumsum(x * 2**40)).lower(np.arange(4, dtype=np.int64))
    (result,) = evaluate_module(parse_module(lowered.as_text("hlo")), [np.arange(4, dtype=np.int64)])
    np.testing.assert_array_equal(result, np.int64([0, 1, 3, 6]) * 2**40, strict=True)


# --- each element-wise opcode, on the edges of each type, against XLA -------------------------------------------------

def _edges(element_type: str) -> np.ndarray:
    dtype = dtype_of(element_type)
    if element_type == "pred":
        return np.array([False, True])
    if type_class(element_type) == "i":
        low, high = jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
        return np.array([low, high, 0, 1, 2, 3, high - 1, low + 1, 7, high // 3], dtype)
    floats = [0.0, -0.0, 1, -1, 0.5, -0.5, 1.5, 2.5, -2.5, 3.7, np.inf, -np.inf, np.nan, 100, 1e-3, 9]
    if type_class(element_type) == "c":
        return np.array([complex(a, b) for a in floats[:9] for b in (0.25, -1.5)], dtype)
    return np.array(floats, dtype)


# XLA:CPU has no code of its own for some of these in all of the versions that are supported: JAX spells them out.
UNIMPLEMENTED = {"acos", "acosh", "asin", "asinh", "atanh", "cosh", "sinh"}


def _elementwise_results(name: str, x: Instruction, y: Instruction) -> list[Instruction]:
    """The opcode on x and y, once per variant."""
    row, element_type = OPCODES[name], x.element_type
    if row.takes and type_class(element_type) not in row.takes or name in UNIMPLEMENTED:
        return []
    if element_type[0] == "u" and name in ("abs", "sign"):
        return []  # nothing for XLA to do
    match name:
        case "compare":
            directions = ("EQ", "NE", "LT", "LE", "GT", "GE")[:2 if element_type == "c64" else 6]
            total = ("LT", "EQ") if element_type in FLOATS else ()
            return [make(name, x, y, direction=d, name=d) for d in directions] + [
                make(name, x, y, direction=d, type="TOTALORDER", name=f"total_{d}") for d in total]
        case "select":
            return [make(name, make("compare", x, y, direction="EQ"), x, y)]
        case "clamp":
            return [make(name, y, x, y)]
        case "reduce-precision":
            return [make(name, x, exponent_bits=4, mantissa_bits=3)]
        case "complex":
            return [make(name, x, y)] if element_type == "f32" else []
        case "convert" | "bitcast-convert" | "stochastic-convert":
            return []
    if row.unit == "special" and element_type != "f32":
        return []  # as f32's, and slow to compile
    return [make(name, *(x, y)[:row.arity])]


@pytest.mark.parametrize("element_type", ["pred", "s8", "u8", "s32", "s64", "bf16", "f32", "c64"])
def test_elementwise_opcodes_agree_with_xla(element_type):
    """All that take the type, on all pairs of its edge values, as one module."""
    values = _edges(element_type)
    pairs = np.array(list(itertools.product(values, values)), values.dtype)
    shape = Shape(element_type, (len(pairs),))
    x, y = parameter(0, shape, "x"), parameter(1, shape, "y")
    results = [r for name, row in OPCODES.items() if row.kind is Kind.ELEMENTWISE
               for r in _elementwise_results(name, x, y)]
    module = Module("elementwise", computation("main", [x, y], tuple_of(results)))
    arguments = [pairs[:, 0], pairs[:, 1]]
    with jax.enable_x64(element_type == "s64"):
        got = evaluate(module, arguments)
    for result, mine, xlas in zip(results, got, run_hlo(print_module(module), arguments), strict=True):
        assert_same(mine, xlas, result.name or result.opcode)


def assert_same(got, want, name: str) -> None:
    """Equal to 4 ulps (the same code is vectorized in other ways), signs of zeros included; NaNs are all the same."""
    got = np.asarray(got)
    assert got.dtype == want.dtype
    rtol = 0.0
    if jnp.issubdtype(want.dtype, jnp.inexact):
        rtol = 4 * float(jnp.finfo(want.dtype).eps)
        if want.dtype not in (np.float32, np.complex64):
            got, want = got.astype(np.float32), want.astype(np.float32)
    np.testing.assert_allclose(got, want, rtol=rtol, atol=0, err_msg=name, strict=True)
    if want.dtype.kind == "f":
        np.testing.assert_array_equal(np.signbit(got) & ~np.isnan(got), np.signbit(want) & ~np.isnan(want), name)


CONVERTIBLE = ["pred", "s8", "u8", "s32", "u32", "f16", "bf16", "f32", "f8e4m3fn", "f8e5m2"]


@pytest.mark.parametrize("source", CONVERTIBLE)
def test_conversions_agree_with_xla(source):
    values = _edges(source)
    x = parameter(0, Shape(source, values.shape), "x")
    results = [make("convert", x, shape=x.array.with_type(target), name=target) for target in CONVERTIBLE]
    module = Module("convert", computation("main", [x], tuple_of(results)))
    for target, got, want in zip(CONVERTIBLE, evaluate(module, [values]), run_hlo(print_module(module), [values]),
                                 strict=True):
        assert_same(got, want, f"{source} to {target}")


# --- what JAX never writes, against XLA -------------------------------------------------------------------------------

REGIONS = """
sum {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT r = f32[] add(a, b)
}

odd {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  h = f32[] constant(0.5)
  c = f32[] multiply(a, h)
  ROOT r = f32[] subtract(c, b)
}

greater {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT r = pred[] compare(a, b), direction=GT
}

total_greater {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT r = pred[] compare(a, b), direction=GT, type=TOTALORDER
}

by_size {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  c = f32[] abs(a)
  d = f32[] abs(b)
  ROOT r = pred[] compare(d, c), direction=GT
}

unusual {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  c = f32[] subtract(a, b)
  zero = f32[] constant(0)
  ROOT r = pred[] compare(c, zero), direction=LT
}

integer_first {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  i = s32[] parameter(2)
  j = s32[] parameter(3)
  eq = pred[] compare(i, j), direction=EQ
  less = pred[] compare(i, j), direction=GT
  then = pred[] compare(a, b), direction=LT, type=TOTALORDER
  ROOT r = pred[] select(eq, then, less)
}

twice {
  x = f32[4] parameter(0)
  ROOT y = f32[4] add(x, x)
}

same {
  ROOT x = f32[4] parameter(0)
}

small {
  x = f32[] parameter(0)
  limit = f32[] constant(100)
  ROOT r = pred[] compare(x, limit), direction=LT
}

double {
  x = f32[] parameter(0)
  ROOT y = f32[] add(x, x)
}
"""

A = RNG.standard_normal((4, 5)).astype(np.float32)
B = RNG.standard_normal((3, 5)).astype(np.float32)
V = np.float32([2, -1, 3, 0.5])
S32 = np.int32

TEXTS = {
    "gather clamps; index vectors first": ("""
  x = f32[4,5] parameter(0)
  i = s32[2,3] parameter(1)
  ROOT g = f32[3,2] gather(x, i), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0,1}, index_vector_dim=0,
    slice_sizes={1,2}""", [A, S32([[0, 9, -3], [4, -2, 1]])]),
    "gather by scalars": ("""
  x = f32[4,5] parameter(0)
  i = u8[3] parameter(1)
  ROOT g = f32[3,5] gather(x, i), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1,
    slice_sizes={1,5}""", [A, np.uint8([3, 200, 1])]),
    "batched gather with the batch behind the index vector": ("""
  x = f32[4,5] parameter(0)
  i = s32[1,4] parameter(1)
  ROOT g = f32[4] gather(x, i), offset_dims={}, collapsed_slice_dims={1}, start_index_map={1},
    operand_batching_dims={0}, start_indices_batching_dims={1}, index_vector_dim=0,
    slice_sizes={1,1}""", [A, S32([[0, 4, 7, -1]])]),
    "scatter drops; any computation": ("""
  x = f32[4,5] parameter(0)
  i = s32[3] parameter(1)
  u = f32[3,5] parameter(2)
  ROOT s = f32[4,5] scatter(x, i, u), update_window_dims={1}, inserted_window_dims={0},
    scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=odd""", [A, S32([2, 4, -1]), B]),
    "scatter of windows that hang over": ("""
  x = f32[4,5] parameter(0)
  i = s32[1,2] parameter(1)
  u = f32[2,2,2] parameter(2)
  ROOT s = f32[4,5] scatter(x, i, u), update_window_dims={1,2}, inserted_window_dims={},
    scatter_dims_to_operand_dims={0}, index_vector_dim=0, to_apply=sum""",
                                        [A, S32([[1, 3]]), V.repeat(2).reshape(2, 2, 2)]),
    "dynamic-slice clamps a negative start": ("""
  x = f32[4,5] parameter(0)
  i = s32[] parameter(1)
  ROOT d = f32[2,2] dynamic-slice(x, i, i), dynamic_slice_sizes={2,2}""", [A, S32(-1)]),
    "dynamic-update-slice clamps": ("""
  x = f32[4,5] parameter(0)
  u = f32[3,5] parameter(1)
  i = s32[] parameter(2)
  ROOT d = f32[4,5] dynamic-update-slice(x, u, i, i)""", [A, B, S32(-7)]),
    "reduce with any computation": ("""
  x = f32[4,5] parameter(0)
  i = f32[] constant(3)
  ROOT r = f32[4] reduce(x, i), dimensions={1}, to_apply=sum""", [A]),
    "a sum of negative zeros": ("""
  x = f32[4,5] parameter(0)
  i = f32[] constant(-0.0)
  ROOT r = f32[4] reduce(x, i), dimensions={1}, to_apply=sum""", [np.full((4, 5), -0.0, np.float32)]),
    "dilated reduce-window": ("""
  x = f32[4,5] parameter(0)
  i = f32[] constant(0)
  ROOT r = f32[4,4] reduce-window(x, i), window={size=2x2 stride=2x1 pad=1_0x0_1 lhs_dilate=2x1 rhs_dilate=1x2},
    to_apply=sum""", [A]),
    "select-and-scatter": ("""
  x = f32[4,5] parameter(0)
  s = f32[2,2] parameter(1)
  i = f32[] constant(1)
  ROOT r = f32[4,5] select-and-scatter(x, s, i), window={size=2x3 stride=2x2}, select=greater, scatter=sum""",
                           [A, A[:2, :2]]),
    "sort descending": ("""
  x = f32[10] parameter(0)
  ROOT s = f32[10] sort(x), dimensions={0}, is_stable=true, to_apply=total_greater""", [WITH_NANS]),
    "stable sort by size": ("""
  x = f32[4,5] parameter(0)
  ROOT s = f32[4,5] sort(x), dimensions={0}, is_stable=true, to_apply=by_size""", [np.round(A)]),
    "sort by a comparator of unknown form": ("""
  x = f32[4,5] parameter(0)
  ROOT s = f32[4,5] sort(x), dimensions={1}, is_stable=true, to_apply=unusual""", [np.round(A)]),
    "sort of two by the second, then the first": ("""
  x = f32[4,5] parameter(0)
  i = s32[4,5] parameter(1)
  ROOT s = (f32[4,5], s32[4,5]) sort(x, i), dimensions={1}, to_apply=integer_first""",
                                                  [A, np.round(A).astype(np.int32)]),
    "map": ("""
  x = f32[4,5] parameter(0)
  y = f32[4,5] parameter(1)
  ROOT m = f32[4,5] map(x, y), dimensions={0,1}, to_apply=odd""", [A, A + 1]),
    "an index out of range takes the last branch": ("""
  i = s32[] parameter(0)
  x = f32[4] parameter(1)
  ROOT c = f32[4] conditional(i, x, x), branch_computations={same, twice}""", [S32(-1), V]),
    "a predicate": ("""
  p = pred[] parameter(0)
  x = f32[4] parameter(1)
  y = f32[4] negate(x)
  ROOT c = f32[4] conditional(p, x, y), true_computation=twice, false_computation=same""", [np.True_, V]),
    "a loop over one array": ("""
  x = f32[] parameter(0)
  ROOT w = f32[] while(x), condition=small, body=double""", [np.float32(3)]),
    "a convolution with a reversed window": ("""
  x = f32[1,2,6] parameter(0)
  k = f32[2,3,3] parameter(1)
  ROOT c = f32[1,3,6] convolution(x, k), window={size=3 pad=1_1 rhs_reversal=1}, dim_labels=bf0_io0->bf0""",
                                             [A[:3, :4].reshape(1, 2, 6), np.float32(np.arange(18)).reshape(2, 3, 3)]),
    "cholesky of the upper triangle": ("""
  x = f32[6,6] parameter(0)
  l = f32[6,6] cholesky(x), lower=true
  u = f32[6,6] cholesky(x)
  t = f32[6,6] transpose(u), dimensions={1,0}
  i = s32[6,6] iota(), iota_dimension=0
  j = s32[6,6] iota(), iota_dimension=1
  keep = pred[6,6] compare(i, j), direction=GE
  zero = f32[] constant(0)
  zeros = f32[6,6] broadcast(zero), dimensions={}
  a = f32[6,6] select(keep, l, zeros)
  b = f32[6,6] select(keep, t, zeros)
  ROOT r = (f32[6,6], f32[6,6]) tuple(a, b)""", [POSITIVE]),
    "triangular-solve from the right": ("""
  a = f32[6,6] parameter(0)
  b = f32[3,6] parameter(1)
  ROOT r = f32[3,6] triangular-solve(a, b), left_side=false, lower=false, unit_diagonal=true, transpose_a=TRANSPOSE""",
                                        [POSITIVE / 50, F[:3, :6]]),
    "rank 0": ("""
  x = f32[] parameter(0)
  s = f32[] slice(x), slice={}
  t = f32[] transpose(s), dimensions={}
  r = f32[] reshape(t)
  b = f32[] broadcast(r), dimensions={}
  ROOT d = f32[] reduce(b, x), dimensions={}, to_apply=sum""", [np.float32(3)]),
    "negative padding": ("""
  x = f32[4,5] parameter(0)
  v = f32[] constant(9)
  ROOT p = f32[6,6] pad(x, v), padding=-1_0_1x2_-1""", [A]),
    "strided slice": ("""
  x = f32[4,5] parameter(0)
  ROOT s = f32[2,2] slice(x), slice={[0:4:2], [1:4:2]}""", [A]),
    "clamp by scalars": ("""
  x = f32[4,5] parameter(0)
  low = f32[] constant(-0.5)
  high = f32[] constant(0.25)
  ROOT c = f32[4,5] clamp(low, x, high)""", [A]),
    "select by a scalar": ("""
  p = pred[] parameter(0)
  x = f32[4] parameter(1)
  y = f32[4] negate(x)
  ROOT c = f32[4] select(p, x, y)""", [np.False_, V]),
    "barrier over a tuple": ("""
  x = f32[4] parameter(0)
  t = (f32[4], f32[4]) tuple(x, x)
  b = (f32[4], f32[4]) opt-barrier(t)
  ROOT g = f32[4] get-tuple-element(b), index=1""", [V]),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_that_jax_never_writes(name):
    body, arguments = TEXTS[name]
    text = f"HloModule m\n{REGIONS}\nENTRY main {{{body}\n}}\n"
    module = verify_module(parse_module(text))
    assert_close(evaluate(module, arguments), run_hlo(text, arguments), ulps=4)


def test_asynchronous_calls_are_calls():
    text = """HloModule m

twice {
  x = f32[4]{0} parameter(0)
  ROOT y = f32[4]{0} add(x, x)
}

ENTRY main {
  x = f32[4]{0} parameter(0)
  start = ((f32[4]{0}), f32[4]{0}, u32[]) async-start(x), calls=twice
  update = ((f32[4]{0}), f32[4]{0}, u32[]) async-update(start)
  ROOT done = f32[4]{0} async-done(update)
}
"""
    np.testing.assert_array_equal(evaluate(parse_module(text), [V]), [V + V])


# --- comparators ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("arguments, num_keys, natural", [
    ([F], 1, 1), ([I, F], 1, 1), ([F, I], 2, 2), ([I, I, F], 2, 2), ([F > 0], 1, 1), ([F + 0j], 1, None)])
def test_the_comparators_of_jax_are_understood(arguments, num_keys, natural):
    text = jax.jit(lambda *x: lax.sort(x, num_keys=num_keys)).lower(*arguments).as_text("hlo")
    module = parse_module(text)
    (comparator,) = (i.attrs["to_apply"] for c in module.computations for i in c.instructions if i.opcode == "sort")
    keys = sort_keys(comparator)
    assert keys is not None and natural_keys(comparator, keys) == natural


# --- refusals ---------------------------------------------------------------------------------------------------------

def test_what_has_no_meaning_says_so():
    x = parameter(0, Shape("f32", (2,)), "x")
    region = computation("sum", [a := parameter(0, Shape("f32")), b := parameter(1, Shape("f32"))], make("add", a, b))
    root = make("all-reduce", x, to_apply=region, name="total")
    with pytest.raises(HlofuseError, match="all-reduce has no meaning as jax.lax: <total"):
        evaluate_computation(computation("main", [x], root), [np.zeros(2, np.float32)])


def test_an_opaque_instruction_runs_its_equation(monkeypatch):
    x = parameter(0, Shape("f32", (2,)), "x")
    root = make("custom-call", x, shape=TupleShape((Shape("f32", (2,)),) * 2), custom_call_target="jax.odd", eqn="eqn")
    body = computation("main", [x], root)
    monkeypatch.setattr(to_jax, "_opaque_evaluator", None)
    with pytest.raises(HlofuseError, match="set_opaque_evaluator"):
        evaluate_computation(body, [V[:2]])
    to_jax.set_opaque_evaluator(lambda eqn, operands: [operands[0], operands[0] + 1] if eqn == "eqn" else [])
    np.testing.assert_array_equal(evaluate_computation(body, [V[:2]]), [V[:2], V[:2] + 1])
    text = print_module(Module("m", body))
    with pytest.raises(HlofuseError, match="text cannot hold its equation"):
        evaluate_module(parse_module(text), [V[:2]])


def test_a_result_of_another_type_is_an_error():
    x = parameter(0, Shape("f32", (2,)), "x")
    body = Computation("main", (x,), make("negate", x))
    with pytest.raises(HlofuseError, match=r"gave int32\[2\], not f32\[2\]"):
        evaluate_computation(body, [np.int32([1, 2])])
    with pytest.raises(HlofuseError, match="takes 1 argument"):
        evaluate_computation(body, [])
