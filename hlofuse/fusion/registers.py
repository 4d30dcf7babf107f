"""Registers: how many ptxas will give a thread of a kernel, estimated from its plan.

Two estimates share one form: `need` is a weighted sum of facts, and a curve turns it into registers. The curve is flat
near 32, where ptxas trades registers against threads in flight. `estimate_registers` walks a finished plan;
`quick_registers` costs nothing and serves the coloring's inner loop. The weights are least squares of the relative
error on ptxas's figures for sm_90; `scripts/calibrate.py` prints the error and fits them anew.
"""
from __future__ import annotations

import functools
import math
from bisect import bisect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hlofuse.codegen.dialect import CUDA
from hlofuse.codegen.sizing import Sizing, dependent_levels, size_plan
from hlofuse.fusion.block_cost import block_registers
from hlofuse.fusion.loop_work import loop_registers
from hlofuse.fusion.plan import Plan
from hlofuse.hlo.module import Instruction
from hlofuse.hlo.opcode import OPCODES
from hlofuse.hlo.shape import COMPLEX, Shape

LEAST, MOST = 8, 255
_TRIGONOMETRIC = frozenset({"sine", "cosine", "tan"})     # the reduction of large arguments is long
_BRANCHING = frozenset({"pad", "concatenate", "dynamic-update-slice"})


