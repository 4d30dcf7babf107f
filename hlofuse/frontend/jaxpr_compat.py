"""What the importer must know of JAX beyond its public names: jaxprs, key types, source lines, in every version.

Kept apart from jax_compat.py, which is about tracing and primitives; like it, the only place for near-private names.
"""
from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax._src import config as jax_config
from jax._src import source_info_util
from jax._src.random import prng
from jax._src.state import discharge

from hlofuse.errors import HlofuseError
from hlofuse.frontend import jax_compat
from hlofuse.hlo.shape import TOKEN, Shape, element_type_of

Literal = jex.Literal

class JaxprImportError(HlofuseError):
    """A jaxpr that has no HLO meaning; the message names the equation and the user's line."""


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


# --- jaxprs -------------------------------------------------------------------------------------------------------

def open_jaxpr(jaxpr: Any) -> Any:
    """The equations of a closed or open jaxpr. From 0.12 on there is one class for both."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def consts_of(jaxpr: Any) -> Sequence[Any]:
    """The values of its constvars; an open jaxpr has none."""
    return getattr(jaxpr, "consts", ())


def argument_names(jaxpr: Any) -> tuple[str, ...]:
    """Names of the arguments of the traced function, or nothing."""
    info = getattr(open_jaxpr(jaxpr), "debug_info", None)
    return tuple(getattr(info, "arg_names", None) or ())


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """(number of constants, number of carries) of a scan equation."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def without_references(closed_jaxpr: Any) -> Any:
    """A jaxpr that makes and updates mutable arrays of its own, as one of pure equations."""
    effects = {type(e).__name__ for e in open_jaxpr(closed_jaxpr).effects}
    return discharge.discharge_state(closed_jaxpr) if "InternalMutableArrayEffect" in effects else closed_jaxpr


def is_tracer(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer)


# --- avals --------------------------------------------------------------------------------------------------------

def key_dims(aval: Any) -> tuple[int, ...]:
    """The trailing dimensions of an element of an extended type (a random key) as plain numbers; () for others."""
    dtype = aval.dtype
    return tuple(dtype._impl.key_shape) if isinstance(dtype, prng.KeyTy) else ()


@functools.lru_cache(maxsize=4096)
def _physical_shape(dtype: Any, dims: tuple[int, ...]) -> Shape:
    if isinstance(dtype, prng.KeyTy):
        return Shape("u32", dims + tuple(dtype._impl.key_shape))
    if dtype == jax.dtypes.float0:
        return Shape("pred", dims)  # as JAX lowers it
    return Shape(element_type_of(dtype), tuple(int(d) for d in dims))


def physical_shape(aval: Any) -> Shape:
    """The shape of what holds a value of this type: key arrays are u32 with the key's dimensions last."""
    if isinstance(aval, jax.core.ShapedArray):
        try:
            return _physical_shape(aval.dtype, aval.shape)
        except KeyError:
            raise JaxprImportError(f"HLO has no element type for {aval}") from None
    if type(aval).__name__ == "AbstractToken":
        return TOKEN
    raise JaxprImportError(f"a value of type {aval} has no HLO shape")


def physical_value(value: Any) -> Any:
    """Key arrays as their u32 data, float0 as pred, everything else as it is."""
    if getattr(value, "dtype", None) == jax.dtypes.float0:
        return np.zeros(value.shape, np.bool_)
    if jax.dtypes.issubdtype(getattr(value, "dtype", None), jax.dtypes.extended):
        return jax.random.key_data(value)
    return value


# --- source lines -------------------------------------------------------------------------------------------------

@functools.lru_cache(maxsize=4096)
def _is_user_file(filename: str) -> bool:
    return source_info_util.is_user_filename(filename) and not filename.startswith(_PACKAGE)


_lines: dict[tuple[Any, int], tuple[str, int]] = {}


def source_line(source_info: Any) -> tuple[str, int]:
    """File and line of the innermost frame of the user's code; ("", 0) where there is none."""
    traceback = source_info.traceback
    if traceback is None:
        return "", 0
    codes, offsets = traceback.raw_frames()
    for code, offset in zip(codes, offsets, strict=False):
        if _is_user_file(code.co_filename):
            key = (code, offset)
            if key not in _lines:
                if len(_lines) > 1 << 16:
                    _lines.clear()
                frame = source_info_util.raw_frame_to_frame(code, offset)
                _lines[key] = (frame.file_name, frame.start_line)
            return _lines[key]
    return "", 0


