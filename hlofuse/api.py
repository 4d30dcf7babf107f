"""`hlofuse.jit`: `jax.jit` of an entry that binds the function as one primitive.

JAX itself does dispatch, caching, static and donated arguments, errors and sharding, so a call costs what a call of
jax.jit costs. The entry runs only while JAX traces.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import jax

from .config import Options
from .frontend import jax_compat
from .runtime import primitive
from .runtime.array_function import ArrayFunction, DispatchingFunction, has_cupy


def jit(
    f: Callable | None = None,
    *,
    fusion: str = "coloring",
    device: str | None = None,
    runtime: str | None = None,
    **jax_jit_kwargs: Any,
) -> Any:
    """As `jax.jit`, but element-wise work, reductions and layout changes run as fused, generated kernels.

    Takes the arguments of `jax.jit`, and:
      fusion: who chooses the clusters: "coloring", "greedy", "none" or "exact".
      device: name of the device whose cost model decides; by default the one that runs the function. "simt": the
        CUDA kernels, executed thread by thread on the CPU with every access checked; a fault is the call's error.
      runtime: "xla" is JAX's own, with JAX's arrays; "cupy" and "numpy" take and give arrays of those libraries. By
        default CuPy's arrays go to the one, all others (NumPy's too) to the other.

    The result transforms, nests and shards as that of `jax.jit`. Its `.lower(...).compile()` is a `jax.stages.Compiled`
    that also has `.kernels` and `.explain()` (see `hlofuse.stages`). Derivatives are those of the plain function: for
    kernels in a gradient, decorate the outermost function, `hlofuse.jit(jax.grad(f))`.

    Raises UnknownNameError, with the valid names, for a wrong `fusion`, `device` or `runtime`; else what `jax.jit`
    raises.
    """
    options = Options(fusion=fusion, device=device, runtime=runtime)
    if f is None:
        jax.jit(**jax_jit_kwargs)  # refuses a wrong keyword here, where it is written
        return functools.partial(jit, fusion=fusion, device=device, runtime=runtime, **jax_jit_kwargs)
    jax.jit(f, **jax_jit_kwargs)  # refuses, naming `f`, what cannot be jitted
    entry = _entry_of(f, options)
    jitted = jax.jit(entry, **jax_jit_kwargs)
    if runtime == "xla" or runtime is None and not has_cupy():
        return jitted  # JAX's own object: there is nothing to choose, and calls cost what they cost
    kind = DispatchingFunction if runtime is None else ArrayFunction
    programs = entry.__dict__.setdefault("__hlofuse_programs__", {})  # as JAX's own, found again by the next `jit(f)`
    return kind(f, options, jitted, jax_jit_kwargs, _compile_for_arrays, programs)


def _entry_of(f: Callable, options: Options) -> Callable:
    """The function that JAX jits. One per `f` and options: JAX's caches are keyed by it, so that `jit(f)(x)` in a loop
    compiles once, as with jax.jit. Kept on `f` itself, because an entry holds `f`: any table of ours would leak it."""
    if not isinstance(f, types.FunctionType):
        return _new_entry(f, options)
    entries = f.__dict__.setdefault("__hlofuse_entries__", {})
    # functools.wraps copies a function's __dict__ to another function, with entries that are not for it.
    if options not in entries or entries[options].__wrapped__ is not f:
        f.__dict__["__hlofuse_entries__"] = entries = {**entries, options: _new_entry(f, options)}
    return entries[options]


def _new_entry(f: Callable, options: Options) -> Callable:
    name = _name_of(f)

    def entry(*args: Any, **kwargs: Any) -> Any:
        if jax_compat.is_jit_disabled() or not jax_compat.is_tracing():
            return f(*args, **kwargs)
        return primitive.call_optimized(name, f, args, kwargs, options)

    # The signature, for static_argnames and argument names in errors, comes with __wrapped__.
    entry.__name__ = entry.__qualname__ = name
    return functools.wraps(f, updated=())(entry)


def _name_of(f: Callable) -> str:
    if isinstance(f, functools.partial):
        return _name_of(f.func)
    return getattr(f, "__name__", type(f).__name__)


def _compile(closed: Any, options: Options, platform: str) -> primitive.Executable:
    # Late: importing hlofuse must be quick, and needs no optimizer.
    from .compiler import compile_jaxpr

    return compile_jaxpr(closed, options, platform)


def _compile_for_arrays(closed: Any, options: Options, backend: Any, donated: frozenset[int]) -> Any:
    from .compiler import compile_for_arrays

    return compile_for_arrays(closed, options, backend, donated)


primitive.set_pipeline(_compile)
