"""The text that stands before every kernel: scalar functions with HLO's meaning, and the dialect's own spellings."""
from __future__ import annotations

import functools
import re
from importlib.resources import files

_FILES = {"cuda": ("cuda.h", "scalar.h"), "host": ("host.h", "scalar.h"),
          "simt": ("simt_machine.h", "simt_device.h", "cuda.h", "scalar.h")}
_BLOCK_FILES = {"cuda": ("memory_cuda.h", "block_cuda.h"), "host": ("block_host.h",),
                "simt": ("simt_memory.h", "block_cuda.h")}
_WRITTEN_IN = ("cuda", "host")     # SIMT's text is CUDA's
_WORD = re.compile(r"(?<![.\w])[A-Za-z_]\w*")
_DIRECTIVE = re.compile(r"^\s*#.*$", re.MULTILINE)
_MACRO = re.compile(r"^\s*#\s*define\s+(\w+)(\([^)]*\))?(.*)$", re.MULTILINE)
_BRACES = re.compile(r"\{[^{}]*\}")
_PARENTHESES = re.compile(r"\([^()]*\)")
_DECLARED = re.compile(r"([A-Za-z_]\w*)\s*@|\bstruct\s+(\w+)|\btypedef\b[^;]*?(\w+)\s*;")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@functools.cache
def prelude(dialect: str) -> str:
    """The scalar functions of a dialect, "cuda", "host" or "simt", as C++ text."""
    if dialect not in _FILES:
        raise ValueError(f"unknown dialect {dialect!r}; there are {', '.join(sorted(_FILES))}")
    return _texts(dialect, _FILES[dialect])


@functools.cache
def block_prelude(dialect: str) -> str:
    """What a block of the dialect is: threads, lanes, barriers and the memory qualifiers."""
    return _texts(dialect, _BLOCK_FILES[dialect])


def prelude_file(name: str) -> str:
    """The text of one of the files beside this one."""
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


def simt_program_files() -> list[str]:
    """Where the files lie that make a program of kernels under SIMT, in their order."""
    machine, *rest = _FILES["simt"]
    return [str(files(__name__).joinpath(name))
            for name in (machine, "simt_machine.cpp", *rest, *_BLOCK_FILES["simt"], "simt_program.h")]


def _texts(dialect: str, names: tuple[str, ...]) -> str:
    """The files one after the other; SIMT's reports name each with its own lines."""
    return "\n".join(f'#line 1 "{name}"\n{prelude_file(name)}' if dialect == "simt" else prelude_file(name)
                     for name in names)


@functools.cache
def reserved_names() -> frozenset[str]:
    """Names that a kernel must not give to its variables: C++'s words, what the preludes declare, and their macros with
    the words that these put into a kernel. What a prelude names inside its functions is out of sight."""
    found = set(_CPP_WORDS)
    for dialect in _WRITTEN_IN:
        text = _COMMENT.sub("", prelude(dialect) + block_prelude(dialect)).replace("\\\n", " ")
        for name, parameters, body in _MACRO.findall(text):
            found.add(name)
            found |= _declared(body) if "{" in body else {*_WORD.findall(body)} - {*_WORD.findall(parameters)}
        found |= _declared(_DIRECTIVE.sub("", text))
    return frozenset(found)


def _declared(text: str) -> set[str]:
    """The functions and types that a text declares outside of braces and parentheses."""
    for inner, mark in ((_BRACES, ";"), (_PARENTHESES, "@")):
        shorter = inner.sub(mark, text)
        while shorter != text:
            text, shorter = shorter, inner.sub(mark, shorter)
    return {name for names in _DECLARED.findall(text) for name in names if name}


_CPP_WORDS = frozenset("""
alignas alignof and and_eq asm auto bitand bitor bool break case catch char class compl concept const consteval
constexpr constinit const_cast continue co_await co_return co_yield decltype default delete do double dynamic_cast else
enum explicit export extern false float for friend goto if inline int long mutable namespace new noexcept not not_eq
nullptr operator or or_eq private protected public register reinterpret_cast requires return short signed sizeof static
static_assert static_cast struct switch template this thread_local throw true try typedef typeid typename union unsigned
using virtual void volatile wchar_t while xor xor_eq main
""".split())
