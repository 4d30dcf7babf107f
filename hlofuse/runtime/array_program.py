"""From a fused module to the steps and buffers that the array runtime executes.

Reshapes, bitcasts, tuples and barriers are names for memory, not steps. A value lives in the arena, in an operand, a
constant, a result, or is loose: an array that a library made and that goes when its last reader has run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from hlofuse.codegen.kernel import KernelText
from hlofuse.fusion.devices import DeviceSpec
from hlofuse.hlo.module import Computation, Instruction
from hlofuse.hlo.shape import FUSIBLE, Shape, TupleShape
from hlofuse.runtime.array_backend import ArrayBackend
from hlofuse.runtime.buffer_plan import BufferRequest, Home, aligned, plan_buffers
from hlofuse.runtime.fused_program import FusedProgram
from hlofuse.runtime.library_calls import WritingCall, library_call
from hlofuse.runtime.schedule import Schedule, Task, plan_schedule

# What gives its first operand another name.
_VIEWS = frozenset({"reshape", "bitcast", "bitcast-convert", "copy", "add-dependency", "domain"})
_NARROW_SHARE = 2    # a kernel that leaves more than half of the device's threads idle may have company


@dataclass(frozen=True)
class View:
    """A buffer's elements as an array."""

    buffer: int
    shape: Shape


@dataclass(frozen=True)
class Buffer:
    """`kind` is "arena" (`number` is its offset), "operand", "constant", "result" (their numbers) or "loose"."""

    kind: str
    number: int


@dataclass(frozen=True)
class ResultHome:
    """Where a result is when the program has run: in memory of its own (result `number`), in that of an operand that
    was given away, or in a loose array (of buffer `number`)."""

    number: int
    is_operand: bool = False
    is_loose: bool = False


@dataclass(frozen=True)
class Step:
    """A kernel with its counters (from number `counters` on), a call that writes, or one that returns its results.
    `drops`: loose buffers that nothing reads after it."""

    name: str
    operands: tuple[View, ...]
    results: tuple[View, ...]
    scratch: tuple[View, ...] = ()
    kernel: Any = None
    counters: int = 0
    writes: Callable[[Sequence[Any], Any], None] | None = None
    returns: Callable[[Sequence[Any]], Sequence[Any]] | None = None
    drops: tuple[int, ...] = ()

    @property
    def views(self) -> tuple[View, ...]:
        """A kernel's arguments."""
        return (*self.operands, *self.results, *self.scratch)


@dataclass(frozen=True)
class Program:
    """Everything that is decided before a call. `requested`: bytes of the arena's buffers without any reuse."""

    steps: tuple[Step, ...]
    schedule: Schedule
    buffers: tuple[Buffer, ...]
    constants: tuple[np.ndarray, ...]
    result_shapes: tuple[Shape, ...]
    result_homes: tuple[ResultHome, ...]
    arena_bytes: int
    requested: int
    counters: int
    counters_offset: int

    @property
    def is_recordable(self) -> bool:
        """Whether a graph can hold it: nothing allocates, waits for the host or runs on streams of JAX's."""
        return bool(self.steps) and all(step.returns is None for step in self.steps)


@dataclass
class _Value:
    """A buffer while the program is built: who writes and reads it, and what it may become."""

    kind: str
    number: int = 0
    size: int = 0
    writer: int = -1
    readers: list[int] = field(default_factory=list)
    takes: list[int] = field(default_factory=list)
    result: int | None = None


