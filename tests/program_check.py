"""Runs random programs through the optimizer and against `jax.jit`, many at once: one unit of kernels, one XLA program.

`check` returns a line for each fault. A difference from jax.jit counts only if JAX's own evaluation, operation by
operation, differs too: XLA's in-place updates are sometimes wrong themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from program_values import EPSILON, Input, Program, Value
from simt_check import with_threads

from hlofuse.codegen.dialect import HOST, SIMT, Dialect
from hlofuse.compiler import Compilation, compile_jaxpr
from hlofuse.config import Options
from hlofuse.frontend.trace import TracedFunction, trace_function
from hlofuse.fusion.devices import DEVICES
from hlofuse.runtime.host_compiler import HostSource, build_host_kernels
from hlofuse.runtime.kernel_cache import default_cache
from hlofuse.runtime.simt import build_simt_executable, build_simt_kernels, simt_seed, simt_texts
from hlofuse.runtime.xla_runtime import Executable, build_executable

# A launch so dear that everything is merged that legality lets be merged.
FORCED = "test-launch-is-dear"
MODES = ("coloring", "greedy", "none", "forced")
# The CUDA kernels thread by thread, in blocks as generated or of so many threads.
SIMT_MODES = {"simt": SIMT, "simt-32": with_threads(32), "simt-64": with_threads(64)}
SIMT_SEEDS = (0, 1, 2)
SLACK = 4.0  # over the error bound that the program itself states


@dataclass(frozen=True)
class Fault:
    program: Program
    mode: str
    reason: str
    output: int = -1

    def __str__(self) -> str:
        return f"[{self.mode}] {self.reason}{self.program!r}"


def options(mode: str) -> Options:
    if mode in SIMT_MODES:
        return Options(device="simt")
    if mode != "forced":
        return Options(fusion=mode)
    DEVICES.setdefault(FORCED, replace(DEVICES["host"], name=FORCED, launch_us=1e3))
    return Options(device=FORCED)


def check(
    programs: Sequence[Program], modes: Sequence[str] = MODES, donate: bool = False, x64: bool = False
) -> list[Fault]:
    """The faults of the programs in each mode; `donate` gives every argument away."""
    with jax.enable_x64(x64):
        return _check(programs, modes, donate)


def _check(programs: Sequence[Program], modes: Sequence[str], donate: bool) -> list[Fault]:
    faults: list[Fault] = []
    arguments = [[jnp.asarray(a) for a in p.arguments] for p in programs]
    traced = [trace_function(p.function, a) for p, a in zip(programs, arguments, strict=True)]
    expected = _run([p.function for p in programs], arguments)
    for mode in modes:
        executables, broken = _compile(programs, traced, mode)
        faults.extend(broken)
        alive = [n for n, e in enumerate(executables) if e is not None]
        copies = (
            [[jnp.array(a, copy=True) for a in arguments[n]] for n in alive]
            if donate
            else [arguments[n] for n in alive]
        )
        calls = [_call_of(programs[n], e, donate) for n, e in enumerate(executables) if e is not None]
        results = _run(calls, copies, donate, SIMT_SEEDS if mode in SIMT_MODES else (None,))
        for n, result in zip(alive, results, strict=True):
            fault = _compare(programs[n], mode, result, expected[n])
            if fault is not None and not _xla_is_wrong(fault, arguments[n], result):
                faults.append(fault)
    return faults


def _compile(
    programs: Sequence[Program], traced: Sequence[TracedFunction], mode: str
) -> tuple[list[Executable | None], list[Fault]]:
    compiled: list[Executable | None] = []
    faults = []
    for program, t in zip(programs, traced, strict=True):
        try:
            compiled.append(compile_jaxpr(t.closed, options(mode), "none"))
        except Exception as error:  # whatever the pipeline raises is a fault of its own
            compiled.append(None)
            faults.append(Fault(program, mode, f"{type(error).__name__}: {str(error)[:2000]}"))
    dialect = SIMT_MODES.get(mode, HOST)
    texts = {text.symbol: text for e in compiled if e is not None for text in _texts(e.compilation, dialect)}
    loaded: dict[str, Any]
    if mode in SIMT_MODES:
        loaded = build_simt_kernels(list(texts.values()))
    else:
        sources = [HostSource(s, t.text) for s, t in texts.items()]
        loaded = build_host_kernels(sources, HOST.prelude, default_cache())
    for k, e in enumerate(compiled):
        if e is None:
            continue
        bad = [t for t in _texts(e.compilation, dialect) if not hasattr(loaded[t.symbol], "address")]
        if bad:
            faults.append(Fault(programs[k], mode, f"does not compile: {loaded[bad[0].symbol].message}\n{bad[0].text}"))
            compiled[k] = None
        else:
            try:
                compiled[k] = _build(e.compilation, mode)
            except Exception as error:
                compiled[k] = None
                faults.append(Fault(programs[k], mode, f"{type(error).__name__}: {error}"))
    return compiled, faults


def _texts(compilation: Compilation, dialect: Dialect) -> list[Any]:
    if dialect is not HOST:
        return list(simt_texts(compilation, dialect).values())
    return [c.text_in("host") for c in compilation.clusters if c.segments]


def _build(compilation: Compilation, mode: str) -> Executable:
    if mode in SIMT_MODES:
        return build_simt_executable(compilation, "cpu", SIMT_MODES[mode])
    return build_executable(compilation, "cpu")


def _call_of(program: Program, executable: Executable, donate: bool) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        again = trace_function(program.function, args)
        donated = frozenset(range(len(again.operands))) if donate else frozenset()
        return again.assemble(executable(*again.operands, donated=donated))

    return call


def _run(
    functions: Sequence[Callable[..., Any]],
    arguments: Sequence[Sequence[Any]],
    donate: bool = False,
    seeds: Sequence[int | None] = (None,),
) -> list[list[Any]]:
    """All functions as one XLA program; with several seeds, which have to give the same bits, under SIMT."""

    def everything(groups: Sequence[Sequence[Any]]) -> list[Any]:
        return [f(*group) for f, group in zip(functions, groups, strict=True)]

    jitted = jax.jit(everything, donate_argnums=(0,) if donate else ())
    first: list[list[Any]] = []
    for seed in seeds:
        with contextlib.nullcontext() if seed is None else simt_seed(seed):
            results = [jax.device_get(list(r)) for r in jitted(arguments)]
        first = first or results
        for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(results), strict=True):
            assert one.tobytes() == other.tobytes(), f"seed {seed} gives other bits than seed {seeds[0]}"
    return first


def _compare(program: Program, mode: str, ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> Fault | None:
    for k, (value, a, b) in enumerate(zip(program.outputs, ours, theirs, strict=True)):
        reason = difference(value, np.asarray(a), np.asarray(b))
        if reason is not None:
            return Fault(program, mode, f"{value.name}: {reason}", k)
    return None


def difference(value: Value, ours: np.ndarray, theirs: np.ndarray) -> str | None:
    """How two evaluations of a value differ by more than its error bound allows; None if they do not."""
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return f"{ours.dtype}{ours.shape}, jax.jit has {theirs.dtype}{theirs.shape}"
    if value.kind not in "fc":
        wrong = ours != theirs
    else:
        if value.kind == "c":
            ours, theirs = (np.stack([x.real, x.imag], -1) for x in (ours, theirs))
        a, b = ours.astype(np.float64), theirs.astype(np.float64)
        limit = SLACK * value.error + (0 if value.exact else SLACK * EPSILON[value.dtype] * np.abs(b))
        with np.errstate(all="ignore"):
            wrong = ~((np.abs(a - b) <= limit) | (a == b) | (np.isnan(a) & np.isnan(b)))
    if not wrong.any():
        return None
    where = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"{wrong.sum()} of {wrong.size} elements, first {where}: {ours[where]}, jax.jit has {theirs[where]}"


def _xla_is_wrong(fault: Fault, arguments: Sequence[Any], ours: Sequence[np.ndarray]) -> bool:
    """Whether JAX, one operation after the other, gives our result and not that of its compiled program."""
    with jax.disable_jit():
        plain = [np.asarray(r) for r in fault.program.function(*arguments)]
    return all(
        difference(v, np.asarray(a), b) is None for v, a, b in zip(fault.program.outputs, ours, plain, strict=True)
    )


# --- shrinking ------------------------------------------------------------------------------------


def shrink(fault: Fault, donate: bool = False, x64: bool = False) -> Fault:
    """The smallest part of a program that still fails: fewer outputs, and steps whose value is given as an input."""
    best = fault
    improved = True
    while improved:
        improved = False
        for candidate in _smaller(best.program, x64):
            found = _fails(candidate, fault.mode, donate, x64)
            if found is not None:
                best, improved = found, True
                break
    return best


def _fails(program: Program, mode: str, donate: bool, x64: bool) -> Fault | None:
    try:
        faults = check([program], (mode,), donate, x64)
    except Exception as error:
        return Fault(program, mode, f"{type(error).__name__}: {error}")
    return faults[0] if faults else None


def _smaller(program: Program, x64: bool) -> list[Program]:
    found = [
        program.pruned([o for o in program.outputs if o is not gone])
        for gone in program.outputs
        if len(program.outputs) > 1
    ]
    found += [
        program.pruned([*(o for o in program.outputs if o is not last), s.value])
        for last in program.outputs
        for s in program.steps
        if s.value not in program.outputs and last.name == program.steps[-1].value.name
    ]
    with jax.enable_x64(x64), jax.disable_jit():
        for k, step in reversed(list(enumerate(program.steps))):
            if not step.reads or step.value in program.outputs:
                continue
            values = dict(zip((i.value.name for i in program.inputs), map(jnp.asarray, program.arguments), strict=True))
            part = replace(program, outputs=(step.value,)).pruned()
            data = part.function(*(values[i.value.name] for i in part.inputs))[0]
            given = Input(step.value, 0, given=np.asarray(data))
            found.append(
                Program((*program.inputs, given), program.steps[:k] + program.steps[k + 1 :], program.outputs).pruned()
            )
    return found


def weak_types_agree(program: Program, jit: Callable[..., Any]) -> bool:
    """Whether `jit(program)` promises the same shapes, dtypes and weak types as `jax.jit(program)`; builds nothing."""
    arguments = [jnp.asarray(a) for a in program.arguments]
    ours, theirs = (jax.eval_shape(j(program.function), *arguments) for j in (jit, jax.jit))
    return [(a.shape, a.dtype, a.weak_type) for a in ours] == [(b.shape, b.dtype, b.weak_type) for b in theirs]


__all__ = ["MODES", "SIMT_MODES", "Fault", "check", "difference", "shrink", "weak_types_agree"]
