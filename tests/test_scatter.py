"""Scatters in generated kernels: values as JAX's own, in a fixed order, with what is around them in the same kernel."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalog import CATALOG

import hlofuse
from hlofuse.codegen.dialect import CUDA
from hlofuse.compiler import compile_function
from hlofuse.runtime.kernel_cache import KernelCache
from hlofuse.runtime.nvrtc import CudaBinary, CudaSource, compile_many, nvrtc_available

RNG = np.random.default_rng(7)


def ids(*shape, high=7, low=0):
    return RNG.integers(low, high, shape).astype(np.int32)


def array(*shape, dtype=np.float32):
    return np.asarray(RNG.normal(size=shape) * 4).astype(dtype)


def forms(f, *args):
    return [c.form for c in compile_function(f, *args, device="host").clusters]


def check(f, *args, exact=True):
    """The kernels' values are jax.jit's; a scatter that begins with its own array folds in XLA's order, bit for bit."""
    expected, got = jax.jit(f)(*args), hlofuse.jit(f)(*args)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if exact:
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        else:
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=1e-4)


X, U, IDS = array(300, 40), array(1000, 40), ids(1000, high=300)

PROGRAMS = {
    "add": (lambda x, i, u: x.at[i].add(u), X, IDS, U),
    "subtract": (lambda x, i, u: x.at[i].add(-u) - x.at[i].subtract(u), X, IDS, U),
    "multiply": (lambda x, i, u: x.at[i].multiply(u * 0.1 + 1), X, IDS, U),
    "minimum": (lambda x, i, u: x.at[i].min(u), X, IDS, U),
    "maximum": (lambda x, i, u: x.at[i].max(u), X, IDS, U),
    "rows out of bounds are dropped": (lambda x, i, u: x.at[i * 2 - 100].add(u, mode="drop"), X, IDS, U),
    "all rows out of bounds": (lambda x, i, u: x.at[i + 300].add(u, mode="drop"), X, IDS, U),
    "negative rows": (lambda x, i, u: x.at[i - 300].add(u), X, IDS, U),
    "clipped rows": (lambda x, i, u: x.at[i * 2].add(u, mode="clip"), X, IDS, U),
    "segment_sum": (lambda u, i: jax.ops.segment_sum(u, i, 300), U, IDS),
    "segment_max": (lambda u, i: jax.ops.segment_max(u, i, 300), U, IDS),
    "segment_mean": (lambda u, i: jax.ops.segment_sum(u, i, 300) / jnp.maximum(
        jax.ops.segment_sum(jnp.ones(1000), i, 300), 1.0)[:, None], U, IDS),
    "producers and consumers": (lambda x, i, u: jnp.tanh((x * 2).at[(i * 7) % 300].add(jnp.exp(u * 0.1))) + x,
                                X, IDS, U),
    "histogram": (lambda i: jnp.zeros(300, jnp.int32).at[i].add(1), IDS),
    "columns": (lambda x, i, u: x.T.at[:, i].add(u.T), X, IDS, U),
    "two indices": (lambda x, i, j: x.at[i, j].add(1.5), X, ids(4000, high=300), ids(4000, high=40)),
    "indices of two dimensions": (lambda x, i, u: x.at[i.reshape(10, 100)].add(u.reshape(10, 100, 40)), X, IDS, U),
    "a number for all": (lambda x, i: x.at[i].add(1), X, IDS),
    "a transposed result": (lambda x, i, u: x.at[i].add(u).T * 2, X, IDS, U),
    "a scatter read again at another place": (lambda x, i, u: x.at[i].add(u)[i] + u, X, IDS, U),
    "scatters that wait for each other": (lambda x, i, u: x.at[i].add(u).at[i].multiply(u), X, IDS, U),
    "a sum of the result": (lambda x, i, u: jnp.sum(x.at[i].add(u), axis=1), X, IDS, U),
    "updates that are gathered": (lambda x, i, u: jnp.zeros_like(x).at[i].add(x[i] * u), X, IDS, U),
    "one row": (lambda i, u: jnp.zeros((1, 40)).at[i].add(u), IDS, U),
    "one column": (lambda i, u: jnp.zeros((300, 1)).at[i].add(u[:, :1]), IDS, U),
    "results of both shapes": (lambda u, i: (jax.ops.segment_sum(u, i, 300), jax.ops.segment_sum(u[:, 0], i, 300)),
                               U, IDS),
    "gradient of take": (jax.grad(lambda x, i, u: jnp.sum(jnp.take(x, i, axis=0) * u)), X, IDS, U),
    "gradient of an embedding": (jax.grad(lambda x, i: jnp.sum(jnp.sin(x[i]))), X, ids(4, 250, high=300)),
    "batched": (jax.vmap(lambda x, i, u: x.at[i].add(u)), array(5, 30, 8), ids(5, 90, high=33), array(5, 90, 8)),
    "batched over updates": (jax.vmap(lambda x, i, u: x.at[i].add(u), (None, None, 2)), X, IDS, array(1000, 40, 3)),
    "batched set": (jax.vmap(lambda x, i, u: x.at[i].set(u)), array(5, 30, 8), ids(5, 90, high=33), array(5, 90, 8)),
    "set": (lambda x, i, u: x.at[i].set(u), X, IDS, U),
    "set a number": (lambda x, i: jnp.abs(x.at[i].set(-1.0)), X, IDS),
    "set and add": (lambda x, i, u: (x.at[i].set(u), x.at[i].add(u)), X, IDS, U),
}


