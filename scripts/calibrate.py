"""Estimated registers beside those of ptxas, for every kernel of the catalog and for random kernels.

    python scripts/calibrate.py [--arch sm_90] [--random 400] [--all] [--fit]

Prints the mean relative error by form, for the kernels that the weights were fitted on and for the others (every third
program), and the kernels that spill. --all prints every kernel, --fit computes new weights and writes them into
hlofuse/fusion/registers.py. Needs NVRTC (the extra cuda12 or cuda13), no GPU.
"""
from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]

from catalog import CATALOG  # noqa: E402
from random_kernels import random_module  # noqa: E402

from hlofuse.codegen.dialect import CUDA  # noqa: E402
from hlofuse.codegen.sizing import size_plan  # noqa: E402
from hlofuse.compiler import Cluster, Compilation, compile_function, compile_module  # noqa: E402
from hlofuse.fusion import registers  # noqa: E402
from hlofuse.fusion.plan import Plan  # noqa: E402
from hlofuse.fusion.registers import Model, estimate_registers, plan_facts, quick_facts  # noqa: E402
from hlofuse.hlo.opcode import OPCODES  # noqa: E402
from hlofuse.runtime.kernel_cache import KernelCache  # noqa: E402
from hlofuse.runtime.nvrtc import CudaSource, KernelResources, compile_many, nvrtc_available  # noqa: E402

MARK = "# --- fitted by scripts/calibrate.py --fit"
KNOTS = (8.0, 20.0, 26.0, 32.0, 40.0, 50.0, 64.0, 120.0)      # where the curve may bend


@dataclass(frozen=True)
class Sample:
    """One kernel, of which program (equal programs are on one side of the split), and what ptxas gave it."""

    program: str
    cluster: Cluster
    found: KernelResources

    @property
    def held_out(self) -> bool:
        name = self.program.partition("/")[0]
        return sum(map(ord, name)) % 3 == 0

    @property
    def form(self) -> str:
        return self.cluster.text_in("cuda").form

    @property
    def plans(self) -> list[Plan]:
        return [segment.plan for segment in self.cluster.segments]


def programs(random: int) -> Iterator[tuple[str, Callable[[], Compilation]]]:
    for name, workload in CATALOG.items():
        for size in ("small", "full"):
            yield f"{name}/{size}", partial(compile_function, workload.fn, *workload.avals(size), device="h200")
    for seed in range(random):
        yield f"random_{seed}", partial(_compile_random, seed)


def _compile_random(seed: int) -> Compilation:
    return compile_module(random_module(seed), device="h200")


def measure(random: int, arch: str) -> list[Sample]:
    """Every kernel of the programs, once."""
    clusters: dict[str, tuple[str, Cluster]] = {}
    for name, compile_program in programs(random):
        for cluster in compile_program().clusters:
            if cluster.segments:
                clusters.setdefault(cluster.text_in("cuda").symbol, (name, cluster))
    sources = [CudaSource(symbol, cluster.text_in("cuda").text) for symbol, (_, cluster) in clusters.items()]
    binaries = compile_many(sources, arch, KernelCache(), prelude=CUDA.prelude)
    samples = []
    for symbol, (name, cluster) in clusters.items():
        binary = binaries[symbol]
        if not hasattr(binary, "kernels"):
            raise SystemExit(f"{name}: {binary}")
        samples.append(Sample(name, cluster, binary.kernels[symbol]))
    return samples


# --- facts ----------------------------------------------------------------------------------------

def counted_facts(plan: Plan) -> dict[str, float]:
    """What the coloring knows of a kernel before it is planned."""
    computation = plan.computation
    inner = [i for i in computation.instructions if i.operands and i.opcode not in ("tuple", "broadcast")]
    inputs = sum(p.array.size > 1 for p in computation.parameters)
    special = sum(OPCODES[i.opcode].unit in ("special", "div") for i in inner)
    wide = any(shape.dtype.itemsize > 4 for i in inner for shape in i.result_shapes)
    form = "loop" if not plan.levels else "row" if plan.lanes_reduced else "column"
    return quick_facts(form, inputs, len(computation.outputs), len(inner), special, len(plan.levels), wide)


def guess_registers(sample: Sample) -> int:
    return max(registers.QUICK(counted_facts(plan)) for plan in sample.plans)


# --- fitting --------------------------------------------------------------------------------------

