"""Kernels: the segments of one launch, written in a dialect.

A launch is one plan, or several that do not depend on each other (packed): then the first blocks run the first
segment, the next the second, and so on. Symbols are derived from the text, so equal kernels are one kernel.
"""
from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hlofuse.codegen.dialect import Argument, BlockShape, Dialect, Piece
from hlofuse.codegen.forms import FORMS, choose_form
from hlofuse.codegen.nest import Nest
from hlofuse.codegen.sizing import has_branches, shortest_run
from hlofuse.codegen.values import EmitError
from hlofuse.fusion.loop_work import loop_work
from hlofuse.fusion.plan import Plan, Segment, with_single_axes
from hlofuse.hlo.index_map import linearize
from hlofuse.hlo.module import post_order
from hlofuse.hlo.opcode import OPCODES
from hlofuse.hlo.shape import Shape

SYMBOL = "KERNEL_SYMBOL"
MAX_ITEMS = 2**31 - 1     # BLOCK is an int, also where several items share a block of the machine

WRITTEN_OUT = 16    # functions with long texts in one kernel, before they become calls
_LONG_FUNCTION = re.compile(
    r"\b((?:sin|cos|tan|asin|acos|atan|sinh|cosh|asinh|acosh|atanh|erf|expm1|log1p|cbrt|atan2)_of|float_pow)\(")


@dataclass(frozen=True)
class KernelText:
    """A kernel in one dialect. Its arguments are the cluster's operands, its results, then `scratch` arrays; `counters`
    zeroed unsigned integers go with them. `work` estimates the operations of one block."""

    dialect: str
    symbol: str
    text: str
    form: str
    blocks: int
    threads: int
    counters: int
    scratch: tuple[Shape, ...]
    shared_bytes: int
    work: int
    aliases: Mapping[int, int]   # operand -> result that may take its memory: read only where that result is written
    arguments: tuple[Argument, ...]         # of the kernel, without the counters
    dynamic_shared_bytes: int = 0    # what a launch has to ask for, beyond what the text declares with its size

    @property
    def digest(self) -> str:
        """Of the text and the launch: kernels with one digest are the same. `work` decides the grain of their tasks."""
        launch = (self.blocks, self.threads, self.counters, self.work)
        return hashlib.sha256(f"{launch}\0{self.code}".encode()).hexdigest()

    @property
    def code(self) -> str:
        """The text without its comments, which name lines of the user's files: what is compiled, and cached."""
        return without_comments(self.text)


@dataclass(frozen=True)
class _Written:
    """A segment's text and what the launch needs to know of it."""

    form: str
    arguments: list[Argument]
    body: str
    blocks: int
    nest: Nest
    work: int


