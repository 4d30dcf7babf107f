"""A compilation as text, stage by stage: for the command line, and for HLOFUSE_DUMP_TO.

Files are written whole or not at all: into a temporary name beside them, then renamed.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import HlofuseError, HlofuseWarning, UnknownNameError
from ..hlo.module import Module
from ..hlo.printer import print_module
from ..passes import PIPELINE
from .simt_program import simt_program

# Of `stage_text`. What a pass left is a stage by the pass's name.
STAGES = ("jaxpr", "hlo", "optimized", "fused", "cuda", "ptx", "host", "simt")
_LANGUAGES = {"cuda": "cu", "host": "cpp"}

_lock = threading.Lock()
_dumped_names: dict[tuple[Path, str], Iterator[int]] = {}


def stage_text(compilation: Any, stage: str, metadata: bool = True) -> str:
    """The text of one stage; a pass's name is the program after that pass. Raises UnknownNameError.

    `metadata`: with the operation and the user's source line of every HLO instruction.
    """
    if stage == "jaxpr":
        if compilation.jaxpr is None:
            raise HlofuseError("HLO text has no jaxpr; its first stage is 'hlo'.")
        return f"{compilation.jaxpr}\n"
    if stage == "simt":
        return simt_program(compilation)
    if stage in _LANGUAGES:
        return kernel_text(compilation, stage)
    return _with_newline(print_module(snapshot(compilation.snapshots, stage), metadata=metadata))


def snapshot(snapshots: Mapping[str, Module], stage: str) -> Module:
    """The module of a stage. A pass that changed nothing left no snapshot: then what it was given in its first turn."""
    if stage in snapshots:
        return snapshots[stage]
    passes = [entry.name for entry in PIPELINE]
    if stage not in passes:
        raise UnknownNameError("stage", stage, dict.fromkeys(("jaxpr", *snapshots, *passes, *_LANGUAGES)))
    module, turn = snapshots["hlo"], 0
    for name, left in snapshots.items():
        if name.partition("#")[0] not in passes:
            continue
        # The same pass may stand in the pipeline twice; a name that does not come any more is of the second round.
        turn = next((i + 1 for i in range(turn, len(passes)) if passes[i] == name.partition("#")[0]), len(passes) + 1)
        if turn > passes.index(stage):
            break
        module = left
    return module


def kernel_text(compilation: Any, dialect: str) -> str:
    """The kernels of all clusters in one dialect, each different source once."""
    sources = dict.fromkeys(c.kernel.sources[dialect] for c in compilation.clusters if c.form != "jax")
    return "\n".join(map(_with_newline, sources)) or "// no kernels: nothing here is a cluster\n"


def _with_newline(text: str) -> str:
    return text if text.endswith("\n") else text + "\n"


def dump_compilation(compilation: Any, directory: Path) -> None:
    """Write every stage into `directory` as `<name>.<nn>.<stage>.<hlo, txt, cu or cpp>`.

    A second compilation of the same name in this process is `<name>-2`. A directory that takes no files is a warning.
    """
    name = _unique_name(directory, re.sub(r"[^\w.-]+", "_", compilation.fused.name) or "module")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for number, (stage, extension, text) in enumerate(_stages(compilation)):
            label = re.sub(r"[^\w.-]+", "_", stage)
            write_atomically(directory / f"{name}.{number:02d}.{label}.{extension}", text)
    except OSError as error:
        warnings.warn(f"HLOFUSE_DUMP_TO: cannot write {name!r} to {directory}: {error}", HlofuseWarning, stacklevel=2)


def _stages(compilation: Any) -> Iterator[tuple[str, str, str]]:
    if compilation.jaxpr is not None:
        yield "jaxpr", "txt", stage_text(compilation, "jaxpr")
    for stage in compilation.snapshots:
        yield stage, "hlo", stage_text(compilation, stage)
    yield "explain", "txt", _with_newline(compilation.explain())
    for dialect, extension in _LANGUAGES.items():
        yield dialect, extension, kernel_text(compilation, dialect)


def _unique_name(directory: Path, name: str) -> str:
    with _lock:
        number = next(_dumped_names.setdefault((directory, name), itertools.count(1)))
    return name if number == 1 else f"{name}-{number}"


def write_atomically(path: Path, text: str) -> None:
    """As `path.write_text`, but a reader sees the old content or the new, never a part. Raises OSError."""
    if path.exists() and not path.is_file():
        path.write_text(text)  # a device or a pipe, such as /dev/stdout: nothing to replace
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
