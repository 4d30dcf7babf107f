"""Functions that between them use every import rule, with inputs at the edges: zero sizes, scalars, NaN, out of bounds.

`CASES` maps a name to (function, arguments). Nothing here depends on hlofuse.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
from jax import lax

Case = tuple[Callable[..., Any], tuple[Any, ...]]
CASES: dict[str, Case] = {}

INF, NAN = np.inf, np.nan
EDGES = np.array([0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 1.5, -2.5, 3.75, -9.0, 30.0, INF, -INF, NAN], np.float32)
UNIT = np.array([0.0, -0.0, 0.25, -0.5, 0.75, -0.99, 1.0, -1.0, NAN], np.float32)
COMPLEX = np.array([0.5 + 1j, -1.5 - 0.25j, 2j, 3.0, -0.1 + 0.2j], np.complex64)
INTS = np.array([0, 1, -1, 7, -8, 100, 2**31 - 1, -(2**31)], np.int32)
BYTES = np.array([0, 1, 2, 127, 128, 255], np.uint8)
BOOLS = np.array([True, False, True])
MATRIX = np.arange(24, dtype=np.float32).reshape(4, 6) - 11
IDS = np.array([[0, 3], [5, -7], [9, 2]], np.int32)


def case(name: str, function: Callable[..., Any], *arguments: Any) -> None:
    assert name not in CASES, name
    CASES[name] = function, arguments


def each(name: str, functions: dict[str, Callable[..., Any]], *arguments: Any) -> None:
    """One case with all the functions' results by name: one program compiles faster than many."""
    case(name, lambda *xs: {key: function(*xs) for key, function in functions.items()}, *arguments)


def named(module: Any, names: str) -> dict[str, Callable[..., Any]]:
    """Those of the functions that this version of JAX has."""
    return {name: getattr(module, name) for name in names.split() if hasattr(module, name)}


# --- element-wise -------------------------------------------------------------------------------------------------

REAL = "abs neg sign floor ceil is_finite exp exp2 expm1 log log1p log2 logistic sqrt rsqrt cbrt sin cos tan tanh " \
       "sinh cosh atan asinh erf erfc square one_minus_square stop_gradient round"
for dtype in (np.float32, jnp.bfloat16, np.float16):
    each(np.dtype(dtype).name, named(lax, REAL), EDGES.astype(dtype))
    each(f"{np.dtype(dtype).name}_unit", named(lax, "asin acos atanh erf_inv"), UNIT.astype(dtype))
    case(f"{np.dtype(dtype).name}_acosh", lax.acosh, np.array([1, 1.5, 30, 1e4, INF, NAN]).astype(dtype))
each("complex", named(lax, "abs neg sign exp log sqrt rsqrt sin cos tan tanh square real imag conj log1p expm1 "
                           "logistic sinh cosh asinh acosh atanh exp2 log2"), COMPLEX)
case("conj_of_real", lax.conj, MATRIX)
case("complex_parts", lambda x, y: lax.complex(x, y), EDGES, EDGES[::-1].copy())
case("round_to_even", lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN), EDGES)
BINARY = "add sub mul div rem max min pow atan2 nextafter eq ne lt le gt ge"
each("binary_float32", named(lax, BINARY), np.repeat(EDGES, EDGES.size), np.tile(EDGES, EDGES.size))
each("binary_float16", named(lax, "add mul div max nextafter rem"), EDGES.astype(np.float16),
     EDGES[::-1].astype(np.float16))
each("binary_complex", named(lax, "add sub mul div eq ne max min pow"), COMPLEX, COMPLEX[::-1].copy())
each("binary_int32", named(lax, "add sub mul max min bitwise_and bitwise_or bitwise_xor shift_left "
                                "shift_right_logical shift_right_arithmetic eq lt ge div rem"),
     np.repeat(INTS, INTS.size), np.tile(np.where(INTS == 0, 3, INTS), INTS.size))