def fit(facts: Sequence[dict[str, float]], measured: Sequence[int], ridge: float = 0.3, rounds: int = 30) -> Model:
    """Least squares of the relative error, curve and weights in turn. No weight is negative and the curve never falls,
    so that more of anything never needs fewer registers; the curve leans to the identity where there is little data."""
    names = sorted({name for f in facts for name in f})
    rows = np.array([[f.get(name, 0.0) for name in names] for f in facts])
    spread = rows.std(0) + 1e-9
    rows, target = rows / spread, np.array(measured, float)
    damp = np.sqrt(ridge) * np.eye(len(names))
    ones, zeros = np.ones(len(target)), np.zeros(len(names))
    weights = _nonnegative(np.vstack([rows / target[:, None], damp]), np.append(ones, zeros))
    knots = np.array(KNOTS)
    widths = np.diff(knots)
    for _ in range(rounds):
        need = rows @ weights
        ramps = np.clip((need[:, None] - knots[:-1]) / widths, 0, 1)
        start = knots[0] + np.minimum(0, need - knots[0])
        lean = np.diag(0.5 / widths)
        goal = np.append(1 - start / target, np.full(len(widths), 0.5))
        rises = _nonnegative(np.vstack([ramps / target[:, None], lean]), goal)
        slopes = np.append(1, rises / widths)[np.clip(np.searchsorted(knots, need), 0, len(widths))]
        jacobian = rows * (slopes / target)[:, None]
        missing = 1 - (start + ramps @ rises) / target
        better = _nonnegative(np.vstack([jacobian, damp]), np.append(missing + jacobian @ weights, damp @ weights))
        weights = 0.5 * weights + 0.5 * better
    heights = knots[0] + np.append(0, np.cumsum(rises))
    curve = tuple((float(x), round(float(y), 1)) for x, y in zip(knots, heights, strict=True))
    return Model({n: round(float(w), 3) for n, w in zip(names, weights / spread, strict=True) if w > 1e-6}, curve)


def _nonnegative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    return nnls(matrix, target, maxiter=50 * matrix.shape[1])[0]


def write_models(precise: Model, quick: Model) -> None:
    path = Path(registers.__file__)
    head = path.read_text().partition(MARK)[0]
    line = MARK + " " + "-" * (120 - len(MARK) - 1)
    path.write_text(f"{head}{line}\n{_source('PRECISE', precise)}\n{_source('QUICK', quick)}")


def _source(name: str, model: Model) -> str:
    weights = "".join(f'    "{key}": {value},\n' for key, value in model.weights.items())
    curve = ", ".join(f"({x}, {y})" for x, y in model.curve)
    return f"{name} = Model({{\n{weights}}}, ({curve}))\n"


# --- the report -----------------------------------------------------------------------------------

def error(estimate: int, found: int) -> float:
    return abs(estimate - found) / found


def mean_error(pairs: Iterable[tuple[int, int]]) -> str:
    errors = [error(e, f) for e, f in pairs]
    return f"{statistics.mean(errors):6.1%} of {len(errors):3}" if errors else "        -    "


def report(samples: Sequence[Sample], estimates: Sequence[int], quick: Sequence[int]) -> None:
    groups: dict[str, list[int]] = {"all": list(range(len(samples)))}
    for n, sample in enumerate(samples):
        groups.setdefault(sample.form, []).append(n)
        groups.setdefault("random" if sample.program.startswith("random_") else "catalog", []).append(n)
    print("mean |estimate - ptxas| / ptxas   precise: fitted     held out            quick: fitted       held out")
    for group, members in groups.items():
        cells = [mean_error((values[n], samples[n].found.registers) for n in members if samples[n].held_out == held)
                 for values in (estimates, quick) for held in (False, True)]
        print(f"  {group:30} {'   '.join(f'{c:16}' for c in cells)}")
    spills = [s for s in samples if s.found.spill_stores or s.found.spill_loads]
    print(f"{len(spills)} of {len(samples)} kernels spill")
    for s in spills:
        print(f"  {s.program} {s.cluster.name}: {s.found}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--random", type=int, default=400, metavar="N", help="how many random programs")
    parser.add_argument("--all", action="store_true", help="print every kernel")
    parser.add_argument("--fit", action="store_true", help="write new weights into the package")
    arguments = parser.parse_args()
    if (reason := nvrtc_available()) is not None:
        raise SystemExit(reason)
    samples = measure(arguments.random, arguments.arch)
    if arguments.fit:
        chosen = [s for s in samples if not s.held_out and len(s.plans) == 1]
        measured = [s.found.registers for s in chosen]
        registers.PRECISE = fit([plan_facts(s.plans[0], size_plan(s.plans[0], CUDA)) for s in chosen], measured)
        registers.QUICK = fit([counted_facts(s.plans[0]) for s in chosen], measured)
        write_models(registers.PRECISE, registers.QUICK)
    estimates = [estimate_registers(s.plans) for s in samples]
    guesses = [guess_registers(s) for s in samples]
    if arguments.all:
        for s, e, g in zip(samples, estimates, guesses, strict=True):
            print(f"{s.program:32} {s.form:14} ptxas {s.found.registers:4}  precise {e:4}  quick {g:4}  {len(s.plans)}")
    report(samples, estimates, guesses)


if __name__ == "__main__":
    main()
