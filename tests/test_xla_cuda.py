"""CUDA kernels inside XLA's programs, as far as it goes without a GPU: the launch that a call makes, and whole programs
compiled ahead of time by XLA:GPU, with all of our calls in one command buffer."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np
import pytest

import hlofuse
from hlofuse.compiler import compile_function
from hlofuse.config import Options
from hlofuse.runtime import xla_cuda
from hlofuse.runtime.host_compiler import find_compiler
from hlofuse.runtime.nvrtc import nvrtc_available
from hlofuse.runtime.shim import shim_available
from hlofuse.runtime.unit_builder import BuildFailure
from hlofuse.runtime.xla_runtime import build_executable

RUNTIME = Path(hlofuse.__file__).with_name("runtime")

# A call of the handler with buffers of our own, and a driver that prints what it is asked for.
LAUNCH = """
#include "shim.c"
static int print_launch(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, void* stream, void** parameters, void** extra) {
  printf("launch %p grid %u %u %u block %u %u %u shared %u stream %p extra %p:", f, gx, gy, gz, bx, by, bz, shared,
         stream, (void*)extra);
  for (int i = 0; i <= BUFFERS; ++i) printf(" %p", *(void**)parameters[i]);
  printf("\\n");
  return FAILS;
}
static int print_fill(unsigned long long to, unsigned value, size_t count, void* stream) {
  printf("fill %llx with %u, %zu words, stream %p\\n", to, value, count, stream);
  return 0;
}
static int print_load(void** function, void* kernel) { return printf("load %p\\n", kernel), 0; }
static XLA_FFI_Error* stream_of(XLA_FFI_Stream_Get_Args* args) { args->stream = (void*)0x57; return NULL; }
static XLA_FFI_Error* failure(XLA_FFI_Error_Create_Args* args) {
  printf("error %d: %s\\n", (int)args->errc, args->message);
  return (XLA_FFI_Error*)1;
}
int main(void) {
  static XLA_FFI_Api api;
  api.XLA_FFI_Stream_Get = stream_of;
  api.XLA_FFI_Error_Create = failure;
  static XLA_FFI_Buffer buffers[BUFFERS];
  static void* pointers[BUFFERS];
  for (long i = 0; i < BUFFERS; ++i) buffers[i].data = (void*)(0x1000 + i), pointers[i] = &buffers[i];
  int64_t key = 42;
  XLA_FFI_Scalar scalar = {XLA_FFI_DataType_S64, &key};
  XLA_FFI_ByteSpan name = {"key", 3}, *names[] = {&name};
  void* values[] = {&scalar};
  XLA_FFI_AttrType types[] = {XLA_FFI_AttrType_SCALAR};
  XLA_FFI_CallFrame frame = {.api = &api,
                             .args = {.size = BUFFERS / 2, .args = pointers},
                             .rets = {.size = BUFFERS - BUFFERS / 2, .rets = pointers + BUFFERS / 2},
                             .attrs = {.size = 1, .types = types, .names = names, .attrs = values}};
  hlofuse_cuda_call(&frame);
  hlofuse_register_kernel(42, (void*)0xf00, BLOCKS, 256, COUNTERS, 65536);
  hlofuse_cuda_call(&frame);
  hlofuse_use_driver(print_launch, print_fill, print_load);
  hlofuse_cuda_initialize(&frame);
  hlofuse_cuda_call(&frame);
  XLA_FFI_Metadata metadata = {0};
  XLA_FFI_Metadata_Extension extension = {.extension_base = {.type = XLA_FFI_Extension_Metadata},
                                          .metadata = &metadata};
  frame.extension_start = &extension.extension_base;
  hlofuse_cuda_call(&frame);
  printf("traits %d\\n", (int)metadata.traits);
  metadata.traits = 7;
  hlofuse_call(&frame);
  printf("traits %d\\n", (int)metadata.traits);
}
"""


def run_launch(tmp_path, **macros: int) -> list[str]:
    source = tmp_path / "launch.c"
    source.write_text(LAUNCH)
    command = find_compiler().command
    defines = [f"-D{name}={value}" for name, value in ({"FAILS": 0, "BLOCKS": 9, "COUNTERS": 0} | macros).items()]
    subprocess.run([*command, "-x", "c", "-std=gnu11", "-fsanitize=undefined", *defines, f"-I{RUNTIME}",
                    f"-I{jax.ffi.include_dir()}", str(source), "-o", str(tmp_path / "launch")], check=True)  # fmt: skip
    return subprocess.run([tmp_path / "launch"], capture_output=True, text=True, check=True).stdout.splitlines()


needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C compiler")


@needs_compiler
@pytest.mark.parametrize("buffers", [3, 63, 64, 200])
def test_a_call_is_one_launch_on_xlas_stream(tmp_path, buffers):
    lines = run_launch(tmp_path, BUFFERS=buffers)
    assert lines[0].startswith("error 5: hlofuse: kernel '?' (hash 000000000000002a) is not loaded in this process")
    assert lines[1] == "error 9: hlofuse: no CUDA driver"
    assert lines[2] == "load 0xf00"
    pointers = " ".join(hex(0x1000 + i) for i in range(buffers))
    assert lines[3] == (f"launch 0xf00 grid 9 1 1 block 256 1 1 shared 65536 stream 0x57 extra (nil): {pointers} (nil)")
    assert lines[4:] == ["traits 1", "traits 0"]    # only the one on CUDA can be part of a command buffer


@needs_compiler
def test_counters_are_zeroed_before_the_launch(tmp_path):
    lines = run_launch(tmp_path, BUFFERS=4, COUNTERS=5)
    assert lines[3] == "fill 1003 with 0, 5 words, stream 0x57"
    assert lines[4].startswith("launch 0xf00") and lines[4].endswith("0x1002 0x1003 (nil)")


@needs_compiler
def test_nothing_is_launched_for_no_blocks_and_a_failure_has_a_name(tmp_path):
    assert run_launch(tmp_path, BUFFERS=3, BLOCKS=0)[1:] == ["traits 1", "traits 0"]
    lines = run_launch(tmp_path, BUFFERS=3, FAILS=700)
    assert lines[4] == "error 13: hlofuse: the launch of kernel '?' failed: CUDA driver error 700"


# ------------------------------------------------------------------------------------------------ programs


def lowered_text(fn, *args, **jit_arguments) -> str:
    return hlofuse.jit(fn, **jit_arguments).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


needs_toolchain = pytest.mark.skipif(nvrtc_available() is not None or shim_available("cuda") is not None,
                                     reason="no NVRTC, or no C compiler")  # fmt: skip


@needs_toolchain
def test_lowered_for_cuda_clusters_are_calls():
    x = jax.ShapeDtypeStruct((1 << 20,), np.float32)
    text = lowered_text(lambda x: (x * x).sum() + x, x, donate_argnums=0)
    assert text.count("custom_call @hlofuse_cuda_v1_") == 2
    assert "ui32>" in text    # the counters of the sum over all blocks


@needs_toolchain
def test_a_donated_operand_is_aliased_on_the_call():
    x = jax.ShapeDtypeStruct((4096,), np.float32)
    assert "output_operand_alias" in lowered_text(lambda x: jnp.sin(x) + 1, x, donate_argnums=0)
    assert "output_operand_alias" not in lowered_text(lambda x: jnp.sin(x) + 1, x)


@needs_toolchain
def test_a_cuda_kernel_that_does_not_build_runs_as_plain_jax(monkeypatch):
    def broken(sources, arch, cache, prelude):
        return {s.symbol: BuildFailure(s.symbol, "error: sm_90 is busy") for s in sources}

    monkeypatch.setattr(xla_cuda, "compile_many", broken)
    compilation = compile_function(lambda x: jnp.cos(x) * 7, jax.ShapeDtypeStruct((128,), np.float32), device="h200")
    with pytest.raises(hlofuse.HlofuseError, match="sm_90 is busy"):
        build_executable(compilation, "cuda")
    monkeypatch.setenv("HLOFUSE_STRICT", "0")
    with pytest.warns(hlofuse.HlofuseWarning, match="sm_90 is busy"):
        executable = build_executable(replace(compilation), "cuda")
    assert not executable.built and executable.kernels[0].problem == "error: sm_90 is busy"


def test_the_cost_model_of_a_program_ahead_of_time_is_an_h200s():
    assert xla_cuda.cuda_device().name == "h200" or xla_cuda._devices()
    assert Options().runtime is None


AHEAD = """
import json, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np, hlofuse
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
sys.path.insert(0, sys.argv[1])
from catalog import CATALOG

