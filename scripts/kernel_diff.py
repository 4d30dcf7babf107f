#!/usr/bin/env python
"""How the generated kernels of the catalog changed since a revision: a unified diff of every kernel's source.

    scripts/kernel_diff.py REV [NAME...] [--catalog FILE] [--size small|full] [--dialect cuda|host] [--stat]

Read it before every commit that touches passes, fusion or codegen. Both sides compile the catalog of the working tree.
The exit status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Runs on either tree, so it uses only what both have: the compiler and its clusters.
_CHILD = """
import json, re, sys, warnings
warnings.simplefilter("ignore")
tree, catalog, size, dialect, output, *names = sys.argv[1:]
sys.path.insert(0, tree)
import importlib.util
from hlofuse.compiler import compile_function
spec = importlib.util.spec_from_file_location("catalog", catalog)
module = importlib.util.module_from_spec(spec)
sys.modules["catalog"] = module
spec.loader.exec_module(module)
kernels = {}
for name in names or module.CATALOG:
    try:
        compilation = compile_function(module.CATALOG[name].fn, *module.CATALOG[name].avals(size), device="h200")
        # A kernel's symbol ends in the hash of its text, which would double every change.
        kernels[name] = [re.sub(r"_[0-9a-f]{12}\\b", "", c.kernel.sources[dialect])
                         for c in compilation.clusters if c.form != "jax"]
    except Exception as error:
        kernels[name] = [f"// {type(error).__name__}: {error}"]
with open(output, "w") as file:
    json.dump(kernels, file)
"""


def kernels_of(tree: Path, arguments: argparse.Namespace, folder: Path) -> dict[str, list[str]]:
    output = folder / f"{tree.name}.json"
    command = [sys.executable, "-c", _CHILD, str(tree), str(arguments.catalog.resolve()), arguments.size,
               arguments.dialect, str(output), *arguments.names]  # fmt: skip
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(tree)}
    subprocess.run(command, check=True, env=environment, cwd=folder)
    return json.loads(output.read_text())


def extract(revision: str, folder: Path) -> Path:
    """The package of a revision, as files in a folder of its own; the repository's own state is not touched."""
    done = subprocess.run(["git", "-C", ROOT, "archive", revision, "hlofuse"], capture_output=True)
    if done.returncode != 0:
        raise SystemExit(f"kernel_diff: {done.stderr.decode().strip()}")
    tree = folder / "before"
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(tree, filter="data")
    return tree


def difference(name: str, before: Sequence[str], after: Sequence[str]) -> tuple[str, int, int]:
    """The diff of one workload's kernels, and how many lines went and came."""
    old, new = ("\n".join(kernels).splitlines() for kernels in (before, after))
    old_title, new_title = (f"{name} ({len(kernels)} kernels)" for kernels in (before, after))
    lines = list(difflib.unified_diff(old, new, old_title, new_title, lineterm=""))
    gone = sum(line.startswith("-") for line in lines[2:])
    come = sum(line.startswith("+") for line in lines[2:])
    return "\n".join(lines), gone, come


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", metavar="REV")
    parser.add_argument("names", nargs="*", metavar="NAME", help="workloads; all if none is given")
    parser.add_argument("--catalog", type=Path, default=ROOT / "tests" / "catalog.py", metavar="FILE")
    parser.add_argument("--size", choices=("small", "full"), default="full")
    parser.add_argument("--dialect", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--stat", action="store_true", help="only how many lines and kernels changed")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        before = kernels_of(extract(arguments.revision, folder), arguments, folder)
        after = kernels_of(ROOT, arguments, folder)
    changed = 0
    for name, kernels in after.items():
        text, gone, come = difference(name, before.get(name, []), kernels)
        if not text:
            continue
        changed += 1
        if not arguments.stat:
            print(text)
        print(f"## {name}: {len(before.get(name, []))} -> {len(kernels)} kernels, -{gone} +{come} lines")
    print(f"{changed} of {len(after)} workloads have other kernels than at {arguments.revision}")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
