"""The shape of the code: imports point one way, JAX's private modules and cupy stay in their rooms, files are short."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hlofuse"
FILES = sorted(PACKAGE.rglob("*.py"))

# A room may import those of lower and of equal rank.
RANKS = {
    "errors": 0, "config": 1, "hlo": 2,
    "frontend": 3, "passes": 3, "fusion": 3, "codegen": 3, "explore": 3,
    "runtime": 4, "compiler": 5, "stages": 6, "api": 7, "cli": 8, "__main__": 9, "__init__": 9,
}  # fmt: skip
# The names of the devices are looked up late; `hlofuse.jit` hands out stages.
ALLOWED = {("config", "fusion"), ("api", "stages")}

JAX_INTERNALS = ("jax._src", "jax.interpreters", "jax.extend", "jaxlib")
KNOWS_JAX = {"frontend/jax_compat.py", "frontend/jaxpr_compat.py"}

LINE_LIMIT = 450
# Longer ones, each with the reason why it is one noun.
LONGER: dict[str, int] = {}


def room_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """The absolute name of every module that the file imports, and where; within functions too."""
    package = ("hlofuse", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            yield node.lineno, module
            # `from hlofuse import api` names a module too.
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def rooms_imported(path: Path) -> dict[str, int]:
    """Each other room that the file imports, and a line where it does."""
    found: dict[str, int] = {}
    for line, name in imports(path):
        parts = name.split(".")
        if parts[0] == "hlofuse" and len(parts) > 1 and parts[1] in RANKS and parts[1] != room_of(path):
            found[parts[1]] = line
    return found


def edges() -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], str] = {}
    for path in FILES:
        for room, line in rooms_imported(path).items():
            found.setdefault((room_of(path), room), f"{path.relative_to(ROOT)}:{line}")
    return found


def test_every_room_has_a_rank():
    assert {room_of(path) for path in FILES} <= set(RANKS)


def test_imports_point_one_way():
    wrong = [f"{place}: {importer} imports {imported}" for (importer, imported), place in edges().items()
             if RANKS[imported] > RANKS[importer] and (importer, imported) not in ALLOWED]  # fmt: skip
    assert not wrong, "\n".join(wrong)


def test_files_import_in_no_circle():
    graph = {path: {file for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)
                    for file in modules_of(node, path)} - {path} for path in FILES}  # fmt: skip
    while graph:
        leaves = [path for path, imported in graph.items() if not imported & graph.keys()]
        assert leaves, f"a circle among {sorted(path.relative_to(PACKAGE).as_posix() for path in graph)}"
        for path in leaves:
            del graph[path]


@pytest.mark.parametrize("prefix", JAX_INTERNALS)
def test_only_the_compat_files_know_jax_from_inside(prefix):
    wrong = [f"{path.relative_to(ROOT)}:{line} imports {name}" for path in FILES
             if path.relative_to(PACKAGE).as_posix() not in KNOWS_JAX
             for line, name in imports(path) if f"{name}.".startswith(f"{prefix}.")]  # fmt: skip
    assert not wrong, "\n".join(wrong)


def test_only_the_runtime_imports_cupy():
    wrong = [f"{path.relative_to(ROOT)}:{line}" for path in FILES if room_of(path) != "runtime"
             for line, name in imports(path) if name.split(".")[0] == "cupy"]  # fmt: skip
    assert not wrong, "\n".join(wrong)


def test_files_are_one_noun():
    lengths = {path.relative_to(PACKAGE).as_posix(): len(path.read_text().splitlines()) for path in FILES}
    too_long = {name: n for name, n in lengths.items() if n > LONGER.get(name, LINE_LIMIT)}
    assert not too_long, f"split these, or list them with a reason: {too_long}"
    needless = [name for name in LONGER if lengths.get(name, 0) <= LINE_LIMIT]
    assert not needless, f"short enough now, or gone: {needless}"


def test_every_file_says_what_it_is():
    silent = [path.relative_to(ROOT).as_posix() for path in FILES
              if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))]  # fmt: skip
    assert not silent
    chatty = [path.relative_to(ROOT).as_posix() for path in FILES
              if len((ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()) > 8]  # fmt: skip
    assert not chatty


def test_importing_the_package_loads_no_optimizer():
    """`import hlofuse` must be quick: the compiler is loaded by the first compilation."""
    reached, todo = set(), [PACKAGE / "__init__.py"]
    while todo:
        path = todo.pop()
        if path in reached:
            continue
        reached.add(path)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                todo += modules_of(node, path)
    names = {path.relative_to(PACKAGE).as_posix() for path in reached}
    assert "api.py" in names
    assert not [name for name in names if name.startswith(("fusion/", "passes/", "codegen/", "compiler"))]


def modules_of(node: ast.Import | ast.ImportFrom, path: Path) -> list[Path]:
    """The files that an import statement runs; `from package import module` is the module."""
    if isinstance(node, ast.Import):
        return [file for alias in node.names for file in files_of(alias.name)]
    package = ("hlofuse", *path.relative_to(PACKAGE).parts[:-1])
    base = package[: len(package) - node.level + 1] if node.level else ()
    module = ".".join((*base, *([node.module] if node.module else [])))
    return [file for alias in node.names for file in files_of(f"{module}.{alias.name}") or files_of(module)]


def files_of(name: str) -> list[Path]:
    place = ROOT / name.replace(".", "/")
    candidates = (place.with_suffix(".py"), place / "__init__.py") if name.split(".")[0] == "hlofuse" else ()
    return [file for file in candidates if file.exists()]
