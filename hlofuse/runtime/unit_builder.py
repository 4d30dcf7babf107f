"""From many small kernel texts to few compiled units, for any compiler.

A compiler's start-up costs as much as two or three small kernels, so missing kernels are packed into about as many
translation units as cores, and units are compiled in parallel. On disk a kernel's entry is only the name of its unit.
Invariants: a kernel is compiled at most once per (text, context); one faulty kernel fails alone; nothing but a
programming error raises.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ..errors import HlofuseError
from .kernel_cache import KernelCache


@dataclass(frozen=True)
class KernelSource:
    """One kernel: the symbol it defines, and its text, which needs nothing but the prelude before it."""

    symbol: str
    text: str


@dataclass(frozen=True)
class BuildFailure:
    """Why a kernel has no machine code: the compiler's own words."""

    symbol: str
    message: str


class CompileError(HlofuseError):
    """A unit does not compile; the message is the compiler's."""


CompileUnit = Callable[[Sequence[KernelSource]], bytes]


def available_cores() -> int:
    try:
        return max(1, len(os.sched_getaffinity(0)))
    except (AttributeError, OSError):
        return os.cpu_count() or 1


def kernel_key(source: KernelSource, context: str) -> str:
    """What a kernel's machine code depends on, as text; `context` names everything but the kernel itself."""
    return f"kernel {source.symbol} {digest(context, source.text)}"


def digest(*parts: str) -> str:
    """A sha256 that tells ("ab", "c") from ("a", "bc")."""
    total = hashlib.sha256()
    for part in parts:
        content = part.encode()
        total.update(b"%d:" % len(content))
        total.update(content)
    return total.hexdigest()


def pack_units(sources: Sequence[KernelSource], count: int) -> list[list[KernelSource]]:
    """At most `count` groups of about equal text length (longest first into the shortest group)."""
    units: list[list[KernelSource]] = [[] for _ in range(min(count, len(sources)))]
    lengths = [0] * len(units)
    for source in sorted(sources, key=lambda source: (-len(source.text), source.symbol)):
        shortest = lengths.index(min(lengths))
        units[shortest].append(source)
        lengths[shortest] += len(source.text)
    return units


def build_units(
    sources: Iterable[KernelSource], context: str, compile_unit: CompileUnit, cache: KernelCache, workers: int
) -> dict[str, Path | BuildFailure]:
    """The file of the compiled unit that holds each symbol; from the cache where it can be, else compiled."""
    outcome: dict[str, Path | BuildFailure] = {}
    missing: list[KernelSource] = []
    for source in _distinct(sources):
        unit = _cached_unit(cache, kernel_key(source, context))
        if unit is not None:
            outcome[source.symbol] = unit
        else:
            missing.append(source)
    if not missing:
        return outcome

    def build(unit: Sequence[KernelSource]) -> Path | BuildFailure:
        return _build_unit(unit, context, compile_unit, cache)

    with ThreadPoolExecutor(workers) as pool:
        units = pack_units(missing, workers)
        faulty: list[KernelSource] = []
        for members, result in zip(units, pool.map(build, units), strict=True):
            if isinstance(result, BuildFailure) and len(members) > 1:
                faulty += members
            else:
                outcome.update((source.symbol, result) for source in members)
        for source, result in zip(faulty, pool.map(build, [[source] for source in faulty]), strict=True):
            outcome[source.symbol] = result
    return outcome


def _build_unit(
    unit: Sequence[KernelSource], context: str, compile_unit: CompileUnit, cache: KernelCache
) -> Path | BuildFailure:
    try:
        binary = compile_unit(unit)
    except CompileError as error:
        return BuildFailure(unit[0].symbol, str(error))
    unit_key = "unit " + digest(*(kernel_key(source, context) for source in unit))
    path = cache.put(unit_key, binary)
    if path is None:
        return BuildFailure(unit[0].symbol, "neither the cache nor a temporary directory takes the compiled kernel")
    for source in unit:
        cache.put(kernel_key(source, context), unit_key.encode())
    return path


def _cached_unit(cache: KernelCache, key: str) -> Path | None:
    entry = cache.get(key)
    try:
        return cache.get(entry.read_text()) if entry else None
    except (OSError, ValueError):
        return None


def _distinct(sources: Iterable[KernelSource]) -> list[KernelSource]:
    by_symbol: dict[str, KernelSource] = {}
    for source in sources:
        if by_symbol.setdefault(source.symbol, source).text != source.text:
            raise ValueError(f"two different kernels are both named {source.symbol}")
    return list(by_symbol.values())
