"""The meaning of every opcode as `jax.lax`: the reference evaluator, the constant folder, and the runtime's way to run
what no generated kernel covers.

Values are arrays or tracers of exactly the instruction's type, tuples are Python tuples, tokens are `None`. All of it
can be traced by JAX. A type of 64 bits is computed as such even where JAX's x64 mode is off.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from hlofuse.errors import HlofuseError
from hlofuse.hlo import lax_calls, lax_elementwise, lax_structure
from hlofuse.hlo.module import Computation, Instruction, Module
from hlofuse.hlo.shape import AnyShape, Shape, TupleShape

_WIDE = frozenset({"s64", "u64", "f64", "c128"})

OpaqueEvaluator = Callable[[Any, Sequence[Any]], Sequence[Any]]
_opaque_evaluator: OpaqueEvaluator | None = None


def set_opaque_evaluator(evaluator: OpaqueEvaluator) -> None:
    """Says how an opaque instruction's equation runs: `evaluator(eqn, operand_values)` answers all its results."""
    global _opaque_evaluator
    _opaque_evaluator = evaluator


def evaluate_instruction(instruction: Instruction, operands: Sequence[Any],
                         evaluate: lax_calls.Evaluate | None = None) -> Any:
    """The instruction's value on the values of its operands: an array, or a tuple. `evaluate(computation, arguments)`
    is the value of the root of a computation that it calls, where that is not every instruction's meaning."""
    with wide_types([instruction]):
        return _value(instruction, operands, evaluate or _root_value)


def _value(instruction: Instruction, operands: Sequence[Any], evaluate: lax_calls.Evaluate) -> Any:
    meaning = TO_JAX.get(instruction.opcode)
    if meaning is None:
        raise HlofuseError(f"{instruction.opcode} has no meaning as jax.lax: {instruction!r} cannot be evaluated")
    value = meaning(instruction, operands, evaluate)
    shape = instruction.shape
    if isinstance(shape, Shape) and value is not None and (value.dtype != shape.dtype or value.shape != shape.dims):
        raise HlofuseError(f"evaluating {instruction!r} gave {value.dtype}{list(value.shape)}, not {shape}")
    return value


def evaluate_computation(computation: Computation, arguments: Sequence[Any]) -> list[Any]:
    """The results of a computation, one array each: the operands of a tuple root, or the root itself."""
    with wide_types(computation.instructions):
        value = _root_value(computation, arguments)
    return list(value) if isinstance(computation.root.shape, TupleShape) else [value]


def evaluate_module(module: Module, arguments: Sequence[Any]) -> list[Any]:
    """As `evaluate_computation` of its entry."""
    return evaluate_computation(module.entry, arguments)


def _root_value(computation: Computation, arguments: Sequence[Any]) -> Any:
    if len(arguments) != len(computation.parameters):
        raise HlofuseError(f"computation {computation.name!r} takes {len(computation.parameters)} argument(s), got "
                           f"{len(arguments)}")
    values: dict[Instruction, Any] = dict(zip(computation.parameters, arguments, strict=True))
    for instruction in computation.instructions:
        if instruction not in values:
            values[instruction] = _value(instruction, [values[o] for o in instruction.operands], _root_value)
    return values[computation.root]


def wide_types(instructions: Iterable[Instruction]) -> contextlib.AbstractContextManager[Any]:
    """x64 mode for what needs it, such as a random bit generator's 64-bit state, perhaps only inside a loop's body."""
    if jax.dtypes.canonicalize_dtype(np.int64) == np.int64 or not _has_wide_types(instructions):
        return contextlib.nullcontext()
    return jax.enable_x64(True)


def _has_wide_types(instructions: Iterable[Instruction]) -> bool:
    seen: set[Computation] = set()
    stack = [instructions]
    while stack:
        for instruction in stack.pop():
            if _is_wide(instruction.shape):
                return True
            called = [c for c in instruction.called if c not in seen] if instruction.attrs else []
            seen.update(called)
            stack.extend(c.instructions for c in called)
    return False


def _is_wide(shape: AnyShape) -> bool:
    if isinstance(shape, TupleShape):
        return any(_is_wide(element) for element in shape.elements)
    return shape.element_type in _WIDE


def _custom_call(instruction: Instruction, operands: Sequence[Any], evaluate: lax_calls.Evaluate) -> Any:
    """An opaque instruction runs its equation; a foreign library's function is not ours to call."""
    target, eqn = instruction.attrs["custom_call_target"], instruction.attrs.get("eqn")
    if eqn is None:
        hint = "; text cannot hold its equation" if target.startswith("jax.") else ""
        raise HlofuseError(f"custom-call to {target!r} cannot be evaluated{hint}: {instruction!r}")
    if _opaque_evaluator is None:
        raise HlofuseError(f"no evaluator of equations is set (set_opaque_evaluator), needed by {instruction!r}")
    results = tuple(_opaque_evaluator(eqn, operands))
    return results if isinstance(instruction.shape, TupleShape) else results[0]


def _of_operands(function: Callable[..., Any]) -> lax_calls.Meaning:
    return lambda instruction, operands, evaluate: function(*operands)


def _of_instruction(function: Callable[..., Any]) -> lax_calls.Meaning:
    return lambda instruction, operands, evaluate: function(instruction, *operands)


TO_JAX: dict[str, lax_calls.Meaning] = {
    **{name: _of_operands(function) for name, function in lax_elementwise.FUNCTIONS.items()},
    **{name: _of_instruction(function) for name, function in lax_elementwise.MEANINGS.items()},
    **{name: _of_instruction(function) for name, function in lax_structure.MEANINGS.items()},
    **lax_calls.MEANINGS,
    "custom-call": _custom_call,
}
