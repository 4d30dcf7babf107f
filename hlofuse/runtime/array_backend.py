"""What the array runtime asks of the library whose arrays it works on: memory, kernels, streams, and a way into JAX.

`NumPyBackend` is the host: kernels of the HOST dialect, called by address. It is the twin of cupy_backend.py: the
executor is the same code on both, so what is tested on the one holds for the other up to the driver's calls.
Invariants: arrays that a backend takes in are dense, of JAX's canonical types and aligned for the kernels' vectors;
streams are numbers, 0 the caller's.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from hlofuse.codegen.dialect import HOST
from hlofuse.codegen.kernel import KernelText
from hlofuse.errors import HlofuseError
from hlofuse.fusion.devices import DeviceSpec, find_device
from hlofuse.runtime.gemm import Gemm, Matrix
from hlofuse.runtime.host_compiler import HostSource, LoadedKernel, build_host_kernels
from hlofuse.runtime.kernel_cache import default_cache
from hlofuse.runtime.unit_builder import BuildFailure

_INEXACT = frozenset({"float32", "float64", "complex64", "complex128"})
VECTOR_BYTES = 16    # what a kernel may read at once: XLA's buffers and both libraries' pools are aligned to more


class ArrayError(HlofuseError, ValueError):
    """An array that this function cannot take: on another device, or of a type that the library has no name for."""


class Replay(Protocol):
    """Work that was recorded once, with all its addresses."""

    def launch(self) -> None: ...


class ArrayBackend(Protocol):
    """One array library on one device. `dialect` names the kernels that it runs, `platform` JAX's lowering rules."""

    name: str
    dialect: str
    platform: str
    module: Any
    spec: DeviceSpec
    out_of_memory: type[Exception]

    def key(self) -> Any:
        """What tells this device apart from the others of its library."""

    def stream_key(self) -> Any:
        """What tells the caller's stream apart from others: work with one key runs in order."""

    def is_array(self, value: Any) -> bool: ...

    def from_dlpack(self, value: Any) -> Any:
        """Another library's array, its memory if it can be shared."""

    def take_in(self, value: Any, dtype: np.dtype, writable: bool) -> Any:
        """An array as the kernels want it, the same if it is so already; `writable`: it will be overwritten."""

    def allocate(self, size: int) -> Any:
        """So many bytes, as an array of u8."""

    def release_memory(self) -> None:
        """Gives back what only waits to be used again."""

    def upload(self, value: np.ndarray) -> Any: ...

    def address(self, array: Any) -> int: ...

    def zero(self, array: Any) -> None: ...

    def copy(self, operands: Sequence[Any], result: Any) -> None:
        """The one operand's elements into the result."""

    def transpose(self, order: Sequence[int], operands: Sequence[Any], result: Any) -> None:
        """The one operand with its axes in another order into the result."""

    def build(self, texts: Sequence[KernelText]) -> Mapping[str, Any | BuildFailure]:
        """Loaded kernels by symbol."""

    def launch(self, kernel: Any, addresses: Sequence[int], counters: int) -> None: ...

    def has_gemm(self, lhs: np.dtype, rhs: np.dtype, result: np.dtype) -> bool: ...

    def gemm(self, plan: Gemm, lhs: Any, rhs: Any, result: Any, precise: bool) -> None:
        """`precise`: f32 is computed as such, not in fewer bits."""

    def solve_triangular(self, a: Any, b: Any, lower: bool, transpose: str, unit_diagonal: bool) -> Any:
        """A numpy.linalg.LinAlgError where there is no answer; so is one of `cholesky`."""

    def cholesky(self, x: Any) -> Any: ...

    def jax_platform(self) -> str:
        """Where `call_jax` runs, "cpu" or "cuda"."""

    def call_jax(self, function: Callable[..., Any], operands: Sequence[Any]) -> list[Any]:
        """A jitted function on arrays of this backend; its results are arrays of this backend that alias no operand."""

    def to_jax(self, array: Any) -> Any: ...

    def from_jax(self, value: Any) -> Any:
        """A JAX array's elements in memory of this library."""

    def device_scope(self) -> contextlib.AbstractContextManager[Any]: ...

    def issue(self, streams: Sequence[int], waits: Sequence[Sequence[int]], joined: Sequence[int],
              awaited: frozenset[int], steps: Sequence[Callable[[], None]]) -> None:
        """Runs the steps in order on their streams; see `schedule.Schedule`."""

    def can_replay(self) -> bool:
        """Whether recorded work may be launched here: not while the caller records work of its own."""

    def capture(self, issue: Callable[[], None]) -> Replay | None:
        """Records what `issue` launches instead of running it; None where that is not possible."""


