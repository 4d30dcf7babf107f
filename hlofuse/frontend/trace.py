"""From a Python function to the jaxpr that the optimizer gets.

`trace_function` leaves out what needs no optimizer: results that are operands are forwarded, equal results are one,
dead equations and unused operands are gone (so jax.jit prunes and donates arguments as it would have). What remains is
a closed jaxpr without constants: everything that the function closed over is an operand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from . import jax_compat


@dataclass(frozen=True)
class Computed:
    """A result of the function that is result number `index` of the jaxpr."""

    index: int


@dataclass(frozen=True)
class Forwarded:
    """A result of the function that is `value`, one of its arguments or something it closed over."""

    value: Any


@dataclass(frozen=True)
class TracedFunction:
    """`closed`, on `operands`, computes what is to be computed; `results` says what each leaf of the result is.

    plain_reason: why JAX itself must run `closed` ("effects: ..."), or None.
    """

    closed: Any
    operands: tuple[Any, ...]
    results: tuple[Computed | Forwarded, ...]
    out_tree: Any
    plain_reason: str | None

    def assemble(self, computed: Sequence[Any]) -> Any:
        """The function's result, from those of `closed`."""
        leaves = [computed[r.index] if isinstance(r, Computed) else r.value for r in self.results]
        return jax.tree.unflatten(self.out_tree, leaves)


def trace_function(
    fun: Callable,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    is_static: Callable[[Any], bool] = lambda argument: False,
) -> TracedFunction:
    """Trace `fun(*args, **kwargs)`, once. Leaves are arrays, tracers or `jax.ShapeDtypeStruct`s unless `is_static`."""
    kwargs = kwargs or {}
    call = jax_compat.trace_call(fun, args, kwargs, is_static)
    dynamic = [a for a in args if not is_static(a)], {k: a for k, a in kwargs.items() if not is_static(a)}
    return _prepare(call.closed, (*call.captured, *jax.tree.leaves(dynamic)), call.out_tree)


@dataclass(frozen=True)
class Argument:
    """Stands for leaf `index` of the arguments of a function that is traced before it is called."""

    index: int
    donated: bool


def trace_jitted(jitted: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TracedFunction:
    """Trace a function that `jax.jit` made on `jax.ShapeDtypeStruct`s and its static arguments; the operands are
    `Argument`s, and what it closed over."""
    call = jax_compat.trace_jitted(jitted, args, kwargs)
    arguments = (Argument(n, donated) for n, donated in enumerate(call.donated))
    return _prepare(call.closed, (*call.captured, *arguments), call.out_tree)


def _prepare(closed: Any, operands: tuple[Any, ...], out_tree: Any) -> TracedFunction:
    jaxpr = closed.jaxpr
    everything = tuple(Computed(i) for i in range(len(jaxpr.outvars)))
    if reason := _plain_reason(closed):
        return TracedFunction(closed, operands, everything, out_tree, reason)

    value_of = dict(zip(jaxpr.invars, operands, strict=True))
    outvars: list[Any] = []
    index_of: dict[Any, int] = {}
    results: list[Computed | Forwarded] = []
    for v in jaxpr.outvars:
        is_literal = isinstance(v, jax_compat.Literal)
        if not is_literal and v in value_of:
            results.append(Forwarded(value_of[v]))
            continue
        if is_literal or v not in index_of:
            outvars.append(v)
        index = len(outvars) - 1 if is_literal else index_of.setdefault(v, len(outvars) - 1)
        results.append(Computed(index))

    names = jax_compat.argument_names(closed)
    needed, kept = jax_compat.drop_dead_code(jax_compat.close(jaxpr, jaxpr.invars, outvars, names))
    if not needed.jaxpr.eqns:
        return TracedFunction(closed, operands, everything, out_tree, "no equations")
    used = tuple(x for x, k in zip(operands, kept, strict=True) if k)
    return TracedFunction(needed, used, tuple(results), out_tree, None)


def _plain_reason(closed: Any) -> str | None:
    if effects := jax_compat.foreign_effects(closed):
        return f"effects: {', '.join(effects)}"
    if jax_compat.is_high_level(closed):
        return "high-level types"
    return None
