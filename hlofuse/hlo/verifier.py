"""Checks that a module is valid HLO: shapes re-derived, operands, attributes, called computations, no cycles.

A pass is wrong if its result does not verify. The error shows the program with the message under the offending line.
`problem_with` checks one instruction by itself and is what the parser asks for each line.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from hlofuse.errors import VerifierError
from hlofuse.hlo.attributes import FORMATS
from hlofuse.hlo.module import Computation, Instruction, Module
from hlofuse.hlo.opcode import OPCODES, infer_shape
from hlofuse.hlo.printer import print_instruction, print_module
from hlofuse.hlo.shape import AnyShape, Shape, TupleShape
from hlofuse.hlo.shape_rules import ShapeError

Node = TypeVar("Node")
_MAX_ELEMENTS_SHOWN = 16


def verify_module(module: Module) -> Module:
    """The module itself if it is valid; otherwise a `VerifierError` names the first offending instruction."""
    _check_call_graph(module)
    for computation in module.computations:
        _check_parameters(module, computation)
        for instruction in computation.instructions:
            problem = problem_with(instruction) or _badly_typed_attribute(instruction)
            if problem is not None:
                _refuse(module, computation, instruction, problem)
    return module


def _refuse(module: Module, computation: Computation, instruction: Instruction, problem: str) -> None:
    message = f"{print_instruction_safely(instruction)}, in computation {computation.name!r}: {problem}"
    raise VerifierError(message, program=_program_with(module, instruction, problem))


def print_instruction_safely(instruction: Instruction) -> str:
    """The instruction's line, or less where it is too broken to be printed."""
    try:
        return print_instruction(instruction)
    except Exception:  # an invalid attribute can fail anywhere in the printer
        return repr(instruction)


def _program_with(module: Module, instruction: Instruction, problem: str) -> str | None:
    try:
        return print_module(module, max_elements=_MAX_ELEMENTS_SHOWN, notes={instruction: problem})
    except Exception:  # as above: the message alone must do
        return None


# --- the graph ----------------------------------------------------------------------------------------------------

def _check_call_graph(module: Module) -> None:
    """Instructions form no cycle, and no computation calls itself."""

    def callees(computation: Computation) -> list[Computation]:
        ends = (*computation.parameters, *computation.effects, computation.root)
        cycle = _find_cycle(ends, lambda i: (*i.operands, *i.control))
        if cycle is not None:
            raise VerifierError(f"cycle in computation {computation.name!r}: {cycle!r} reads its own result")
        return [called for i in computation.instructions if i.attrs for called in i.called]

    recursive = _find_cycle([module.entry], callees)
    if recursive is not None:
        raise VerifierError(f"computation {recursive.name!r} calls itself")


def _find_cycle(roots: Iterable[Node], successors: Callable[[Node], Iterable[Node]]) -> Node | None:
    """A node that reaches itself, if there is one; iterative, each node is visited once."""
    done: set[Node] = set()
    for root in roots:
        if root in done:
            continue
        path: dict[Node, Iterator[Node]] = {root: iter(successors(root))}
        while path:
            node, rest = next(reversed(path.items()))
            following = next(rest, None)
            if following is None:
                del path[node]
                done.add(node)
            elif following in path:
                return following
            elif following not in done:
                path[following] = iter(successors(following))
    return None


def _check_parameters(module: Module, computation: Computation) -> None:
    own = set(computation.parameters)
    for number, parameter in enumerate(computation.parameters):
        if parameter.opcode != "parameter" or parameter.attrs.get("parameter_number") != number:
            _refuse(module, computation, parameter, f"this stands for parameter({number}) of its computation")
    for instruction in computation.instructions:
        if instruction.opcode == "parameter" and instruction not in own:
            reader = next((i for i in computation.instructions if instruction in i.operands), instruction)
            _refuse(module, computation, reader,
                    f"reads {instruction.name or 'a parameter'}, which is a parameter of another computation")


def _badly_typed_attribute(instruction: Instruction) -> str | None:
    for name, value in instruction.attrs.items():
        form = FORMATS.get(name)
        if form is None:
            continue
        try:
            is_good = form.read(form.write(value)) == value
        except Exception:  # whatever the wrong type makes of it
            is_good = False
        if not is_good:
            return f"attribute {name}={value!r} is not of the form {form.example}"
    return None


