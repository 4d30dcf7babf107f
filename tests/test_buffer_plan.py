"""Schedules and the arena: steps in any order that the streams allow find their operands unharmed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hlofuse.runtime.buffer_plan import ALIGNMENT, BufferRequest, Home, aligned, plan_buffers
from hlofuse.runtime.schedule import Schedule, Task, plan_schedule


@st.composite
def graphs(draw):
    """Steps with the earlier steps that each reads, and whether they are narrow."""
    count = draw(st.integers(1, 14))
    return [Task(tuple(sorted(draw(st.sets(st.integers(0, n - 1), max_size=3)) if n else ())), draw(st.booleans()))
            for n in range(count)]  # fmt: skip


def random_order(schedule: Schedule, seed: int) -> list[int]:
    """An order in which the streams may run their steps: that of each stream, and after what a step waits for."""
    choose, left = random.Random(seed), list(range(len(schedule.streams)))
    done: list[int] = []
    while left:
        ready = [s for s in left if set(schedule.waits[s]) <= set(done)
                 and not any(t in left for t in range(s) if schedule.streams[t] == schedule.streams[s])]  # fmt: skip
        done.append(choose.choice(ready))
        left.remove(done[-1])
    return done


@given(graphs(), st.integers(0, 99))
def test_a_schedule_keeps_what_steps_need_and_says_what_it_keeps(tasks, seed):
    schedule = plan_schedule(tasks)
    order = random_order(schedule, seed)
    for step, task in enumerate(tasks):
        assert all(schedule.before[step] >> t & 1 for t in task.after)
        earlier = set(order[: order.index(step)])
        assert all(t in earlier for t in range(len(tasks)) if schedule.before[step] >> t & 1)
    assert {schedule.streams[t] for t, task in enumerate(tasks) if not task.is_narrow} <= {0}


@given(graphs())
def test_the_callers_stream_waits_for_everything(tasks):
    schedule = plan_schedule(tasks)
    main = [t for t in range(len(tasks)) if schedule.streams[t] == 0]
    known = sum(1 << t for t in (main[-1:] + list(schedule.joined)))
    for t in (main[-1:] + list(schedule.joined)):
        known |= schedule.before[t]
    assert known == (1 << len(tasks)) - 1


def test_independent_narrow_steps_run_side_by_side():
    schedule = plan_schedule([Task((), True), Task((), True), Task((0,), True), Task((1,), True), Task((2, 3), True)])
    assert schedule.streams[0] != schedule.streams[1]
    assert schedule.streams[2] == schedule.streams[0] and schedule.streams[3] == schedule.streams[1]
    assert len(schedule.waits[4]) == 1


def test_wide_steps_stay_on_the_callers_stream():
    assert plan_schedule([Task(()), Task(()), Task(())]).streams == (0, 0, 0)


@st.composite
def programs(draw):
    """A graph with buffers: step n writes buffer n, reads those of `after`, and may take one of them."""
    tasks = draw(graphs())
    end = len(tasks)
    kept = draw(st.sets(st.integers(0, end - 1), min_size=1, max_size=3))
    sizes = [draw(st.sampled_from([0, 1, 200, 256, 300, 1000])) for _ in tasks]
    requests = []
    for n, task in enumerate(tasks):
        readers = tuple(m for m, t in enumerate(tasks) if n in t.after) + ((end,) if n in kept else ())
        takes = tuple(t for t in task.after if sizes[t] == sizes[n])
        requests.append(BufferRequest(sizes[n], n, readers, Home.RESULT if n in kept else Home.ARENA, takes))
    return tasks, requests


@settings(max_examples=200)
@given(programs(), st.integers(0, 99))
def test_no_step_finds_an_operand_overwritten(program, seed):
    """Runs the plan on bytes: every step writes its number wherever its result lies, and looks for its operands'."""
    tasks, requests = program
    schedule = plan_schedule(tasks)
    plan = plan_buffers(requests, schedule.before)
    memory = {None: [-1] * plan.arena_bytes} | {n: [-1] * r.size for n, r in enumerate(requests)}

    def place(buffer):
        owner = plan.owner[buffer]
        home = owner if requests[owner].home is Home.RESULT else None
        start = 0 if home is not None else plan.offsets[owner]
        assert start % ALIGNMENT == 0
        return memory[home], range(start, start + requests[buffer].size)

    for step in random_order(schedule, seed):
        for operand in tasks[step].after:
            where, span = place(operand)
            assert all(where[k] == operand for k in span)
        where, span = place(step)
        for k in span:
            where[k] = step
    for n, request in enumerate(requests):
        if request.home is Home.RESULT:
            where, span = place(n)
            assert all(where[k] == n for k in span)
    assert plan.arena_bytes <= plan.requested


def test_a_chain_needs_two_places():
    requests = [BufferRequest(1000, n, (n + 1,)) for n in range(9)] + [BufferRequest(1000, 9, (10,), Home.RESULT)]
    schedule = plan_schedule([Task((n - 1,) if n else ()) for n in range(10)])
    plan = plan_buffers(requests, schedule.before)
    assert plan.arena_bytes == 2 * aligned(1000) and plan.requested == 9 * aligned(1000)


def test_a_step_that_may_write_where_it_reads_needs_no_second_place():
    requests = [BufferRequest(1000, n, (n + 1,), takes=(n - 1,) if n else ()) for n in range(5)]
    plan = plan_buffers(requests, plan_schedule([Task((n - 1,) if n else ()) for n in range(6)]).before)
    assert plan.arena_bytes == aligned(1000) and set(plan.owner) == {0}


@pytest.mark.parametrize("later_reader", [False, True])
def test_an_operand_that_was_given_away_is_a_place_until_its_last_reader(later_reader):
    readers = (0, 1) if later_reader else (0,)
    requests = [BufferRequest(64, -1, readers, Home.OPERAND), BufferRequest(64, 0, (2,), Home.RESULT, takes=(0,))]
    plan = plan_buffers(requests, plan_schedule([Task(()), Task((0,))]).before)
    assert plan.owner[1] == (1 if later_reader else 0)


def test_what_the_caller_keeps_is_taken_by_nobody():
    requests = [BufferRequest(64, 0, (1, 2), Home.RESULT), BufferRequest(64, 1, (2,), Home.RESULT, takes=(0,))]
    plan = plan_buffers(requests, plan_schedule([Task(()), Task((0,))]).before)
    assert plan.owner == (0, 1)