each("binary_uint8", named(lax, "add sub mul max min bitwise_and shift_left shift_right_logical "
                                "shift_right_arithmetic lt"), np.repeat(BYTES, 6), np.tile(BYTES, 6))
each("binary_bool", named(lax, "max min bitwise_and bitwise_or bitwise_xor eq ne lt"), BOOLS, ~BOOLS)
each("int32", named(lax, "neg abs sign bitwise_not population_count clz square"), INTS)
each("uint8", named(lax, "sign bitwise_not population_count clz square"), BYTES)
case("not_bool", lax.bitwise_not, BOOLS)
if hasattr(lax, "mulhi"):
    case("mulhi_int32", lax.mulhi, np.repeat(INTS, INTS.size), np.tile(INTS, INTS.size))
    case("mulhi_uint8", lax.mulhi, np.repeat(BYTES, 6), np.tile(BYTES, 6))
if hasattr(lax, "polynomial"):
    case("polynomial", lambda x: lax.polynomial(x, [1.0, -2.0, 0.5]), MATRIX)
each("integer_pow", {str(e): lambda x, e=e: lax.integer_pow(x, e) for e in (-3, -1, 0, 1, 2, 3, 5, 10)}, EDGES)
case("integer_pow_of_int", lambda x: lax.integer_pow(x, 4), INTS)
case("pow_by_int", lambda x, y: lax.pow(x, y), EDGES[:8], INTS)
case("clamp_by_scalars", lambda x: lax.clamp(-1.0, x, 2.0), EDGES)
case("clamp_by_arrays", lax.clamp, -np.ones(3, np.int32), np.array([-5, 0, 5], np.int32), np.ones(3, np.int32))
case("select_bool", lax.select_n, np.array([True, False, True]), np.zeros(3), np.ones(3))
case("select_scalar_bool", lambda p, x, y: lax.select_n(p, x, y), np.True_, np.zeros(3), np.ones(3))
case("select_int32", lambda w, *xs: lax.select_n(w, *xs), np.array([0, 1, 2, 3, 1], np.int32),
     *[np.full(5, v, np.float32) for v in range(4)])
for source in (np.float32, np.int32, np.uint8, np.bool_, np.complex64, jnp.bfloat16):
    targets = [np.complex64]
    if source != np.complex64:
        targets += [np.float32, np.bool_, np.float16, np.int8, np.uint32]
    each(f"convert_{np.dtype(source).name}",
         {np.dtype(t).name: lambda x, t=t: lax.convert_element_type(x, t) for t in targets},
         np.array([0, 1, 2, 3, 100]).astype(source))
case("bitcast_same_width", lambda x: lax.bitcast_convert_type(x, np.uint32), EDGES)
case("bitcast_narrower", lambda x: lax.bitcast_convert_type(x, np.uint16), EDGES)
case("bitcast_wider", lambda x: lax.bitcast_convert_type(x, np.float32), np.arange(6, dtype=np.uint16).reshape(3, 2))
case("reduce_precision", lambda x: lax.reduce_precision(x, 5, 10), EDGES * 1.2345)
case("erf_inv_dense", lax.erf_inv, np.linspace(-1, 1, 201).astype(np.float32))
case("erfc_dense", lax.erfc, np.linspace(-6, 9, 301).astype(np.float32))
each("special", {"lgamma": lax.lgamma, "digamma": lax.digamma, "i0e": lax.bessel_i0e, "i1e": lax.bessel_i1e},
     np.array([0.3, 1, 2.5, 10, -0.5, 0, INF, NAN], np.float32))
each("special_pairs", {"igamma": lax.igamma, "igammac": lax.igammac, "zeta": lambda x, q: lax.zeta(x + 2, q),
                 "polygamma": lambda x, y: lax.polygamma(jnp.floor(x), y)},
     np.array([0.5, 1, 3, 7], np.float32), np.array([0.2, 1, 4, 2], np.float32))
