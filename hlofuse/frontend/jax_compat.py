"""The one file that knows JAX's versions and its near-private modules.

Everything else says what it needs in the words of this file. Supported: jax 0.10 to 0.12. Where versions differ the
difference is a line here, chosen by what JAX offers, not by its version number. A "closed" jaxpr is a
`jax.core.ClosedJaxpr` (in 0.12 simply a `Jaxpr` with its constants attached).
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import numpy as np
from jax._src import checkify, source_info_util, traceback_util
from jax._src import config as jax_config
from jax._src import core as jax_core
from jax._src.interpreters import ad as jax_ad
from jax._src.interpreters import batching as jax_batching
from jax._src.interpreters import partial_eval
from jax._src.random import prng
from jax.experimental import jet as jax_jet
from jax.interpreters import ad, batching, mlir

ClosedJaxpr = jex.ClosedJaxpr
DropVar = jex.DropVar
Jaxpr = jex.Jaxpr
JaxprEqn = jex.JaxprEqn
Literal = jex.Literal
Primitive = jex.Primitive
Var = jex.Var
Tracer = jax.core.Tracer

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# The user's own line, not ours, is what equations and error messages shall name.
source_info_util.register_exclusion(_PACKAGE)
traceback_util.register_exclusion(_PACKAGE)


# ---------------------------------------------------------------- tracing


@dataclass(frozen=True)
class TracedCall:
    """A function traced on arguments: `closed` on the leaves of its non-static arguments, led by `captured`.

    captured: what the function closed over (arrays, and tracers of an enclosing trace): the first operands of `closed`,
      which itself holds no constants. out_tree: the tree of its results. donated: of each leaf, whether it is.
    """

    closed: Any
    captured: tuple[Any, ...]
    out_tree: Any
    donated: tuple[bool, ...] = ()


def trace_call(
    fun: Callable, args: Sequence[Any], kwargs: Mapping[str, Any], is_static: Callable[[Any], bool]
) -> TracedCall:
    """Trace `fun` on arrays, tracers or `jax.ShapeDtypeStruct`s, and on those arguments as they are that are static."""
    argnums = tuple(i for i, a in enumerate(args) if is_static(a))
    argnames = tuple(k for k, a in kwargs.items() if is_static(a))
    return trace_jitted(jax.jit(_cacheable(fun), static_argnums=argnums, static_argnames=argnames), args, kwargs)


def trace_jitted(jitted: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TracedCall:
    """The same of a function that `jax.jit` made, whose own static arguments are."""
    traced = jitted.trace(*args, **kwargs)
    closed, constants = constants_to_operands(traced.jaxpr)
    donated = tuple(bool(x.donated) for x in jax.tree.leaves(traced.args_info))
    return TracedCall(closed, (*constants, *traced._consts), traced.out_tree, donated)


class ArgumentFacts(NamedTuple):
    """Numbers and names of a jitted function's arguments that are static, and of those that are given away."""

    static: tuple[int, ...]
    static_names: tuple[str, ...]
    donated: tuple[int, ...]
    donated_names: tuple[str, ...]


def argument_facts(jitted: Any) -> ArgumentFacts:
    """Of a function that `jax.jit` made."""
    info = jitted._jit_info
    return ArgumentFacts(*map(tuple, (info.static_argnums, info.static_argnames, info.donate_argnums,
                                      info.donate_argnames)))  # fmt: skip


def trace_context() -> Any:
    """What of JAX's configuration a traced program depends on."""
    return jax_config.trace_context()


def holds_no_tracer(argument: Any) -> bool:
    """True for an argument of a function under jit that is static: it has leaves, and none is traced."""
    leaves = jax.tree.leaves(argument)
    return bool(leaves) and not any(isinstance(x, Tracer) for x in leaves)


def _cacheable(fun: Callable) -> Callable:
    """`fun`, or a wrapper when JAX's caches, which are keyed by the function, cannot hold it."""
    try:
        hash(fun)
    except TypeError:
        return partial(fun)
    return fun


def is_jit_disabled() -> bool:
    return bool(jax_config.disable_jit.value)


def is_x64() -> bool:
    return bool(jax_config.enable_x64.value)


def is_tracing() -> bool:
    """False outside of all traces: where JAX calls a jitted function itself, as `jax_debug_nans` does."""
    return not jax_core.trace_state_clean()


# ---------------------------------------------------------------- jaxprs


