"""Kernels inside JAX's runtime: what happens without a compiler, with a kernel that does not build, and to memory."""
from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hlofuse
from hlofuse import HlofuseWarning
from hlofuse.runtime import call_worth, xla_runtime
from hlofuse.runtime.unit_builder import BuildFailure


def gelu_sum(x):
    return jax.nn.gelu(x).sum(axis=1), jnp.tanh(x)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "HLOFUSE_STRICT": "0", **environment})


def test_without_a_compiler_everything_runs_with_one_warning(tmp_path):
    result = run_python("""
        import warnings, numpy as np, jax, hlofuse
        x = np.linspace(-1, 1, 12, dtype=np.float32)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            first = hlofuse.jit(lambda x: jax.nn.softmax(x) * 2)(x)
            second = hlofuse.jit(lambda x: jax.nn.gelu(x))(x)
        np.testing.assert_allclose(first, jax.nn.softmax(x) * 2, rtol=1e-6)
        np.testing.assert_allclose(second, jax.nn.gelu(x), rtol=1e-5, atol=1e-7)
        ours = [str(w.message) for w in seen if issubclass(w.category, hlofuse.HlofuseWarning)]
        assert len(ours) == 1, ours
        print(ours[0])
        """, PATH="", CXX="", CC="", HLOFUSE_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "C++ compiler" in result.stdout


def broken_builder(sources, prelude, cache):
    return {s.symbol: BuildFailure(s.symbol, "error: no such register") for s in sources}


def test_a_kernel_that_does_not_build_falls_back_with_one_warning(monkeypatch):
    monkeypatch.setattr(xla_runtime, "build_host_kernels", broken_builder)
    monkeypatch.setenv("HLOFUSE_STRICT", "0")
    x = np.random.default_rng(0).standard_normal((5, 40)).astype(np.float32)
    f = hlofuse.jit(lambda x: jnp.cos(x) * 3.0 + x)
    with pytest.warns(HlofuseWarning, match="no such register"):
        result = f(x)
    np.testing.assert_allclose(result, np.cos(x) * 3.0 + x, rtol=1e-5, atol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f(x)


def test_a_kernel_that_does_not_build_is_an_error_in_strict_mode(monkeypatch):
    monkeypatch.setattr(xla_runtime, "build_host_kernels", broken_builder)
    with pytest.raises(hlofuse.HlofuseError, match="no such register"):
        hlofuse.jit(lambda x: jnp.cos(x) * 5.0 + x)(np.ones(700, np.float32))


def test_results_are_the_same_bits_every_time_and_with_one_thread():
    code = """
        import numpy as np, hlofuse, jax
        x = np.random.default_rng(0).standard_normal((300, 5000)).astype(np.float32)
        f = hlofuse.jit(lambda x: (x.sum(), (x * x).sum(0), jax.nn.softmax(x).sum(1)))
        runs = {b"".join(np.asarray(r).tobytes() for r in f(x)) for _ in range(20)}
        assert len(runs) == 1
        print(hash(runs.pop()))
        """
    many = run_python(code, PYTHONHASHSEED="0", XLA_FLAGS="")
    one = run_python(code, PYTHONHASHSEED="0", XLA_FLAGS="--xla_cpu_multi_thread_eigen=false")
    assert many.returncode == 0, many.stderr
    assert many.stdout == one.stdout


def test_a_donated_operand_gives_its_memory_to_the_result():
    f = hlofuse.jit(lambda x, y: jnp.sin(x) + y, donate_argnums=0)
    x, y = jnp.ones(100_000), jnp.ones(100_000)
    before = x.unsafe_buffer_pointer()
    result = f(x, y)
    assert x.is_deleted()
    assert result.unsafe_buffer_pointer() == before
    np.testing.assert_allclose(result, np.sin(np.ones(100_000)) + 1, rtol=1e-6)


def test_inputs_that_are_not_donated_are_not_written():
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    original = x.copy()
    for g in (lambda x: jnp.sin(x) * 2, lambda x: jax.nn.softmax(x), lambda x: x.T + 1, lambda x: x.at[0].set(5.0)):
        hlofuse.jit(g)(x)
        np.testing.assert_array_equal(x, original)


def test_every_compiled_function_is_dumped(tmp_path):
    result = run_python("""
        import numpy as np, hlofuse
        def halve(x): return x * 0.5 + 1
        hlofuse.jit(halve)(np.ones(8, np.float32))
        """, HLOFUSE_DUMP_TO=str(tmp_path))
    assert result.returncode == 0, result.stderr
    names = [p.name for p in tmp_path.iterdir()]
    assert any("halve" in n and "optimized" in n for n in names), names


def test_kernels_say_what_they_are():
    compiled = hlofuse.jit(gelu_sum).lower(np.ones((6, 50), np.float32)).compile()
    assert compiled.kernels
    for kernel in compiled.kernels:
        assert set(kernel.sources) == {"cuda", "host"}
        assert "__global__" in kernel.sources["cuda"]
        blocks, threads = kernel.launch["cuda"]
        assert blocks >= 1 and 1 <= threads <= 1024
        assert kernel.registers > 0 and kernel.shared_bytes >= 0
    assert "predicted" in compiled.explain()


def test_memory_is_not_given_away_while_a_later_result_reads_it():
    def f(x, y):
        return y * 2.0, x + y, y - 1.0

    x, y = np.arange(5000, dtype=np.float32), np.linspace(0, 1, 5000, dtype=np.float32)
    results = hlofuse.jit(f, donate_argnums=(0, 1))(jnp.asarray(x), jnp.asarray(y))
    for got, want in zip(results, f(x, y), strict=True):
        np.testing.assert_array_equal(got, want)


def test_work_that_is_less_than_a_call_is_left_to_xla(monkeypatch):
    monkeypatch.setattr(call_worth, "CALL_WORK", 512)
    compiled = hlofuse.jit(lambda x: x + 1).lower(np.ones(8, np.float32)).compile()
    assert "less than a call" in compiled.kernels[0].problem
    assert "custom-call" not in compiled.as_text()
    assert hlofuse.jit(lambda x: x + 1).lower(np.ones(800, np.float32)).compile().kernels[0].problem is None
