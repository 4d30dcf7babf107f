"""The rule engine of the passes: small local rewrites, keyed by opcode, tried until none applies.

A rule is a function from an instruction to its replacement or `None`. One forward walk in post-order settles every
instruction: its operands are settled already, a replacement is settled in turn, so one walk reaches the fixpoint of
local rules in near-linear time. Rules are directional: a cycle of rules is a defect and ends in `RewriteLoopError`.
Instructions with control predecessors are never replaced; parameters have no rules.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hlofuse.errors import HlofuseError
from hlofuse.hlo.module import NO_METADATA, Computation, Instruction, Metadata, Module
from hlofuse.hlo.traverse import map_computations, with_changes

Rule = Callable[[Instruction], "Instruction | None"]
Readers = Callable[[Instruction], int]
ReaderRule = Callable[[Instruction, Readers], "Instruction | None"]

_FIRINGS_PER_INSTRUCTION = 200


class RewriteLoopError(HlofuseError):
    """Rules that undo one another; names the last ones that fired."""


class RuleTable:
    """The rules of one pass, in the order in which they are tried on each opcode."""

    def __init__(self) -> None:
        self.plain: dict[str, list[Rule]] = {}
        self.reading: dict[str, list[ReaderRule]] = {}

    def include(self, other: RuleTable) -> None:
        """Adds the rules of another table, behind the ones that are here."""
        for opcode, rules in other.plain.items():
            self.plain.setdefault(opcode, []).extend(rules)
        for opcode, reading in other.reading.items():
            self.reading.setdefault(opcode, []).extend(reading)

    def on(self, *opcodes: str) -> Callable[[Rule], Rule]:
        """Registers a rule `instruction -> replacement | None` for these opcodes."""
        def register(rule: Rule) -> Rule:
            for opcode in opcodes:
                self.plain.setdefault(opcode, []).append(rule)
            return rule
        return register

    def on_readers(self, *opcodes: str) -> Callable[[ReaderRule], ReaderRule]:
        """As `on`, for a rule that also asks how many readers an instruction has (as counted before the walk)."""
        def register(rule: ReaderRule) -> ReaderRule:
            for opcode in opcodes:
                self.reading.setdefault(opcode, []).append(rule)
            return rule
        return register


def rewrite(module: Module, table: RuleTable) -> Module:
    """Every computation of the module with the table's rules applied until none fires; itself if none did."""
    return map_computations(module, lambda computation: rewrite_computation(computation, table))


def rewrite_computation(computation: Computation, table: RuleTable) -> Computation:
    """The computation with the table's rules applied until none fires; itself if none did."""
    if not any(i.opcode in table.plain or i.opcode in table.reading for i in computation.instructions):
        return computation
    walk = _Walk(computation, table)
    for instruction in computation.instructions:
        walk.settle(instruction)
    new = walk.new
    root = new.get(computation.root, computation.root)
    effects = tuple(new.get(e, e) for e in computation.effects)
    if root is computation.root and effects == computation.effects:
        return computation
    return Computation(computation.name, computation.parameters, root, effects)


class _Walk:
    """One walk. `new` maps an instruction that changed to its settled form; `settled` holds final nodes."""

    def __init__(self, computation: Computation, table: RuleTable) -> None:
        self.table = table
        self.opcodes = table.plain.keys() | table.reading.keys()
        self.new: dict[Instruction, Instruction] = {}
        self.settled: set[Instruction] = set()
        self.fuel = _FIRINGS_PER_INSTRUCTION * (len(computation.instructions) + 10)
        self.recent: list[str] = []
        self.counts: Counter[Instruction] = Counter()
        if table.reading:
            self.counts.update(o for i in computation.instructions for o in i.operands)
            self.counts[computation.root] += 1

    def readers(self, instruction: Instruction) -> int:
        return self.counts[instruction] or 1

    def settle(self, original: Instruction) -> None:
        """Finds the final form of an instruction whose operands are settled."""
        rebuilt = self.relinked(original) if self.new else original
        if rebuilt.opcode in self.opcodes:
            replacement = self.fire(rebuilt)
            if replacement is not None:
                rebuilt = self.settle_replacement(rebuilt, replacement)
        self.settled.add(rebuilt)
        if rebuilt is not original:
            self.new[original] = rebuilt
            if self.table.reading:
                self.counts[rebuilt] += self.counts[original]

    def settle_replacement(self, instruction: Instruction, replacement: Instruction) -> Instruction:
        """Settles what a rule made, node by node; iterative, because rules may move things through long chains.

        A node that is neither settled nor in `new` was made by a rule: it inherits metadata and the name hint.
        """
        forward = {instruction: replacement}  # what a node was replaced by, before that is settled itself
        hints = {replacement: instruction.name}
        stack = [instruction]
        while stack:
            node = stack[-1]
            if node in self.settled or node in self.new:
                stack.pop()
                continue
            target = forward.get(node)
            if target is not None:
                if target in self.settled or target in self.new:
                    self.new[node] = self.new.get(target, target)
                    stack.pop()
                else:
                    stack.append(target)
                continue
            pending = [o for o in node.operands if o not in self.settled and o not in self.new]
            if pending:
                stack.extend(reversed(pending))
                continue
            rebuilt = _inheriting(self.relinked(node), instruction.metadata, hints.get(node, ""))
            following = self.fire(rebuilt)
            if following is not None:
                forward[node] = following
                hints.setdefault(following, rebuilt.name)
                continue
            self.settled.add(rebuilt)
            if rebuilt is not node:
                self.new[node] = rebuilt
            stack.pop()
        return self.new[instruction]

    def relinked(self, instruction: Instruction) -> Instruction:
        """The instruction on the settled forms of its operands."""
        new = self.new
        if new.keys().isdisjoint(instruction.operands) and new.keys().isdisjoint(instruction.control):
            return instruction
        return with_changes(instruction, operands=[new.get(o, o) for o in instruction.operands],
                            control=[new.get(c, c) for c in instruction.control])

    def fire(self, instruction: Instruction) -> Instruction | None:
        """The replacement by the first rule that applies."""
        if instruction.control:
            return None
        for rule in self.table.plain.get(instruction.opcode, ()):
            replacement = rule(instruction)
            if replacement is not None:
                return self.checked(instruction, replacement, rule.__name__)
        for reading_rule in self.table.reading.get(instruction.opcode, ()):
            replacement = reading_rule(instruction, self.readers)
            if replacement is not None:
                return self.checked(instruction, replacement, reading_rule.__name__)
        return None

    def checked(self, instruction: Instruction, replacement: Instruction, rule: str) -> Instruction:
        assert replacement is not instruction, f"{rule} answered its own instruction"
        assert replacement.shape == instruction.shape, f"{rule}: {instruction!r} became {replacement!r}"
        self.fuel -= 1
        if self.fuel < 20:
            self.recent.append(f"{rule}({instruction.opcode})")
        if self.fuel < 0:
            raise RewriteLoopError("These rules undo one another: " + ", ".join(self.recent))
        return replacement


def _inheriting(made: Instruction, metadata: Metadata, name: str) -> Instruction:
    """What a rule made, with the metadata and the name hint of what it replaces, where it has none of its own."""
    metadata = metadata if made.metadata is NO_METADATA else made.metadata
    name = made.name or ("" if made.opcode == "constant" else name)
    if metadata is made.metadata and name == made.name:
        return made
    return Instruction(made.opcode, made.shape, made.operands, made.attrs, name, metadata, made.control)