class _Builder:
    def __init__(self, backend: ArrayBackend, spec: DeviceSpec, bodies: FusedProgram) -> None:
        self.backend = backend
        self.spec = spec
        self.bodies = bodies
        self.values: list[_Value] = []
        self.steps: list[Step] = []
        self.tasks: list[Task] = []
        self.constants: list[np.ndarray] = []
        self.counters = 0
        self.places: dict[Instruction, Any] = {}    # a View, or a tuple of them; None for a token

    def new(self, kind: str, number: int = 0, size: int = 0, writer: int = -1) -> int:
        self.values.append(_Value(kind, number, size, writer))
        return len(self.values) - 1

    def constant(self, value: Any) -> int:
        self.constants.append(np.asarray(value))
        return self.new("constant", len(self.constants) - 1)

    def made(self, shapes: Sequence[Shape], kind: str) -> tuple[View, ...]:
        """New buffers that the next step writes."""
        return tuple(View(self.new(kind, size=s.byte_size, writer=len(self.steps)), s) for s in shapes)

    def add(self, step: Step, is_narrow: bool = False) -> None:
        number = len(self.steps)
        after = {self.values[v.buffer].writer for v in step.operands} - {-1}
        for view in step.operands:
            self.values[view.buffer].readers.append(number)
        self.steps.append(step)
        self.tasks.append(Task(tuple(sorted(after)), is_narrow))

    # ------------------------------------------------------------------------------------------ instructions

    def instruction(self, i: Instruction, kernel: Any, text: KernelText | None) -> None:
        operands = [self.places[o] for o in i.operands]
        if kernel is not None and text is not None:
            self.kernel(i, kernel, text, operands)
        elif i.opcode in _VIEWS and isinstance(operands[0], View) and _same_bytes(i):
            self.places[i] = View(operands[0].buffer, i.array)
        elif i.opcode == "tuple":
            self.places[i] = tuple(operands)
        elif i.opcode == "opt-barrier":
            self.places[i] = operands[0] if len(operands) == 1 else tuple(operands)
        elif i.opcode == "get-tuple-element":
            self.places[i] = operands[0][i.attrs["index"]]
        elif i.opcode == "after-all":
            self.places[i] = None
        elif i.opcode == "constant":
            self.places[i] = View(self.constant(i.literal), i.array)
        else:
            self.call(i, operands)

    def kernel(self, i: Instruction, kernel: Any, text: KernelText, operands: Sequence[View]) -> None:
        results = self.made(i.result_shapes, "arena")
        scratch = self.made(text.scratch, "arena")
        for operand, result in text.aliases.items():
            self.values[results[result].buffer].takes.append(operands[operand].buffer)
        idle = text.blocks * text.threads * _NARROW_SHARE <= self.spec.sm_count * self.spec.threads_per_sm
        self.add(Step(text.symbol, tuple(operands), results, scratch, kernel, self.counters), idle)
        self.counters += text.counters
        self.places[i] = results if isinstance(i.shape, TupleShape) else results[0]

    def call(self, i: Instruction, operands: Sequence[Any]) -> None:
        call = library_call(i, self.backend, self.bodies)
        flat = tuple(jax.tree.leaves(operands, is_leaf=lambda x: isinstance(x, View)))
        if isinstance(call, WritingCall):
            flat = tuple(self.laid_out(v, order) for v, order in zip(flat, call.orders, strict=True))
            results = self.made(i.result_shapes, "arena")
            self.add(Step(call.name, flat, results, writes=call.run))
        else:
            results = self.made(_flat_shapes(i.shape), "loose")
            self.add(Step(call.name, flat, results, returns=call.run))
        self.places[i] = _nested(i.shape, iter(results))

    def laid_out(self, view: View, order: tuple[int, ...] | None) -> View:
        """The array with its axes in this order."""
        if order is None:
            return view
        (result,) = self.made([view.shape.with_dims([view.shape.dims[d] for d in order])], "arena")
        self.add(Step("transpose", (view,), (result,), writes=functools.partial(self.backend.transpose, order)))
        return result

    def outputs(self, outputs: Sequence[View]) -> None:
        """Each result in memory that is nobody else's: else a copy is made."""
        for number, view in enumerate(outputs):
            value = self.values[view.buffer]
            if value.kind not in ("arena", "loose") or value.result is not None:
                copy = self.made([view.shape], "arena")
                self.add(Step("copy", (view,), copy, writes=self.backend.copy))
                value = self.values[copy[0].buffer]
            value.result = number


def build_program(entry: Computation, constants: Sequence[Any], kernels: Mapping[Instruction, tuple[Any, KernelText]],
                  donated: frozenset[int], backend: ArrayBackend, spec: DeviceSpec,
                  bodies: FusedProgram, max_streams: int | None = None) -> Program:
    """The program of a fused computation whose trailing parameters are `constants`. `kernels` are built and loaded;
    what has none is a library call. `bodies` has kernels that JAX calls in what the computation calls. Operands in
    `donated` may be overwritten."""
    build = _Builder(backend, spec, bodies)
    operand_count = len(entry.parameters) - len(constants)
    for number, p in enumerate(entry.parameters):
        is_operand = number < operand_count
        buffer = (build.new("operand", number, p.array.byte_size) if is_operand
                  else build.constant(constants[number - operand_count]))
        build.places[p] = View(buffer, p.array)
    for i in entry.instructions:
        if i is entry.root and i.opcode == "tuple" and i not in kernels:
            continue
        if i not in build.places:
            build.instruction(i, *kernels.get(i, (None, None)))
    outputs = tuple(build.places[o] for o in entry.outputs)
    build.outputs(outputs)
    schedule = (plan_schedule(build.tasks) if max_streams is None else plan_schedule(build.tasks, max_streams))
    return _placed(build, [v.shape for v in outputs], donated, schedule)


def _placed(build: _Builder, result_shapes: Sequence[Shape], donated: frozenset[int], schedule: Schedule) -> Program:
    end = len(build.steps)
    planned: list[int] = []
    for number, value in enumerate(build.values):
        if value.kind == "arena" or value.kind == "operand" and value.number in donated:
            planned.append(number)
    position = {buffer: n for n, buffer in enumerate(planned)}
    requests = []
    for buffer in planned:
        value = build.values[buffer]
        home = (Home.OPERAND if value.kind == "operand" else Home.ARENA if value.result is None else Home.RESULT)
        readers = (*value.readers, *([end] if value.result is not None else []))
        takes = tuple(position[t] for t in value.takes if t in position)
        requests.append(BufferRequest(value.size, value.writer, readers, home, takes))
    plan = plan_buffers(requests, schedule.before)
    buffers: list[Buffer] = []
    homes: list[ResultHome | None] = [None] * len(result_shapes)
    for number, value in enumerate(build.values):
        if number not in position:
            buffers.append(Buffer(value.kind, number if value.kind == "loose" else value.number))
            if value.result is not None:
                homes[value.result] = ResultHome(number, is_loose=True)
            continue
        owner = build.values[planned[plan.owner[position[number]]]]
        offset = plan.offsets[plan.owner[position[number]]]
        if owner.kind == "operand":
            buffers.append(Buffer("operand", owner.number))
        elif owner.result is not None:
            buffers.append(Buffer("result", owner.result))
        else:
            assert offset is not None
            buffers.append(Buffer("arena", offset))
        if value.result is not None:
            homes[value.result] = ResultHome(buffers[-1].number, is_operand=owner.kind == "operand")
    assert all(home is not None for home in homes)
    return Program(_with_drops(build, schedule), schedule, tuple(buffers), tuple(build.constants), tuple(result_shapes),
                   tuple(homes), plan.arena_bytes + aligned(4 * build.counters), plan.requested,  # type: ignore[arg-type]
                   build.counters, plan.arena_bytes)


def _with_drops(build: _Builder, schedule: Schedule) -> tuple[Step, ...]:
    """A library's memory goes back to the stream that it came from: before the end only if no other reads it."""
    drops: dict[int, list[int]] = {}
    for number, value in enumerate(build.values):
        touches = (value.writer, *value.readers)
        if value.kind == "loose" and value.result is None and len({schedule.streams[s] for s in touches}) == 1:
            drops.setdefault(max(touches), []).append(number)
    return tuple(replace(step, drops=tuple(drops.get(n, ()))) for n, step in enumerate(build.steps))


def _same_bytes(i: Instruction) -> bool:
    """Whether the bytes stay as they lie. They need not where a pred or numbers of less than a byte are made others."""
    old, new = i.operands[0].array, i.array
    plain = old.element_type == new.element_type or {old.element_type, new.element_type} <= FUSIBLE - {"pred"}
    return plain and old.byte_size == new.byte_size


def _flat_shapes(shape: Any) -> list[Shape]:
    if isinstance(shape, TupleShape):
        return [s for element in shape.elements for s in _flat_shapes(element)]
    return [] if shape.element_type == "token" else [shape]


def _nested(shape: Any, views: Any) -> Any:
    if isinstance(shape, TupleShape):
        return tuple(_nested(element, views) for element in shape.elements)
    return None if shape.element_type == "token" else next(views)
