"""Runs a fused module on the arrays of another library than JAX: kernels, library calls and one arena.

The program is a list of steps on numbered buffers, planned when it is built: a schedule (schedule.py) and the place of
every buffer (buffer_plan.py). A call looks up addresses and issues the steps; work at addresses that come again is
recorded once and replayed. Invariants: an operand is written only if it was given away; no two results share memory;
what a call uses is its own until the caller's stream has passed its end.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hlofuse.codegen.kernel import KernelText
from hlofuse.codegen.values import EmitError
from hlofuse.hlo.module import Instruction
from hlofuse.runtime.array_backend import ArrayBackend, Replay
from hlofuse.runtime.array_program import Buffer, Program, Step, View, build_program
from hlofuse.runtime.fused_program import FusedProgram
from hlofuse.runtime.unit_builder import BuildFailure
from hlofuse.runtime.xla_runtime import KernelInfo, build_kernels, complain, kernel_infos, problem_lines

MAX_REPLAYS = 8      # recorded graphs of one program
SEEN_ADDRESSES = 64  # how many earlier calls a new one is compared with


@dataclass
class _Call:
    """The memory of one call. By buffer: `addresses`, and `loose` arrays, as they come about."""

    operands: Sequence[Any]
    results: list[Any]
    arena: Any
    arena_address: int
    addresses: list[int]
    loose: dict[int, Any]


class ArrayExecutable:
    """A built program. Call it with flat operands (as the backend's `take_in` gives them); it gives the flat results.

    Operands that it was built to be given may be overwritten, and their memory returned: whoever calls it answers for
    that.
    """

    def __init__(self, compilation: Any, program: Program, backend: ArrayBackend,
                 problems: Mapping[Instruction, str]) -> None:
        self.compilation = compilation
        self.program = program
        self.backend = backend
        self.problems = problems     # of the kernels that run through JAX, and why
        self.constants = [backend.upload(value) for value in program.constants]
        self._replays: OrderedDict[Any, Replay] = OrderedDict()
        self._arenas: dict[Any, Any] = {}    # of recorded work, by stream: on one stream it runs in order
        self._seen: OrderedDict[Any, None] = OrderedDict()
        self._is_recordable = program.is_recordable
        self._lock = threading.RLock()

    def __call__(self, operands: Sequence[Any]) -> list[Any]:
        with self.backend.device_scope():
            results = [None if home.is_operand or home.is_loose else self._fresh(shape)
                       for home, shape in zip(self.program.result_homes, self.program.result_shapes, strict=True)]
            if self._is_recordable and self.backend.can_replay() and self._replayed(operands, results):
                return self._collect(operands, results, {})
            call = self._new_call(operands, results)
            self._issue(call)
            return self._collect(operands, results, call.loose)

    @property
    def kernels(self) -> tuple[KernelInfo, ...]:
        return kernel_infos(self.compilation, self.problems)

    def explain(self) -> str:
        p = self.program
        memory = (f"{len(p.steps)} steps on {p.schedule.stream_count} stream(s); {p.arena_bytes} bytes of temporary "
                  f"memory for buffers of {p.requested}")
        return "\n".join([memory, *problem_lines(self.compilation, self.problems), self.compilation.explain()])

    # ------------------------------------------------------------------------------------------ memory

    def _fresh(self, shape: Any) -> Any:
        return self._allocate(shape.byte_size).view(shape.dtype).reshape(shape.dims)

    def _allocate(self, size: int) -> Any:
        try:
            return self.backend.allocate(size)
        except self.backend.out_of_memory:
            # Nothing has run yet: what recorded work keeps can go, and the second failure is the caller's.
            with self._lock:
                self._replays.clear()
                self._arenas.clear()
            self.backend.release_memory()
            return self.backend.allocate(size)

    def _new_call(self, operands: Sequence[Any], results: list[Any], arena: Any = None) -> _Call:
        arena = self._allocate(self.program.arena_bytes) if arena is None else arena
        base = self.backend.address(arena)
        return _Call(operands, results, arena, base, self._addresses(operands, results, base), {})

    def _addresses(self, operands: Sequence[Any], results: Sequence[Any], arena: int) -> list[int]:
        address = self.backend.address
        bases = {"operand": [address(x) for x in operands], "constant": [address(x) for x in self.constants],
                 "result": [0 if x is None else address(x) for x in results]}
        return [arena + b.number if b.kind == "arena" else bases[b.kind][b.number] if b.kind in bases else 0
                for b in self.program.buffers]

    def _array(self, call: _Call, view: View) -> Any:
        """The elements that a step sees."""
        buffer: Buffer = self.program.buffers[view.buffer]
        if buffer.kind == "arena":
            source = call.arena[buffer.number:buffer.number + view.shape.byte_size]
        elif buffer.kind == "loose":
            source = call.loose[view.buffer]
        else:
            source = {"operand": call.operands, "constant": self.constants, "result": call.results}[
                buffer.kind][buffer.number]
        if source.dtype == view.shape.dtype and source.shape == view.shape.dims:
            return source
        return source.reshape(-1).view(view.shape.dtype).reshape(view.shape.dims)

    def _collect(self, operands: Sequence[Any], results: Sequence[Any], loose: Mapping[int, Any]) -> list[Any]:
        found = []
        for home, shape, result in zip(self.program.result_homes, self.program.result_shapes, results, strict=True):
            if result is None:
                result = operands[home.number] if home.is_operand else loose[home.number]
                result = result.reshape(-1).view(shape.dtype).reshape(shape.dims)
            found.append(result)
        return found

    # ------------------------------------------------------------------------------------------ work

    def _issue(self, call: _Call) -> None:
        program, backend = self.program, self.backend
        if program.counters:
            start = program.counters_offset
            backend.zero(call.arena[start:start + 4 * program.counters])
        schedule = program.schedule
        steps = [self._bound(step, call) for step in program.steps]
        backend.issue(schedule.streams, schedule.waits, schedule.joined, schedule.awaited, steps)

    def _bound(self, step: Step, call: _Call) -> Callable[[], None]:
        return lambda: self._run(step, call)

    def _run(self, step: Step, call: _Call) -> None:
        self._compute(step, call)
        for buffer in step.drops:
            del call.loose[buffer]

    def _compute(self, step: Step, call: _Call) -> None:
        if step.kernel is not None:
            counters = call.arena_address + self.program.counters_offset + 4 * step.counters
            self.backend.launch(step.kernel, [call.addresses[v.buffer] for v in step.views], counters)
            return
        operands = [self._array(call, v) for v in step.operands]
        if step.writes is not None:
            step.writes(operands, self._array(call, step.results[0]))
            return
        assert step.returns is not None
        results = step.returns(operands)
        for view, array in zip(step.results, results, strict=True):
            call.loose[view.buffer] = array
            call.addresses[view.buffer] = self.backend.address(array)

    # ------------------------------------------------------------------------------------------ replay

    def _replayed(self, operands: Sequence[Any], results: list[Any]) -> bool:
        """Whether the work at these addresses was recorded, now or before, and is launched. Recorded is what comes for
        the second time: the first call has loaded the kernels, and addresses that never return are not worth it."""
        address = self.backend.address
        stream = self.backend.stream_key()
        key = (stream, *map(address, operands), *(address(x) for x in results if x is not None))
        with self._lock:
            if key in self._replays:
                self._replays.move_to_end(key)
            elif key in self._seen:
                call = self._new_call(operands, results, self._arenas.get(stream))
                replay = self.backend.capture(lambda: self._issue(call))
                if replay is None:
                    self._is_recordable = False
                    return False
                self._replays[key], self._arenas[stream] = replay, call.arena
                if len(self._replays) > MAX_REPLAYS:
                    self._replays.popitem(last=False)
            else:
                self._seen[key] = None
                if len(self._seen) > SEEN_ADDRESSES:
                    self._seen.popitem(last=False)
                return False
            # Under the lock: one graph may not be launched by two threads at a time.
            self._replays[key].launch()
            return True


def build_array_executable(compilation: Any, backend: ArrayBackend, donated: frozenset[int] = frozenset(),
                           max_streams: int | None = None) -> ArrayExecutable:
    """Builds and loads the kernels of a compilation for a backend's device; `donated` numbers operands that may be
    overwritten. A kernel that cannot be built runs as its JAX meaning, with one warning that names it."""
    texts: dict[Instruction, KernelText] = {}
    problems: dict[Instruction, str] = {}
    for c in compilation.entry.clusters:
        if c.segments:
            try:
                texts[c.instruction] = c.text_in(backend.dialect)
            except EmitError as error:    # fused for a device that writes another dialect
                problems[c.instruction] = f"no {backend.dialect} kernel: {error}"
    loaded = backend.build(list(texts.values()))
    kernels: dict[Instruction, tuple[Any, KernelText]] = {}
    for instruction, text in texts.items():
        kernel = loaded[text.symbol]
        if isinstance(kernel, BuildFailure):
            problems[instruction] = kernel.message
        else:
            kernels[instruction] = kernel, text
    for instruction, problem in problems.items():
        complain(f"{backend.name} {problem}", f"the kernel of {instruction.name} runs as plain JAX: {problem}")
    built, not_called = build_kernels(compilation.bodies, backend.jax_platform())
    program = build_program(compilation.fused.entry, compilation.consts, kernels, donated, backend, compilation.device,
                            FusedProgram(built), max_streams)
    return ArrayExecutable(compilation, program, backend, {**problems, **not_called})