# --- one instruction ----------------------------------------------------------------------------------------------

def problem_with(instruction: Instruction) -> str | None:
    """What is wrong with the instruction, given that its operands are right; `None` if nothing is."""
    row = OPCODES.get(instruction.opcode)
    if row is None:
        return None if instruction.opcode.endswith(("-start", "-update", "-done")) else \
            f"unknown opcode {instruction.opcode!r}"
    operands = instruction.operands
    if row.arity is not None and len(operands) != row.arity:
        return f"{row.name} takes {row.arity} operand(s), got {len(operands)}"
    try:
        problem = _shape_problem(instruction, row.shape_rule is not None)
        check = _CHECKS.get(instruction.opcode)
        return problem or (check(instruction) if check is not None else None)
    except ShapeError as error:
        return str(error)
    except KeyError as missing:
        return f"{row.name}: attribute {missing} is missing"


def _shape_problem(instruction: Instruction, has_rule: bool) -> str | None:
    if not has_rule:
        return None
    shapes: tuple[AnyShape, ...] = tuple([o.shape for o in instruction.operands])
    if instruction.opcode in ("dot", "convolution") and isinstance(instruction.shape, Shape):
        # The result's type is a choice (preferred_element_type), and the operands' may differ.
        shapes = tuple(s.with_type(instruction.shape.element_type) if isinstance(s, Shape) else s for s in shapes)
    expected = infer_shape(instruction.opcode, shapes, instruction.attrs)
    if expected == instruction.shape:
        return None
    return f"{instruction.opcode} of these operands is {expected}, not {instruction.shape}"


def _need(condition: bool, message: str) -> str | None:
    return None if condition else message


def _parameter(i: Instruction) -> str | None:
    return _need(isinstance(i.attrs["parameter_number"], int), "the parameter's number is missing")


def _constant(i: Instruction) -> str | None:
    return _need(i.literal.dtype == i.array.dtype, f"the literal is of {i.literal.dtype}, not {i.element_type}")


def _iota(i: Instruction) -> str | None:
    axis = i.attrs["iota_dimension"]
    return _need(0 <= axis < i.array.rank, f"iota_dimension={axis} is not an axis of {i.shape}")


def _broadcast(i: Instruction) -> str | None:
    operand, dims = i.operands[0].array, i.attrs["dimensions"]
    if len(dims) != operand.rank:
        return f"dimensions={dims} must name one axis of the result for each of operand 0, {operand}"
    if operand.element_type != i.element_type:
        return f"operand 0 is {operand}, a broadcast keeps the element type"
    if not all(0 <= d < i.array.rank for d in dims) or sorted(set(dims)) != list(dims):
        return f"dimensions={dims} are not ascending axes of {i.shape}"
    return _need(all(i.dims[d] == size for d, size in zip(dims, operand.dims, strict=True)),
                 f"operand 0 is {operand}, but its axes {dims} of the result have other sizes: {i.shape}")


def _reshape(i: Instruction) -> str | None:
    operand = i.operands[0].array
    return _need(operand.size == i.array.size and operand.element_type == i.element_type,
                 f"reshape of {operand} to {i.shape}: element count and type must stay")


def _bitcast(i: Instruction) -> str | None:
    if not (isinstance(i.shape, Shape) and isinstance(i.operands[0].shape, Shape)):
        return None
    operand = i.operands[0].array
    return _need(operand.byte_size == i.array.byte_size, f"bitcast of {operand} to {i.shape}: the bytes must stay")


def _convert(i: Instruction) -> str | None:
    return _need(i.operands[0].dims == i.dims, f"operand 0 is {i.operands[0].shape}, convert keeps the dimensions")


def _bitcast_convert(i: Instruction) -> str | None:
    operand, result = i.operands[0].array, i.array
    wide, narrow = (operand, result) if operand.rank < result.rank else (result, operand)
    ratio = narrow.dims[wide.rank:]
    return _need(narrow.dims[:wide.rank] == wide.dims and len(ratio) <= 1 and operand.byte_size == result.byte_size,
                 f"bitcast-convert of {operand} to {result}: only the last axis may split or join")


