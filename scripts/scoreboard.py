#!/usr/bin/env python
"""One row per workload: is it right, how many launches and bytes, beside XLA:GPU's, how fast beside jax.jit.

    scripts/scoreboard.py [NAME...] [--catalog FILE]... [--xla FILE] [--size small|full] [--target h200|host]
                          [--check] [--time] [--json FILE] [--jobs N] [--timeout SECONDS]

Every workload runs in a child process, so that even one that crashes is a row with its error. The exit status is 1 if a
row has an error or is not ok. Launches and bytes are predictions for the target; values and times are this machine's.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import queue
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_CATALOGS = (ROOT / "tests" / "catalog.py", ROOT / "tests" / "loop_programs.py")
DEFAULT_XLA = ROOT / "tests" / "xla_gpu.json"


@dataclass
class Row:
    """What the JSON file holds; None is unknown or not asked for. Times in ms, ratios are jax.jit's time ÷ ours."""

    name: str
    group: str = ""
    ok: bool | None = None
    max_error: float | None = None
    launches: int | None = None
    library_calls: int | None = None
    bytes: float | None = None
    xla_launches: int | None = None
    xla_bytes: float | None = None
    xla_loops: int = 0
    pipeline_ms: float | None = None
    time_ratio: float | None = None
    jax_ms: float | None = None
    hlofuse_ms: float | None = None
    notes: list[str] = field(default_factory=list)
    error: str | None = None

    @property
    def launch_ratio(self) -> float | None:
        return _ratio(self.launches, self.xla_launches)

    @property
    def byte_ratio(self) -> float | None:
        # XLA counts a loop's bytes for one trip.
        return None if self.xla_loops else _ratio(self.bytes, self.xla_bytes)


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours is not None and theirs else None


@dataclass(frozen=True)
class Request:
    """What a child is asked to do for one workload."""

    name: str
    group: str
    size: str
    target: str
    check: bool
    time: bool


# ------------------------------------------------------------------------------------------- children


class Child:
    """A process that fills in rows; it is started anew after it died or was too slow."""

    def __init__(self, catalogs: Sequence[Path]):
        self._catalogs = catalogs
        self._process: Any = None
        self._connection: Connection | None = None

    def fill(self, request: Request, timeout: float) -> Row:
        row = Row(request.name, request.group)
        if self._connection is None:
            self._start()
        assert self._connection is not None
        try:
            self._connection.send(request)
            if self._connection.poll(timeout):
                return self._connection.recv()
            row.error = f"no answer within {timeout:.0f} s"
        except (EOFError, OSError):
            self._process.join(10)
            row.error = f"the process died: {_exit_reason(self._process.exitcode)}"
        row.ok = False
        self.close()
        return row

    def _start(self) -> None:
        # Spawned, not forked: JAX's threads do not survive a fork.
        context = multiprocessing.get_context("spawn")
        self._connection, far_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(far_end, list(self._catalogs)), daemon=True)
        self._process.start()
        far_end.close()

    def close(self) -> None:
        if self._connection is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
        self._process = self._connection = None


