"""How long the pipeline takes, without tracing and without compilers, and how that grows with the program.

    python scripts/pipeline_time.py [--sizes 1000 2000 5000 10000] [--repeats 3] [--device h200]

Times are CPU seconds of this process, the least of the repeats: a decoder layer, its gradient, and stacks of decoder
layers of about so many HLO instructions.
"""
from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import catalog  # noqa: E402

from hlofuse.compiler import Compilation, compile_function, compile_module  # noqa: E402


def stack_of_layers(layers: int) -> Callable[[Any, Any], Any]:
    def model(parameters: Any, x: Any) -> Any:
        for _ in range(layers):
            x = catalog.CATALOG["decoder_layer"].fn(parameters, x)
        return x

    return model


def print_row(name: str, traced: Compilation, repeats: int) -> None:
    module = traced.snapshots["hlo"]
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        found = compile_module(module, device=traced.device.name)
        best = min(best, time.process_time() - start)
    n = len(module.entry.instructions)
    print(f"{name:24} {n:6} instructions {len(found.clusters):5} kernels {best * 1e3:8.0f} ms {best / n * 1e6:6.0f}"
          f" µs/instruction  passes {found.timings['passes']:.0f} ms, fusion {found.timings['fusion']:.0f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=[1000, 2000, 5000, 10000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="h200")
    options = parser.parse_args()
    for name in ("decoder_layer", "decoder_layer_grad"):
        workload = catalog.CATALOG[name]
        traced = compile_function(workload.fn, *workload.avals("small"), device=options.device)
        print_row(name, traced, options.repeats)
    avals = catalog.CATALOG["decoder_layer"].avals("small")
    one, two = (len(compile_function(stack_of_layers(n), *avals).snapshots["hlo"].entry.instructions) for n in (1, 2))
    for size in options.sizes:
        layers = max(1, round(size / (two - one)))
        print_row(f"{layers} layers", compile_function(stack_of_layers(layers), *avals, device=options.device),
                  options.repeats)


if __name__ == "__main__":
    main()