def _signature(called: Computation, parameters: Iterable[AnyShape], result: AnyShape | None, what: str) -> str | None:
    """Whether a called computation takes and returns what its caller gives and expects."""
    expected = tuple(parameters)
    if len(called.parameters) != len(expected):
        return f"{what} {called.name!r} takes {len(called.parameters)} parameter(s), {len(expected)} are given"
    for number, (parameter, shape) in enumerate(zip(called.parameters, expected, strict=True)):
        if parameter.shape != shape:
            return f"{what} {called.name!r} takes {parameter.shape} as parameter({number}), {shape} is given"
    if result is not None and called.root.shape != result:
        return f"{what} {called.name!r} returns {called.root.shape}, {result} is expected"
    return None


def _call(attribute: str) -> Callable[[Instruction], str | None]:
    def check(i: Instruction) -> str | None:
        return _signature(i.attrs[attribute], [o.shape for o in i.operands], i.shape, attribute)
    return check


def _while(i: Instruction) -> str | None:
    return (_signature(i.attrs["body"], [i.shape], i.shape, "body")
            or _signature(i.attrs["condition"], [i.shape], Shape("pred"), "condition"))


def _conditional(i: Instruction) -> str | None:
    branches, index = i.attrs["branch_computations"], i.operands[0].shape
    if index not in (Shape("pred"), Shape("s32")):
        return f"operand 0 is {index}, a scalar pred or s32 is needed"
    if index == Shape("pred") and len(branches) != 2:
        return f"a pred chooses between 2 branches, not {len(branches)}"
    if len(i.operands) != len(branches) + 1:
        return f"{len(branches)} branches need as many operands behind the index, got {len(i.operands) - 1}"
    problems = (_signature(branch, [operand.shape], i.shape, "branch")
                for branch, operand in zip(branches, i.operands[1:], strict=True))
    return next((problem for problem in problems if problem is not None), None)


def _scalars(shapes: Iterable[AnyShape]) -> list[AnyShape]:
    return [shape.with_dims(()) if isinstance(shape, Shape) else shape for shape in shapes]


def _as_result(shapes: list[AnyShape]) -> AnyShape:
    return shapes[0] if len(shapes) == 1 else TupleShape(tuple(shapes))


def _reduction(i: Instruction) -> str | None:
    """Accumulators first, then values; the result has the initial values' types."""
    n = len(i.operands) // 2
    accumulators = _scalars(o.shape for o in i.operands[n:])
    values = _scalars(o.shape for o in i.operands[:n])
    called = i.attrs["to_apply"]
    return (_signature(called, accumulators + values, _as_result(accumulators), "to_apply")
            and _signature(called, accumulators + accumulators, _as_result(accumulators), "to_apply"))


def _scatter(i: Instruction) -> str | None:
    n = (len(i.operands) - 1) // 2
    scalars = _scalars(o.shape for o in i.operands[:n])
    return _signature(i.attrs["to_apply"], scalars + scalars, _as_result(scalars), "to_apply")


def _sort(i: Instruction) -> str | None:
    pairs = [shape for shape in _scalars(o.shape for o in i.operands) for _ in range(2)]
    return _signature(i.attrs["to_apply"], pairs, Shape("pred"), "to_apply")


def _map(i: Instruction) -> str | None:
    return _signature(i.attrs["to_apply"], _scalars(o.shape for o in i.operands), Shape(i.element_type), "to_apply")


def _select_and_scatter(i: Instruction) -> str | None:
    scalar = Shape(i.element_type)
    return (_signature(i.attrs["select"], [scalar, scalar], Shape("pred"), "select")
            or _signature(i.attrs["scatter"], [scalar, scalar], scalar, "scatter"))


def _compare(i: Instruction) -> str | None:
    direction: Any = i.attrs["direction"]
    return _need(direction in ("EQ", "NE", "GE", "GT", "LE", "LT"),
                 f"direction={direction} is none of EQ, NE, GE, GT, LE, LT")


_CHECKS: dict[str, Callable[[Instruction], str | None]] = {
    "parameter": _parameter, "constant": _constant, "iota": _iota, "broadcast": _broadcast, "reshape": _reshape,
    "bitcast": _bitcast, "convert": _convert, "bitcast-convert": _bitcast_convert, "compare": _compare,
    "call": _call("to_apply"), "fusion": _call("calls"), "while": _while, "conditional": _conditional,
    "reduce": _reduction, "reduce-window": _reduction, "scatter": _scatter, "sort": _sort, "map": _map,
    "select-and-scatter": _select_and_scatter,
}
