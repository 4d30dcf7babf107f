"""The main job on one real function: a Transformer's GELU of a layer norm.

Prints its HLO before and after, the clusters with the reasons, one kernel's CUDA source, and its time beside jax.jit's
on this machine. `--quick` takes a smaller input.
"""

from __future__ import annotations

import argparse
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from scoreboard_row import time_in_turn

import hlofuse
from hlofuse.compiler import compile_function
from hlofuse.explore.dump import stage_text

ROWS, COLUMNS = 4096, 2048


def norm_gelu(x, gain, bias):
    """Layer norm over the last axis, then GELU: 30-odd HLO instructions."""
    mean = x.mean(-1, keepdims=True)
    variance = x.var(-1, keepdims=True)
    return jax.nn.gelu((x - mean) * jax.lax.rsqrt(variance + 1e-5) * gain + bias)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smaller input")
    rows = ROWS // 16 if parser.parse_args().quick else ROWS
    shapes = ((rows, COLUMNS), (COLUMNS,), (COLUMNS,))

    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    compilation = compile_function(norm_gelu, *avals, device="h200")
    show("HLO, as imported from the jaxpr", stage_text(compilation, "hlo", metadata=False))
    show("HLO after the passes, with its clusters", stage_text(compilation, "fused", metadata=False))
    show("The clusters, and why (for an H200)", compilation.explain())
    if kernels := [cluster for cluster in compilation.clusters if cluster.form != "jax"]:
        cluster = max(kernels, key=lambda c: c.cost.time_us)
        show(f"CUDA source of the kernel {cluster.name}", cluster.kernel.sources["cuda"])

    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    ours, theirs = hlofuse.jit(norm_gelu), jax.jit(norm_gelu)
    difference = float(jnp.max(jnp.abs(ours(*args) - theirs(*args))))
    start = time.perf_counter()
    jax_seconds, our_seconds = time_in_turn((theirs, ours), args)
    show(f"Time on this machine ({jax.devices()[0].platform}), medians of {time.perf_counter() - start:.0f} s in turn",
         f"jax.jit {jax_seconds * 1e3:8.3f} ms\n"
         f"hlofuse {our_seconds * 1e3:8.3f} ms: {jax_seconds / our_seconds:.2f} times as fast; "
         f"largest difference of a value {difference:.2g}")  # fmt: skip
    return 0


def show(title: str, text: str) -> None:
    print(f"--- {title} {'-' * max(0, 115 - len(title))}\n\n{text.rstrip()}\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
