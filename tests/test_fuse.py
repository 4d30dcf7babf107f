"""The fusion pass around the coloring: what it leaves of the process as it was, and the bounds of one kernel."""

from __future__ import annotations

import sys
import threading

from hlofuse.fusion.fuse import DEPTH, deep_recursion


def test_the_recursion_limit_stays_until_the_last_thread_leaves() -> None:
    limit = sys.getrecursionlimit()
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with deep_recursion():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with deep_recursion():
        thread.start()
        assert inside.wait(10)
    assert sys.getrecursionlimit() >= DEPTH
    leave.set()
    thread.join()
    assert sys.getrecursionlimit() == limit
