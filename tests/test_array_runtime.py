"""The array runtime's executor on its NumPy twin: values, memory, order, recording, and what happens on failures."""

from __future__ import annotations

import types
import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalog import CATALOG
from jax import lax
from program_check import difference
from random_programs import random_program
from test_buffer_plan import random_order

import hlofuse
from hlofuse.codegen.dialect import CUDA
from hlofuse.compiler import Compilation, compile_for_arrays, compile_function
from hlofuse.config import Options
from hlofuse.explore.accuracy import judge
from hlofuse.explore.float64_reference import evaluate
from hlofuse.frontend.trace import trace_function
from hlofuse.fusion.devices import DEVICES, nearest_device
from hlofuse.runtime import array_backend
from hlofuse.runtime.array_backend import NumPyBackend
from hlofuse.runtime.array_runtime import ArrayExecutable, build_array_executable
from hlofuse.runtime.gemm import blas_arguments, plan_gemm
from hlofuse.runtime.launch_limits import launch_problem
from hlofuse.runtime.unit_builder import BuildFailure


class StrictBackend(NumPyBackend):
    """NumPy, with memory that is never zero by luck, and steps in any order that the streams allow."""

    def __init__(self, seed: int = 0, records: bool = False) -> None:
        super().__init__(records)
        self.seed = seed

    def allocate(self, size):
        array = super().allocate(size)
        array.fill(0xA5)
        return array

    def issue(self, streams, waits, joined, awaited, steps):
        for step in random_order(types.SimpleNamespace(streams=streams, waits=waits), self.seed):
            steps[step]()


def executable_of(fn, args, backend=None, donated=(), device="host", idle=False) -> tuple[ArrayExecutable, list]:
    """The program of a function and its operands; `idle`: for a device that every kernel leaves idle, so that there are
    several streams."""
    compilation: Compilation = compile_function(fn, *args, device=device)
    spec = replace(compilation.device, library_epilogues=False, **({"sm_count": 10**6} if idle else {}))
    backend = backend or StrictBackend()
    program = build_array_executable(replace(compilation, device=spec), backend, frozenset(donated))
    types_ = [p.array.dtype for p in compilation.fused.entry.parameters]
    return program, [backend.take_in(x, types_[n], n in donated) for n, x in enumerate(compilation.operands)]


def expected_of(fn, args):
    return [np.asarray(x) for x in jax.tree.leaves(jax.jit(fn)(*args))]


@pytest.mark.parametrize("name", CATALOG)
def test_catalog(name):
    workload = CATALOG[name]
    args = workload.args("small")
    program, operands = executable_of(workload.fn, args, idle=True)
    before = [x.copy() for x in operands]
    results = program(operands)
    reference = evaluate(jax.make_jaxpr(workload.fn)(*args), *jax.tree.leaves(args))
    verdict = judge(results, expected_of(workload.fn, args), reference)
    assert verdict.ok, verdict.reason
    for x, old in zip(operands, before, strict=True):
        np.testing.assert_array_equal(x, old)
    for n, x in enumerate(results):
        assert x.flags.writeable and not any(np.shares_memory(x, y) for y in (*operands, *results[:n]))


def several_branches(x):
    parts = [jnp.tanh(x * k).sum(1, keepdims=True) for k in (1.0, 2.0, 3.0)]
    return x.T @ parts[0], jnp.concatenate(parts).mean(), [lax.sort(p, dimension=0) for p in parts]