class NumPyBackend:
    """NumPy's arrays, kernels of the HOST dialect on the calling thread."""

    name = "numpy"
    dialect = "host"
    platform = "cpu"
    module = np
    out_of_memory = MemoryError

    def __init__(self, records: bool = False) -> None:
        """`records`: work is recorded and replayed as on a GPU, where that saves launches; here it is for tests."""
        self.spec = find_device("host")
        self.records = records
        self._recording = threading.local()

    def key(self) -> Any:
        return None

    def stream_key(self) -> Any:
        return None

    def is_array(self, value: Any) -> bool:
        return isinstance(value, np.ndarray | np.generic)

    def from_dlpack(self, value: Any) -> np.ndarray:
        return np.from_dlpack(value)

    def take_in(self, value: Any, dtype: np.dtype, writable: bool) -> np.ndarray:
        array = np.asarray(value)
        fits = (array.dtype == dtype and array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative
                and self.address(array) % VECTOR_BYTES == 0 and (array.flags.writeable or not writable))
        if fits:
            return array
        return np.array(array, dtype, order="C", ndmin=array.ndim, subok=False)

    def allocate(self, size: int) -> np.ndarray:
        return np.empty(size, np.uint8)

    def release_memory(self) -> None:
        """NumPy keeps none."""

    def upload(self, value: np.ndarray) -> np.ndarray:
        return self.take_in(value, value.dtype, writable=False)

    def address(self, array: np.ndarray) -> int:
        return array.__array_interface__["data"][0]

    def zero(self, array: np.ndarray) -> None:
        at = _Place(self, array)
        self._do(lambda: at.array.fill(0))

    def copy(self, operands: Sequence[Any], result: np.ndarray) -> None:
        source, target = _Place(self, operands[0]), _Place(self, result)
        self._do(lambda: np.copyto(target.array, source.array))

    def transpose(self, order: Sequence[int], operands: Sequence[Any], result: np.ndarray) -> None:
        source, target = _Place(self, operands[0]), _Place(self, result)
        self._do(lambda: np.copyto(target.array, source.array.transpose(order)))

    def build(self, texts: Sequence[KernelText]) -> Mapping[str, Any | BuildFailure]:
        sources = {t.symbol: HostSource(t.symbol, t.code) for t in texts}
        loaded = build_host_kernels(list(sources.values()), HOST.prelude, default_cache())
        blocks = {t.symbol: t.blocks for t in texts}
        return {symbol: (_HostKernel(kernel.address, blocks[symbol]) if isinstance(kernel, LoadedKernel) else kernel)
                for symbol, kernel in loaded.items()}

    def launch(self, kernel: _HostKernel, addresses: Sequence[int], counters: int) -> None:
        buffers = (ctypes.c_void_p * len(addresses))(*addresses)
        self._do(lambda: kernel.function(buffers, 0, kernel.blocks, counters))

    def has_gemm(self, lhs: np.dtype, rhs: np.dtype, result: np.dtype) -> bool:
        small = lhs.name in ("float16", "bfloat16") and result.name in (lhs.name, "float32")
        return lhs == rhs and (small or lhs == result and result.name in _INEXACT)

    def gemm(self, plan: Gemm, lhs: np.ndarray, rhs: np.ndarray, result: np.ndarray, precise: bool) -> None:
        left, right, out = _Place(self, lhs), _Place(self, rhs), _Place(self, result)

        def multiply() -> None:
            a = strided(left.array, plan.lhs, plan.batch, plan.m, plan.k)
            b = strided(right.array, plan.rhs, plan.batch, plan.k, plan.n)
            if operand_type.itemsize == 2:    # as the matrix units: sums are f32
                a, b = a.astype(np.float32), b.astype(np.float32)
            np.copyto(out.array.reshape(plan.batch, plan.m, plan.n), np.matmul(a, b), casting="unsafe")

        operand_type = lhs.dtype
        self._do(multiply)

    def solve_triangular(self, a: Any, b: Any, lower: bool, transpose: str, unit_diagonal: bool) -> Any:
        from scipy.linalg import solve_triangular

        return solve_triangular(a, b, trans=transpose, lower=lower, unit_diagonal=unit_diagonal, check_finite=False)

    def cholesky(self, x: Any) -> Any:
        return np.linalg.cholesky(x)

    def jax_platform(self) -> str:
        return "cpu"

    def call_jax(self, function: Callable[..., Any], operands: Sequence[Any]) -> list[Any]:
        with jax.default_device(jax.devices("cpu")[0]):
            # The memory of the operands is used again: nothing may read it after this call.
            results = jax.block_until_ready(function(*operands))
        return [self.from_jax(x) for x in results]

    def to_jax(self, array: Any) -> Any:
        return jax.device_put(array, jax.devices("cpu")[0])

    def from_jax(self, value: Any) -> Any:
        return np.array(value, order="C")

    def device_scope(self) -> contextlib.AbstractContextManager[Any]:
        return np.errstate(all="ignore")    # infinities and NaNs are values

    def issue(self, streams: Sequence[int], waits: Sequence[Sequence[int]], joined: Sequence[int],
              awaited: frozenset[int], steps: Sequence[Callable[[], None]]) -> None:
        for step in steps:    # one after another is an order that every schedule allows
            step()

    def can_replay(self) -> bool:
        return self.records

    def capture(self, issue: Callable[[], None]) -> Replay | None:
        if not self.records:
            return None
        tape: list[Callable[[], None]] = []
        self._recording.tape = tape
        try:
            issue()
        finally:
            self._recording.tape = None
        return _Tape(tuple(tape))

    def _do(self, work: Callable[[], Any]) -> None:
        tape = getattr(self._recording, "tape", None)
        if tape is None:
            work()
        else:
            tape.append(work)


