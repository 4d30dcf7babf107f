"""The float64 evaluation of a jaxpr: the measure of accuracy that a program has in itself.

The jaxpr is interpreted with every floating value widened to float64 (complex to complex128), while integer and bit
work is kept: random bits, bitcasts and integer arithmetic run on their own types, so that a dropout mask or a hash is
the one that the program draws. (Tracing the function anew under x64 would change all of those.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..frontend import jax_compat, jaxpr_compat

# Primitives whose result depends on the bits of a type, not only on the value: evaluated on the program's own types.
_NARROW = frozenset({
    "bitcast_convert_type", "nextafter", "random_gamma", "random_gamma_grad", "rng_uniform", "rng_bit_generator",
    "pure_callback", "io_callback", "debug_callback", "ffi_call", "custom_call",
})  # fmt: skip
# Primitives that only call a jaxpr on all of their operands, and the parameter that holds it.
_CALLS = {
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "remat2": "jaxpr",
    "checkpoint": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr", "hlofuse": "jaxpr",
}  # fmt: skip


def evaluate(closed: Any, *operands: Any) -> list[np.ndarray]:
    """The results of the closed jaxpr, its floating ones in float64 or complex128."""
    # The operands' own types must be read before x64 is on; NumPy keeps them.
    values = [x if _is_key(x) else np.asarray(x) for x in operands]
    with jax.enable_x64(True):
        results = jax.jit(lambda *values: _evaluate(closed, [_widen(v) for v in values]))(*values)
        return [np.asarray(jax.random.key_data(r) if _is_key(r) else r) for r in results]


def wide_dtype(dtype: Any) -> Any:
    """float64 for a real floating type, complex128 for a complex one, any other type itself."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.dtype(np.float64)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.dtype(np.complex128)
    return dtype


def _is_key(value: Any) -> bool:
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def _widen(value: Any) -> Any:
    wide = wide_dtype(value.dtype)
    return value if wide == value.dtype else value.astype(wide)


def _narrow(value: Any, aval: Any) -> Any:
    return value if _is_key(value) or value.dtype == aval.dtype else lax.convert_element_type(value, aval.dtype)


def _evaluate(closed: Any, operands: Sequence[Any]) -> list[Any]:
    """The interpreter. `operands` are wide, and so are the results."""
    jaxpr, consts = jaxpr_compat.open_jaxpr(closed), jaxpr_compat.consts_of(closed)
    values: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        if isinstance(atom, jax_compat.Literal):
            aval: Any = atom.aval
            return _widen(np.asarray(atom.val, aval.dtype))
        return values[atom]

    values.update(zip(jaxpr.constvars, (c if _is_key(c) else _widen(jnp.asarray(c)) for c in consts), strict=True))
    values.update(zip(jaxpr.invars, operands, strict=True))
    for eqn in jaxpr.eqns:
        results = _evaluate_equation(eqn, [read(atom) for atom in eqn.invars])
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _evaluate_equation(eqn: Any, operands: list[Any]) -> list[Any]:
    name = eqn.primitive.name
    if name in _CALLS:
        return _evaluate(eqn.params[_CALLS[name]], operands)
    if name in _STRUCTURES:
        return _STRUCTURES[name](eqn, operands)
    if name in _NARROW:
        return _evaluate_narrow(eqn, operands)
    if name == "reduce_precision" and _keeps_precision(eqn):
        return operands
    try:
        results = eqn.primitive.bind(*operands, **_widen_parameters(eqn.params))
    except Exception:
        # A primitive that is not made for these types, or that needs more than its parameters to be bound.
        return _evaluate_narrow(eqn, operands)
    results = results if eqn.primitive.multiple_results else [results]
    return [_widen(r) for r in results]


def _evaluate_narrow(eqn: Any, operands: list[Any]) -> list[Any]:
    values = {atom: _narrow(x, atom.aval) for atom, x in zip(eqn.invars, operands, strict=True)
              if not isinstance(atom, jax_compat.Literal)}  # fmt: skip
    results = jax_compat.eval_eqn(eqn, *(values[v] for v in jax_compat.operand_vars(eqn)))
    return [_widen(r) for r in results]


