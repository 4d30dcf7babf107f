"""CUDA kernels to machine code with NVRTC, on machines with or without a GPU.

ptxas runs inside, so registers, spills and shared memory are true figures, for any architecture, on a laptop.
Only libnvrtc is needed (a wheel), through ctypes. Invariant: no option lets results differ from the HOST dialect's:
subnormals are kept and nothing is contracted into fma behind the IR's back.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import glob
import importlib.util
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .kernel_cache import KernelCache
from .unit_builder import BuildFailure, CompileError, KernelSource, build_units, digest

CUDA_FLAGS: tuple[str, ...] = ("-std=c++17", "-ftz=false", "-fmad=false", "-default-device")
INSTALL_HINT = "NVRTC is not installed: pip install 'hlofuse[cuda13]' (or the wheel nvidia-cuda-nvrtc alone)"
_WORKERS = 2  # NVRTC serializes much of its work: more threads gain nothing
_UNIT_NAME, _PRELUDE_NAME = "kernel.cu", "prelude.cuh"
_EXCERPTS = 5
_BOUNDS = re.compile(r"(?<=__launch_bounds__)\((\d+)\)")
_PTXAS_REPORT = "--ptxas-options=-v"


class NvrtcError(CompileError):
    """NVRTC is missing or refused the source; the message holds its log and the lines of source that it names."""


@dataclass(frozen=True)
class CudaSource(KernelSource):
    """CUDA C++ that defines `extern "C" __global__ void SYMBOL(...)`. Equal symbols mean equal text."""


@dataclass(frozen=True)
class KernelResources:
    """What ptxas gave one kernel, per thread but for `shared_bytes`, which is per block."""

    registers: int
    spill_stores: int
    spill_loads: int
    shared_bytes: int
    stack_bytes: int

    @property
    def spills(self) -> bool:
        return self.spill_stores + self.spill_loads > 0


@dataclass(frozen=True)
class CudaBinary:
    """One compiled unit: machine code for one architecture, with the kernels in it by name."""

    arch: str
    cubin: bytes
    ptx: str
    kernels: Mapping[str, KernelResources]
    log: str


def nvrtc_available() -> str | None:
    """None where CUDA sources can be compiled, else the reason why not and what to install."""
    try:
        _library()
    except NvrtcError as error:
        return str(error)
    return None


def nvrtc_version() -> tuple[int, int]:
    """As nvcc's version: (13, 5), say."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def supported_architectures() -> tuple[str, ...]:
    """The architectures that this NVRTC compiles for, oldest first, without suffixes: ("sm_75", …)."""
    count = ctypes.c_int()
    _library().nvrtcGetNumSupportedArchs(ctypes.byref(count))
    numbers = (ctypes.c_int * count.value)()
    _library().nvrtcGetSupportedArchs(numbers)
    return tuple(f"sm_{number}" for number in numbers)


def compile_cuda(text: str, arch: str = "sm_90", options: Sequence[str] = ()) -> CudaBinary:
    """Compile one self-contained source (`options` beside `CUDA_FLAGS`); NvrtcError if it does not compile."""
    return _compile(text, arch, options, {_UNIT_NAME: text})


def compile_ptx(text: str, arch: str = "sm_90", options: Sequence[str] = ()) -> str:
    """The PTX of one self-contained source, as `compile_cuda` makes on its way."""
    return compile_cuda(text, arch, options).ptx


def compile_many(
    sources: Sequence[CudaSource], arch: str, cache: KernelCache, prelude: str = "", options: Sequence[str] = ()
) -> dict[str, CudaBinary | BuildFailure]:
    """Compile (or find) kernels, several to a unit; for each symbol, the binary of the unit that it lies in.

    `prelude` is put once before the kernels of a unit. One faulty kernel fails alone. Without NVRTC all of them fail.
    ptxas may spill only to let more threads run; such a kernel is compiled again with room for one block.
    """
    if (reason := nvrtc_available()) is not None:
        return {source.symbol: BuildFailure(source.symbol, reason) for source in sources}
    result = _compile_units(sources, arch, cache, prelude, options)
    spilling = [s for s in sources if isinstance(b := result[s.symbol], CudaBinary) and b.kernels[s.symbol].spills]
    roomy = [CudaSource(s.symbol, t) for s in spilling if (t := _BOUNDS.sub(r"(\1, 1)", s.text)) != s.text]
    return {**result, **_compile_units(roomy, arch, cache, prelude, options)}


def _compile_units(
    sources: Sequence[CudaSource], arch: str, cache: KernelCache, prelude: str, options: Sequence[str]
) -> dict[str, CudaBinary | BuildFailure]:
    context = digest("cuda", str(nvrtc_version()), arch, prelude, *CUDA_FLAGS, *options)

    def compile_unit(unit: Sequence[KernelSource]) -> bytes:
        files = {_PRELUDE_NAME: prelude, **{f"{source.symbol}.cu": source.text for source in unit}}
        text = "".join(f'#line 1 "{name}"\n{content}\n' for name, content in files.items())
        return _pack_binary(_compile(text, arch, options, files))

    units = build_units(sources, context, compile_unit, cache, _WORKERS)
    binaries = {path: _read_binary(path) for path in set(units.values()) if isinstance(path, Path)}
    result: dict[str, CudaBinary | BuildFailure] = {}
    for symbol, unit in units.items():
        outcome = unit if isinstance(unit, BuildFailure) else binaries[unit]
        if isinstance(outcome, CudaBinary) and symbol not in outcome.kernels:
            outcome = BuildFailure(symbol, f'the source defines no extern "C" __global__ function {symbol}')
        result[symbol] = outcome or BuildFailure(symbol, "the compiled kernel disappeared from the cache")
    return result


