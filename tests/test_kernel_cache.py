"""The disk cache keeps what it can and never gets in the way: damage, bad directories, races, eviction."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hlofuse.runtime.kernel_cache import KernelCache, default_directory, evict


def content_file(directory: Path) -> Path:
    (path,) = directory.glob("*.bin")
    return path


def test_gives_back_what_was_put(tmp_path):
    cache = KernelCache(tmp_path / "not" / "there yet")
    assert cache.get("softmax") is None
    path = cache.put("softmax", b"machine code")
    assert path is not None and path.read_bytes() == b"machine code"
    assert cache.get("softmax") == path
    assert KernelCache(cache.directory).get("softmax") == path
    assert cache.get("layer_norm") is None


def test_the_last_put_wins(tmp_path):
    cache = KernelCache(tmp_path)
    cache.put("k", b"old")
    cache.put("k", b"new")
    for reader in (cache, KernelCache(tmp_path)):
        found = reader.get("k")
        assert found is not None and found.read_bytes() == b"new"


@pytest.mark.parametrize("damage", [lambda data: data[:5], lambda data: data[:-1] + b"?", lambda data: b""])
def test_a_damaged_entry_is_dropped_and_can_be_put_again(tmp_path, damage):
    KernelCache(tmp_path).put("k", b"machine code")
    path = content_file(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    cache = KernelCache(tmp_path)
    assert cache.get("k") is None
    assert list(tmp_path.glob("*.bin")) == list(tmp_path.glob("*.sum")) == []
    assert cache.put("k", b"machine code") == KernelCache(tmp_path).get("k")


@pytest.mark.parametrize("checksum", [b"", b"\xff\x00", b"../../etc/passwd", b"0" * 64])
def test_a_damaged_checksum_is_a_missing_entry(tmp_path, checksum):
    KernelCache(tmp_path).put("k", b"machine code")
    (sum_file,) = tmp_path.glob("*.sum")
    sum_file.write_bytes(checksum)
    assert KernelCache(tmp_path).get("k") is None


def test_truncation_after_the_first_read_is_noticed(tmp_path):
    cache = KernelCache(tmp_path)
    cache.put("k", b"machine code")
    os.truncate(content_file(tmp_path), 3)
    assert cache.get("k") is None


def test_a_repeated_get_reads_nothing(tmp_path, monkeypatch):
    cache = KernelCache(tmp_path)
    path = cache.put("k", b"machine code")
    monkeypatch.setattr(Path, "read_bytes", lambda self: pytest.fail("the content was read again"))
    assert cache.get("k") == path


def a_file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("not a directory")
    return tmp_path / "file"


def a_read_only_directory(tmp_path: Path) -> Path:
    if os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    (tmp_path / "read only").mkdir(mode=0o500)
    return tmp_path / "read only"


def under_a_file(tmp_path: Path) -> Path:
    return a_file(tmp_path) / "cache"


def under_proc(tmp_path: Path) -> Path:
    return Path("/proc/hlofuse")


@pytest.mark.parametrize("directory", [a_file, under_a_file, under_proc, a_read_only_directory])
def test_a_directory_that_takes_nothing_is_replaced_for_this_process(tmp_path, directory):
    cache = KernelCache(directory(tmp_path))
    assert cache.get("k") is None
    path = cache.put("k", b"machine code")
    assert path is not None and path.read_bytes() == b"machine code"
    assert cache.get("k") == path
    assert KernelCache(cache.directory).get("k") is None


def test_a_full_disk_leaves_no_litter(tmp_path, monkeypatch):
    cache = KernelCache(tmp_path)

    def refuse(source, target, replace=os.replace):
        if Path(target).parent == tmp_path:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    path = cache.put("k", b"machine code")
    assert path is not None and path.parent != tmp_path
    assert cache.get("k") == path
    assert list(tmp_path.iterdir()) == []


def test_without_any_place_to_write_there_is_no_entry_and_no_error(tmp_path, monkeypatch):
    cache = KernelCache(a_file(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert cache.put("k", b"machine code") is None
    assert cache.get("k") is None


def test_private_files_end_with_the_process(tmp_path):
    script = (
        "import sys, pathlib; from hlofuse.runtime.kernel_cache import KernelCache\n"
        "print(KernelCache(pathlib.Path(sys.argv[1])).put('k', b'x').parent)"
    )
    command = [sys.executable, "-c", script, str(a_file(tmp_path))]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    assert finished.stdout.strip() and not Path(finished.stdout.strip()).exists()


def test_two_processes_fill_one_directory(tmp_path):
    script = (
        "import sys, pathlib; from hlofuse.runtime.kernel_cache import KernelCache\n"
        "for i in range(100):\n"
        "    cache = KernelCache(pathlib.Path(sys.argv[1]))\n"
        "    data = f'{i % 10} by {sys.argv[2]} '.encode() * 1000\n"
        "    path = cache.put(f'k{i % 10}', data)\n"
        "    found = KernelCache(pathlib.Path(sys.argv[1])).get(f'k{i % 10}')\n"
        "    assert found is not None and len(found.read_bytes()) == len(data), (i, found)\n"
    )
    commands = [[sys.executable, "-c", script, str(tmp_path), name] for name in "ab"]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    assert all(KernelCache(tmp_path).get(f"k{i}") for i in range(10))
    assert not list(tmp_path.glob("*.tmp"))


def test_a_forked_child_neither_hangs_nor_takes_files_away(tmp_path):
    # In a process without JAX, which warns of forks.
    script = (
        "import os, sys, pathlib; from hlofuse.runtime.kernel_cache import KernelCache\n"
        "cache = KernelCache(pathlib.Path(sys.argv[1])); path = cache.put('k', b'x')\n"
        "with cache._lock:\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        ok = cache.get('k') == path and cache.put('l', b'y') is not None\n"
        "        sys.exit(0 if ok else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0 and path.exists()\n"
    )
    subprocess.run([sys.executable, "-c", script, str(a_file(tmp_path))], check=True, timeout=60)


def test_the_least_recently_used_entries_are_evicted(tmp_path):
    cache = KernelCache(tmp_path)
    for age, key in enumerate(["newest", "newer", "old", "older"]):
        path = cache.put(key, key.encode() * 1000)
        assert path is not None
        for file in tmp_path.glob(f"{path.name[:40]}*"):
            os.utime(file, (1e9 - age, 1e9 - age))
    (tmp_path / "a file of somebody else").write_bytes(bytes(10**6))
    assert KernelCache(tmp_path).get("old") is not None  # used just now
    assert evict(tmp_path, 10**6) == 0
    assert evict(tmp_path, 16_000) > 0
    left = [key for key in ("newest", "newer", "old", "older") if KernelCache(tmp_path).get(key)]
    assert left == ["newest", "old"]
    assert (tmp_path / "a file of somebody else").exists()


def test_putting_much_evicts(tmp_path):
    cache = KernelCache(tmp_path, size_limit=5000)
    cache.put("first", bytes(4000))
    os.utime(tmp_path / "last-eviction", (0, 0))
    for i in range(64):
        cache.put(f"k{i}", bytes(1000))
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 64 * 1000


def test_the_default_directory_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HLOFUSE_CACHE_DIR", raising=False)
    assert default_directory() == tmp_path / "hlofuse"
    monkeypatch.setenv("HLOFUSE_CACHE_DIR", str(tmp_path / "own"))
    assert default_directory() == KernelCache().directory == tmp_path / "own"
