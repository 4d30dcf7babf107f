"""Colorings of random graphs: legal by independent checks, never worse than greedy, close to the exact optimum."""

from __future__ import annotations

import itertools
import random
import statistics
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_fusion import RandomProblem, random_problem

from hlofuse.fusion.coloring import METHODS, MIN_GAIN, color_graph
from hlofuse.fusion.edge_decisions import explain_edges
from hlofuse.fusion.exact import TooLargeError, color_exactly
from hlofuse.fusion.moves import MOVES
from hlofuse.fusion.partition import Coloring
from hlofuse.fusion.problem import CostMemo
from hlofuse.fusion.quotient_order import QuotientOrder

FEW = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def problems(draw: st.DrawFn, max_vertices: int = 40, min_vertices: int = 1) -> RandomProblem:
    n = draw(st.integers(min_vertices, max_vertices))
    return random_problem(
        draw(st.integers(0, 10**6)),
        n,
        conflict=draw(st.sampled_from([0.0, 0.1, 0.4])),
        clonable=draw(st.sampled_from([0.0, 0.4, 1.0])),
        fixed=draw(st.sampled_from([0.0, 0.1])),
        window=draw(st.sampled_from([2, 4, 12])),
        max_members=draw(st.sampled_from([4, 1000])),
    )


def chain(*sizes: float, **changes: Any) -> RandomProblem:
    """v0 -> v1 -> …, each written value of the given size, reading a parameter of size 4 at the start."""
    n = len(sizes)
    problem = RandomProblem(
        num_vertices=n,
        operands=[[v - 1] if v else [] for v in range(n)],
        users=[[v + 1] if v + 1 < n else [] for v in range(n)],
        is_output=[v == n - 1 for v in range(n)],
        is_fixed=[False] * n,
        is_clonable=[False] * n,
        shared_inputs=[],
        size=list(sizes),
        work=[0.01] * n,
        inputs=[[0] if v == 0 else [] for v in range(n)],
        input_size=[4.0],
        conflicts=set(),
        shape=[0] * n,
    )
    return replace(problem, **changes)


def diamond(**changes: Any) -> RandomProblem:
    """v0 feeds v1 and v2, which feed v3."""
    return replace(chain(4.0, 4.0, 4.0, 4.0), operands=[[], [0], [0], [1, 2]], users=[[1, 2], [3], [3], []], **changes)


def check_by_running(problem: RandomProblem, coloring: Coloring) -> None:
    """Run the launches in order, knowing only members and outputs: every read must have been written before."""
    in_memory: set[int] = set()
    computed: dict[int, int] = {}
    for launch in coloring.launches:
        for kernel in launch:
            held: set[int] = set()
            for v in sorted(kernel.members):
                for u in problem.operands[v]:
                    assert u in held or u in in_memory, f"vertex {v} reads {u}, which nobody has written yet"
                held.add(v)
                computed[v] = computed.get(v, 0) + 1
            assert kernel.outputs <= held
            assert problem.kernel_cost(kernel.members, kernel.outputs) == pytest.approx(kernel.cost)
            for u in kernel.members:
                assert not any(problem.conflict(u, v) for v in kernel.members)
                assert len(kernel.members) == 1 or not problem.is_fixed[u]
        # Segments of one launch run side by side: what they write can be read only afterwards.
        for kernel in launch:
            assert not kernel.outputs & in_memory, "two kernels write the same vertex"
            in_memory |= kernel.outputs
    assert all(v in in_memory for v in range(problem.num_vertices) if problem.is_output[v])
    assert all(problem.is_clonable[v] or count == 1 for v, count in computed.items())
    read = {u for k in coloring.kernels for v in k.members for u in problem.operands[v] if u not in k.members}
    assert in_memory == read | {v for v in range(problem.num_vertices) if problem.is_output[v]}


@pytest.mark.parametrize("method", ["coloring", "greedy", "none"])
@FEW
@given(problem=problems())
def test_colorings_are_legal(method: str, problem: RandomProblem) -> None:
    coloring = color_graph(problem, method)
    coloring.validate()
    check_by_running(problem, coloring)


