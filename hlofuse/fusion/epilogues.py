"""Epilogues: what a matrix library computes on a product before it writes it, at no launch of its own.

cuBLASLt adds a matrix (a residual) and a vector along the last axis (a bias), then applies ReLU or tanh-GELU.
Instructions that are exactly this, behind a dot that nothing else reads, stay beside their dot on CUDA devices instead
of becoming a kernel: XLA:GPU hands them to the library.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hlofuse.hlo.module import Computation, Instruction
from hlofuse.hlo.shape import Shape

TYPES = frozenset({"f16", "bf16", "f32"})
_VIEWS = frozenset({"reshape", "bitcast"})


@dataclass(frozen=True)
class Epilogue:
    """`members` are computed with the `dot`, the last of them is what it writes; `reads` are further arrays."""

    dot: Instruction
    members: tuple[Instruction, ...]
    reads: tuple[Instruction, ...]


def find_epilogues(computation: Computation) -> dict[Instruction, Epilogue]:
    """The epilogue of each dot that has one."""
    users, outputs = computation.users, set(computation.outputs)
    found: dict[Instruction, Epilogue] = {}
    taken: set[Instruction] = set()
    for dot in computation.instructions:
        if dot.opcode == "dot" and dot.element_type in TYPES and not dot.attrs.get("lhs_batch_dims"):
            epilogue = _epilogue(dot, users, outputs, taken)
            if epilogue.members:
                found[dot] = epilogue
                taken.update(epilogue.members)
    return found


def _epilogue(dot: Instruction, users: Mapping[Instruction, tuple[Instruction, ...]], outputs: set[Instruction],
              taken: set[Instruction]) -> Epilogue:
    value, members, reads = dot, [], []
    bias = residual = False
    while value not in outputs:
        readers = users[value]
        if len(readers) == 1 and readers[0].opcode in _VIEWS:
            if readers[0].dims[-1:] != value.dims[-1:]:
                break
            value = readers[0]
            continue
        if len(readers) == 1 and readers[0].opcode == "add" and readers[0] not in taken:
            other = next((o for o in readers[0].operands if o is not value), value)
            vector = _bias(other)
            if vector is not None and not bias:
                bias = True
                reads.append(vector)
            elif vector is None and not residual and other is not value and _is_array(other):
                residual = True
                reads.append(other)
            else:
                break
            value = readers[0]
            members.append(value)
            continue
        activation = _relu(value, readers) or _gelu(value, readers, users, outputs)
        members.extend(activation)
        break
    return Epilogue(dot, tuple(members), tuple(reads))


def _bias(i: Instruction) -> Instruction | None:
    """The vector that is broadcast along all axes but the last."""
    last = i.dims[-1:] if isinstance(i.shape, Shape) else ()
    if i.opcode != "broadcast" or not last:
        return None
    dimensions, source = i.attrs["dimensions"], i.operands[0]
    if source.array.size != last[0] or not dimensions or dimensions[-1] != len(i.dims) - 1:
        return None
    return source if source.opcode != "constant" else None


def _is_array(i: Instruction) -> bool:
    return i.opcode not in ("broadcast", "constant", "iota")


def _number(i: Instruction) -> float | None:
    """The one number that all elements are."""
    while i.opcode == "broadcast":
        i = i.operands[0]
    return float(i.literal) if i.opcode == "constant" and not i.array.rank else None


def _relu(value: Instruction, readers: tuple[Instruction, ...]) -> list[Instruction]:
    """maximum(value, 0)"""
    if len(readers) == 1 and readers[0].opcode == "maximum" and any(_number(o) == 0.0 for o in readers[0].operands):
        return [readers[0]]
    return []


def _gelu(value: Instruction, readers: tuple[Instruction, ...], users: Mapping[Instruction, tuple[Instruction, ...]],
          outputs: set[Instruction]) -> list[Instruction]:
    """value * (0.5 * (1 + tanh(sqrt(2/pi) * (value + 0.044715 * value**3)))), in any order of the factors"""
    tanh = _reach(readers, users, "tanh", 6)
    if tanh is None:
        return []
    inner = _factors(tanh.operands[0])
    sums = [f for f in inner.arrays if f.opcode == "add"]
    if len(inner.arrays) != 1 or len(sums) != 1 or not _near(inner.number, 0.7978845608):
        return []
    cube = [o for o in sums[0].operands if o is not value]
    if len(cube) != 1:
        return []
    power = _factors(cube[0], stop=value)
    if power.arrays != [value] * 3 or not _near(power.number, 0.044715):
        return []
    if len(users[tanh]) != 1 or users[tanh][0].opcode != "add":
        return []
    plus_one = users[tanh][0]
    if not any(_number(o) == 1.0 for o in plus_one.operands):
        return []
    result = _last_product(plus_one, value, users)
    if result is None:
        return []
    whole = _factors(result, stop=value, keep=plus_one)
    if sorted(map(id, whole.arrays)) != sorted(map(id, [value, plus_one])) or not _near(whole.number, 0.5):
        return []
    members = _between(value, result)
    closed = all(u in members for m in (value, *members) if m is not result for u in users[m])
    return members if closed and not outputs.intersection(members[:-1]) else []


@dataclass
class _Product:
    number: float
    arrays: list[Instruction]


def _factors(i: Instruction, stop: Instruction | None = None, keep: Instruction | None = None) -> _Product:
    """The factors of a tree of multiplications, its numbers multiplied together."""
    number, stack = 1.0, [i]
    arrays: list[Instruction] = []
    while stack:
        f = stack.pop()
        constant = _number(f)
        if constant is not None:
            number *= constant
        elif f.opcode == "multiply" and f is not stop and f is not keep and len(arrays) + len(stack) < 8:
            stack.extend(f.operands)
        else:
            arrays.append(f)
    return _Product(number, arrays)


def _near(number: float, expected: float) -> bool:
    return abs(number - expected) <= 0.01 * abs(expected)   # 16-bit constants are coarse


def _reach(readers: tuple[Instruction, ...], users: Mapping[Instruction, tuple[Instruction, ...]], opcode: str,
           depth: int) -> Instruction | None:
    """The nearest reader of a reader … with this opcode."""
    level = list(readers)
    for _ in range(depth):
        for i in level:
            if i.opcode == opcode:
                return i
        level = [u for i in level if i.opcode in ("multiply", "add") for u in users[i]][:16]
    return None


def _last_product(start: Instruction, value: Instruction,
                  users: Mapping[Instruction, tuple[Instruction, ...]]) -> Instruction | None:
    """The product that begins at `start` and ends with `value` among its factors."""
    i = start
    for _ in range(3):
        if len(users[i]) != 1 or users[i][0].opcode != "multiply":
            return None
        i = users[i][0]
        if value in _factors(i, stop=value, keep=start).arrays:
            return i
    return None


def _between(value: Instruction, result: Instruction) -> list[Instruction]:
    """What lies on the way from `value` to `result`, in post-order."""
    order: list[Instruction] = []
    stack, seen = [(result, False)], {value}
    while stack:
        i, done = stack.pop()
        if done:
            order.append(i)
        elif i not in seen and _number(i) is None:
            seen.add(i)
            stack.append((i, True))
            stack.extend((o, False) for o in i.operands)
    return order
