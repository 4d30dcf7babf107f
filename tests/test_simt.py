"""The CUDA kernels of the catalog and of random programs, run thread by thread; scripts/simt.py does so for longer."""

from __future__ import annotations

import functools
import mmap
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalog import CATALOG
from program_check import SIMT_MODES, check
from random_programs import random_program
from simt_check import Tally, check_cases, compile_case, with_threads

import hlofuse
from hlofuse.codegen import nest
from hlofuse.codegen.dialect import SIMT, Argument
from hlofuse.codegen.kernel import KernelText
from hlofuse.compiler import compile_function
from hlofuse.errors import UnknownNameError
from hlofuse.runtime import simt
from hlofuse.runtime.host_compiler import find_compiler
from hlofuse.runtime.simt import SimtFault, SimtKernel, build_simt_kernels, simt_seed

MAP_NORESERVE = 0x4000  # Linux

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


def normalize(x):
    centered = x - x.mean(-1, keepdims=True)
    return centered / jnp.sqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-3)


# Forms and sizes that the catalog's small arguments lack: split reductions, several rows a block, odd everything.
SHAPES = {
    "full": (lambda x: (x * x).sum(), (40000,)),
    "full and more": (lambda x: (x.sum(), jnp.abs(x).max(), x.argmin()), (33, 1250)),
    "split columns": (lambda x: jnp.abs(x).sum(0), (1500, 77)),
    "columns": (lambda x: x - x.mean(0), (200, 33)),
    "short rows": (normalize, (9001, 40)),
    "odd rows": (normalize, (3, 1301)),
    "long rows": (normalize, (2, 8200)),
    "transpose": (lambda x: jnp.tanh(x.T) + x.T, (70, 45)),
    "pairs": (lambda x: jnp.argmax(x, 1), (40, 300)),
    "halves": (lambda x: normalize(x.astype(jnp.bfloat16)), (6, 130)),
    "wholes": (lambda x: (x * 100).astype(jnp.int8).sum(1, dtype=jnp.int32), (50, 257)),
    "complex": (lambda x: ((x + 1j * x) ** 2).sum(-1), (20, 129)),
    "padded": (lambda x: jnp.pad(x, ((1, 2), (3, 0))) + jnp.concatenate([x, x[:3]], 0)[:, :1], (10, 30)),
    "gathered": (lambda x: jnp.take(x, jnp.arange(100) * 7 % 50, axis=0) * 2, (50, 36)),
}


@functools.cache
def cases_of_shapes():
    rng = np.random.default_rng(5)
    return [compile_case(name, f, [jnp.asarray(rng.standard_normal(dims, "float32"))])
            for name, (f, dims) in SHAPES.items()]  # fmt: skip


def assert_right(tally: Tally, forms: int) -> None:
    assert not tally.faults, "\n".join(tally.faults)
    assert len(tally.forms) >= forms, tally
    print(tally)


def test_catalog():
    cases = [compile_case(name, w.fn, jax.device_put(w.args("small"))) for name, w in CATALOG.items()]
    assert_right(check_cases(cases, range(5)), 5)
    assert_right(check_cases(cases, (1,), with_threads(64), judged=False), 5)


@pytest.mark.parametrize("threads", (0, 32, 64, 256))
def test_forms_and_shapes(threads):
    assert_right(check_cases(cases_of_shapes(), range(3), with_threads(threads) if threads else SIMT), 6)


@pytest.mark.parametrize("size", (0, 1, 2, 31, 33, 1023, 1025))
def test_sizes(size):
    x = jnp.linspace(-1, 1, size)
    square = jnp.linspace(-1, 1, size * 3).reshape(3, size)
    cases = [
        compile_case("loop", lambda x: jnp.sin(x) * 2, [x]),
        compile_case("full", lambda x: (x * x).sum(), [x]),
        compile_case("rows", lambda x: x - x.sum(-1, keepdims=True), [square]),
        compile_case("columns", lambda x: x * x.sum(0), [square]),
        compile_case("columns of many rows", lambda x: x.T * x.sum(-1), [square]),
    ]
    assert_right(check_cases(cases, (0, 1)), 1 if size else 0)


