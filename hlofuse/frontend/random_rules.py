"""Import rules of random numbers.

A key type's algorithms are traced on raw keys and imported like any other jaxpr; threefry's hash itself is written
here, as 20 rounds of integer operations on every element, so that random bits fuse with what reads them.
"""
from __future__ import annotations

from typing import Any

from hlofuse.frontend import jaxpr_compat as compat
from hlofuse.frontend.scope import Rule, Scope
from hlofuse.hlo.module import Instruction
from hlofuse.hlo.shape import Shape

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry2x32(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    """Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), Threefry-2x32 with 20 rounds."""
    dims = compat.physical_shape(eqn.outvars[0].aval).dims
    key0, key1, x0, x1 = operands
    if key0.dims != key1.dims:
        key0, key1 = (scope.broadcast_to(key, dims) for key in (key0, key1))
    third = scope.binary("xor", scope.binary("xor", key0, key1), _PARITY)
    keys = [scope.broadcast_to(key, dims) for key in (key0, key1, third)]
    x0 = scope.add(scope.broadcast_to(x0, dims), keys[0])
    x1 = scope.add(scope.broadcast_to(x1, dims), keys[1])
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x0 = scope.add(x0, x1)
            x1 = scope.binary("xor", x0, _rotated(scope, x1, distance))
        x0 = scope.add(x0, keys[(group + 1) % 3])
        x1 = scope.add(scope.add(x1, keys[(group + 2) % 3]), group + 1)
    return [x0, x1]


def _rotated(scope: Scope, x: Instruction, distance: int) -> Instruction:
    left = scope.binary("shift-left", x, distance)
    return scope.binary("or", left, scope.binary("shift-right-logical", x, 32 - distance))


def random_bits(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    params = (int(eqn.params["bit_width"]), tuple(int(d) for d in eqn.params["shape"]))
    return _traced(scope, "bits", eqn.invars[0].aval.dtype._impl, operands, params)


def random_split(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    params = (tuple(int(d) for d in eqn.params["shape"]),)
    return _traced(scope, "split", eqn.invars[0].aval.dtype._impl, operands, params)


def random_seed(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    return _traced(scope, "seed", eqn.params["impl"], operands)


def random_fold_in(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    keys, data = operands
    dims, key = tuple(eqn.outvars[0].aval.shape), compat.key_dims(eqn.invars[0].aval)
    rank = keys.array.rank - len(key)
    keys = scope.broadcast_in_dim(keys, (*dims, *key), [*range(len(dims) - rank, len(dims)),
                                                        *range(len(dims), len(dims) + len(key))])
    return _traced(scope, "fold_in", eqn.invars[0].aval.dtype._impl, [keys, scope.broadcast_to(data, dims)])


def _traced(scope: Scope, kind: str, impl: Any, operands: list[Instruction],
            params: tuple[Any, ...] = ()) -> list[Instruction]:
    shapes: list[Shape] = [x.array for x in operands]
    return scope.evaluate_here(compat.trace_prng(kind, impl, shapes, params), operands)


def raw_key(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
    """random_wrap and random_unwrap: keys are raw words already."""
    return operands


RULES: dict[str, Rule] = {
    "threefry2x32": threefry2x32,
    "random_bits": random_bits,
    "random_split": random_split,
    "random_seed": random_seed,
    "random_fold_in": random_fold_in,
    "random_wrap": raw_key,
    "random_unwrap": raw_key,
}
