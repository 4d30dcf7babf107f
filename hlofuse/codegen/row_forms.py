"""Rows: the lanes are reduced and fold at the end of a pass. A row has a block, or is split over several.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

from hlofuse.codegen.nest import Nest
from hlofuse.codegen.row_passes import Pass, passes
from hlofuse.codegen.scalar_expr import c_type
from hlofuse.codegen.sizing import has_branches, round_up
from hlofuse.hlo.index_map import Index, constant
from hlofuse.hlo.module import Instruction
from hlofuse.hlo.opcode import OPCODES

ROOMY_THREADS = 512       # a larger block leaves its threads no registers to keep a row in


def write_row(nest: Nest) -> int:
    """A block for each row, which it reads once for every level of reductions; dear values stay between the passes."""
    z = nest.sizing
    nest.begin_item()
    nest.schedule_names()
    kept = _kept_values(nest)
    for p in passes(nest):
        for r in p.reductions:
            nest.declare_lanes(r)
        for value in kept:
            if value.first == p.level:
                nest.emit(f"{value.c_type} {value.name}[{nest.steps * z.lanes}];")

        def write(p: Pass = p) -> None:
            memo = nest.values.scope.memo
            memo.update({v.key: f"{v.name}[slot + l]" for v in kept if v.first < p.level})
            for r in p.reductions:
                nest.accumulate(r)
            for k in p.stores:
                nest.store(k)
            for v in kept:
                if v.first == p.level:
                    nest.emit(f"{v.name}[slot + l] = {memo[v.key]};")

        with nest.loop_axes():
            if any(v.first <= p.level <= v.last for v in kept):
                nest.kept_tiles(write)
            else:
                nest.tiles("0", str(z.vector_size), (0, z.vector_size), write, p.reductions)
        for r in p.reductions:
            nest.publish(r, nest.finish_rows(r))
    nest.store_parallel()
    return z.items


@dataclass(frozen=True)
class _Kept:
    """An element's value that pass `first` computes and later passes, until `last`, need again."""

    key: tuple[Instruction, tuple[Index, ...]]
    name: str
    c_type: str
    first: int
    last: int


def _kept_values(nest: Nest) -> list[_Kept]:
    """What is worth keeping of several passes: dear operations, and loads where the dialect keeps rows in registers."""
    z, v, dialect = nest.sizing, nest.values, nest.dialect
    if z.loop_size > 1 or len(set(nest.waiting.values())) < 2 or has_branches(nest.plan.computation):
        return []
    room = dialect.keep_elements // max(1, nest.steps * z.lanes) if z.threads <= ROOMY_THREADS else 0
    if not room:
        return []
    needs: dict[int, list[tuple[Instruction, tuple[Index, ...]]]] = {}
    shared = nest.shared_bytes
    with v.dry_run():
        nest.place_lanes()
        for p in passes(nest):
            with nest.loop_axes(), v.inside((nest.lane_variable(), "l")) as scope:
                for r in p.reductions:
                    nest.accumulate(r)
                for k in p.stores:
                    nest.store(k)
            needs[p.level] = list(scope.memo)
            for r in p.reductions:
                nest.publish(r, nest.finish_rows(r))
    nest.shared_bytes = shared
    found: list[_Kept] = []
    for level, keys in needs.items():
        for key in keys:
            last = max(n for n, other in needs.items() if key in other)
            instruction = key[0]
            dear = OPCODES[instruction.opcode].unit in ("special", "div")
            if instruction.opcode == "parameter":
                dear = dialect.keep_loads and instruction.array.size >= nest.plan.computation.outputs[0].array.size
            if last > level and dear and len(found) < room and all(f.key != key for f in found):
                name = v.name(f"kept_{instruction.name or instruction.opcode}")
                found.append(_Kept(key, name, c_type(instruction.element_type), level, last))
    return found


def write_split_row(nest: Nest) -> int:
    z, t = nest.sizing, nest.index_type
    nest.schedule_names()
    over_loop = z.loop_size > 1
    total = z.loop_size if over_loop else z.vector_size
    size = round_up(-(-total // z.chunks), 1 if over_loop else z.threads * z.lanes)
    chunks = -(-total // size)
    nest.sizing = z = replace(z, chunks=chunks)
    _, chunk = nest.begin_item(chunks)
    nest.emit(f"const {t} begin = ({t})({chunk}) * {size};")
    nest.emit(f"const {t} end = begin + {size} < {total} ? begin + {size} : {total};")
    reductions = nest.reductions(0)
    stores = nest.outputs(0, nest.plan.domain_mask)
    for r in reductions:
        nest.declare_lanes(r)

    def write() -> None:
        for r in reductions:
            nest.accumulate(r)
        for k in stores:
            nest.store(k)

    if over_loop:
        with nest.loop_axes("begin", "end"):
            nest.tiles("0", str(z.vector_size), (0, z.vector_size), write, reductions)
    else:
        for a in z.loop:
            nest.where[a.name] = constant(0)
        nest.tiles("begin", "end", (0, z.vector_size), write, reductions)
    partials = []
    for r in reductions:
        late, r.late_init = r.late_init, []
        results = nest.finish_rows(r)
        r.late_init = late
        partials.append([nest.new_scratch(kind, z.items * chunks) for kind in r.types])
        with nest.block("if (THREAD == 0) {", guard=True):
            for name, result in zip(partials[-1], results, strict=True):
                nest.emit(f"{name}[BLOCK] = {result};")
    nest.counters = z.items
    with nest.block(f"if (is_last_block(counters + BLOCK / {chunks}, {chunks})) {{", guard=True):
        for r, names in zip(reductions, partials, strict=True):
            again = replace(r, names=[nest.values.name(f"{a}_total") for a in r.names])
            nest.declare_lanes(again)
            with nest.block(f"for_tiles<THREADS, LANES>(({t})0, ({t}){chunks}, "
                            f"[&](const {t} chunk0, const int count) INLINE {{", footer="});"):
                with nest.block("FOR_LANES(l, count) {"):
                    values = [f"{n}[BLOCK / {chunks} * {chunks} + chunk0 + l]" for n in names]
                    nest.emit(f"{r.reducer}({', '.join([*(f'{a}[l]' for a in again.names), *values])});")
            nest.publish(again, nest.finish_rows(again))
        nest.store_parallel()
    return z.items * chunks