@pytest.mark.parametrize("mode", SIMT_MODES)
def test_random_programs(mode):
    faults = check([random_program(seed) for seed in range(700, 716)], (mode,))
    assert not faults, "\n".join(map(str, faults))


def test_random_programs_with_64_bits():
    faults = check([random_program(seed, x64=True) for seed in range(80, 88)], ("simt",), x64=True)
    assert not faults, "\n".join(map(str, faults))


# --- 64-bit indices ---------------------------------------------------------------------------------------------------


def test_index_type_forced_to_64_bits(monkeypatch):
    monkeypatch.setattr(nest, "MAX_INT_INDEX", 0)
    cases = [compile_case(case.name, case.function, case.args) for case in cases_of_shapes()]
    assert all("long long" in c.text_in("cuda").text for case in cases for c in case.compilation.clusters if c.segments)
    assert_right(check_cases(cases, (0, 1)), 6)


def sparse(dims: tuple[int, ...], dtype: type) -> np.ndarray:
    """An array of zeros that takes memory only where it is written."""
    size = int(np.prod(dims)) * np.dtype(dtype).itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    try:
        return np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype).reshape(dims)
    except OSError as error:
        pytest.skip(f"no {size >> 30} GiB of address space: {error}")


LARGE = {
    "2^31 elements": (lambda x: x + np.uint8(3), (2**31 + 5000,), np.uint8),
    "2^32 elements": (lambda x: x + np.uint8(3), (2**32 + 12345,), np.uint8),
    "2^32 bytes": (lambda x: x + 3, (2**30 + 4099,), np.float32),
    "odd rows": (lambda x: x + np.uint8(3), (2**11 + 1, 2**21 + 1), np.uint8),
    "sums of rows": (lambda x: x + x.sum(1, keepdims=True, dtype=np.uint8), (2**21 + 1, 2048), np.uint8),
    "transpose": (lambda x: x.T + np.uint8(3), (2**16 + 5, 2**16 + 7), np.uint8),
}


@pytest.mark.parametrize("name", LARGE)
def test_offsets_beyond_32_bits(name):
    """Only blocks at both ends and around the limits run; whoever wraps an offset meets the bounds, or other values."""
    function, dims, dtype = LARGE[name]
    compilation = compile_function(function, jax.ShapeDtypeStruct(dims, dtype), device="simt")
    (cluster,) = [c for c in compilation.clusters if c.segments]
    text = cluster.text_in("cuda")
    kernel = build_simt_kernels([text])[text.symbol]
    assert isinstance(kernel, SimtKernel), kernel
    (result,) = cluster.instruction.result_shapes
    x, out = sparse(dims, dtype), sparse(result.dims, result.dtype)
    near = [int(text.blocks * part) for part in (0, 2**31 / x.nbytes, 2**32 / x.nbytes, 1)]
    for block in near:
        first = max(0, min(block - 1, text.blocks - 2))
        kernel.run([x], [out], 1, range(first, min(first + 2, text.blocks)))
    assert out.reshape(-1)[-1] == function(np.zeros((1, 1), dtype)).reshape(-1)[0]
    assert out.reshape(-1)[0] == out.reshape(-1)[-1]


# --- what the machine does --------------------------------------------------------------------------------------------


def hand_written(body: str, blocks: int = 1, threads: int = 64, counters: int = 0) -> SimtKernel:
    arguments = (Argument("IN", "s32", "x"), Argument("OUT", "s32", "out"))
    text = ("extern \"C\" __global__ void by_hand(IN(s32) x, OUT(s32) out, unsigned* counters) {\n"
            f"  const int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;\n{body}\n}}\n")  # fmt: skip
    kernel = KernelText("simt", "by_hand", text, "loop", blocks, threads, counters, (), 0, 1, {}, arguments)
    built = build_simt_kernels([kernel])["by_hand"]
    assert isinstance(built, SimtKernel), built
    return built


