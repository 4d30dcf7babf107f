"""`hlofuse.jit(f, runtime="numpy")`: jax.jit's arguments and semantics on arrays that are not JAX's."""

from __future__ import annotations

import functools
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hlofuse
from hlofuse import api, config
from hlofuse.errors import UnknownNameError
from hlofuse.runtime import array_function
from hlofuse.runtime.array_backend import ArrayError, NumPyBackend

numpy_jit = functools.partial(hlofuse.jit, runtime="numpy")
X = np.linspace(-2, 2, 24, dtype=np.float32).reshape(4, 6)


def assert_like_jax(f, *args, **kwargs):
    got, want = numpy_jit(f)(*args, **kwargs), jax.jit(f)(*args, **kwargs)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert type(a) is np.ndarray and a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(a.astype(np.complex128), np.asarray(b).astype(np.complex128), rtol=2e-6, atol=1e-6)


CALLS = {
    "trees": (lambda d, *, scale: {"s": [d["a"] * scale, (d["b"].sum(),)]}, ({"a": X, "b": X},), {"scale": 2.0}),
    "a number is weakly typed": (lambda x, s: x * s, (X.astype(np.float16), 2.5), {}),
    "a NumPy number is not": (lambda x, s: x * s, (X.astype(np.float16), np.float32(2.5)), {}),
    "integers": (lambda x: x // 3 + x % 5, (np.arange(-9, 9),), {}),
    "64 bits without x64": (lambda x: x * 2, (np.arange(5.0),), {}),
    "booleans": (lambda x: ~x | (x.sum() > 2), (X > 0,), {}),
    "complex": (lambda x: jnp.conj(x) * x, (X + 1j * X,), {}),
    "halves": (lambda x: jnp.tanh(x) @ x.T, (X.astype(jnp.bfloat16),), {}),
    "empty": (lambda x: (x + 1, x.sum(0)), (np.zeros((0, 3), np.float32),), {}),
    "scalars": (lambda x: x + 1, (np.float32(3),), {}),
    "columns first": (lambda x: x * 2 + x.sum(0), (np.asfortranarray(X),), {}),
    "strided": (lambda x: jnp.sin(x), (X[:, ::-2],), {}),
    "read-only": (lambda x: jnp.sin(x), (np.broadcast_to(X[0], (3, 6)),), {}),
    "not aligned": (lambda x: jnp.sin(x) + 1, (np.ones(101, np.float32)[1:],), {}),
    "bytes in between": (lambda x: x + 1, (np.zeros(8, [("a", "i1"), ("b", "f4")])["b"],), {}),
    "JAX's arrays": (lambda x, y: x + y, (jnp.asarray(X), X), {}),
    "results of nothing": (lambda x: (jnp.ones(3), x, 7), (X,), {}),
    "equal results": (lambda x: (x + 1, x + 1, x), (X,), {}),
    "none": (lambda x, y: x if y is None else y, (X, None), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name):
    f, args, kwargs = CALLS[name]
    assert_like_jax(f, *args, **kwargs)


def test_x64():
    with jax.enable_x64(True):
        f = numpy_jit(lambda x: jnp.sin(x) * 2)
        assert f(np.arange(4.0)).dtype == np.float64
    assert f(np.arange(4.0)).dtype == np.float32


def test_static_arguments_are_part_of_the_signature():
    traces = []

    @numpy_jit(static_argnums=1, static_argnames="mode")
    def f(x, n, mode="a"):
        traces.append((n, mode))
        return x * n if mode == "a" else x + n

    assert f(X, 2)[0, 0] == -4 and f(X, 3)[0, 0] == -6 and f(X, n=3)[0, 0] == -6 and f(X, 3, mode="b")[0, 0] == 1
    assert f(2 * X, 2)[0, 0] == -8
    assert (2, "a") in traces and len(traces) <= 4
    with pytest.raises(ValueError, match="must be hashable"):
        f(X, [2])


def test_donated_arguments_may_be_written_and_no_others():
    f = numpy_jit(lambda x, y: (jnp.sin(x) + y, x.sum()), donate_argnums=0)
    x, y = X.copy(), X.copy()
    result, total = f(x, y)
    np.testing.assert_allclose(result, np.sin(X) + X, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(y, X)
    assert not np.shares_memory(result, y)


def test_a_donated_argument_lends_its_memory():
    x = X.copy()
    assert np.shares_memory(numpy_jit(lambda x: jnp.sin(x) * 2, donate_argnums=0)(x), x)


@pytest.mark.parametrize("case", ["twice", "overlapping", "read-only", "strided", "forwarded"])
def test_what_is_donated_but_cannot_be_written_is_copied(case):
    f = numpy_jit(lambda x, y: (jnp.sin(x) * 2, x, y), donate_argnums=0)
    memory = np.linspace(0, 1, 48, dtype=np.float32)
    x, y = {"twice": (memory[:24], memory[:24]), "overlapping": (memory[:24], memory[20:44]),
            "read-only": (memory[:24], memory[24:]), "strided": (memory[::2], memory[24:]),
            "forwarded": (memory[:24], memory[24:])}[case]  # fmt: skip
    if case == "read-only":
        x = x.view()
        x.flags.writeable = False
    old_x, old_y = x.copy(), y.copy()
    result, same_x, same_y = f(x, y)
    np.testing.assert_allclose(result, np.sin(old_x) * 2, rtol=1e-6)
    np.testing.assert_array_equal(same_x, old_x)
    np.testing.assert_array_equal(same_y, old_y)
    np.testing.assert_array_equal(y, old_y)
    if case == "read-only":
        np.testing.assert_array_equal(x, old_x)


def test_results_are_the_callers_own():
    f = numpy_jit(lambda x: (x, x + 1, x + 1, x.reshape(6, 4)))
    results = f(X)
    for n, r in enumerate(results):
        assert r.flags.writeable and not any(np.shares_memory(r, y) for y in (X, *results[:n]))


def test_keys_are_jaxs():
    key = jax.random.key(7)
    f = lambda k: (jax.random.normal(k, (3,)), jax.random.split(k), k)  # noqa: E731
    got, want = numpy_jit(f)(key), f(key)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    for a, b in zip(got[1:], want[1:], strict=True):
        assert a.dtype == b.dtype and (jax.random.key_data(a) == jax.random.key_data(b)).all()


def test_what_a_function_closes_over():
    table, weights = np.arange(6, dtype=np.float32), jnp.ones(6)
    np.testing.assert_allclose(numpy_jit(lambda x: x * table + weights)(X), X * table + 1, rtol=1e-6)
    assert type(numpy_jit(lambda x: (x + 1, weights))(X)[1]) is np.ndarray


def test_methods():
    class Model:
        scale = 3.0

        @functools.partial(hlofuse.jit, runtime="numpy", static_argnums=0)
        def __call__(self, x):
            return x * self.scale

    np.testing.assert_allclose(Model()(X), X * 3)


def test_within_jaxs_transformations_it_is_jaxs():
    f = numpy_jit(lambda x: jnp.sin(x).sum())
    gradient = jax.grad(f)(X)
    assert isinstance(gradient, jax.Array)
    np.testing.assert_allclose(gradient, np.cos(X), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(f)(X), np.sin(X).sum(1), rtol=1e-5, atol=1e-6)
    assert not hasattr(jax.grad(f), "lower")
    assert type(numpy_jit(jax.grad(f))(X)) is np.ndarray


def test_functions_with_effects_run_plain(capsys):
    def f(x):
        jax.debug.print("total {}", x.sum())
        return x * 2

    result = numpy_jit(f, donate_argnums=0)(X.copy())
    jax.effects_barrier()
    assert type(result) is np.ndarray and "total" in capsys.readouterr().out
    np.testing.assert_allclose(result, X * 2)


def test_disabled_jit():
    seen = []
    with jax.disable_jit():
        result = numpy_jit(lambda x: (seen.append(float(x[0, 0])), x * 2)[1])(X)
    assert seen == [-2.0] and type(result) is np.ndarray


def test_another_librarys_arrays_come_by_dlpack():
    class Foreign:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **kwargs):
            return self.array.__dlpack__(**kwargs)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    np.testing.assert_allclose(numpy_jit(lambda x, y: x + y)(Foreign(X), X), X + X)


def test_what_is_no_array_is_refused():
    with pytest.raises(TypeError, match="'abc' of type str is no array"):
        numpy_jit(lambda x, s: x)(X, "abc")
    with pytest.raises(TypeError):
        numpy_jit(lambda x: x)(np.array(["a"]))


def test_what_only_jax_has_is_refused():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(hlofuse.HlofuseError, match="in_shardings belong to JAX's own runtime"):
        numpy_jit(lambda x: x + 1, in_shardings=sharding)(X)


def test_options():
    with pytest.raises(UnknownNameError, match="did you mean 'numpy'"):
        hlofuse.jit(lambda x: x, runtime="nunpy")
    assert set(config.RUNTIMES) == {"xla", "cupy", "numpy"}
    few, many = (len(numpy_jit(lambda x: jnp.sin(x).sum() + jnp.cos(x), fusion=f).executable(X).program.steps)
                 for f in ("coloring", "none"))  # fmt: skip
    assert few < many


def test_an_executable_explains_itself():
    f = numpy_jit(lambda x: jax.nn.softmax(jnp.tanh(x @ x.T)))
    text = f.executable(X).explain()
    assert "steps on 1 stream(s)" in text and "bytes of temporary memory" in text and "predicted" in text
    assert f.executable(X).kernels[0].problem is None
    assert f.lower(X).compile().kernels


def test_the_optimizers_failure_is_a_warning(monkeypatch):
    def fail(closed, options, backend, donated):
        raise RuntimeError("no plan")

    monkeypatch.setattr(api, "_compile_for_arrays", fail)
    with pytest.raises(RuntimeError, match="no plan"):
        numpy_jit(lambda x: x + 1)(X)
    monkeypatch.setenv("HLOFUSE_STRICT", "0")
    f = numpy_jit(lambda x: x + 1)
    with pytest.warns(hlofuse.HlofuseWarning, match="no plan"):
        np.testing.assert_allclose(f(X), X + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_allclose(f(2 * X), 2 * X + 1)


def test_a_function_is_compiled_once_however_often_it_is_decorated(monkeypatch):
    def f(x, y):
        return x * 2 + y

    compiled = []
    compile_ = api._compile_for_arrays
    monkeypatch.setattr(api, "_compile_for_arrays", lambda *a: compiled.append(1) or compile_(*a))
    for _ in range(3):
        numpy_jit(f)(X, X)
    assert len(compiled) == 1
    x = X.copy()
    assert np.shares_memory(numpy_jit(f, donate_argnums=0)(x, X), x)
    assert not np.shares_memory(numpy_jit(f)(x, X), x)
    assert len(compiled) == 2
    numpy_jit(f).clear_cache()
    numpy_jit(f)(X, X)
    assert len(compiled) == 3


def test_threads():
    f = numpy_jit(lambda x: jax.nn.softmax(jnp.tanh(x @ x.T) @ x) * 3)
    inputs = [X * k for k in range(1, 9)]
    wanted = [f(x) for x in inputs]
    wrong = []

    def work(n):
        for _ in range(20):
            if f(inputs[n]).tobytes() != wanted[n].tobytes():
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


# ------------------------------------------------------------------------------------------------ which runtime


class FakeCuPyArray:
    """Named and behaving as CuPy's: JAX and NumPy refuse it."""

    def __init__(self, value, device=0):
        self.value, self.device = value, device
        self.shape, self.dtype = value.shape, value.dtype

    def __array__(self, *args, **kwargs):
        raise TypeError("Implicit conversion to a NumPy array is not allowed")


FakeCuPyArray.__name__, FakeCuPyArray.__module__ = "ndarray", "cupy"


class FakeCuPyBackend(NumPyBackend):
    name = "cupy"

    def is_array(self, value):
        return isinstance(value, FakeCuPyArray) or super().is_array(value)

    def take_in(self, value, dtype, writable):
        if isinstance(value, FakeCuPyArray) and value.device:
            raise ArrayError(f"an array is on GPU {value.device}")
        return super().take_in(getattr(value, "value", value), dtype, writable)


@pytest.fixture
def with_cupy(monkeypatch):
    backend = FakeCuPyBackend()
    monkeypatch.setattr(api, "has_cupy", lambda: True)
    monkeypatch.setattr(array_function.ArrayFunction, "_backend", lambda self, leaves: backend)


def test_without_cupy_a_function_is_jaxs_own():
    if array_function.has_cupy():
        pytest.skip("CuPy is installed")
    assert type(hlofuse.jit(lambda x: x)) is type(jax.jit(lambda x: x))
    with pytest.raises(hlofuse.HlofuseError, match=r"pip install 'hlofuse\[cuda13\]'"):
        hlofuse.jit(lambda x: x + 1, runtime="cupy")(X)


def test_arrays_choose_the_runtime(with_cupy):
    f = hlofuse.jit(lambda x, y: (jnp.sin(x["a"]) + y).sum())
    for x in (X, jnp.asarray(X)):
        assert isinstance(f({"a": x}, 1.0), jax.Array)
    for args in (({"a": X}, FakeCuPyArray(X)), ({"a": FakeCuPyArray(X)}, X), ({"a": FakeCuPyArray(X)}, 1.0)):
        assert type(f(*args)) is np.ndarray
    assert isinstance(f({"a": X}, 1.0), jax.Array)
    assert jax.grad(lambda x: f({"a": x}, 1.0))(X).shape == X.shape
    assert f.lower({"a": X}, 1.0).compile().kernels
    with pytest.raises(TypeError, match="valid JAX type|abstract array"):
        hlofuse.jit(lambda x: x + 1)("abc")
    assert type(hlofuse.jit(lambda x: x, runtime="xla")) is type(jax.jit(lambda x: x))


def test_arrays_of_two_devices_are_refused(with_cupy):
    with pytest.raises(ArrayError, match="on GPU 1"):
        hlofuse.jit(lambda x, y: x + y)(FakeCuPyArray(X), FakeCuPyArray(X, device=1))