@FEW
@given(problem=problems())
def test_coloring_is_never_worse_than_greedy(problem: RandomProblem) -> None:
    coloring, greedy, none = (color_graph(problem, m) for m in ("coloring", "greedy", "none"))
    assert coloring.predicted_cost <= greedy.predicted_cost + 1e-9
    assert greedy.predicted_cost <= none.predicted_cost + 1e-9


@FEW
@given(problem=problems(max_vertices=8))
def test_exact_is_legal_and_a_lower_bound(problem: RandomProblem) -> None:
    exact = color_graph(problem, "exact")
    check_by_running(problem, exact)
    assert exact.statistics.optimal_over in ("clones", "partitions")
    if exact.statistics.optimal_over == "clones" or not any(problem.is_clonable):
        assert exact.total_cost <= color_graph(problem).total_cost + 1e-9


@pytest.mark.parametrize("n", range(3, 7))
def test_exact_agrees_with_trying_all_partitions(n: int) -> None:
    for seed in range(6):
        problem = random_problem(seed, n, clonable=0.0, conflict=0.2)
        assert color_graph(problem, "exact").total_cost == pytest.approx(cheapest_partition(problem))


@pytest.mark.parametrize("n", [3, 4])
def test_exact_agrees_with_trying_all_clones(n: int) -> None:
    for seed in range(8):
        problem = random_problem(seed, n, clonable=0.6, conflict=0.4)
        assert color_graph(problem, "exact").total_cost == pytest.approx(cheapest_cover(problem))


def cheapest_cover(problem: RandomProblem) -> float:
    """Every set of kernels, every owner of what is written."""
    n = problem.num_vertices
    sets = [frozenset(v for v in range(n) if mask >> v & 1) for mask in range(1, 1 << n)]
    legal = [s for s in sets if not any(problem.conflict(u, v) for u in s for v in s)
             and (len(s) == 1 or not any(problem.is_fixed[v] for v in s))]
    best = color_graph(problem, "none").total_cost

    def cover(missing: frozenset[int], chosen: list[frozenset[int]]) -> None:
        nonlocal best
        if len(chosen) * problem.launch_cost >= best or len(chosen) > problem.num_vertices:
            return  # as many kernels as vertices leave nothing to gain from one more
        if not missing:
            judge(chosen)
        start = legal.index(chosen[-1]) if chosen else 0
        for kernel in legal[start:]:
            if all(problem.is_clonable[v] or not any(v in k for k in chosen) for v in kernel):
                cover(missing - kernel, [*chosen, kernel])

    def judge(kernels: list[frozenset[int]]) -> None:
        nonlocal best
        homes = [[k for k, members in enumerate(kernels) if v in members] for v in range(n)]
        for owners in itertools.product(*homes):
            try:
                coloring = Coloring(CostMemo(problem), kernels, dict(enumerate(owners)))
                coloring.validate()
                check_by_running(problem, coloring)
            except (AssertionError, ValueError):
                continue
            best = min(best, coloring.total_cost)

    cover(frozenset(range(n)), [])
    return best


@pytest.mark.parametrize("clonable", [0.0, 0.4])
def test_exact_proves_optima_beyond_fifteen_vertices(clonable: float) -> None:
    for seed in (1, 3, 5):
        problem = random_problem(seed, 16, clonable=clonable, packing=False)
        exact = color_graph(problem, "exact")
        check_by_running(problem, exact)
        assert exact.total_cost <= color_graph(problem).total_cost + 1e-9


