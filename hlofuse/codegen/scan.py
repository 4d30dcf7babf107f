"""Cumulative operations while their kernel is written: the carry, and the values of a run or of a lane."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hlofuse.codegen.nest import Nest
from hlofuse.codegen.reduction import Reduction
from hlofuse.codegen.scalar_expr import c_type
from hlofuse.hlo.module import Instruction


@dataclass(frozen=True)
class Scan:
    """One cumulative operation in one pass. `name`: what this run (of a row), or each lane since the last stretch (of a
    column), folds to; `carry`: what all before it do."""

    instruction: Instruction
    reducer: str
    c_type: str
    start: str
    name: str
    carry: str

    @classmethod
    def of(cls, nest: Nest, i: Instruction) -> Scan:
        name = nest.values.name(i.name or "running")
        return cls(i, nest.values.reducer(i), c_type(i.element_type), nest.values.at(i.operands[1], ()), name,
                   nest.values.name(f"{name}_carry"))

    def fill(self, nest: Nest) -> None:
        """In the lane loop: what this element adds."""
        x = self.instruction.operands[0]
        nest.emit(f"{self.name}[l] = {nest.value(x, nest.plan.canonical(x, nest.where))};")

    def carry_on(self, nest: Nest) -> None:
        """In the lane loop of a column: takes this element in, and makes the result known."""
        i, x = self.instruction, self.instruction.operands[0]
        place = nest.plan.canonical(i, nest.where)
        nest.emit(f"{self.reducer}({self.name}[l], {nest.value(x, nest.plan.canonical(x, nest.where))});")
        result = nest.values.name(f"{self.name}_here")
        nest.emit(f"{self.c_type} {result} = {self.carry}[l];{nest.values.comment(i)}")
        nest.emit(f"{self.reducer}({result}, {self.name}[l]);")
        rounds = i.element_type in ("f16", "bf16")
        nest.values.scope.memo[i, place] = f"round_{i.element_type}({result})" if rounds else result


def scans_needed(nest: Nest, reductions: Sequence[Reduction], stores: Sequence[int], level: int) -> list[Instruction]:
    """The cumulative operations that a pass evaluates, operands first; reductions of earlier passes are known."""
    plan = nest.plan
    stack = [plan.computation.outputs[k] for k in stores]
    for r in reductions:
        stack.extend(r.instruction.operands[:len(r.names)])
    seen: set[Instruction] = set()
    while stack:
        i = stack.pop()
        if i in seen or plan.levels.get(i, level) < level:
            continue
        seen.add(i)
        stack.extend(i.operands)
    return [i for i in plan.scans if i in seen]
