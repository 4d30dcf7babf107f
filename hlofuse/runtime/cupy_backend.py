"""CuPy's arrays, streams and libraries under the array runtime: all that it calls of CuPy and of CUDA's driver.

What can be decided without a GPU is decided elsewhere, and tested on the NumPy twin (array_backend.py): this file
holds calls. Invariants: work goes to the caller's device and current stream, and to streams that wait for it and that
it waits for; results are CuPy's own memory (what JAX made is copied, and lives until the copy has run); a recorded
graph allocates nothing.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cupy
import jax
import jax.numpy as jnp
import numpy as np
from cupy.cuda import Device, Event, Stream, get_current_stream

from hlofuse.codegen.dialect import CUDA
from hlofuse.codegen.kernel import KernelText
from hlofuse.fusion.devices import nearest_device
from hlofuse.runtime.array_backend import VECTOR_BYTES, ArrayError, Replay
from hlofuse.runtime.gemm import Gemm, blas_arguments
from hlofuse.runtime.kernel_cache import default_cache
from hlofuse.runtime.launch_limits import launch_problem
from hlofuse.runtime.nvrtc import CudaBinary, CudaSource, compile_many
from hlofuse.runtime.unit_builder import BuildFailure, digest

# cudaDataType_t and cublasComputeType_t, as in their headers.
_CUDA_TYPES = {"float32": 0, "float64": 1, "float16": 2, "complex64": 4, "complex128": 5, "bfloat16": 14}
_COMPUTE_32F, _COMPUTE_64F, _COMPUTE_TF32 = 68, 70, 77
_GEMM_DEFAULT = -1
_PLAIN_DLPACK = frozenset({"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16",
                           "float32", "float64", "complex64", "complex128"})  # fmt: skip
OutOfMemory = cupy.cuda.memory.OutOfMemoryError


def backend_of(leaves: Sequence[Any]) -> CuPyBackend:
    """The backend of the device where the first array lies; of the current device where there is none."""
    device = next((x.device.id for x in leaves if isinstance(x, cupy.ndarray)), None)
    return _backend(cupy.cuda.runtime.getDevice() if device is None else device)


@functools.cache
def _backend(device: int) -> CuPyBackend:
    return CuPyBackend(device)


@dataclass(frozen=True)
class _CudaKernel:
    function: Any
    grid: tuple[int]
    block: tuple[int]
    dynamic_shared: int


class CuPyBackend:
    """One GPU."""

    name = "cupy"
    dialect = "cuda"
    platform = "cuda"
    module = cupy
    out_of_memory = OutOfMemory

    def __init__(self, device: int) -> None:
        properties = cupy.cuda.runtime.getDeviceProperties(device)
        self.device = Device(device)
        self.spec = nearest_device(properties["name"].decode(), f"sm_{self.device.compute_capability}",
                                   properties["multiProcessorCount"])
        self.shared_optin = int(properties["sharedMemPerBlockOptin"])
        self._local = threading.local()
        self._lock = threading.Lock()
        self._borrowed: deque[tuple[Event, Any]] = deque()    # JAX's memory that a stream may still read

    def key(self) -> Any:
        return self.device.id

    def stream_key(self) -> Any:
        stream = get_current_stream()
        # One number stands for every thread's own default stream.
        return (stream.ptr, threading.get_ident() if stream.ptr == 2 else 0)

    def device_scope(self) -> contextlib.AbstractContextManager[Any]:
        return Device(self.device.id)

    # ------------------------------------------------------------------------------------------ arrays

    def is_array(self, value: Any) -> bool:
        return isinstance(value, cupy.ndarray)

    def from_dlpack(self, value: Any) -> Any:
        return cupy.from_dlpack(value)

    def take_in(self, value: Any, dtype: np.dtype, writable: bool) -> Any:
        if not self.is_array(value):
            return cupy.asarray(np.asarray(value), dtype, order="C")
        if value.device.id != self.device.id:
            raise ArrayError(f"an array of shape {value.shape} is on GPU {value.device.id}, another argument on GPU "
                             f"{self.device.id}: all arrays of a call must be on one device")
        if value.dtype == dtype and value.flags.c_contiguous and value.data.ptr % VECTOR_BYTES == 0:
            return value
        return cupy.array(value, dtype, order="C")

    def allocate(self, size: int) -> Any:
        return cupy.empty(size, cupy.uint8)

    def release_memory(self) -> None:
        with self._lock:
            while self._borrowed:
                self._borrowed.popleft()[0].synchronize()
        cupy.get_default_memory_pool().free_all_blocks()

    def upload(self, value: np.ndarray) -> Any:
        return cupy.asarray(value, order="C")

    def address(self, array: Any) -> int:
        return array.data.ptr

    def zero(self, array: Any) -> None:
        array.data.memset_async(0, array.nbytes)

    def copy(self, operands: Sequence[Any], result: Any) -> None:
        result.data.copy_from_device_async(operands[0].data, result.nbytes)

    def transpose(self, order: Sequence[int], operands: Sequence[Any], result: Any) -> None:
        cupy.copyto(result, operands[0].transpose(order))

    # ------------------------------------------------------------------------------------------ kernels

    def build(self, texts: Sequence[KernelText]) -> Mapping[str, Any | BuildFailure]:
        sources = {t.symbol: CudaSource(t.symbol, t.code) for t in texts}
        built = compile_many(list(sources.values()), self.spec.arch, default_cache(), CUDA.prelude)
        return {t.symbol: self._load(t, built[t.symbol]) for t in texts}

    def _load(self, text: KernelText, binary: CudaBinary | BuildFailure) -> _CudaKernel | BuildFailure:
        if isinstance(binary, BuildFailure):
            return binary
        if (problem := launch_problem(text, self.shared_optin)) is not None:
            return BuildFailure(text.symbol, problem)
        key = "cubin " + digest(binary.cubin.hex())
        path = default_cache().get(key) or default_cache().put(key, binary.cubin)
        try:
            with self.device:
                raw = cupy.RawModule(path=str(path)).get_function(text.symbol)
                function = raw.kernel
                if text.dynamic_shared_bytes:    # beyond 48 KB only for who asks
                    raw.max_dynamic_shared_size_bytes = text.dynamic_shared_bytes
        except (cupy.cuda.driver.CUDADriverError, OSError) as error:
            return BuildFailure(text.symbol, f"the compiled kernel could not be loaded: {error}")
        return _CudaKernel(function, (text.blocks,), (text.threads,), text.dynamic_shared_bytes)

    def launch(self, kernel: _CudaKernel, addresses: Sequence[int], counters: int) -> None:
        if kernel.grid[0]:
            arguments = tuple(map(np.uint64, (*addresses, counters)))
            kernel.function(kernel.grid, kernel.block, arguments, kernel.dynamic_shared)

    # ------------------------------------------------------------------------------------------ libraries

    def has_gemm(self, lhs: np.dtype, rhs: np.dtype, result: np.dtype) -> bool:
        small = lhs.name in ("float16", "bfloat16") and result.name in (lhs.name, "float32")
        return lhs == rhs and (small or lhs == result and result.name in _CUDA_TYPES)

    def gemm(self, plan: Gemm, lhs: Any, rhs: Any, result: Any, precise: bool) -> None:
        # Late: without products it need not be installed.
        from cupy_backends.cuda.libs import cublas

        wide = result.dtype.name in ("float64", "complex128")
        fast = not precise and lhs.dtype.name in ("float32", "complex64")
        compute = _COMPUTE_64F if wide else _COMPUTE_TF32 if fast else _COMPUTE_32F
        scalar = result.dtype.type if result.dtype.kind == "c" or wide else np.float32
        one, zero = np.ones((), scalar), np.zeros((), scalar)
        handle = cupy.cuda.device.get_cublas_handle()
        mode = cublas.getPointerMode(handle)
        cublas.setPointerMode(handle, cublas.CUBLAS_POINTER_MODE_HOST)
        try:
            blas = blas_arguments(plan)
            first, second, out = ((x.data.ptr, _CUDA_TYPES[x.dtype.name], leading, stride) for x, leading, stride
                                  in zip((rhs, lhs, result), blas.leading, blas.strides, strict=True))  # fmt: skip
            cublas.gemmStridedBatchedEx(
                handle, int(blas.transposes[0]), int(blas.transposes[1]), blas.m, blas.n, blas.k, one.ctypes.data,
                *first, *second, zero.ctypes.data, *out, plan.batch, compute, _GEMM_DEFAULT)
        finally:
            cublas.setPointerMode(handle, mode)

    def solve_triangular(self, a: Any, b: Any, lower: bool, transpose: str, unit_diagonal: bool) -> Any:
        from cupyx.scipy.linalg import solve_triangular

        return solve_triangular(a, b, trans=transpose, lower=lower, unit_diagonal=unit_diagonal, check_finite=False)

    def cholesky(self, x: Any) -> Any:
        import cupyx

        with cupyx.errstate(linalg="raise"):
            return cupy.linalg.cholesky(x)

    # ------------------------------------------------------------------------------------------ JAX

    def jax_platform(self) -> str:
        return "cpu" if self._jax_device.platform == "cpu" else "cuda"

    def call_jax(self, function: Callable[..., Any], operands: Sequence[Any]) -> list[Any]:
        with jax.default_device(self._jax_device):
            return [self.from_jax(x) for x in function(*map(self.to_jax, operands))]

    @functools.cached_property
    def _jax_device(self) -> Any:
        """JAX's name of this GPU; its CPU where JAX has no GPUs, so that arrays travel through the host."""
        try:
            return next(d for d in jax.devices("cuda") if d.local_hardware_id == self.device.id)
        except (RuntimeError, StopIteration):
            return jax.devices("cpu")[0]

    def to_jax(self, array: Any) -> Any:
        if self._jax_device.platform == "cpu" or not array.size:
            return jax.device_put(cupy.asnumpy(array), self._jax_device)
        if array.dtype.name in _PLAIN_DLPACK:
            return jax.dlpack.from_dlpack(array)
        raw = jax.dlpack.from_dlpack(array.view(f"u{array.dtype.itemsize}"))
        return raw != 0 if array.dtype == np.bool_ else jax.lax.bitcast_convert_type(raw, array.dtype)

    def from_jax(self, value: Any) -> Any:
        if not isinstance(value, jax.Array) or next(iter(value.devices())).platform == "cpu" or not value.size:
            return cupy.asarray(np.asarray(value), order="C")
        with self._lock:
            while self._borrowed and self._borrowed[0][0].done:
                self._borrowed.popleft()
        dtype = np.dtype(value.dtype)
        if dtype.name not in _PLAIN_DLPACK:
            bits = np.dtype(f"u{dtype.itemsize}")
            value = value.astype(bits) if dtype == np.bool_ else jax.lax.bitcast_convert_type(value, jnp.dtype(bits))
        own = cupy.array(cupy.from_dlpack(value), copy=True, order="C").view(dtype)
        event = Event(disable_timing=True)
        event.record()
        self._borrowed.append((event, value))
        return own

    # ------------------------------------------------------------------------------------------ streams and graphs

    def issue(self, streams: Sequence[int], waits: Sequence[Sequence[int]], joined: Sequence[int],
              awaited: frozenset[int], steps: Sequence[Callable[[], None]]) -> None:
        if not any(streams):
            for step in steps:
                step()
            return
        ordered = [get_current_stream(), *self._side_streams(max(streams))]
        start = ordered[0].record(Event(disable_timing=True))
        for stream in ordered[1:]:
            stream.wait_event(start)
        events: dict[int, Event] = {}
        for number, step in enumerate(steps):
            stream = ordered[streams[number]]
            for other in waits[number]:
                stream.wait_event(events[other])
            with stream:
                step()
            if number in awaited:
                events[number] = stream.record(Event(disable_timing=True))
        for other in joined:
            ordered[0].wait_event(events[other])

    def _side_streams(self, count: int) -> list[Stream]:
        """This thread's own: another's work must not get into a graph that is being recorded."""
        streams = self._local.__dict__.setdefault("streams", [])
        while len(streams) < count:
            streams.append(Stream(non_blocking=True))
        return streams[:count]

    def can_replay(self) -> bool:
        return not get_current_stream().is_capturing()

    def capture(self, issue: Callable[[], None]) -> Replay | None:
        stream = self._local.__dict__.setdefault("capture", None) or Stream(non_blocking=True)
        self._local.capture = stream    # the caller's may be the default one, which cannot be recorded
        try:
            with stream:
                stream.begin_capture()
                try:
                    issue()
                finally:
                    graph = stream.end_capture()
        except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError, RuntimeError):
            return None
        return graph


def launch_on_stream(text: KernelText, stream: int, buffers: Sequence[int]) -> None:
    """Launches a kernel on a stream of another library, with its counters, if it has any, in the last buffer."""
    backend = backend_of(())
    kernel = loaded_kernel(backend.device.id, text)
    if isinstance(kernel, BuildFailure):
        raise ArrayError(f"{text.symbol}: {kernel.message}")
    *rest, counters = (*buffers, 0) if not text.counters else buffers
    with cupy.cuda.ExternalStream(stream):
        if text.counters:
            memory = cupy.cuda.UnownedMemory(counters, 4 * text.counters, None)
            cupy.cuda.MemoryPointer(memory, 0).memset_async(0, 4 * text.counters)
        backend.launch(kernel, rest, counters)


_by_digest: dict[tuple[int, str], Any] = {}


def loaded_kernel(device: int, text: KernelText) -> Any:
    """What `launch_on_stream` launches there."""
    key = device, text.digest
    if key not in _by_digest:
        _by_digest[key] = _backend(device).build([text])[text.symbol]
    return _by_digest[key]