topology = topologies.get_topology_desc("topology", platform="cuda", target_config=TARGET, topology="1x1x1")
sharding = SingleDeviceSharding(topology.devices[0])

def thunks(name):
    # What XLA runs, by the kind of each thunk; those within a command buffer are indented.
    here = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
    avals = jax.tree.map(here, CATALOG[name].avals("full"))
    lowered = hlofuse.jit(CATALOG[name].fn).trace(*avals).lower(lowering_platforms=("cuda",))
    directory = Path(sys.argv[2], name)
    lowered.compile(compiler_options={"xla_gpu_graph_min_graph_size": 1, "xla_dump_to": str(directory)})
    (file,) = directory.glob("*.thunk_sequence_after_thunk_passes.txt")
    return {"calls": len(lowered.kernels), "thunks": file.read_text().splitlines()}

print(json.dumps({name: thunks(name) for name in sys.argv[3:]}))
"""

H200 = """
gpu_device_info { driver_version: "13.0.0" runtime_version: "13.0.0" threads_per_block_limit: 1024
  threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472 threads_per_core_limit: 2048
  core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 150000000000
  shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536 }
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""


def has_xla_gpu() -> bool:
    return importlib.util.find_spec("jax_cuda13_plugin") is not None


@needs_toolchain
@pytest.mark.skipif(not has_xla_gpu(), reason="XLA:GPU is not installed (extra compare)")
@pytest.mark.slow
def test_xla_puts_all_calls_into_one_command_buffer(tmp_path):
    names = ["layer_norm_vjp", "batch_norm_relu", "attention_vjp", "decoder_layer", "decoder_layer_grad"]
    code = AHEAD.replace("TARGET", repr(H200))
    result = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path), *names],
        capture_output=True, text=True, timeout=280,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_gpu_autotune_level=0"})  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    for name, found in json.loads(result.stdout.splitlines()[-1]).items():
        outside = [line for line in found["thunks"] if not line.startswith(" ") and "kCommandBuffer" not in line]
        inside = [line for line in found["thunks"] if line.startswith(" ") and "kCustomCall" in line]
        assert len(inside) == found["calls"] > 0, name
        assert not outside and len(found["thunks"]) - len([x for x in found["thunks"] if x.startswith(" ")]) == 1, name


class FakeGpu:
    compute_capability, device_kind, core_count, local_hardware_id = "9.0", "NVIDIA H200", 132, 0


@needs_toolchain
def test_without_a_c_compiler_cupy_launches_from_a_callback(monkeypatch):
    monkeypatch.setattr(xla_cuda, "shim_available", lambda platform: "no C compiler")
    x = jax.ShapeDtypeStruct((1 << 20,), np.float32)
    compilation = compile_function(lambda x: (x * x).sum(), x, device="h200")
    with pytest.raises(hlofuse.HlofuseError, match="no C compiler"):
        build_executable(compilation, "cuda")
    monkeypatch.setattr(xla_cuda, "_devices", lambda: (FakeGpu(),))
    monkeypatch.setattr(xla_cuda, "has_cupy", lambda: True)
    monkeypatch.setattr(xla_cuda, "_prepare", lambda text: None)
    executable = build_executable(compilation, "cuda")
    (kernel,) = executable.built.values()
    assert [s.element_type for s in kernel.extra] == ["u32"]
    call = jax.jit(lambda x: executable(x, donated=frozenset()))
    assert "xla_buffer_python_gpu_callback" in str(call.trace(x).lower(lowering_platforms=("cuda",)).as_text())
