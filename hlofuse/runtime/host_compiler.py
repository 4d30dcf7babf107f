"""HOST kernels: C++ text to loaded functions, through whatever C++ compiler the machine has.

Kernels are built for this very CPU, so the compiler's identity holds the flags that -march=native stands for here.
Invariants: loaded libraries are never closed (running programs hold addresses in them); a kernel that cannot be built
or loaded is a BuildFailure in the answer, not an exception; threads and forks are safe.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .kernel_cache import KernelCache, default_cache
from .unit_builder import (
    BuildFailure,
    CompileError,
    KernelSource,
    available_cores,
    build_units,
    digest,
    kernel_key,
)

# Values first: no flag here lets the compiler assume away NaN, infinities, signed zeros or rounding, and contraction
# into fma is decided in the IR. The last two keep equal helpers of different units apart.
_IS_X86 = platform.machine() in ("x86_64", "AMD64", "i686")
_NATIVE = "-march=native" if _IS_X86 else "-mcpu=native"
HOST_FLAGS: tuple[str, ...] = (
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fopenmp-simd",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-asynchronous-unwind-tables",
    "-fno-semantic-interposition",
    "-Wl,-Bsymbolic",
    # The sine and the cosine of one angle would become one call of sincos, which has no vector version.
    *("-fno-builtin-sin", "-fno-builtin-cos", "-fno-builtin-sinf", "-fno-builtin-cosf"),
    # Full vectors: up to twice as fast where exp and the like dominate, no slower elsewhere.
    *(("-mprefer-vector-width=512",) if _IS_X86 else ()),
)
# GCC's own. Loops over lanes stay free of branches: what only one side of a select needs would move into one, where a
# call has no vector version, and what one way has computed already would be computed on the other ways only. (Without
# -fthread-jumps more loops are vectors, but g++ 12 gets some wrong.) And a loop over time stays outside of its lanes.
# g++ 12 counts too few of the bools that it has made vectors of unless it knows nothing about ranges.
_GCC_FLAGS = ("-fno-tree-sink", "-fno-tree-pre", "-fno-loop-interchange", "-fno-tree-vrp")
_SHARED = ("-shared", "-fPIC", "-Wl,-z,defs")
_COMPILE_TIMEOUT_S = 600
_MESSAGE_LIMIT = 8000
INSTALL_HINT = "no C++ compiler found: install g++ or clang++, set CXX, or `pip install ziglang`"


@dataclass(frozen=True)
class HostSource(KernelSource):
    """C++ that defines `extern "C" void SYMBOL(void** buffers, long long begin, long long end, unsigned* counters)`.

    `buffers` are the operands, then the results; the kernel computes the blocks begin ≤ b < end; `counters` are zero
    before the first block of a call. Equal symbols mean equal text.
    """


@dataclass(frozen=True)
class HostCompiler:
    """A command that compiles C++, and all that its output depends on beside text and flags."""

    command: tuple[str, ...]
    identity: str

    @property
    def own_flags(self) -> tuple[str, ...]:
        """Flags that others do not know."""
        return _GCC_FLAGS if "Free Software Foundation" in self.identity else ()


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel's function in this process; the address stays valid until the process ends."""

    symbol: str
    address: int


@dataclass(frozen=True)
class Toolchain:
    """How a compiler links kernels here, and whether loops over tanhf, erff, … become vector calls."""

    link_flags: tuple[str, ...]
    vector_math: bool


@functools.cache
def find_compiler() -> HostCompiler | None:
    """The first of $CXX, c++, g++, clang++ and the ziglang wheel that works; looked for once per process."""
    for command in _candidates():
        identity = _identify(command)
        if identity is not None:
            return HostCompiler(command, identity)
    return None


def _candidates() -> list[tuple[str, ...]]:
    commands = [tuple(shlex.split(os.environ.get("CXX", ""))), ("c++",), ("g++",), ("clang++",)]
    found = [(path, *command[1:]) for command in commands if command and (path := shutil.which(command[0]))]
    if importlib.util.find_spec("ziglang") is not None:
        found.append((sys.executable, "-m", "ziglang", "cc"))  # its "c++" first builds a C++ library for a minute
    return found


