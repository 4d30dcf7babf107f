"""Arguments of a function, written as text: `f32[8,128]`, `s32[]`, `(f32[2], f32[3])`, `{w: f32[4], b: f32[]}`, `3`.

Types have HLO's names or NumPy's; tuples and dicts nest; a plain number, `true` or `false` is passed as that Python
value, a static argument. `key[]` is a random key.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import HlofuseError
from ..hlo.shape import FUSIBLE, dtype_of

_NUMBER = r"[+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)"
_TOKEN = re.compile(rf"\s*(?:(?P<number>{_NUMBER})|(?P<word>[A-Za-z_]\w*)|(?P<mark>[][(){{}},:]))")
_ALIASES = {"bool": "pred", "bfloat16": "bf16", "complex64": "c64", "complex128": "c128"}
_ALIASES |= {f"float{bits}": f"f{bits}" for bits in (16, 32, 64)}
_ALIASES |= {f"{sign}int{bits}": f"{'u' if sign else 's'}{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_ALIASES |= {f"i{bits}": f"s{bits}" for bits in (8, 16, 32, 64)}


class ArgumentSpecError(HlofuseError, ValueError):
    """A malformed argument; the message shows it with a caret under the place."""

    def __init__(self, message: str, text: str, position: int):
        self.position = position
        super().__init__(f"{message}\n    {text}\n    {' ' * position}^")


def parse_argument(text: str) -> Any:
    """A `jax.ShapeDtypeStruct`, a Python number or bool, or a tuple or dict of such."""
    reader = _Reader(text)
    value = reader.argument()
    if reader.kind != "end":
        raise reader.error("expected the end of the argument")
    return value


class _Reader:
    """One token of look-ahead: `kind` ("number", "word", "mark" or "end"), `token` and its `start`."""

    def __init__(self, text: str):
        self._text = text
        self._end = 0
        self.advance()

    def advance(self) -> str:
        """Move on; the token that was current."""
        previous = getattr(self, "token", "")
        match = _TOKEN.match(self._text, self._end)
        if match is not None:
            self.kind = match.lastgroup or ""
            self.token = match[self.kind]
            self.start = match.start(self.kind)
            self._end = match.end()
            return previous
        self.start = len(self._text) - len(self._text[self._end :].lstrip())
        self.kind, self.token = "end", ""
        if self.start < len(self._text):
            raise self.error(f"unexpected {self._text[self.start]!r}")
        return previous

    def error(self, message: str) -> ArgumentSpecError:
        return ArgumentSpecError(f"Bad argument: {message}", self._text, self.start)

    def expect(self, mark: str) -> None:
        if self.token != mark:
            raise self.error(f"expected {mark!r}")
        self.advance()

    def accept(self, mark: str) -> bool:
        found = self.token == mark
        if found:
            self.advance()
        return found

    def argument(self) -> Any:
        if self.accept("("):
            return self.tuple()
        if self.accept("{"):
            return self.dict()
        if self.kind == "number":
            text = self.advance()
            return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
        if self.token in ("true", "false", "True", "False"):
            return self.advance().lower() == "true"
        if self.kind == "word":
            return self.array()
        raise self.error("expected a type such as f32[8,128], a number, (...) or {...}")

    def tuple(self) -> Any:
        items: list[Any] = []
        while not self.accept(")"):
            items.append(self.argument())
            if self.token != ")":
                self.expect(",")
        return tuple(items)

    def dict(self) -> Any:
        items: dict[str, Any] = {}
        while not self.accept("}"):
            if self.kind != "word":
                raise self.error("expected a name")
            name = self.advance()
            self.expect(":")
            items[name] = self.argument()
            if self.token != "}":
                self.expect(",")
        return items

    def array(self) -> Any:
        dtype = self.element_type()
        self.advance()
        self.expect("[")
        dims: list[int] = []
        while not self.accept("]"):
            if self.kind != "number" or not self.token.isdigit():
                raise self.error("expected a dimension, a whole number")
            dims.append(int(self.advance()))
            if self.token != "]":
                self.expect(",")
        return jax.ShapeDtypeStruct(tuple(dims), dtype)

    def element_type(self) -> Any:
        if self.token == "key":
            return jax.eval_shape(jax.random.key, 0).dtype
        name = _ALIASES.get(self.token, self.token)
        try:
            dtype = dtype_of(name)
        except KeyError:
            types = ", ".join(sorted(FUSIBLE))
            raise self.error(f"unknown element type {self.token!r}; there are {types}, ...") from None
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise self.error(f"{self.token} needs 64-bit types: set JAX_ENABLE_X64=1")
        return jnp.dtype(dtype)
