"""The FFI shim runs registered kernels inside XLA:CPU programs, over XLA's own threads."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from hlofuse.runtime import shim
from hlofuse.runtime.host_compiler import HostSource, LoadedKernel, build_host_kernels, find_compiler
from hlofuse.runtime.kernel_cache import KernelCache, default_cache
from hlofuse.runtime.shim import ShimError, call_kernel, register_kernel, shim_available

needs_shim = pytest.mark.skipif(find_compiler() is None, reason="no C compiler on this machine")
SIGNATURE = 'extern "C" void {}(void** buffers, long long begin, long long end, unsigned* counters)'
BLOCK = 1024

BODIES = {
    # y = 2 x + 1, a block is 1024 elements
    "affine": "const float* x = (const float*)buffers[0]; float* y = (float*)buffers[1];"
    "for (long long i = begin * 1024; i < end * 1024; ++i) y[i] = 2 * x[i] + 1;",
    # one block per element, for shapes of any size
    "negate": "const float* x = (const float*)buffers[0]; float* y = (float*)buffers[1];"
    "for (long long i = begin; i < end; ++i) y[i] = -x[i];",
    # 70 operands, 30 results: result k is the sum of operands plus k
    "many": "float total = 0; for (int i = 0; i < 70; ++i) total += *(const float*)buffers[i];"
    "for (int k = 0; k < 30; ++k) *(float*)buffers[70 + k] = total + k;",
    # each block adds its number to a result of its own; the last one to finish sums them up and counts calls of it
    "last_block": "float* partial = (float*)buffers[1]; float* total = (float*)buffers[2];"
    "for (long long b = begin; b < end; ++b) partial[b] = b + *(const float*)buffers[0];"
    "unsigned before = __atomic_fetch_add(&counters[0], (unsigned)(end - begin), __ATOMIC_ACQ_REL);"
    "if (before + (end - begin) == 1000) {"
    "  float sum = 0; for (int b = 0; b < 1000; ++b) sum += partial[b];"
    "  total[0] = sum; }",
    # a block of one element that takes a while
    "slow": "const float* x = (const float*)buffers[0]; float* y = (float*)buffers[1];"
    "for (long long b = begin; b < end; ++b) {"
    "  for (volatile int wait = 0; wait < 500000; ++wait) {}"
    "  y[b] = -x[b]; }",
    # which thread ran a block
    "thread": "unsigned* y = (unsigned*)buffers[0];"
    "for (long long b = begin; b < end; ++b) {"
    '  unsigned long self; __asm__("mov %%fs:0, %0" : "=r"(self));'
    "  for (volatile int wait = 0; wait < 200000; ++wait) {}"
    "  y[b] = (unsigned)(self >> 6); }",
}
keys = itertools.count(0x8000_0000_0000_0001)


def address_of(name: str) -> int:
    kernel = build_host_kernels(
        [HostSource(name, f"{SIGNATURE.format(name)} {{\n{BODIES[name]}\n}}\n")], "", default_cache()
    )[name]
    assert isinstance(kernel, LoadedKernel), kernel
    return kernel.address


def registered(name: str, blocks: int, grain: int = 1 << 30, counters: int = 0) -> int:
    key = next(keys)
    register_kernel(key, address_of(name), blocks, grain, counters)
    return key


def like(x) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def as_function(key: int, aliases: dict[int, int] | None = None):
    return lambda x: call_kernel([like(x)], [x], key, aliases, "as_function")[0]


@needs_shim
def test_it_is_available():
    assert shim_available() is None


@needs_shim
@pytest.mark.parametrize("grain", [1, 3, 64, 1000])
def test_blocks_are_computed_once_each_however_they_are_spread(grain):
    blocks = 64
    call = jax.jit(as_function(registered("affine", blocks, grain)))
    for start in range(20):
        x = jnp.arange(blocks * BLOCK, dtype=jnp.float32) + start
        np.testing.assert_array_equal(call(x), 2 * x + 1)


@needs_shim
def test_a_call_ends_after_its_last_block():
    call = jax.jit(as_function(registered("slow", 3, grain=1)))
    for i in range(30):
        assert call(jnp.full(3, i, jnp.float32)).tolist() == [-i] * 3


@needs_shim
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core")
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the kernel reads the thread's register of x86-64")
def test_several_threads_take_part():
    key = registered("thread", 64, grain=1)
    threads = jax.jit(lambda: call_kernel([jax.ShapeDtypeStruct((64,), jnp.uint32)], [], key)[0])
    assert any(len(set(np.asarray(threads()).tolist())) > 1 for _ in range(20))
    key = registered("thread", 64, grain=64)
    alone = jax.jit(lambda: call_kernel([jax.ShapeDtypeStruct((64,), jnp.uint32)], [], key)[0])
    assert len(set(np.asarray(alone()).tolist())) == 1


@needs_shim
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (2, 3, 4, 5)])
def test_shapes(shape):
    x = jnp.arange(np.prod(shape, dtype=int), dtype=jnp.float32).reshape(shape) + 1
    y = jax.jit(as_function(registered("negate", x.size)))(x)
    assert y.shape == shape and y.dtype == jnp.float32
    np.testing.assert_array_equal(y, -x)


@needs_shim
@pytest.mark.parametrize("grain", [1, 8])
def test_many_operands_and_results(grain):
    operands = [jnp.float32(i) for i in range(70)]
    key = registered("many", blocks=8, grain=grain)
    results = jax.jit(lambda *xs: call_kernel([like(xs[0])] * 30, xs, key))(*operands)
    assert [float(y) for y in results] == [sum(range(70)) + k for k in range(30)]


@needs_shim
@pytest.mark.parametrize("grain", [1, 7, 1000])
@pytest.mark.parametrize("counters", [1, 64, 65, 5000])
def test_the_last_block_can_finish(grain, counters):
    key = registered("last_block", blocks=1000, grain=grain, counters=counters)
    scalar, partials = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((1000,), jnp.float32)
    call = jax.jit(lambda x: call_kernel([partials, scalar], [x], key)[1])
    for i in range(20):  # counters are zero at the start of every call
        assert float(call(jnp.float32(i % 2))) == 999 * 500 + 1000 * (i % 2)


@needs_shim
def test_calls_from_several_threads_at_once():
    blocks = 32
    call = jax.jit(as_function(registered("affine", blocks, grain=1)))
    inputs = [jnp.full(blocks * BLOCK, i, jnp.float32) for i in range(4)]
    call(inputs[0])
    wrong = []

    def work(x):
        for _ in range(50):
            if not np.array_equal(call(x), 2 * x + 1):
                wrong.append(x[0])

    threads = [threading.Thread(target=work, args=(x,)) for x in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@needs_shim
def test_every_device_runs_its_shard():
    devices = jax.devices("cpu")
    if len(devices) < 2:
        pytest.skip("one CPU device")
    mesh = jax.make_mesh((len(devices),), ("x",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))
    per_device = as_function(registered("affine", blocks=8, grain=1))
    spec = PartitionSpec("x")
    call = jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    x = jnp.arange(len(devices) * 8 * BLOCK, dtype=jnp.float32)
    for _ in range(5):
        np.testing.assert_array_equal(call(x), 2 * x + 1)


@needs_shim
def test_a_donated_operand_gives_its_memory():
    blocks = 2048  # 8 MiB: large enough for page advice, which must leave memory in use alone
    call = jax.jit(as_function(registered("affine", blocks, grain=256), {0: 0}), donate_argnums=0)
    x = jnp.ones(blocks * BLOCK, jnp.float32)
    pointer = x.unsafe_buffer_pointer()
    y = call(x)
    assert x.is_deleted() and y.unsafe_buffer_pointer() == pointer
    assert float(y[0]) == float(y[-1]) == 3


@needs_shim
@pytest.mark.parametrize("blocks", [1024, 1025, 3000])
def test_large_fresh_results(blocks):
    call = jax.jit(as_function(registered("affine", blocks, grain=64)))
    x = jnp.arange(blocks * BLOCK, dtype=jnp.float32)
    for _ in range(3):
        np.testing.assert_array_equal(call(x), 2 * np.asarray(x) + 1)


@needs_shim
def test_the_compiler_may_merge_and_drop_calls():
    key = registered("negate", 4)
    function = as_function(key)
    text = jax.jit(lambda x: (function(x) + function(x), function(x + 1))[0]).lower(jnp.ones(4)).compile().as_text()
    assert str(text).count("custom-call(") == 1


@needs_shim
def test_an_unknown_kernel_is_an_error_that_names_it():
    call = jax.jit(lambda x: call_kernel([like(x)], [x], 0xFEED_0000_0000_BEEF, name="softmax_7")[0])
    with pytest.raises(jax.errors.JaxRuntimeError, match="NOT_FOUND.*softmax_7.*feed00000000beef"):
        jax.block_until_ready(call(jnp.ones(4)))


@needs_shim
def test_thousands_of_kernels_stay_callable():
    first = jax.jit(as_function(registered("negate", 4)))
    address = address_of("negate")
    for key in range(1 << 40, (1 << 40) + 5000):
        register_kernel(key, address, 4, 1, 0)
    last = jax.jit(as_function((1 << 40) + 4999))
    for call in (first, last):
        assert call(jnp.ones(4)).tolist() == [-1] * 4
    zero = jax.jit(as_function(0))
    register_kernel(0, address, 4, 1, 0)
    assert zero(jnp.ones(4)).tolist() == [-1] * 4


@needs_shim
def test_registering_twice():
    key, address = registered("negate", 4, grain=2), address_of("negate")
    register_kernel(key, address, 4, 2, 0)
    with pytest.raises(ValueError, match=f"{key:016x} is registered with another"):
        register_kernel(key, address, 5, 2, 0)


@needs_shim
@pytest.mark.parametrize("bad", [{"key": 1 << 64}, {"key": -1}, {"address": 0}, {"blocks": -1}, {"grain": 0}])
def test_what_is_not_a_launch_is_refused(bad):
    with pytest.raises(ValueError):
        register_kernel(**{"key": 1, "address": address_of("negate"), "blocks": 1, "grain": 1, "counters": 0, **bad})


@needs_shim
def test_a_compiled_program_in_jaxs_cache_never_runs_another_processs_address(tmp_path):
    """The second process takes the program from disk, with its kernel registered (runs) or not (says so)."""
    script = (
        "import sys, pathlib, jax, jax.numpy as jnp; sys.path.insert(0, sys.argv[2]); from test_shim import *\n"
        "jax.config.update('jax_compilation_cache_dir', sys.argv[1])\n"
        "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)\n"
        "jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)\n"
        "if sys.argv[3] == 'registered': register_kernel(42, address_of('negate'), 4, 1, 0)\n"
        "print(jax.jit(as_function(42))(jnp.ones(4)).tolist())\n"
    )
    outputs: list[subprocess.CompletedProcess[str]] = []
    entries: list[list[str]] = []
    for registering in ("registered", "registered", "not"):
        command = [sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parent), registering]
        outputs.append(subprocess.run(command, capture_output=True, text=True))
        entries.append(sorted(path.name for path in tmp_path.glob("*-cache")))
    assert entries[0] and entries == [entries[0]] * 3  # the later two took the program from disk
    assert [output.stdout for output in outputs[:2]] == ["[-1.0, -1.0, -1.0, -1.0]\n"] * 2, outputs[1].stderr
    assert outputs[2].returncode != 0 and "NOT_FOUND: hlofuse: kernel 'as_function'" in outputs[2].stderr


def test_without_a_compiler_the_reason_says_what_to_install(monkeypatch):
    monkeypatch.setattr(shim, "_loaded", {})
    monkeypatch.setattr(shim, "_libraries", [])
    monkeypatch.setattr(shim, "find_compiler", lambda: None)
    reason = shim_available()
    assert reason is not None and "install g++" in reason
    with pytest.raises(ShimError, match="install g++"):
        call_kernel([jax.ShapeDtypeStruct((), jnp.float32)], [], 1)


@needs_shim
def test_a_shim_that_does_not_compile_is_a_reason(tmp_path, monkeypatch):
    broken = tmp_path / "shim.c"
    broken.write_text("#error planted\n")
    monkeypatch.setattr(shim, "_loaded", {})
    monkeypatch.setattr(shim, "_libraries", [])
    monkeypatch.setattr(shim, "_SOURCE", broken)
    reason = shim_available()
    assert reason is not None and "planted" in reason


@needs_shim
def test_a_damaged_shim_in_the_cache_is_built_again(tmp_path):
    source = shim._SOURCE.read_text()
    shim._build(source, KernelCache(tmp_path))
    for file in tmp_path.glob("*.bin"):
        os.truncate(file, 1000)
    path = shim._build(source, KernelCache(tmp_path))
    assert ctypes.CDLL(str(path)).hlofuse_call
