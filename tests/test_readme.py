"""What the README shows is what a reader gets: its Python runs, its commands work, its output is the tool's own.

Numbers and hashes in shown output may differ (they move with the cost model), words may not; `...` stands for any
lines.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from hlofuse import cli

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
FILES = {name: text for _, name, text in BLOCKS if name}
PYTHON = [text for language, name, text in BLOCKS if language == "python" and not name]
CONSOLE = [text for language, _, text in BLOCKS if language == "console"]
SHELL = [line for language, _, text in BLOCKS if language == "sh" for line in text.splitlines()]
COMMANDS = [line.split("  #")[0].strip() for line in SHELL]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the files that the README shows."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command: str) -> str:
    """What `hlofuse ARGUMENTS...` prints."""
    program, *arguments = shlex.split(command)
    assert program == "hlofuse"
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert cli.main(arguments) == 0
    return output.getvalue()


def masked(line: str) -> str:
    line = re.sub(r"_[0-9a-f]{12}\b", "_HASH", line.rstrip())
    return re.sub(r"\b\d+(\.\d+)?(e[+-]?\d+)?\b", "#", line)


def assert_shown(shown: str, printed: str) -> None:
    """Each run of shown lines between `...` is printed, in this order."""
    lines = [masked(line) for line in printed.splitlines()]
    start = 0
    for part in re.split(r"^\.\.\.\n", shown, flags=re.MULTILINE):
        wanted = [masked(line) for line in part.splitlines()]
        places = [k for k in range(start, len(lines) - len(wanted) + 1) if lines[k : k + len(wanted)] == wanted]
        assert places, f"not printed:\n{part}\n--- printed:\n{printed}"
        start = places[0] + len(wanted)


def test_the_readme_is_read():
    assert len(PYTHON) == 1 and len(CONSOLE) >= 3 and len(FILES) == 1 and len(COMMANDS) > 8


def test_python_example(tmp_path, capsys):
    example = tmp_path / "example.py"
    example.write_text(PYTHON[0])
    exec(compile(PYTHON[0], str(example), "exec"), {"__name__": "example"})
    first, explanation = capsys.readouterr().out.split("\n", 1)
    assert float(first) == pytest.approx(1.0, abs=1e-4)
    assert explanation.startswith("1 kernel on host") and "form row" in explanation


@pytest.mark.parametrize("text", CONSOLE, ids=lambda text: text.splitlines()[0].removeprefix("$ hlofuse "))
def test_shown_output(text, folder):
    command, shown = text.split("\n", 1)
    assert_shown(shown, run(command.removeprefix("$ ")))


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("hlofuse ")])
def test_command(command, folder):
    printed = run(command)
    output = shlex.split(command)[-1] if " -o " in command else None
    assert (folder / output).stat().st_size if output else printed.strip()


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("scripts/")])
def test_script_exists(command):
    program, *arguments = shlex.split(command)
    script = ROOT / program
    assert script.is_file()
    for option in (a for a in arguments if a.startswith("--")):
        assert f'"{option}"' in script.read_text(), f"{program} has no option {option}"


def test_paths_exist():
    """Every file or room that the README names in code font is there."""
    named = set(re.findall(r"`((?:[\w.]+/)+(?:[\w.]+)?|\w+\.(?:py|c|ipynb))`", README)) - set(FILES)
    rooms = [ROOT, ROOT / "hlofuse", *(p for p in (ROOT / "hlofuse").iterdir() if p.is_dir())]
    missing = [name for name in named if not any((room / name).exists() for room in rooms)]
    assert len(named) > 30 and not missing, missing


def test_devices_and_variables_are_complete():
    from hlofuse import config

    shown = README.split("## Devices")[1].split("\n## ")[0]
    names = {name for name in config.device_names() if not name.startswith("test-")}    # a row that tests add
    assert names <= set(re.findall(r"`(\w+)`", shown))
    known = set(re.findall(r"HLOFUSE_\w+", (ROOT / "hlofuse" / "config.py").read_text()))
    assert known == set(re.findall(r"HLOFUSE_[A-Z_]+", README))