def _widen_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    """Element types among the parameters become wide; an algorithm for a dot of narrow types becomes the default."""
    widened = {k: wide_dtype(v) if _is_dtype(v) else v for k, v in parameters.items()}
    if "precision" in widened:
        widened["precision"] = None
    return widened


def _is_dtype(value: Any) -> bool:
    return isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic))


def _keeps_precision(eqn: Any) -> bool:
    """True for the reduce_precision that jax.checkpoint writes to pin an intermediate to its own type."""
    info = jnp.finfo(eqn.invars[0].aval.dtype)
    return eqn.params["exponent_bits"] >= info.nexp and eqn.params["mantissa_bits"] >= info.nmant


# ------------------------------------------------- primitives that hold a jaxpr and more than a call


def _scan(eqn: Any, operands: list[Any]) -> list[Any]:
    parameters = eqn.params
    consts_count, carry_count = jaxpr_compat.scan_counts(parameters)
    consts, rest = operands[:consts_count], operands[consts_count:]

    def body(carry: Any, xs: Any) -> Any:
        results = _evaluate(parameters["jaxpr"], [*consts, *carry, *xs])
        return results[:carry_count], results[carry_count:]

    carry, ys = lax.scan(body, rest[:carry_count], rest[carry_count:], parameters["length"], parameters["reverse"])
    return [*carry, *ys]


def _while(eqn: Any, operands: list[Any]) -> list[Any]:
    parameters = eqn.params
    split = parameters["cond_nconsts"]
    start = split + parameters["body_nconsts"]
    cond_consts, body_consts = operands[:split], operands[split:start]

    def predicate(carry: Any) -> Any:
        return _evaluate(parameters["cond_jaxpr"], [*cond_consts, *carry])[0]

    def body(carry: Any) -> Any:
        new = _evaluate(parameters["body_jaxpr"], [*body_consts, *carry])
        live = predicate(carry)
        if live.ndim == 0:
            return new
        # A batched loop: an element that is done keeps its value while others go on.
        return [jnp.where(live.reshape(live.shape + (1,) * (n.ndim - live.ndim)), n, c)
                for n, c in zip(new, carry, strict=True)]  # fmt: skip

    return lax.while_loop(lambda carry: jnp.any(predicate(carry)), body, operands[start:])


def _cond(eqn: Any, operands: list[Any]) -> list[Any]:
    branches = [lambda *values, branch=branch: _evaluate(branch, values) for branch in eqn.params["branches"]]
    return lax.switch(operands[0].astype(np.int32), branches, *operands[1:])


def _reduce(eqn: Any, operands: list[Any]) -> list[Any]:
    count = len(operands) // 2
    closed = eqn.params["jaxpr"]

    def combine(accumulated: Any, values: Any) -> Any:
        return tuple(_evaluate(closed, [*accumulated, *values]))

    return list(lax.reduce(tuple(operands[:count]), tuple(operands[count:]), combine, eqn.params["dimensions"]))


def _scatter(scatter: Callable) -> Callable:
    def rule(eqn: Any, operands: list[Any]) -> list[Any]:
        names = ("indices_are_sorted", "unique_indices", "mode")
        keywords = {name: eqn.params[name] for name in names}
        return [scatter(*operands, eqn.params["dimension_numbers"], **keywords)]

    return rule


_STRUCTURES: dict[str, Callable[[Any, list[Any]], list[Any]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "reduce": _reduce,
    "scatter": _scatter(lax.scatter),
    "scatter-add": _scatter(lax.scatter_add),
    "scatter_add": _scatter(lax.scatter_add),
    "scatter_sub": _scatter(lax.scatter_sub),
    "scatter-sub": _scatter(lax.scatter_sub),
    "scatter_mul": _scatter(lax.scatter_mul),
    "scatter_min": _scatter(lax.scatter_min),
    "scatter_max": _scatter(lax.scatter_max),
}
