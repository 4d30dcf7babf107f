"""Runs of steps: what lies in memory step by step, not lane by lane, is written in runs of several steps.

    a vmapped scan's ys are [lanes, steps]: every STEP_RUN steps, each lane writes STEP_RUN neighbors

In between they wait in an array of the lanes. Only where the dialect has such arrays beside a thread (the CPU): one
store a step would take a line of the cache for each lane, and strides of powers of two share a few of its sets.
"""
from __future__ import annotations

from hlofuse.codegen.scalar_expr import storage_type
from hlofuse.codegen.stacked import StackedWriter, Waiting
from hlofuse.fusion.loop_structure import LoopStructure
from hlofuse.hlo.index_map import Index, Var, linearize, to_c, variable
from hlofuse.hlo.shape import COMPLEX

STEP_RUN = 16
MAX_STRIDE = 4     # elements between neighbor steps


class StepRunWriter(StackedWriter):
    """Writes behind."""

    def moves_in_runs(self, place: Index, s: LoopStructure, step: str) -> bool:
        """Whether neighbor steps are near each other in memory, and neighbor lanes are not."""
        stride = _stride(place, step)
        return bool(self.nest.dialect.tile_bytes) and self.has_lanes and s.counter is not None and \
            s.counter.trips >= STEP_RUN // 2 and stride is not None and 0 < abs(stride) <= MAX_STRIDE and \
            self.has_stride(place)

    def place_runs(self, s: LoopStructure, step: str) -> None:
        """Declares where slices wait that are written in runs."""
        for t in s.stacked:
            homes = [home for home in self.homes_of(s, t) if not home.tile]
            position, dims = s.position(t.position, step), s.update(t.index).dims
            if not homes or position is None or position.bounds[0] < 0 or position.bounds[1] >= dims[t.dim]:
                continue
            if not self.is_of_lanes(t.update) or t.update.element_type in COMPLEX:
                continue
            for n, inner in enumerate(self.places_of(t.update)):
                index = list(self.index_of(t.update, inner))
                index[t.dim] = position
                place = linearize(tuple(index), dims)
                for home in homes if self.moves_in_runs(place, s, step) else ():
                    name = self.new_run("slices", storage_type(t.update.element_type))
                    self.waiting[s.loop, t.index, n, home.name] = Waiting(name, self.element_of_run(name, step), place)

    def new_run(self, hint: str, element_type: str) -> str:
        """Declares an array of the lanes and of a run of steps."""
        name = self.values.name(hint)
        self.nest.emit(f"{element_type} {name}[{STEP_RUN} * LANES];")
        return name

    def element_of_run(self, name: str, step: str) -> str:
        return f"{name}[{step} % {STEP_RUN} * LANES + l]"

    def write_behind(self, s: LoopStructure, step: str) -> None:
        """Writes what waits, at every last step of a run."""
        waiting = [(key[-1], w) for key, w in self.waiting.items() if key[0] is s.loop]
        if not waiting:
            return
        assert s.counter is not None
        nest, first, j = self.nest, self.values.name("first"), self.values.name("j")
        last = f"{step} % {STEP_RUN} == {STEP_RUN - 1} || {step} == {s.counter.trips - 1}"
        with nest.block(f"if ({last}) {{", guard=True):
            nest.emit(f"const int {first} = {step} - {step} % {STEP_RUN};")
            with self.lanes():
                for home, w in waiting:
                    stride = _stride(w.place, step) or 0
                    own = Index(tuple((atom, c) for atom, c in w.place.terms if not _is_named(atom, step)),
                                w.place.constant)
                    place = own + (variable(first, s.counter.trips) + variable(j, STEP_RUN)) * stride
                    move = f"{home}[{to_c(place)}] = {w.name}[{j} * LANES + l];"
                    nest.emit(f"if ({step} - {first} == {STEP_RUN - 1})")
                    nest.emit(f"  for (int {j} = 0; {j} < {STEP_RUN}; {j}++) {move}")
                    nest.emit("else")
                    nest.emit(f"  for (int {j} = 0; {j} <= {step} - {first}; {j}++) {move}")


def _stride(place: Index, step: str) -> int | None:
    """How far the next step's element is; None where that is not always as far."""
    found = 0
    for atom, scale in place.terms:
        if _is_named(atom, step):
            found = scale
        elif any(v.name == step for v in Index(((atom, 1),)).variables):
            return None
    return found


def _is_named(atom: object, name: str) -> bool:
    return isinstance(atom, Var) and atom.name == name