@FEW
@given(problem=problems(max_vertices=10), seed=st.integers(0, 10**6))
def test_floors_are_below_the_cost_of_whatever_is_added(problem: RandomProblem, seed: int) -> None:
    coloring = color_graph(problem)
    start = random.Random(seed).randrange(problem.num_vertices + 1)
    floors, slack = 0.0, 0.0
    for kernel in coloring.kernels:
        late = frozenset(v for v in kernel.members if v >= start)
        outputs = kernel.outputs & late
        if late and outputs:
            reads = {u for v in late for u in problem.operands[v] if u >= start} - late
            found = problem.kernel_floor(late, outputs, frozenset(reads))
            assert found is not None
            floors, slack = floors + found[0], slack + found[1]
    assert floors + problem.remaining_floor(start, slack) <= coloring.total_cost + 1e-9


def cheapest_partition(problem: RandomProblem) -> float:
    best = float("inf")

    def place(v: int, groups: list[list[int]]) -> None:
        nonlocal best
        if v == problem.num_vertices:
            try:
                coloring = Coloring(CostMemo(problem), [frozenset(g) for g in groups])
                check_by_running(problem, coloring)
            except (AssertionError, ValueError):
                return
            best = min(best, coloring.total_cost)
            return
        for group in groups:
            group.append(v)
            place(v + 1, groups)
            group.pop()
        place(v + 1, [*groups, [v]])

    place(0, [])
    return best


@pytest.mark.parametrize("clonable", [0.0, 0.5])
def test_coloring_is_near_the_optimum(clonable: float) -> None:
    ratios, greedy = [], []
    for seed in range(40):
        problem = random_problem(seed, 6 + seed % 5, clonable=clonable, packing=False)
        exact = color_graph(problem, "exact").total_cost
        ratios.append(color_graph(problem).total_cost / exact)
        greedy.append(color_graph(problem, "greedy").total_cost / exact)
    assert statistics.mean(ratios) <= 1.01, f"mean {statistics.mean(ratios):.4f}, max {max(ratios):.3f}"
    assert max(ratios) <= 1.15
    assert statistics.mean(greedy) > statistics.mean(ratios), "graphs this easy show nothing"


@pytest.mark.parametrize("method", METHODS)
def test_the_same_graph_gives_the_same_kernels(method: str) -> None:
    first, second = (color_graph(random_problem(5, 12), method) for _ in range(2))
    assert first.launches == second.launches


def test_a_chain_becomes_one_kernel_that_writes_its_output() -> None:
    (kernel,) = color_graph(chain(16.0, 16.0, 16.0)).kernels
    assert kernel.members == {0, 1, 2}
    assert kernel.outputs == {2}


def test_a_producer_is_cloned_when_its_readers_cannot_be_joined() -> None:
    problem = diamond(conflicts={(1, 2)}, is_clonable=[True, False, False, False])
    coloring = color_graph(problem)
    assert coloring.owner_of(0) is None
    assert sum(0 in k.members for k in coloring.kernels) == 2
    decisions = {(d.producer, d.consumer): d for d in explain_edges(coloring)}
    assert decisions[0, 1].status == decisions[0, 2].status == "cloned"


def test_joining_a_copy_with_the_last_reader_ends_the_original() -> None:
    coloring = Coloring(CostMemo(diamond(is_clonable=[True, False, False, False])))
    change = coloring.propose({1: frozenset((0, 1))})
    assert change is not None and coloring.apply(change)
    assert coloring.owner_of(0) == 0  # vertex 2 still reads it
    coloring.join(1, 2)
    coloring.validate()
    assert sorted(map(sorted, (k.members for k in coloring.kernels))) == [[0, 1, 2], [3]]


def test_exact_writes_what_only_a_clone_elsewhere_reads() -> None:
    """v1 is large and cheap, so both readers compute it; v0, small and not clonable, is written for the second."""
    problem = replace(
        chain(0.01, 64.0, 1.0, 1.0, conflicts={(2, 3)}, is_clonable=[False, True, False, False]),
        operands=[[], [0], [1], [1]],
        users=[[1], [2, 3], [], []],
        is_output=[False, False, True, True],
    )
    kernels = color_graph(problem, "exact").kernels
    assert sorted(sorted(k.members) for k in kernels) in ([[0, 1, 2], [1, 3]], [[0, 1, 3], [1, 2]])
    assert [sorted(k.outputs)[0] for k in kernels][0] == 0