def test_streams_may_run_in_any_order():
    x = np.random.default_rng(0).standard_normal((64, 48)).astype(np.float32)
    compilation = compile_function(several_branches, x, options=Options(fusion="none"), device="host")
    spec = replace(compilation.device, sm_count=10**6)
    for seed in range(6):
        program = build_array_executable(replace(compilation, device=spec), StrictBackend(seed))
        assert program.program.schedule.stream_count > 1
        for got, want in zip(program([x]), expected_of(several_branches, [x]), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_decoder_layer_grad_takes_a_fraction_of_its_buffers():
    workload = CATALOG["decoder_layer_grad"]
    backend = UnbuiltBackend()
    program = compile_for_arrays(trace_closed(workload, "full"), Options(), backend, frozenset()).program
    assert program.requested > 5e8
    assert program.arena_bytes < 0.6 * program.requested
    assert program.is_recordable


def trace_closed(workload, size):
    return trace_function(workload.fn, workload.avals(size)).closed


class UnbuiltBackend(NumPyBackend):
    """Plans as for a GPU, and builds nothing."""

    dialect = "cuda"

    def __init__(self) -> None:
        super().__init__()
        self.spec = DEVICES["h200"]

    def build(self, texts):
        return {t.symbol: object() for t in texts}

    def upload(self, value):
        return value


def test_random_programs():
    programs = [random_program(seed) for seed in range(40)]
    compilations = [compile_function(p.function, *p.arguments, device="host") for p in programs]
    # All at once: a compiler's start-up is most of the time that one program's kernels take.
    NumPyBackend().build([c.text_in("host") for x in compilations for c in x.clusters if c.segments])
    for seed, (program, compilation) in enumerate(zip(programs, compilations, strict=True)):
        spec = replace(compilation.device, sm_count=10**6)
        built = build_array_executable(replace(compilation, device=spec), StrictBackend(seed))
        results = built([built.backend.take_in(x, np.asarray(x).dtype, False) for x in compilation.operands])
        expected = expected_of(program.function, program.arguments)
        for value, got, want in zip(program.outputs, results, expected, strict=True):
            fault = difference(value, got, want)
            assert fault is None, f"seed {seed}, {value.name}: {fault}{program!r}"


# ------------------------------------------------------------------------------------------------ donation


def test_a_donated_operand_becomes_a_result():
    x, y = np.ones((40, 50), np.float32), np.full((40, 50), 2, np.float32)
    program, operands = executable_of(lambda x, y: jnp.sin(x) + y, [x, y], donated=[0])
    (result,) = program(operands)
    assert np.shares_memory(result, operands[0])
    np.testing.assert_allclose(result, np.sin(1) + 2, rtol=1e-6)
    assert (operands[1] == 2).all()


def test_a_donated_operand_that_is_read_later_stays():
    def f(x, y):
        total = jnp.sin(x) @ y
        return total, x - 1

    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((30, 30)).astype(np.float32), rng.standard_normal((30, 30)).astype(np.float32)
    program, operands = executable_of(f, [x.copy(), y.copy()], donated=[0, 1], idle=True)
    for got, want in zip(program(operands), expected_of(f, [x, y]), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_results_that_are_operands_or_each_other_are_copies():
    f = lambda x: (x.reshape(6), x.reshape(3, 2), jnp.zeros(2))  # noqa: E731
    program, (x,) = executable_of(f, [np.arange(6.0).reshape(2, 3)])
    results = program([x])
    assert [r.tolist() for r in results] == [[0, 1, 2, 3, 4, 5], [[0, 1], [2, 3], [4, 5]], [0, 0]]
    for n, r in enumerate(results):
        r += 1
        assert not any(np.shares_memory(r, y) for y in (x, *results[:n], *program.constants))


# ------------------------------------------------------------------------------------------------ recorded work


def test_work_at_addresses_that_come_again_is_recorded_once(monkeypatch):
    backend = StrictBackend(records=True)
    program, operands = executable_of(lambda x: jnp.tanh(x @ x) @ x + x.sum(0), [np.eye(8, dtype=np.float32)], backend)
    memory = np.empty((8, 8), np.float32)
    monkeypatch.setattr(program, "_fresh", lambda shape: memory)
    captures: list[object] = []
    capture = backend.capture
    monkeypatch.setattr(backend, "capture", lambda issue: captures.append(1) or capture(issue))
    for scale in (1.0, 2.0, 3.0, 4.0):
        operands[0][:] = scale * np.eye(8)
        program(operands)
        np.testing.assert_allclose(memory, scale * np.tanh(scale**2) * np.eye(8) + scale, rtol=1e-5)
    assert len(captures) == 1
    other = [np.eye(8, dtype=np.float32)]
    np.testing.assert_allclose(program(other)[0], np.tanh(1) * np.eye(8) + 1, rtol=1e-5)
    assert len(captures) == 1


def test_counters_are_zero_for_every_replay(monkeypatch):
    backend = StrictBackend(records=True)
    x = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32)
    program, operands = executable_of(lambda x: (x * x).sum(), [x], backend)
    assert program.program.counters > 0
    memory = np.empty((), np.float32)
    monkeypatch.setattr(program, "_fresh", lambda shape: memory)
    values = set()
    for _ in range(4):
        memory.fill(0)
        program(operands)
        values.add(memory.tobytes())
    assert len(values) == 1 and abs(memory - (x.astype(np.float64) ** 2).sum()) < 2


def test_what_calls_jax_is_not_recorded():
    program, _ = executable_of(lambda x: jnp.linalg.svd(x, compute_uv=False), [np.eye(3, dtype=np.float32)])
    assert not program.program.is_recordable


# ------------------------------------------------------------------------------------------------ failures


class FailingBackend(StrictBackend):
    def build(self, texts):
        built = dict(super().build(texts))
        return {**built, texts[0].symbol: BuildFailure(texts[0].symbol, f"error: no register {self.seed}")}


def test_a_kernel_that_does_not_build_runs_through_jax_with_one_warning(monkeypatch):
    x = np.linspace(-1, 1, 60, dtype=np.float32).reshape(6, 10)
    with pytest.raises(hlofuse.HlofuseError, match="no register 71"):
        executable_of(lambda x: jnp.cos(x) * 3, [x], FailingBackend(71))
    monkeypatch.setenv("HLOFUSE_STRICT", "0")
    with pytest.warns(hlofuse.HlofuseWarning, match="multiply_fusion .*no register 72"):
        program, operands = executable_of(lambda x: jnp.cos(x) * 3, [x], FailingBackend(72))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (result,) = program(operands)
    np.testing.assert_allclose(result, np.cos(x) * 3, rtol=1e-6)
    assert program.kernels[0].problem == "error: no register 72"
    assert "runs through JAX: error: no register 72" in program.explain()


def test_memory_that_runs_out_is_asked_for_again_without_what_was_kept(monkeypatch):
    program, operands = executable_of(lambda x: jnp.sin(x) @ x, [np.eye(4, dtype=np.float32)])
    allocate, calls = program.backend.allocate, []

    def fail_once(size):
        calls.append(size)
        if len(calls) == 1:
            raise MemoryError
        return allocate(size)

    monkeypatch.setattr(program.backend, "allocate", fail_once)
    program._replays["kept"] = program._arenas["kept"] = None
    np.testing.assert_allclose(program(operands)[0], np.sin(1) * np.eye(4), rtol=1e-6)
    assert not program._replays and not program._arenas

    def fail(size):
        raise MemoryError("no more")

    monkeypatch.setattr(program.backend, "allocate", fail)
    with pytest.raises(MemoryError, match="no more"):
        program(operands)


def test_launches_have_limits():
    x = jax.ShapeDtypeStruct((3000, 1024), np.float32)
    (cluster,) = compile_function(lambda x: jax.nn.softmax(x), x, device="h200").clusters
    text = cluster.text_in("cuda")
    assert launch_problem(text, 232448) is None
    for change, words in (
        ({"blocks": 2**31}, "2147483648 blocks"), ({"threads": 2048}, "2048 threads"),
        ({"arguments": text.arguments * 2048}, "32776 bytes of parameters"),
        ({"dynamic_shared_bytes": 232449}, "shared memory"),
    ):  # fmt: skip
        assert words in launch_problem(replace(text, **change), 232448)


def test_many_operands_are_one_launch_while_they_fit():
    count = 600
    args = [jax.ShapeDtypeStruct((8,), np.float32)] * count
    compilation = compile_function(lambda *xs: [x + 1 for x in xs], *args, device="h200")
    for cluster in compilation.clusters:
        assert launch_problem(cluster.text_in("cuda"), 232448) is None


@pytest.mark.parametrize("name, arch, count, row", [
    ("NVIDIA H200", "sm_90", 132, "h200"), ("NVIDIA H100 80GB HBM3", "sm_90", 114, "h100"),
    ("NVIDIA GeForce RTX 4090", "sm_89", 128, "rtx4090"), ("NVIDIA L40S", "sm_89", 142, "rtx4090"),
    ("NVIDIA L4", "sm_89", 58, "l4"), ("NVIDIA A100-SXM4-80GB", "sm_80", 108, "a100"), ("Tesla T4", "sm_75", 40, "t4"),
    ("NVIDIA B300", "sm_103", 148, "b200"), ("Some GPU", "sm_86", 84, "a100"),
])  # fmt: skip
def test_a_gpu_finds_its_row(name, arch, count, row):
    spec = nearest_device(name, arch, count)
    assert (spec.name, spec.arch, spec.sm_count) == (row, arch, count)
    assert spec.bandwidth == DEVICES[row].bandwidth


# ------------------------------------------------------------------------------------------------ library calls

DOTS = [
    # lhs dims, rhs dims, contracting, batch
    ((5, 7), (7, 3), ((1,), (0,)), ((), ())), ((7, 5), (3, 7), ((0,), (1,)), ((), ())),
    ((2, 5, 7), (2, 7, 3), ((2,), (1,)), ((0,), (0,))), ((2, 7, 5), (2, 3, 7), ((1,), (2,)), ((0,), (0,))),
    ((5, 2, 7), (7, 2, 3), ((2,), (0,)), ((1,), (1,))), ((2, 3, 5, 7), (2, 3, 7, 4), ((3,), (2,)), ((0, 1), (0, 1))),
    ((5, 6, 7), (6, 7, 4), ((1, 2), (0, 1)), ((), ())), ((5, 6, 7), (7, 6, 4), ((1, 2), (1, 0)), ((), ())),
    ((5,), (5,), ((0,), (0,)), ((), ())), ((5,), (6,), ((), ()), ((), ())),
    ((3, 5), (3, 5), ((1,), (1,)), ((0,), (0,))),
    ((1, 5, 7), (7, 1), ((2,), (0,)), ((), ())), ((5, 2, 7, 3), (2, 3, 7), ((2,), (2,)), ((1, 3), (0, 1))),
    ((2, 3, 4), (3, 2, 4), ((2,), (2,)), ((0, 1), (1, 0))), ((4, 0), (0, 3), ((1,), (0,)), ((), ())),
    ((0, 4), (4, 3), ((1,), (0,)), ((), ())),
]  # fmt: skip


@pytest.mark.parametrize("dot", DOTS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "complex64", "bfloat16"])
def test_every_dot_is_a_strided_product_or_jaxs(dot, dtype):
    left, right, contracting, batch = dot
    rng = np.random.default_rng(0)

    def f(a, b):
        return lax.dot_general(a, b, (contracting, batch))

    args = [np.asarray(jnp.asarray(rng.integers(-4, 5, dims), dtype)) for dims in (left, right)]
    program, operands = executable_of(f, args)
    np.testing.assert_array_equal(program(operands)[0], expected_of(f, args)[0])
    assert program.program.is_recordable or 0 in operands[0].shape or 0 in operands[1].shape


