"""A scheduled reduction while its kernel is written: its names, and what its accumulators begin with.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hlofuse.codegen.batches import Batch
from hlofuse.codegen.scalar_expr import literal_expr
from hlofuse.hlo.module import Computation, Instruction
from hlofuse.hlo.opcode import identity_of
from hlofuse.hlo.shape import Shape


@dataclass
class Reduction:
    """One scheduled reduction while its kernel is written."""

    instruction: Instruction
    reducer: str
    types: list[str]
    starts: list[str]      # what accumulators begin with
    late_init: list[str]   # an initial value that is not the identity, folded in once at the end
    names: list[str]
    batch: Batch | None = None


def rounded(element_type: str, value: str) -> str:
    return f"round_{element_type}({value})" if element_type in ("f16", "bf16") else value


def initial_values(reducer: Computation, element_type: str, init: str) -> tuple[str, list[str]]:
    """What every lane begins with, and what is folded in once at the end. HLO wants an identity as initial value; JAX
    lets users give another one."""
    root = reducer.root
    simple = len(reducer.parameters) == 2 and set(root.operands) == set(reducer.parameters)
    neutral = identity_of(root.opcode, element_type) if simple else None
    if neutral is None:
        return init, []
    zero = literal_expr(np.zeros((), Shape(element_type).dtype), element_type)
    if init == literal_expr(neutral, element_type) or (root.opcode == "add" and init == zero):
        return init, []
    return literal_expr(neutral, element_type), [init]
