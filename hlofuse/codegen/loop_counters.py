"""What a step knows of its number: the counters of a loop, and start indices that are functions of them."""
from __future__ import annotations

from hlofuse.codegen.values import Values
from hlofuse.fusion.loop_structure import LoopStructure
from hlofuse.hlo.index_map import to_c


def place_counters(v: Values, s: LoopStructure, step: str) -> None:
    """Makes the counters of a loop known inside it, where `step` counts from 0."""
    if s.counter is None:
        return
    for reader, k in s.elements.items():
        if k in s.counter.counts:
            count = s.position(reader, step)
            assert count is not None
            text = to_c(count)
            v.sources[reader] = lambda index, text=text: text    # type: ignore[misc]
    numbers = {i for i in s.values if i.opcode in ("add", "subtract", "select") and not i.dims}
    for i in (*numbers, *s.elements):
        if (i in numbers or s.elements[i] in s.counter.counts) and (p := s.position(i, step)) is not None:
            v.positions[i] = p
