"""Walks and edits of the graph: rebuild with replacements, clone, inline, compare. All iterative, all sharing.

Nodes are frozen, so an edit is a mapping from old nodes to new ones, and `rebuild` makes new nodes only on the paths
from a replaced node to the root. A function returns the object that it was given when nothing changed.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from hlofuse.hlo import opcode
from hlofuse.hlo.attributes import printed_attrs
from hlofuse.hlo.module import Computation, Instruction, Module


def has_effect(instruction: Instruction) -> bool:
    """Whether the instruction must stay although nobody reads it: a computation keeps it among its `effects`."""
    if opcode.has_effect(instruction.opcode, instruction.attrs):
        return True
    return any(computation.effects for computation in instruction.called)


def with_changes(instruction: Instruction, operands: Sequence[Instruction] | None = None,
                 attrs: Mapping[str, Any] | None = None,
                 control: Sequence[Instruction] | None = None) -> Instruction:
    """The same instruction with other operands, attributes or control predecessors."""
    return Instruction(
        instruction.opcode, instruction.shape, instruction.operands if operands is None else tuple(operands),
        instruction.attrs if attrs is None else MappingProxyType(dict(attrs)), instruction.name, instruction.metadata,
        instruction.control if control is None else tuple(control))


def rebuild(computation: Computation, replace: Mapping[Instruction, Instruction]) -> Computation:
    """The computation with every use of a key of `replace` reading its value instead; itself if nothing changes.

    A value may read instructions of the old computation, keys included: those are replaced in turn. It must not read
    its own key (`ValueError`). A parameter replaced by a parameter changes the signature; one replaced by anything else
    stays in the signature, unread.
    """
    new = _rebuilt((*computation.parameters, *computation.effects, computation.root), replace)
    parameters = tuple(new[p] if new[p].opcode == "parameter" else p for p in computation.parameters)
    effects = tuple(dict.fromkeys(new[e] for e in computation.effects))
    root = new[computation.root]
    if root is computation.root and parameters == computation.parameters and effects == computation.effects:
        return computation
    return Computation(computation.name, parameters, root, effects)


def _rebuilt(roots: Iterable[Instruction],
             replace: Mapping[Instruction, Instruction]) -> dict[Instruction, Instruction]:
    """For every instruction that the new program reaches, what it became."""
    new: dict[Instruction, Instruction] = {}
    open_nodes: set[Instruction] = set()
    for root in roots:
        stack = [root]
        while stack:
            node = stack[-1]
            if node in new:
                stack.pop()
                continue
            target = replace.get(node, node)
            sources = (*node.operands, *node.control) if target is node else (target,)
            pending = [s for s in sources if s not in new]
            if pending:
                open_nodes.add(node)  # these are always the path from the root to here
                if any(s in open_nodes for s in pending):
                    raise ValueError(f"the replacement of {node!r} reads what it replaces")
                stack.extend(reversed(pending))
                continue
            stack.pop()
            open_nodes.discard(node)
            new[node] = _relinked(node, new) if target is node else new[target]
    return new


def _relinked(node: Instruction, new: Mapping[Instruction, Instruction]) -> Instruction:
    operands = tuple([new[o] for o in node.operands])
    control = tuple([new[c] for c in node.control]) if node.control else ()
    if operands == node.operands and control == node.control:
        return node
    return with_changes(node, operands=operands, control=control)


def map_computations(module: Module, change: Callable[[Computation], Computation]) -> Module:
    """`change` applied to every computation once, called ones first, so that it sees callees already changed."""
    new: dict[Computation, Computation] = {}
    for computation in module.computations:
        new[computation] = change(_with_callees(computation, new))
    entry = new[module.entry]
    return module if entry is module.entry else Module(module.name, entry)


def rebuild_module(module: Module, replace: Mapping[Computation, Computation]) -> Module:
    """The module with every call of a key of `replace` (or the entry) calling its value instead."""
    order: list[Computation] = []
    seen: set[Computation] = set()
    # A replacement may call computations that are new to the module, and those may call replaced ones.
    stack: list[tuple[Computation, bool]] = [(replace.get(module.entry, module.entry), False)]
    while stack:
        computation, done = stack.pop()
        if done:
            order.append(computation)
        elif computation not in seen:
            seen.add(computation)
            stack.append((computation, True))
            stack.extend((replace.get(c, c), False) for i in computation.instructions if i.attrs for c in i.called)
    new: dict[Computation, Computation] = {}
    for computation in order:
        new[computation] = _with_callees(computation, {c: new[replace.get(c, c)] for i in computation.instructions
                                                       if i.attrs for c in i.called})
    entry = new[replace.get(module.entry, module.entry)]
    return module if entry is module.entry else Module(module.name, entry)


def _with_callees(computation: Computation, new: Mapping[Computation, Computation]) -> Computation:
    replace = {}
    for instruction in computation.instructions:
        if instruction.attrs and any(new.get(c, c) is not c for c in instruction.called):
            attrs = {key: replaced_callees(value, new) for key, value in instruction.attrs.items()}
            replace[instruction] = with_changes(instruction, attrs=attrs)
    return rebuild(computation, replace) if replace else computation


def replaced_callees(value: Any, new: Mapping[Computation, Computation]) -> Any:
    """An attribute's value, with the computations in it that are keys of `new` replaced."""
    if isinstance(value, Computation):
        return new.get(value, value)
    if isinstance(value, tuple) and value and isinstance(value[0], Computation):
        return tuple(new.get(c, c) for c in value)
    return value


