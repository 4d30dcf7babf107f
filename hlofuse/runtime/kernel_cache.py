"""Compiled kernels on disk, so that a second process pays for no compiler.

An entry is two files: `<name>.sum` holds the sha256 of the content, and the content lies in a file named by that sum.
Invariants: a path that `get` returns held exactly what was put when it was first returned; files are only ever replaced
whole; no state of the directory (damaged, read-only, full, a file, shared by processes) makes a call raise. What
cannot be kept in the directory is kept in a private one, which ends with the process.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..config import cache_directory

SIZE_LIMIT = 1 << 30
_EVICTION_PERIOD_S = 3600.0
_PUTS_PER_EVICTION_CHECK = 64
_MARKER = "last-eviction"


def default_directory() -> Path | None:
    """`config.cache_directory()`; None for a user without a home."""
    try:
        return cache_directory().absolute()
    except (RuntimeError, OSError):
        return None


@dataclass(frozen=True)
class _Verified:
    """A file whose content was checked, and by what to notice cheaply that it is another file now."""

    path: Path
    stamp: tuple[int, int, int]


class KernelCache:
    """As a dict from str to a file of bytes, but shared by processes and allowed to forget.

    `directory=None` means `default_directory()`. Beyond `size_limit` bytes the least recently used entries are evicted.
    """

    def __init__(self, directory: Path | None = None, size_limit: int = SIZE_LIMIT) -> None:
        self.directory = directory if directory is not None else default_directory()
        self.size_limit = size_limit
        self._verified: dict[str, _Verified] = {}
        self._private: Path | None = None
        self._puts = 0
        self._lock = threading.RLock()
        _caches.add(self)

    def get(self, key: str) -> Path | None:
        """The file with the content put under `key`, or None. The content is verified once per process."""
        with self._lock:
            known = self._verified.get(key)
            if known is not None and _stamp(known.path) == known.stamp:
                return known.path
            self._verified.pop(key, None)
            for directory in self._directories():
                path = _read_entry(directory, _entry_name(key))
                if path is not None and self._remember(key, path):
                    return path
            return None

    def put(self, key: str, data: bytes) -> Path | None:
        """Keep `data` under `key` and say where; None only when not even a temporary directory takes it."""
        with self._lock:
            path = _write_entry(self.directory, _entry_name(key), data) if self.directory else None
            if path is not None:
                self._evict_now_and_then()
            elif (private := self._private_directory()) is not None:
                path = _write_entry(private, _entry_name(key), data)
            return path if path is not None and self._remember(key, path) else None

    def _directories(self) -> Iterator[Path]:
        if self._private is not None:
            yield self._private
        if self.directory is not None:
            yield self.directory

    def _remember(self, key: str, path: Path) -> bool:
        stamp = _stamp(path)
        if stamp is not None:
            self._verified[key] = _Verified(path, stamp)
        return stamp is not None

    def _private_directory(self) -> Path | None:
        if self._private is None:
            try:
                self._private = Path(tempfile.mkdtemp(prefix="hlofuse-"))
            except OSError:
                return None
            atexit.register(_remove_if_owner, self._private, os.getpid())
        return self._private

    def after_fork(self) -> None:
        """Start anew in a forked child: the lock may be held by a thread that does not exist here."""
        self._lock = threading.RLock()
        self._private = None

    def _evict_now_and_then(self) -> None:
        self._puts += 1
        if self._puts % _PUTS_PER_EVICTION_CHECK != 1 or self.directory is None:
            return
        marker = self.directory / _MARKER
        try:
            if time.time() - marker.stat().st_mtime < _EVICTION_PERIOD_S:
                return
        except OSError:
            pass
        try:
            marker.touch()
            evict(self.directory, self.size_limit)
        except OSError:
            pass


_caches: weakref.WeakSet[KernelCache] = weakref.WeakSet()


@functools.cache
def default_cache() -> KernelCache:
    """The process's one cache in `default_directory()`."""
    return KernelCache()


def _after_fork() -> None:
    for cache in list(_caches):
        cache.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def evict(directory: Path, size_limit: int) -> int:
    """Remove the least recently used files until 3/4 of `size_limit` bytes are left; the number removed."""
    with os.scandir(directory) as entries:
        files = [(entry.stat().st_mtime, entry.stat().st_size, entry.path) for entry in entries if _is_ours(entry)]
    excess = sum(size for _, size, _ in files)
    if excess <= size_limit:
        return 0
    excess -= size_limit * 3 // 4
    removed = 0
    for _, size, path in sorted(files):
        if excess <= 0:
            break
        _unlink(path)
        excess -= size
        removed += 1
    return removed


def _remove_if_owner(directory: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child must not take its parent's files away
        shutil.rmtree(directory, ignore_errors=True)


def _is_ours(entry: os.DirEntry[str]) -> bool:
    return entry.name.endswith((".sum", ".bin", ".tmp")) and entry.is_file(follow_symlinks=False)


def _entry_name(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:40]


def _content_path(directory: Path, name: str, checksum: str) -> Path:
    return directory / f"{name}.{checksum[:16]}.bin"


def _read_entry(directory: Path, name: str) -> Path | None:
    """The content file of an entry if it is what its checksum says; a damaged entry is dropped."""
    sum_path = directory / f"{name}.sum"
    try:
        checksum = sum_path.read_text("ascii", errors="replace")
    except FileNotFoundError:
        return None
    except OSError:
        checksum = ""
    path = _content_path(directory, name, checksum if checksum.isalnum() else "")
    try:
        intact = hashlib.sha256(path.read_bytes()).hexdigest() == checksum
    except OSError:
        intact = False
    if not intact:
        _unlink(path)
        _unlink(sum_path)
        return None
    for used in (sum_path, path):
        _touch(used)
    return path


def _write_entry(directory: Path, name: str, data: bytes) -> Path | None:
    """Write the content first and its checksum last, each atomically; None if the directory does not take them."""
    checksum = hashlib.sha256(data).hexdigest()
    path = _content_path(directory, name, checksum)
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write_atomically(path, data)
        _write_atomically(directory / f"{name}.sum", checksum.encode())
    except OSError:
        return None
    return path


def _write_atomically(path: Path, data: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=path.name[:40], suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        _unlink(temporary)
        raise


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size  # no times: another process's `get` renews them


def _touch(path: Path) -> None:
    try:
        os.utime(path)
    except OSError:
        pass


def _unlink(path: Path | str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass
