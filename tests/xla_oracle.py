"""XLA itself as the judge of HLO text: does it parse, and what are its values on this machine's CPU.

XLA aborts the process on some malformed programs, so it works in a child process, one for all requests, which is
started anew after a crash. Nothing here goes through hlofuse.
"""
from __future__ import annotations

import atexit
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO, Any

import numpy as np


class XlaError(Exception):
    """XLA refused the text, or crashed on it; the message is XLA's."""


def xla_parses(text: str) -> str:
    """What XLA itself prints of the text that it parsed (so truthy); an `XlaError` with its complaint otherwise."""
    return _child().ask("parse", text)


def run_hlo(text: str, arguments: Sequence[Any] = ()) -> list[np.ndarray]:
    """The results of the text's entry on NumPy arguments, compiled and run by XLA:CPU."""
    return _child().ask("run", text, [np.asarray(a) for a in arguments])


class _Child:
    """The process, and the pipe to it."""

    def __init__(self) -> None:
        # Its own words would mix with the test's: they are kept, and shown when it dies.
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the process
        # Without LLVM's optimizations a program compiles in half the time, to the same values.
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        self.process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.log, env=environment)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, *request: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            _send(self.process.stdin, request)
            kind, answer = pickle.load(self.process.stdout)
        except (EOFError, BrokenPipeError):
            code = self.process.wait()
            self.log.seek(0)
            tail = self.log.read()[-2000:].decode(errors="replace")
            self.close()
            raise XlaError(f"XLA's process died with code {code}:\n{tail}") from None
        if kind == "error":
            raise XlaError(answer)
        return answer

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout, self.log):
            if pipe is not None:
                pipe.close()
        self.process.wait()


_current: _Child | None = None


def _child() -> _Child:
    global _current
    if _current is None or not _current.is_alive:
        _current = _Child()
        atexit.register(_current.close)
    return _current


def _send(pipe: IO[bytes], message: Any) -> None:
    pickle.dump(message, pipe)
    pipe.flush()


# --- the child ----------------------------------------------------------------------------------------------------

def _serve() -> None:
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not speak into the answers
    import jax
    import ml_dtypes  # noqa: F401  unpickles bfloat16 and its like
    jax.config.update("jax_enable_x64", True)  # arguments keep their types
    client = jax.devices("cpu")[0].client
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        try:
            answer = ("ok", _parse(*request[1:]) if request[0] == "parse" else _run(client, *request[1:]))
        except Exception as error:  # all goes back to the one who asked
            answer = ("error", f"{type(error).__name__}: {error}")
        _send(answers, answer)


def _parse(text: str) -> str:
    from jaxlib import _hlo
    return _hlo.hlo_module_from_text(text).to_string()


def _run(client: Any, text: str, arguments: list[np.ndarray]) -> list[np.ndarray]:
    import jax
    from jaxlib import _hlo, _jax
    module = _hlo.hlo_module_from_text(text)
    computation = _hlo.XlaComputation(module.as_serialized_hlo_module_proto())
    devices = _jax.DeviceList(tuple(client.local_devices()[:1]))
    executable = client.compile_and_load(_jax.mlir.xla_computation_to_mlir_module(computation), devices,
                                         _jax.CompileOptions())
    return [np.asarray(result) for result in executable.execute([jax.device_put(a) for a in arguments])]


if __name__ == "__main__":
    _serve()
