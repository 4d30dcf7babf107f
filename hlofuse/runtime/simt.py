"""SIMT: the CUDA text of kernels, executed on the CPU thread by thread, with every access and barrier checked.

`build_simt_kernels` compiles the text with the host's C++ compiler and another prelude; the machine that runs the
fibers (prelude/simt_machine.cpp) is a library of its own, built once like the FFI shim. `build_simt_executable` is what
`device="simt"` means: XLA:CPU calls the kernels, and a report is the error of the call.
"""
from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hlofuse.codegen.dialect import SIMT, Dialect
from hlofuse.codegen.kernel import KernelText, write_kernel
from hlofuse.codegen.prelude import prelude_file
from hlofuse.errors import HlofuseError
from hlofuse.fusion.fuse import deep_recursion
from hlofuse.hlo.module import Instruction
from hlofuse.runtime.fused_program import KernelCall, XlaKernel
from hlofuse.runtime.host_compiler import (
    INSTALL_HINT,
    HostSource,
    LoadedKernel,
    build_host_kernels,
    compile_library,
    find_compiler,
    load_library,
    toolchain,
)
from hlofuse.runtime.kernel_cache import default_cache
from hlofuse.runtime.shim import ShimError
from hlofuse.runtime.unit_builder import BuildFailure, CompileError, digest
from hlofuse.runtime.xla_runtime import Executable, complain

# Signed indices wrap, as on the GPU, so that an overflow is seen as what it is: an access far outside.
SIMT_FLAGS = ("-O1", "-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing", "-fno-exceptions", "-fno-rtti",
              "-fno-asynchronous-unwind-tables", "-Wl,-Bsymbolic", "-w")
_MACHINE_FLAGS = ("-O2", "-fno-exceptions", "-fno-rtti", "-fno-strict-aliasing")
_KINDS = {"IN": "I", "OUT": "O", "SCRATCH": "S"}
_REPORT_BYTES = 2048


class SimtFault(HlofuseError):
    """What a kernel does wrong: where (kernel, block, thread, line) and what."""


class _Region(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("base", ctypes.c_void_p), ("bytes", ctypes.c_longlong),
                ("element", ctypes.c_int), ("initialized", ctypes.c_bool), ("shadow", ctypes.c_void_p))


@dataclass(frozen=True)
class SimtKernel:
    """A kernel that can be run thread by thread. `kinds` has the machine's letter for each argument."""

    text: KernelText
    address: int
    kinds: str
    prelude: str    # a digest of it

    def run(self, operands: Sequence[np.ndarray], results: Sequence[np.ndarray], seed: int = 0,
            blocks: range | None = None) -> None:
        """Fills `results`; raises SimtFault. `blocks`, in steps of one: only these, in their random order."""
        scratch = [np.empty(s.dims, s.dtype) for s in self.text.scratch]
        counters = np.zeros(self.text.counters, np.uint32)
        arrays = [*operands, *results, *scratch, counters]
        names = [*(a.name for a in self.text.arguments), "counters"]
        regions = (_Region * len(arrays))(*(
            _Region(name.encode(), a.ctypes.data, a.nbytes, a.itemsize, False, None)
            for name, a in zip(names, arrays, strict=True)))
        report = ctypes.create_string_buffer(_REPORT_BYTES)
        chosen = range(self.text.blocks) if blocks is None else blocks
        status = machine().hlofuse_simt_run(
            self.address, self.text.symbol.encode(), self.text.text.encode(), self.text.blocks, self.text.threads,
            regions, len(arrays), self.kinds.encode(), seed, chosen.start, len(chosen), report, _REPORT_BYTES)
        if status:
            raise SimtFault(report.value.decode(errors="replace"))


def allocate_results(results: Sequence[Any]) -> list[np.ndarray]:
    """Arrays of the shapes, with bytes that no kernel should leave there."""
    return [np.frombuffer(b"\xff" * max(1, s.size * s.dtype.itemsize), np.uint8).copy()[:s.size * s.dtype.itemsize]
            .view(s.dtype).reshape(s.dims) for s in results]


def build_simt_kernels(texts: Sequence[KernelText], prelude: str | None = None,
                       flags: Sequence[str] = SIMT_FLAGS) -> dict[str, SimtKernel | BuildFailure]:
    """Compiles kernels of the SIMT dialect (or the CUDA one: it is the same text); the answer is by symbol."""
    prelude = SIMT.prelude if prelude is None else prelude
    sources = [HostSource(f"{t.symbol}_simt", f"{t.code}\nSIMT_ENTRY({t.symbol})\n") for t in texts]
    loaded = build_host_kernels(sources, prelude, default_cache(), flags)
    found: dict[str, SimtKernel | BuildFailure] = {}
    for text, source in zip(texts, sources, strict=True):
        kernel = loaded[source.symbol]
        if isinstance(kernel, LoadedKernel):
            kinds = "".join(_KINDS[a.kind] for a in text.arguments) + "C"
            found[text.symbol] = SimtKernel(text, kernel.address, kinds, digest(prelude))
        else:
            found[text.symbol] = BuildFailure(text.symbol, kernel.message)
    return found


# --- the machine ------------------------------------------------------------------------------------------------------

_registered: set[int] = set()
_kept: list[Any] = []