def name_stack(source_info: Any) -> str:
    stack = source_info.name_stack
    return str(stack) if stack.stack else ""


# --- random bits --------------------------------------------------------------------------------------------------

def _vmapped(function: Callable[..., Any], ndim: int) -> Callable[..., Any]:
    for _ in range(ndim):
        function = jax.vmap(function)
    return function


@functools.lru_cache(maxsize=1024)
def _trace_prng(kind: str, impl: Any, avals: tuple[tuple[tuple[int, ...], str], ...], params: tuple[Any, ...],
                _settings: tuple[Any, ...]) -> Any:
    if kind == "seed":
        function = _vmapped(impl.seed, len(avals[0][0]))
    elif kind == "split":
        function = _vmapped(lambda key: impl.split(key, *params), len(avals[0][0]) - len(impl.key_shape))
    elif kind == "bits":
        function = _vmapped(lambda key: impl.random_bits(key, *params), len(avals[0][0]) - len(impl.key_shape))
    else:
        function = _vmapped(impl.fold_in, len(avals[1][0]))
    return jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct(dims, np.dtype(dtype)) for dims, dtype in avals])


def trace_prng(kind: str, impl: Any, shapes: Sequence[Shape], params: tuple[Any, ...] = ()) -> Any:
    """A key type's own algorithm on raw keys, as a jaxpr. kind: seed(seeds), split(keys; shape),
    bits(keys; width, shape), fold_in(keys, data), the last with keys and data of equal leading dimensions."""
    settings = (jax_config.threefry_partitionable.value, jax_config.enable_x64.value)
    avals = tuple((shape.dims, shape.dtype.name) for shape in shapes)
    return _trace_prng(kind, impl, avals, params, settings)


def physical_shape_of_value(value: Any) -> Shape:
    """The shape of a closed-over array (or tracer) as an operand of the program."""
    return physical_shape(jax.typeof(value))


# --- JAX's own lowering -------------------------------------------------------------------------------------------

def equation_key(eqn: Any) -> Any:
    """What decides how JAX lowers an equation."""
    avals = tuple((v.aval.shape, v.aval.dtype, v.aval.weak_type) for v in eqn.invars)
    return eqn.primitive, avals, repr(sorted(eqn.params.items())), jax_config.enable_x64.value


def _spec(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def low_level_jaxpr(eqn: Any) -> Any:
    """What a high-level equation (from 0.12 on, such as searchsorted) does in plain primitives; None if it is on values
    of a high-level type."""
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    if not all(isinstance(aval, jax.core.ShapedArray) for aval in avals) or eqn.effects:
        return None
    lower = eqn.primitive.to_lojax
    closed = jax.make_jaxpr(lambda *xs: lower(*xs, **eqn.params))(*[_spec(v.aval) for v in eqn.invars])
    return None if any(is_tracer(c) for c in consts_of(closed)) else closed


def lowered_text(eqn: Any) -> str:
    """HLO text of a function that evaluates this equation on operands of its own types, as JAX lowers it."""

    def function(*operands: Any) -> Any:
        return eqn.primitive.bind(*operands, **eqn.params)

    specs = [_spec(v.aval) for v in eqn.invars]
    # Where the default device is another, its lowering may call libraries that only it has.
    return jax.jit(function, keep_unused=True).trace(*specs).lower(lowering_platforms=("cpu",)).as_text("hlo")


# --- equations that JAX runs --------------------------------------------------------------------------------------

def evaluate_equation(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Run or trace an equation on the physical values of its variables, each once; the results are physical too."""
    values = [_logical_value(x, v.aval) for x, v in zip(operands, jax_compat.operand_vars(eqn), strict=True)]
    return [physical_value(result) for result in jax_compat.eval_eqn(eqn, *values)]


def _logical_value(value: Any, aval: Any) -> Any:
    dtype = getattr(aval, "dtype", None)
    if isinstance(dtype, prng.KeyTy):
        return prng.random_wrap(value, impl=dtype._impl)
    if dtype == jax.dtypes.float0:
        return np.zeros(aval.shape, jax.dtypes.float0)
    return value
