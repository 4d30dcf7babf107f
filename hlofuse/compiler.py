"""The pipeline: jaxpr → HLO → passes → fusion → kernels. Reading this file is reading the architecture.

Every stage leaves a named snapshot, which is all that the command line, the notebook and the scoreboard look at.
`compile_jaxpr` is what the runtime asks for inside JAX's lowering; the other two are for people.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from hlofuse.codegen.dialect import DIALECTS
from hlofuse.codegen.kernel import KernelText, write_kernel
from hlofuse.codegen.values import EmitError
from hlofuse.config import Options, dump_directory
from hlofuse.errors import HlofuseError
from hlofuse.explore.difference import explain_difference, named_pairs, refused_text
from hlofuse.explore.explanation import explain_parts, parts_data
from hlofuse.explore.launch_count import LaunchCount, count_launches
from hlofuse.frontend.import_jaxpr import import_jaxpr
from hlofuse.frontend.trace import trace_function
from hlofuse.fusion.coloring import collector_paused
from hlofuse.fusion.constraints import Wishes
from hlofuse.fusion.cost_estimate import CostEstimate
from hlofuse.fusion.devices import DeviceSpec, find_device
from hlofuse.fusion.feedback import Measured
from hlofuse.fusion.fuse import Fused, PlannedKernel, deep_recursion, fuse_computation
from hlofuse.fusion.plan import Refusal, Segment
from hlofuse.fusion.registers import estimate_registers
from hlofuse.hlo.module import Computation, Instruction, Module
from hlofuse.passes import run_passes
from hlofuse.runtime.array_backend import ArrayBackend
from hlofuse.runtime.array_runtime import ArrayExecutable, build_array_executable
from hlofuse.runtime.nvrtc import nvrtc_available
from hlofuse.runtime.ptxas import measure_kernels
from hlofuse.runtime.simt import build_simt_executable
from hlofuse.runtime.xla_cuda import cuda_device
from hlofuse.runtime.xla_runtime import Executable, build_executable, prepare_toolchain

DEFAULT_DEVICE = "h200"


@dataclass(frozen=True)
class KernelCode:
    """A cluster's kernel in every dialect."""

    texts: dict[str, KernelText]
    registers: int      # of one CUDA thread, estimated

    @property
    def sources(self) -> dict[str, str]:
        return {name: text.text for name, text in self.texts.items()}

    @property
    def launch(self) -> dict[str, tuple[int, int]]:
        """(blocks, threads of a block) by dialect."""
        return {name: (text.blocks, text.threads) for name, text in self.texts.items()}

    @property
    def shared_bytes(self) -> int:
        return self.texts["cuda"].shared_bytes


@dataclass(frozen=True, eq=False)
class Cluster:
    """One launch of the fused module. It has no `segments` where it runs through JAX; `refusal` says why."""

    instruction: Instruction
    segments: tuple[Segment, ...]
    cost: CostEstimate
    refusal: str | None
    device: DeviceSpec
    written: dict[str, KernelText] = field(default_factory=dict)   # by dialect

    @property
    def name(self) -> str:
        return self.instruction.name

    @property
    def form(self) -> str:
        return self.text.form if self.segments else "jax"

    @property
    def text(self) -> KernelText:
        """The kernel in the device's own dialect."""
        return self.text_in(self.device.dialect)

    def text_in(self, dialect: str) -> KernelText:
        assert self.segments, f"{self.name} runs through JAX: {self.refusal}"
        if dialect not in self.written:
            with deep_recursion():
                self.written[dialect] = write_kernel(self.segments, DIALECTS[dialect], self.name)
        return self.written[dialect]

    @property
    def kernel(self) -> KernelCode:
        registers = estimate_registers([segment.plan for segment in self.segments])
        return KernelCode({name: self.text_in(name) for name in DIALECTS}, registers)


@dataclass(frozen=True, eq=False)
class FusedComputation:
    """What fusion made of the `source`: the entry, or something that is called and that no kernel computes."""

    source: Computation
    fusion: Fused
    clusters: tuple[Cluster, ...]
    is_entry: bool = False

    @property
    def computation(self) -> Computation:
        return self.fusion.computation


