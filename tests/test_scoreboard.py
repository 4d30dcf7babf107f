"""The scoreboard: a row for every workload whatever it does, the figures in it, and the JSON that others read."""

from __future__ import annotations

import json
import math

import pytest
import scoreboard
from scoreboard import Row

CATALOG = '''
import os, signal, time
from dataclasses import dataclass
import jax, jax.numpy as jnp, numpy as np

@dataclass(frozen=True)
class Workload:
    name: str
    group: str
    fn: object
    def args(self, size="small"):
        return (np.linspace(-2, 2, 24, dtype=np.float32).reshape(4, 6),)
    def avals(self, size="full"):
        return (jax.ShapeDtypeStruct((4, 6), np.float32),)

def softmax(x): return jax.nn.softmax(x)
def with_integers(x): return jnp.argmax(x, 1), x > 0
def refuses(x): raise ValueError("not today")
def crashes(x): os.kill(os.getpid(), signal.SIGSEGV)
def hangs(x): time.sleep(600)

CATALOG = {f.__name__: Workload(f.__name__, "good" if f in (softmax, with_integers) else "bad", f)
           for f in (softmax, refuses, crashes, hangs, with_integers)}
'''

KEYS = ["name", "ok", "max_error", "launches", "library_calls", "bytes", "xla_launches", "xla_bytes", "pipeline_ms",
        "time_ratio", "error"]  # fmt: skip


@pytest.fixture(scope="module")
def catalog(tmp_path_factory):
    path = tmp_path_factory.mktemp("catalog") / "held_out.py"
    path.write_text(CATALOG)
    return path


def run(*arguments: object) -> tuple[int, list[dict]]:
    """The exit status, and the rows of the JSON file."""
    *rest, output = arguments
    status = scoreboard.main([*map(str, rest), "--json", str(output)])
    return status, json.loads(output.read_text())


def test_good_workloads(catalog, tmp_path, capsys):
    xla = tmp_path / "xla.json"
    xla.write_text(json.dumps({"softmax": {"launches": 2, "bytes": 400.0}}))
    status, rows = run("softmax", "with_integers", "--catalog", catalog, "--xla", xla, "--check", "--time",
                       tmp_path / "out.json")  # fmt: skip
    assert status == 0, rows
    assert all(key in row for key in KEYS for row in rows)
    softmax, integers = rows
    assert softmax["ok"] is True and softmax["error"] is None
    assert softmax["launches"] == 1 and softmax["library_calls"] == 0
    # One read and one write of 4 x 6 floats.
    assert softmax["bytes"] == 2 * 96
    assert (softmax["xla_launches"], softmax["xla_bytes"]) == (2, 400.0)
    assert 0 <= softmax["max_error"] < 8
    assert softmax["pipeline_ms"] > 0 and softmax["time_ratio"] > 0
    assert integers["ok"] is True and integers["max_error"] == 0 and integers["xla_launches"] is None
    printed = capsys.readouterr().out
    assert "2/2 ok" in printed
    assert "0.50" in printed and "0.480" in printed  # launches and bytes beside XLA's


def test_a_workload_that_raises_crashes_or_hangs_is_a_row(catalog, tmp_path, capsys):
    status, rows = run("refuses", "crashes", "hangs", "softmax", "--catalog", catalog, "--timeout", 10,
                       tmp_path / "out.json")  # fmt: skip
    refuses, crashes, hangs, softmax = rows
    assert status == 1
    assert [row["ok"] for row in rows] == [False, False, False, None]
    assert refuses["error"].startswith("ValueError: not today")
    assert "SIGSEGV" in crashes["error"]
    assert "10 s" in hangs["error"]
    assert softmax["error"] is None
    assert "1/4 rows" in capsys.readouterr().out


def test_wrong_names_are_refused_with_the_list(catalog, tmp_path, capsys):
    assert scoreboard.main(["sofmax", "--catalog", str(catalog)]) == 2
    assert "did you mean 'softmax'" in capsys.readouterr().err
    assert scoreboard.main(["softmax", "--catalog", str(catalog), "--target", "h900"]) == 2
    assert "'h200'" in capsys.readouterr().err
    assert scoreboard.main(["--catalog", str(tmp_path / "none.py")]) == 2
    assert "none.py" in capsys.readouterr().err


def test_summary_is_the_geometric_mean_and_the_worst_of_each_group():
    rows = [Row("a", "g", launches=1, xla_launches=2), Row("b", "g", launches=4, xla_launches=2),
            Row("c", "h", launches=1, xla_launches=4), Row("d", "h", error="failed")]  # fmt: skip
    lines = scoreboard.summary(rows).splitlines()[1:]
    assert [line.split() for line in lines] == [
        ["g", "launches", "1.000", "(", "2.000)"], ["h", "launches", "0.250", "(", "0.250)"],
        ["all", "launches", f"{math.cbrt(0.25):.3f}", "(", "2.000)"]]  # fmt: skip
    assert scoreboard.summary([Row("a", "g")]) == ""


def test_a_line_holds_every_figure_and_the_error():
    row = Row("w", "g", True, 1.5, 3, 1, 2e6, 6, 4e6, 0, 12.0, 2.0, 5.0, 2.5, ["a note"], "an error")
    text, *remarks = scoreboard.line(row).splitlines()
    assert text.split() == "w ok 1.5 3 1 2.000 6 0.50 4.000 0.500 12.0 5 2.5 2.00".split()
    assert [remark.strip() for remark in remarks] == ["a note", "an error"]
    row.xla_loops = 1
    assert row.byte_ratio is None  # XLA counts a loop's bytes for one trip
    assert len(scoreboard.header().split("ratio")) == 3