def result_of(body: str, blocks: int = 1, threads: int = 64, counters: int = 0, seed: int = 3) -> np.ndarray:
    x = np.arange(blocks * threads, dtype=np.int32) * 3 % 17
    out = np.full_like(x, -1)
    hand_written(body, blocks, threads, counters).run([x], [out], seed)
    return out


T = np.arange(64)
X = T * 3 % 17
LANE = T % 32
ODD = np.array([sum(1 << lane for lane in range(32) if X[w * 32 + lane] % 2) for w in range(2)]).repeat(32)
INTRINSICS = {
    "__shfl_sync(~0u, x[i], 5)": X[T // 32 * 32 + 5],
    "__shfl_sync(~0u, x[i], 9, 8)": X[T // 8 * 8 + 1],
    "__shfl_up_sync(~0u, x[i], 3)": np.where(LANE >= 3, X[T - 3], X),
    "__shfl_down_sync(~0u, x[i], 3, 16)": np.where(T % 16 < 13, X[(T + 3) % 64], X),
    "__shfl_xor_sync(~0u, x[i], 6)": X[T ^ 6],
    "(int)__ballot_sync(~0u, x[i] % 2)": ODD,
    "__any_sync(~0u, x[i] == 1 && t < 32)": (T < 32).astype(int),
    "__all_sync(~0u, t < 40)": (T < 32).astype(int),
    "__popc(__match_any_sync(~0u, x[i] % 2))": np.where(
        X % 2, np.array([bin(o).count("1") for o in ODD]), 32 - np.array([bin(o).count("1") for o in ODD])
    ),
    "(int)__reduce_add_sync(~0u, (unsigned)x[i])": X.reshape(2, 32).sum(1).repeat(32),
    "__reduce_min_sync(~0u, x[i] - 8)": (X - 8).reshape(2, 32).min(1).repeat(32),
    "__syncthreads_count(x[i] == 3)": np.full(64, (X == 3).sum()),
    "__syncthreads_or(t == 9)": np.full(64, 1),
    "__syncthreads_and(t != 9)": np.full(64, 0),
    "__ffs(x[i]) + __clz(x[i])": np.array([((v & -v).bit_length() + 32 - int(v).bit_length()) for v in X.tolist()]),
    "__float_as_int(__int_as_float(x[i])) + (int)__brev(1u << (31 - x[i]))": X + (1 << X),
    "__shfl_sync(t % 2 ? 0xaaaaaaaau : 0x55555555u, x[i], t % 2)": X[T // 32 * 32 + T % 2],
    "(int)blockDim.x + (int)gridDim.x + warpSize + (int)threadIdx.y": np.full(64, 97),
}


@pytest.mark.parametrize("expression", INTRINSICS)
def test_intrinsics(expression):
    expected = np.asarray(INTRINSICS[expression]).astype(np.uint32).view(np.int32)
    np.testing.assert_array_equal(result_of(f"  out[i] = {expression};"), expected)


RIGHT = {
    "atomics of all blocks": ("  const unsigned old = atomicAdd(counters, 1u);\n  out[i] = old < 128u;", 1),
    "a warp that exchanges by __syncwarp": (
        "  SHARED(s32, s, 64);\n  s[t] = t;\n  __syncwarp();\n  const int y = s[t ^ 1];\n  __syncwarp();\n"
        "  s[t] = y;\n  __syncwarp();\n  out[i] = s[t ^ 1] == t;",
        1,
    ),
    "half warps, each with its mask": (
        "  SHARED(s32, s, 64);\n  const unsigned mask = t & 16 ? 0xffff0000u : 0xffffu;\n  s[t] = t;\n"
        "  if (t & 16) __syncwarp(mask); else __syncwarp(mask);\n  out[i] = s[t ^ 1] == (t ^ 1);",
        1,
    ),
    "results read again after a barrier": (
        "  out[i] = t;\n  __syncthreads();\n  const int y = out[i ^ 1];\n  __syncthreads();\n  out[i] = y == (t ^ 1);",
        1,
    ),
    "lanes that left": (
        "  out[i] = 1;\n  if (t % 32 > 7) return;\n  __syncwarp();\n  out[i] = __shfl_down_sync(~0u, 1, 1, 8);",
        1,
    ),
    "what another block wrote, after its counter": (
        "  out[i] = 1;\n  __threadfence();\n  __syncthreads();\n  const unsigned old = atomicAdd(counters, 1u);\n"
        "  __threadfence();\n  if (old >= 64) out[i] = out[t] + out[64 + t] - 1;",
        1,
    ),
    "operations on elements": (
        "  SHARED(s32, s, 64);\n  SHARED(float, f, 64);\n  s[t] = -t;\n  s[t] = wrap_add(wrap_mul(s[t], 2), s[t]);\n"
        "  s[t] += 1;\n  f[t] = max_nan(f[t] = 0.5f, 2.0f);\n"
        "  out[i] = abs_of(s[t]) == (t ? 3 * t - 1 : 1) && f[t] == 2;",
        1,
    ),
    "a compare-and-swap": ("  const unsigned old = atomicCAS(counters, 0u, 5u);\n  out[i] = old == 0 || old == 5;", 1),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_allowed(name):
    body, expected = RIGHT[name]
    for seed in range(4):
        assert (result_of(body, blocks=2, counters=1, seed=seed) == expected).all()


WRONG = {
    "a warp without __syncwarp": ("  SHARED(s32, s, 64);\n  s[t] = t;\n  out[i] = s[t ^ 1];", r"read of s\[\d+\]"),
    "a shuffle is no fence": (
        "  SHARED(s32, s, 64);\n  s[t] = t;\n  __shfl_sync(~0u, t, 0);\n  out[i] = s[t ^ 1];",
        r"line 6: read of s\[\d+\], unordered with the write by thread \d+: no barrier",
    ),
    "the other half of a warp": (
        "  SHARED(s32, s, 64);\n  s[t] = t;\n  if (t & 16) __syncwarp(0xffff0000u); else __syncwarp(0xffffu);\n"
        "  out[i] = s[t ^ 16];",
        r"read of s\[\d+\]",
    ),
    "a shared flag that all set": (
        "  SHARED(s32, s, 1);\n  s[0] = 1;\n  __syncthreads();\n  out[i] = s[0];",
        r"write of s\[0\], unordered with the write",
    ),
    "a write while others read": (
        "  SHARED(s32, s, 1);\n  if (t == 0) s[0] = 1;\n  __syncthreads();\n  out[i] = s[0];\n  if (t == 40) s[0] = 2;",
        r"s\[0\], unordered",
    ),
    "before the first element": (
        "  out[i] = x[i - 1];",
        r"block 0, thread 0, line 3: read outside of x: index -1, it has 64",
    ),
    "an atomic and a read": ("  atomicAdd(out + 0, 1);\n  __syncthreads();\n  out[i] = out[0];", "nothing has written"),
    "waiting for each other": (
        "  if (t < 16) __syncwarp(); else __ballot_sync(~0u, 1);\n  out[i] = 0;",
        "whose other lanes never come: thread .* waits at (a vote|__syncwarp)",
    ),
    "a vote with a barrier": (
        "  if (t < 16) __syncthreads(); else __ballot_sync(~0u, 1);\n  out[i] = 0;",
        "barrier that not all threads reach: thread .* waits at a vote",
    ),
    "too much shared memory": (
        "  SHARED(double, s, 40000);\n  s[t] = 0;\n  out[i] = 0;",
        "320000 bytes of shared memory",
    ),
    "a division by zero": (
        "  out[i] = 5;\n  out[i] = x[i] / (t - 9);",
        r"thread 9, line \d: integer division by zero",
    ),
    "no stack": (
        "  out[i] = 0;\n  volatile char big[1 << 18];\n  for (int k = 1 << 18; k-- > 0;) big[k] = 1;",
        "no stack left",
    ),
    "nothing written": ("  if (t) out[i] = 0;", "1 of 64 elements of out were never written, first index 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_reported(name):
    body, report = WRONG[name]
    for seed in range(4):
        with pytest.raises(SimtFault, match=report):
            result_of(body, seed=seed)


def test_a_report_quotes_the_line():
    report = "kernel by_hand, block 0, thread 63, line 3: read outside of x: index 64, it has 64 elements"
    report += "\n    out[i] = x[i + 1];"
    with pytest.raises(SimtFault, match=f"^{re.escape(report)}$"):
        result_of("  out[i] = x[i + 1];", seed=0)


def test_without_the_assembler_switch(monkeypatch):
    """Other processors than x86-64 switch fibers by ucontext."""
    other = simt.machine(("-DSIMT_UCONTEXT",))
    monkeypatch.setattr(simt, "machine", lambda: other)
    np.testing.assert_array_equal(result_of("  out[i] = __shfl_xor_sync(~0u, x[i], 6);"), X[T ^ 6])
    with pytest.raises(SimtFault, match="not all threads reach"):
        result_of("  if (t) __syncthreads();\n  out[i] = 0;")


# --- device="simt" ----------------------------------------------------------------------------------------------------


def test_jit():
    x = jax.random.normal(jax.random.key(0), (5, 301))
    f = hlofuse.jit(normalize, device="simt")
    for seed in (0, 4):
        with simt_seed(seed):
            np.testing.assert_allclose(jax.block_until_ready(f(x)), jax.jit(normalize)(x), rtol=1e-5, atol=1e-5)
    (kernel,) = f.lower(x).compile().kernels
    assert kernel.form == "row" and kernel.problem is None


def test_jit_in_other_transformations():
    f = hlofuse.jit(lambda x: jnp.tanh(x).sum(), device="simt")
    x = jnp.linspace(-1, 1, 100)
    np.testing.assert_allclose(jax.grad(f)(x), 1 - jnp.tanh(x) ** 2, rtol=1e-5)
    np.testing.assert_allclose(
        jax.vmap(f)(jnp.stack([x, x + 1])), jnp.tanh(jnp.stack([x, x + 1])).sum(1), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(jax.jit(lambda x: f(x) + jnp.sort(x)[0])(x), jnp.tanh(x).sum() - 1, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_jit_of_donated_arguments():
    f = hlofuse.jit(lambda x: x * 2, device="simt", donate_argnums=0)
    np.testing.assert_array_equal(f(jnp.arange(5.0)), np.arange(5.0) * 2)


def test_a_report_is_the_calls_error(monkeypatch):
    faulty = SIMT.prelude.replace("body(at, LANES);", "body(at + 1, 1);")
    monkeypatch.setattr(simt, "build_simt_kernels", lambda texts: build_simt_kernels(texts, faulty))
    f = hlofuse.jit(lambda x: x * 3, device="simt")
    x = jnp.ones(512)
    with pytest.raises(jax.errors.JaxRuntimeError, match="hlofuse: SIMT: kernel multiply_fusion_.*never written"):
        jax.block_until_ready(f(x))
    monkeypatch.undo()
    np.testing.assert_array_equal(hlofuse.jit(lambda x: x * 3 + 0.5, device="simt")(x), 3.5)  # the process lives on


def test_unknown_device_names_simt():
    with pytest.raises(UnknownNameError, match="simt"):
        hlofuse.jit(lambda x: x, device="sim")


def test_the_text_is_cudas():
    cuda = compile_function(normalize, jax.ShapeDtypeStruct((4, 300), "float32"), device="h200")
    ours = compile_function(normalize, jax.ShapeDtypeStruct((4, 300), "float32"), device="simt")
    assert [c.text.text for c in cuda.clusters] == [c.text.text for c in ours.clusters]
    text = ours.clusters[0].text
    assert replace(text, dialect="simt").code == text.code