def test_without_clones_the_producer_is_written() -> None:
    coloring = color_graph(diamond(conflicts={(1, 2)}))
    assert coloring.owner_of(0) is not None


def test_fixed_vertices_stand_alone() -> None:
    coloring = color_graph(chain(4.0, 4.0, 4.0, is_fixed=[False, True, False], is_clonable=[True, True, True]))
    assert sorted(map(sorted, (k.members for k in coloring.kernels))) == [[0], [1], [2]]
    assert [d.reason for d in explain_edges(coloring)] == ["fixed", "fixed"]


def test_edges_name_the_reason_they_are_separate() -> None:
    conflict = explain_edges(color_graph(chain(4.0, 4.0, conflicts={(0, 1)})))[0]
    assert (conflict.status, conflict.reason, conflict.conflict) == ("separate", "conflict", (0, 1))

    no_plan = explain_edges(color_graph(chain(4.0, 4.0, max_members=1)))[0]
    assert no_plan.reason == "no plan"

    # Work beyond the bandwidth: alone, v0 hides its work behind its bytes; together they save nothing.
    no_gain = explain_edges(color_graph(chain(4.0, 4.0), min_gain=100.0))[0]
    assert no_gain.reason == "no gain"
    assert no_gain.delta is not None and no_gain.delta < 0

    # v0 -> v1 (fixed) -> v2 and v0 -> v2: v0 and v2 cannot be one kernel around v1.
    around = replace(
        chain(4.0, 4.0, 4.0, is_fixed=[False, True, False]), operands=[[], [0], [0, 1]], users=[[1, 2], [2], []]
    )
    cycle = {(d.producer, d.consumer): d for d in explain_edges(color_graph(around))}[0, 2]
    assert (cycle.reason, cycle.path) == ("cycle", (0, 1))


@FEW
@given(problem=problems())
def test_every_edge_is_explained(problem: RandomProblem) -> None:
    coloring = color_graph(problem)
    decisions = explain_edges(coloring)
    assert [(d.producer, d.consumer) for d in decisions] == [
        (u, v) for v in range(problem.num_vertices) for u in sorted(problem.operands[v])
    ]
    for d in decisions:
        together = all(d.producer in k.members for k in coloring.kernels if d.consumer in k.members)
        assert (d.status == "separate") == (not together)
        assert (d.reason is None) == together
        if d.reason == "conflict":
            assert d.conflict is not None and problem.conflict(*d.conflict)


def test_packing_joins_independent_kernels_of_one_shape() -> None:
    apart = replace(chain(4.0, 4.0, 4.0), operands=[[], [], []], users=[[], [], []], is_output=[True] * 3)
    apart = replace(apart, conflicts={(0, 1), (0, 2), (1, 2)}, shape=[0, 1, 0])
    coloring = color_graph(apart)
    assert sorted(sorted(min(k.members) for k in launch) for launch in coloring.launches) == [[0, 2], [1]]
    assert coloring.predicted_cost == pytest.approx(coloring.total_cost - apart.launch_cost)


def test_packing_never_joins_a_producer_with_its_reader() -> None:
    coloring = color_graph(chain(4.0, 4.0, conflicts={(0, 1)}))
    assert [len(launch) for launch in coloring.launches] == [1, 1]


