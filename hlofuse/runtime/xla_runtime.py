"""Runs a fused module inside JAX's own runtime: each cluster one custom call, everything else its JAX meaning.

The executable is a traceable JAX function, used while JAX lowers. A cluster whose kernel cannot be built runs as its
JAX meaning too, with one warning that names it; `HLOFUSE_STRICT=1` makes that an error.
"""
from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hlofuse.codegen.dialect import HOST
from hlofuse.codegen.kernel import KernelText
from hlofuse.config import is_strict
from hlofuse.errors import HlofuseError, HlofuseWarning
from hlofuse.frontend import jaxpr_compat as compat
from hlofuse.frontend.jax_compat import with_key_type
from hlofuse.hlo.module import Computation, Instruction
from hlofuse.hlo.printer import computation_names, instruction_names
from hlofuse.runtime import call_worth
from hlofuse.runtime.fused_program import FusedProgram, XlaKernel, shim_call
from hlofuse.runtime.host_compiler import HostSource, LoadedKernel, build_host_kernels, find_compiler, toolchain
from hlofuse.runtime.kernel_cache import default_cache
from hlofuse.runtime.shim import register_kernel, shim_available

_warned: set[str] = set()

Built = tuple[Mapping[Instruction, XlaKernel], Mapping[Instruction, str]]    # kernels, and why others are not called


@dataclass(frozen=True)
class KernelInfo:
    """What `Compiled.kernels` shows of a cluster. `problem`: why it runs through JAX after all; None if it does not."""

    name: str
    form: str
    sources: dict[str, str] = field(repr=False)
    launch: dict[str, tuple[int, int]]
    registers: int
    shared_bytes: int
    problem: str | None = None


class Executable:
    """A compiled program. Call it with flat operands while JAX traces; it returns the flat results."""

    def __init__(self, compilation: Any, built: Mapping[Instruction, XlaKernel],
                 problems: Mapping[Instruction, str]) -> None:
        self.compilation = compilation
        self.built = built
        self.problems = problems     # of the kernels that are not called, and why

    def __call__(self, *operands: Any, donated: frozenset[int] = frozenset()) -> list[Any]:
        entry: Computation = self.compilation.fused.entry
        arguments = [compat.physical_value(x) for x in (*operands, *self.compilation.consts)]
        results = FusedProgram(self.built).run(entry, arguments, donated)
        return [with_key_type(x, aval) for x, aval in zip(results, self.compilation.jaxpr.out_avals, strict=True)]

    @property
    def kernels(self) -> tuple[KernelInfo, ...]:
        return kernel_infos(self.compilation, self.problems)

    def explain(self) -> str:
        return "\n".join([*problem_lines(self.compilation, self.problems), self.compilation.explain()])


def kernel_names(compilation: Any) -> dict[Instruction, str]:
    """As the fused module's text has them; a kernel that is not the entry's has its computation's name before it."""
    computations = computation_names(compilation.fused)
    found: dict[Instruction, str] = {}
    for part in compilation.parts:
        names = instruction_names(part.computation)
        place = "" if part.is_entry else f"{computations[part.computation]}/"
        found.update((c.instruction, place + names[c.instruction]) for c in part.clusters)
    return found


def problem_lines(compilation: Any, problems: Mapping[Instruction, str]) -> list[str]:
    names = kernel_names(compilation) if problems else {}
    return [f"{names[i]} runs through JAX: {problem}" for i, problem in problems.items()]


def kernel_infos(compilation: Any, problems: Mapping[Instruction, str]) -> tuple[KernelInfo, ...]:
    """Of every cluster of a compilation that is a kernel; `problems` are those of kernels that are not called."""
    names = kernel_names(compilation)
    found = []
    for c in compilation.clusters:
        if c.segments:
            code = c.kernel
            found.append(KernelInfo(names[c.instruction], c.form, code.sources, code.launch, code.registers,
                                    code.shared_bytes, problems.get(c.instruction)))
    return tuple(found)


@functools.cache
def prepare_toolchain() -> threading.Thread:
    """Finds the compiler and builds the shim in the background, once: there is something else to do meanwhile."""

    def prepare() -> None:
        compiler = find_compiler()
        if compiler is not None:
            with contextlib.suppress(Exception):   # asked again, and reported, by `build_executable`
                toolchain(compiler)
                shim_available()

    thread = threading.Thread(target=prepare, name="hlofuse-toolchain", daemon=True)
    thread.start()
    return thread


def build_executable(compilation: Any, platform: str) -> Executable:
    """Builds and loads the kernels of a compilation for JAX's `platform`, "cpu" or "cuda"."""
    return Executable(compilation, *build_kernels(compilation.parts, platform))


def build_kernels(parts: Sequence[Any], platform: str) -> Built:
    """Of fused computations: what is called, and why the others are not."""
    if platform == "cuda":
        from hlofuse.runtime.xla_cuda import build_cuda_kernels

        return build_cuda_kernels(parts)
    return _build_for_host(parts)


def _build_for_host(parts: Sequence[Any]) -> Built:
    texts: dict[Instruction, KernelText] = {}
    problems: dict[Instruction, str] = {}
    for c, part in [(c, p) for p in parts for c in p.clusters if c.segments]:
        text = c.text_in("host")
        reason = call_worth.why_not_called(c.instruction, text, part.computation, part.is_entry)
        if reason is None:
            texts[c.instruction] = text
        else:
            problems[c.instruction] = reason
    if not texts:
        return {}, problems
    prepare_toolchain().join()
    reason = "no C++ compiler was found" if find_compiler() is None else shim_available()
    if reason is not None:
        complain("toolchain", f"{len(texts)} kernel(s) run as plain JAX: {reason}")
        return {}, problems | dict.fromkeys(texts, reason)
    sources = [HostSource(t.symbol, t.code) for t in texts.values()]
    loaded = build_host_kernels(sources, HOST.prelude, default_cache())
    built: dict[Instruction, XlaKernel] = {}
    for instruction, text in texts.items():
        kernel = loaded[text.symbol]
        if not isinstance(kernel, LoadedKernel):
            complain(text.symbol, f"the kernel of {instruction.name} runs as plain JAX: {kernel.message}")
            problems[instruction] = kernel.message
            continue
        key = int(text.digest[:16], 16)
        grain = max(1, call_worth.TASK_WORK // text.work, text.blocks // call_worth.MAX_TASKS)
        register_kernel(key, kernel.address, text.blocks, grain, text.counters)
        built[instruction] = XlaKernel(text, shim_call(key, text.symbol, "cpu"))
    return built, problems


def complain(key: str, message: str) -> None:
    """One warning per `key` and process; an error in strict mode."""
    if is_strict():
        raise HlofuseError(message)
    if key not in _warned:
        _warned.add(key)
        warnings.warn(message, HlofuseWarning, stacklevel=2)
