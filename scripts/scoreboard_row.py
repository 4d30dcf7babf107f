"""What scoreboard.py does for one workload, in a child process: count, check, time. What it raises is in the row."""

from __future__ import annotations

import functools
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import hlofuse
from hlofuse.compiler import compile_function
from hlofuse.errors import HlofuseWarning
from hlofuse.explore import accuracy, float64_reference
from hlofuse.runtime import primitive

MEMORY_LIMIT = 6 << 30  # of a workload's inputs, results and XLA's temporary buffers
TIME_BUDGET_S = 4.0  # for the runs of both sides
SLOW_CALLS_S = 10.0  # one call of each, together: beyond that there is no second one
SHORTEST_SAMPLE_S = 1e-3  # shorter calls are timed several at once


def fill(row: Any, workload: Any, request: Any) -> Any:
    """`row` with what `request` asks for; an exception ends up in `row.error`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            _count(row, workload, request)
            if request.check:
                _check(row, workload, request)
            if request.time:
                _time(row, workload, request)
        except Exception as error:
            row.ok = False
            row.error = f"{type(error).__name__}: {error} ({_place(error)})"
    row.notes += dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, HlofuseWarning))
    return row


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "hlofuse" in f.filename] or frames
    return f"{own[-1].filename.rsplit('/', 1)[-1]}:{own[-1].lineno}"


# ------------------------------------------------------------------------------------------- launches and bytes


def _count(row: Any, workload: Any, request: Any) -> None:
    _warm_up(request.target)
    avals = workload.avals(request.size)
    compilations = [compile_function(workload.fn, *avals, device=request.target)]
    if _pipeline_ms(compilations[0]) < 1000:
        # Twice, because the first may have paid for imports and caches.
        compilations.append(compile_function(workload.fn, *avals, device=request.target))
    count = compilations[-1].launches()
    row.launches, row.library_calls, row.bytes = count.total, count.library_calls, count.bytes
    row.pipeline_ms = min(map(_pipeline_ms, compilations))


def _pipeline_ms(compilation: Any) -> float:
    return sum(compilation.timings.values())  # import to written kernels; tracing and compilers are not among them


@functools.cache
def _warm_up(target: str) -> None:
    """What the first compilation of a process pays for is no workload's."""
    x = jax.ShapeDtypeStruct((8, 8), "float32")
    compile_function(lambda x: jax.nn.softmax(jnp.tanh(x) + 1.0), x, device=target)


# ------------------------------------------------------------------------------------------- values


def _check(row: Any, workload: Any, request: Any) -> None:
    args = workload.args(request.size)
    expected = jax.jit(workload.fn)(*args)
    with primitive.recorded_outcomes() as outcomes:
        results = hlofuse.jit(workload.fn)(*args)
    row.notes += [outcome.explain() for outcome in outcomes if outcome.executable is None]
    ours, theirs = map(str, map(jax.tree.structure, (results, expected)))
    if ours != theirs:
        row.ok, row.error = False, f"the results are {ours}, jax.jit's {theirs}"
        return
    reference = float64_reference.evaluate(jax.make_jaxpr(workload.fn)(*args), *jax.tree.leaves(args))
    verdict = accuracy.judge(jax.tree.leaves(results), jax.tree.leaves(expected), reference)
    row.ok, row.max_error = verdict.ok, verdict.max_error
    row.error = verdict.reason or None


# ------------------------------------------------------------------------------------------- times


def _time(row: Any, workload: Any, request: Any) -> None:
    needed = _needed_bytes(workload, request.size)
    if needed > MEMORY_LIMIT:
        row.notes.append(f"not timed: needs {needed / 2**30:.1f} GiB, more than {MEMORY_LIMIT >> 30}")
        return
    args = jax.device_put(workload.args(request.size))
    theirs, ours = time_in_turn((jax.jit(workload.fn), hlofuse.jit(workload.fn)), args)
    row.jax_ms, row.hlofuse_ms, row.time_ratio = theirs * 1e3, ours * 1e3, theirs / ours


def _needed_bytes(workload: Any, size: str) -> int:
    avals = workload.avals(size)
    arrays = jax.tree.leaves((avals, jax.eval_shape(workload.fn, *avals)))
    inputs_and_results = sum(a.size * a.dtype.itemsize for a in arrays)
    if size == "small" or inputs_and_results > MEMORY_LIMIT:
        return inputs_and_results
    analysis = jax.jit(workload.fn).lower(*avals).compile().memory_analysis()
    return inputs_and_results + int(getattr(analysis, "temp_size_in_bytes", 0))


def time_in_turn(functions: Sequence[Callable], args: Sequence[Any]) -> list[float]:
    """The median time of a call of each, in seconds: fresh results, the functions in turn and in alternating order."""
    first = []
    for function in functions:
        jax.block_until_ready(function(*args))  # compiles
        first.append(_seconds(function, args, 1))
    if sum(first) > SLOW_CALLS_S:
        return first
    calls = max(1, min(1000, int(SHORTEST_SAMPLE_S / max(max(first), 1e-7))))
    rounds = max(3, min(200, int(TIME_BUDGET_S / (calls * sum(first)))))
    samples: list[list[float]] = [[] for _ in functions]
    for number in range(rounds):
        order = range(len(functions)) if number % 2 else reversed(range(len(functions)))
        for i in order:
            samples[i].append(_seconds(functions[i], args, calls))
    return [statistics.median(s) for s in samples]


def _seconds(function: Callable, args: Sequence[Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        # Each result is dropped before the next call: memory is fresh, not twice as much.
        result = function(*args)
        jax.block_until_ready(result)
        del result
    return (time.perf_counter() - start) / calls
