"""What became of every producer–consumer edge, as records: the explanation's lines and its JSON are both made of these.

Names are those of the optimized module's text. A refused edge names its rule (producer-consumer, no cycle, shape, no
side effects, memory), or "no gain" where joining is legal but does not pay.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hlofuse.fusion.coloring import MIN_GAIN
from hlofuse.fusion.edge_decisions import EdgeDecision, explain_edges
from hlofuse.fusion.edge_numbers import EdgeNumbers, bytes_at_stake, join_numbers, pair_numbers
from hlofuse.fusion.fuse import Fused
from hlofuse.fusion.graph import FREE_SHAPES
from hlofuse.fusion.plan import Refusal
from hlofuse.hlo.module import Instruction
from hlofuse.hlo.printer import instruction_names


@dataclass(frozen=True)
class EdgeReport:
    """One edge. `through`: free instructions between the two. `status`: fused, recomputed (the consumer's kernel has a
    copy of the producer) or refused. `numbers` are missing where one kernel is not legal."""

    producer: str
    consumer: str
    through: tuple[str, ...]
    status: str
    rule: str | None
    reason: str | None
    bytes_at_stake: int
    numbers: EdgeNumbers | None

    def to_json(self, max_registers: int) -> dict[str, object]:
        found: dict[str, object] = {
            "producer": self.producer, "consumer": self.consumer, "through": list(self.through), "status": self.status,
            "rule": self.rule, "reason": self.reason, "bytes_at_stake": self.bytes_at_stake}
        if self.numbers is not None:
            n = self.numbers
            found |= {"launches_saved": n.launches_saved, "bytes_unfused": n.bytes_unfused,
                      "bytes_fused": n.bytes_fused, "bytes_saved": n.bytes_saved, "saving_ratio": n.saving_ratio,
                      "delta": n.delta, "registers": n.registers, "max_registers": max_registers,
                      "unfused_us": n.unfused_us, "fused_us": n.fused_us}
        return found


def report_edges(fused: Fused) -> list[EdgeReport]:
    """A record for every edge, ordered by consumer, then producer."""
    writer = _Writer(fused)
    return [writer.report(d) for d in explain_edges(fused.coloring)]


class _Writer:
    def __init__(self, fused: Fused) -> None:
        self.fused, self.costs, self.coloring = fused, fused.costs, fused.coloring
        self.names = instruction_names(fused.graph.computation)
        self._joins: dict[tuple[int, int], EdgeNumbers | None] = {}
        self._refusals: dict[tuple[int, int], tuple[str, str]] = {}

    def report(self, d: EdgeDecision) -> EdgeReport:
        u, v = d.producer, d.consumer
        status, rule, reason = self._verdict(d)
        numbers = None
        if d.kernels is None:
            numbers = pair_numbers(self.costs, self.coloring, u, v)
        elif d.reason == "no gain":
            numbers = self._join(d.kernels)
        return EdgeReport(self.name(u), self.name(v), self._through(u, v), status, rule, reason,
                          bytes_at_stake(self.costs, self.coloring, u, v), numbers)

    def name(self, vertex: int) -> str:
        return self.names[self.instruction(vertex)]

    def instruction(self, vertex: int) -> Instruction:
        return self.fused.graph.vertices[vertex].instruction

    def _verdict(self, d: EdgeDecision) -> tuple[str, str | None, str | None]:
        if d.status == "fused":
            return "fused", None, None
        if d.status == "cloned":
            return "recomputed", None, f"computed in {len(self.coloring.copies[d.producer])} kernels"
        if self._is_epilogue(d):
            return "fused", None, "the epilogue of a library call"
        reasons = {"fixed": self._fixed, "conflict": self._conflict, "cycle": self._cycle, "no plan": self._no_plan,
                   "no gain": self._no_gain}
        return "refused", *reasons[d.reason or "no plan"](d)

    def _is_epilogue(self, d: EdgeDecision) -> bool:
        epilogues, producer = self.fused.graph.epilogues, self.instruction(d.producer)
        return (d.reason == "fixed" and self.instruction(d.consumer) in epilogues
                and (producer.opcode == "dot" or producer in epilogues))

    def _fixed(self, d: EdgeDecision) -> tuple[str, str]:
        alone = d.producer if self.costs.is_fixed[d.producer] else d.consumer
        instruction, graph = self.instruction(alone), self.fused.graph
        what = "is a call of its own"
        if instruction in graph.epilogues:
            what = "is computed by its dot's library call"
        elif instruction in graph.left:
            what = f"is left to XLA: {graph.left[instruction]}"
        return "no side effects", f"{self.name(alone)} {what}"

    def _conflict(self, d: EdgeDecision) -> tuple[str, str]:
        u, v = d.conflict or (d.producer, d.consumer)
        if self.instruction(u) in self.fused.graph.loops or self.instruction(v) in self.fused.graph.loops:
            return "producer-consumer", self.costs.loop_conflict(u, v) or "a loop shares no kernel with it"
        return "producer-consumer", f"{self.name(u)} and {self.name(v)} reduce different axes"

    def _cycle(self, d: EdgeDecision) -> tuple[str, str]:
        return "no cycle", "between them stands " + ", ".join(self.name(v) for v in d.path[1:] or d.path)

    def _no_plan(self, d: EdgeDecision) -> tuple[str, str]:
        assert d.kernels is not None
        if d.kernels not in self._refusals:
            self._refusals[d.kernels] = self._refusal(*d.kernels)
        return self._refusals[d.kernels]

    def _refusal(self, a: int, b: int) -> tuple[str, str]:
        members, outputs = self.coloring.members, self.coloring.outputs
        try:
            self.costs.estimate(members[a] | members[b], outputs[a] | outputs[b])
        except Refusal as refusal:
            return refusal.rule, refusal.text(self.names)
        return "shape", "no kernel form covers both"

    def _no_gain(self, d: EdgeDecision) -> tuple[str, str]:
        more = d.delta or 0.0
        if more < -MIN_GAIN:
            return "no gain", f"one kernel would take {-more:.2f} us less than two, but the whole program more"
        return "no gain", f"one kernel would take {more:.2f} us more than two"

    def _join(self, kernels: tuple[int, int]) -> EdgeNumbers | None:
        if kernels not in self._joins:
            self._joins[kernels] = join_numbers(self.costs, self.coloring, *kernels)
        return self._joins[kernels]

    def _through(self, u: int, v: int) -> tuple[str, ...]:
        """The free instructions on the shortest way from one vertex to the other."""
        results = set(self.fused.graph.vertices[u].results)
        ways: list[tuple[Instruction, ...]] = [(o,) for o in self.instruction(v).operands]
        seen: set[Instruction] = set()
        while ways:
            following = []
            for way in ways:
                last = way[-1]
                if last in results:
                    return tuple(self.names[i] for i in reversed(way[:-1]))
                if last not in seen and last.opcode in FREE_SHAPES | {"tuple", "get-tuple-element"}:
                    seen.add(last)
                    following += [(*way, o) for o in last.operands]
            ways = following
        return ()


def edge_lines(edges: list[EdgeReport], max_registers: int) -> list[str]:
    """The records as aligned text."""
    pairs = [f"{e.producer} -> {e.consumer}" + (f" ({', '.join(e.through)})" if e.through else "") for e in edges]
    width = min(48, max(map(len, pairs), default=0))
    return [f"  {pair:<{width}}  {e.status:<10}  {_facts(e, max_registers)}".rstrip()
            for pair, e in zip(pairs, edges, strict=True)]


def _facts(e: EdgeReport, max_registers: int) -> str:
    parts = [": ".join(p for p in (e.rule, e.reason) if p)] if e.rule or e.reason else []
    n = e.numbers
    if n is None:
        parts.append(f"moves {size_text(e.bytes_at_stake)}")
    else:
        parts.append(f"{n.unfused_us:.2f} -> {n.fused_us:.2f} us, {saving_text(n.launches_saved, n.bytes_saved)} "
                     f"(ratio {n.saving_ratio:.3f}, delta {n.delta:.3f}), {n.registers} of {max_registers} registers")
    return "; ".join(parts)


def saving_text(launches: int, saved: int) -> str:
    """How many launches and bytes two kernels as one save, or add."""
    text = f"saves {launches} launch" + ("" if launches == 1 else "es")
    return f"{text}, adds {size_text(-saved)}" if saved < 0 else f"{text}, {size_text(saved)}"


def size_text(size: float) -> str:
    """Bytes in the unit that leaves three figures."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(size) < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.3g} {unit}"
        size /= 1000
    raise AssertionError


def free_instructions(fused: Fused) -> Mapping[str, int]:
    """How many instructions of each opcode have no kernel of their own: they are written where they are read."""
    count: dict[str, int] = {}
    for i in fused.graph.computation.instructions:
        if i in fused.graph.free and i not in fused.graph.vertex_of and i.opcode != "parameter":
            count[i.opcode] = count.get(i.opcode, 0) + 1
    return count
