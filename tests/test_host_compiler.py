"""HOST kernels are built once, in packs, and a kernel that cannot be built fails alone and says why."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from hlofuse.runtime import host_compiler
from hlofuse.runtime.host_compiler import (
    HOST_FLAGS,
    HostCompiler,
    HostSource,
    LoadedKernel,
    build_host_kernels,
    find_compiler,
)
from hlofuse.runtime.kernel_cache import KernelCache
from hlofuse.runtime.unit_builder import BuildFailure, KernelSource, pack_units

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on this machine")
PRELUDE = "static inline float twice(float x) { return 2 * x; }\n"


def scale_source(symbol: str, statement: str = "y[i] = twice(x[i]);") -> HostSource:
    """A kernel that applies `statement` to each element of a block of 8."""
    return HostSource(
        symbol,
        f'extern "C" void {symbol}(void** buffers, long long begin, long long end, unsigned* counters) {{\n'
        "  const float* x = (const float*)buffers[0];\n"
        "  float* y = (float*)buffers[1];\n"
        "  for (long long i = begin * 8; i < end * 8; ++i) {\n"
        f"    {statement}\n"
        "  }\n"
        "}\n",
    )


def run(kernel: LoadedKernel | BuildFailure, x: list[float]) -> list[float]:
    assert isinstance(kernel, LoadedKernel), kernel
    operand, result = (ctypes.c_float * len(x))(*x), (ctypes.c_float * len(x))()
    buffers = (ctypes.c_void_p * 2)(ctypes.addressof(operand), ctypes.addressof(result))
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_longlong, ctypes.c_longlong, ctypes.c_void_p)
    function(kernel.address)(buffers, 0, len(x) // 8, None)
    return list(result)


@pytest.fixture
def fresh_process(monkeypatch):
    """As if no kernel had been built in this process."""

    def forget():
        monkeypatch.setattr(host_compiler, "_outcomes", {})
        monkeypatch.setattr(host_compiler, "_libraries", {})

    forget()
    return forget


@pytest.fixture
def no_compilation(monkeypatch):
    """From the call on, every start of a compiler is an error."""

    def forbid():
        monkeypatch.setattr(host_compiler, "compile_library", lambda *_, **__: pytest.fail("a compiler was started"))

    return forbid


@needs_compiler
def test_a_kernel_runs(tmp_path, fresh_process):
    kernels = build_host_kernels([scale_source("k")], PRELUDE, KernelCache(tmp_path))
    assert run(kernels["k"], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]) == [2, 4, 6, 8, 10, 12, 14, 16]


@needs_compiler
def test_each_kernel_is_compiled_once_and_few_compilers_start(tmp_path, fresh_process, monkeypatch, no_compilation):
    units = []
    compile_library = host_compiler.compile_library

    def count(compiler, text, *rest):
        units.append(text)
        return compile_library(compiler, text, *rest)

    monkeypatch.setattr(host_compiler, "compile_library", count)
    monkeypatch.setattr(host_compiler, "available_cores", lambda: 2)
    sources = [scale_source(f"k{i}", f"y[i] = x[i] + {i};") for i in range(9)]
    kernels = build_host_kernels([*sources, *sources], PRELUDE, KernelCache(tmp_path))
    assert len(units) == 2
    assert all(sum(f"void {source.symbol}(" in unit for unit in units) == 1 for source in sources)
    assert [run(kernels[f"k{i}"], [0.0] * 8)[0] for i in range(9)] == list(range(9))

    no_compilation()
    assert build_host_kernels(sources, PRELUDE, KernelCache(tmp_path / "other")) == kernels  # of this process
    fresh_process()
    again = build_host_kernels(sources[3:5], PRELUDE, KernelCache(tmp_path))  # of the disk
    assert run(again["k4"], [0.0] * 8)[0] == 4


@needs_compiler
def test_prelude_and_flags_are_part_of_a_kernels_identity(tmp_path, fresh_process):
    source, cache = scale_source("k"), KernelCache(tmp_path)
    other_prelude = PRELUDE.replace("2 * x", "x / 2")
    assert run(build_host_kernels([source], PRELUDE, cache)["k"], [4.0] * 8)[0] == 8
    assert run(build_host_kernels([source], other_prelude, cache)["k"], [4.0] * 8)[0] == 2
    flagged = scale_source("f", "y[i] = FACTOR * x[i];")
    for factor in (3, 5):
        kernel = build_host_kernels([flagged], PRELUDE, cache, (*HOST_FLAGS, f"-DFACTOR={factor}"))["f"]
        assert run(kernel, [1.0] * 8)[0] == factor


@needs_compiler
def test_one_faulty_kernel_fails_alone_and_shows_its_line(tmp_path, fresh_process, no_compilation):
    sources = [scale_source("good"), scale_source("bad", "y[i] = undeclared(x[i]);"), scale_source("fine")]
    sources.append(scale_source("unlinked", "extern float nowhere(float); y[i] = nowhere(x[i]);"))
    kernels = build_host_kernels(sources, PRELUDE, KernelCache(tmp_path))
    assert run(kernels["good"], [1.0] * 8) == run(kernels["fine"], [1.0] * 8) == [2.0] * 8
    bad, unlinked = kernels["bad"], kernels["unlinked"]
    assert isinstance(bad, BuildFailure) and "bad.cpp:5" in bad.message and "undeclared" in bad.message
    assert isinstance(unlinked, BuildFailure) and "nowhere" in unlinked.message
    no_compilation()
    assert build_host_kernels(sources, PRELUDE, KernelCache(tmp_path)) == kernels


@needs_compiler
def test_a_kernel_under_another_name_is_a_failure(tmp_path, fresh_process):
    source = HostSource("missing", scale_source("present").text)
    failure = build_host_kernels([source], PRELUDE, KernelCache(tmp_path))["missing"]
    assert isinstance(failure, BuildFailure) and "missing" in failure.message


def test_two_kernels_of_one_name_are_a_mistake(tmp_path, fresh_process, monkeypatch):
    monkeypatch.setattr(host_compiler, "find_compiler", lambda: host_compiler.HostCompiler(("c++",), "any"))
    monkeypatch.setattr(host_compiler, "toolchain", lambda _: host_compiler.Toolchain((), False))
    with pytest.raises(ValueError, match="both named k"):
        build_host_kernels([scale_source("k"), scale_source("k", ";")], PRELUDE, KernelCache(tmp_path))


@needs_compiler
def test_a_truncated_library_harms_nobody_and_is_built_again(tmp_path, fresh_process):
    loaded = build_host_kernels([scale_source("k")], PRELUDE, KernelCache(tmp_path))["k"]
    for file in tmp_path.glob("*.bin"):
        os.truncate(file, file.stat().st_size // 2)
    assert run(loaded, [1.0] * 8) == [2.0] * 8
    fresh_process()
    kernel = build_host_kernels([scale_source("k")], PRELUDE, KernelCache(tmp_path))["k"]
    assert run(kernel, [1.0] * 8) == [2.0] * 8


@needs_compiler
def test_an_unusable_cache_directory_loses_no_call(tmp_path, fresh_process):
    (tmp_path / "file").write_text("")
    kernel = build_host_kernels([scale_source("k")], PRELUDE, KernelCache(tmp_path / "file"))["k"]
    assert run(kernel, [1.0] * 8) == [2.0] * 8


@needs_compiler
@pytest.mark.parametrize("what", ["cache", "temporary directory"])
def test_a_file_system_without_execution_loses_no_call(tmp_path, fresh_process, monkeypatch, what):
    noexec = tmp_path if what == "cache" else Path(tempfile.gettempdir())

    def refuse(path, load=ctypes.CDLL):
        if Path(path).parent == noexec:
            raise OSError(f"{path}: failed to map segment from shared object")
        return load(path)

    monkeypatch.setattr(host_compiler.ctypes, "CDLL", refuse)
    kernel = build_host_kernels([scale_source("k")], PRELUDE, KernelCache(tmp_path))["k"]
    assert run(kernel, [1.0] * 8) == [2.0] * 8


@needs_compiler
def test_threads_build_the_same_kernels_at_once(tmp_path, fresh_process):
    sources = [scale_source(f"k{i}", f"y[i] = x[i] * {i};") for i in range(4)]
    cache, results, start = KernelCache(tmp_path), [], threading.Barrier(4)

    def work():
        start.wait()
        results.append(build_host_kernels(sources, PRELUDE, cache))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and all(result == results[0] for result in results)
    assert run(results[0]["k3"], [1.0] * 8)[0] == 3


@needs_compiler
def test_two_processes_build_the_same_kernels_at_once(tmp_path):
    script = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[2]); from test_host_compiler import *\n"
        "sources = [scale_source(f'k{i}', f'y[i] = x[i] + {i};') for i in range(6)]\n"
        "kernels = build_host_kernels(sources, PRELUDE, KernelCache(pathlib.Path(sys.argv[1])))\n"
        "assert [run(kernels[f'k{i}'], [0.0] * 8)[0] for i in range(6)] == list(range(6))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parent)]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors


def test_without_a_compiler_every_kernel_says_what_to_install(tmp_path, fresh_process, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(host_compiler.importlib.util, "find_spec", lambda name: None)
    find_compiler.cache_clear()
    try:
        assert find_compiler() is None
        failure = build_host_kernels([scale_source("k")], PRELUDE, KernelCache(tmp_path))["k"]
        assert isinstance(failure, BuildFailure) and "install g++" in failure.message
    finally:
        monkeypatch.undo()
        find_compiler.cache_clear()


@needs_compiler
def test_a_compiler_that_does_not_work_is_passed_over(tmp_path, monkeypatch):
    broken = tmp_path / "broken-c++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o700)
    monkeypatch.setenv("CXX", f"{broken} -m64")
    find_compiler.cache_clear()
    try:
        found = find_compiler()
        assert found is not None and found.command[0] != str(broken)
    finally:
        find_compiler.cache_clear()


@needs_compiler
def test_vector_math_is_true_only_where_loops_call_it(tmp_path, fresh_process):
    compiler = find_compiler()
    assert compiler is not None
    prelude = (
        'extern "C" __attribute__((simd("notinbranch"))) float tanhf(float);\n'
        "static const int vector = HLOFUSE_VECTOR_MATH;\n"
    )
    kernels = build_host_kernels(
        [scale_source("flag", "y[i] = vector;"), scale_source("tanh_of", "y[i] = tanhf(x[i]);")],
        prelude,
        KernelCache(tmp_path),
    )
    has_vector_math = host_compiler.has_vector_math(compiler)
    assert run(kernels["flag"], [0.0] * 8)[0] == has_vector_math
    assert run(kernels["tanh_of"], [0.5] * 8)[0] == pytest.approx(0.46211716, rel=1e-6)
    assert has_vector_math == any(b"_ZGV" in file.read_bytes() for file in tmp_path.glob("*.bin"))


@needs_compiler
def test_values_are_not_traded_for_speed(tmp_path, fresh_process):
    statements = {
        "nan_test": "y[i] = x[i] != x[i] ? 1 : 0;",
        "signed_zero": "y[i] = 1 / (x[i] + 0.0f);",
        "no_contraction": "y[i] = x[i] * x[i] - 1.0f;",
    }
    kernels = build_host_kernels([scale_source(*item) for item in statements.items()], "", KernelCache(tmp_path))
    assert run(kernels["nan_test"], [float("nan")] * 8) == [1.0] * 8
    assert run(kernels["signed_zero"], [-0.0] * 8) == [float("inf")] * 8
    assert run(kernels["no_contraction"], [1 + 2**-12] * 8) == [2**-11] * 8  # fma would keep 2**-24


def test_units_are_balanced_by_length():
    sources = [KernelSource(f"k{i}", "x" * length) for i, length in enumerate([90, 10, 40, 30, 50, 20])]
    units = pack_units(sources, 2)
    assert sorted(source.symbol for unit in units for source in unit) == [f"k{i}" for i in range(6)]
    assert [sum(len(source.text) for source in unit) for unit in units] == [120, 120]
    assert len(pack_units(sources[:1], 8)) == 1
    assert pack_units([], 8) == []


def test_explain_and_kernels_say_what_could_not_be_built(monkeypatch):
    import jax

    import hlofuse
    from hlofuse.runtime import xla_runtime

    monkeypatch.setenv("HLOFUSE_STRICT", "0")
    monkeypatch.setattr(xla_runtime, "find_compiler", lambda: None)
    monkeypatch.setattr(xla_runtime, "_warned", set())
    with pytest.warns(hlofuse.HlofuseWarning, match="1 kernel.s. run as plain JAX: no C.. compiler"):
        compiled = hlofuse.jit(lambda a: a * 2 + 1).lower(jax.numpy.ones(400)).compile()
    assert [k.problem for k in compiled.kernels] == ["no C++ compiler was found"]
    assert compiled.explain().startswith("add_fusion runs through JAX: no C++ compiler was found")


def test_only_gcc_gets_gcc_s_flags():
    """Other compilers end with an error at a flag that they do not know."""
    gcc = HostCompiler(("g++",), "g++ (Debian) 14\nCopyright (C) 2024 Free Software Foundation, Inc.")
    assert gcc.own_flags
    assert not HostCompiler(("clang++",), "clang version 20.1.2").own_flags
    assert not set(gcc.own_flags) & set(HOST_FLAGS)