def write_kernel(segments: Sequence[Segment], dialect: Dialect, hint: str = "fusion") -> KernelText:
    """The kernel of a launch. `EmitError` where a plan and its instructions disagree."""
    packed = len(segments) > 1
    written = [_write(s.plan, dialect, dialect.threads if packed else None) for s in segments]
    pieces: list[Piece] = []
    scratch: list[tuple[Argument, Shape]] = []
    counters = 0
    operand_count = 1 + max((n for s in segments for n in s.operands), default=-1)
    result_count = 1 + max(n for s in segments for n in s.results)
    names: list[Argument | None] = [None] * (operand_count + result_count)
    for n, (segment, w) in enumerate(zip(segments, written, strict=True)):
        inputs, outputs, extra = _split(w.arguments)
        places = [*segment.operands, *(operand_count + r for r in segment.results)]
        for place, argument in zip(places, (*inputs, *outputs), strict=True):
            names[place] = names[place] or _unique(argument, names)
        positions = [*places, *range(operand_count + result_count + len(scratch),
                                     operand_count + result_count + len(scratch) + len(extra))]
        pieces.append(Piece(w.arguments, w.body, w.blocks, counters, tuple(positions), n))
        scratch += [(argument, shape) for argument, (_, _, shape) in zip(extra, w.nest.scratch, strict=True)]
        counters += w.nest.counters
    arguments = [a if a is not None else Argument("IN", "u8", f"unused{k}") for k, a in enumerate(names)]
    for argument, _ in scratch:
        arguments.append(_unique(argument, arguments))
    sizing = written[0].nest.sizing
    block = BlockShape(sizing.threads, sizing.groups, written[0].nest.keeps and not packed)
    text = _with_calls(dialect.frame(SYMBOL, arguments, block, pieces))
    symbol = f"{_identifier(hint)}_{hashlib.sha256(without_comments(text).encode()).hexdigest()[:12]}"
    items = sum(w.blocks for w in written)
    blocks = -(-items // block.groups)
    if items > MAX_ITEMS:
        raise EmitError(f"{items} blocks, a launch has at most {MAX_ITEMS}")
    form = "packed" if packed else written[0].form
    work = max(1, sum(w.work for w in written) // max(1, blocks))
    return KernelText(dialect.name, symbol, text.replace(SYMBOL, symbol), form, blocks,
                      block.threads * block.groups, counters, tuple(shape for _, shape in scratch),
                      max(w.nest.shared_bytes for w in written), work, _launch_aliases(segments, written),
                      tuple(arguments))


def _with_calls(text: str) -> str:
    """The text with long functions called where there are many, not written out at each place."""
    if len(_LONG_FUNCTION.findall(text)) <= WRITTEN_OUT:
        return text
    return _LONG_FUNCTION.sub(r"call_\1(", text)


def _launch_aliases(segments: Sequence[Segment], written: Sequence[_Written]) -> dict[int, int]:
    """The segments' aliases, of operands that no other segment reads."""
    found: dict[int, int] = {}
    for segment, w in zip(segments, written, strict=True):
        for operand, result in _aliases(w).items():
            place = segment.operands[operand]
            if sum(place in s.operands for s in segments) == 1:
                found[place] = segment.results[result]
    return found


def _write(plan: Plan, dialect: Dialect, threads: int | None) -> _Written:
    if not dialect.vector_bytes and has_branches(plan.computation):
        plan = with_single_axes(plan, shortest_run(plan, dialect))
    nest = Nest(plan, dialect, threads)
    form = choose_form(nest)
    blocks = FORMS[form](nest)
    constants = f"  enum {{ THREADS = {nest.sizing.threads}, LANES = {nest.sizing.lanes} }};\n"
    body = constants + "".join(f"  {line}\n" for line in nest.values.root.lines)
    instructions = plan.computation.instructions
    work = sum(max(1, int(OPCODES[i.opcode].ops)) for i in instructions)
    work += int(sum(sum(loop_work(loop).values()) for loop in plan.loops))
    if any(OPCODES[i.opcode].unit in ("special", "div") for i in instructions):
        work *= 4
    return _Written(form, nest.arguments(), body, blocks, nest, plan.points * work)


def _split(arguments: Sequence[Argument]) -> tuple[list[Argument], list[Argument], list[Argument]]:
    """Inputs, outputs and scratch."""
    inputs, outputs, scratch = ([a for a in arguments if a.kind == kind] for kind in ("IN", "OUT", "SCRATCH"))
    return inputs, outputs, scratch


def _unique(argument: Argument, taken: Sequence[Argument | None]) -> Argument:
    used = {a.name for a in taken if a is not None}
    name, n = argument.name, 1
    while name in used:
        name, n = f"{argument.name}_{n}", n + 1
    return Argument(argument.kind, argument.c_type, name)


def _aliases(w: _Written) -> dict[int, int]:
    """Only the loop form reads and writes each element in one iteration (and a scatter where it changes an array in its
    place); rows are read again in later passes. A result may take the memory of a parameter that it reads itself, at
    its own place only, and that no later result reads."""
    if w.form != "loop":
        return w.nest.aliases
    found: dict[int, int] = {}
    nest, computation = w.nest, w.nest.plan.computation
    needs = [set(post_order((output,))) for output in computation.outputs]
    for k, output in enumerate(computation.outputs):
        # As text, because a loop that is cut knows less of its variable in one part than in the other.
        address = str(linearize(nest.plan.canonical(output, nest.where), output.dims))
        for n, p in enumerate(computation.parameters):
            places = {str(linearize(r, p.dims)) for r in nest.values.reads.get(p, ())}
            last = max((j for j, needed in enumerate(needs) if p in needed), default=-1)
            if p.shape == output.shape and places == {address} and last == k:
                found[n] = k
    return found


def without_comments(text: str) -> str:
    return re.sub(r" *//[^\n]*", "", text)


def _identifier(hint: str) -> str:
    text = "".join(c if c.isalnum() else "_" for c in hint).strip("_")
    return text if text and not text[0].isdigit() else f"k_{text}"