def _identify(command: tuple[str, ...]) -> str | None:
    """Version, target flags and CPU of a compiler that works, else None.

    Asking costs two runs, so the answer is kept on disk for as long as the compiler's file and the CPU stay the same.
    """
    try:
        status = os.stat(os.path.realpath(command[0]))
    except OSError:
        return None
    key = "compiler " + digest(*command, str((status.st_mtime_ns, status.st_size)), _cpu_description())
    cache = default_cache()
    if (known := _read_json(cache.get(key))) is not None:
        return str(known)
    try:
        version = _ask((*command, "--version")).stdout
        preprocessing = _ask((*command, _NATIVE, "-E", "-v", "-x", "c++", os.devnull))
    except (OSError, subprocess.SubprocessError):
        return None
    target = [line.strip() for line in preprocessing.stderr.splitlines() if "cc1" in line]
    identity = " ".join([shlex.join(command), version, *target, _cpu_description()])
    cache.put(key, json.dumps(identity).encode())
    return identity


def _ask(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    # From "/" and in C, so that neither the working directory nor a language gets into the answer.
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=True,
        timeout=120,
        cwd="/",
        env=_environment(),
    )


def _environment() -> dict[str, str]:
    return {**os.environ, "LC_ALL": "C"}


def _cpu_description() -> str:
    """What tells CPUs apart that share a home directory, without asking a compiler."""
    try:
        with open("/proc/cpuinfo") as file:
            first = file.read(1 << 14).split("\n\n")[0]
    except OSError:
        return f"{platform.node()} {platform.processor()}"
    # Features and the model that -march=native looks at matter, the clock of the moment does not.
    facts = re.compile(r"vendor|cpu family|model|flags|Features|CPU ")
    return "\n".join(filter(facts.match, first.splitlines()))


# erf came to libmvec together with tanh, atan, expm1, …: one function stands for the set, and keeps the probe quick.
_VECTOR_PROBE = """
extern "C" __attribute__((simd("notinbranch"))) float erff(float);
extern "C" void probe(const float* x, float* y) {
#pragma omp simd
  for (int i = 0; i < 64; ++i) y[i] = erff(x[i]);
}
"""


@functools.cache
def toolchain(compiler: HostCompiler) -> Toolchain:
    """Probed once per compiler and machine, by linking; the answer is kept on disk."""
    key = "toolchain " + digest(compiler.identity, *HOST_FLAGS, _VECTOR_PROBE)
    cache = default_cache()
    known = _read_json(cache.get(key))
    if isinstance(known, dict) and known.keys() == {"link_flags", "vector_math"}:
        return Toolchain(tuple(known["link_flags"]), bool(known["vector_math"]))
    result = _probe_toolchain(compiler)
    cache.put(key, json.dumps({"link_flags": result.link_flags, "vector_math": result.vector_math}).encode())
    return result


def has_vector_math(compiler: HostCompiler) -> bool:
    """Whether `simd` declarations of tanhf, erff, … reach libmvec (glibc 2.35 or newer, g++)."""
    return toolchain(compiler).vector_math


def _probe_toolchain(compiler: HostCompiler) -> Toolchain:
    # Without the C++ library a unit links in a tenth less time; not every compiler can leave it out so.
    for before, after in ((("-nostdlib",), ("-lc", "-lgcc")), ((), ())):
        for libraries, vector_math in ((("-lmvec", "-lm"), True), (("-lm",), False)):
            link_flags = (*before, *libraries, *after)
            if _links(compiler, _VECTOR_PROBE, link_flags, needs=b"_ZGV" if vector_math else b""):
                return Toolchain(link_flags, vector_math)
    return Toolchain(("-lm",), False)


def _links(compiler: HostCompiler, text: str, link_flags: tuple[str, ...], needs: bytes) -> bool:
    """Whether `text` links, and the library asks for symbols named `needs` (clang ignores the simd attribute)."""
    try:
        return needs in compile_library(compiler, text, (*HOST_FLAGS, _NATIVE), link_flags)
    except CompileError:
        return False


def _read_json(path: Path | None) -> object:
    try:
        return json.loads(path.read_text()) if path else None
    except (OSError, ValueError):
        return None