case("betainc", lax.betainc, np.float32([0.5, 2]), np.float32([1, 3]), np.float32([0.25, 0.5]))
case("zero_size", lambda x: jnp.sin(x) + 1, np.zeros((0, 3), np.float32))
case("scalar", lambda x: x * x + 1, np.float32(3))
case("no_result", lambda x: (), np.float32(3))
case("forwarded_and_literal", lambda x: (x, 1.0, x), np.float32(3))
case("copy", lambda x: jnp.copy(x), MATRIX)


# --- structure ----------------------------------------------------------------------------------------------------

case("broadcast_stretch", lambda x: lax.broadcast_in_dim(x, (2, 4, 6, 3), (1, 2)), MATRIX)
case("broadcast_unit", lambda x: lax.broadcast_in_dim(x, (4, 5), (0, 1)), MATRIX[:, :1])
case("broadcast_scalar", lambda x: jnp.broadcast_to(x, (2, 0, 3)), np.float32(1))
case("reshape_transposed", lambda x: lax.reshape(x, (8, 3), dimensions=(1, 0)), MATRIX)
case("transpose_reshape", lambda x: x.T.reshape(-1), MATRIX)
case("squeeze_expand", lambda x: lax.squeeze(lax.expand_dims(x, (0, 3)), (0,)), MATRIX)
case("rev", lambda x: (lax.rev(x, (0,)), lax.rev(x, (0, 1)), lax.rev(x, ())), MATRIX)
case("slice_strided", lambda x: x[1:4:2, ::-2], MATRIX)
case("slice_empty", lambda x: x[2:2], MATRIX)
case("pad_mixed", lambda x: lax.pad(x, np.float32(7), ((1, -2, 2), (-1, 3, 1))), MATRIX)
case("pad_to_nothing", lambda x: lax.pad(x, np.float32(7), ((-2, -2, 0), (0, 0, 0))), MATRIX)
case("concatenate", lambda x: lax.concatenate([x, x[:0], x * 2], 0), MATRIX)
case("stack_unstack", lambda x: [*jnp.unstack(jnp.stack([x, x + 1], 1), axis=2)][:3], MATRIX)
case("split", lambda x: jnp.split(x, [1, 1, 4], axis=1), MATRIX)
case("tile", lambda x: jnp.tile(x, (2, 3)), MATRIX)
case("repeat", lambda x: jnp.repeat(x, 3, axis=1), MATRIX)
each("iota", {np.dtype(t).name: lambda t=t: lax.broadcasted_iota(t, (3, 4), 1)
              for t in (np.int32, np.uint8, np.float32, jnp.bfloat16, np.complex64)})
case("dynamic_slice", lambda x, i, j: lax.dynamic_slice(x, (i, j), (2, 3)), MATRIX, np.int32(3), np.int32(-9))
case("dynamic_slice_narrow", lambda x, i: lax.dynamic_slice(x, (i, i), (2, 3)), MATRIX, np.uint8(200))
case("dynamic_update_slice", lambda x, i: lax.dynamic_update_slice(x, x[:2, :2] * 10, (i, i)), MATRIX, np.int32(4))
case("dynamic_index", lambda x, i: (x[i], x[-1], x[i, 2]), MATRIX, np.int32(-2))
for mode in ("clip", "fill", "promise_in_bounds"):
    inside = IDS % 4 if mode == "promise_in_bounds" else IDS
    case(f"take_{mode}", lambda x, i, m=mode: x.at[i].get(mode=m), MATRIX, inside)
    case(f"take_pairs_{mode}", lambda x, i, m=mode: x.at[i[:, 0], i[:, 1]].get(mode=m), MATRIX, inside)
    case(f"take_int_{mode}", lambda x, i, m=mode: x.at[i].get(mode=m), np.arange(4), inside)