@functools.cache
def machine(flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The library that runs fibers, with the FFI handler; built once. Raises ShimError."""
    source = "\n".join([prelude_file("simt_machine.h"), prelude_file("simt_machine.cpp"),
                        Path(__file__).with_name("simt_call.cpp").read_text()])
    compiler = find_compiler()
    if compiler is None:
        raise ShimError(INSTALL_HINT)
    include = f"-I{jax.ffi.include_dir()}"
    tools, cache = toolchain(compiler), default_cache()
    key = "simt " + digest(source, jax.__version__, compiler.identity, *_MACHINE_FLAGS, *flags, *tools.link_flags)
    path = cache.get(key)
    if path is None:
        try:
            binary = compile_library(compiler, source, (*_MACHINE_FLAGS, *flags, include), tools.link_flags)
        except CompileError as error:
            raise ShimError(f"the SIMT machine does not compile: {error}") from error
        path = cache.put(key, binary)
    if path is None:
        raise ShimError("neither the cache nor a temporary directory takes the SIMT machine")
    library = load_library(path)
    library.hlofuse_simt_run.argtypes = (
        ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_longlong, ctypes.c_int, ctypes.POINTER(_Region),
        ctypes.c_int, ctypes.c_char_p, ctypes.c_ulonglong, ctypes.c_longlong, ctypes.c_longlong, ctypes.c_char_p,
        ctypes.c_int)
    library.hlofuse_simt_seed.argtypes = (ctypes.c_ulonglong,)
    library.hlofuse_simt_register.argtypes = (
        ctypes.c_ulonglong, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p,
        ctypes.POINTER(ctypes.c_char_p), ctypes.c_int, ctypes.c_longlong, ctypes.c_int, ctypes.c_longlong)
    return library


@functools.cache
def _target() -> str:
    """The name under which XLA knows the machine's handler."""
    library = machine()
    name = f"hlofuse_simt_v1_{digest(Path(__file__).with_name('simt_call.cpp').read_text())[:16]}"
    jax.devices("cpu")     # a handler that is refused before the backend exists would take it down
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(library.hlofuse_simt_call), platform="cpu")
    return name


def set_simt_seed(seed: int) -> None:
    """In which order blocks and threads run from now on, in this process; 0 is the natural order."""
    machine().hlofuse_simt_seed(seed)


@contextlib.contextmanager
def simt_seed(seed: int) -> Iterator[None]:
    """The seed within the `with` block, afterwards 0 again. Wait for results inside: JAX runs asynchronously."""
    set_simt_seed(seed)
    try:
        yield
    finally:
        set_simt_seed(0)


def _register(kernel: SimtKernel) -> int:
    text = kernel.text
    key = int(digest(text.digest, text.text, kernel.prelude)[:16], 16)
    if key in _registered:
        return key
    names = [a.name.encode() for a in text.arguments] + [b"counters"]
    array = (ctypes.c_char_p * len(names))(*names)
    strings = (text.symbol.encode(), text.text.encode(), kernel.kinds.encode())
    if machine().hlofuse_simt_register(key, kernel.address, *strings, array, len(names), text.blocks, text.threads,
                                       text.counters):
        raise MemoryError("no memory for the table of kernels")
    _kept.append((array, strings))     # the library has their addresses
    _registered.add(key)
    return key


def _call(key: int, name: str) -> KernelCall:
    """As `xla_runtime.shim_call`, but nothing is aliased: a read after a write must not look right by luck."""

    def call(result_avals: Sequence[Any], operands: Sequence[Any], aliases: Mapping[int, int]) -> list[Any]:
        target = jax.ffi.ffi_call(_target(), list(result_avals), has_side_effect=False)
        return list(target(*operands, key=np.uint64(key).astype(np.int64), name=name))

    return call


def simt_texts(compilation: Any, dialect: Dialect = SIMT) -> dict[Instruction, KernelText]:
    """The kernels of a compilation: the CUDA ones, or as a dialect with blocks of another size writes them."""
    clusters = [c for c in compilation.clusters if c.segments]
    if dialect is SIMT:
        return {c.instruction: c.text_in("cuda") for c in clusters}
    with deep_recursion():
        return {c.instruction: write_kernel(c.segments, dialect, c.name) for c in clusters}


def build_simt_executable(compilation: Any, platform: str, dialect: Dialect = SIMT) -> Executable:
    """The executable that runs a compilation's CUDA kernels thread by thread inside XLA:CPU."""
    texts = simt_texts(compilation, dialect)
    if platform != "cpu" or not texts:
        return Executable(compilation, {}, {})
    try:
        _target()
    except ShimError as error:
        complain("simt", f"{len(texts)} kernel(s) run as plain JAX: {error}")
        return Executable(compilation, {}, dict.fromkeys(texts, str(error)))
    kernels = build_simt_kernels(list(texts.values()))
    built: dict[Instruction, XlaKernel] = {}
    problems: dict[Instruction, str] = {}
    for instruction, text in texts.items():
        kernel = kernels[text.symbol]
        if isinstance(kernel, BuildFailure):
            complain(text.symbol, f"the kernel of {instruction.name} runs as plain JAX: {kernel.message}")
            problems[instruction] = kernel.message
        else:
            built[instruction] = XlaKernel(text, _call(_register(kernel), text.symbol))
    return Executable(compilation, built, problems)