INEXACT = {"multiply", "segment_mean", "producers", "gradient", "sum"}   # what is around the scatter rounds otherwise


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_are_those_of_jax(name):
    check(*PROGRAMS[name], exact=not INEXACT.intersection(name.split()))


@pytest.mark.parametrize("name", [n for n in PROGRAMS if "wait" not in n and "again" not in n and "sum of" not in n])
def test_everything_is_one_kernel(name):
    assert forms(*PROGRAMS[name]) == ["scatter"]


TYPES = ("bool", "int8", "uint8", "int16", "uint32", "int32", "float16", "bfloat16", "float32", "complex64")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [None, 5, 64])
def test_element_types(dtype, width):
    shape = () if width is None else (width,)
    x, u = (jnp.asarray(array(n, *shape)).astype(dtype) for n in (20, 200))
    i = ids(200, high=24, low=-3)
    check(lambda x, i, u: x.at[i].set(u, mode="drop"), x, i, u)
    if dtype != "bool":
        check(lambda x, i, u: (x.at[i].add(u, mode="drop"), x.at[i].multiply(u), x.at[i].set(u, mode="drop")), x, i, u)
    if dtype != "complex64":
        check(lambda x, i, u: (x.at[i].min(u), x.at[i].max(u)), x, i, u)


@pytest.mark.parametrize("index", ["int8", "uint8", "int16", "uint32", "int64", "uint64"])
def test_index_types(index):
    with jax.enable_x64(True):
        x, u = array(100, 3, dtype=np.float64), array(500, 3, dtype=np.float64)
        i = RNG.integers(0, 120, 500).astype(index)
        check(lambda x, i, u: x.at[i].add(u), x, i, u)


def test_special_values():
    x = np.float32([-0.0, 0.0, np.nan, np.inf, -np.inf, 1.0])
    u = np.float32([-0.0, np.nan, 1.0, -np.inf, np.inf, -0.0, 0.0])
    i = np.int32([0, 5, 2, 3, 3, 1, 1])
    for method in ("add", "min", "max", "set", "multiply"):
        check(lambda x, i, u, m=method: getattr(x.at[i], m)(u), x, i, u)


@pytest.mark.parametrize("n, rows, width", [(0, 5, 3), (3, 5, 0), (1, 1, 1), (2, 1, 1), (7, 3, 33), (100, 2, 257)])
def test_shapes(n, rows, width):
    x, u, i = array(rows, width), array(n, width), ids(n, high=rows)
    check(lambda x, i, u: x.at[i].add(u) * 2, x, i, u)
    check(lambda x, i, u: x.at[i].set(u) * 2, x, i, u)


@pytest.mark.parametrize("width", [None, 3, 64])
def test_large_scatters_are_split_and_the_same_in_every_run(width):
    shape = () if width is None else (width,)
    u, i = array(300_000, *shape), ids(300_000, high=50)
    f = hlofuse.jit(lambda u, i: jax.ops.segment_sum(u, i, 50))
    first = np.asarray(f(u, i))
    expected = np.zeros((50, *shape))
    np.add.at(expected, i, u.astype(np.float64))
    np.testing.assert_allclose(first, expected, rtol=1e-4, atol=0.1)
    for _ in range(5):
        np.testing.assert_array_equal(first, np.asarray(f(u, i)))
    assert compile_function(lambda u, i: jax.ops.segment_sum(u, i, 50), u, i, device="host").clusters[0].text.blocks > 1