case("take_fill_value", lambda x, i: x.at[i].get(mode="fill", fill_value=-5), MATRIX, IDS)
case("take_along_axis", lambda x, i: jnp.take_along_axis(x, i, axis=1), MATRIX, np.int32([[0], [5], [9], [-1]]))
case("take_bool_array", lambda x, i: x.at[i].get(mode="fill"), BOOLS, np.int32([0, 5]))
case("take_narrow_index", lambda x, i: x.at[i].get(mode="clip"), np.arange(300), np.uint8([3, 255]))
case("take_nothing", lambda x, i: x[i], MATRIX, np.zeros((0,), np.int32))
case("take_batched", jax.vmap(lambda x, i: x[i]), MATRIX, np.int32([0, 2, 5, 7]))
case("slice_batched", jax.vmap(lambda x, i: lax.dynamic_slice(x, (i,), (2,))), MATRIX, np.int32([0, 2, 5, 7]))
METHODS = [m for m in ("set", "add", "mul", "min", "max", "subtract") if hasattr(jnp.zeros(1).at[0], m)]
for mode in ("clip", "drop"):
    each(f"scatter_{mode}", {f: lambda x, i, m=mode, f=f: getattr(x.at[i], f)(2.5, mode=m) for f in METHODS}, MATRIX,
         np.int32([0, 3, 9, 2]))
    case(f"scatter_pairs_{mode}", lambda x, i, m=mode: x.at[i[:, 0], i[:, 1]].add(1.0, mode=m), MATRIX, IDS)
    case(f"scatter_window_{mode}", lambda x, i, m=mode: lax.scatter(
        x, i, x[:1, :2] * 10, lax.ScatterDimensionNumbers((0, 1), (), (0, 1)), mode=m), MATRIX, np.int32([3, 5]))
case("scatter_apply", lambda x, i: x.at[i].apply(jnp.sin), MATRIX, np.int32([0, 3]))
case("scatter_batched", jax.vmap(lambda x, i: x.at[i].set(0.0)), MATRIX, np.int32([0, 2, 5, 7]))
case("scatter_nothing", lambda x, i: x.at[i].set(0.0), MATRIX, np.zeros((0,), np.int32))
case("scatter_bool", lambda x, i: x.at[i].set(True), BOOLS, np.int32([1, 8]))
case("scatter_complex", lambda x, i: x.at[i].add(1j), COMPLEX, np.int32([1, 1, 8]))
case("sort", lambda x: (jnp.sort(x), jnp.argsort(x), jnp.sort(x, descending=True)), np.tile(EDGES, 2))
case("sort_axis", lambda x: lax.sort(x, dimension=0), np.float32([[3, 1], [1, 2], [2, 0]]))
case("sort_two_keys", lambda x, y: lax.sort((x, y, y * 10), num_keys=2), np.int32([2, 1, 2, 1]),
     np.float32([0, 3, -1, 2]))
case("sort_complex", lambda x: jnp.sort(x), np.array([1 + 1j, 1 - 1j, -1j, 0.5], np.complex64))
case("sort_half", lambda x: jnp.sort(x), EDGES.astype(jnp.bfloat16))
case("sort_bool", lambda x: jnp.sort(x), BOOLS)


# --- reductions ---------------------------------------------------------------------------------------------------

each("reduce", {"sum": lambda x: x.sum(0), "prod": lambda x: (x / 9).prod(1), "max": lambda x: x.max(), "min": lambda x:
                x.min((0, 1)), "mean": lambda x: x.mean(1), "var": lambda x: x.var()}, MATRIX)
each("reduce_nan", {"max": lambda x: x.max(), "min": lambda x: x.min(), "argmax": lambda x: x.argmax(),
                    "argmin": lambda x: x.argmin()}, np.float32([1, NAN, 3, NAN, -INF]))
