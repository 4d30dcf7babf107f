"""How good the coloring is: cost of coloring and of greedy over cost of exact, and how time grows with the graph.

    python scripts/coloring_quality.py [--graphs 100] [--vertices 8 10 12] [--scale 1000 2000 5000 10000]

Random graphs with a cost of launch + bytes / bandwidth, and the catalog's programs where exact proves an optimum.
Quality is measured without packing, of which exact knows nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from catalog import CATALOG  # noqa: E402
from random_fusion import random_problem  # noqa: E402

from hlofuse.compiler import compile_function  # noqa: E402
from hlofuse.fusion.coloring import color_graph  # noqa: E402
from hlofuse.fusion.exact import TooLargeError  # noqa: E402


def summary(ratios: list[float]) -> str:
    ranked = sorted(ratios)
    optimal = sum(r < 1 + 1e-9 for r in ratios) / len(ratios)
    return (
        f"mean {statistics.mean(ratios):.4f}  p95 {ranked[int(0.95 * (len(ranked) - 1))]:.3f}  "
        f"max {ranked[-1]:.3f}  optimal {optimal:.0%}"
    )


def print_quality(graphs: int, sizes: list[int]) -> None:
    for n in sizes:
        for clonable in (0.0, 0.4):
            ratios: dict[str, list[float]] = {"coloring": [], "greedy": [], "none": []}
            over: set[str] = set()
            beyond = 0
            for seed in range(graphs):
                problem = random_problem(seed, n, clonable=clonable, packing=False)
                try:
                    exact = color_graph(problem, "exact")
                except TooLargeError:
                    beyond += 1
                    continue
                over.add(exact.statistics.optimal_over)
                for method, found in ratios.items():
                    found.append(color_graph(problem, method).total_cost / exact.total_cost)
            print(f"{n} vertices, {clonable:.0%} clonable, {graphs} graphs, {beyond} beyond exact; "
                  f"optimal over {' or '.join(sorted(over))}")
            for method, found in ratios.items():
                print(f"  {method:8s} / exact  {summary(found)}")


def print_catalog(device: str) -> None:
    ratios: dict[str, list[float]] = {"coloring": [], "greedy": [], "none": []}
    beyond = []
    for name, workload in CATALOG.items():
        costs = compile_function(workload.fn, *workload.avals("full"), device=device).fusion.costs
        if all(costs.is_fixed):
            continue
        start = time.process_time()
        try:
            exact = color_graph(costs, "exact")
        except TooLargeError:
            beyond.append(f"{name} ({costs.num_vertices})")
            continue
        seconds = time.process_time() - start
        found = {method: color_graph(costs, method).total_cost / exact.total_cost for method in ratios}
        for method, ratio in found.items():
            ratios[method].append(ratio)
        shown = "  ".join(f"{method} {ratio:.4f}" for method, ratio in found.items())
        print(f"  {name:24} {costs.num_vertices:4} vertices {seconds:6.2f} s  {shown}")
    print(f"{len(ratios['coloring'])} programs of the catalog on {device}; beyond exact: {', '.join(beyond) or 'none'}")
    for method, found_ratios in ratios.items():
        print(f"  {method:8s} / exact  {summary(found_ratios)}")


def print_scaling(sizes: list[int]) -> None:
    print("vertices  kernels  coloring s  µs/vertex  evaluations/vertex  greedy s  coloring/greedy")
    for n in sizes:
        problem = random_problem(7, n, conflict=0.01, window=200, max_members=32)
        seconds = {}
        colorings = {}
        for method in ("greedy", "coloring"):
            problem.cost_calls = 0
            start = time.process_time()
            colorings[method] = color_graph(problem, method)
            seconds[method] = time.process_time() - start
        ratio = colorings["coloring"].predicted_cost / colorings["greedy"].predicted_cost
        print(
            f"{n:8d}  {len(colorings['coloring'].kernels):7d}  {seconds['coloring']:10.2f}  "
            f"{seconds['coloring'] / n * 1e6:9.0f}  {problem.cost_calls / n:18.1f}  "
            f"{seconds['greedy']:8.2f}  {ratio:15.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Quality and speed of the coloring.")
    parser.add_argument("--graphs", type=int, default=100, help="graphs per row (default 100)")
    parser.add_argument("--vertices", type=int, nargs="*", default=[8, 10, 12], help="sizes compared with exact")
    parser.add_argument("--scale", type=int, nargs="*", default=[1000, 2000, 5000, 10000], help="sizes timed")
    options = parser.parse_args()
    print_quality(options.graphs, options.vertices)
    print_catalog("h200")
    print_scaling(options.scale)


if __name__ == "__main__":
    main()