def constants_to_operands(closed: Any) -> tuple[Any, tuple[Any, ...]]:
    """`closed` with its constants as leading operands, and their values."""
    jaxpr, consts = closed.jaxpr, tuple(closed.consts)
    if not consts:
        return closed, ()
    invars = [*jaxpr.constvars, *jaxpr.invars]
    return close(jaxpr, invars, jaxpr.outvars, ("",) * len(consts) + argument_names(closed)), consts


def close(jaxpr: Any, invars: Sequence[Any], outvars: Sequence[Any], names: Sequence[str]) -> Any:
    """The equations of `jaxpr` from other operands to other results, as a closed jaxpr without constants."""
    info = jaxpr.debug_info
    info = info._replace(arg_names=tuple(names), result_paths=("",) * len(outvars))
    # Effects of the constants and operands are numbered by position; ours (axis names) are not.
    return ClosedJaxpr(jaxpr.replace(constvars=[], invars=list(invars), outvars=list(outvars), debug_info=info), [])


def argument_names(closed: Any) -> tuple[str, ...]:
    """The Python names of the operands as the user wrote them (`x`, `params['w']`), "" where there is none."""
    names = closed.jaxpr.debug_info.arg_names
    count = len(closed.jaxpr.invars)
    return tuple(n or "" for n in names) if names is not None and len(names) == count else ("",) * count


def drop_dead_code(closed: Any) -> tuple[Any, list[bool]]:
    """`closed` without the equations and operands that no result needs, and which operands it keeps."""
    jaxpr, kept = partial_eval.dce_jaxpr(closed.jaxpr, True)
    return ClosedJaxpr(jaxpr, closed.consts), list(kept)


def eval_closed(closed: Any, *operands: Any) -> list[Any]:
    """Run or trace `closed` as JAX would have."""
    return jex.jaxpr_as_fun(closed)(*operands)


def is_high_level(closed: Any) -> bool:
    """True when it works on JAX's experimental high-level types, which only JAX can lower."""
    return bool(getattr(closed.jaxpr, "is_high", False))


def foreign_effects(closed: Any) -> list[str]:
    """Names of the effects that must stay with JAX. Naming a mapped axis, which JAX counts as one, need not."""
    return sorted({type(e).__name__ for e in closed.jaxpr.effects} - {"NamedAxisEffect"})


_EMPTY_JAXPR = jax.make_jaxpr(lambda: ())().jaxpr


def operand_vars(eqn: Any) -> list[Any]:
    """The distinct variables that `eqn` reads, in order: the operands of `eqn_as_jaxpr(eqn)`."""
    return list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal)))


def eqn_as_jaxpr(eqn: Any) -> Any:
    """One equation as a closed jaxpr of its own, from `operand_vars(eqn)` to its results."""
    # Dropped results are results here: the caller decides what to ignore.
    jaxpr = _EMPTY_JAXPR.replace(
        invars=operand_vars(eqn), outvars=list(eqn.outvars), eqns=[eqn], effects=eqn.effects
    )
    return ClosedJaxpr(jaxpr, [])


def eval_eqn(eqn: Any, *operands: Any) -> list[Any]:
    """Run or trace one equation, on the values of `operand_vars(eqn)`, within the context it was traced in."""
    return jax.core.eval_jaxpr(eqn_as_jaxpr(eqn).jaxpr, [], *operands)


# ---------------------------------------------------------------- a primitive that carries a jaxpr


