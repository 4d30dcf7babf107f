"""CuPy's side of the array runtime, as far as it goes without a GPU: what it calls exists. On a GPU, that it works."""

from __future__ import annotations

import ast
import functools
import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hlofuse
from hlofuse.runtime import array_function
from hlofuse.runtime.array_backend import ArrayError
from hlofuse.runtime.array_function import has_cupy
from hlofuse.runtime.gemm import Gemm, Matrix

pytestmark = pytest.mark.skipif(not has_cupy(), reason="CuPy is not installed (extra cuda12 or cuda13)")
SOURCE = Path(hlofuse.__file__).with_name("runtime") / "cupy_backend.py"


def gpu_count() -> int:
    import cupy

    try:
        return cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


@functools.cache
def has_gpu() -> bool:
    return has_cupy() and gpu_count() > 0


needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="no NVIDIA GPU")]


def chains(tree: ast.AST) -> set[str]:
    """The dotted names in a file that begin with a module of CuPy's."""
    found = set()
    for node in ast.walk(tree):
        names = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if names and isinstance(node, ast.Name) and node.id in ("cupy", "cupyx", "cublas"):
            found.add(".".join([node.id, *reversed(names)]))
    return found


def test_what_is_called_of_cupy_exists():
    missing = []
    cublas = pytest.importorskip("cupy_backends.cuda.libs.cublas", exc_type=ImportError)
    roots = {"cupy": importlib.import_module("cupy"), "cupyx": importlib.import_module("cupyx"), "cublas": cublas}
    names = chains(ast.parse(SOURCE.read_text()))
    assert "cublas.gemmStridedBatchedEx" in names and "cupy.RawModule" in names
    for name in sorted(names):
        root, *rest = name.split(".")
        value = roots[root]
        for part in rest:
            if not hasattr(value, part):
                missing.append(name)
                break
            value = getattr(value, part)
    assert not missing


def test_the_backend_is_imported_without_a_device():
    module = importlib.import_module("hlofuse.runtime.cupy_backend")
    assert module.CuPyBackend.dialect == "cuda"


def array_at(address: int, shape: tuple[int, ...], dtype: str = "float32", device: int = 0):
    """An array of CuPy's in memory that nobody has: enough for everything but reading it."""
    import cupy

    memory = cupy.cuda.UnownedMemory(address, 1 << 20, None, device)
    return cupy.ndarray(shape, dtype, memptr=cupy.cuda.MemoryPointer(memory, 0))


@pytest.fixture
def backend():
    """A backend that has not asked the driver for its device."""
    import cupy

    from hlofuse.runtime.cupy_backend import CuPyBackend

    backend = object.__new__(CuPyBackend)
    backend.device = cupy.cuda.Device(0)
    return backend


def test_arrays_are_taken_as_they_are_or_refused(backend):
    x = array_at(4096, (4, 6))
    assert backend.is_array(x) and array_function._is_cupy(x)
    assert backend.take_in(x, np.dtype(np.float32), writable=True) is x and backend.address(x) == 4096
    with pytest.raises(ArrayError, match="is on GPU 1, another argument on GPU 0"):
        backend.take_in(array_at(4096, (4, 6), device=1), np.dtype(np.float32), writable=False)
    assert array_function._extent(backend, x[::-1, 1:]) == (4100, 4096 + 96)


@pytest.mark.parametrize("view", [lambda x: x.T, lambda x: x[1:], lambda x: x[:, ::2]],
                         ids=["axes", "alignment", "gaps"])  # fmt: skip
def test_arrays_that_kernels_cannot_read_are_copied(backend, monkeypatch, view):
    import cupy

    copied = []
    monkeypatch.setattr(cupy, "array", lambda value, dtype, order: copied.append((dtype, order)) or "copy")
    assert backend.take_in(view(array_at(4096, (4, 6))), np.dtype(np.float32), writable=False) == "copy"
    assert copied == [(np.float32, "C")]


def test_a_launch_passes_pointers_and_counters(backend):
    from hlofuse.runtime.cupy_backend import _CudaKernel

    calls = []
    kernel = _CudaKernel(lambda *args: calls.append(args), (7,), (256,), 65536)
    backend.launch(kernel, [4096, 2**63 + 8], 12)
    ((grid, block, arguments, shared),) = calls
    assert (grid, block, shared) == ((7,), (256,), 65536)
    assert [int(a) for a in arguments] == [4096, 2**63 + 8, 12] and {a.itemsize for a in arguments} == {8}
    backend.launch(_CudaKernel(calls.append, (0,), (256,), 0), [], 0)    # no blocks: no launch
    assert len(calls) == 1


@pytest.mark.parametrize("dtype, precise, compute, kind", [
    ("float32", False, 77, 0), ("float32", True, 68, 0), ("float64", False, 70, 1), ("float16", False, 68, 2),
    ("bfloat16", False, 68, 14), ("complex64", True, 68, 4), ("complex128", False, 70, 5)])  # fmt: skip
def test_a_product_is_one_call_of_the_library(backend, monkeypatch, dtype, precise, compute, kind):
    import cupy

    cublas = pytest.importorskip("cupy_backends.cuda.libs.cublas", exc_type=ImportError)
    calls = []
    monkeypatch.setattr(cupy.cuda.device, "get_cublas_handle", lambda: 11)
    monkeypatch.setattr(cublas, "getPointerMode", lambda handle: 1)
    monkeypatch.setattr(cublas, "setPointerMode", lambda handle, mode: calls.append(mode))
    monkeypatch.setattr(cublas, "gemmStridedBatchedEx", lambda *args: calls.append(args))
    plan = Gemm(3, 5, 6, 7, Matrix(7, 35, False), Matrix(7, 42, True))
    lhs, rhs, out = (array_at(4096 * n, shape, cupy.dtype(dtype))
                     for n, shape in ((1, (3, 5, 7)), (2, (3, 6, 7)), (3, (3, 5, 6))))  # fmt: skip
    backend.gemm(plan, lhs, rhs, out, precise)
    host, (handle, *arguments), restored = calls
    assert (host, restored, handle) == (cublas.CUBLAS_POINTER_MODE_HOST, 1, 11)
    numbers = [a for n, a in enumerate(arguments) if n not in (5, 14)]    # the two factors
    assert numbers == [1, 0, 6, 5, 7, 8192, kind, 7, 42, 4096, kind, 7, 35, 12288, kind, 6, 30, 3, compute, -1]
    assert len(arguments) + 1 == 23    # as many as the function takes


class TestOnGpu:
    pytestmark = needs_gpu

    def test_values_streams_and_replays(self):
        import cupy

        f = hlofuse.jit(lambda x, w: (jax.nn.softmax(jnp.tanh(x @ w) * 2), (x * x).sum()))
        x, w = np.random.default_rng(0).standard_normal((2, 64, 64)).astype(np.float32)
        want = jax.jit(lambda x, w: (jax.nn.softmax(jnp.tanh(x @ w) * 2), (x * x).sum()))(x, w)
        on_gpu = cupy.asarray(x), cupy.asarray(w)
        for _ in range(5):
            with cupy.cuda.Stream():
                got = f(*on_gpu)
            for a, b in zip(got, want, strict=True):
                assert isinstance(a, cupy.ndarray)
                np.testing.assert_allclose(a.get(), b, rtol=1e-2, atol=1e-3)
