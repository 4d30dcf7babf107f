#!/usr/bin/env python
"""How long a user waits for the first call: a workload in fresh processes, with jax.jit, and with hlofuse.jit on an
empty and on a filled kernel cache. Prints the medians and their ratios to jax.jit's (the targets: cold 2, warm 1.1).

    scripts/first_call.py [NAME] [--catalog FILE] [--size small|full] [--repeat N]

Imports and the start of JAX's backend are not counted; tracing, lowering, every compiler and the call itself are.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_CHILD = """
import json, sys, time
import jax, jax.numpy as jnp
import hlofuse, hlofuse.compiler
from pathlib import Path
from hlofuse.explore.workloads import load_catalogs

how, catalog, name, size = sys.argv[1:]
workload = load_catalogs([Path(catalog)])[name]
args = jax.device_put(workload.args(size))
# The first program of a process starts XLA's compiler and JAX's tracing machinery, whoever asks for it.
jax.block_until_ready(jax.jit(lambda x: jnp.sin(x) + 1.0)(jnp.ones(3)))
start = time.perf_counter()
jitted = (jax if how == "jax" else hlofuse).jit(workload.fn)
jax.block_until_ready(jitted(*args))
print(json.dumps(time.perf_counter() - start))
"""


def first_call_seconds(how: str, cache: Path, arguments: argparse.Namespace) -> float:
    environment = {**os.environ, "HLOFUSE_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _CHILD, how, str(arguments.catalog), arguments.name, arguments.size]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"the {how} process failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="decoder_layer", metavar="NAME")
    parser.add_argument("--catalog", type=Path, default=ROOT / "tests" / "catalog.py", metavar="FILE")
    parser.add_argument("--size", choices=("small", "full"), default="small")
    parser.add_argument("--repeat", type=int, default=5, metavar="N")
    arguments = parser.parse_args()

    samples: dict[str, list[float]] = {"jax.jit": [], "cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as folder:
        warm = Path(folder) / "warm"
        first_call_seconds("hlofuse", warm, arguments)  # fills it
        for number in range(arguments.repeat):
            samples["jax.jit"].append(first_call_seconds("jax", warm, arguments))
            samples["cold"].append(first_call_seconds("hlofuse", Path(folder) / f"cold{number}", arguments))
            samples["warm"].append(first_call_seconds("hlofuse", warm, arguments))
    medians = {what: statistics.median(values) for what, values in samples.items()}
    print(f"first call of {arguments.name} ({arguments.size}), median of {arguments.repeat} processes each")
    for what, median in medians.items():
        low, high = min(samples[what]) * 1e3, max(samples[what]) * 1e3
        ratio = median / medians["jax.jit"]
        print(f"  {what:<8} {median * 1e3:8.1f} ms ({low:.1f} to {high:.1f})  {ratio:5.2f} x jax.jit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