@dataclass(frozen=True)
class Compilation:
    """Everything that was found out about one program; `snapshots` are modules by stage, in order; `bodies` are those
    of loops that stay loops, their conditions, branches, and calls, callees first."""

    name: str
    jaxpr: Any | None
    snapshots: dict[str, Module]
    fused: Module
    entry: FusedComputation
    bodies: tuple[FusedComputation, ...]
    device: DeviceSpec
    consts: tuple[Any, ...] = ()      # values of the trailing parameters, which the program closed over
    operands: tuple[Any, ...] = ()    # what the function was traced on, in the order of the leading parameters
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def fusion(self) -> Fused:
        """Of the entry."""
        return self.entry.fusion

    @property
    def parts(self) -> tuple[FusedComputation, ...]:
        """The entry and the bodies."""
        return (self.entry, *self.bodies)

    @property
    def clusters(self) -> tuple[Cluster, ...]:
        """Those of the entry, then those of the bodies."""
        return tuple(c for part in self.parts for c in part.clusters)

    def explain(self, force: Sequence[tuple[str, str]] = (), forbid: Sequence[tuple[str, str]] = ()) -> str:
        """Every cluster with its numbers, and every producer–consumer edge with what became of it. With `force` or
        `forbid`, pairs of names from that text: what putting them into one kernel, or keeping them apart, changes."""
        if not force and not forbid:
            return explain_parts(self.entry, self.bodies, self.device)
        return explain_difference(self, self.recolored(force, forbid), force, forbid)

    def recolored(self, force: Sequence[tuple[str, str]] = (),
                  forbid: Sequence[tuple[str, str]] = ()) -> Compilation:
        """The same program with pairs of instructions in one kernel or apart; HlofuseError where that is not legal."""
        graph = self.fusion.graph
        wishes = Wishes(named_pairs(graph, force), named_pairs(graph, forbid))
        method = self.fusion.coloring.statistics.method
        try:
            entry = _Fuser(self.device, method, bodies=self.bodies).entry(self.entry.source, wishes)
        except Refusal as refusal:
            raise HlofuseError(refused_text(graph, force, refusal)) from refusal
        fused = Module(self.fused.name, entry.computation)
        snapshots = {**self.snapshots, "fused": fused}
        return replace(self, snapshots=snapshots, fused=fused, entry=entry)

    def explanation(self) -> dict[str, Any]:
        """What `explain` says as numbers, strings, lists and dicts, for JSON."""
        return parts_data(self.entry, self.bodies, self.device)

    def launches(self) -> LaunchCount:
        """What the device runs, and the bytes that it moves."""
        return count_launches(self.fused, self.clusters, self.device.library_epilogues)


class _Stages:
    """Collects snapshots and times."""

    def __init__(self) -> None:
        self.snapshots: dict[str, Module] = {}
        self.timings: dict[str, float] = {}

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start, before = time.perf_counter(), self.timings.get("feedback", 0.0)
        yield
        inside = self.timings.get("feedback", 0.0) - before
        self.timings[stage] = (time.perf_counter() - start) * 1e3 - inside

    def feedback(self, device: DeviceSpec) -> Measurer | None:
        """What measures kernels and adds up the time, which is a stage of its own; None where there is no ptxas."""
        if device.dialect != "cuda" or nvrtc_available() is not None:
            return None

        def measure(texts: Sequence[KernelText | None]) -> Sequence[Measured | None]:
            start = time.perf_counter()
            found = measure_kernels(texts, device)
            self.timings["feedback"] = self.timings.get("feedback", 0.0) + (time.perf_counter() - start) * 1e3
            return found

        return measure

    def keep(self, name: str, module: Module) -> None:
        self.snapshots[name] = module


def compile_function(fn: Callable[..., Any], *args: Any, options: Options | None = None,
                     device: str | None = None, **kwargs: Any) -> Compilation:
    """As `jax.jit(fn).lower(*args)`, but through this pipeline: `args` are arrays or `jax.ShapeDtypeStruct`s."""
    traced = trace_function(fn, args, kwargs)
    name = getattr(fn, "__name__", "main")
    compilation = _compile(traced.closed, None, options or Options(), _device(device, options), name)
    return replace(compilation, operands=traced.operands)


def compile_module(module: Module, options: Options | None = None, device: str | None = None) -> Compilation:
    """The same from an HLO module."""
    return _compile(None, module, options or Options(), _device(device, options), module.name)


def _device(name: str | None, options: Options | None) -> DeviceSpec:
    return find_device(name or (options and options.device) or DEFAULT_DEVICE)