def copy_instructions(computation: Computation,
                      arguments: Mapping[Instruction, Instruction]) -> dict[Instruction, Instruction]:
    """Fresh copies of all instructions, with `arguments` standing for their keys (parameters, as a rule).

    The answer maps every old instruction to its copy; called computations are shared.
    """
    new = dict(arguments)
    for instruction in computation.instructions:
        if instruction not in new:
            new[instruction] = with_changes(instruction, operands=[new[o] for o in instruction.operands],
                                            control=[new[c] for c in instruction.control])
    return new


def clone_computation(computation: Computation, name: str | None = None) -> Computation:
    """A copy that shares no instruction with the original (called computations are shared)."""
    new = copy_instructions(computation, {})
    return Computation(computation.name if name is None else name, tuple(new[p] for p in computation.parameters),
                       new[computation.root], tuple(new[e] for e in computation.effects))


def inline_computation(computation: Computation, arguments: Sequence[Instruction]) -> Instruction:
    """call(arguments), to_apply=computation  =>  a copy of the body on the arguments; the answer is its root.

    Where the computation has effects, use `copy_instructions`, which tells what each of them became.
    """
    return copy_instructions(computation, dict(zip(computation.parameters, arguments, strict=True)))[computation.root]


def structurally_equal(a: Module | Computation, b: Module | Computation) -> bool:
    """Whether both are the same program: equal graphs, shapes, attributes and literal bits.

    Names, metadata and facts that have no text are not compared.
    """
    if isinstance(a, Module) or isinstance(b, Module):
        if not (isinstance(a, Module) and isinstance(b, Module)):
            return False
        return structurally_equal(a.entry, b.entry)
    equal: dict[Computation, Computation] = {}
    pending = [(a, b)]
    while pending:
        left, right = pending.pop()
        if left in equal:
            if equal[left] is not right:
                return False
            continue
        equal[left] = right
        if not _same_body(left, right, pending):
            return False
    return True


def _same_body(a: Computation, b: Computation, pending: list[tuple[Computation, Computation]]) -> bool:
    """Compares two bodies; pairs of called computations are left in `pending`."""
    lefts, rights = a.instructions, b.instructions
    if len(lefts) != len(rights) or len(a.parameters) != len(b.parameters) or len(a.effects) != len(b.effects):
        return False
    # Both orders come from the same walk, so equal graphs list their instructions in step.
    position = {right: k for k, right in enumerate(rights)}
    twin = dict(zip(lefts, rights, strict=True))
    ends = zip((*a.parameters, *a.effects, a.root), (*b.parameters, *b.effects, b.root), strict=True)
    if any(twin[left] is not right for left, right in ends):
        return False
    for left, right in zip(lefts, rights, strict=True):
        if left.opcode != right.opcode or left.shape != right.shape or len(left.operands) != len(right.operands) \
                or len(left.control) != len(right.control):
            return False
        sources = zip((*left.operands, *left.control), (*right.operands, *right.control), strict=True)
        if any(position[twin[x]] != position[y] for x, y in sources):
            return False
        attrs, others = printed_attrs(left), printed_attrs(right)
        if attrs.keys() != others.keys() or not all(_same_value(attrs[k], others[k], pending) for k in attrs):
            return False
    return True


def _same_value(x: Any, y: Any, pending: list[tuple[Computation, Computation]]) -> bool:
    if isinstance(x, Computation):
        pending.append((x, y))
        return isinstance(y, Computation)
    if isinstance(x, tuple) and x and isinstance(x[0], Computation):
        pending.extend(zip(x, y, strict=False))
        return isinstance(y, tuple) and len(x) == len(y)
    if isinstance(x, np.ndarray):
        return isinstance(y, np.ndarray) and x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
    return bool(x == y)
