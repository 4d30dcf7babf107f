"""Reads HLO text: ours, and what XLA writes (`as_text("hlo")`, compiled text, dump files with source tables).

Shapes become logical. Only a `bitcast` gives layouts a meaning, so one between layouts that are not row-major becomes
the transposes and the reshape that it stands for. A called computation stands before its callers, an operand before its
users. What is read is checked instruction by instruction, so that a mistake is shown where it stands.
"""
from __future__ import annotations

import difflib
import re
from types import MappingProxyType
from typing import Any, NoReturn

from hlofuse.hlo.attributes import ATTR_NAMES, COMPUTATION_ATTRS, DEFAULTS, FORMATS
from hlofuse.hlo.lexer import NAME, Layout, Scanner
from hlofuse.hlo.literals import LiteralError, parse_literal
from hlofuse.hlo.module import NO_ATTRS, NO_METADATA, Computation, Instruction, Metadata, Module
from hlofuse.hlo.opcode import OPCODES
from hlofuse.hlo.shape import AnyShape, Shape, TupleShape
from hlofuse.hlo.source_tables import SourceTables, read_metadata
from hlofuse.hlo.traverse import has_effect
from hlofuse.hlo.verifier import problem_with

_HEAD = re.compile(r"\s*(ROOT\s+)?%?(" + NAME + r")\s*=\s*")
_OPCODE = re.compile(r"\s*([a-z][a-z0-9\-]*)\(")
_OPERANDS = re.compile(r"([^()\[\]{}\"]*)\)")
_OPERAND = re.compile(r"\s*%?(" + NAME + r")\s*(?=[,)])")
_ATTRIBUTE = re.compile(r"\s*,\s*([A-Za-z_][\w\-]*)\s*=\s*")
_STABLEHLO = re.compile(r"(?=module\b)")
_MODULE = re.compile(r"\s*HloModule\s+%?([^\s,]+)")
_LINE = re.compile(r"[^\n]*")
_COMPUTATION = re.compile(r"\s*(ENTRY\s+)?%?(" + NAME + r")\s*(?=[{(])")
_REFERENCE = re.compile(r"%?(" + NAME + ")")


def parse_module(text: str, *, file: str | None = None) -> Module:
    """The module that `text` describes; a `ParseError` shows the line and column of a mistake.

    `parse_module(print_module(m))` is `m` again (see `structurally_equal`), but for what has no text: facts of
    hlofuse's own, and the equations of opaque instructions.
    """
    return _Parser(text, file).module()


class _Parser:
    def __init__(self, text: str, file: str | None):
        self.scan = Scanner(text, file)
        self.tables = SourceTables()
        self.computations: dict[str, Computation] = {}

    def module(self) -> Module:
        scan = self.scan
        head = scan.match(_MODULE)
        if head is None:
            hint = " (StableHLO? Ask JAX for .as_text('hlo'))" if scan.match(_STABLEHLO) else ""
            scan.fail(f"expected 'HloModule', a name, and then computations{hint}")
        scan.match(_LINE)  # layouts, aliases, partitions: nothing of the values
        self.tables.read(scan)
        entry: Computation | None = None
        while scan.peek():
            start = scan.position
            is_entry, computation = self.computation()
            if is_entry and entry is not None:
                scan.fail("a second ENTRY computation", start)
            entry = computation if is_entry else entry
        if entry is None:
            scan.fail("the module has no ENTRY computation")
        return Module(head[1], entry)

    def computation(self) -> tuple[bool, Computation]:
        scan = self.scan
        start = scan.skip_space()
        head = scan.match(_COMPUTATION)
        if head is None:
            scan.fail("expected a computation: a name and then '{'")
        name = head[2]
        if name in self.computations:
            scan.fail(f"a second computation named {name!r}", head.start(2))
        if scan.peek() == "(":
            scan.balanced()
            scan.expect("->", "and the result's shape behind the parameters")
            scan.shape()
        scan.expect("{", f"to open the computation {name!r}")
        body = _Body(self, name)
        while not scan.take("}"):
            body.instruction()
        while scan.take(","):  # execution_thread="main"
            scan.name("an attribute of the computation")
            scan.expect("=", "behind the attribute's name")
            scan.value()
        self.computations[name] = body.finish(start)
        return bool(head[1]), self.computations[name]


