"""Cost: the predicted time of one kernel on a device, from what it computes and what it moves.

T = T_launch + max(work of each unit / its rate, bytes / (bandwidth * efficiency)). An operand that several members
share counts once, a slice or gather what it reads, and efficiency falls when registers or the number of blocks leave
too few bytes in flight (Little's law). The same walk decides legality: a set of members without a plan is a `Refusal`
that names the rule.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from hlofuse.fusion.block_cost import block_cost
from hlofuse.fusion.constraints import Constraint
from hlofuse.fusion.cost_estimate import UNITS, CostEstimate
from hlofuse.fusion.cost_floor import KernelFloors
from hlofuse.fusion.cumulative import cumulative_of, is_scanned
from hlofuse.fusion.devices import DeviceSpec
from hlofuse.fusion.element_work import arrays_of, branch_axes, itemsize_of, operations_of
from hlofuse.fusion.graph import (
    FusionGraph,
    conflicting_reductions,
    reduced_mask,
)
from hlofuse.fusion.kernel_shape import KernelShape, efficiency, loop_shape, reduction_shape
from hlofuse.fusion.loop_results import LoopResults
from hlofuse.fusion.loop_space import span
from hlofuse.fusion.loop_work import LoopCost, loop_domain
from hlofuse.fusion.operand_reads import read_edges
from hlofuse.fusion.plan import (
    INLINE_REDUCTION,
    NESTED_REDUCTION,
    UNROLLED_REDUCTION,
    Refusal,
    reduced_size,
    scanned_mask,
)
from hlofuse.fusion.registers import quick_registers
from hlofuse.fusion.scatter import Scatter, scatter_of
from hlofuse.fusion.scatter_cost import check_scattering, scatter_shape, scattered_domain
from hlofuse.hlo.module import Instruction
from hlofuse.hlo.opcode import OPCODES, Kind
from hlofuse.hlo.shape import Shape

MAX_MEMBERS = 400        # instructions of one kernel
MAX_SITES = 48           # places at which one value is computed in a kernel
MAX_STATEMENTS = 3000
MAX_ACCUMULATORS = 32    # of scheduled reductions: each has one in every lane, in registers, and compilers slow down
IN_STEPS = 2             # the place of what each lane reads of its own in the steps of a loop; 0 is its own, once
UNCUT = 16               # how much slower a CPU computes a reduction's elements one by one, for a branch at each
MAX_PACKED_ARGUMENTS = 60  # of one segment; 64 segments stay under the limit


@dataclass(frozen=True, slots=True)
class _Rows:
    """Of a reduction: the atoms of what it reads, those that it folds, and the innermost one."""

    domain: int
    reduced: int
    inner: int


class KernelCosts:
    """Costs and legality of sets of vertices of one graph on one device; a `FusionProblem` for the coloring."""

    def __init__(self, graph: FusionGraph, device: DeviceSpec) -> None:
        self.graph, self.device = graph, device
        self.num_vertices = len(graph.vertices)
        self.operands, self.users = graph.operands, graph.users
        self.is_output, self.is_fixed = graph.is_output, graph.is_fixed
        self.launch_cost = device.launch_us
        axes = graph.axes
        instructions = [v.instruction for v in graph.vertices]
        self._arrays: dict[Instruction, int] = {}   # numbers of what vertices read from memory, behind the vertices'
        self._edges = [read_edges(graph, i, self._arrays) for i in instructions]
        values = [*instructions, *self._arrays]
        self._mask = [axes.mask(i) for i in values]
        self._inner = [self._inner_atom(i) for i in values]
        self._itemsize = [itemsize_of(i) for i in values]
        self._size = [span(m, axes) for m in self._mask[:self.num_vertices]]
        self._size += [i.shape.size if isinstance(i.shape, Shape) else 1 for i in self._arrays]
        self._bytes = [sum(r.shape.byte_size for r in v.results) for v in graph.vertices]
        self._bytes += [i.shape.byte_size for i in self._arrays]
        self._reduced = [reduced_size(i) if i.opcode == "reduce" else 0 for i in instructions]
        self._rows = {v: _Rows(axes.mask(i.operands[0]), reduced_mask(i, axes), self._inner_atom(i.operands[0]))
                      for v, i in enumerate(instructions) if i.opcode == "reduce"}
        self.may_conflict = [bool(graph.loops) or size > NESTED_REDUCTION for size in self._reduced]
        self._large = {v for v, size in enumerate(self._reduced) if size > INLINE_REDUCTION}
        self._small = {v for v, size in enumerate(self._reduced) if UNROLLED_REDUCTION < size <= INLINE_REDUCTION}
        self._scatters = {v: s for v, i in enumerate(instructions)
                          if i.opcode == "scatter" and not self.is_fixed[v] and isinstance(s := scatter_of(i), Scatter)}
        self._scans = {v: scanned_mask(i, axes) for v, i in enumerate(instructions)
                       if is_scanned(i) and not self.is_fixed[v]}
        self._ops = [operations_of(i) for i in instructions]
        self._special = {v for v, i in enumerate(instructions) if OPCODES[i.opcode].unit in ("special", "div")}
        self._wide = {v for v, i in enumerate(instructions) if any(s.dtype.itemsize >= 8 for s in arrays_of(i))}
        self._rates = {"fp": device.fp32_rate, "int": device.int_rate, "special": device.special_rate,
                       "div": device.div_rate, "f64": device.fp64_rate}
        self._loops = {v: LoopCost(i, axes) for v, i in enumerate(instructions)
                       if i in graph.loops and i not in graph.blocks}
        self._blocks = {v: graph.blocks[i] for v, i in enumerate(instructions) if i in graph.blocks}
        for v, loop in self._loops.items():
            self._mask[v] = loop.space.lanes | loop.space.inner
            self._inner[v] = loop.inner_atom
            self._size[v] = loop.lanes
        self._branches = {v: len(i.dims) - 1 in axes_of for v, i in enumerate(instructions)
                          if device.dialect == "host" and (axes_of := branch_axes(i))}   # whether along the last axis
        self._runs_once = once = self._scatters.keys() | self._scans.keys() | self._loops.keys() | self._blocks.keys()
        self._arguments = [self._packed_arguments(v) for v in range(self.num_vertices)]
        self.is_clonable = [not fixed and self._reduced[v] <= INLINE_REDUCTION and v not in once
                            for v, fixed in enumerate(self.is_fixed)]
        self._loop_results = LoopResults(graph, device, self._loops, self.is_clonable)
        self.shared_inputs = self._shared_inputs()
        self.follows_user = [self._follows_user(v) for v in range(self.num_vertices)]
        self._sizes: dict[int, int] = {}
        self.constraints: list[Constraint] = []

    def _inner_atom(self, i: Instruction) -> int:
        atoms = self.graph.axes.atoms(i)
        return atoms[-1] if atoms else -1

    def _follows_user(self, v: int) -> bool:
        """Element-wise, and read at its own place by one element-wise instruction over the same axes."""
        if self.is_output[v] or len(self.users[v]) != 1:
            return False
        user = self.users[v][0]
        pair = [self.graph.vertices[w].instruction for w in (v, user)]
        return (not (self.is_fixed[v] or self.is_fixed[user]) and self._mask[v] == self._mask[user]
                and all(OPCODES[i.opcode].kind is Kind.ELEMENTWISE for i in pair)
                and not any(edge.often for edge in self._edges[user] if edge.target == v))

    def _shared_inputs(self) -> list[list[int]]:
        readers: dict[Instruction, list[int]] = {}
        for v, arrays in enumerate(self.graph.externals):
            if not self.is_fixed[v]:
                for a in arrays:
                    if a.opcode != "constant" or a.array.rank:
                        readers.setdefault(a, []).append(v)
        return [r for r in readers.values() if len(r) > 1]

    # --- what the coloring asks ---------------------------------------------------------------------------------------

    def conflict(self, u: int, v: int) -> bool:
        if u in self._loops or v in self._loops or u in self._blocks or v in self._blocks:
            return self.loop_conflict(u, v) is not None
        if not (self.may_conflict[u] and self.may_conflict[v]):
            return False
        a, b = self.graph.vertices[u].instruction, self.graph.vertices[v].instruction
        return conflicting_reductions(a, b, self.graph.axes)

    def loop_conflict(self, u: int, v: int) -> str | None:
        """Why no kernel runs a loop and another vertex."""
        if u in self._blocks or v in self._blocks:
            return "a loop that a block runs is a kernel of its own"
        other = v if u in self._loops else u
        if other in self._large:
            return "a reduction of more than a lane holds"
        if other in self._scatters or other in self._scans:
            return "what is written or accumulated along an axis"
        if other in self._loops:
            return None if self._loops[u].space.lanes == self._loops[v].space.lanes else "loops over different lanes"
        return None

    def can_pack(self, a: frozenset[int], b: frozenset[int]) -> bool:
        """Kernels without scheduled reductions have one block shape; the limit on arguments is 32,764 bytes for all."""
        return self._is_loop(a) and self._is_loop(b)

    def _is_loop(self, members: frozenset[int]) -> bool:
        return sum([self._arguments[v] for v in members]) <= MAX_PACKED_ARGUMENTS

    def _packed_arguments(self, v: int) -> int:
        """How many arguments a vertex may have in a segment; too many where it cannot be in one."""
        if self.is_fixed[v] or self._reduced[v] > INLINE_REDUCTION or v in self._runs_once:
            return MAX_PACKED_ARGUMENTS + 1
        return len(self.graph.externals[v]) + len(self.operands[v]) + 1

    def kernel_cost(self, members: frozenset[int], outputs: frozenset[int]) -> float | None:
        try:
            return self.estimate(members, outputs).time_us
        except Refusal:
            return None

    def result_bytes(self, v: int) -> int:
        """The size of what a vertex computes."""
        return self._bytes[v]

    @property
    def reductions(self) -> Set[int]:
        """Vertices that are reductions with a loop of their own."""
        return self._large

    @cached_property
    def _floors(self) -> KernelFloors:
        return KernelFloors(self)

    def kernel_floor(self, members: frozenset[int], outputs: frozenset[int],
                     reads: frozenset[int]) -> tuple[float, float] | None:
        return self._floors.kernel(members, outputs, reads)

    def remaining_floor(self, position: int, slack: float) -> float:
        return self._floors.remaining(position, slack)

    # --- the walk -----------------------------------------------------------------------------------------------------

    def estimate(self, members: Iterable[int], outputs: Iterable[int], constrained: bool = True) -> CostEstimate:
        """The cost of one kernel; `Refusal` where it has no plan. `constrained` heeds what earlier rounds found."""
        order = sorted(members)
        outs = list(outputs)
        if len(order) == 1 and self.is_fixed[order[0]]:
            raise Refusal("no side effects", "a library call or an opaque operation stands alone")
        if len(order) > MAX_MEMBERS:
            raise Refusal("memory", f"{len(order)} instructions, the limit is {MAX_MEMBERS}")
        if self._blocks and not self._blocks.keys().isdisjoint(order):
            return self._weigh_block(order, outs)
        chosen = set(order)
        for constraint in self.constraints if constrained else ():
            if constraint.is_broken_by(chosen):
                raise Refusal(constraint.rule, constraint.message)
        scatters: list[Scatter] = []
        scheduled: list[int] = []
        loops = [self._loops[v] for v in order if v in self._loops] if self._loops else []
        inside = 0
        for loop in loops:
            inside |= loop.space.inner
        if loops:
            large = [self.graph.vertices[v].instruction for v in order if v in self._large]
            domain, reduced = loop_domain(loops, large), 0
        elif self._scatters and not chosen.isdisjoint(self._scatters):
            for v in self._scans.keys() & chosen:
                raise Refusal("producer-consumer", "{} would share a kernel with a scatter",
                              self.graph.vertices[v].instruction)
            scatters = check_scattering(order, self._scatters, self.operands, self._large)
            domain, reduced = scattered_domain(scatters, self.graph.axes)
        else:
            scheduled, domain, reduced = self._domain(sorted(self._large & chosen), sorted(self._small & chosen), outs,
                                                       sorted(self._scans.keys() & chosen))
        accumulators = sum([len(self.graph.vertices[v].instruction.operands) // 2 for v in scheduled])
        if accumulators > MAX_ACCUMULATORS:
            raise Refusal("memory", f"{accumulators} accumulators, the limit is {MAX_ACCUMULATORS}")
        parallel = domain & ~reduced
        masks = self._mask
        for v in outs:
            if masks[v] & ~inside not in (domain, parallel):
                raise Refusal("shape", "{} covers other axes than the kernel", self.graph.vertices[v].instruction)
        sites = self._sites(order, outs, scheduled, domain, inside, bool(loops))
        return self._weigh(order, chosen, outs, scheduled, domain, reduced, sites, scatters, loops)

    def _weigh_block(self, order: Sequence[int], outs: Sequence[int]) -> CostEstimate:
        """A loop that a block runs: it reads what its state begins with, and writes what is used of it."""
        if len(order) > 1:
            raise Refusal("producer-consumer", "a loop that a block runs is a kernel of its own")
        moved = sum(self._bytes[target] for target in {edge.target for edge in self._edges[order[0]]})
        moved += sum([self._bytes[v] for v in outs])
        return block_cost(self._blocks[order[0]], moved, self.device)

    def _domain(self, large: Sequence[int], small: Sequence[int],
                outs: Sequence[int], scans: Sequence[int]) -> tuple[list[int], int, int]:
        domains = {self._mask[v] for v in outs}
        returning = [v for v in small if self._rows[v].domain in domains]   # read again where it was reduced
        if scans:
            main = scans[-1]
            domain, reduced = self._mask[main], self._scans[main]
            for v in scans:
                if self._mask[v] != domain or self._scans[v] != reduced or self._reversed(v) != self._reversed(main):
                    raise Refusal("producer-consumer", "{} runs along other axes or in another direction than {}",
                                  self.graph.vertices[v].instruction, self.graph.vertices[main].instruction)
        elif not large and not returning:
            if len(domains) != 1:
                raise Refusal("shape", "the results have different domains")
            return [], domains.pop(), 0
        else:
            main = (large or returning)[-1]
            domain, reduced = self._rows[main].domain, self._rows[main].reduced
        scheduled = []
        for v in sorted((*large, *returning)):
            rows = self._rows[v]
            if rows.domain == domain and rows.reduced == reduced:
                scheduled.append(v)
            elif self._reduced[v] > NESTED_REDUCTION or (v in outs and v in self._large):
                raise Refusal("producer-consumer", "{} reduces other axes than {}",
                              self.graph.vertices[v].instruction, self.graph.vertices[main].instruction)
        return scheduled, domain, reduced

    def _reversed(self, scan: int) -> bool:
        cumulative = cumulative_of(self.graph.vertices[scan].instruction)
        return cumulative is not None and cumulative.reverse

    def _sites(self, order: Sequence[int], outs: Sequence[int], scheduled: Sequence[int],
               domain: int, held: int = 0, has_loops: bool = False) -> dict[int, dict[int, int]]:
        """For each value that the kernel reads or computes: at which places, and how many elements at each."""
        sites: dict[int, dict[int, int]] = {}
        total = self._mask_size(domain)
        rows = set(scheduled)
        for v in (*outs, *scheduled):
            sites.setdefault(v, {})[0] = self._size[v]
        statements = 0
        for v in reversed(order):
            places = sites.get(v)
            if not places:
                continue   # nothing reads it: a clone that is not needed
            if len(places) > MAX_SITES:
                raise Refusal("producer-consumer", "{} would be computed at "
                              f"{len(places)} places, the limit is {MAX_SITES}", self.graph.vertices[v].instruction)
            if v in rows and len(places) > 1:
                raise Refusal("producer-consumer", "{} is read at another place than where it is reduced",
                              self.graph.vertices[v].instruction)
            if v in self._scans and (len(places) > 1 or 0 not in places):
                raise Refusal("producer-consumer", "{} is read at another place than where it is accumulated",
                              self.graph.vertices[v].instruction)
            if v in self._scatters and (len(places) > 1 or 0 not in places):
                raise Refusal("producer-consumer", "{} is read at another place than where it is scattered",
                              self.graph.vertices[v].instruction)
            if v in self._loops and not places.keys() <= {0, IN_STEPS}:
                raise Refusal("producer-consumer", "{} is read at another place than its lane's",
                              self.graph.vertices[v].instruction)
            if 0 in places and self._mask[v] & ~(domain | held):
                raise Refusal("shape", "{} has axes that the kernel has not", self.graph.vertices[v].instruction)
            statements += len(places)
            for target, operand, often, mixed in self._edges[v]:
                inside = sites.get(target)
                if inside is None:
                    inside = sites[target] = {}
                if v in self._loops and often:
                    place = hash((v, operand)) | 1 if mixed & domain else IN_STEPS
                    inside[place] = inside.get(place, 0) + often
                elif v in self._loops:
                    inside[0] = max(inside.get(0, 0), self._size[v])
                elif v in rows:
                    inside[0] = max(inside.get(0, 0), total)
                elif v in self._large:   # a loop inside the thread
                    for place, count in places.items():
                        inside[place] = max(inside.get(place, 0), count * self._reduced[v])
                elif often and not (has_loops and mixed >= 0 and not mixed & domain):
                    for place, count in places.items():
                        scale = max(1, count // self._size[v]) if self._size[v] else 1
                        inside[hash((v, operand, place)) | 1] = often * scale
                elif inside:
                    for place, count in places.items():
                        if inside.get(place, -1) < count:
                            inside[place] = count
                else:
                    inside.update(places)
        if statements > MAX_STATEMENTS:
            raise Refusal("memory", f"{statements} statements, the limit is {MAX_STATEMENTS}")
        return sites

    def _mask_size(self, mask: int) -> int:
        size = self._sizes.get(mask)
        if size is None:
            size = self._sizes[mask] = span(mask, self.graph.axes)
        return size

    def _weigh(self, order: Sequence[int], chosen: set[int], outs: Sequence[int], scheduled: Sequence[int], domain: int,
               reduced: int, sites: dict[int, dict[int, int]], scatters: Sequence[Scatter] = (),
               loops: Sequence[LoopCost] = ()) -> CostEstimate:
        device, total, masks = self.device, self._mask_size(domain), self._mask
        work = dict.fromkeys(UNITS, 0.0)
        rows = set(scheduled)
        scans = self._scans.keys() & chosen
        inner = self._rows[scheduled[0]].inner if scheduled else self._inner[min(scans) if scans else outs[0]]
        for v in order:
            unit, ops, wide = self._ops[v]
            places = sites.get(v)
            if not ops or not places:
                continue
            if v in rows:
                count = total
            elif v in self._scatters:
                count = self._scatters[v].updates.array.size
            else:
                count = sum(places.values()) if len(places) > 1 or 0 not in places else places[0]
                if 0 in places:
                    count += (total if inner >= 0 and masks[v] >> inner & 1 else self._size[v]) - places[0]
                count *= self._reduced[v] or 1
            work[unit] += ops * count * wide
        for loop in loops:
            for unit, ops in loop.work.items():
                work[unit] += ops * total
        inputs = [source for source in sites if source not in chosen]
        moved, penalty = 0.0, 1.0
        for source in inputs:
            size, places = self._bytes[source], sites[source]
            moved += min(size, sum(places.values()) * self._itemsize[source])
            last = self._inner[source]
            if last != inner and last >= 0 and inner >= 0 and 0 in places and size > moved / 4 \
                    and masks[source] >> inner & 1:
                penalty = device.strided_penalty
        moved += sum([self._loop_results.written_bytes(v, chosen) if v in self._loops else self._bytes[v]
                      for v in outs])
        shape = self._shape(order, outs, scheduled, domain, reduced, inner)
        if scatters:
            scattering = scatter_shape(scatters, device)
            shape = KernelShape(1, scattering.threads, scattering.partial_bytes, True, True)
        partial = shape.partial_bytes
        moved += 2 * partial
        again = sum([self._bytes[s] for s in inputs if masks[s] == domain]) * (shape.passes - 1)
        cached_us = 0.0
        if loops:
            results = self._loop_results.traffic([v for v in order if v in self._loops], chosen, outs, total)
            moved += results.moved
            cached_us = results.cached / device.l2_bandwidth
        if again and not shape.kept:
            if shape.cached:
                cached_us = again / device.l2_bandwidth
            else:
                moved += again
        compute = max([work[u] / self._rates[u] for u in UNITS])
        if scheduled and self._branches and inner >= 0 and reduced >> inner & 1 and any(
                is_last or reduced == domain for v, is_last in self._branches.items() if v in chosen):
            compute *= UNCUT
        if scatters:
            cached_us += scattering.again_bytes / device.l2_bandwidth
            compute = max(compute, scattering.extra_us)
        form = "loop" if not scheduled and not scans else "row" if inner >= 0 and reduced >> inner & 1 else "column"
        if loops and device.busy_lanes:   # a lane's steps wait for each other: few lanes leave the machine idle
            compute /= min(1.0, max(total, 32) / (device.sm_count * device.busy_lanes))
        registers = quick_registers(form, sum([self._size[s] > 1 for s in inputs]), len(outs), len(order),
                                    len(self._special & chosen), len(scheduled), not self._wide.isdisjoint(chosen))
        if loops:
            registers = max([loop.registers for loop in loops])
        if registers > device.max_registers:
            raise Refusal("memory", f"about {registers} registers, a thread has at most {device.max_registers}")
        memory = moved / device.bandwidth * penalty / efficiency(device, registers, shape.threads) + cached_us
        time = device.launch_us + max(compute, memory) + device.overlap_loss * min(compute, memory)
        return CostEstimate(time, device.launch_us, compute, memory, int(moved), sum(work.values()), registers, partial,
                            work)

    def _shape(self, order: Sequence[int], outs: Sequence[int], scheduled: Sequence[int], domain: int, reduced: int,
               inner: int) -> KernelShape:
        total, rows = self._mask_size(domain), max(1, self._mask_size(domain & ~reduced))
        along = inner >= 0 and bool(reduced >> inner & 1)
        if not scheduled:
            has_loops = not self._loops.keys().isdisjoint(order)
            return loop_shape(self.device, total, rows, bool(reduced), along, has_loops)
        rows_of = set(scheduled)
        below: dict[int, int] = {}   # how many reductions deep, where any
        deepest = 0
        whole = [v for v in outs if self._mask[v] == domain]
        for v in order if whole or len(scheduled) > 1 else ():
            level = max([below.get(u, 0) for u in self.operands[v]], default=0) if below else 0
            if v in rows_of:
                deepest = max(deepest, level)
                level += 1
            if level:
                below[v] = level
        last = max([deepest, *[below.get(v, 0) for v in whole]])
        return reduction_shape(self.device, total, rows, along, last, len(scheduled))