@dataclass(frozen=True)
class Model:
    """registers = curve(sum of weight * fact); the curve is linear between its points and beyond its ends."""

    weights: Mapping[str, float]
    curve: tuple[tuple[float, float], ...]

    def __call__(self, facts: Mapping[str, float], most: int = MOST) -> int:
        need = sum([self.weights.get(name, 0.0) * value for name, value in facts.items()])
        return round(min(max(self.registers(need), LEAST), most))

    def registers(self, need: float) -> float:
        points = self.curve
        k = min(max(bisect([x for x, _ in points], need), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[k - 1], points[k]
        return y0 + (need - x0) * (y1 - y0) / (x1 - x0)


def estimate_registers(plans: Sequence[Plan]) -> int:
    """Registers of one thread of a launch in the CUDA dialect: its segments' largest."""
    return max(_estimate(plan, size_plan(plan, CUDA)) for plan in plans)


def _estimate(plan: Plan, sizing: Sizing) -> int:
    if plan.block is not None:
        return block_registers(plan.block)
    if plan.loops:
        return min(MOST, max(loop_registers(loop, plan.analysis) for loop in plan.loops))
    return PRECISE(plan_facts(plan, sizing), 65536 // max(256, sizing.threads))


@functools.lru_cache(maxsize=16384)
def quick_registers(form: str, inputs: int, outputs: int, members: int, special: int, reductions: int,
                    wide: bool) -> int:
    """The same from counts: `form` is "loop", "row" or "column", `special` how many members are functions or divisions,
    `wide` whether any value has 64 bits or more."""
    return QUICK(quick_facts(form, inputs, outputs, members, special, reductions, wide))


def quick_facts(form: str, inputs: int, outputs: int, members: int, special: int, reductions: int,
                wide: bool) -> dict[str, float]:
    return {form: 1.0, "inputs": inputs, "outputs": outputs, "members": math.sqrt(members), "special": min(special, 6),
            "reductions": reductions, "wide": float(wide), "wide special": float(wide) * min(special, 4),
            "row special": float(form == "row") * min(special, 3), "row inputs": float(form == "row") * inputs}


def plan_facts(plan: Plan, sizing: Sizing) -> dict[str, float]:
    """What the precise estimate weighs. Widths are in 32-bit words; a thread computes `lanes` elements together."""
    computation, mask, lanes = plan.computation, plan.analysis.mask, sizing.lanes
    free = {i for i in computation.instructions if _is_free(i)}
    computed = [i for i in computation.instructions if i not in free]
    scheduled = set(plan.levels)
    parameters = [p for p in computation.parameters if p.array.size > 1]
    whole = [p for p in parameters if mask(p) == plan.domain_mask]
    special = [i for i in computed if OPCODES[i.opcode].unit in ("special", "div")]
    passes = _passes(plan)
    peak = max(_live_words(computation.instructions, needed, plan.levels, free) for needed in passes)
    form = plan_form(plan, sizing)
    steps = -(-(sizing.tile if form == "loop" else sizing.vector_size) // (sizing.threads * lanes))
    again = [i for i in (*whole, *special) if sum(i in needed for needed in passes) > 1]
    stays = steps * lanes if form == "row" and again and steps * lanes <= CUDA.keep_elements else 0
    words = sum(_words(p.array) for p in whole)
    return {
        form: 1.0,
        "lanes": lanes,
        "inputs": len(whole),
        "input words": words * lanes,
        "loop input words": words * lanes if form == "loop" else 0.0,
        "vector words": sum(_words(p.array) for p in parameters if p not in whole) * lanes,
        "scalars": len(computation.parameters) - len(parameters),
        "output words": sum(_words(o.array) for o in computation.outputs if mask(o) == plan.domain_mask) * lanes,
        "live words": peak,
        "live words of lanes": peak * lanes,
        "size": math.sqrt(max(map(len, passes))),
        "outer axes": len(sizing.outer) + len(sizing.loop),
        "special": min(sum(OPCODES[i.opcode].unit == "special" for i in computed), 6),
        "trigonometric": min(sum(i.opcode in _TRIGONOMETRIC for i in computed), 3),
        "branches": min(sum(i.opcode in _BRANCHING for i in computed), 4),
        "inline reductions": min(sum(i.opcode == "reduce" and i not in scheduled for i in computed), 4) * lanes,
        "wide": float(any(_words(i.result_shapes[0]) > 1 for i in computed)),
        "f64 special": min(sum(_words(i.result_shapes[0]) > 1 and not _is_complex(i) for i in special), 4),
        "complex": float(any(_is_complex(i) for i in computed)),
        "complex special": min(sum(_is_complex(i) for i in special), 4),
        "accumulator words": sum(_words(s) for r in scheduled for s in r.result_shapes) * lanes,
        "passes": len(passes) if scheduled else 0,
        "kept": stays,
        "kept by special": stays * min(len(special), 2),
        "kept by passes": stays * len(passes),
        "kept by size": stays * math.sqrt(max(map(len, passes))),
        "steps": min(steps, 4) if form == "loop" else 0,
        "long rows": float(form == "row" and steps > 1),
        "row steps": min(steps, 8) if form == "row" else 0,
        "row warps": float(form == "row" and sizing.threads >= 32),
        "row lanes": lanes if form == "row" else 0,
        "row live words": peak if form == "row" else 0.0,
        "kept words": stays * sum(_words(p.array) for p in whole if p in again),
        "batched": float(sum(len(r.operands) == 6 for r in scheduled)),
        "batched in lanes": lanes * float(sum(len(r.operands) == 6 for r in scheduled)),
        "unrolled rows": sizing.loop_size if form == "column" and sizing.chunks == 1 and sizing.loop_size <= 64 else 0,
        "inner loop": float(sizing.loop_size > 1),
        "large block": float(sizing.threads >= 512),
    }


def plan_form(plan: Plan, sizing: Sizing) -> str:
    """As the form table of the emitters: what the lanes run over, and whether reductions are split over blocks."""
    if plan.scatters:
        return "scatter"
    if plan.scans:
        return "scanned row" if plan.lanes_reduced else "scanned column"
    if not plan.levels:
        return "transpose" if plan.staged else "loop"
    if plan.lanes_reduced:
        return "full" if sizing.chunks > 1 else "row"
    return "split column" if sizing.chunks > 1 else "column"


def _is_free(i: Instruction) -> bool:
    """Written into the instructions that read it."""
    return i.opcode in ("constant", "iota", "tuple") or i.opcode == "broadcast" and i.operands[0].opcode == "constant"


def _is_complex(i: Instruction) -> bool:
    return i.result_shapes[0].element_type in COMPLEX


def _words(shape: Shape) -> float:
    return max(1.0, shape.dtype.itemsize / 4)


def _passes(plan: Plan) -> list[set[Instruction]]:
    """What each pass over the domain evaluates: results of earlier reductions are there from the start."""
    waiting = dependent_levels(plan)
    roots: dict[int, list[Instruction]] = {}
    for reduction, level in plan.levels.items():
        roots.setdefault(level, []).extend(reduction.operands[:len(reduction.operands) // 2])
    for output in plan.computation.outputs:
        if plan.analysis.mask(output) == plan.domain_mask or not plan.levels:
            roots.setdefault(waiting[output], []).append(output)
    return [_needed(found, plan.levels) for found in roots.values()]


def _needed(roots: Sequence[Instruction], stop: Collection[Instruction]) -> set[Instruction]:
    needed: set[Instruction] = set()
    stack = list(roots)
    while stack:
        i = stack.pop()
        if i not in needed:
            needed.add(i)
            stack.extend(() if i in stop else i.operands)
    return needed


def _live_words(order: Iterable[Instruction], needed: Collection[Instruction], stop: Collection[Instruction],
                free: Collection[Instruction]) -> float:
    """The most words that are live at once when what is `needed` is evaluated in order, each until its last use."""
    uses: dict[Instruction, int] = {}
    for i in needed:
        for o in () if i in stop else i.operands:
            uses[o] = uses.get(o, 0) + 1
    live = peak = 0.0
    for i in order:
        if i not in needed:
            continue
        if i not in free:
            live += _words(i.result_shapes[0])
            peak = max(peak, live)
        for o in () if i in stop else i.operands:
            uses[o] -= 1
            if not uses[o] and o not in free:
                live -= _words(o.result_shapes[0])
    return peak


# --- fitted by scripts/calibrate.py --fit -----------------------------------------------------------------------------
PRECISE = Model({
    "accumulator words": 0.249,
    "batched": 6.862,
    "batched in lanes": 6.862,
    "branches": 3.309,
    "column": 10.104,
    "complex": 0.911,
    "complex special": 2.185,
    "f64 special": 1.678,
    "full": 18.095,
    "inline reductions": 5.023,
    "inner loop": 9.578,
    "input words": 0.466,
    "inputs": 2.793,
    "kept": 0.436,
    "kept by passes": 0.268,
    "kept by size": 0.084,
    "lanes": 0.847,
    "large block": 0.754,
    "live words": 0.939,
    "live words of lanes": 0.066,
    "long rows": 4.373,
    "loop": 5.801,
    "loop input words": 0.21,
    "outer axes": 1.237,
    "output words": 0.208,
    "passes": 0.189,
    "row lanes": 0.534,
    "scanned row": 6.502,
    "scatter": 26.777,
    "split column": 11.693,
    "steps": 0.603,
    "transpose": 5.425,
    "trigonometric": 4.652,
    "unrolled rows": 0.018,
    "vector words": 0.533,
    "wide": 2.436,
}, ((8.0, 8.0), (20.0, 25.2), (26.0, 28.6), (32.0, 31.2), (40.0, 33.5), (50.0, 43.2), (64.0, 49.2), (120.0, 111.9)))

QUICK = Model({
    "column": 13.457,
    "inputs": 8.131,
    "loop": 7.208,
    "members": 0.432,
    "outputs": 2.36,
    "reductions": 2.472,
    "row": 5.049,
    "row inputs": 0.687,
    "wide": 1.974,
    "wide special": 3.998,
}, ((8.0, 8.0), (20.0, 26.2), (26.0, 29.7), (32.0, 31.7), (40.0, 32.2), (50.0, 38.2), (64.0, 45.5), (120.0, 77.3)))
