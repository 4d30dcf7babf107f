"""All knobs: `Options` is what a decorated function may choose, the functions below read the environment.

Options are part of the identity of a compiled function (JAX's caches see them); the environment is not, so it only
decides where files go and how failures are reported, never what is computed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .errors import UnknownNameError

FUSIONS = ("coloring", "greedy", "none", "exact")
RUNTIMES = ("xla", "cupy", "numpy")


@dataclass(frozen=True)
class Options:
    """How one function is optimized.

    fusion: who chooses the clusters: `coloring` (several searches, the cheapest wins), `greedy` (producer into
      consumer, as TorchInductor), `none` (each instruction alone) or `exact` (proven optimal, for small programs).
    device: name of the device whose cost model decides; `None` is the device that runs it, "simt" runs the CUDA
      kernels thread by thread on the CPU.
    runtime: what runs it: JAX's own runtime, `xla`, or this package's on CuPy's or NumPy's arrays; `None` is decided by
      the arrays of each call.
    feedback: compile the CUDA kernels with NVRTC, and split what ptxas spills. Where kernels run on a GPU that is done
      in any case.
    """

    fusion: str = "coloring"
    device: str | None = None
    runtime: str | None = None
    feedback: bool = False

    def __post_init__(self) -> None:
        check_name("fusion", self.fusion, FUSIONS)
        if self.device is not None:
            check_name("device", self.device, device_names())
        if self.runtime is not None:
            check_name("runtime", self.runtime, RUNTIMES)


def check_name(kind: str, name: object, valid: Iterable[str]) -> None:
    """Raise UnknownNameError, with the list, unless `name` is one of `valid`."""
    valid = tuple(valid)
    if not isinstance(name, str) or name not in valid:
        raise UnknownNameError(kind, name, valid)


def device_names() -> tuple[str, ...]:
    # Late, because the table of devices is above this module in the order of imports.
    from .fusion.devices import DEVICES

    return tuple(DEVICES)


def is_strict() -> bool:
    """HLOFUSE_STRICT=1: a failure of the optimizer is an error, where otherwise the function runs as plain JAX."""
    return _choice("HLOFUSE_STRICT", {"": False, "0": False, "1": True})


def dump_directory() -> Path | None:
    """HLOFUSE_DUMP_TO: where every compiled function leaves its snapshots, as XLA's `xla_dump_to`; None is nowhere."""
    value = os.environ.get("HLOFUSE_DUMP_TO", "")
    return Path(value).expanduser() if value else None


def cache_directory() -> Path:
    """HLOFUSE_CACHE_DIR: where built kernels are kept; by default `hlofuse` under the user's cache directory."""
    value = os.environ.get("HLOFUSE_CACHE_DIR", "")
    if value:
        return Path(value).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "hlofuse"


def _choice(variable: str, values: dict[str, bool]) -> bool:
    value = os.environ.get(variable, "")
    if value not in values:
        raise UnknownNameError(f"value of {variable}", value, (v for v in values if v))
    return values[value]