class _HostKernel:
    """A loaded HOST kernel: `function(buffers, begin, end, counters)`."""

    _TYPE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_longlong, ctypes.c_longlong, ctypes.c_void_p)

    def __init__(self, address: int, blocks: int) -> None:
        self.function = self._TYPE(address)
        self.blocks = blocks


class _Place:
    """An array as an address: what is recorded must not keep the memory of a call alive."""

    def __init__(self, backend: NumPyBackend, array: np.ndarray) -> None:
        self.address, self.dtype, self.shape, self.size = backend.address(array), array.dtype, array.shape, array.nbytes

    @property
    def array(self) -> np.ndarray:
        memory = (ctypes.c_byte * self.size).from_address(self.address)
        return np.ctypeslib.as_array(memory).view(self.dtype).reshape(self.shape)


class _Tape:
    def __init__(self, work: Sequence[Callable[[], None]]) -> None:
        self.work = work

    def launch(self) -> None:
        for do in self.work:
            do()


def strided(array: Any, matrix: Matrix, batch: int, rows: int, columns: int) -> Any:
    """The operand of a product as a dense-in-name array of batch, rows and columns, wherever its elements lie."""
    size = array.dtype.itemsize
    apart = (1, matrix.rows) if matrix.is_transposed else (matrix.rows, 1)
    strides = (matrix.batch * size, *(size * s for s in apart))
    return np.lib.stride_tricks.as_strided(array.reshape(-1), (batch, rows, columns), strides)
