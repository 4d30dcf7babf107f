"""Mutants of real kernels, and of the prelude that they run with: SIMT catches each, and nothing on the originals.

`caught`: what the report must say; None where only the values are wrong.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hlofuse.codegen.dialect import SIMT
from hlofuse.compiler import compile_function
from hlofuse.runtime.host_compiler import find_compiler
from hlofuse.runtime.simt import SimtFault, SimtKernel, allocate_results, build_simt_kernels

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

SEEDS = range(6)


def normalize(x):
    centered = x - x.mean(-1, keepdims=True)
    return centered / jnp.sqrt(jnp.square(centered).mean(-1, keepdims=True))


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "loop": (lambda x: jnp.tanh(x) + 1, (2047,)),
    "rows": (normalize, (5, 301)),  # blocks of 128 threads
    "short rows": (lambda x: jax.nn.softmax(x), (9001, 40)),  # 8 threads a row, several rows a block
    "columns": (lambda x: jnp.tanh(x).sum(0), (200, 77)),
    "full": (lambda x: (x * x).sum(), (1 << 15,)),  # split over 8 blocks; the last one folds
    "split columns": (lambda x: (x * x).sum(0), (2048, 96)),
    "transpose": (lambda x: jnp.tanh(x.T) + 1, (70, 45)),
}


@dataclass(frozen=True)
class Mutant:
    """`old` (a pattern, replaced at its `nth` place) stands in the kernel's own text, or in the prelude's."""

    program: str
    old: str
    new: str
    caught: str | None
    nth: int = 0
    prelude: bool = False


def in_prelude(program: str, old: str, new: str, caught: str | None, nth: int = 0) -> Mutant:
    return Mutant(program, re.escape(old), new, caught, nth, prelude=True)


LAST_LINE = "if (LANES > 1 && at < end) body(at, (int)(end - at));"
FENCE, BARRIER, ONE_THREAD = r"__threadfence\(\);", r"  BARRIER\(\);", r"if \(THREAD == 0\)"
ONE_LANE = "if ((threadIdx.x % (WARPS * 32)) % 32 == 0)"
MUTANTS = {
    "no barrier after the partial results of warps": Mutant(
        "rows", BARRIER, "", "slots.*unordered|nothing has written", 0, True
    ),
    "no barrier before the slots' next use": Mutant(
        "rows", BARRIER, "", "write of slots.*unordered with the read", 1, True
    ),
    "no barrier between staging and reading": Mutant(
        "transpose", BARRIER, "", "x_tile.*no barrier stands between|nothing"
    ),
    "a barrier that some threads leave out": Mutant(
        "loop", "  for_tiles", "  if (THREAD < 100) BARRIER();\n  for_tiles", "not all threads reach: 100 of 256 wait"
    ),
    "threads that exit before a barrier": Mutant(
        "transpose",
        BARRIER,
        "if (THREAD == 77) return;\n  BARRIER();",
        "not all threads reach: 255 of 256 wait, thread 77 has exited",
    ),
    "two barriers that meet": Mutant(
        "transpose",
        BARRIER,
        "if (THREAD < 64) {\n  BARRIER();\n  } else\n  BARRIER();",
        "barrier that not all threads reach",
    ),
    "a shuffle half as far": in_prelude(
        "rows",
        "int distance = (THREADS < 32 ? THREADS : 32) / 2",
        "int distance = (THREADS < 32 ? THREADS : 32) / 4",
        None,
    ),
    "a shuffle one further": in_prelude(
        "short rows",
        "shuffle<THREADS, false>(values, distance)",
        "shuffle<THREADS, false>(values, distance + 1)",
        None,
    ),
    "the mask of another group": in_prelude(
        "short rows", "<< ((threadIdx.x & 31) & ~(THREADS - 1))", "<< 0", "not in its own mask"
    ),
    "a shuffle from an exited lane": Mutant(
        "rows",
        r"  fold_lanes<LANES>",
        "  if (THREAD == 40) return;\n  fold_lanes<LANES>",
        "shuffle from lane 8, which has exited",
    ),
    "a shuffle that some lanes leave out": Mutant(
        "rows",
        r"fold_threads<THREADS>",
        "if (THREAD % 2 == 0) fold_threads<THREADS>",
        "whose other lanes never come|not all threads reach|has exited",
    ),
    "partial results of every other warp": in_prelude(
        "rows",
        ONE_LANE,
        ONE_LANE.replace("% 32 == 0", "% 64 == 0"),
        "nothing has written",
    ),
    "every lane writes its warp's slot": in_prelude(
        "rows",
        ONE_LANE,
        "",
        "write of slots.*unordered with the write",
    ),
    "a slot too few": in_prelude(
        "rows",
        "SHARED(T, slots, WARPS);",
        "SHARED(T, slots, WARPS - 1);",
        "outside of slots: index 3, it has 3 elements",
    ),
    "a narrow tile": Mutant("transpose", r"32 \* 33\);", "32 * 32);", "outside of x_tile"),
    "a tile's read that is one off": Mutant(
        "transpose",
        r"= x_tile\[column \* 33 \+ row\]",
        "= x_tile[column * 33 + row + 1]",
        "x_tile.*nothing has written",
    ),
    "the tail dropped": in_prelude(
        "loop", LAST_LINE, "", "3 of 2047 elements of out were never written, first index 2044"
    ),
    "no end": in_prelude(
        "loop",
        "for (; at + LANES <= end; at += THREADS * LANES) body(at, LANES);",
        "for (; at < end; at += THREADS * LANES) body(at, LANES);",
        "outside of",
    ),
    "a bound that is one too far": Mutant("rows", r"\(int\)301", "(int)302", "read outside of x: index 1505", 0),
    "a bound that is one too near": Mutant(
        "columns", r"\(int\)77", "(int)76", "1 of 77 elements of out were never written"
    ),
    "a row too many": Mutant("columns", r"< 200;", "<= 200;", "read outside of x: index 154"),
    "vectors that start one element late": Mutant(
        "loop", r"write_lanes<LANES>\(out, i0,", "write_lanes<LANES>(out, i0 + 1,", "16 bytes.*not aligned"
    ),
    "vectors read one element late": Mutant(
        "loop", r"read_lanes<LANES>\(x, i0,", "read_lanes<LANES>(x, i0 + 1,", "16 bytes.*not aligned"
    ),
    "vectors of the wrong row": Mutant("short rows", r"x, i \* 40", "x, i * 39", "not aligned"),
    "blocks that write the same rows": Mutant(
        "rows", r"out\[i \* 301", "out[0 * 301", "write of out.*of block .*no fence and atomic"
    ),
    "partial results of two blocks in one place": Mutant(
        "full", r"partial\[BLOCK\]", "partial[BLOCK / 2]", "write of partial.*of block|nothing has written"
    ),
    "every thread writes the partial result": Mutant(
        "full", ONE_THREAD, "", "write of partial.*unordered with the write"
    ),
    "every thread writes the result": Mutant("full", ONE_THREAD, "", "write of out.*unordered with the write", 1),
    "results written before the others are done": Mutant(
        "full", r"if \(is_last_block\([^)]*\)\)", "", "partial.*(nothing has written|no fence and atomic)"
    ),
    "no fence before the counter": Mutant("full", FENCE, "", "read of partial.*no fence and atomic", 0, True),
    "no fence after the counter": Mutant("full", FENCE, "", "read of partial.*no fence and atomic", 1, True),
    "no fence in split columns": Mutant("split columns", FENCE, "", "read of partial.*no fence and atomic", 0, True),
    "no barrier between results and counter": Mutant(
        "split columns", BARRIER, "", "read of partial.*no fence and atomic", 4, True
    ),
    "a counter that every thread increments": in_prelude(
        "full", "if (threadIdx.x == 0) last[0]", "last[0]", "write of last.*unordered with the write"
    ),
    "no barrier before the counter's answer": Mutant(
        "full", BARRIER, "", "last.*(unordered|nothing has written)", 5, True
    ),
    "a counter that is one block early": in_prelude(
        "full",
        "atomicInc(counter, blocks - 1) == blocks - 1",
        "atomicInc(counter, blocks - 1) == blocks - 2",
        "nothing has written",
    ),
    "a counter of another launch": Mutant(
        "full", r"counters \+ BLOCK / 8", "counters + 1 + BLOCK / 8", "outside of every buffer"
    ),
    "a chunk left out": Mutant("full", r"\(int\)8,", "(int)7,", None),
    "an index that overflows": Mutant(
        "loop",
        r"const int i = i0 \+ l;",
        "const int i = i0 + l + 2147483647;\n out[i + 1] = 0;",
        "write outside of out: index -214748",
    ),
}


@functools.cache
def original(program: str) -> tuple[Any, np.ndarray, np.ndarray]:
    """The program's one kernel, its operand and what jax.jit makes of it."""
    function, dims = PROGRAMS[program]
    compilation = compile_function(function, jax.ShapeDtypeStruct(dims, "float32"), device="simt")
    (cluster,) = compilation.clusters
    x = np.random.default_rng(1).standard_normal(dims, "float32")
    return cluster, x, np.asarray(jax.jit(function)(x))


