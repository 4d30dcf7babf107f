"""scripts/gpu_check.py on the NumPy twin: a GPU's minutes are not for typos."""

from __future__ import annotations

import json

import gpu_check
import pytest
from gpu_check import Child, Results, Stage, Task, run, summary


@pytest.fixture(scope="module")
def child():
    child = Child(dry_run=True)
    yield child
    child.stop()


def test_parts_of_a_workload(tmp_path, child):
    stages = [s for s in gpu_check.STAGES if s.part in ("environment", "small", "copy", "full", "kernels")]
    path, said = tmp_path / "results.json", []
    results = Results(path, fresh=True, dry_run=True)
    assert not run(stages, ["softmax"], [], results, [child], 100, said.append)
    tasks = json.loads(path.read_text())["tasks"]
    assert list(tasks) == sorted(["environment", "small/softmax", "copy", "full/softmax", "kernels/softmax"])
    assert not [t for t in tasks.values() if "error" in t or not t.get("ok", True)]
    full = tasks["full/softmax"]
    assert full["launches"] == 1 and {"jax_us", "xla_us", "numpy_us", "copy_share", "predicted_us"} <= set(full)
    (kernel,) = tasks["kernels/softmax"]["kernels"]
    assert kernel["measured_us"] > 0 and kernel["predicted_us"] > 0 and kernel["form"] == "row"
    assert any("geometric mean" in line for line in summary(tasks)) and len(said) == 5

    again = Results(path, fresh=False, dry_run=True)
    assert not run(stages, ["softmax"], [], again, [child], 100, pytest.fail)    # nothing is left to do
    assert not Results(path, fresh=False, dry_run=False).tasks    # a dry run is no result of a GPU


def test_a_child_that_raises_dies_or_hangs_is_a_result_and_not_the_end(child):
    assert "KeyError" in child.work(Task("small", "no such workload"), 60)["error"]
    child._process.kill()
    child._process.join()
    assert "the process died" in child.work(Task("copy"), 60)["error"]
    assert child.work(Task("copy"), 60)["gb_per_s"] > 0
    assert "no answer within" in child.work(Task("first_calls"), 0.0)["error"]
    assert child._connection is None    # the next task gets a new process


def test_what_there_is_no_time_for_is_said(tmp_path):
    results = Results(tmp_path / "results.json", fresh=True, dry_run=True)
    stages = [Stage("copy", per_workload=False)]
    assert run(stages, [], [], results, [Child(dry_run=True)], 0.0, pytest.fail) == ["copy"]


def test_every_stage_is_a_part():
    gpu_tasks = pytest.importorskip("gpu_tasks")
    assert {s.part for s in gpu_check.STAGES} == set(gpu_tasks.PARTS)
    _, loops = gpu_check.catalog_names([])
    assert loops[:4] == ["euler_pendulum", "linear_recurrence", "newton_sqrt_while", "mandelbrot"]
    assert "ode_ensemble" in loops and "softmax" not in loops
    with pytest.raises(SystemExit, match="unknown workloads: nothing"):
        gpu_check.catalog_names(["nothing"])


def test_errors_are_tried_again(tmp_path):
    path = tmp_path / "results.json"
    results = Results(path, fresh=True, dry_run=False)
    results.add(Task("copy"), {"error": "no"})
    results.add(Task("full", "softmax"), {"ok": True})
    assert set(Results(path, fresh=False, dry_run=False).tasks) == {"full/softmax"}