@functools.cache
def _library() -> ctypes.CDLL:
    failures = []
    for path in _library_paths():
        try:
            library = ctypes.CDLL(path)
            library.nvrtcGetErrorString.restype = ctypes.c_char_p
            return library
        except (OSError, AttributeError) as error:
            failures.append(f"\n  {path}: {error}")
    raise NvrtcError(INSTALL_HINT + "".join(failures))


def _library_paths() -> list[str]:
    """Where libnvrtc may be: the wheels (newest first), a toolkit, the system."""
    wheels = importlib.util.find_spec("nvidia")
    roots = list(wheels.submodule_search_locations or ()) if wheels else []
    paths = [path for root in roots for path in glob.glob(f"{root}/*/lib/libnvrtc.so.*")]
    paths.sort(key=_library_version, reverse=True)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            paths += glob.glob(f"{home}/lib*/libnvrtc.so")
    if system := ctypes.util.find_library("nvrtc"):
        paths.append(system)
    return [path for path in paths if ".alt." not in path]


def _library_version(path: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.rpartition(".so.")[2])]


def _compile(text: str, arch: str, options: Sequence[str], files: Mapping[str, str]) -> CudaBinary:
    """Compile `text`; `files` are the sources that the compiler's messages name, by that name."""
    library = _library()
    flags = [f"--gpu-architecture={arch}", *CUDA_FLAGS, _PTXAS_REPORT, *options]
    program = ctypes.c_void_p()
    status = library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), _UNIT_NAME.encode(), 0, None, None)
    if status != 0:
        raise NvrtcError(f"NVRTC: {_status_text(library, status)}")
    try:
        arguments = (ctypes.c_char_p * len(flags))(*[flag.encode() for flag in flags])
        status = library.nvrtcCompileProgram(program, len(flags), arguments)
        log = _output(library, program, "ProgramLog").decode(errors="replace")
        if status != 0:
            raise NvrtcError(_explain(library, status, log, flags, files))
        cubin = _output(library, program, "CUBIN")
        ptx = _output(library, program, "PTX").decode(errors="replace")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
    return CudaBinary(arch, cubin, ptx.rstrip("\0"), parse_resources(log), log.rstrip("\0\n"))


def _output(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    status = getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    content = ctypes.create_string_buffer(size.value)
    status = status or getattr(library, f"nvrtcGet{what}")(program, content)
    if status != 0:
        raise NvrtcError(f"NVRTC gives no {what}: {_status_text(library, status)}")
    return content.raw


def _status_text(library: ctypes.CDLL, status: int) -> str:
    describe: Callable[[int], bytes] = library.nvrtcGetErrorString
    return describe(status).decode()


def _explain(library: ctypes.CDLL, status: int, log: str, flags: Sequence[str], files: Mapping[str, str]) -> str:
    """The log, and under it the source lines that its errors name, with their neighbours and numbers."""
    parts = [f"{_status_text(library, status)} (options: {' '.join(flags)})", log.strip("\0\n")]
    named = re.findall(r"^(\S+)\((\d+)\): (?:catastrophic )?error", log, re.MULTILINE)
    for name, number in list(dict.fromkeys(named))[:_EXCERPTS]:
        if name in files:
            parts.append(_excerpt(name, files[name].splitlines(), int(number)))
    if len(parts) == 2 and "architecture" in log:
        parts.append(f"NVRTC {'.'.join(map(str, nvrtc_version()))} knows {', '.join(supported_architectures())}")
    return "\n".join(parts)


def _excerpt(name: str, lines: Sequence[str], number: int) -> str:
    shown = range(max(1, number - 2), min(len(lines), number + 2) + 1)
    numbered = [f"{'>' if line == number else ' '}{line:5} | {lines[line - 1]}" for line in shown]
    return "\n".join([f"{name}:", *numbered])


def parse_resources(log: str) -> dict[str, KernelResources]:
    """The figures of every kernel in what `--ptxas-options=-v` prints.

    An entry's own block starts at "Compiling entry function"; blocks of device functions that were not inlined stand
    outside, and their stack is in the entry's cumulative one.
    """
    kernels = {}
    for block in re.split(r"Compiling entry function ", log)[1:]:
        name = re.match(r"'([^']+)'", block)
        used = re.search(r"^.*Used (\d+) registers.*$", block, re.MULTILINE)
        if name is None or used is None:
            continue
        own = block[: used.end()]
        stack = _figure(r"(\d+) bytes cumulative stack size", own) or _figure(r"(\d+) bytes stack frame", own)
        kernels[name[1]] = KernelResources(
            registers=int(used[1]),
            spill_stores=_figure(r"(\d+) bytes spill stores", own),
            spill_loads=_figure(r"(\d+) bytes spill loads", own),
            shared_bytes=_figure(r"(\d+) bytes smem", own),
            stack_bytes=stack,
        )
    return kernels


def _figure(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


def _pack_binary(binary: CudaBinary) -> bytes:
    """One cache entry: a line of JSON, then PTX, log and machine code."""
    ptx, log = binary.ptx.encode(), binary.log.encode()
    kernels = {name: asdict(resources) for name, resources in binary.kernels.items()}
    header = {"arch": binary.arch, "ptx": len(ptx), "log": len(log), "kernels": kernels}
    return json.dumps(header).encode() + b"\n" + ptx + log + binary.cubin


def _read_binary(path: Path) -> CudaBinary | None:
    try:
        header_line, _, rest = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    header = json.loads(header_line)
    ptx, log = rest[: header["ptx"]], rest[header["ptx"] :][: header["log"]]
    kernels = {name: KernelResources(**figures) for name, figures in header["kernels"].items()}
    return CudaBinary(header["arch"], rest[header["ptx"] + header["log"] :], ptx.decode(), kernels, log.decode())