@pytest.mark.parametrize("dot", DOTS[:-2], ids=str)    # the last two are empty, and no library's
def test_every_dot_in_the_terms_of_a_library_that_counts_by_columns(dot):
    left, right, contracting, batch = dot
    rng = np.random.default_rng(0)
    lhs, rhs = (rng.integers(-4, 5, dims).astype(np.float32) for dims in (left, right))
    want = np.asarray(lax.dot_general(lhs, rhs, (contracting, batch)))
    module = compile_function(lambda a, b: lax.dot_general(a, b, (contracting, batch)), lhs, rhs, device="host").fused
    (instruction,) = [i for i in module.entry.instructions if i.opcode == "dot"]
    operands = [dict(zip(module.entry.parameters, (lhs, rhs), strict=True))[o] for o in instruction.operands]
    plan = plan_gemm(instruction)
    flat = [np.ascontiguousarray(x.transpose(m.order) if m.order else x).ravel()
            for x, m in zip(operands, (plan.lhs, plan.rhs), strict=True)]  # fmt: skip
    blas, out = blas_arguments(plan), np.zeros(want.size, np.float32)
    for b in range(plan.batch):
        first, second = (
            column_major(x[b * stride:], leading, is_transposed, rows, columns)
            for x, leading, stride, is_transposed, rows, columns in (
                (flat[1], blas.leading[0], blas.strides[0], blas.transposes[0], blas.m, blas.k),
                (flat[0], blas.leading[1], blas.strides[1], blas.transposes[1], blas.k, blas.n)))  # fmt: skip
        result = out[b * blas.strides[2]:][: blas.leading[2] * blas.n].reshape(blas.n, blas.leading[2])
        result[:, : blas.m] = (first @ second).T
    np.testing.assert_array_equal(out.reshape(want.shape), want)


