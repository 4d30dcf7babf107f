"""Contraction: a product that only a sum reads is computed with it in one rounding, an fma.

Decided here and not by compilers, which get flags that forbid it, so that all dialects agree. Only steps of loops are
contracted: they are bound by arithmetic where most kernels are bound by memory, and XLA contracts them too.
"""
from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator

from hlofuse.fusion.loop_structure import LoopStructure
from hlofuse.hlo.module import Instruction

_MOVES = ("reshape", "transpose")     # what may stand between the product and the sum


def products_in_sums(structures: Iterable[LoopStructure]) -> Iterator[tuple[Instruction, int]]:
    """Sums and differences of steps, each with the number of the operand that is such a product."""
    for s in structures:
        needed = (*(s.update(k) for k in s.carries), *(t.update for t in s.stacked), s.predicate)
        uses = Counter(itertools.chain(needed, *(i.operands for i in s.values)))
        for i in s.values:
            if i.opcode in ("add", "subtract") and i.element_type in ("f32", "f64"):
                number = next((n for n, o in enumerate(i.operands) if _is_product(o, uses, s)), None)
                if number is not None:
                    yield i, number


def _is_product(value: Instruction, uses: Counter[Instruction], s: LoopStructure) -> bool:
    while uses[value] == 1 and value in s.varying:
        if value.opcode == "multiply":
            return True
        if value.opcode not in _MOVES:
            return False
        value = value.operands[0]
    return False
