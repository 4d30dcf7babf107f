"""The text that stands before every kernel: scalar functions with HLO's meaning, and the dialect's own spellings."""
from __future__ import annotations

import functools
import re
from importlib.resources import files

_FILES = {"cuda": ("cuda.h", "scalar.h"), "host": ("host.h", "scalar.h")}
_WORD = re.compile(r"[A-Za-z_]\w*")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@functools.cache
def prelude(dialect: str) -> str:
    """The scalar functions of a dialect, "cuda" or "host", as C++ text."""
    if dialect not in _FILES:
        raise ValueError(f"unknown dialect {dialect!r}; there are {', '.join(sorted(_FILES))}")
    return "\n".join(files(__name__).joinpath(name).read_text(encoding="utf-8") for name in _FILES[dialect])


@functools.cache
def block_prelude(dialect: str) -> str:
    """What a block of the dialect is: threads, lanes, barriers and the memory qualifiers."""
    return files(__name__).joinpath(f"block_{dialect}.h").read_text(encoding="utf-8")


@functools.cache
def reserved_names() -> frozenset[str]:
    """Every word that the preludes use, C++'s own among them: names that a kernel must not give to its variables."""
    texts = [part(dialect) for dialect in _FILES for part in (prelude, block_prelude)]
    words = {word for text in texts for word in _WORD.findall(_COMMENT.sub("", text))}
    return frozenset(words) | _CPP_WORDS


_CPP_WORDS = frozenset("""
alignas alignof and and_eq asm auto bitand bitor bool break case catch char class compl concept const consteval
constexpr constinit const_cast continue co_await co_return co_yield decltype default delete do double dynamic_cast else
enum explicit export extern false float for friend goto if inline int long mutable namespace new noexcept not not_eq
nullptr operator or or_eq private protected public register reinterpret_cast requires return short signed sizeof static
static_assert static_cast struct switch template this thread_local throw true try typedef typeid typename union unsigned
using virtual void volatile wchar_t while xor xor_eq main
""".split())
