"""HLO text, as XLA writes and reads it.

Names are given here: an instruction's hint, made a valid and unique identifier, in post-order; so text is stable, and
text that is parsed and printed again is the same text. Constants are printed in full unless a limit is given, which is
for people only: nothing reads `constant({...})` back.
"""
from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from hlofuse.hlo.attributes import COMPUTATION_ATTRS, FORMATS, TEXT_NAMES, printed_attrs, quote
from hlofuse.hlo.lexer import is_element_type
from hlofuse.hlo.literals import format_literal, has_nan_real_part
from hlofuse.hlo.module import NO_METADATA, Computation, Instruction, Metadata, Module
from hlofuse.hlo.opcode import OPCODES
from hlofuse.hlo.shape import Shape

Fusions = Literal["fusion", "call"]

# Words that XLA's lexer takes for something else than a name, where no % marks it.
_RESERVED = re.compile(
    r"HloModule|ENTRY|ROOT|FileNames|FunctionNames|FileLocations|StackFrames|true|false|inf|nan|maximal|replicated|manual"
    r"|unreduced|unknown|last_tile_dim_replicate|shard_as|shard_like|token|opaque|[su]1")
_SUFFIX = re.compile(r"\.\d+$")


class Names:
    """Gives each key a unique identifier: `add`, `add.1`, `add.2` …"""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._next: dict[str, int] = {}

    def unique(self, hint: str) -> str:
        name = identifier(hint)
        if name in self._taken:
            base = _SUFFIX.sub("", name)
            number = self._next.get(base, 1)
            while f"{base}.{number}" in self._taken:
                number += 1
            self._next[base] = number + 1
            name = f"{base}.{number}"
        self._taken.add(name)
        return name


def identifier(hint: str) -> str:
    """A name that XLA reads, as close to `hint` as can be."""
    name = re.sub(r"[^A-Za-z0-9_.\-]", "_", hint)
    if not name or not (name[0].isalpha() or name[0] == "_"):
        name = "_" + name
    return name + "_" if _RESERVED.fullmatch(name) or is_element_type(name) else name


def instruction_names(computation: Computation) -> dict[Instruction, str]:
    """The name of every instruction in the text of its computation."""
    names = Names()
    return {i: names.unique(i.name or i.opcode) for i in computation.instructions}


def computation_names(module: Module) -> dict[Computation, str]:
    """The name of every computation in the text of the module."""
    names = Names()
    return {c: names.unique(c.name or "computation") for c in module.computations}


@dataclass(frozen=True)
class _Style:
    """What differs between the printed forms."""

    fusions: Fusions = "fusion"
    metadata: bool = True
    max_elements: int | None = None
    notes: Mapping[Instruction, str] = field(default_factory=dict)


def print_module(module: Module, *, fusions: Fusions = "fusion", metadata: bool = True,
                 max_elements: int | None = None, notes: Mapping[Instruction, str] | None = None) -> str:
    """The text of a module.

    fusions: "call" writes a fusion as a call (and a bitcast as a reshape), for running the text in XLA, whose CPU
      backend refuses most hand-made fusions.
    max_elements: constants with more are written as `{...}`, for people.
    notes: a message to put under an instruction's line.
    """
    style = _Style(fusions, metadata, max_elements, notes or {})
    names = computation_names(module)
    lines = [f"HloModule {identifier(module.name)}, entry_computation_layout={{{_signature(module.entry)}}}"]
    for computation in module.computations:
        entry = "ENTRY " if computation is module.entry else ""
        lines += ["", f"{entry}{names[computation]} {{", *_body(computation, names, style), "}"]
    return "\n".join(lines) + "\n"


def print_computation(computation: Computation, *, fusions: Fusions = "fusion", metadata: bool = True,
                      max_elements: int | None = None) -> str:
    """The text of one computation; what it calls is only named."""
    called = {c: identifier(c.name) for i in computation.instructions if i.attrs for c in i.called}
    body = _body(computation, called, _Style(fusions, metadata, max_elements))
    return "\n".join([f"{identifier(computation.name)} {{", *body, "}"]) + "\n"


def print_instruction(instruction: Instruction) -> str:
    """One short line for people: hints as names, no metadata, no large constant."""
    names = {i: identifier(i.name or i.opcode) for i in (*instruction.operands, *instruction.control, instruction)}
    called = {c: identifier(c.name) for c in instruction.called}
    return _line(instruction, names, called, _Style(metadata=False, max_elements=8))


def _signature(computation: Computation) -> str:
    return f"({', '.join(str(p.shape) for p in computation.parameters)})->{computation.root.shape}"