@collector_paused()
def _compile(closed: Any | None, module: Module | None, options: Options, spec: DeviceSpec, name: str,
             platform: str | None = None) -> Compilation:
    stages = _Stages()
    consts: tuple[Any, ...] = ()
    if module is None:
        with stages.timed("import"):
            imported = import_jaxpr(closed, name, platform=platform or ("cpu" if spec.dialect == "host" else "cuda"))
            module, consts = imported.module, imported.consts
    stages.keep("hlo", module)
    with stages.timed("passes"):
        optimized = run_passes(module, on_snapshot=stages.keep, dialect=spec.dialect)
    stages.keep("optimized", optimized)
    with stages.timed("fusion"):
        measure = stages.feedback(spec) if options.feedback else None
        fuser = _Fuser(spec, options.fusion, measure)
        entry = fuser.entry(optimized.entry)
        fused = Module(optimized.name, entry.computation)
    stages.keep("fused", fused)
    return Compilation(name, closed, stages.snapshots, fused, entry, fuser.bodies, spec, consts,
                       timings=stages.timings)


Measurer = Callable[[Sequence[KernelText | None]], Sequence[Measured | None]]


class _Fuser:
    """Fuses computations and writes their kernels, because only what can be written is accepted; what they call once
    each, `bodies` are known from before."""

    def __init__(self, device: DeviceSpec, method: str, measurer: Measurer | None = None,
                 bodies: Sequence[FusedComputation] = ()) -> None:
        self.device, self.method, self.measurer = device, method, measurer
        self._bodies = {body.source: body for body in bodies}

    @property
    def bodies(self) -> tuple[FusedComputation, ...]:
        return tuple(self._bodies.values())

    def entry(self, computation: Computation, wishes: Wishes = Wishes()) -> FusedComputation:  # noqa: B008 (frozen)
        return replace(self._fuse(computation, wishes), is_entry=True)

    def _fuse(self, computation: Computation, wishes: Wishes, caller: Instruction | None = None) -> FusedComputation:
        device = self.device
        texts: dict[Instruction, KernelText] = {}

        def accept(fusion: Instruction, segments: Sequence[Segment]) -> str | None:
            try:
                texts[fusion] = write_kernel(segments, DIALECTS[device.dialect], fusion.name)
            except EmitError as error:
                return f"producer-consumer: {error}"
            return None

        def measure(planned: Sequence[PlannedKernel]) -> Sequence[Measured | None]:
            assert self.measurer is not None
            return self.measurer([texts[k.instruction] if k.segments else None for k in planned])

        fused = fuse_computation(computation, device, self.method, accept, measure if self.measurer else None, wishes,
                                 self._called, caller)
        clusters = tuple(Cluster(k.instruction, k.segments, k.cost, k.refusal, device,
                                 {device.dialect: texts[k.instruction]} if k.segments else {}) for k in fused.kernels)
        return FusedComputation(computation, fused, clusters)

    def _called(self, computation: Computation, caller: Instruction) -> Computation:
        if computation not in self._bodies:
            self._bodies[computation] = self._fuse(computation, Wishes(), caller)
        return self._bodies[computation].computation


# --- what the runtime asks for ----------------------------------------------------------------------------------------

_HOST = "host"


def compile_jaxpr(closed: Any, options: Options, platform: str) -> Executable:
    """The executable of a jaxpr."""
    if platform == "cpu":
        prepare_toolchain()
    spec = find_device(options.device or _HOST) if options.device or platform == "cpu" else cuda_device()
    known = platform if platform in ("cpu", "cuda") else None
    options = replace(options, feedback=options.feedback or platform == "cuda")
    compilation = _compile(closed, None, options, spec, _name_of(closed), known)
    _dump(compilation)
    build = build_simt_executable if spec.name == "simt" else build_executable
    return build(compilation, platform)


def compile_for_arrays(closed: Any, options: Options, backend: ArrayBackend,
                       donated: frozenset[int]) -> ArrayExecutable:
    """The executable of a jaxpr on the arrays of another library. Its products come without epilogues."""
    spec = find_device(options.device) if options.device else backend.spec
    options = replace(options, feedback=options.feedback or spec.dialect == "cuda")
    compilation = _compile(closed, None, options, replace(spec, library_epilogues=False), _name_of(closed))
    _dump(compilation)
    return build_array_executable(compilation, backend, donated)


def _name_of(closed: Any) -> str:
    return getattr(getattr(closed.jaxpr, "debug_info", None), "func_name", "main")


def _dump(compilation: Compilation) -> None:
    directory = dump_directory()
    if directory is not None:
        from hlofuse.explore.dump import dump_compilation

        dump_compilation(compilation, directory)