each("argument", {"max": lambda x: x.argmax(1), "min": lambda x: x.argmin(0), "int": lambda x: x.astype(int).argmax(0),
                  "bool": lambda x: (x > 0).argmax(1), "tie": lambda x: (x * 0).argmin(1),
                  "half": lambda x: x.astype(jnp.bfloat16).argmax(0)}, MATRIX)
case("argmax_of_infinities", lambda x: (x.argmax(), (-x).argmin()), np.float32([-INF, -INF]))
each("reduce_bits", {"and": lambda x: lax.reduce_and(x, (0,)), "or": lambda x: lax.reduce_or(x, (0,)),
                     "xor": lambda x: lax.reduce_xor(x, (0,))}, np.uint8([[3, 5], [6, 250]]))
each("reduce_bool", {"all": lambda x: x.all(), "any": lambda x: x.any(), "max": lambda x: x.max(),
                     "min": lambda x: x.min(), "xor": lambda x: lax.reduce_xor(x, (0,))}, BOOLS)
each("reduce_complex", {"sum": jnp.sum, "prod": jnp.prod, "max": jnp.max, "min": jnp.min}, COMPLEX)
each("reduce_empty", {"sum": lambda x: x.sum(0), "prod": lambda x: x.prod(0), "any": lambda x: (x > 0).any(0)},
     np.zeros((0, 3), np.float32))
each("reduce_int8", {"sum": lambda x: lax.reduce_sum(x, (0,)), "max": jnp.max}, np.int8([100, 100, -5]))
case("reduce_half", lambda x: (x.sum(), x.max(), x.prod()), np.float16([1, 2, 3.5]))
case("reduce_generic", lambda x: lax.reduce(x, np.float32(1), lambda a, b: a * b + a, (1,)), MATRIX[:, :2])
case("reduce_pairs", lambda x: lax.reduce((x, x * 2), (np.float32(0), np.float32(-INF)),
                                          lambda a, b: (a[0] + b[0], jnp.maximum(a[1], b[1])), (0,)), MATRIX)
IMAGE = np.sin(np.arange(2 * 7 * 6 * 3)).astype(np.float32).reshape(2, 7, 6, 3)
for pool, init in ((lax.max, -INF), (lax.min, INF), (lax.add, 0.0)):
    case(f"pool_{pool.__name__}", lambda x, f=pool, i=init: lax.reduce_window(
        x, np.float32(i), f, (1, 3, 2, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (0, 1), (0, 0))), IMAGE)
case("pool_dilated", lambda x: lax.reduce_window(x, np.float32(0), lax.add, (1, 2, 2, 1), (1, 1, 1, 1), "SAME",
                                                 base_dilation=(1, 2, 1, 1), window_dilation=(1, 1, 2, 1)), IMAGE)
case("pool_generic", lambda x: lax.reduce_window(x, np.float32(1), lambda a, b: a * b, (1, 2, 2, 1), (1, 1, 1, 1),
                                                 "VALID"), IMAGE)


def max_pool(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 2, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (0, 1), (0, 0)))