def _body(computation: Computation, called: Mapping[Computation, str], style: _Style) -> Iterator[str]:
    names = instruction_names(computation)
    taken = set(names.values())
    for instruction in computation.instructions:
        root = "ROOT " if instruction is computation.root else ""
        if instruction.opcode == "constant" and has_nan_real_part(instruction.literal):
            yield from _complex_constant(instruction, names[instruction], taken, root)
        else:
            yield f"  {root}{_line(instruction, names, called, style)}"
        note = style.notes.get(instruction)
        if note is not None:
            yield from (f"  ^^^ {line}" for line in note.splitlines())


def _complex_constant(instruction: Instruction, name: str, taken: set[str], root: str) -> Iterator[str]:
    """XLA's parser reads (nan, 0) as (nan, nan); so such a constant is written as its two parts, which our parser
    joins again by their names."""
    part = Shape("f32" if instruction.element_type == "c64" else "f64", instruction.dims)
    parts = []
    for suffix, values in (("real_part", instruction.literal.real), ("imag_part", instruction.literal.imag)):
        parts.append(f"{name}.{suffix}")
        assert parts[-1] not in taken
        yield f"  {parts[-1]} = {part} constant({format_literal(np.asarray(values), part.element_type)})"
    yield f"  {root}{name} = {instruction.shape} complex({', '.join(parts)})"


def _line(instruction: Instruction, names: Mapping[Instruction, str], called: Mapping[Computation, str],
          style: _Style) -> str:
    opcode, attrs = _spelling(instruction, style)
    if opcode == "constant":
        inside = _constant(instruction, style)
    elif opcode == "parameter":
        inside = str(attrs["parameter_number"])
    else:
        operands = instruction.operands[:1] if opcode == "copy" else instruction.operands
        inside = ", ".join([names[o] for o in operands])
    parts = [f"{names[instruction]} = {instruction.shape} {opcode}({inside})"]
    parts += [_attribute(key, attrs[key], called, instruction) for key in _in_order(opcode, attrs)]
    if instruction.control:
        parts.append(f"control-predecessors={{{', '.join(names[c] for c in instruction.control)}}}")
    if style.metadata and instruction.metadata != NO_METADATA:
        parts.append(_metadata(instruction.metadata))
    return ", ".join(parts)


def _spelling(instruction: Instruction, style: _Style) -> tuple[str, dict[str, Any]]:
    """The opcode and attributes to write: the instruction's own, but for what XLA would not take."""
    opcode, attrs = instruction.opcode, printed_attrs(instruction)
    if style.fusions == "call" and opcode == "fusion":
        return "call", {"to_apply": attrs["calls"]}
    if style.fusions == "call" and opcode == "bitcast" and _keeps_type(instruction):
        return "reshape", {}  # XLA refuses bitcasts that are not its own; with row-major layouts it is one
    if opcode == "pad" and not attrs["padding"]:
        return "copy", {}  # a pad of a scalar, which changes nothing, has no text
    return opcode, attrs


def _keeps_type(instruction: Instruction) -> bool:
    operand, result = instruction.operands[0].shape, instruction.shape
    return isinstance(operand, Shape) and isinstance(result, Shape) and operand.element_type == result.element_type


def _constant(instruction: Instruction, style: _Style) -> str:
    if style.max_elements is not None and instruction.literal.size > style.max_elements:
        return "{...}"
    return format_literal(instruction.literal, instruction.element_type)


def _in_order(opcode: str, attrs: Mapping[str, Any]) -> Iterable[str]:
    """The table's order, then the others in their own."""
    known = OPCODES[opcode].attrs if opcode in OPCODES else ()
    return [key for key in dict.fromkeys((*known, *attrs)) if key in attrs and key not in _INSIDE]


_INSIDE = frozenset({"literal", "parameter_number"})  # written between the parentheses


def _attribute(key: str, value: Any, called: Mapping[Computation, str], instruction: Instruction) -> str:
    if key == "branch_computations" and len(value) == 2 and _has_predicate(instruction):
        return f"true_computation={called[value[0]]}, false_computation={called[value[1]]}"
    if isinstance(value, Computation):
        return f"{key}={called[value]}"
    if key in COMPUTATION_ATTRS:
        return f"{key}={{{', '.join(called[c] for c in value)}}}"
    text = FORMATS[key].write(value) if key in FORMATS else value
    return f"{TEXT_NAMES.get(key, key)}={text}"


def _has_predicate(instruction: Instruction) -> bool:
    shape = instruction.operands[0].shape
    return isinstance(shape, Shape) and shape.element_type == "pred"


def _metadata(metadata: Metadata) -> str:
    fields = []
    if metadata.op_type:
        fields.append(f"op_type={quote(metadata.op_type)}")
    if metadata.op_name:
        fields.append(f"op_name={quote(metadata.op_name)}")
    if metadata.source_file:
        fields.append(f"source_file={quote(metadata.source_file)}")
    if metadata.source_line:
        fields.append(f"source_line={metadata.source_line}")
    return f"metadata={{{' '.join(fields)}}}"
