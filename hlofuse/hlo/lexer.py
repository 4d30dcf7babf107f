"""The characters of HLO text: finds names, shapes, values and where a mistake is; knows nothing of instructions.

A `Scanner` is a position in the text. Each method reads one thing, moves behind it, or raises a `ParseError` that says
what was expected there. Comments are blanked out first, so that columns stay true.
"""
from __future__ import annotations

import re
from typing import NoReturn

from hlofuse.errors import ParseError
from hlofuse.hlo.shape import TOKEN, AnyShape, Shape, TupleShape, dtype_of

NAME = r"[A-Za-z_][\w.\-]*"
Layout = tuple[int, ...]  # minor-to-major, as in f32[2,3]{1,0}

_COMMENT = re.compile(r'"(?:[^"\\]|\\.)*"|/\*.*?\*/|//[^\n]*', re.DOTALL)
_SPACE = re.compile(r"\s*")
_ARRAY = re.compile(r"\s*([a-z][a-z0-9]*)\[([^\[\]]*)\](?:\{([^{}]*)\})?")
_NAME = re.compile(r"\s*%?(" + NAME + ")")
_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[{}()\[\]]', re.DOTALL)
_CLOSING = {"{": "}", "(": ")", "[": "]"}
_PLAIN_VALUE = re.compile(r"\s*([^\s,{}()\[\]\"]+)")


class Scanner:
    """Reads from `text` at `position`."""

    def __init__(self, text: str, file: str | None = None):
        self.source = text
        self.file = file
        self.text = _without_comments(text)
        self.position = 0
        self._shapes: dict[str, tuple[AnyShape, Layout | None]] = {}

    def fail(self, message: str, position: int | None = None) -> NoReturn:
        """Raises a `ParseError` that shows the line; at the next character that is not a space by default."""
        if position is None:
            position = self.skip_space()
        position = min(position, len(self.source))
        start = self.source.rfind("\n", 0, position) + 1
        end = self.source.find("\n", position)
        line = self.source[start:] if end < 0 else self.source[start:end]
        number = self.source.count("\n", 0, position) + 1
        raise ParseError(message, line=number, column=position - start + 1, source=line, file=self.file)

    def skip_space(self) -> int:
        match = _SPACE.match(self.text, self.position)
        assert match is not None
        self.position = match.end()
        return self.position

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """What the pattern matches here, or None without moving."""
        match = pattern.match(self.text, self.position)
        if match is not None:
            self.position = match.end()
        return match

    def peek(self) -> str:
        """The next character that is not a space; "" at the end."""
        return self.text[self.skip_space():self.position + 1]

    def take(self, punctuation: str) -> bool:
        """Moves behind the punctuation if it is next."""
        if self.text.startswith(punctuation, self.skip_space()):
            self.position += len(punctuation)
            return True
        return False

    def expect(self, punctuation: str, where: str) -> None:
        if not self.take(punctuation):
            self.fail(f"expected {punctuation!r} {where}")

    def name(self, what: str) -> str:
        match = self.match(_NAME)
        if match is None:
            self.fail(f"expected {what}")
        return match[1]

    def balanced(self) -> str:
        """A bracketed text with what it holds: `{...}` or `(...)`, strings within respected."""
        start = self.skip_space()
        opened: list[int] = []
        for match in _BRACKET.finditer(self.text, start):
            if match[0] in _CLOSING:
                opened.append(match.start())
            elif match[0][0] != '"':
                if _CLOSING[self.text[opened[-1]]] != match[0]:
                    break
                opened.pop()
                if not opened:
                    self.position = match.end()
                    return self.text[start:self.position]
        self.fail(f"this {self.text[opened[-1]]!r} is never closed", opened[-1])

    def value(self) -> str:
        """An attribute's value as raw text: a word, a string or something in braces."""
        match = self.match(_PLAIN_VALUE)
        if match is not None:
            return match[1]
        following = self.peek()
        if following == '"':
            string = _BRACKET.match(self.text, self.position)
            if string is None:
                self.fail("this string is never closed")
            self.position = string.end()
            return string[0]
        if following and following in "{[(":
            return self.balanced()
        self.fail("expected a value")

    def shape(self) -> tuple[AnyShape, Layout | None]:
        """A shape, and its layout where that is an array's and not row-major."""
        match = self.match(_ARRAY)
        if match is not None:
            found = self._shapes.get(match[0])
            if found is None:
                found = self._shapes[match[0]] = self._array(match)
            return found
        if not self.take("("):
            self.fail("expected a shape such as f32[8,16]{1,0}")
        elements: list[AnyShape] = []
        while not self.take(")"):
            if elements:
                self.expect(",", "or ')' in a tuple shape")
            elements.append(self.shape()[0])
        return TupleShape(tuple(elements)), None

    def _array(self, match: re.Match[str]) -> tuple[AnyShape, Layout | None]:
        element_type, dims_text, layout_text = match.groups()
        if element_type == "token":
            return TOKEN, None
        if not is_element_type(element_type):
            self.fail(f"unknown element type {element_type!r}", match.start(1))
        try:
            dims = tuple(int(d) for d in dims_text.split(",")) if dims_text.strip() else ()
        except ValueError:
            is_dynamic = "<=" in dims_text or "?" in dims_text
            reason = "dynamic sizes are not supported" if is_dynamic else "a list of sizes is expected"
            self.fail(f"[{dims_text}]: {reason}", match.start(2))
        # Behind a colon follow tiles and memory spaces, which say nothing of the values.
        order = (layout_text or "").split(":")[0].strip()
        if not order:
            return Shape(element_type, dims), None
        try:
            layout = tuple(int(d) for d in order.split(","))
        except ValueError:
            self.fail(f"{{{order}}} is not a layout", match.start(3))
        if sorted(layout) != list(range(len(dims))):
            self.fail(f"layout {{{order}}} is not a permutation of the {len(dims)} dimensions", match.start(3))
        return Shape(element_type, dims), None if _is_row_major(layout) else layout


def _is_row_major(layout: Layout) -> bool:
    return layout == tuple(range(len(layout) - 1, -1, -1))


def _without_comments(text: str) -> str:
    if "/*" not in text and "//" not in text:
        return text
    return _COMMENT.sub(lambda m: m[0] if m[0][0] == '"' else re.sub(r"[^\n]", " ", m[0]), text)


def is_element_type(name: str) -> bool:
    """Whether `name` is a type such as `f32`."""
    try:
        dtype_of(name)
    except KeyError:
        return False
    return True