def _exit_reason(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {-code} ({signal.Signals(-code).name})"
    return f"exit status {code}"


def _serve(connection: Connection, catalogs: Sequence[Path]) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import scoreboard_row

    from hlofuse.explore import workloads

    catalog = workloads.load_catalogs(catalogs)
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        connection.send(scoreboard_row.fill(Row(request.name, request.group), catalog[request.name], request))


def fill_rows(requests: Sequence[Request], catalogs: Sequence[Path], jobs: int, timeout: float) -> Iterator[Row]:
    """The rows in the order of the requests, each as soon as it and all before it are there."""
    todo: queue.SimpleQueue = queue.SimpleQueue()
    done: queue.SimpleQueue = queue.SimpleQueue()
    for item in enumerate(requests):
        todo.put(item)

    def work() -> None:
        child = Child(catalogs)
        try:
            while True:
                index, request = todo.get_nowait()
                done.put((index, child.fill(request, timeout)))
        except queue.Empty:
            child.close()

    for _ in range(min(jobs, len(requests))):
        threading.Thread(target=work, daemon=True).start()
    rows: dict[int, Row] = {}
    for index in range(len(requests)):
        while index not in rows:
            number, row = done.get()
            rows[number] = row
        yield rows[index]


# ------------------------------------------------------------------------------------------- presentation

_COLUMNS = (
    ("workload", 28), ("ok", 5), ("max err", 9), ("launches", 8), ("lib", 4), ("MB", 10), ("XLA", 6), ("ratio", 6),
    ("XLA MB", 10), ("ratio", 7), ("pipe ms", 8), ("jax ms", 9), ("our ms", 9), ("speed", 6),
)  # fmt: skip


def header() -> str:
    return " ".join(f"{title:<{width}}" if i == 0 else f"{title:>{width}}" for i, (title, width) in enumerate(_COLUMNS))


def line(row: Row) -> str:
    megabytes, xla_megabytes = (None if b is None else b / 1e6 for b in (row.bytes, row.xla_bytes))
    cells = (
        row.name, {True: "ok", False: "FAIL", None: ""}[row.ok], _number(row.max_error, ".3g"),
        _number(row.launches, "d"), _number(row.library_calls, "d"), _number(megabytes, ".3f"),
        _number(row.xla_launches, "d"), _number(row.launch_ratio, ".2f"), _number(xla_megabytes, ".3f"),
        _number(row.byte_ratio, ".3f"), _number(row.pipeline_ms, ".1f"), _number(row.jax_ms, ".4g"),
        _number(row.hlofuse_ms, ".4g"), _number(row.time_ratio, ".2f"),
    )  # fmt: skip
    text = " ".join(f"{cell:<{width}}" if i == 0 else f"{cell:>{width}}"
                    for i, (cell, (_, width)) in enumerate(zip(cells, _COLUMNS, strict=True))).rstrip()  # fmt: skip
    remarks = [*row.notes, *([row.error] if row.error else [])]
    return "\n".join([text, *(f"    {remark}" for remark in remarks)])


def _number(value: Any, spec: str) -> str:
    return "" if value is None else format(int(value) if spec == "d" else value, spec)


# What the summary averages: title, attribute of a row, which of many is the worst.
_RATIOS = (("launches", "launch_ratio", max), ("bytes", "byte_ratio", max), ("speed", "time_ratio", min))


def geometric_mean(values: Sequence[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values and min(values) > 0 else None


def summary(rows: Sequence[Row]) -> str:
    """The geometric means of each group and of all: launches and bytes ÷ XLA's, jax.jit's time ÷ ours."""
    kinds = [kind for kind in _RATIOS if any(getattr(row, kind[1]) is not None for row in rows)]
    if not kinds:
        return ""
    lines = ["geometric mean (and worst) by group: " + ", ".join(name for name, _, _ in kinds)]
    for group in (*dict.fromkeys(row.group for row in rows), "all"):
        cells = []
        for name, attribute, worst in kinds:
            values = [v for row in rows if group in (row.group, "all") and (v := getattr(row, attribute)) is not None]
            mean = geometric_mean(values)
            cells.append(f"{name} {mean:6.3f} ({worst(values):6.3f})" if mean else f"{name}      -         ")
        lines.append(f"  {group:<12} " + "   ".join(cells))
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------- command line


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="workloads; all if none is given")
    parser.add_argument("--catalog", action="append", type=Path, metavar="FILE",
                        help="a file that defines CATALOG; by default tests/catalog.py and tests/loop_programs.py")
    parser.add_argument("--xla", type=Path, metavar="FILE",
                        help="XLA:GPU's launches and bytes; at full size by default tests/xla_gpu.json")  # fmt: skip
    parser.add_argument("--size", choices=("small", "full"), default="small")
    parser.add_argument("--target", default="h200", metavar="DEVICE", help="whose launches and bytes: h200, host, ...")
    parser.add_argument("--check", action="store_true", help="values against jax.jit and float64")
    parser.add_argument("--time", action="store_true", help="run time beside jax.jit on this machine")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    parser.add_argument("--jobs", type=int, default=1, help="child processes at once (1 with --time)")
    parser.add_argument("--timeout", type=float, default=900, metavar="SECONDS", help="for one workload")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    sys.path.insert(0, str(ROOT))
    from hlofuse.explore import workloads

    catalogs = [path.resolve() for path in arguments.catalog or DEFAULT_CATALOGS]
    try:
        xla = _load_xla(arguments)
        groups = {name: w.group for name, w in workloads.load_catalogs(catalogs).items()}
        names = arguments.names or list(groups)
        for name in names:
            workloads.check_known("workload", name, groups)
        workloads.check_device(arguments.target)
    except (ValueError, OSError) as error:
        print(f"scoreboard: {error}", file=sys.stderr)
        return 2
    requests = [Request(name, groups[name], arguments.size, arguments.target, arguments.check, arguments.time)
                for name in names]  # fmt: skip
    rows = []
    print(header())
    for row in fill_rows(requests, catalogs, 1 if arguments.time else max(1, arguments.jobs), arguments.timeout):
        known = xla.get(row.name, {})
        row.xla_launches, row.xla_bytes = known.get("launches"), known.get("bytes")
        row.xla_loops = len(known.get("loops") or ())
        rows.append(row)
        print(line(row), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")
    if text := summary(rows):
        print(text)
    good = sum(row.error is None and row.ok is not False for row in rows)
    print(f"{good}/{len(rows)} ok" if arguments.check else f"{good}/{len(rows)} rows")
    return 0 if good == len(rows) else 1


def _load_xla(arguments: argparse.Namespace) -> dict[str, Any]:
    path = arguments.xla
    if path is None:
        # XLA's numbers are those of the full size.
        path = DEFAULT_XLA if arguments.size == "full" and not arguments.catalog else None
    return json.loads(path.read_text()) if path and path.exists() or arguments.xla else {}


if __name__ == "__main__":
    sys.exit(main())
