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
from hlofuse.runtime.array_function import has_cupy

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