def register_call_primitive(name: str, *, batch: Callable, lower: Callable) -> Any:
    """A new primitive with parameter `jaxpr` (closed, no constants) that means: evaluate it.

    Differentiation and the other inline rules see the plain jaxpr. `batch(closed, operands, **params)` binds a batched
    jaxpr. `lower(site, **params)` returns the lowered results, by `site.emit`.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    def impl(*operands: Any, jaxpr: Any, **params: Any) -> list[Any]:
        return eval_closed(jaxpr, *operands)

    primitive.def_effectful_abstract_eval(lambda *avals, jaxpr, **params: (jaxpr.out_avals, jaxpr.jaxpr.effects))
    primitive.def_impl(impl)
    ad.primitive_jvps[primitive] = _jvp
    ad.primitive_transposes[primitive] = _transpose
    batching.fancy_primitive_batchers[primitive] = partial(_batch, batch)
    partial_eval.dce_rules[primitive] = _drop_dead_results
    jet_rules: dict[Any, Callable] = jax_jet.jet_rules
    jet_rules[primitive] = _jet
    checkify.error_checks[primitive] = _check_errors
    # Not cacheable: a cached lowering is emitted apart from its caller, and would not see which operands are donated.
    # One rule for all platforms: JAX 0.10 to 0.12 cannot combine several rules that are not cacheable.
    mlir.register_lowering(primitive, partial(_lower, lower), cacheable=False)
    return primitive


def register_sparse_rule(primitive: Any) -> None:
    """Teach `jax.experimental.sparse.sparsify` the primitive, if it is loaded: loading it takes 0.2 s."""
    transform = sys.modules.get("jax.experimental.sparse.transform")
    if transform is None or primitive in transform.sparse_rules_bcoo:
        return

    def sparsify(environment: Any, *values: Any, jaxpr: Any, **params: Any) -> Any:
        return transform.eval_sparse(jaxpr.jaxpr, [], values, environment)

    transform.sparse_rules_bcoo[primitive] = sparsify


_CHECKS_HAVE_CONTEXT = "ctx" in inspect.signature(checkify.checkify_jaxpr).parameters  # from JAX 0.12 on


def _check_errors(*arguments: Any, jaxpr: Any, **params: Any) -> tuple[Any, Sequence[Any]]:
    """Under `checkify`, which would find no errors inside of a primitive that it does not know."""
    context, arguments = arguments[:_CHECKS_HAVE_CONTEXT], arguments[_CHECKS_HAVE_CONTEXT:]
    error, enabled_errors, *operands = arguments
    return checkify.checkify_jaxpr(*context, jaxpr, enabled_errors, error, *operands)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: Any, **params: Any) -> tuple[list, list]:
    nonzero_in = [type(t) is not ad.Zero for t in tangents]
    closed, nonzero_out = jax_ad.jvp_jaxpr(jaxpr, nonzero_in, instantiate=False)
    results = eval_closed(closed, *primals, *(t for t, nonzero in zip(tangents, nonzero_in, strict=True) if nonzero))
    values, nonzero_tangents = results[: len(nonzero_out)], iter(results[len(nonzero_out) :])
    zeros = [ad.Zero(aval.to_tangent_aval()) for aval in jaxpr.out_avals]
    return values, [next(nonzero_tangents) if n else z for n, z in zip(nonzero_out, zeros, strict=True)]


def _transpose(cotangents: Sequence[Any], *operands: Any, jaxpr: Any, **params: Any) -> list[Any]:
    def linear_part(*values: Any) -> list[Any]:
        it = iter(values)
        return eval_closed(jaxpr, *(next(it) if ad.is_undefined_primal(x) else x for x in operands))

    avals = [x.aval for x in operands if ad.is_undefined_primal(x)]
    results = iter(jax.linear_transpose(linear_part, *avals)([ad.instantiate_zeros(c) for c in cotangents]))
    return [next(results) if ad.is_undefined_primal(x) else None for x in operands]


def _batch(bind: Callable, axis: Any, operands: Sequence, dims: Sequence, *, jaxpr: Any, **params: Any) -> Any:
    batched, out_dims = jax_batching.batch_jaxpr2(jaxpr, axis, tuple(dims))
    return bind(batched, operands, **params), list(out_dims)


def _jet(primals: Sequence[Any], series: Sequence[Any], *, jaxpr: Any, **params: Any) -> Any:
    fun = partial(eval_closed, jaxpr)
    # Rules see plain coefficients; the factorials of the public function are applied outside.
    return jax_jet.jet(fun, tuple(primals), tuple(series), factorial_scaled=False)


def _drop_dead_results(used: list[bool], *rest: Any) -> tuple[list[bool], Any]:
    eqn = rest[-1]  # 0.12 tells in between which operands live on, which matters for references only
    if not any(used):
        return [False] * len(eqn.invars), None
    jaxpr, kept = partial_eval.dce_jaxpr(eqn.params["jaxpr"].jaxpr, list(used))
    return list(kept), eqn.replace(
        invars=[v for v, k in zip(eqn.invars, kept, strict=True) if k],
        outvars=[v for v, u in zip(eqn.outvars, used, strict=True) if u],
        params={**eqn.params, "jaxpr": ClosedJaxpr(jaxpr, [])},
        effects=jaxpr.effects,
    )


# ---------------------------------------------------------------- lowering


@dataclass(frozen=True)
class LoweringSite:
    """The place in a program that is being lowered: what is known of it, and how to write code there."""

    context: Any
    operands: tuple[Any, ...]

    def emit(self, fun: Callable) -> Any:
        """Trace `fun` on the operands of this place and write the result here."""
        return mlir.lower_fun(fun, multiple_results=True)(self.context, *self.operands)

    def keep(self, item: Any) -> None:
        """Let the compiled program hold `item`, where `kept_items` finds it."""
        self.context.module_context.add_keepalive(item)

    @property
    def platforms(self) -> tuple[str, ...]:
        """All that the program is lowered for."""
        return tuple(self.context.module_context.platforms)

    @property
    def is_exported(self) -> bool:
        return bool(self.context.module_context.lowering_parameters.for_export)

    @property
    def compute_type(self) -> str | None:
        """What `jax.experimental.compute_on` says here."""
        return getattr(self.context.jaxpr_eqn_ctx, "compute_type", None)

    @cached_property
    def automatic_devices(self) -> int:
        """Over how many devices XLA's partitioner, rather than the program, distributes what is written here."""
        axes = self.context.module_context.axis_context
        if isinstance(axes, mlir.ShardingContext):
            return axes.num_devices
        count = 1
        for name, size in axes.mesh.shape.items():
            count *= 1 if name in axes.manual_axes else size
        return count

    @property
    def is_partly_manual(self) -> bool:
        return self.automatic_devices > 1 and bool(getattr(self.context.module_context.axis_context, "manual_axes", ()))

    @cached_property
    def donated(self) -> frozenset[int]:
        """Numbers of the operands whose buffers the caller gave away: arguments of the whole program marked so.

        XLA copies first where such a buffer is still needed, so aliasing one is never wrong, only, rarely, of no use.
        """
        return frozenset(i for i, x in enumerate(self.operands) if _is_donated(x))


