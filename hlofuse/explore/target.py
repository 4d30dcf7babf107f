"""What a person names on the command line: `module:function`, `file.py:function`, or a file of HLO text.

Arguments of a function come from the command line, from its attribute `example_args`, from the file's `EXAMPLE_ARGS`
(a dict by function name, or a tuple for all), or from the file's `CATALOG` of workloads.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import HlofuseError, TargetError
from ..hlo.module import Module
from ..hlo.parser import parse_module
from .argument_spec import parse_argument
from .workloads import load_file


class TraceError(HlofuseError):
    """The user's function raised while it was traced; the message has its error and the line."""


@dataclass(frozen=True)
class Target:
    """Either `function` with `args`, or `module`."""

    name: str
    function: Callable | None = None
    args: tuple[Any, ...] = ()
    module: Module | None = None


def load_target(text: str, argument_specs: Sequence[str] | None = None, size: str = "full") -> Target:
    """Raises TargetError, ParseError or ArgumentSpecError. `size` chooses among a catalog's arguments."""
    place, separator, attribute = text.rpartition(":")
    if not separator:
        if argument_specs:
            raise TargetError(text, "arguments were given, but it names no function")
        return _load_hlo(text)
    if not place or not attribute:
        raise TargetError(text, "a name is missing beside the colon")
    module = _import(text, place)
    function = _find(text, module, attribute)
    if argument_specs is None:
        return Target(attribute, _report_errors(function), _example_arguments(text, module, attribute, function, size))
    values = [parse_argument(spec) for spec in argument_specs]
    args = tuple(v for v in values if not _is_static(v))
    return Target(attribute, _report_errors(_without_static(function, values)), args)


def _load_hlo(text: str) -> Target:
    path = Path(text)
    if path.suffix == ".py":
        raise TargetError(text, f"which function of it? Write {text}:FUNCTION")
    try:
        content = path.read_text()
    except UnicodeDecodeError:
        raise TargetError(text, "the file is not text") from None
    except OSError as error:
        raise TargetError(text, f"cannot be read as a file: {error.strerror}") from None
    return Target(path.stem, module=parse_module(content, file=text))


def _import(text: str, place: str) -> Any:
    is_file = place.endswith(".py") or os.sep in place
    try:
        if is_file:
            return load_file(Path(place))
        if "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        return importlib.import_module(place)
    except FileNotFoundError as error:
        raise TargetError(text, str(error)) from None
    except ModuleNotFoundError as error:
        hint = f"; is it the file {place}.py?" if Path(f"{place}.py").exists() else ""
        raise TargetError(text, f"{error}{hint}") from None
    except SyntaxError as error:
        raise TargetError(text, f"it has a syntax error: {error}") from None
    except (Exception, SystemExit) as error:
        raise TargetError(text, f"importing it raised {_describe(error)}") from None


def _find(text: str, module: Any, attribute: str) -> Callable:
    found = module
    for name in attribute.split("."):
        if not hasattr(found, name):
            functions = [n for n, v in vars(found).items() if callable(v) and not n.startswith("_")]
            close = difflib.get_close_matches(name, functions, n=1)
            listed = ", ".join(functions[:12]) or "no functions"
            hint = f"; did you mean {close[0]!r}?" if close else f"; it has {listed}"
            raise TargetError(text, f"there is no function {name!r}{hint}")
        found = getattr(found, name)
    if not callable(found):
        raise TargetError(text, f"{attribute!r} is no function, but of type {type(found).__name__}")
    return found


def _example_arguments(text: str, module: Any, attribute: str, function: Callable, size: str) -> tuple[Any, ...]:
    if (own := getattr(function, "example_args", None)) is not None:
        return tuple(own() if callable(own) else own)
    examples = getattr(module, "EXAMPLE_ARGS", None)
    if isinstance(examples, Mapping):
        examples = examples.get(attribute)
    if examples is not None:
        return tuple(examples() if callable(examples) else examples)
    catalog = getattr(module, "CATALOG", None)
    if isinstance(catalog, Mapping) and attribute in catalog:
        return tuple(catalog[attribute].avals(size))
    raise TargetError(text, f"it has no example arguments ({attribute}.example_args or EXAMPLE_ARGS[{attribute!r}]); "
                            "give them, for example --args 'f32[8,128]' 's32[]'")  # fmt: skip


def _is_static(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def _without_static(function: Callable, values: Sequence[Any]) -> Callable:
    """`function` of its other arguments, the static ones given."""
    if not any(map(_is_static, values)):
        return function

    @functools.wraps(function, updated=())
    def of_the_others(*args: Any) -> Any:
        others = iter(args)
        return function(*(v if _is_static(v) else next(others) for v in values))

    return of_the_others


def _report_errors(function: Callable) -> Callable:
    """`function`, with what it raises as a TraceError: an error of the user's, not of this package."""

    @functools.wraps(function, updated=())
    def traced(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise TraceError(f"Tracing {traced.__name__!r} raised {_describe(error)}") from error

    traced.__name__ = getattr(function, "__name__", type(function).__name__)
    return traced


def _describe(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
    place = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    message = str(error).strip().split("\n\n")[0]
    return f"{type(error).__name__}: {message}{place}"


def _is_users(filename: str) -> bool:
    return not filename.startswith("<") and not {"jax", "hlofuse", "importlib"}.intersection(Path(filename).parts[:-1])
