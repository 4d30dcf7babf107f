"""What a forced or forbidden pair changes: the program as it was colored beside the program as somebody wants it."""
from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from hlofuse.errors import HlofuseError
from hlofuse.explore.edge_report import report_edges, size_text
from hlofuse.fusion.constraints import Pair
from hlofuse.fusion.fuse import Fused
from hlofuse.fusion.graph import FusionGraph
from hlofuse.fusion.plan import Refusal
from hlofuse.hlo.module import Instruction
from hlofuse.hlo.printer import instruction_names

Names = Sequence[tuple[str, str]]
_NEAR, _LISTED = 5, 8


def named_pairs(graph: FusionGraph, pairs: Names) -> tuple[Pair, ...]:
    """The vertices by their names in the optimized text; an error that lists near names."""
    by_name = {name: i for i, name in instruction_names(graph.computation).items()}
    found = []
    for a, b in pairs:
        u, v = _named(graph, by_name, a), _named(graph, by_name, b)
        if u == v:
            raise HlofuseError(f"{a} and {b} are one instruction")
        found.append((u, v))
    return tuple(found)


def _named(graph: FusionGraph, by_name: dict[str, Instruction], name: str) -> int:
    if name not in by_name:
        known = [n for n, i in by_name.items() if i in graph.vertex_of]
        near = difflib.get_close_matches(name, known, n=_NEAR, cutoff=0.4)
        hint = f"; near: {', '.join(near)}" if near else ""
        raise HlofuseError(f"no instruction is called {name!r} in the optimized program{hint}")
    instruction = by_name[name]
    if instruction not in graph.vertex_of:
        what = ("is an argument, in memory" if instruction.opcode == "parameter"
                else "is free: it is written in every kernel that reads it")
        raise HlofuseError(f"{name} {what}")
    return graph.vertex_of[instruction]


def refused_text(graph: FusionGraph, force: Names, refusal: Refusal) -> str:
    """Why the forced pairs cannot be."""
    pairs = " and ".join(f"{a},{b}" for a, b in force)
    return f"cannot force {pairs} into one kernel: {refusal.rule}: {refusal.text(instruction_names(graph.computation))}"


def explain_difference(chosen: Any, wished: Any, force: Names, forbid: Names) -> str:
    """Two compilations of one program, their totals side by side, then the kernels and edges that differ."""
    title = [f"force {a},{b}" for a, b in force] + [f"forbid {a},{b}" for a, b in forbid]
    lines = [f"{', '.join(title)} on {chosen.device.name}", "", *_table(chosen, wished), ""]
    before, after = _kernels(chosen), _kernels(wished)
    if before.keys() == after.keys():
        return "\n".join([*lines[:-1], "", "the same kernels"])
    lines += [f"- {before[k]}" for k in before if k not in after]
    lines += [f"+ {after[k]}" for k in after if k not in before]
    return "\n".join([*lines, "", *_edges(chosen.fusion, wished.fusion)]).rstrip()


def _table(chosen: Any, wished: Any) -> list[str]:
    rows = [("", "chosen", "wished", "difference")]
    old, new = chosen.launches(), wished.launches()
    numbers = [("kernels", len(chosen.clusters), len(wished.clusters)), ("launches", old.total, new.total)]
    rows += [(name, str(a), str(b), f"{b - a:+d}") for name, a, b in numbers]
    a, b = chosen.fusion.coloring.predicted_cost, wished.fusion.coloring.predicted_cost
    rows.append(("predicted us", f"{a:.2f}", f"{b:.2f}", f"{b - a:+.2f}"))
    more = size_text(abs(new.bytes - old.bytes))
    rows.append(("bytes", size_text(old.bytes), size_text(new.bytes), ("-" if new.bytes < old.bytes else "+") + more))
    a, b = (max((c.cost.registers for c in x.clusters), default=0) for x in (chosen, wished))
    rows.append(("registers", str(a), str(b), f"{b - a:+d}"))
    widths = [max(len(row[k]) for row in rows) for k in range(4)]
    return [f"{row[0]:<{widths[0]}}  " + "  ".join(f"{x:>{w}}" for x, w in zip(row[1:], widths[1:], strict=True))
            for row in rows]


def _kernels(compilation: Any) -> dict[frozenset[frozenset[int]], str]:
    """The launches by what is in them, with a line of text for each."""
    fused = compilation.fusion
    names, kernel_names = instruction_names(fused.graph.computation), instruction_names(fused.computation)
    found = {}
    for planned in fused.kernels:
        members = sorted({v for kernel in planned.kernels for v in kernel.members})
        listed = [names[fused.graph.vertices[v].instruction] for v in members]
        more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
        cost = planned.cost
        found[frozenset(k.members for k in planned.kernels)] = (
            f"{kernel_names[planned.instruction]}: {cost.time_us:.2f} us, {size_text(cost.bytes)}, {cost.registers} "
            f"registers: {', '.join(listed[:_LISTED])}{more}")
    return found


def _edges(chosen: Fused, wished: Fused) -> list[str]:
    after = {(e.producer, e.consumer): e for e in report_edges(wished)}
    lines = []
    for old in report_edges(chosen):
        new = after[old.producer, old.consumer]
        if new.status != old.status:
            why = f" ({new.rule}: {new.reason})" if new.rule else ""
            lines.append(f"{new.producer} -> {new.consumer}: {new.status}, was {old.status}{why}")
    return lines
