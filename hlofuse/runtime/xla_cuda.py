"""CUDA kernels inside XLA's programs: built for the devices that JAX has, loaded by the driver, launched by the shim.

Kernels are loaded once per process, for whatever context they run in, and stay. Without a GPU (a program compiled ahead
of time) they are built and named, and loaded by nobody. Without a C compiler CuPy launches them from a callback.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from hlofuse.codegen.dialect import CUDA
from hlofuse.codegen.kernel import KernelText
from hlofuse.codegen.values import EmitError
from hlofuse.fusion.devices import DeviceSpec, find_device, nearest_device
from hlofuse.hlo.module import Instruction
from hlofuse.hlo.shape import Shape
from hlofuse.runtime.array_function import has_cupy
from hlofuse.runtime.fused_program import XlaKernel, shim_call
from hlofuse.runtime.kernel_cache import default_cache
from hlofuse.runtime.launch_limits import launch_problem
from hlofuse.runtime.nvrtc import CudaBinary, CudaSource, compile_many
from hlofuse.runtime.shim import register_kernel, shim_available, shim_library
from hlofuse.runtime.unit_builder import BuildFailure
from hlofuse.runtime.xla_runtime import Built, complain

_AHEAD_OF_TIME = "h200"    # whose programs are compiled where there is no GPU
_MAX_DYNAMIC_SHARED = 8    # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def cuda_device() -> DeviceSpec:
    """The row of the GPU that JAX runs on."""
    devices = _devices()
    if not devices:
        return find_device(_AHEAD_OF_TIME)
    arch = f"sm_{str(devices[0].compute_capability).replace('.', '')}"
    return nearest_device(devices[0].device_kind, arch, getattr(devices[0], "core_count", 0))


@functools.cache
def _devices() -> tuple[Any, ...]:
    try:
        return tuple(jax.devices("cuda"))
    except RuntimeError:
        return ()


def build_cuda_kernels(parts: Sequence[Any]) -> Built:
    """As the host's, but every kernel is called, however small: what XLA would launch instead is no quicker."""
    texts: dict[Instruction, KernelText] = {}
    problems: dict[Instruction, str] = {}
    spec = cuda_device()
    for c in (c for part in parts for c in part.clusters):
        if c.segments:
            try:
                texts[c.instruction] = c.text_in("cuda")
            except EmitError as error:    # fused for a device that writes another dialect
                problems[c.instruction] = f"no CUDA kernel: {error}"
    reason = shim_available("cuda")
    launches_by_callback = reason is not None and has_cupy() and bool(_devices())
    if texts and reason is not None and not launches_by_callback:
        complain("cuda toolchain", f"{len(texts)} kernel(s) run as plain JAX: {reason}")
        return {}, problems | dict.fromkeys(texts, reason)
    sources = {t.symbol: CudaSource(t.symbol, t.code) for t in texts.values()}
    binaries = compile_many(list(sources.values()), spec.arch, default_cache(), CUDA.prelude)
    built: dict[Instruction, XlaKernel] = {}
    for instruction, text in texts.items():
        problem = _problem(text, binaries[text.symbol], spec)
        if problem is None:
            try:
                built[instruction] = (_kernel_of_callback(text) if launches_by_callback
                                      else _kernel_of_shim(text, binaries[text.symbol]))
                continue
            except DriverError as error:
                problem = str(error)
        complain(text.symbol, f"the kernel of {instruction.name} runs as plain JAX: {problem}")
        problems[instruction] = problem
    return built, problems


def _problem(text: KernelText, binary: CudaBinary | BuildFailure, spec: DeviceSpec) -> str | None:
    if isinstance(binary, BuildFailure):
        return binary.message
    if len({d.compute_capability for d in _devices()}) > 1:
        return "JAX has GPUs of several architectures"
    return launch_problem(text, spec.shared_optin)


def _counters(text: KernelText) -> tuple[Shape, ...]:
    return (Shape("u32", (text.counters,)),) if text.counters else ()


# ------------------------------------------------------------------------------------------------ by the shim


class DriverError(RuntimeError):
    """The CUDA driver did not load a kernel."""


def _kernel_of_shim(text: KernelText, binary: Any) -> XlaKernel:
    key = int(text.digest[:16], 16)
    if _devices():
        _load(key, text, binary.cubin)
    return XlaKernel(text, shim_call(key, text.symbol, "cuda"), _counters(text))


_lock = threading.Lock()
_kernels: dict[int, int] = {}    # CUkernel by key, for as long as the process lives


def _load(key: int, text: KernelText, cubin: bytes) -> None:
    with _lock:
        if key in _kernels:
            return
        driver = _driver()
        library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        nothing = (None, None, 0)
        _check(driver, "cuLibraryLoadData", ctypes.byref(library), cubin, *nothing, *nothing)
        _check(driver, "cuLibraryGetKernel", ctypes.byref(kernel), library, text.symbol.encode())
        if text.dynamic_shared_bytes:
            for device in _devices():
                number = ctypes.c_int()
                _check(driver, "cuDeviceGet", ctypes.byref(number), int(device.local_hardware_id))
                size = int(text.dynamic_shared_bytes)
                _check(driver, "cuKernelSetAttribute", _MAX_DYNAMIC_SHARED, size, kernel, number)
        register_kernel(key, kernel.value or 0, text.blocks, text.threads, text.counters, text.dynamic_shared_bytes)
        _kernels[key] = kernel.value or 0


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"the CUDA driver could not be loaded: {error}") from error
    _check(driver, "cuInit", 0)
    functions = (driver.cuLaunchKernel, driver.cuMemsetD32Async, driver.cuKernelGetFunction)
    shim_library().hlofuse_use_driver(*(ctypes.cast(f, ctypes.c_void_p) for f in functions))
    return driver


def _check(driver: ctypes.CDLL, function: str, *arguments: Any) -> None:
    status = getattr(driver, function)(*arguments)
    if status != 0:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(status, ctypes.byref(name))
        raise DriverError(f"{function} failed: {(name.value or b'?').decode()} ({status})")


# ------------------------------------------------------------------------------------------------ by a callback


def _prepare(text: KernelText) -> None:
    """Builds and loads a kernel on every device: the callback may run within a recording."""
    from hlofuse.runtime.cupy_backend import loaded_kernel

    for device in _devices():
        loaded_kernel(int(device.local_hardware_id), text)


def _kernel_of_callback(text: KernelText) -> XlaKernel:
    from jax.experimental.buffer_callback import buffer_callback

    _prepare(text)

    def launch(context: Any, results: Sequence[Any], *operands: Any) -> None:
        from hlofuse.runtime.cupy_backend import launch_on_stream

        buffers = [b.__cuda_array_interface__["data"][0] for b in (*operands, *results)]
        launch_on_stream(text, context.stream, buffers)

    def call(avals: Sequence[Any], operands: Sequence[Any], aliases: Mapping[int, int]) -> Sequence[Any]:
        return buffer_callback(launch, list(avals), input_output_aliases=dict(aliases),
                               command_buffer_compatible=True)(*operands)

    return XlaKernel(text, call, _counters(text))