def column_major(memory, leading, is_transposed, rows, columns):
    """What BLAS reads: `rows` x `columns` after the transposition."""
    stored = (columns, rows) if is_transposed else (rows, columns)
    assert leading >= max(1, stored[0])
    matrix = np.array([[memory[j * leading + i] for j in range(stored[1])] for i in range(stored[0])])
    return matrix.T if is_transposed else matrix


def test_attentions_products_need_no_copies():
    """Heads between rows and columns are a stride: nothing is transposed before the product."""
    plain = jax.ShapeDtypeStruct((8, 16, 4), np.float32)
    module = compile_function(lambda q, k: jnp.einsum("bnd,bmd->bnm", q, k), plain, plain, device="host").fused
    (dot,) = [i for i in module.entry.instructions if i.opcode == "dot"]
    plan = plan_gemm(dot)
    assert (plan.batch, plan.m, plan.n, plan.k) == (8, 16, 16, 4)
    assert plan.lhs.order is None and plan.rhs.order is None and plan.rhs.is_transposed


def spd(n, dtype=np.float32):
    x = np.random.default_rng(n).standard_normal((n, n)).astype(dtype)
    return x @ x.T + n * np.eye(n, dtype=dtype)


special = np.array([3, np.nan, -0.0, 1, 0.0, -np.inf, np.nan, np.inf, -0.0, 1], np.float32)
LIBRARY_CALLS = {
    "fft": (lambda x: jnp.fft.fft(x + 0j), np.arange(3, dtype=np.float32)),
    "fft2": (jnp.fft.fft2, np.arange(24, dtype=np.complex64).reshape(2, 3, 4)),
    "ifft": (jnp.fft.ifft, np.arange(7, dtype=np.complex64)),
    "rfft": (jnp.fft.rfft, np.arange(9, dtype=np.float32)),
    "irfft": (lambda x: jnp.fft.irfft(x, 7), np.arange(4, dtype=np.complex64)),
    "rfft2": (jnp.fft.rfft2, np.arange(30, dtype=np.float32).reshape(5, 6)),
    "sort": (lambda x: lax.sort(x), special),
    "sort rows": (lambda x: lax.sort(x, dimension=0), np.random.default_rng(0).integers(-9, 9, (7, 5), np.int8)),
    "sort halves": (lambda x: lax.sort(x.astype(jnp.bfloat16)), special),
    "sort pairs": (lambda x: lax.sort((x, jnp.arange(10)), num_keys=1), special),
    "descending": (lambda x: jnp.sort(x, descending=True), special),
    "argsort": (jnp.argsort, special),
    "cholesky": (lax.linalg.cholesky, spd(5)),
    "cholesky of many": (lax.linalg.cholesky, np.stack([spd(3), spd(3) + 1])),
    "cholesky fails": (lax.linalg.cholesky, np.stack([spd(3), -spd(3)])),
    "cholesky empty": (lax.linalg.cholesky, np.zeros((0, 0), np.float32)),
    "solve": (lambda a: lax.linalg.triangular_solve(a, a + 1, left_side=True, lower=True), spd(4)),
    "solve upper": (lambda a: lax.linalg.triangular_solve(a, a[:, :1], left_side=True, transpose_a=True), spd(4)),
    "solve right": (lambda a: lax.linalg.triangular_solve(a, a + 1, lower=True), spd(4)),
    "solve unit": (lambda a: lax.linalg.triangular_solve(a, a, left_side=True, lower=True, unit_diagonal=True), spd(3)),
    "solve many": (lambda a: lax.linalg.triangular_solve(a, a, left_side=True, lower=True), np.stack([spd(3)] * 2)),
    "solve singular": (lambda a: lax.linalg.triangular_solve(a * 0, a, left_side=True, lower=True), spd(3)),
    "convolution": (lambda x: lax.conv(x, x[:1], (1, 1), "SAME"), np.ones((2, 1, 5, 5), np.float32)),
    "topk": (lambda x: lax.top_k(x, 3), -np.arange(9, dtype=np.float32)),
    "svd": (lambda x: jnp.linalg.svd(x, compute_uv=False), spd(4)),
    "while": (lambda x: lax.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 1, s[1] * 2), (0, x)), special),
    "cond": (lambda x: lax.cond(x[0] > 1, jnp.sin, jnp.cos, x), special),
    "switch": (lambda x: lax.switch(x[0].astype(int), [jnp.sin, jnp.cos, jnp.tan], x), special),
    "bits": (lambda x: lax.bitcast_convert_type(jnp.sin(x), jnp.uint8), special),
    "wide bits": (lambda x: lax.bitcast_convert_type(x.view(jnp.uint8).reshape(-1, 4), jnp.float32) + 1, special),
    "keys": (lambda x: jax.random.normal(jax.random.key(3), (5,)) + x[0], special),
    "key data": (lambda x: jax.random.key_data(jax.random.split(jax.random.key(3))), special),
    "scatter": (lambda x: x.at[jnp.array([1, 1, 99])].add(1), special),
    "barrier": (lambda x: lax.optimization_barrier((x, x + 1)), special),
}  # fmt: skip


