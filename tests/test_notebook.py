"""The notebooks run from top to bottom, and hold no outputs, which would go stale."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "notebooks").glob("*.ipynb"))


def code_cells(path: Path) -> list[dict[str, Any]]:
    notebook = json.loads(path.read_text())
    assert notebook["nbformat"] == 4
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path: Path) -> None:
    namespace: dict[str, Any] = {"__name__": path.stem}
    for number, cell in enumerate(code_cells(path)):
        assert not cell["outputs"] and cell["execution_count"] is None
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"{path.name}, code cell {number}", "exec"), namespace)
        assert number == 0 or printed.getvalue().strip(), f"code cell {number} shows nothing"


def test_there_is_one() -> None:
    assert NOTEBOOKS
