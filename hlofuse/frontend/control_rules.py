"""Import rules of calls, loops and branches.

Loops and branches call computations with one tuple parameter. What their jaxprs close over travels in that tuple,
after the constants that the equation itself passes.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hlofuse.frontend import jaxpr_compat as compat
from hlofuse.frontend.scope import CALLS, REMATS, Rule, Scope, called_jaxpr
from hlofuse.hlo.module import Computation, Instruction
from hlofuse.hlo.shape import Shape


@dataclass(frozen=True)
class ScanFacts:
    """What a `while` that was a scan does. Its state is (i, constants, carries, xs, ys): step t reads xs[t] and writes
    ys[t], with t = i, or length - 1 - i if reverse; constants and xs pass through unchanged."""

    length: int
    num_consts: int
    num_carry: int
    num_xs: int
    num_ys: int
    reverse: bool


# --- calls --------------------------------------------------------------------------------------------------------

def call(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction] | None:
    """jit, custom_jvp_call and their like: the called jaxpr on the operands."""
    jaxpr = called_jaxpr(eqn)
    if jaxpr is None or len(compat.open_jaxpr(jaxpr).invars) != len(operands):
        return None
    return scope.inline_or_call(jaxpr, operands, _call_name(eqn))


def _call_name(eqn: Any) -> str:
    primitive, name = eqn.primitive.name, eqn.params.get("name")
    if primitive in ("jit", "pjit") and name:
        return f"jit({name})"
    return "" if primitive == "hlofuse" else primitive


def remat(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction] | None:
    """jax.checkpoint. When differentiated, the operands pass a barrier, lest what is computed again be merged with what
    was computed before."""
    prevent_cse = eqn.params.get("prevent_cse", True)
    flags = prevent_cse if isinstance(prevent_cse, tuple) else (prevent_cse,) * len(operands)
    if eqn.params.get("differentiated") and any(flags):
        guarded = iter(_barrier(scope, [x for x, flag in zip(operands, flags, strict=True) if flag]))
        operands = [next(guarded) if flag else x for x, flag in zip(operands, flags, strict=True)]
    return scope.inline_or_call(called_jaxpr(eqn), operands, "checkpoint")


def _barrier(scope: Scope, values: Sequence[Instruction]) -> list[Instruction]:
    packed = scope.tuple(values)
    return scope.elements(scope.emit("opt-barrier", packed, shape=packed.shape))


def optimization_barrier(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    return _barrier(scope, operands) if operands else []


def custom_linear_solve(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    """The `solve` function that the user gave, on its own constants and the right-hand sides."""
    counts, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    start = int(counts.matvec) + int(counts.vecmat)
    total = start + int(counts.solve) + int(counts.transpose_solve)
    arguments = [*operands[start:start + int(counts.solve)], *operands[total:]]
    results = scope.inline_or_call(jaxprs.solve, arguments, "custom_linear_solve")
    return results[:len(eqn.outvars)]


def high_level_call(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction] | None:
    """An equation that JAX itself takes apart just before lowering."""
    jaxpr = compat.low_level_jaxpr(eqn)
    return None if jaxpr is None else scope.evaluate_here(jaxpr, operands)


# --- scan ---------------------------------------------------------------------------------------------------------

def scan(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    """A counted `while` that reads slices of xs and writes slices of ys."""
    params = eqn.params
    jaxpr, length, reverse = params["jaxpr"], int(params["length"]), bool(params["reverse"])
    num_consts, num_carry = compat.scan_counts(params)
    consts, carry, xs = operands[:num_consts], operands[num_consts:num_consts + num_carry], operands[
        num_consts + num_carry:]
    y_shapes = [compat.physical_shape(v.aval) for v in eqn.outvars[num_carry:]]
    if length == 0:
        return [*carry, *(scope.full(0, shape) for shape in y_shapes)]
    if length == 1:
        results = scope.inline_or_call(
            jaxpr, [*consts, *carry, *(scope.reshape(x, x.dims[1:]) for x in xs)], "scan")
        stacked = [scope.reshape(y, shape.dims) for y, shape in zip(results[num_carry:], y_shapes, strict=True)]
        return [*results[:num_carry], *stacked]

    captured = scope.importer.captures(jaxpr)
    constants = [*consts, *scope.captured_by(jaxpr)]
    ys = [scope.full(0, shape) for shape in y_shapes]
    index = scope.scalar(0, "s32")
    facts = ScanFacts(length, len(constants), num_carry, len(xs), len(ys), reverse)
    state = [index, *constants, *carry, *xs, *ys]
    shapes = [value.array for value in state]

    def condition(inner: Scope, values: list[Instruction]) -> Instruction:
        return inner.compare("LT", values[0], length)

    def body(inner: Scope, values: list[Instruction]) -> Instruction:
        step = values[0]
        position = inner.sub(inner.like(step, length - 1), step) if reverse else step
        first_x = 1 + facts.num_consts + num_carry
        first_y = first_x + facts.num_xs
        slices = [_slice_at(inner, x, position) for x in values[first_x:first_y]]
        arguments = [*values[1:1 + num_consts], *values[1 + facts.num_consts:first_x], *slices]
        results = inner.evaluate(jaxpr, arguments)
        written = [_write_at(inner, y, update, position)
                   for y, update in zip(values[first_y:], results[num_carry:], strict=True)]
        return inner.tuple([inner.add(step, 1), *values[1:1 + facts.num_consts], *results[:num_carry],
                            *values[first_x:first_y], *written])

    results = _while(scope, state, shapes, captured, 1 + num_consts, condition, body,
                     ("scan", scope.importer.keep(jaxpr), facts), {"scan": facts})
    first_carry = 1 + facts.num_consts
    return [*results[first_carry:first_carry + num_carry], *results[first_carry + num_carry + len(xs):]]


def _slice_at(scope: Scope, x: Instruction, position: Instruction) -> Instruction:
    zero = scope.scalar(0, "s32")
    sizes = (1, *x.dims[1:])
    return scope.reshape(scope.dynamic_slice(x, [position, *[zero] * (x.array.rank - 1)], sizes), sizes[1:])


def _write_at(scope: Scope, y: Instruction, update: Instruction, position: Instruction) -> Instruction:
    zero = scope.scalar(0, "s32")
    return scope.dynamic_update_slice(y, scope.reshape(update, (1, *update.dims)),
                                      [position, *[zero] * (y.array.rank - 1)])


# --- while --------------------------------------------------------------------------------------------------------

def while_(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    """`lax.while_loop`. A batched predicate loops while any is true; an element whose own is false stays as it is."""
    params = eqn.params
    cond_jaxpr, body_jaxpr = params["cond_jaxpr"], params["body_jaxpr"]
    num_cond, num_body = int(params["cond_nconsts"]), int(params["body_nconsts"])
    captured = tuple({id(c): c for j in (cond_jaxpr, body_jaxpr) for c in scope.importer.captures(j)}.values())
    state = [*operands[:num_cond + num_body], *(scope.captured(c) for c in captured), *operands[num_cond + num_body:]]
    first_carry = num_cond + num_body + len(captured)
    batch_dims = tuple(cond_jaxpr.out_avals[0].shape)

    def predicate(inner: Scope, values: list[Instruction]) -> Instruction:
        return inner.evaluate(cond_jaxpr, [*values[:num_cond], *values[first_carry:]], name="cond")[0]

    def condition(inner: Scope, values: list[Instruction]) -> Instruction:
        live = predicate(inner, values)
        if not batch_dims:
            return live
        return inner.reduce(live, inner.scalar(False, "pred"), range(len(batch_dims)), inner.combiner("or", "pred"))

    def body(inner: Scope, values: list[Instruction]) -> Instruction:
        carry = values[first_carry:]
        results = inner.evaluate(body_jaxpr, [*values[num_cond:num_cond + num_body], *carry], name="body")
        if batch_dims:
            live = predicate(inner, values)
            axes = range(len(batch_dims))
            results = [inner.select(inner.broadcast(live, new.dims, axes), new, old)
                       for new, old in zip(results, carry, strict=True)]
        return inner.tuple([*values[:first_carry], *results])

    key = ("while", scope.importer.keep(cond_jaxpr), scope.importer.keep(body_jaxpr))
    results = _while(scope, state, [v.array for v in state], captured, num_cond + num_body, condition, body, key, {})
    return results[first_carry:]


def _while(scope: Scope, state: Sequence[Instruction], shapes: Sequence[Shape], captured: Sequence[Any],
           first_captured: int, condition: Any, body: Any, key: tuple[Any, ...],
           attrs: dict[str, Any]) -> list[Instruction]:
    importer = scope.importer
    condition = importer.computation(
        ("condition", *key), lambda: scope.build_on_tuple("condition", shapes, captured, first_captured, condition))
    body = importer.computation(
        ("body", *key), lambda: scope.build_on_tuple("body", shapes, captured, first_captured, body))
    packed = scope.tuple(state)
    loop = scope.emit("while", packed, shape=packed.shape, condition=condition, body=body, **attrs)
    if condition.effects or body.effects:
        scope.effects.append(loop)
    return scope.elements(loop)


# --- cond ---------------------------------------------------------------------------------------------------------

def cond(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction] | None:
    """`lax.cond` and `lax.switch`: every branch gets all operands. An index that was a pred is used as one."""
    index, *arguments = operands
    branches = list(eqn.params["branches"])
    if len(branches) == 1 or index.opcode == "constant":
        chosen = min(max(int(index.literal), 0), len(branches) - 1) if len(branches) > 1 else 0
        return scope.inline_or_call(branches[chosen], arguments, "cond")
    if eqn.params.get("branches_platforms") is not None:
        return None
    if index.opcode == "convert" and index.operands[0].element_type == "pred" and len(branches) == 2:
        index, branches = index.operands[0], branches[::-1]
    elif index.element_type != "s32":
        index = scope.convert(index, "s32")
    captured = tuple({id(c): c for j in branches for c in scope.importer.captures(j)}.values())
    packed = scope.tuple([*arguments, *(scope.captured(c) for c in captured)])
    shapes = [value.array for value in packed.operands]

    identities = tuple(id(c) for c in captured)

    def branch(jaxpr: Any, name: str) -> Computation:
        def body(inner: Scope, values: list[Instruction]) -> Instruction:
            return inner.tuple(inner.evaluate(jaxpr, values[:len(arguments)]))

        return scope.importer.computation(
            ("branch", scope.importer.keep(jaxpr), identities),
            lambda: scope.build_on_tuple(name, shapes, captured, len(arguments), body))

    computations = tuple(branch(jaxpr, f"branch_{number}") for number, jaxpr in enumerate(branches))
    result = scope.emit("conditional", index, *[packed] * len(computations), shape=computations[0].root.shape,
                        branch_computations=computations)
    if any(c.effects for c in computations):
        scope.effects.append(result)
    return scope.elements(result)


def platform_index(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction] | None:
    """Which branch of `lax.platform_dependent` is for the platform that the module is for, if that is known."""
    platform = scope.importer.platform
    if platform is None:
        return None
    for index, platforms in enumerate(eqn.params["platforms"]):
        if platforms is None or platform in platforms:
            return [scope.scalar(index, "s32")]
    return None


RULES: dict[str, Rule] = {
    **dict.fromkeys(CALLS, call),
    **dict.fromkeys(REMATS, remat),
    "optimization_barrier": optimization_barrier,
    "custom_linear_solve": custom_linear_solve,
    "call_hi_primitive": high_level_call,
    "platform_index": platform_index,
    "scan": scan,
    "while": while_,
    "cond": cond,
}
