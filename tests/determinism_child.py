"""Prints a digest of what kernels compute, with the cores that it is given: `determinism_child.py CORES`.

Run by test_determinism.py: the number of threads is the number of cores a process has when JAX starts.
"""

from __future__ import annotations

import hashlib
import os
import sys


def main() -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:int(sys.argv[1])])
    os.environ["JAX_PLATFORMS"] = "cpu"

    import jax
    import jax.numpy as jnp
    import numpy as np

    import hlofuse

    def rows(x):
        return jax.nn.softmax(x), x.mean(1), x.std(1), jnp.cumsum(x, 1)

    def columns(x):
        return x.mean(0), x.var(0), jnp.max(x, 0), jax.nn.logsumexp(x, 0), jnp.cumsum(x, 0)

    def whole(x):
        return jnp.linalg.norm(x), x.var(), jax.nn.logsumexp(x), jnp.argmax(x)

    def segments(x):
        return jax.ops.segment_sum(x, jnp.arange(x.shape[0]) * 7 % 13, 13)

    rng = np.random.default_rng(0)
    for shape in ((700, 900), (3, 200_000), (50_000, 3)):
        x = rng.standard_normal(shape).astype(np.float32)
        for function in (rows, columns, whole, segments):
            compiled = hlofuse.jit(function)
            digests = {_digest(jax.tree.leaves(compiled(x))) for _ in range(5)}
            print(function.__name__, shape, *sorted(digests))


def _digest(arrays) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    main()