@pytest.mark.skipif(nvrtc_available() is not None, reason=str(nvrtc_available()))
def test_cuda_texts_compile_without_spills():
    programs = {name: (f, args) for name, (f, *args) in PROGRAMS.items()}
    for dtype in ("int8", "float16", "bfloat16", "float64", "complex64", "uint32"):
        for shape in ((), (5,), (64,)):
            with jax.enable_x64(True):
                x, u = (jnp.asarray(array(n, *shape)).astype(dtype) for n in (500, 70000))
                programs[f"{dtype} {shape}"] = (lambda x, i, u: (x.at[i].add(u), x.at[i].set(u)),
                                                [x, ids(70000, high=500), u])
    texts = {}
    for name, (f, args) in programs.items():
        with jax.enable_x64(True):
            for c in compile_function(f, *args, device="h200").clusters:
                if c.form == "scatter":
                    texts[c.text.symbol] = (name, c.text)
    assert len(texts) > 40
    sources = [CudaSource(symbol, text.text) for symbol, (_, text) in texts.items()]
    for symbol, binary in compile_many(sources, "sm_90", KernelCache(), prelude=CUDA.prelude).items():
        name, text = texts[symbol]
        assert isinstance(binary, CudaBinary), f"{name}: {binary}\n{text.text}"
        figures = binary.kernels[symbol]
        assert not figures.spill_stores and not figures.spill_loads, name
        assert figures.shared_bytes <= 48 * 1024 and figures.registers * text.threads <= 65536, name


def test_segment_mean_is_one_launch_with_little_more_traffic_than_its_operands():
    workload = CATALOG["segment_mean"]
    launches = compile_function(workload.fn, *workload.avals("full"), device="h200").launches()
    operands = sum(a.size * a.dtype.itemsize for a in workload.avals("full"))
    assert launches.total == 1
    assert launches.bytes <= 1.1 * operands


def test_a_few_rows_of_a_large_array_are_left_to_xla():
    compilation = compile_function(lambda x, i, u: (x * 2).at[i].add(u), array(1000, 64), ids(10), array(10, 64))
    assert "left to XLA: 2560 bytes of updates change an array of 256000 in its place" in compilation.explain()


def test_a_donated_array_is_changed_in_its_place():
    def f(x, i, u):
        return x.at[i].add(u)

    assert compile_function(f, X, IDS, U, device="host").clusters[0].text.aliases == {0: 0}
    x = jnp.asarray(X)
    place = x.unsafe_buffer_pointer()
    got = hlofuse.jit(f, donate_argnums=0)(x, IDS, U)
    assert got.unsafe_buffer_pointer() == place
    np.testing.assert_array_equal(got, jax.jit(f)(X, IDS, U))
    for g in (lambda x, i, u: x.at[i].add(u) + x, lambda x, i, u: x.at[i].add(u * x[i]),
              lambda x, i, u: x.at[i].add(x[0])):
        assert not compile_function(g, X, IDS, U, device="host").clusters[0].text.aliases
        got = hlofuse.jit(g, donate_argnums=0)(jnp.asarray(X), IDS, U)
        np.testing.assert_allclose(got, jax.jit(g)(X, IDS, U), 1e-5, 1e-4)


def test_other_computations_are_left_to_xla():
    compilation = compile_function(lambda x, i: x.at[i].apply(jnp.sin), array(10, 4), ids(10))
    assert "neither one operation with an identity nor an assignment" in compilation.explain()


def test_a_chain_of_scatters_stays_small():
    def chain(x, i, u):
        for k in range(8):
            x = x.at[(i + k) % 300].add(u * k)
        return jnp.sum(x)

    compilation = compile_function(chain, X, IDS, U)
    assert len(compilation.clusters) <= 10
    assert sum(len(c.text.text) for c in compilation.clusters) < 30_000
    check(chain, X, IDS, U, exact=False)


def test_scatters_with_the_same_indices_share_a_kernel():
    def f(u, v, i):
        return jax.ops.segment_sum(u, i, 300), jax.ops.segment_max(v, i, 300), jax.ops.segment_sum(v, i, 300)

    assert forms(f, U, U[::-1], IDS) == ["scatter"]
    check(f, U, U[::-1], IDS)
