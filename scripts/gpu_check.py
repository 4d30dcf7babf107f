#!/usr/bin/env python
"""Everything that only a GPU can answer, in under eight minutes: is it right, how fast, how good were the predictions.

    scripts/gpu_check.py [NAME...] [--json FILE] [--budget SECONDS] [--jobs N] [--fresh] [--dry-run]

Needs one GPU, jax with its CUDA plugin, CuPy and NVRTC, and no network. Results are printed and written to FILE as they
come, the most important first; a second run goes on where the first one stopped (`--fresh`: from the start). Work is
done by child processes: one that crashes or hangs is a line in the results. `--dry-run` does the same on this machine's
CPU with NumPy's arrays and small inputs, so that no GPU's time is spent on a typo. The exit status is 1 if anything was
wrong.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests")]
TASK_LIMIT_S = 75.0
FIRST_TASK_LIMIT_S = 120.0  # imports JAX, and finds the GPU


@dataclass(frozen=True)
class Task:
    """One piece of work for a child: a function of gpu_tasks.py, of a workload or of none."""

    part: str
    workload: str = ""

    @property
    def key(self) -> str:
        return f"{self.part}/{self.workload}" if self.workload else self.part


@dataclass(frozen=True)
class Stage:
    """`jobs`: how many children may work at once, where nothing is timed."""

    part: str
    per_workload: bool
    jobs: int = 1


# The most important first.
STAGES = (
    Stage("environment", per_workload=False),
    Stage("first_calls", per_workload=False),
    Stage("small", per_workload=True, jobs=16),
    Stage("copy", per_workload=False),
    Stage("full", per_workload=True),
    Stage("overhead", per_workload=False),
    Stage("values", per_workload=True, jobs=3),
    Stage("loops", per_workload=True),
    Stage("kernels", per_workload=True),
)


class Child:
    """A process that works on tasks; a new one takes the place of one that died or was too slow."""

    def __init__(self, dry_run: bool) -> None:
        self._dry_run = dry_run
        self._process: Any = None
        self._connection: Connection | None = None

    def work(self, task: Task, limit: float) -> dict[str, Any]:
        started = time.perf_counter()
        if self._connection is None:
            self._start()
            limit = max(limit, FIRST_TASK_LIMIT_S)
        assert self._connection is not None
        try:
            self._connection.send(task)
            if self._connection.poll(limit):
                result: dict[str, Any] = self._connection.recv()
            else:
                result = {"error": f"no answer within {limit:.0f} s"}
                self.stop()
        except (EOFError, OSError):
            self._process.join(10)
            result = {"error": f"the process died with code {self._process.exitcode}"}
            self.stop()
        return {**result, "seconds": round(time.perf_counter() - started, 2)}

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, far_end = context.Pipe()
        self._process = context.Process(target=serve, args=(far_end, self._dry_run), daemon=True)
        self._process.start()
        far_end.close()

    def stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._process.kill()
            self._process.join()
            self._connection = None


def serve(connection: Connection, dry_run: bool) -> None:
    """A child's life. What a task raises is its result."""
    # Several children share the GPU, and CuPy's pool with JAX's.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if dry_run:
        os.environ["JAX_PLATFORMS"] = "cpu"
    import gpu_tasks

    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        connection.send(gpu_tasks.work(task.part, task.workload, dry_run))


class Results:
    """The JSON file, written anew after every task."""

    def __init__(self, path: Path, fresh: bool, dry_run: bool) -> None:
        self.path = path
        self.tasks: dict[str, dict[str, Any]] = {}
        if path.exists() and not fresh:
            found = json.loads(path.read_text())
            if found.get("dry_run") == dry_run:
                self.tasks = {key: r for key, r in found["tasks"].items() if "error" not in r}
        self.dry_run = dry_run

    def add(self, task: Task, result: dict[str, Any]) -> None:
        self.tasks[task.key] = result
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"dry_run": self.dry_run, "tasks": self.tasks}, indent=1, sort_keys=True))
        os.replace(temporary, self.path)


def tasks_of(stage: Stage, workloads: Sequence[str], loops: Sequence[str]) -> list[Task]:
    if not stage.per_workload:
        return [Task(stage.part)]
    return [Task(stage.part, name) for name in (loops if stage.part == "loops" else workloads)]


