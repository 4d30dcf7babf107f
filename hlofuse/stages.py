"""What hlofuse knows of a lowered or compiled program: the kernels in it, and why they are what they are.

`hlofuse.jit` gives JAX's own stages (`jax.stages`), and so does a `jax.jit` around it. JAX creates them itself, and its
jitted functions can be neither subclassed nor given a `lower` of their own (jax.grad and others copy attributes to the
functions they return, which would then lower the wrong function): so the names below are added to JAX's two classes.
"""

from __future__ import annotations

from typing import Any

import jax

from .frontend import jax_compat
from .runtime.primitive import Executable, Outcome

Stage = jax.stages.Lowered | jax.stages.Compiled


def outcomes(stage: Stage) -> tuple[Outcome, ...]:
    """What became of each function in the program that was given to `hlofuse.jit`, in program order."""
    return tuple(item for item in jax_compat.kept_items(stage) if isinstance(item, Outcome))


def executables(stage: Stage) -> tuple[Executable, ...]:
    """What the pipeline made: one for each optimized function, with its snapshots, kernels and explanation."""
    return tuple(o.executable for o in outcomes(stage) if o.executable is not None)


def kernels(stage: Stage) -> tuple[Any, ...]:
    """The generated kernels: name, source per dialect, launch, registers and shared memory of each."""
    return tuple(kernel for executable in executables(stage) for kernel in executable.kernels)


def explain(stage: Stage) -> str:
    """For every producer and its consumer: fused, cloned, or the rule that forbade it, with its numbers."""
    texts = [outcome.explain() for outcome in outcomes(stage)]
    return "\n\n".join(texts) or "Nothing here is optimized: no function has anything to compute, or all have effects."


for _stage in (jax.stages.Lowered, jax.stages.Compiled):
    jax_compat.extend_class(_stage, executables=property(executables), kernels=property(kernels), explain=explain)
