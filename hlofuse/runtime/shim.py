"""Calls of kernels from inside XLA's programs, through the FFI handlers in shim.c: HOST kernels on XLA:CPU, and on
XLA:GPU CUDA kernels, which xla_cuda.py loads.

The handler is built once per machine, and registered once per process under a name that holds its content, so that a
program from JAX's compilation cache meets the handler it was compiled for or none.
Invariants: a program holds hashes of kernels, never addresses; a kernel is registered before a program that calls it
is built; once registered, a kernel stays.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..errors import HlofuseError
from .host_compiler import INSTALL_HINT, compile_library, find_compiler, load_library, toolchain
from .kernel_cache import KernelCache, default_cache
from .unit_builder import CompileError, digest

_SOURCE = Path(__file__).with_name("shim.c")
_FLAGS = ("-O1", "-std=gnu11")
_KEY_LIMIT = 1 << 64


class ShimError(HlofuseError):
    """Kernels cannot be called from XLA in this process; the message says why."""


@dataclass(frozen=True)
class _Shim:
    """The loaded library, and the name under which XLA knows its handler."""

    library: ctypes.CDLL
    target: str


_lock = threading.RLock()
_libraries: list[ctypes.CDLL] = []
_loaded: dict[str, _Shim | ShimError] = {}    # by JAX's name of the platform
_PLATFORMS = {"cpu": ("cpu", {"execute": "hlofuse_call"}),
              "cuda": ("CUDA", {"initialize": "hlofuse_cuda_initialize", "execute": "hlofuse_cuda_call"})}  # fmt: skip


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # the parent's may be held by a thread that does not exist here


os.register_at_fork(after_in_child=_after_fork)


def shim_available(platform: str = "cpu") -> str | None:
    """None where kernels can be called from XLA's programs, else the reason why not. Builds and registers the shim."""
    try:
        _shim(platform)
    except ShimError as error:
        return str(error)
    return None


def register_kernel(key: int, address: int, blocks: int, grain: int, counters: int, shared: int = 0) -> None:
    """Let calls with `key` (64 bits, of the kernel's content and launch) run the function at `address`.

    A call computes blocks 0 … `blocks` - 1, `grain` of them per task of XLA's pool, with `counters` zeroed unsigned
    ints. On CUDA `address` is a CUkernel, `grain` the threads of a block, and `shared` the bytes of shared memory that
    a launch asks for. To register the same again does nothing; the same key with another launch is a ValueError.
    """
    if not 0 <= key < _KEY_LIMIT:
        raise ValueError(f"a kernel's key has 64 bits, got {key}")
    if address == 0 or blocks < 0 or grain < 1 or counters < 0:
        raise ValueError(f"not a launch: address {address}, {blocks} blocks, grain {grain}, {counters} counters")
    library = shim_library()
    with _lock:
        status = library.hlofuse_register_kernel(key, address, blocks, grain, counters, shared)
    if status == 1:
        raise ValueError(f"kernel {key:016x} is registered with another number of blocks, grain or counters")
    if status != 0:
        raise MemoryError("no memory for the table of kernels")


def call_kernel(
    result_avals: Sequence[Any],
    operands: Sequence[Any],
    key: int,
    aliases: Mapping[int, int] | None = None,
    name: str = "",
    platform: str = "cpu",
) -> list[Any]:
    """As `jax.ffi.ffi_call`, but of a registered kernel; to be used while JAX traces or lowers.

    The kernel's buffers are the operands, then the results, all row-major; on CUDA the last result is its counters, if
    it has any. `aliases` maps an operand's position to the
    result that takes its memory: name only operands that are donated. `name` is what error messages call the kernel.
    Results have strong types.
    """
    call = jax.ffi.ffi_call(
        _shim(platform).target,
        list(result_avals),
        has_side_effect=False,
        input_output_aliases=dict(aliases or {}),
    )
    signed_key = key - _KEY_LIMIT if key >= _KEY_LIMIT // 2 else key  # JAX takes no unsigned attribute beyond int64
    return list(call(*operands, key=np.int64(signed_key), name=name))


def shim_library() -> ctypes.CDLL:
    """The loaded shim; a ShimError where it cannot be built."""
    with _lock:
        if not _libraries:
            path = _build(_SOURCE.read_text(), default_cache())
            try:
                library = load_library(path)
            except OSError as error:
                raise ShimError(f"the built FFI shim could not be loaded: {error}") from error
            library.hlofuse_register_kernel.argtypes = (ctypes.c_uint64, ctypes.c_void_p, *(ctypes.c_int64,) * 4)
            library.hlofuse_register_kernel.restype = ctypes.c_int
            library.hlofuse_use_driver.argtypes = (ctypes.c_void_p,) * 3
            library.hlofuse_use_driver.restype = None
            _libraries.append(library)
        return _libraries[0]


def _shim(platform: str) -> _Shim:
    if platform not in _loaded:
        with _lock:
            if platform not in _loaded:
                try:
                    _loaded[platform] = _register(platform)
                except ShimError as error:
                    _loaded[platform] = error
    found = _loaded[platform]
    if isinstance(found, ShimError):
        raise ShimError(str(found))
    return found


def _register(platform: str) -> _Shim:
    library = shim_library()
    name, handlers = _PLATFORMS[platform]
    target = f"hlofuse_{platform}_v1_{digest(_SOURCE.read_text())[:16]}"
    capsules = {stage: jax.ffi.pycapsule(getattr(library, function)) for stage, function in handlers.items()}
    try:
        if platform == "cpu":
            # A handler that is refused before the CPU backend exists would take the whole backend down with it.
            jax.devices("cpu")
        jax.ffi.register_ffi_target(target, capsules, platform=name)
    except Exception as error:  # whatever JAX raises: without the shim everything still runs
        raise ShimError(f"JAX did not take the FFI handler: {error}") from error
    return _Shim(library, target)


def _build(source: str, cache: KernelCache) -> Path:
    compiler = find_compiler()
    if compiler is None:
        raise ShimError(INSTALL_HINT)
    include = Path(jax.ffi.include_dir())
    try:
        header = (include / "xla" / "ffi" / "api" / "c_api.h").read_text()
    except OSError as error:
        raise ShimError(f"jaxlib has no FFI header: {error}") from error
    link_flags = toolchain(compiler).link_flags
    key = "shim " + digest(source, header, compiler.identity, *_FLAGS, *link_flags)
    if (path := cache.get(key)) is not None:
        return path
    try:
        binary = compile_library(compiler, source, (*_FLAGS, f"-I{include}"), link_flags, language="c")
    except CompileError as error:
        raise ShimError(f"the FFI shim does not compile: {error}") from error
    if (path := cache.put(key, binary)) is None:
        raise ShimError("neither the cache nor a temporary directory takes the built FFI shim")
    return path