case("pool_gradient", lambda x: jax.grad(lambda y: (max_pool(y) ** 2).sum())(x), IMAGE)
case("pool_jvp", lambda x: jax.jvp(max_pool, (x,), (jnp.cos(x),)), IMAGE)
for reverse in (False, True):
    each(f"cumulative_{'reversed' if reverse else 'forward'}",
         {name: lambda x, n=name, r=reverse: getattr(lax, n)(x, axis=1, reverse=r)
          for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")}, MATRIX / 10)
case("cumulative_int", lambda x: (jnp.cumsum(x), lax.cummax(x), jnp.cumprod(x)), np.int32([3, 1, 4, 1, 5]))
case("cumulative_half", lambda x: jnp.cumsum(x), np.arange(9).astype(jnp.bfloat16))
case("cumulative_short", lambda x: (jnp.cumsum(x[:, :0], 1), jnp.cumsum(x[:, :1], 1)), MATRIX)
case("cumulative_logsumexp_infinite", lambda x: lax.cumlogsumexp(x), np.float32([-INF, -INF, 1, 2, INF, INF]))
case("cumulative_complex", lambda x: (jnp.cumsum(x), lax.cumlogsumexp(x)), COMPLEX)


# --- contractions -------------------------------------------------------------------------------------------------

LEFT, RIGHT = MATRIX / 7, np.cos(np.arange(30)).astype(np.float32).reshape(6, 5)
case("matmul", lambda x, y: x @ y, LEFT, RIGHT)
case("matmul_vectors", lambda x, y: (x[0] @ y, x @ y[:, 0], x[0] @ y[:, 0]), LEFT, RIGHT)
case("matmul_highest", lambda x, y: jnp.dot(x, y, precision="highest"), LEFT, RIGHT)
case("einsum_batched", lambda x, y: jnp.einsum("bij,bkj->bik", x, y), LEFT.reshape(2, 2, 6), LEFT.reshape(2, 2, 6))
case("einsum_outer", lambda x, y: jnp.einsum("i,j->ij", x, y), LEFT[0], RIGHT[0])
case("dot_half_to_single", lambda x, y: lax.dot(x.astype(jnp.bfloat16), y.astype(jnp.bfloat16),
                                                preferred_element_type=np.float32), LEFT, RIGHT)
case("dot_half", lambda x, y: x.astype(jnp.bfloat16) @ y.astype(jnp.bfloat16), LEFT, RIGHT)
case("dot_mixed", lambda x, y: lax.dot_general(x.astype(jnp.bfloat16), y, (((1,), (0,)), ((), ())),
                                               preferred_element_type=np.float32), LEFT, RIGHT)
case("dot_int8", lambda x, y: lax.dot(x, y, preferred_element_type=np.int32), np.int8([[1, 2], [3, -4]]),
     np.int8([[5], [100]]))
case("dot_complex", lambda x: jnp.vdot(x, x), COMPLEX)
case("dot_empty", lambda x, y: x[:, :0] @ y[:0], LEFT, RIGHT)
KERNEL = np.cos(np.arange(3 * 2 * 3 * 4)).astype(np.float32).reshape(3, 2, 3, 4)
case("convolution", lambda x, k: lax.conv_general_dilated(
    x, k, (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")), IMAGE, KERNEL)
case("convolution_dilated", lambda x, k: lax.conv_general_dilated(
    x, k, (1, 1), ((1, 2), (-1, 0)), (2, 1), (1, 2), ("NHWC", "HWIO", "NCHW")), IMAGE, KERNEL)
case("convolution_grouped", lambda x, k: lax.conv_general_dilated(
    x, k, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=3), IMAGE,
     KERNEL[:, :, :1, :3])
case("convolution_gradient", lambda x, k: jax.grad(lambda k: (lax.conv_general_dilated(
    x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) ** 2).mean())(k), IMAGE, KERNEL)
case("cholesky", lambda x: jax.lax.linalg.cholesky(x @ x.T + 9 * jnp.eye(x.shape[0])), MATRIX)
case("triangular_solve", lambda x: [jax.lax.linalg.triangular_solve(
    x @ x.T + 9 * jnp.eye(x.shape[0]) * (1 + 1j), x + 1j, left_side=True, lower=True, transpose_a=t, conjugate_a=c,
    unit_diagonal=c) for t in (False, True) for c in (False, True)], MATRIX)
case("fft", lambda x: (jnp.fft.fft(x), jnp.fft.irfft(jnp.fft.rfft(x)), jnp.fft.ifft2(x)), MATRIX)


# --- control ------------------------------------------------------------------------------------------------------

@jax.custom_batching.custom_vmap
def custom_sine(x: Any) -> Any:
    return jnp.sin(x)


@custom_sine.def_vmap
def _custom_sine_vmap(size: int, batched: list[bool], x: Any) -> Any:
    return custom_sine(x), True


@jax.custom_vjp
def custom_square(x: Any) -> Any:
    return x * x


custom_square.defvjp(lambda x: (x * x, x), lambda x, ct: (2 * x * ct,))
TABLE, WEIGHTS = jnp.arange(6.0), np.linspace(0, 1, 6, dtype=np.float32)
case("scan_reverse", lambda x: lax.scan(lambda c, r: (c * 0.5 + r, c + r), x[0], x, reverse=True), MATRIX)
case("scan_consts", lambda x: lax.scan(lambda c, r: (c + TABLE * r, (c * WEIGHTS, r.sum())), TABLE, x), MATRIX)
case("scan_empty", lambda x: lax.scan(lambda c, r: (c + r, c), x[0], x[:0]), MATRIX)
case("scan_once", lambda x: lax.scan(lambda c, r: (c + r, c), x[0], x[:1]), MATRIX)
case("scan_unrolled", lambda x: lax.scan(lambda c, r: (c + r, c), x[0], x, unroll=3), MATRIX)
case("scan_no_inputs", lambda x: lax.scan(lambda c, _: (c * 1.5, None), x, None, length=5), MATRIX)
case("scan_nested", lambda x: lax.scan(
    lambda c, r: lax.scan(lambda d, s: (d + s * TABLE, d.sum()), c, r), TABLE, x), MATRIX)
case("scan_gradient", lambda x: jax.grad(lambda y: lax.scan(
    lambda c, r: (jnp.tanh(c + r), c.sum()), y[0], y)[1].sum())(x), MATRIX / 10)
case("scan_keys", lambda k: lax.scan(lambda c, key: (c + jax.random.uniform(key), key), 0.0, jax.random.split(k, 3)),
     jax.random.key(3))
case("fori_loop", lambda x: lax.fori_loop(0, 7, lambda i, c: c + i * x, x), MATRIX)
case("while_dynamic", lambda n, x: lax.fori_loop(0, n, lambda i, c: c * TABLE + x, x), np.int32(4), MATRIX)
case("while_batched", jax.vmap(lambda a: lax.while_loop(
    lambda s: s[0] < 20, lambda s: (s[0] * 1.5 + 1, s[1] + a), (a, a))),
     np.float32([0, 3, 19, 50]))
case("while_batched_twice", jax.vmap(jax.vmap(lambda a: lax.while_loop(
    lambda s: s.sum() < 20, lambda s: s * 1.5 + jnp.ones(2), a * jnp.ones(2)))), np.float32([[0, 3], [19, 50]]))
case("while_batched_consts", jax.vmap(lambda a, n: lax.while_loop(lambda s: s < n, lambda s: s + a, 0.0)),
     np.float32([1, 2, 3]), np.float32([0, 7, 4]))
case("cond", lambda p, x: lax.cond(p, lambda y: y + TABLE, lambda y: y * WEIGHTS, x), np.False_, TABLE)
case("cond_of_comparison", lambda x: lax.cond(x[0] > 0, lambda y: (y, y[0]), lambda y: (-y, y[1]), x),
     np.float32([-1, 2]))
case("switch", lambda i, x: lax.switch(i, [lambda y: y, lambda y: y + 1, lambda y: y @ y.T @ y], x), np.int32(2),
     MATRIX / 9)
case("switch_clamped", lambda i, x: lax.switch(i, [lambda y: y, lambda y: y + 1, lambda y: y * 2], x), np.int32(-7),
     MATRIX)
case("switch_batched", jax.vmap(lambda i, x: lax.switch(i, [lambda y: y, lambda y: y + 1, lambda y: y * 2], x)),
     np.int32([0, 1, 2, 9]), MATRIX)
case("checkpoint_gradient", jax.grad(lambda x: jax.checkpoint(lambda y: jnp.sin(jnp.sin(y)).sum())(x)), MATRIX)
case("custom_derivatives", jax.grad(lambda x: (jax.nn.relu(x) + jax.nn.silu(x) + jax.nn.gelu(x)).sum()), MATRIX)
case("closed_over", lambda x: jax.jit(lambda y: y * TABLE + WEIGHTS)(x) + jax.jit(lambda y: y * TABLE)(x), MATRIX)
case("barrier", lambda x: lax.optimization_barrier((x, x + 1)), MATRIX)
case("root_of_function", lambda x: jax.lax.custom_root(lambda y: y * y - x, x, lambda f, y: lax.fori_loop(
    0, 9, lambda i, v: v - f(v) / (2 * v), y), lambda g, y: y / g(1.0)), np.float32(2))
case("linear_solve", lambda x: lax.custom_linear_solve(lambda v: v * 3 + x * v, x, lambda f, b: b / (3 + x)),
     np.float32([1, 2]))

case("collectives_of_vmap", jax.vmap(lambda x: (lax.psum(x, "i"), lax.pmax(x, "i"), lax.all_gather(x, "i"),
                                                lax.axis_index("i")), axis_name="i"), MATRIX)
case("searching", lambda x: (jnp.searchsorted(x, x * 1.5), jnp.interp(x * 1.5, x, -x), jnp.nonzero(x > 0, size=3)),
     MATRIX[2])
case("custom_batching", lambda x: custom_sine(x), MATRIX)
case("custom_vjp_forward", lambda x: custom_square(x) + 1, MATRIX)
case("named_values", lambda x: jax.ad_checkpoint.checkpoint_name(jnp.sin(x), "sine"), MATRIX)
case("integer_gradient", lambda x, i: jax.vjp(lambda y, j: y[j], x, i)[1](x[0]), MATRIX, np.int32(2))


# --- random -------------------------------------------------------------------------------------------------------

KEY, RAW = jax.random.key(7), np.array([3, 2**31 + 5], np.uint32)
each("random", {"bits": lambda k: jax.random.bits(k, (3, 5)), "bits8": lambda k: jax.random.bits(k, (7,), np.uint8),
                "bits16": lambda k: jax.random.bits(k, (), np.uint16), "split": lambda k: jax.random.split(k, (2, 3)),
                "fold_in": lambda k: jax.random.fold_in(k, 9), "normal": lambda k: jax.random.normal(k, (4, 3)),
                "uniform": lambda k: jax.random.uniform(k, (5,)), "permutation": lambda k: jax.random.permutation(k, 9),
                "categorical": lambda k: jax.random.categorical(k, jnp.zeros((4, 3))),
                "gumbel": lambda k: jax.random.gumbel(k, (4,)), "randint": lambda k: jax.random.randint(k, (6,), 0, 10),
                "clone": lambda k: jax.random.clone(k), "data": lambda k: jax.random.key_data(k)}, KEY)
case("random_gamma", lambda k: jax.random.gamma(k, 2.0, (3,)), KEY)
case("random_raw_key", lambda k: jax.random.normal(k, (3,)), RAW)
case("random_seed", lambda s: (jax.random.key(s), jax.random.PRNGKey(s)), np.int32(-5))
case("random_fold_in_batched", lambda ks, i: jax.vmap(jax.random.fold_in)(ks, i), jax.random.split(KEY, 3),
     np.arange(3))
case("random_keys_structure", lambda ks: (ks[1], ks[::2], ks[:, None], jnp.concatenate([ks, ks]), ks[np.array([2, 0])],
                                          jnp.where(jnp.array([True, False, True]), ks, ks[::-1]), ks.reshape(3, 1).T),
     jax.random.split(KEY, 3))
case("random_keys_equal", lambda ks: ks == ks[0], jax.random.split(KEY, 3))
case("random_captured_key", lambda x: x + jax.random.normal(KEY, x.shape), MATRIX)
case("random_rbg", lambda x: jax.random.bits(jax.random.key(0, impl="rbg"), (4,)) + x, np.uint32(1))