class _Body:
    """One computation while its instructions are read."""

    def __init__(self, parser: _Parser, name: str):
        self.parser = parser
        self.scan = parser.scan
        self.name = name
        self.named: dict[str, Instruction] = {}
        self.layouts: dict[str, Layout] = {}  # only those that are not row-major
        self.root: Instruction | None = None
        self.last: Instruction | None = None
        self.parameters: dict[int, Instruction] = {}
        self.effects: list[Instruction] = []

    def finish(self, start: int) -> Computation:
        root = self.root or self.last
        if root is None:
            self.scan.fail(f"computation {self.name!r} has no instructions", start)
        for number in range(len(self.parameters)):
            if number not in self.parameters:
                self.scan.fail(f"computation {self.name!r} has no parameter({number})", start)
        parameters = tuple(self.parameters[n] for n in range(len(self.parameters)))
        return Computation(self.name, parameters, root, tuple(self.effects))

    def instruction(self) -> None:
        scan = self.scan
        head = scan.match(_HEAD)
        if head is None:
            scan.fail("expected an instruction, 'name = shape opcode(operands)', or '}'")
        start, name = head.start(2), head[2]
        if name in self.named:
            scan.fail(f"a second instruction named {name!r} in this computation", start)
        shape, layout = scan.shape()
        if layout is not None:
            self.layouts[name] = layout
        match = scan.match(_OPCODE)
        if match is None:
            scan.fail("expected an opcode and '('")
        opcode = match[1]
        if opcode not in OPCODES and not opcode.endswith(("-start", "-update", "-done")):
            self.unknown_opcode(opcode, match.start(1))
        attrs: dict[str, Any] = {}
        operands, sources = self.inside(opcode, shape, attrs)
        control, metadata = self.attributes(opcode, attrs)
        instruction = Instruction(opcode, shape, operands, MappingProxyType(attrs) if attrs else NO_ATTRS, name,
                                  metadata, control)
        instruction = self.normalized(instruction, sources, layout)
        problem = problem_with(instruction)
        if problem is not None:
            scan.fail(problem, match.start(1))
        self.add(name, instruction, start, is_root=bool(head[1]))

    def add(self, name: str, instruction: Instruction, start: int, is_root: bool) -> None:
        self.named[name] = self.last = instruction
        if instruction.opcode == "parameter":
            number = instruction.attrs["parameter_number"]
            if number in self.parameters:
                self.scan.fail(f"a second parameter({number}) in this computation", start)
            self.parameters[number] = instruction
        if is_root:
            if self.root is not None:
                self.scan.fail("a second ROOT in this computation", start)
            self.root = instruction
        if has_effect(instruction):
            self.effects.append(instruction)

    def unknown_opcode(self, opcode: str, position: int) -> NoReturn:
        close = difflib.get_close_matches(opcode, OPCODES, n=1)
        self.scan.fail(f"unknown opcode {opcode!r}" + (f"; did you mean {close[0]!r}?" if close else ""), position)

    # --- between the parentheses ---------------------------------------------------------------------------------

    def inside(self, opcode: str, shape: AnyShape, attrs: dict[str, Any]) -> tuple[tuple[Instruction, ...], list[str]]:
        """The operands and their names; a literal or a parameter number goes into `attrs`."""
        if opcode == "constant":
            attrs["literal"] = self.literal(shape)
            return (), []
        if opcode == "parameter":
            position = self.scan.skip_space()
            text = self.scan.value()
            if not text.isdigit():
                self.scan.fail("expected the parameter's number", position)
            attrs["parameter_number"] = int(text)
            self.scan.expect(")", "behind the parameter's number")
            return (), []
        names = self.operand_names()
        try:
            return tuple([self.named[name] for name in names]), names
        except KeyError:
            self.unknown_operand(next(name for name in names if name not in self.named))

    def unknown_operand(self, name: str) -> NoReturn:
        inside = self.scan.text[self.operands_start:self.scan.position]
        match = re.search(rf"(?<![\w.\-]){re.escape(name)}(?![\w.\-])", inside)
        assert match is not None
        close = difflib.get_close_matches(name, self.named, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        self.scan.fail(f"unknown operand {name!r}: expected an instruction that stands above in this computation{hint}",
                       self.operands_start + match.start())

    def operand_names(self) -> list[str]:
        scan = self.scan
        self.operands_start = scan.position
        match = scan.match(_OPERANDS)
        if match is not None:  # names only, as nearly always
            names = [item.strip().lstrip("%") for item in match[1].split(",")]
            if len(names) == 1 and not names[0]:
                return []
            if all(names) and not any(" " in name or "\n" in name for name in names):
                return names
            scan.position = self.operands_start
        names = []
        while not scan.take(")"):
            if names:
                scan.expect(",", "or ')' behind an operand")
            operand = scan.match(_OPERAND)
            if operand is None:
                scan.shape()  # older text repeats the operand's shape
                operand = scan.match(_OPERAND)
            if operand is None:
                scan.fail("expected an operand's name")
            names.append(operand[1])
        return names

    def literal(self, shape: AnyShape) -> Any:
        scan = self.scan
        scan.position -= 1  # the parenthesis itself
        start = scan.position + 1
        text = scan.balanced()[1:-1]
        if not isinstance(shape, Shape) or shape.element_type == "token":
            scan.fail("a constant of an array shape is expected", start)
        try:
            return parse_literal(text, shape)
        except LiteralError as error:
            scan.fail(str(error), start + error.offset)

    # --- behind the parentheses ----------------------------------------------------------------------------------

    def attributes(self, opcode: str, attrs: dict[str, Any]) -> tuple[tuple[Instruction, ...], Metadata]:
        """Reads `, name=value` until there is no more; answers control predecessors and metadata."""
        scan = self.scan
        control: tuple[Instruction, ...] = ()
        metadata = NO_METADATA
        while match := scan.match(_ATTRIBUTE):
            text_name = match[1]
            name = ATTR_NAMES.get(text_name, text_name)
            position = scan.position
            text = scan.value()
            if name == "metadata":
                metadata = read_metadata(text, self.parser.tables)
            elif name == "control-predecessors":
                control = tuple(self.referenced(text, position, self.named, "instruction"))
            elif name in COMPUTATION_ATTRS:
                attrs[name] = self.called(opcode, name, text, position)
            elif name in FORMATS:
                attrs[name] = self.formatted(text_name, name, text, position)
            else:
                attrs[name] = text
        self.canonicalize(opcode, attrs)
        return control, metadata

    def formatted(self, text_name: str, name: str, text: str, position: int) -> Any:
        try:
            return FORMATS[name].read(text)
        except (ValueError, KeyError):
            self.scan.fail(f"expected {text_name}= such as {FORMATS[name].example}", position)

    def called(self, opcode: str, name: str, text: str, position: int) -> Any:
        found = self.referenced(text, position, self.parser.computations, "computation")
        if text.startswith("{"):
            return tuple(found)
        return found[0]

    def referenced(self, text: str, position: int, table: dict[str, Any], kind: str) -> list[Any]:
        found = []
        for match in _REFERENCE.finditer(text):
            if match[1] not in table:
                close = difflib.get_close_matches(match[1], table, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                self.scan.fail(f"unknown {kind} {match[1]!r}: expected one that stands above{hint}",
                               position + match.start(1))
            found.append(table[match[1]])
        if not found and not text.startswith("{"):
            self.scan.fail(f"expected the name of a {kind}", position)
        return found

    @staticmethod
    def canonicalize(opcode: str, attrs: dict[str, Any]) -> None:
        """One way of saying where XLA has several, and the defaults that the text leaves out."""
        if attrs.pop("order", None) == "TOTAL":  # as newer text says it
            attrs["type"] = "TOTALORDER"
        if attrs.get("type", "TOTALORDER") != "TOTALORDER" and opcode == "compare":
            del attrs["type"]
        if "true_computation" in attrs and "false_computation" in attrs:
            attrs["branch_computations"] = (attrs.pop("true_computation"), attrs.pop("false_computation"))
        for name, value in DEFAULTS.get(opcode, {}).items():
            attrs.setdefault(name, value)

    def normalized(self, instruction: Instruction, sources: list[str], layout: Layout | None) -> Instruction:
        """Instructions whose text means something else than their logical shapes say."""
        if instruction.opcode == "bitcast" and len(sources) == 1:
            return _layout_free_bitcast(instruction, self.layouts.get(sources[0]), layout)
        if instruction.opcode == "complex" and len(sources) == 2:
            return _joined_complex(instruction, sources)
        return instruction


def _layout_free_bitcast(bitcast: Instruction, operand_layout: Layout | None, layout: Layout | None) -> Instruction:
    """bitcast(x {0,1}) {1,0}  =>  reshape(transpose(x)): the elements in their order in memory, in the new shape."""
    operand = bitcast.operands[0]
    if isinstance(operand.shape, TupleShape) or isinstance(bitcast.shape, TupleShape):
        return bitcast
    operand_layout = None if operand_layout is None else _effective(operand_layout, operand.shape)
    layout = None if layout is None else _effective(layout, bitcast.shape)
    if operand_layout is None and layout is None:
        return bitcast
    result = operand
    if operand_layout is not None:
        to_memory = tuple(reversed(operand_layout))
        result = _made(bitcast, "transpose", operand.shape.with_dims([operand.dims[d] for d in to_memory]), result,
                       dimensions=to_memory)
    in_memory = tuple(reversed(layout)) if layout is not None else tuple(range(bitcast.shape.rank))
    memory_shape = bitcast.shape.with_dims([bitcast.dims[d] for d in in_memory])
    if result.shape != memory_shape:
        same_type = result.element_type == memory_shape.element_type
        result = _made(bitcast, "reshape" if same_type else "bitcast", memory_shape, result)
    if layout is not None:
        result = _made(bitcast, "transpose", bitcast.shape, result,
                       dimensions=tuple(in_memory.index(d) for d in range(len(in_memory))))
    return result


def _effective(layout: Layout, shape: Shape) -> Layout | None:
    """None where the layout differs from row-major only in the place of axes with one element."""
    long_axes = [d for d in layout if shape.dims[d] != 1]
    return None if long_axes == sorted(long_axes, reverse=True) else layout


def _made(origin: Instruction, opcode: str, shape: Shape, operand: Instruction, **attrs: Any) -> Instruction:
    return Instruction(opcode, shape, (operand,), MappingProxyType(attrs) if attrs else NO_ATTRS, origin.name,
                       origin.metadata, origin.control)


def _joined_complex(instruction: Instruction, sources: list[str]) -> Instruction:
    """The printer's way to write a complex constant that XLA's parser would read wrongly."""
    real, imag = instruction.operands
    if sources != [f"{instruction.name}.real_part", f"{instruction.name}.imag_part"] or \
            real.opcode != "constant" or imag.opcode != "constant" or not isinstance(instruction.shape, Shape):
        return instruction
    literal = real.literal.astype(instruction.shape.dtype)
    literal.real, literal.imag = real.literal, imag.literal
    return Instruction("constant", instruction.shape, (), MappingProxyType({"literal": literal}), instruction.name,
                       instruction.metadata)
