"""Catalogs: files that define `CATALOG`, a mapping from names to workloads.

A workload has `name`, `group`, `fn`, `args(size)` (concrete inputs) and `avals(size)` (shapes and dtypes), where a size
is "small" or "full".
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ..config import check_name, device_names


def load_catalogs(paths: Sequence[Path]) -> dict[str, Any]:
    """All workloads of several catalogs by name; of two with one name, the later."""
    workloads: dict[str, Any] = {}
    for path in paths:
        catalog = getattr(load_file(path), "CATALOG", None)
        if catalog is None:
            raise ValueError(f"{path} defines no CATALOG")
        workloads |= catalog
    return workloads


def load_file(path: Path) -> ModuleType:
    """Import a Python file by its path; what lies beside it can be imported by it."""
    path = path.resolve()
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    name = path.stem
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(path):
        name = f"{path.stem}_{abs(hash(str(path))):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up while it is being imported.
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def check_known(kind: str, name: str, valid: Iterable[str]) -> None:
    """Raise UnknownNameError, with the list and the nearest, unless `name` is valid."""
    check_name(kind, name, valid)


def check_device(name: str) -> None:
    check_name("device", name, device_names())