def _lower(lower: Callable, context: Any, *operands: Any, **params: Any) -> Any:
    return lower(LoweringSite(context, operands), **params)


def _is_donated(value: Any) -> bool:
    if not isinstance(value, mlir.ir.BlockArgument):
        return False
    function = value.owner.owner
    attributes = function.attributes
    is_main = "sym_name" in attributes and mlir.ir.StringAttr(attributes["sym_name"]).value == "main"
    if not is_main or "arg_attrs" not in attributes:
        return False
    of_argument = mlir.ir.DictAttr(mlir.ir.ArrayAttr(attributes["arg_attrs"])[value.arg_number])
    return "tf.aliasing_output" in of_argument or "jax.buffer_donor" in of_argument


def kept_items(stage: Any) -> tuple[Any, ...]:
    """What lowering rules gave to `LoweringSite.keep` in the program of a `jax.stages.Lowered` or `Compiled`."""
    if isinstance(stage, jax.stages.Lowered):
        kept = stage._lowering.compile_args.get("keepalive")  # type: ignore[attr-defined]
    else:
        # Absent in programs that JAX did not lower in this process.
        kept = getattr(getattr(getattr(stage, "_executable", None), "unsafe_call", None), "keepalive", None)
    return tuple(kept or ())


def extend_class(cls: type, **attributes: Any) -> None:
    """Add attributes to one of JAX's classes; never replace one that it has."""
    for name, attribute in attributes.items():
        if not hasattr(cls, name):
            setattr(cls, name, attribute)


# ---------------------------------------------------------------- types of values that kernels make


def result_types(operands: Sequence[Any], shapes: Sequence[tuple[tuple[int, ...], Any]]) -> list[Any]:
    """Types of results with the given (dims, dtype) that a kernel computes from `operands`: strong ones, that vary over
    the manual axes of a `shard_map` over which any operand varies."""
    types = [jax.typeof(x) for x in operands]
    varying = frozenset().union(*(t.mat.varying for t in types))
    if not varying:
        return [jax.ShapeDtypeStruct(dims, dtype) for dims, dtype in shapes]
    base = max(types, key=lambda t: len(t.mat.varying))
    mat = base.mat if base.mat.varying == varying else type(base.mat)(varying=varying)
    return [base.update(shape=dims, dtype=np.dtype(dtype), weak_type=False, manual_axis_type=mat,
                        sharding=base.sharding.update(spec=jax.sharding.PartitionSpec(*[None] * len(dims))))
            for dims, dtype in shapes]


def with_key_type(value: Any, aval: Any) -> Any:
    """Key data as the array of keys that `aval` wants; other values as they are."""
    dtype = getattr(aval, "dtype", None)
    if isinstance(dtype, prng.KeyTy) and value.dtype != dtype:
        return prng.random_wrap(value, impl=dtype._impl)
    return value
