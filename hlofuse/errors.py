"""Every error and warning that hlofuse raises by itself.

What jax.jit refuses is refused by jax.jit with its own message; these are for what only hlofuse knows. Each says what
is wrong, shows the place, and lists what would have been right.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HlofuseError(Exception):
    """Base class: `except HlofuseError` catches all errors of this package and none of JAX's."""


class HlofuseWarning(UserWarning):
    """Something runs, correctly, but not as fused kernels."""


class UnknownNameError(HlofuseError, ValueError):
    """A name that is not in a known list, of fusions, devices, passes, stages or values of an environment variable."""

    def __init__(self, kind: str, name: object, valid: Iterable[str]):
        self.kind = kind
        self.name = name
        self.valid = tuple(valid)
        close = difflib.get_close_matches(name, self.valid, n=1) if isinstance(name, str) else []
        hint = f"; did you mean {close[0]!r}?" if close else "."
        super().__init__(f"Unknown {kind} {name!r}{hint} Valid: {', '.join(map(repr, self.valid))}.")


class ParseError(HlofuseError, ValueError):
    """Malformed HLO text. `line` and `column` count from 1; the message shows the line, a caret under the column."""

    def __init__(self, message: str, *, line: int, column: int, source: str, file: str | None = None):
        self.line = line
        self.column = column
        self.source = source
        self.file = file
        place = f"{file or 'HLO text'}, line {line}, column {column}"
        # Tabs stay tabs, so that the caret stands under its character in every terminal.
        indent = "".join("\t" if c == "\t" else " " for c in source[: column - 1])
        super().__init__(f"{message}\n  {place}:\n    {source.rstrip()}\n    {indent}^")


class VerifierError(HlofuseError):
    """An invalid module. `program` is its text with the message under the offending instruction."""

    def __init__(self, message: str, *, program: str | None = None):
        self.program = program
        super().__init__(message if program is None else f"{message}\n{program}")


class TargetError(HlofuseError, ValueError):
    """A command-line TARGET that cannot be loaded, with the reason."""

    def __init__(self, target: str, reason: str):
        self.target = target
        self.reason = reason
        super().__init__(
            f"Cannot load TARGET {target!r}: {reason}\n"
            "A TARGET is 'module:function', 'file.py:function' or a file of HLO text."
        )
