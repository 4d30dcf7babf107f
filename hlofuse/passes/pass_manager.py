"""Runs passes over a module, round after round until none changes it, and shows every change to whoever watches."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hlofuse.config import is_strict
from hlofuse.hlo.module import Module
from hlofuse.hlo.verifier import verify_module

MAX_ROUNDS = 6


@dataclass(frozen=True)
class Pass:
    """A named rewrite of whole modules: the same object when it changes nothing. The reason is for people; `dialects`
    are those whose kernels it is for, None for all."""

    name: str
    run: Callable[[Module], Module]
    reason: str
    dialects: tuple[str, ...] | None = None


def run_passes(module: Module, pipeline: Sequence[Pass] | None = None,
               on_snapshot: Callable[[str, Module], None] | None = None, dialect: str = "cuda") -> Module:
    """The module after all passes, repeated until a whole round changes nothing (at most MAX_ROUNDS rounds).

    `on_snapshot(name, module)` is told of each pass that changed something: `cse` the first time that it did, then
    `cse#2`, `cse#3`. In strict mode the module is verified after each. Passes for other dialects are left out.
    """
    if pipeline is None:
        from hlofuse.passes import PIPELINE  # late: the list imports this module

        pipeline = PIPELINE
    unchanged: dict[str, Module] = {}  # by pass, the module that it last left as it was
    changes: Counter[str] = Counter()
    for _ in range(MAX_ROUNDS):
        before = module
        for entry in pipeline:
            if unchanged.get(entry.name) is module or dialect not in (entry.dialects or (dialect,)):
                continue
            after = entry.run(module)
            if after is module:
                unchanged[entry.name] = module
                continue
            module = after
            changes[entry.name] += 1
            if is_strict():
                verify_module(module)
            if on_snapshot is not None:
                times = changes[entry.name]
                on_snapshot(entry.name if times == 1 else f"{entry.name}#{times}", module)
        if module is before:
            break
    return module