@FEW
@given(problem=problems(25, min_vertices=15), seed=st.integers(0, 10**6))
def test_any_sequence_of_steps_keeps_the_invariant(problem: RandomProblem, seed: int) -> None:
    """Steps that do not pay, too: the delta is the change of the total, and a refused step changes nothing."""
    rng = random.Random(seed)
    coloring = Coloring(CostMemo(problem))
    movable = [v for v in range(problem.num_vertices) if not problem.is_fixed[v]]
    related = coloring.memo.pairs
    for _ in range(60 if related else 0):
        v = rng.choice(movable)
        kind = rng.choice(["join"] * 4 + ["clone"] * 4 + [*MOVES])  # without joins there is little to move
        before = coloring.total_cost
        if kind == "join":
            a, b = map(coloring.home, rng.choice(related))
            gain = coloring.join_gain(a, b) if a != b else None
            members = coloring.members[a] | coloring.members[b]
            if gain is not None and coloring.memo.first_conflict(members, members) is None:
                done = coloring.join(a, b) is not None
                assert coloring.total_cost == pytest.approx(before - (gain if done else 0.0))
        else:
            steps = list(MOVES[kind](coloring, v))
            change = coloring.propose(rng.choice(steps)) if steps else None
            if change is not None:
                done = coloring.apply(change)
                assert coloring.total_cost == pytest.approx(before + (change.delta if done else 0.0))
        coloring.validate()
    check_by_running(problem, coloring)


@FEW
@given(
    edges=st.lists(st.tuples(st.integers(0, 14), st.integers(0, 14)), max_size=40),
    joins=st.lists(st.tuples(st.integers(0, 14), st.integers(0, 14)), max_size=14),
)
def test_contraction_refuses_exactly_the_cycles(edges: list[tuple[int, int]], joins: list[tuple[int, int]]) -> None:
    links = {(min(e), max(e)) for e in edges if e[0] != e[1]}
    order = QuotientOrder({k: [a for a, b in links if b == k] for k in range(15)})
    name = list(range(15))
    for a, b in joins:
        a, b = name[a], name[b]
        if a == b:
            continue
        merged = [a if k == b else k for k in name]
        legal = is_acyclic({(merged[u], merged[v]) for u, v in links if merged[u] != merged[v]})
        assert order.has_long_path(a, b) == (not legal) == bool(order.long_path(a, b))
        assert order.contract(a, b) == legal
        if legal:
            name = merged
        assert all(order.position[p] < order.position[k] for k, ps in order.preds.items() for p in ps)
        assert {(p, k) for k, ps in order.preds.items() for p in ps} == {
            (name[u], name[v]) for u, v in links if name[u] != name[v]
        }


def is_acyclic(links: set[tuple[int, int]]) -> bool:
    while links:
        targets = {b for _, b in links}
        inner = {(a, b) for a, b in links if a in targets}
        if len(inner) == len(links):
            return False
        links = inner
    return True


def test_bad_requests_are_refused_with_the_valid_choices() -> None:
    with pytest.raises(ValueError, match="valid methods: coloring, greedy, none, exact"):
        color_graph(chain(4.0), "colouring")
    memo = CostMemo(random_problem(0, 20))
    with pytest.raises(TooLargeError, match="at most 1000 placements, and the 20 vertices of this graph take more"):
        color_exactly(memo, Coloring(memo), max_work=1000)


def test_an_empty_graph_has_no_kernels() -> None:
    for method in METHODS:
        assert color_graph(chain(), method).launches == ()


def test_statistics_tell_which_start_won() -> None:
    coloring = color_graph(random_problem(3, 60, window=8))
    found = coloring.statistics
    assert found.winner in found.starts
    assert all(after <= before + 1e-9 for before, after in found.starts.values())
    assert found.evaluations > 0
    assert MIN_GAIN > 0


@pytest.mark.parametrize("n", [1200, 2000])    # with and without DSATUR among the starts
def test_large_graphs_start_from_what_surely_belongs_together(n: int) -> None:
    """A long chain is weighed a few times for each vertex, each time a kernel of bounded size."""
    problem = chain(*[4.0] * n, max_members=400)
    alone = color_graph(problem)
    together = TogetherProblem(**vars(problem))
    together.cost_calls = 0
    coloring = color_graph(together)
    coloring.validate()
    check_by_running(together, coloring)
    assert len(coloring.kernels) <= len(alone.kernels) + 1
    assert together.cost_calls < 2 * n


class TogetherProblem(RandomProblem):
    @property
    def follows_user(self) -> list[bool]:
        return [len(users) == 1 for users in self.users]