def run(stages: Sequence[Stage], workloads: Sequence[str], loops: Sequence[str], results: Results,
        children: Sequence[Child], budget: float, say: Callable[[str], None]) -> list[str]:  # fmt: skip
    """Works through the stages; the keys of tasks for which there was no time."""
    deadline = time.perf_counter() + budget
    left: list[str] = []

    def work(task: Task, child: Child) -> None:
        limit = deadline - time.perf_counter()
        if limit < 1:
            left.append(task.key)
            return
        result = child.work(task, min(limit, TASK_LIMIT_S))
        results.add(task, result)
        say(f"{budget - (deadline - time.perf_counter()):6.1f} s  {task.key:34} {describe(result)}")

    for stage in stages:
        todo = [t for t in tasks_of(stage, workloads, loops) if t.key not in results.tasks]
        workers = children[: stage.jobs]
        shares = [todo[n :: len(workers)] for n in range(len(workers))]

        def work_all(share: Sequence[Task], child: Child) -> None:
            for task in share:
                work(task, child)

        with ThreadPoolExecutor(len(workers)) as pool:
            list(pool.map(work_all, shares, workers))
        for child in workers[1:]:
            child.stop()  # its memory on the GPU is wanted, and its silence
    return left


def describe(result: dict[str, Any]) -> str:
    if "error" in result:
        return "ERROR " + str(result["error"]).splitlines()[0][:150]
    parts = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in result.items()
             if not isinstance(v, list | dict) and k != "seconds"]  # fmt: skip
    return ("" if result.get("ok", True) else "WRONG ") + ", ".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="NAME",
                        help="workloads of tests/catalog.py and tests/loop_programs.py; default all")
    parser.add_argument("--json", type=Path, help="default gpu_check.json, gpu_check_dry_run.json")
    parser.add_argument("--budget", type=float, default=450.0, help="seconds for everything")
    parser.add_argument("--jobs", type=int, default=min(6, max(1, (os.cpu_count() or 1) // 2)))
    parser.add_argument("--fresh", action="store_true", help="forget what the file holds")
    parser.add_argument("--dry-run", action="store_true", help="on NumPy, here")
    arguments = parser.parse_args(argv)
    path = arguments.json or Path("gpu_check_dry_run.json" if arguments.dry_run else "gpu_check.json")
    names, loops = catalog_names(arguments.workloads)
    results = Results(path, arguments.fresh, arguments.dry_run)
    children = [Child(arguments.dry_run) for _ in range(max(1, arguments.jobs))]
    try:
        left = run(STAGES, names, loops, results, children, arguments.budget, lambda text: print(text, flush=True))
    finally:
        for child in children:
            child.stop()
    for line in summary(results.tasks):
        print(line)
    if left:
        print(f"no time for {len(left)}: run again to go on ({', '.join(left[:5])} …)")
    print(f"written to {path}")
    return int(any("error" in r or not r.get("ok", True) for r in results.tasks.values()))


def catalog_names(wanted: Sequence[str]) -> tuple[list[str], list[str]]:
    """Workloads and, of those, the loops; what is cheap to run comes first."""
    from gpu_tasks import CATALOG

    unknown = [name for name in wanted if name not in CATALOG]
    if unknown:
        raise SystemExit(f"unknown workloads: {', '.join(unknown)}; there are {', '.join(CATALOG)}")
    names = [name for name in CATALOG if not wanted or name in wanted]
    return names, [name for name in names if "loop" in CATALOG[name].group]


def summary(tasks: dict[str, dict[str, Any]]) -> Iterator[str]:
    import statistics

    wrong = [key for key, r in tasks.items() if "error" in r or not r.get("ok", True)]
    yield f"{len(tasks)} tasks, {len(wrong)} wrong" + (": " + ", ".join(wrong) if wrong else "")
    for name in ("speed_xla", "speed_cupy", "copy_share"):
        values = [r[name] for key, r in tasks.items() if key.startswith("full/") and r.get(name)]
        if values:
            yield (f"{name}: geometric mean {statistics.geometric_mean(values):.3f}, worst {min(values):.3f}, "
                   f"of {len(values)}")  # fmt: skip
    errors = [k["measured_us"] / k["predicted_us"] for key, r in tasks.items() if key.startswith("kernels/")
              for k in r.get("kernels", []) if k.get("measured_us")]  # fmt: skip
    if errors:
        yield f"measured ÷ predicted time of {len(errors)} kernels: median {statistics.median(errors):.2f}"


if __name__ == "__main__":
    raise SystemExit(main())
