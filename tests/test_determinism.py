"""Results are bitwise equal over repeated runs, processes and numbers of threads: the grid depends on shapes only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = Path(__file__).parent / "determinism_child.py"


def digests(cores: int) -> list[list[str]]:
    environment = {**os.environ, "PYTHONPATH": str(CHILD.parents[1]), "HLOFUSE_STRICT": "1"}
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run([sys.executable, str(CHILD), str(cores)], env=environment, capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
                    reason="needs two cores and a way to give a process one")
def test_repeated_runs_and_thread_counts_agree_to_the_bit():
    one, two = digests(1), digests(2)
    assert len(one) == 12
    for line in one:
        assert len(line) == 4, f"repeated runs differ: {line}"
    assert one == two
