"""Random JAX programs through the optimizer against jax.jit, for as long as you like.

    scripts/fuzz.py                        batches of new programs for a minute
    scripts/fuzz.py --seconds 3600         longer
    scripts/fuzz.py --seed 1234 --count 1  one program again: the line that a fault prints

Every fault is shrunk and printed as a Python function, with the line that replays it. Exit code 1 if there was one.
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

from program_check import MODES, SIMT_MODES, check, shrink  # noqa: E402
from random_programs import random_program  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, help="of the first program (default: from the clock)")
    parser.add_argument("--count", type=int, help="how many programs (default: until the time is over)")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--batch", type=int, default=24, help="programs that are built together")
    parser.add_argument("--mode", choices=(*MODES, *SIMT_MODES), action="append", help="only these (default: all)")
    parser.add_argument("--x64", action="store_true", help="with 64-bit types")
    parser.add_argument("--donate", action="store_true", help="every argument is donated")
    parser.add_argument("--no-shrink", action="store_true")
    options = parser.parse_args()
    seed = int(time.time()) % 10**6 * 1000 if options.seed is None else options.seed
    last = seed + options.count if options.count else None
    modes = tuple(options.mode or MODES)
    end, found, done = time.monotonic() + options.seconds, 0, 0
    while time.monotonic() < end and (last is None or seed < last):
        seeds = range(seed, min(seed + options.batch, last or sys.maxsize))
        seen: set[int] = set()
        programs = [random_program(s, options.x64) for s in seeds]
        for fault in check(programs, modes, options.donate, options.x64):
            number = seeds[programs.index(fault.program)]
            if number in seen:
                continue  # the same program in another mode
            seen.add(number)
            found += 1
            flags = "".join(f" --{flag}" for flag in ("x64", "donate") if getattr(options, flag))
            print(f"--- scripts/fuzz.py --seed {number} --count 1 --mode {fault.mode}{flags}")
            print(fault if options.no_shrink else shrink(fault, options.donate, options.x64), flush=True)
        seed += len(seeds)
        done += len(seeds)
        print(f"{done} programs, {found} with faults", file=sys.stderr, flush=True)
    print(f"{done} programs in {', '.join(modes)}: {found} with faults")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
