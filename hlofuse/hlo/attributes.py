"""How each attribute is written in HLO text: one attribute is one row, shared by printer, parser and comparison.

An attribute without a row is foreign text and kept as it stands, a `str`: `sharding={...}`, `backend_config={...}`.
Attributes that hold computations are written by the printer and parser, which know the names.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hlofuse.hlo.module import Computation, Instruction, WindowDimension

# Facts that an instruction carries for hlofuse itself. They have no text, and two programs are equal without them.
UNPRINTED = frozenset({"eqn", "plan", "scan"})

COMPUTATION_ATTRS = frozenset({"to_apply", "calls", "condition", "body", "select", "scatter", "branch_computations",
                               "called_computations", "true_computation", "false_computation"})

# The values that attributes have where the text does not say. The parser fills them in, the printer leaves them out.
DEFAULTS: dict[str, Mapping[str, Any]] = {
    "dot": {"lhs_batch_dims": (), "rhs_batch_dims": ()},
    "gather": {"operand_batching_dims": (), "start_indices_batching_dims": (), "indices_are_sorted": False},
    "scatter": {"input_batching_dims": (), "scatter_indices_batching_dims": (), "indices_are_sorted": False,
                "unique_indices": False},
    "sort": {"is_stable": False},
    "convolution": {"feature_group_count": 1, "batch_group_count": 1, "window": ()},
    "reduce-window": {"window": ()},
    "triangular-solve": {"left_side": False, "lower": False, "unit_diagonal": False, "transpose_a": "NO_TRANSPOSE"},
    "cholesky": {"lower": False},
    "custom-call": {"has_side_effect": False},
}

# XLA's name in text of an attribute that has a shorter one here.
TEXT_NAMES = {"has_side_effect": "custom_call_has_side_effect"}
ATTR_NAMES = {text: name for name, text in TEXT_NAMES.items()}


@dataclass(frozen=True)
class Format:
    """`read` raises `ValueError` for text that is not of this form; `example` completes "expected … such as"."""

    example: str
    write: Callable[[Any], str]
    read: Callable[[str], Any]


def _read_bool(text: str) -> bool:
    return {"true": True, "false": False, "1": True, "0": False}[text]


def _write_dims(dims: Any) -> str:
    return "{" + ",".join(map(str, dims)) + "}"


def _read_dims(text: str) -> tuple[int, ...]:
    return tuple(map(int, _items(text)))


def _items(text: str) -> list[str]:
    """The comma-separated items within braces."""
    if not (text.startswith("{") and text.endswith("}")):
        raise ValueError(text)
    inner = text[1:-1].strip()
    return [item.strip() for item in inner.split(",")] if inner else []


def _read_word(text: str) -> str:
    if not re.fullmatch(r"[\w\-?>]+", text):
        raise ValueError(text)
    return text


_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}
_UNESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


def quote(text: str) -> str:
    return '"' + "".join(_ESCAPES.get(c, c) for c in text) + '"'


def unquote(text: str) -> str:
    if len(text) < 2 or text[0] != '"' or text[-1] != '"':
        raise ValueError(text)
    return re.sub(r"\\(.)", lambda m: _UNESCAPES.get(m[1], m[1]), text[1:-1], flags=re.DOTALL)


def _write_slices(slices: Any) -> str:
    return "{" + ", ".join(f"[{a}:{b}]" if s == 1 else f"[{a}:{b}:{s}]" for a, b, s in slices) + "}"


_SLICE = re.compile(r"\[\s*(\d+)\s*:\s*(\d+)\s*(?::\s*(\d+)\s*)?\]")


def _read_slices(text: str) -> tuple[tuple[int, int, int], ...]:
    slices = []
    for item in _items(text):
        match = _SLICE.fullmatch(item)
        if match is None:
            raise ValueError(item)
        slices.append((int(match[1]), int(match[2]), int(match[3] or 1)))
    return tuple(slices)


def _write_padding(padding: Any) -> str:
    return "x".join(f"{low}_{high}" + (f"_{interior}" if interior else "") for low, high, interior in padding)


def _read_padding(text: str) -> tuple[tuple[int, int, int], ...]:
    padding = []
    for axis in text.split("x"):
        low, high, *interior = map(int, axis.split("_"))
        padding.append((low, high, interior[0] if interior else 0))
    return tuple(padding)


def _write_window(window: tuple[WindowDimension, ...]) -> str:
    fields = [
        ("size", [str(w.size) for w in window], bool(window)),
        ("stride", [str(w.stride) for w in window], any(w.stride != 1 for w in window)),
        ("pad", [f"{w.pad_low}_{w.pad_high}" for w in window], any(w.pad_low or w.pad_high for w in window)),
        ("lhs_dilate", [str(w.lhs_dilate) for w in window], any(w.lhs_dilate != 1 for w in window)),
        ("rhs_dilate", [str(w.rhs_dilate) for w in window], any(w.rhs_dilate != 1 for w in window)),
        ("rhs_reversal", [str(int(w.reversed)) for w in window], any(w.reversed for w in window)),
    ]
    return "{" + " ".join(f"{name}={'x'.join(values)}" for name, values, said in fields if said) + "}"


def _read_window(text: str) -> tuple[WindowDimension, ...]:
    if not (text.startswith("{") and text.endswith("}")):
        raise ValueError(text)
    fields = dict(item.split("=", 1) for item in text[1:-1].split())
    sizes = [int(n) for n in fields.pop("size").split("x")] if fields else []

    def column(name: str, default: int) -> list[int]:
        return [int(n) for n in fields.pop(name).split("x")] if name in fields else [default] * len(sizes)

    strides, lhs, rhs = column("stride", 1), column("lhs_dilate", 1), column("rhs_dilate", 1)
    reversals = column("rhs_reversal", 0)
    pads = [p[:2] for p in _read_padding(fields.pop("pad"))] if "pad" in fields else [(0, 0)] * len(sizes)
    if fields:
        raise ValueError(f"unknown window field {next(iter(fields))!r}")
    return tuple(WindowDimension(size, stride, low, high, left, right, bool(turn)) for
                 size, stride, (low, high), left, right, turn in
                 zip(sizes, strides, pads, lhs, rhs, reversals, strict=True))


def _read_words(text: str) -> tuple[str, ...]:
    return tuple(map(_read_word, _items(text)))


_INT = Format("2", str, int)
_BOOL = Format("true", lambda value: "true" if value else "false", _read_bool)
_DIMS = Format("{0,1}", _write_dims, _read_dims)
_WORD = Format("a word", str, _read_word)
_STRING = Format('a "string"', quote, unquote)

FORMATS: dict[str, Format] = {
    **dict.fromkeys(("index", "iota_dimension", "index_vector_dim", "exponent_bits", "mantissa_bits", "k",
                     "feature_group_count", "batch_group_count", "feature_index"), _INT),
    **dict.fromkeys(("indices_are_sorted", "unique_indices", "is_stable", "lower", "left_side", "unit_diagonal",
                     "has_side_effect", "largest"), _BOOL),
    **dict.fromkeys(("dimensions", "dynamic_slice_sizes", "lhs_batch_dims", "rhs_batch_dims", "lhs_contracting_dims",
                     "rhs_contracting_dims", "offset_dims", "collapsed_slice_dims", "start_index_map",
                     "operand_batching_dims", "start_indices_batching_dims", "slice_sizes", "update_window_dims",
                     "inserted_window_dims", "scatter_dims_to_operand_dims", "input_batching_dims",
                     "scatter_indices_batching_dims", "fft_length"), _DIMS),
    **dict.fromkeys(("kind", "fft_type", "transpose_a", "algorithm"), _WORD),
    "custom_call_target": _STRING,
    "direction": Format("LT", str, _read_word),
    "type": Format("TOTALORDER", str, _read_word),
    "dim_labels": Format("b01f_01io->b01f", str, _read_word),
    "slice": Format("{[0:8], [0:8:2]}", _write_slices, _read_slices),
    "padding": Format("1_1x0_0_1", _write_padding, _read_padding),
    "window": Format("{size=3x3 pad=1_1x1_1}", _write_window, _read_window),
    "operand_precision": Format("{highest,default}", lambda words: "{" + ",".join(words) + "}", _read_words),
}


def printed_attrs(instruction: Instruction) -> dict[str, Any]:
    """The attributes that the instruction's text states (what `structurally_equal` compares), without defaults."""
    if not instruction.attrs:
        return {}
    defaults = DEFAULTS.get(instruction.opcode, {})
    return {name: value for name, value in instruction.attrs.items()
            if name not in UNPRINTED and value is not None and not (name in defaults and defaults[name] == value)
            and _has_text(name, value) and not _is_usual(name, value)}


def _has_text(name: str, value: Any) -> bool:
    return name in FORMATS or isinstance(value, (str, Computation)) or name in (
        "literal", "parameter_number", "branch_computations", "called_computations")


def _is_usual(name: str, value: Any) -> bool:
    """What XLA understands anyway: a comparison in the order of its operands' type, default precision."""
    if name == "type":
        return value != "TOTALORDER"
    return name == "operand_precision" and all(word == "default" for word in value)
