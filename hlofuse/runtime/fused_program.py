"""A fused module as a traceable JAX function: each cluster one custom call, everything else its JAX meaning.

What loops, branches and calls run are fused computations too, so their clusters are custom calls as well. A kernel gets
the memory of what it reads last, where that is donated or an element of a loop's state.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hlofuse.codegen.kernel import KernelText
from hlofuse.explore.launch_count import trip_count
from hlofuse.frontend.jax_compat import result_types
from hlofuse.fusion.called import CALLERS
from hlofuse.hlo.module import Computation, Instruction
from hlofuse.hlo.shape import Shape
from hlofuse.hlo.to_jax import evaluate_computation, evaluate_instruction, wide_types
from hlofuse.runtime.loop_state import Aliases, free_aliases, plan_state
from hlofuse.runtime.shim import call_kernel

KernelCall = Callable[[Sequence[Any], Sequence[Any], Mapping[int, int]], Sequence[Any]]


@dataclass(frozen=True)
class XlaKernel:
    """A loaded kernel and how to call it while JAX traces: `call(avals, operands, aliases)`. `extra`: arrays that a
    call takes behind its scratch arrays."""

    text: KernelText
    call: KernelCall
    extra: tuple[Shape, ...] = ()


def shim_call(key: int, name: str, platform: str) -> KernelCall:
    """Of a registered kernel."""
    return lambda avals, operands, aliases: call_kernel(avals, operands, key, aliases, name, platform)


class FusedProgram:
    """Evaluates fused computations while JAX traces, with the kernels that are `built`."""

    def __init__(self, built: Mapping[Instruction, XlaKernel]) -> None:
        self.built = built

    def run(self, entry: Computation, arguments: Sequence[Any], donated: frozenset[int]) -> list[Any]:
        """The results; operands in `donated` may be overwritten."""
        free = {entry.parameters[n] for n in donated}
        aliases = free_aliases(entry, self._texts(entry), free, [lambda source, kernel, result: True])
        value = self._evaluate(entry, arguments, aliases)
        return list(value) if entry.root.opcode == "tuple" else [value]

    def evaluate_call(self, i: Instruction, operands: Sequence[Any]) -> Any:
        """The value of a loop, a branch or a call."""
        with wide_types([i]):
            return self._loop(i, operands[0]) if i.opcode == "while" else evaluate_instruction(i, operands, self._body)

    def _texts(self, computation: Computation) -> dict[Instruction, KernelText]:
        return {i: self.built[i].text for i in computation.instructions if i in self.built}

    def _body(self, computation: Computation, arguments: Sequence[Any]) -> Any:
        return self._evaluate(computation, arguments, {})

    def _evaluate(self, computation: Computation, arguments: Sequence[Any], aliases: Aliases) -> Any:
        """The value of the root."""
        values: dict[Instruction, Any] = dict(zip(computation.parameters, arguments, strict=True))
        for i in computation.instructions:
            if i in values:
                continue
            inputs = [values[o] for o in i.operands]
            if i in self.built:
                values[i] = _call(i, self.built[i], inputs, aliases.get(i, {}))
            elif i.opcode == "fusion":
                results = evaluate_computation(i.attrs["calls"], inputs)
                values[i] = results[0] if isinstance(i.shape, Shape) else tuple(results)
            elif i.opcode in CALLERS:
                values[i] = self.evaluate_call(i, inputs)
            else:
                values[i] = evaluate_instruction(i, inputs)
        return values[computation.root]

    def _loop(self, loop: Instruction, state: Any) -> Any:
        condition, body = loop.attrs["condition"], loop.attrs["body"]
        plan = plan_state(loop, self._texts(body))

        def step(state: Any) -> Any:
            return self._evaluate(body, [state], plan.aliases)

        state = jax.tree.map(jnp.asarray, state)
        if plan.steps == 1:
            turn = _turned if self._is_one_call(body) else tuple
            state = lax.while_loop(lambda state: self._body(condition, [turn(state)]),
                                   lambda state: turn(step(turn(state))), turn(state))
            return turn(state)
        trips, rest = divmod(trip_count(loop) or 0, plan.steps)

        def trip(counted: Any) -> Any:
            n, state = counted
            for _ in range(plan.steps):
                state = step(state)
            return n + np.int32(1), state

        _, state = lax.while_loop(lambda counted: counted[0] < np.int32(trips), trip, (np.int32(0), state))
        for _ in range(rest):
            state = step(state)
        return state

    def _is_one_call(self, body: Computation) -> bool:
        """Whether a step is one kernel and no more. XLA would make its call the root of the loop's body, and then take
        the call's first operand, if that is the state's first element, for the next state's, which never changes. So
        the state's elements have to be in another order."""
        return all(o.opcode == "get-tuple-element" and o.operands[0] in self.built and o.attrs["index"] == k
                   for k, o in enumerate(body.root.operands))


def _turned(state: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(reversed(state))


def _call(i: Instruction, kernel: XlaKernel, inputs: Sequence[Any], aliases: Mapping[int, int]) -> Any:
    """One custom call."""
    results = [(s.dims, s.dtype) for s in (*i.result_shapes, *kernel.text.scratch, *kernel.extra)]
    outputs = kernel.call(result_types(inputs, results), inputs, aliases)[:len(i.result_shapes)]
    return outputs[0] if isinstance(i.shape, Shape) else tuple(outputs)