def run(kernel: SimtKernel, program: str, seed: int) -> bool:
    """Whether the values are right; raises SimtFault."""
    cluster, x, expected = original(program)
    results = allocate_results(cluster.instruction.result_shapes)
    kernel.run([x], results, seed)
    return np.allclose(results[0], expected, rtol=1e-4, atol=1e-5)


def replace_nth(pattern: str, new: str, text: str, nth: int) -> str:
    places = list(re.finditer(pattern, text))
    assert len(places) > nth, f"the text has no {pattern!r} number {nth} any more"
    return text[: places[nth].start()] + new + text[places[nth].end() :]


@pytest.mark.parametrize("program", PROGRAMS)
def test_originals_are_right(program):
    text = original(program)[0].text_in("cuda")
    kernel = build_simt_kernels([text])[text.symbol]
    assert isinstance(kernel, SimtKernel), kernel
    for seed in SEEDS:
        assert run(kernel, program, seed)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name):
    mutant = MUTANTS[name]
    text, prelude = original(mutant.program)[0].text_in("cuda"), SIMT.prelude
    if mutant.prelude:
        prelude = replace_nth(mutant.old, mutant.new, prelude, mutant.nth)
    else:
        text = replace(text, text=replace_nth(mutant.old, mutant.new, text.text, mutant.nth))
    kernel = build_simt_kernels([text], prelude)[text.symbol]
    assert isinstance(kernel, SimtKernel), kernel
    for seed in SEEDS:
        if mutant.caught is None:
            assert not run(kernel, mutant.program, seed)
            continue
        with pytest.raises(SimtFault, match=mutant.caught) as caught:
            run(kernel, mutant.program, seed)
        report = str(caught.value)
        assert text.symbol in report
        assert "never written" in report or re.search(
            r"block \d+, thread \d+, (after )?(line \d+|block_cuda.h:\d+)", report
        )
