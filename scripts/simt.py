#!/usr/bin/env python
"""The CUDA kernels of the catalog and of random programs, run thread by thread on the CPU (SIMT).

    scripts/simt.py                          the catalog: 5 seeds, blocks as generated and of 32, 64 and 256 threads
    scripts/simt.py softmax layer_norm       these workloads
    scripts/simt.py --seeds 20 --programs 200

Prints how many kernels of which forms ran, and every report. Exit code 1 if there was one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HLOFUSE_STRICT"] = "1"
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import jax  # noqa: E402
from catalog import CATALOG  # noqa: E402
from program_check import SIMT_MODES, check  # noqa: E402
from random_programs import random_program  # noqa: E402
from simt_check import check_cases, check_kernels, compile_case, with_threads  # noqa: E402

from hlofuse.codegen.dialect import SIMT  # noqa: E402
from hlofuse.compiler import compile_function  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("workloads", nargs="*", metavar="NAME", help="of the catalog (default: all)")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="orders of blocks and threads (default 5)")
    parser.add_argument("--threads", type=int, nargs="*", default=[0, 32, 64, 256], metavar="N",
                        help="block sizes; 0: as generated (default: 0 32 64 256)")  # fmt: skip
    parser.add_argument("--programs", type=int, default=0, metavar="N", help="random programs as well")
    parser.add_argument("--full", action="store_true", help="the kernels of the full sizes too, each by itself; "
                        "of large results some blocks only (minutes a seed, and 3 GB)")  # fmt: skip
    options = parser.parse_args()
    names = options.workloads or list(CATALOG)
    cases = [compile_case(name, CATALOG[name].fn, jax.device_put(CATALOG[name].args("small"))) for name in names]
    faults = []
    for threads in options.threads:
        start = time.monotonic()
        tally = check_cases(cases, range(options.seeds), with_threads(threads) if threads else SIMT)
        print(f"{len(cases)} workloads, {options.seeds} seeds: {tally} ({time.monotonic() - start:.0f} s)", flush=True)
        faults += tally.faults
        print(*tally.faults, sep="\n", end="\n" if tally.faults else "", flush=True)
    if options.full:
        start = time.monotonic()
        clusters = [c for name in names for c in
                    compile_function(CATALOG[name].fn, *CATALOG[name].avals("full"), device="simt").clusters]
        tally = check_kernels(clusters, range(options.seeds))
        print(f"{len(names)} workloads at full size, {options.seeds} seeds: {tally} ({time.monotonic() - start:.0f} s)")
        faults += tally.faults
        print(*tally.faults, sep="\n", end="\n" if tally.faults else "", flush=True)
    for first in range(0, options.programs, 24):
        seeds = range(first, min(first + 24, options.programs))
        found = check([random_program(seed) for seed in seeds], tuple(SIMT_MODES))
        faults += found
        print(f"{seeds.stop} random programs", *found, sep="\n", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