@pytest.mark.parametrize("name", LIBRARY_CALLS)
def test_library_calls(name):
    fn, x = LIBRARY_CALLS[name]
    program, operands = executable_of(fn, [x])
    for got, want in zip(program(operands), expected_of(fn, [x]), strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        if "sort" in name:
            assert got.tobytes() == want.tobytes()    # NaNs last and equal zeros in order, bit for bit
        else:
            np.testing.assert_allclose(got.astype(np.complex128), want.astype(np.complex128), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name, call", [("sort", "numpy.sort"), ("rfft", "numpy.fft"), ("cholesky", "numpy.cholesky"),
                                        ("solve", "numpy.triangular-solve"), ("svd", "jax.custom-call")])  # fmt: skip
def test_the_library_is_asked_for_what_it_has(name, call):
    fn, x = LIBRARY_CALLS[name]
    assert call in [step.name for step in executable_of(fn, [x])[0].program.steps]


def test_values_of_64_bits_go_through_jax_as_such():
    with jax.enable_x64(True):
        x = np.arange(5, dtype=np.float64) * 1e-12 + 1
        program, operands = executable_of(lambda x: jnp.cumsum(jnp.sin(x)), [x])
    np.testing.assert_allclose(program(operands)[0], np.cumsum(np.sin(x)), rtol=1e-15)


def test_products_have_no_epilogues_of_a_library():
    """CuPy's library has none: what follows a product is a kernel."""
    workload = CATALOG["mlp_gelu"]
    program = compile_for_arrays(trace_closed(workload, "small"), Options(), UnbuiltBackend(), frozenset()).program
    assert sum(step.kernel is not None for step in program.steps) == 2 and len(program.steps) == 4


def test_cuda_prelude_is_what_kernels_are_built_with():
    assert "__syncthreads" in CUDA.prelude and array_backend.VECTOR_BYTES >= CUDA.vector_bytes
