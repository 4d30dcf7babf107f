"""NVRTC without a GPU: machine code, ptxas's own figures, and errors that show the line."""

from __future__ import annotations

import importlib.util

import pytest

from hlofuse.runtime import nvrtc
from hlofuse.runtime.kernel_cache import KernelCache
from hlofuse.runtime.nvrtc import CudaBinary, CudaSource, NvrtcError, compile_cuda, compile_many, parse_resources
from hlofuse.runtime.unit_builder import BuildFailure

needs_nvrtc = pytest.mark.skipif(nvrtc.nvrtc_available() is not None, reason="libnvrtc is not installed")
PRELUDE = "__device__ inline float relu(float x) { return x > 0 ? x : 0; }\n"


def relu_source(symbol: str, factor: int = 1) -> CudaSource:
    return CudaSource(
        symbol,
        f'extern "C" __global__ void {symbol}(const float* x, float* y) {{\n'
        "  int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
        f"  y[i] = relu(x[i]) * {factor};\n"
        "}\n",
    )


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a", "sm_100"])
def test_a_kernel_becomes_machine_code_with_its_figures(arch):
    binary = compile_cuda(
        'extern "C" __global__ void reverse(float* a) {\n'
        "  __shared__ float tile[64];\n"
        "  tile[threadIdx.x] = a[threadIdx.x];\n"
        "  __syncthreads();\n"
        "  a[threadIdx.x] = tile[63 - threadIdx.x];\n"
        "}\n"
        'extern "C" __global__ void one(float* a) { a[0] = 1; }\n',
        arch,
    )
    assert binary.cubin.startswith(b"\x7fELF")
    assert f".target {arch}" in binary.ptx and ".entry reverse" in binary.ptx
    assert binary.kernels.keys() == {"reverse", "one"}
    assert (
        binary.kernels["reverse"].shared_bytes >= 256 > binary.kernels["one"].shared_bytes
    )  # newer ones reserve 1 KiB
    for figures in binary.kernels.values():
        assert 4 <= figures.registers <= 32
        assert figures.spill_stores == figures.spill_loads == figures.stack_bytes == 0


@needs_nvrtc
def test_spills_and_stack_are_seen():
    values = 64
    body = "".join(f"  float v{i} = a[threadIdx.x + {i}];\n" for i in range(values))
    body += "  __syncthreads();\n"
    body += "".join(f"  a[threadIdx.x + {i}] = v{i} * v{(i * 7 + 3) % values};\n" for i in range(values))
    text = f'extern "C" __global__ void k(volatile float* a) {{\n{body}}}\n'
    roomy, tight = compile_cuda(text).kernels["k"], compile_cuda(text, options=("--maxrregcount=32",)).kernels["k"]
    assert roomy.registers > values and roomy.spill_stores == 0
    assert tight.registers <= 32 and tight.spill_stores > 0 and tight.spill_loads > 0 and tight.stack_bytes > 0


@needs_nvrtc
def test_arithmetic_is_not_contracted_and_subnormals_are_kept():
    ptx = nvrtc.compile_ptx('extern "C" __global__ void k(float* a) { a[0] = a[1] * a[2] + a[3] / a[4]; }')
    assert "mul.rn.f32" in ptx and "add.rn.f32" in ptx
    assert "fma" not in ptx and ".ftz" not in ptx


@needs_nvrtc
def test_an_error_shows_the_line_in_its_place():
    with pytest.raises(NvrtcError) as caught:
        compile_cuda('\nextern "C" __global__ void k(float* a) {\n  a[0] = undeclared;\n}\n')
    assert 'identifier "undeclared" is undefined' in str(caught.value)
    assert ">    3 |   a[0] = undeclared;\n     4 | }" in str(caught.value)


@needs_nvrtc
def test_an_unknown_architecture_lists_the_known_ones():
    with pytest.raises(NvrtcError, match="knows .*sm_90"):
        compile_cuda("", "sm_10")


@needs_nvrtc
def test_kernels_are_packed_and_cached(tmp_path, monkeypatch):
    sources = [relu_source(f"k{i}", i) for i in range(6)]
    binaries = compile_many([*sources, *sources], "sm_90", KernelCache(tmp_path), PRELUDE)
    assert binaries.keys() == {f"k{i}" for i in range(6)}
    assert len({id(binary) for binary in binaries.values()}) == 2
    for symbol, binary in binaries.items():
        assert isinstance(binary, CudaBinary) and binary.kernels[symbol].registers > 0

    monkeypatch.setattr(nvrtc, "_compile", lambda *_: pytest.fail("compiled again"))
    again = compile_many(sources[2:4], "sm_90", KernelCache(tmp_path), PRELUDE)
    assert again == {symbol: binaries[symbol] for symbol in ("k2", "k3")}


@needs_nvrtc
def test_architecture_and_prelude_are_part_of_a_kernels_identity(tmp_path):
    source, cache = relu_source("k"), KernelCache(tmp_path)
    first = compile_many([source], "sm_90", cache, PRELUDE)["k"]
    assert isinstance(first, CudaBinary)
    for arch, prelude in (("sm_80", PRELUDE), ("sm_90", PRELUDE.replace("x > 0", "x > 1"))):
        other = compile_many([source], arch, cache, prelude)["k"]
        assert isinstance(other, CudaBinary) and other.cubin != first.cubin and other.arch == arch


@needs_nvrtc
def test_one_faulty_kernel_fails_alone(tmp_path):
    sources = [relu_source("good"), CudaSource("bad", "\n\noops;\n"), relu_source("fine"), CudaSource("absent", "")]
    binaries = compile_many(sources, "sm_90", KernelCache(tmp_path), PRELUDE)
    assert isinstance(binaries["good"], CudaBinary) and isinstance(binaries["fine"], CudaBinary)
    bad, absent = binaries["bad"], binaries["absent"]
    assert isinstance(bad, BuildFailure) and "bad.cu(3)" in bad.message and ">    3 | oops;" in bad.message
    assert isinstance(absent, BuildFailure) and "absent" in absent.message


def test_without_nvrtc_the_reason_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(nvrtc.ctypes.util, "find_library", lambda name: None)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    nvrtc._library.cache_clear()
    try:
        reason = nvrtc.nvrtc_available()
        assert reason is not None and "pip install 'hlofuse[cuda13]'" in reason
        failure = compile_many([relu_source("k")], "sm_90", KernelCache(tmp_path), PRELUDE)["k"]
        assert failure == BuildFailure("k", reason)
        with pytest.raises(NvrtcError, match="pip install"):
            compile_cuda("")
    finally:
        nvrtc._library.cache_clear()


def test_the_report_of_ptxas_is_read_per_kernel():
    report = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'tail' for 'sm_90'
ptxas info    : Function properties for tail
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
ptxas info    : Compiling entry function 'head' for 'sm_90'
ptxas info    : Function properties for head
ptxas         .     16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 28 registers, used 1 barriers, 160 bytes cumulative stack size, 128 bytes smem
ptxas info    : Function properties for _Z1ffi
ptxas         .     99 bytes stack frame, 99 bytes spill stores, 99 bytes spill loads
"""
    tail, head = parse_resources(report)["tail"], parse_resources(report)["head"]
    assert (tail.registers, tail.spill_stores, tail.shared_bytes, tail.stack_bytes) == (8, 0, 0, 0)
    assert (head.registers, head.spill_stores, head.spill_loads) == (28, 12, 20)
    assert (head.shared_bytes, head.stack_bytes) == (128, 160)
