"""Random loops, gradients through loops, and stencils through the optimizer against jax.jit, for as long as you like.

    scripts/fuzz_loops.py                                  batches of all three for a minute
    scripts/fuzz_loops.py --kind stencil --seconds 3600    one kind, longer
    scripts/fuzz_loops.py --kind loop --seed 12 --count 1  one program again: the line that a fault prints

Exit code 1 if there was a fault.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HLOFUSE_STRICT"] = "1"
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402
from loop_check import assert_all_same  # noqa: E402
from random_loops import random_gradient, random_loop  # noqa: E402
from random_stencils import random_stencil  # noqa: E402

KINDS: dict[str, tuple[Callable, float]] = {
    "loop": (random_loop, 1e-3), "gradient": (random_gradient, 3e-3), "stencil": (random_stencil, 1e-3)}  # fmt: skip


def faults(kind: str, seeds: Sequence[int]) -> list[str]:
    """What the programs of these seeds get wrong. All are compiled together; where that fails, each by itself."""
    draw, tolerance = KINDS[kind]
    try:
        assert_all_same({str(seed): (*draw(np.random.default_rng(seed)), tolerance) for seed in seeds})
    except Exception as error:
        if len(seeds) == 1:
            return [f"--- scripts/fuzz_loops.py --kind {kind} --seed {seeds[0]} --count 1\n{str(error)[:1500]}"]
        return [fault for seed in seeds for fault in faults(kind, [seed])]
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kind", choices=tuple(KINDS), action="append", help="only these (default: all)")
    parser.add_argument("--seed", type=int, help="of the first program (default: from the clock)")
    parser.add_argument("--count", type=int, help="how many of each kind (default: until the time is over)")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--batch", type=int, default=8, help="programs that are built together")
    options = parser.parse_args()
    seed = int(time.time()) % 10**6 * 1000 if options.seed is None else options.seed
    last = seed + options.count if options.count else sys.maxsize
    end, found, done = time.monotonic() + options.seconds, 0, 0
    while time.monotonic() < end and seed < last:
        seeds = range(seed, min(seed + options.batch, last))
        for kind in options.kind or KINDS:
            for fault in faults(kind, seeds):
                found += 1
                print(fault, flush=True)
            done += len(seeds)
        seed += len(seeds)
        print(f"{done} programs, {found} with faults", file=sys.stderr, flush=True)
    print(f"{done} programs: {found} with faults")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