def compile_library(
    compiler: HostCompiler, text: str, flags: Sequence[str], link_flags: Sequence[str], language: str = "c++"
) -> bytes:
    """The shared library that `text` compiles to; CompileError with the compiler's message where it does not."""
    try:
        with tempfile.TemporaryDirectory(prefix="hlofuse-build-") as directory:
            source, library = Path(directory, "unit"), Path(directory, "unit.so")
            source.write_text(text)
            files = ("-x", language, str(source), "-o", str(library))
            finished = subprocess.run(
                [*compiler.command, *flags, *_SHARED, *files, *link_flags],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=_COMPILE_TIMEOUT_S,
                env=_environment(),
            )
            if finished.returncode != 0:
                message = finished.stderr.decode(errors="replace").strip()[:_MESSAGE_LIMIT]
                raise CompileError(message or f"{compiler.command[0]} ended with code {finished.returncode}")
            return library.read_bytes()
    except subprocess.TimeoutExpired:
        raise CompileError(f"{compiler.command[0]} was still compiling after {_COMPILE_TIMEOUT_S} s") from None
    except OSError as error:
        raise CompileError(f"{compiler.command[0]} could not be run: {error}") from error


_lock = threading.RLock()
_outcomes: dict[str, LoadedKernel | BuildFailure] = {}
_libraries: dict[Path, ctypes.CDLL] = {}


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # the parent's may be held by a thread that does not exist here


os.register_at_fork(after_in_child=_after_fork)


def build_host_kernels(
    sources: Sequence[HostSource], prelude: str, cache: KernelCache, flags: Sequence[str] = HOST_FLAGS
) -> dict[str, LoadedKernel | BuildFailure]:
    """Compile (or find) and load every kernel; the answer has each symbol once.

    `prelude` is put once before the kernels of a unit, and may test HLOFUSE_VECTOR_MATH (`has_vector_math`). Kernels
    loaded before in this process cost a dict look-up; an answer that failed is remembered too.
    """
    compiler = find_compiler()
    if compiler is None:
        return {source.symbol: BuildFailure(source.symbol, INSTALL_HINT) for source in sources}
    tools = toolchain(compiler)
    all_flags = (*flags, *compiler.own_flags, _NATIVE, f"-DHLOFUSE_VECTOR_MATH={int(tools.vector_math)}")
    context = digest("host", compiler.identity, prelude, *all_flags, *_SHARED, *tools.link_flags)
    keys = {source: kernel_key(source, context) for source in sources}
    if any(key not in _outcomes for key in keys.values()):

        def compile_unit(unit: Sequence[KernelSource]) -> bytes:
            return compile_library(compiler, _unit_text(unit, prelude), all_flags, tools.link_flags)

        with _lock:
            missing = [source for source, key in keys.items() if key not in _outcomes]
            built = build_units(missing, context, compile_unit, cache, available_cores())
            for source in missing:
                unit = built[source.symbol]
                loaded = unit if isinstance(unit, BuildFailure) else _load(source.symbol, unit)
                _outcomes[keys[source]] = loaded
    return {source.symbol: _outcomes[key] for source, key in keys.items()}


def _unit_text(unit: Sequence[KernelSource], prelude: str) -> str:
    """One translation unit; the compiler's messages name the kernel and the line within its own text."""
    parts = ['#line 1 "prelude.h"', prelude]
    for source in unit:
        parts += [f'#line 1 "{source.symbol}.cpp"', source.text]
    return "\n".join(parts) + "\n"


def _load(symbol: str, path: Path) -> LoadedKernel | BuildFailure:
    try:
        library = _libraries.get(path) or load_library(path)
        _libraries[path] = library
        address = ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value
    except (OSError, AttributeError) as error:
        return BuildFailure(symbol, f"the compiled kernel could not be loaded: {error}")
    return LoadedKernel(symbol, address) if address else BuildFailure(symbol, "the compiled kernel has no address")


def load_library(path: Path) -> ctypes.CDLL:
    """As `ctypes.CDLL`, but of a copy that nobody can reach: later damage to the cache cannot crash what is loaded."""
    try:
        content = path.read_bytes()
        descriptor, copy = tempfile.mkstemp(prefix="hlofuse-", suffix=".so")
    except OSError:
        return ctypes.CDLL(str(path))
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        return ctypes.CDLL(copy)
    except OSError:  # no space, or a temporary directory on a file system without execution
        return ctypes.CDLL(str(path))
    finally:
        os.unlink(copy)
