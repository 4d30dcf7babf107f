"""Whole programs whose CUDA kernels run under SIMT: every seed must give the same bits, and values as good as JAX's."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from hlofuse.codegen.dialect import SIMT, Dialect
from hlofuse.codegen.kernel import KernelText
from hlofuse.compiler import Cluster, Compilation, compile_jaxpr
from hlofuse.config import Options
from hlofuse.explore import accuracy, float64_reference
from hlofuse.frontend.trace import TracedFunction, trace_function
from hlofuse.hlo.shape import Shape
from hlofuse.hlo.to_jax import evaluate_computation
from hlofuse.runtime.simt import (
    SimtFault,
    SimtKernel,
    allocate_results,
    build_simt_executable,
    build_simt_kernels,
    simt_seed,
    simt_texts,
)
from hlofuse.runtime.unit_builder import BuildFailure


def with_threads(threads: int) -> Dialect:
    """The dialect with blocks of at most so many threads."""
    return replace(SIMT, threads=threads, max_row_threads=threads, column_threads=threads, group_threads=threads,
                   transpose_threads=threads)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A function on its arguments, traced and compiled for SIMT."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    traced: TracedFunction = field(repr=False)
    compilation: Compilation = field(repr=False)

    @functools.cached_property
    def expected(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """What jax.jit and a float64 evaluation make of it. As NumPy's arrays: weak types are the primitive's business,
        which is not here."""
        results = [np.asarray(x) for x in jax.tree.leaves(jax.jit(self.function)(*self.args))]
        jaxpr = jax.make_jaxpr(self.function)(*self.args)
        return results, float64_reference.evaluate(jaxpr, *jax.tree.leaves(self.args))


@dataclass
class Tally:
    """What ran, for people to read."""

    kernels: set[str] = field(default_factory=set)
    forms: Counter[str] = field(default_factory=Counter)
    threads: set[int] = field(default_factory=set)
    runs: int = 0
    faults: list[str] = field(default_factory=list)

    def add(self, texts: Iterable[KernelText]) -> None:
        for text in texts:
            self.threads.add(text.threads)
            if text.symbol not in self.kernels:
                self.kernels.add(text.symbol)
                self.forms[text.form] += 1

    def __str__(self) -> str:
        forms = ", ".join(f"{form} {count}" for form, count in sorted(self.forms.items()))
        threads = ", ".join(map(str, sorted(self.threads)))
        return f"{len(self.kernels)} kernels ({forms}), blocks of {threads} threads; {len(self.faults)} faults"


def compile_case(name: str, function: Callable[..., Any], args: Sequence[Any]) -> Case:
    traced = trace_function(function, args)
    executable: Any = compile_jaxpr(traced.closed, Options(device="simt"), "none")
    return Case(name, function, tuple(args), traced, executable.compilation)


def check_cases(cases: Sequence[Case], seeds: Sequence[int], dialect: Dialect = SIMT, judged: bool = True) -> Tally:
    """Runs each case with every seed; `judged`: the values against jax.jit and float64 too."""
    tally = Tally()
    texts = {text.symbol: text for case in cases for text in simt_texts(case.compilation, dialect).values()}
    tally.add(texts.values())
    for kernel in build_simt_kernels(list(texts.values())).values():
        if isinstance(kernel, BuildFailure):
            tally.faults.append(f"{kernel.symbol} does not compile: {kernel.message}\n{texts[kernel.symbol].text}")
    if tally.faults:
        return tally
    for case in cases:
        reason = _check(case, seeds, dialect, judged)
        tally.runs += len(seeds)
        if reason:
            tally.faults.append(f"{case.name}: {reason}")
    return tally


def _check(case: Case, seeds: Sequence[int], dialect: Dialect, judged: bool) -> str | None:
    executable = build_simt_executable(case.compilation, "cpu", dialect)

    def call(*args: Any) -> Any:
        again = trace_function(case.function, args)
        return again.assemble(executable(*again.operands))

    compiled = jax.jit(call).lower(*case.args).compile()
    first: list[Any] | None = None
    for seed in seeds:
        try:
            with simt_seed(seed):
                results = jax.block_until_ready(jax.tree.leaves(compiled(*case.args)))
        except jax.errors.JaxRuntimeError as error:
            return f"seed {seed}: {error}"
        if first is None:
            first = results
        for number, (a, b) in enumerate(zip(first, results, strict=True)):
            if np.asarray(a).tobytes() != np.asarray(b).tobytes():
                return f"result {number} is not the same for seeds {seeds[0]} and {seed}"
    if not judged or first is None:
        return None
    verdict = accuracy.judge([np.asarray(x) for x in first], *case.expected)
    return None if verdict.ok else verdict.reason


# --- one kernel, whatever its size ------------------------------------------------------------------------------------

WHOLE_ELEMENTS = 1 << 23  # of results, up to which all blocks run; beyond, some at both ends and in the middle
SAMPLE_BLOCKS = 24
VALUE_BYTES = 1 << 30  # of all arrays, up to which values are compared
TOLERANCE = {"float16": 1e-2, "bfloat16": 5e-2}  # of the largest element; other types 1e-4


def check_kernels(clusters: Sequence[Cluster], seeds: Sequence[int]) -> Tally:
    """Each kernel by itself on drawn operands, beside the meaning of its instructions in JAX."""
    tally = Tally()
    alone = {cluster.text_in("cuda").symbol: cluster for cluster in clusters if cluster.segments}
    tally.add(cluster.text_in("cuda") for cluster in alone.values())
    for kernel in build_simt_kernels([cluster.text_in("cuda") for cluster in alone.values()]).values():
        if isinstance(kernel, BuildFailure):
            tally.faults.append(f"{kernel.symbol} does not compile: {kernel.message}")
        elif reason := _check_kernel(alone[kernel.text.symbol], kernel, seeds):
            tally.faults.append(f"{kernel.text.symbol}: {reason}")
    return tally


def _check_kernel(cluster: Cluster, kernel: SimtKernel, seeds: Sequence[int]) -> str | None:
    instruction = cluster.instruction
    shapes = [*(o.array for o in instruction.operands), *instruction.result_shapes]
    bytes_ = sum(s.size * s.dtype.itemsize for s in shapes)
    blocks = kernel.text.blocks
    ranges = [range(blocks)]
    if sum(s.size for s in instruction.result_shapes) > WHOLE_ELEMENTS and blocks > 3 * SAMPLE_BLOCKS:
        starts = (0, blocks // 2, blocks - SAMPLE_BLOCKS)
        ranges = [range(start, start + SAMPLE_BLOCKS) for start in starts]
    rng = np.random.default_rng(0)
    operands = [_drawn(o.array, rng) for o in instruction.operands]
    expected = None
    if bytes_ <= VALUE_BYTES:
        evaluate = jax.jit(lambda *xs: evaluate_computation(instruction.attrs["calls"], xs))
        expected = [np.asarray(x) for x in evaluate(*operands)]
    for seed in seeds:
        results = allocate_results(instruction.result_shapes)
        for chosen in ranges:
            try:
                kernel.run(operands, results, seed, chosen)
            except SimtFault as fault:
                return f"seed {seed}: {fault}"
        for number, (a, b) in enumerate(zip(results, expected or (), strict=False)):
            if reason := _far(a, b, whole=len(ranges) == 1):
                return f"seed {seed}: result {number}: {reason}"
    return None


def _drawn(shape: Shape, rng: np.random.Generator) -> np.ndarray:
    if shape.dtype.kind in "biu":
        return rng.integers(0, 2, shape.dims).astype(shape.dtype)
    values = rng.random(shape.dims, np.float32)
    values += np.float32(0.5)  # away from zero: no cancellation, no singularity
    return values.astype(shape.dtype)


def _far(ours: np.ndarray, theirs: np.ndarray, whole: bool) -> str | None:
    """Why results differ; where not all blocks ran, only what was written counts."""
    flat, other = ours.reshape(-1), theirs.reshape(-1)
    written = np.ones(flat.shape, bool)
    if not whole:
        written = (flat.view(np.uint8).reshape(flat.size, -1) != 0xFF).any(-1)
    exact = ours.dtype.kind in "biu"
    a, b = (x[written] if exact else x[written].astype(np.complex128) for x in (flat, other))
    if not a.size:
        return None
    scale = 0.0 if exact else TOLERANCE.get(str(ours.dtype), 1e-4) * np.abs(b[np.isfinite(b)]).max(initial=0.0)
    with np.errstate(invalid="ignore"):
        wrong = a != b if exact else ~((np.abs(a - b) <= scale) | (a == b) | (np.isnan(a) & np.isnan(b)))
    return f"{wrong.sum()} of {a.size} elements differ: {a[wrong][0]}, JAX has {b[wrong][0]}" if wrong.any() else None
