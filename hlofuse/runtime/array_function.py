"""A function on the arrays of CuPy or NumPy: `jax.jit`'s arguments, semantics and caching, but no array of JAX's.

JAX traces the function and says what is static, donated and weakly typed; a program is built for each signature and
device, and run by array_runtime.py. Invariants: results are new arrays of the library that the arguments came from;
an argument is written only if it is donated, dense, and overlaps no other. Where the program cannot be built, JAX runs
the function on copies of the arrays.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from ..config import Options, is_strict
from ..errors import HlofuseError, HlofuseWarning
from ..frontend import jax_compat
from ..frontend.trace import Argument, Computed, TracedFunction, trace_jitted

_SCALARS = (bool, int, float, complex)
_KNOWN = (*_SCALARS, jax.Array, np.ndarray, np.generic)
_OF_JAX = frozenset({"in_shardings", "out_shardings", "device", "backend", "compiler_options"})
CUPY_HINT = "CuPy is not installed: pip install 'hlofuse[cuda13]' (or 'hlofuse[cuda12]', by your driver's CUDA version)"

# compile(closed, options, backend, donated operands) gives what `executable` returns.
Compile = Callable[[Any, Options, Any, frozenset[int]], Any]


@functools.cache
def has_cupy() -> bool:
    return importlib.util.find_spec("cupy") is not None


class _Split(NamedTuple):
    """Arguments: what of them is static, and the leaves and tree of the others."""

    fixed: Any
    leaves: list[Any]
    tree: Any


_Signature = tuple[tuple[int, ...], Any, bool]    # of a leaf: shape, type, whether that is weak


@dataclass(frozen=True)
class _Specialization:
    """A traced signature and its program; `executable` is None where JAX runs it, for `reason`. By operand `captured`
    (what the function closed over), by leaf `types` (of what holds it) and `donated`."""

    traced: TracedFunction
    executable: Any
    reason: str | None = None
    captured: Sequence[Any] = ()
    types: Sequence[np.dtype] = ()
    donated: Sequence[bool] = ()


class ArrayFunction:
    """As what `jax.jit(f)` returns, but takes and gives arrays of one library (`options.runtime`).

    Called within a trace of JAX (under grad, vmap or jit), it is the function that JAX's own runtime runs.
    """

    __name__: str

    def __init__(self, f: Callable, options: Options, jitted: Any, jit_arguments: Mapping[str, Any],
                 compile_closed: Compile, programs: dict[Any, _Specialization]) -> None:
        """`jitted` is the function of JAX's own runtime; `programs` belong to `f` and the options."""
        functools.update_wrapper(self, f, updated=())
        self._options = options
        self._jitted = jitted
        kept = {name: value for name, value in jit_arguments.items() if not name.startswith("donate_")}
        self._plain, self._traceable = jax.jit(f, **kept), jax.jit(f, **jit_arguments)
        self._facts = jax_compat.argument_facts(self._traceable)
        self._refused = sorted(_OF_JAX & {name for name, value in jit_arguments.items() if value is not None})
        self._compile = compile_closed
        self._known = programs
        self._lock = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        split = self._split(args, kwargs)
        if any(isinstance(x, jax.core.Tracer) for x in split.leaves):
            return self._jitted(*args, **kwargs)
        if self._refused:
            names = ", ".join(self._refused)
            raise HlofuseError(f"{self.__name__}: {names} belong to JAX's own runtime, and its arrays")
        backend = self._backend(split.leaves)
        if jax_compat.is_jit_disabled():
            return self._run_plain(backend, args, kwargs)
        with backend.device_scope():
            leaves = [x if isinstance(x, _KNOWN) or backend.is_array(x) else _foreign(backend, x) for x in split.leaves]
            found = self._specialize(backend, split, leaves, args, kwargs)
            if found.executable is None:
                return self._run_plain(backend, args, kwargs)
            return self._run(backend, found, leaves)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(f).lower`: the program in JAX's own runtime."""
        return self._jitted.lower(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        return self._jitted.trace(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        return self._jitted.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        with self._lock:
            self._known.clear()
        self._jitted.clear_cache()

    def executable(self, *args: Any, **kwargs: Any) -> Any:
        """The program for such arguments, with `.kernels`, `.explain()` and `.program`; None where JAX runs them."""
        split = self._split(args, kwargs)
        backend = self._backend(split.leaves)
        with backend.device_scope():
            return self._specialize(backend, split, split.leaves, args, kwargs).executable

    # ------------------------------------------------------------------------------------------ a call

    def _run(self, backend: Any, found: _Specialization, leaves: Sequence[Any]) -> Any:
        traced = found.traced
        arrays = [backend.take_in(_physical(x), dtype, is_written)
                  for x, dtype, is_written in zip(leaves, found.types, found.donated, strict=True)]
        # Before the program runs, which may overwrite what is given away.
        forwarded = [None if isinstance(r, Computed) else _forwarded(backend, r.value, leaves, arrays)
                     for r in traced.results]
        operands = [arrays[o.index] if isinstance(o, Argument) else found.captured[n]
                    for n, o in enumerate(traced.operands)]
        if any(found.donated):
            _part_donated(backend, operands, traced.operands, leaves)
        results = found.executable(operands)
        computed = [_with_own_type(backend, x, aval)
                    for x, aval in zip(results, traced.closed.out_avals, strict=True)]
        taken: set[int] = set()
        values = []
        for r, value in zip(traced.results, forwarded, strict=True):
            if isinstance(r, Computed):
                value = computed[r.index]
                if r.index in taken and backend.is_array(value):
                    value = value.copy()    # equal results are one computation, but arrays of their own
                taken.add(r.index)
            values.append(value)
        return jax.tree.unflatten(traced.out_tree, values)

    def _run_plain(self, backend: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        static = set(self._static_positions(len(args)))
        args = [x if n in static else jax.tree.map(self._for_jax(backend), x) for n, x in enumerate(args)]
        kwargs = {k: x if k in self._facts.static_names else jax.tree.map(self._for_jax(backend), x)
                  for k, x in kwargs.items()}
        results = self._plain(*args, **kwargs)
        return jax.tree.map(lambda x: x if _is_key(x) else backend.from_jax(x), results)

    def _for_jax(self, backend: Any) -> Callable[[Any], Any]:
        return lambda x: backend.to_jax(x) if backend.is_array(x) else x

    # ------------------------------------------------------------------------------------------ signatures

    def _backend(self, leaves: Sequence[Any]) -> Any:
        if self._options.runtime == "numpy":
            from .array_backend import NumPyBackend

            return _shared_numpy(NumPyBackend)
        if not has_cupy():
            raise HlofuseError(CUPY_HINT)
        from .cupy_backend import backend_of

        return backend_of(leaves)

    def _static_positions(self, count: int) -> tuple[int, ...]:
        return tuple(n % count if n < 0 else n for n in self._facts.static if -count <= n < count)

    def _split(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Split:
        if not self._facts.static and not self._facts.static_names:
            return _Split((), *jax.tree.flatten((args, kwargs)))
        static, names = set(self._static_positions(len(args))), self._facts.static_names
        fixed = (tuple((n, args[n]) for n in sorted(static)), tuple((k, kwargs[k]) for k in names if k in kwargs))
        dynamic = tuple(x for n, x in enumerate(args) if n not in static)
        return _Split(fixed, *jax.tree.flatten((dynamic, {k: x for k, x in kwargs.items() if k not in names})))

    def _specialize(self, backend: Any, split: _Split, leaves: Sequence[Any], args: Sequence[Any],
                    kwargs: Mapping[str, Any]) -> _Specialization:
        """The program for these arguments."""
        x64 = jax_compat.is_x64()
        signature = tuple([_signature(x, x64) for x in leaves])
        key = (split.tree, signature, split.fixed, self._facts, backend.key(), jax_compat.trace_context())
        try:
            found = self._known.get(key)
        except TypeError as error:
            raise ValueError(f"static arguments of {self.__name__} must be hashable: {error}") from error
        if found is None:
            with self._lock:
                found = self._known.get(key) or self._build(backend, split, signature, args, kwargs)
                self._known[key] = found
        return found

    def _build(self, backend: Any, split: _Split, signature: Sequence[_Signature], args: Sequence[Any],
               kwargs: Mapping[str, Any]) -> _Specialization:
        structs = [jax.ShapeDtypeStruct(shape, dtype, weak_type=weak) for shape, dtype, weak in signature]
        dynamic, named = jax.tree.unflatten(split.tree, structs)
        static = set(self._static_positions(len(args)))
        rest = iter(dynamic)
        shaped = [x if n in static else next(rest) for n, x in enumerate(args)]
        traced = trace_jitted(self._traceable, shaped, {k: named.get(k, x) for k, x in kwargs.items()})
        if traced.plain_reason:
            return _Specialization(traced, None, traced.plain_reason)
        donated = frozenset(n for n, o in enumerate(traced.operands) if isinstance(o, Argument) and o.donated)
        try:
            executable = self._compile(traced.closed, self._options, backend, donated)
        except Exception as error:
            if is_strict():
                raise
            message = f"{type(error).__name__}: {error}"
            warnings.warn(f"{self.__name__!r} runs as plain JAX, because hlofuse failed. {message}", HlofuseWarning,
                          stacklevel=2)
            return _Specialization(traced, None, f"failed: {message}")
        captured = [None if isinstance(o, Argument) else backend.from_jax(_physical(o)) for o in traced.operands]
        given = {o.index for o in traced.operands if isinstance(o, Argument) and o.donated}
        types = [np.dtype(np.uint32) if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype)
                 for _, dtype, _ in signature]
        return _Specialization(traced, executable, None, captured, types, [n in given for n in range(len(types))])


class DispatchingFunction(ArrayFunction):
    """What `hlofuse.jit` returns where CuPy is installed and no runtime is named: CuPy's arrays go to CuPy's runtime,
    all others to JAX's."""

    _has_met_nested = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._has_met_nested:
            foreign = any(map(_is_cupy, jax.tree.leaves((args, kwargs))))
        else:
            foreign = any(map(_is_cupy, args))
        if foreign:
            return super().__call__(*args, **kwargs)
        try:
            return self._jitted(*args, **kwargs)
        except TypeError:
            # JAX refuses an array of CuPy's; that it lies inside of a tree is remembered, for looking is not free.
            if self._has_met_nested or not any(map(_is_cupy, jax.tree.leaves((args, kwargs)))):
                raise
        self._has_met_nested = True
        return super().__call__(*args, **kwargs)


def _is_cupy(value: Any) -> bool:
    kind = type(value)
    return kind.__name__ == "ndarray" and kind.__module__.partition(".")[0] == "cupy"


@functools.cache
def _shared_numpy(make: Callable[[], Any]) -> Any:
    return make()


def _foreign(backend: Any, leaf: Any) -> Any:
    """What the backend makes of another library's array."""
    if not hasattr(leaf, "__dlpack__"):
        raise TypeError(f"hlofuse: {leaf!r} of type {type(leaf).__name__} is no array; mark what is not one as static")
    return backend.from_dlpack(leaf)


def _signature(leaf: Any, x64: bool) -> _Signature:
    if isinstance(leaf, (*_SCALARS, jax.Array)):
        aval = jax.typeof(leaf)
        return aval.shape, aval.dtype, bool(aval.weak_type)
    return leaf.shape, _canonical(leaf.dtype, x64), False


@functools.lru_cache(maxsize=256)
def _canonical(dtype: Any, x64: bool) -> Any:
    """The type that JAX holds such values in, in its mode of the moment (`x64`)."""
    return jax.dtypes.canonicalize_dtype(dtype)


def _is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)


def _forwarded(backend: Any, value: Any, leaves: Sequence[Any], arrays: Sequence[Any]) -> Any:
    """A result that is an argument, or something that the function closed over, as an array of its own."""
    if isinstance(value, Argument):
        return leaves[value.index] if _is_key(leaves[value.index]) else arrays[value.index].copy()
    return value if _is_key(value) else backend.from_jax(value)


def _physical(value: Any) -> Any:
    return jax.random.key_data(value) if _is_key(value) else value


def _with_own_type(backend: Any, value: Any, aval: Any) -> Any:
    """A result as its caller knows it: keys are arrays of JAX's, tangents of integers have no bytes."""
    dtype = aval.dtype
    if dtype == jax.dtypes.float0:
        return np.zeros(aval.shape, jax.dtypes.float0)
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return jax_compat.with_key_type(backend.to_jax(value), aval)
    return value


def _part_donated(backend: Any, operands: list[Any], sources: Sequence[Any], leaves: Sequence[Any]) -> None:
    """Copies what is donated but overlaps another argument: writing the one would change the other."""
    donated = {n: o.index for n, o in enumerate(sources) if isinstance(o, Argument) and o.donated}
    if not donated:
        return
    extents = [_extent(backend, x) if backend.is_array(x) else (0, 0) for x in leaves]
    for n, leaf in donated.items():
        begin, end = _extent(backend, operands[n])
        if any(m != leaf and begin < other_end and other < end for m, (other, other_end) in enumerate(extents)):
            operands[n] = operands[n].copy()


def _extent(backend: Any, array: Any) -> tuple[int, int]:
    """The addresses between which an array's elements lie, however they are strided."""
    begin = end = backend.address(array)
    for size, stride in zip(array.shape, array.strides, strict=True):
        begin, end = begin + min(0, (size - 1) * stride), end + max(0, (size - 1) * stride)
    return (begin, end + array.dtype.itemsize) if array.size else (0, 0)
