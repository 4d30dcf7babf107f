"""Numbers that a step makes of all lanes and only writes: a scan's losses, norms, counts.

    ys[t] = g(reduce(f))  =>  lanes[t] = f, and behind the loop ys = g(reduce(lanes))

so that no step waits for all lanes. What is written instead must stay in the cache.
"""
from __future__ import annotations

from dataclasses import dataclass

from hlofuse.fusion.lane_sums import After
from hlofuse.fusion.loop_state import New, renewed, with_body
from hlofuse.fusion.loop_structure import LoopRefusal, Stacked, loop_structure
from hlofuse.hlo.builder import broadcast, element_of, full, make, parameter, reshape, tuple_of
from hlofuse.hlo.module import Computation, Instruction
from hlofuse.hlo.opcode import OPCODES, Kind
from hlofuse.hlo.shape import FUSIBLE, Shape, TupleShape

MIN_ELEMENTS = 33         # of one reduction: a lane does fewer by itself


@dataclass(frozen=True)
class _Metric:
    """`reduction` is of all elements of an array; `chain` is what the number goes through then, innermost first."""

    stacked: Stacked
    reduction: Instruction
    chain: tuple[Instruction, ...]


def with_lane_metrics(loop: Instruction, max_bytes: int) -> tuple[Instruction, dict[int, After]]:
    """The loop with arrays of the lanes instead of such numbers, and for these elements what makes numbers of them."""
    try:
        s = loop_structure(loop)
    except LoopRefusal:
        return loop, {}
    if s.lanes_leave or s.counter is None:
        return loop, {}
    found = {t.index: m for t in s.stacked if t.is_covered and (m := _metric(t)) is not None}
    arrays = [m.reduction.operands[0].array for m in found.values()]
    if not found or sum(a.size * a.dtype.itemsize for a in arrays) * s.counter.trips > max_bytes:
        return loop, {}
    state = list(loop.operands[0].operands)
    after: dict[int, After] = {}
    for k, m in found.items():
        array = m.reduction.operands[0].array
        after[k] = _reduced(m, state[k].dims)
        state[k] = full(0, array.with_dims((s.counter.trips, *array.dims)))
    fresh = parameter(0, TupleShape(tuple(o.shape for o in state)), "state")
    new: New = {s.body.parameters[0]: fresh}
    updates = {s.update(k): m for k, m in found.items()}
    for i in s.body.instructions:
        if i in new:
            continue
        if i in updates:
            new[i] = _written(updates[i], fresh, new)
        elif i is not s.body.root:
            new[i] = renewed(i, new)
    root = tuple_of([new[o] for o in s.body.root.operands])
    return with_body(loop, Computation(s.body.name, (fresh,), root), state), after


def _metric(t: Stacked) -> _Metric | None:
    chain: list[Instruction] = []
    value = t.update
    while value.opcode != "reduce":
        row = OPCODES[value.opcode]
        inputs = [o for o in value.operands if _constant_of(o) is None]
        if value.array.size != 1 or len(inputs) != 1 or not (value.opcode == "reshape" or row.kind is Kind.ELEMENTWISE):
            return None
        chain.append(value)
        value = inputs[0]
    array = value.operands[0].array
    if len(value.operands) != 2 or value.operands[1].opcode != "constant" or array.element_type not in FUSIBLE or \
            value.array.size != 1 or array.size < MIN_ELEMENTS:
        return None
    return _Metric(t, value, tuple(reversed(chain)))


def _constant_of(i: Instruction) -> Instruction | None:
    while i.opcode in ("broadcast", "reshape"):
        i = i.operands[0]
    return i if i.opcode == "constant" and i.array.size == 1 else None


def _written(m: _Metric, fresh: Instruction, new: New) -> Instruction:
    value = new[m.reduction.operands[0]]
    whole = element_of(fresh, m.stacked.index)
    zero = full(0, Shape("s32"))
    starts = [new[m.stacked.position], *[zero] * len(value.dims)]
    return make("dynamic-update-slice", whole, reshape(value, (1, *value.dims)), *starts, shape=whole.shape)


def _reduced(m: _Metric, dims: tuple[int, ...]) -> After:
    def after(lanes: Instruction, loop: Instruction) -> Instruction:
        axes, trips = tuple(range(1, len(lanes.dims))), lanes.dims[:1]
        value = make("reduce", lanes, m.reduction.operands[1], shape=m.reduction.array.with_dims(trips),
                     dimensions=axes, to_apply=m.reduction.attrs["to_apply"])
        for i in m.chain:
            if i.opcode == "reshape":
                continue
            operands = []
            for o in i.operands:
                number = _constant_of(o)
                operands.append(value if number is None else broadcast(reshape(number, ()), trips))
            value = make(i.opcode, *operands, shape=i.array.with_dims(trips), **dict(i.attrs))
        return reshape(value, dims)

    return after
