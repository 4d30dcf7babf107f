"""Axes: which dimensions are one loop, on small HLO modules, and the invariants of the union-find on random ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from random_programs import random_program

from hlofuse.frontend.import_jaxpr import import_jaxpr
from hlofuse.fusion.axes import Axes
from hlofuse.fusion.plan import make_plan
from hlofuse.hlo.module import Computation, Instruction
from hlofuse.hlo.parser import parse_module
from hlofuse.hlo.shape import Shape
from hlofuse.passes import run_passes


def axes_of(body: str) -> tuple[Axes, dict[str, Instruction]]:
    """The axes of an entry computation, and its instructions by name."""
    module = parse_module(f"HloModule m\nENTRY main {{\n{body}\n}}\n")
    instructions = module.entry.instructions
    return Axes(instructions), {i.name: i for i in instructions}


def test_elementwise_operands_and_result_share_their_axes():
    axes, by = axes_of("""x = f32[4,6] parameter(0)
        y = f32[4,6] parameter(1)
        ROOT z = f32[4,6] add(x, y)""")
    assert axes.dims(by["x"]) == axes.dims(by["y"]) == axes.dims(by["z"])


def test_a_matrix_and_its_transpose_never_share_an_axis():
    """x + x.T reads x at another place; it is not a diagonal."""
    axes, by = axes_of("""x = f32[5,5] parameter(0)
        t = f32[5,5] transpose(x), dimensions={1,0}
        ROOT z = f32[5,5] add(x, t)""")
    assert axes.dims(by["t"]) == axes.dims(by["x"])[::-1]
    assert (by["z"], 1) in axes.shifted
    assert len(set(axes.atoms(by["z"]))) == 2


def test_reshapes_split_where_factors_allow():
    axes, by = axes_of("""x = f32[8,6] parameter(0)
        y = f32[2,4,6] reshape(x)
        ROOT z = f32[2,24] reshape(y)""")
    (a, b), (c,) = axes.dims(by["x"])
    assert axes.dims(by["y"]) == ((a,), (b,), (c,)) and axes.dims(by["z"]) == ((a,), (b, c))
    assert not axes.shifted


def test_reshapes_without_common_factors_are_other_loops():
    axes, by = axes_of("""x = f32[6,4] parameter(0)
        ROOT y = f32[4,6] reshape(x)""")
    assert (by["y"], 0) in axes.shifted
    assert not axes.mask(by["x"]) & axes.mask(by["y"])


def test_a_later_split_reaches_every_value():
    """y is split after x + y were unified, by a reshape of x."""
    axes, by = axes_of("""x = f32[12] parameter(0)
        y = f32[12] parameter(1)
        z = f32[12] add(x, y)
        r = f32[3,4] reshape(x)
        ROOT t = (f32[12], f32[3,4]) tuple(z, r)""")
    assert axes.atoms(by["y"]) == axes.atoms(by["z"]) == axes.atoms(by["r"])
    assert [axes.size(a) for a in axes.atoms(by["y"])] == [3, 4]


def test_gathering_along_an_axis_of_its_own_indices_opens_a_loop():
    """table[i, :] by indices along the row axis itself: one atom may not be two dimensions of a value."""
    axes, by = axes_of("""x = s32[7,7] parameter(0)
        sum = s32[7] parameter(1)
        other = s32[7,7] broadcast(sum), dimensions={1}
        both = s32[7,7] add(x, other)
        ROOT g = s32[7,7] gather(both, sum), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0},
            index_vector_dim=1, slice_sizes={1,7}""")
    assert len(set(axes.atoms(by["g"]))) == 2
    assert (by["g"], 1) in axes.shifted


def test_results_of_one_shape_can_share_their_loops():
    """x and its reverse are other loops by what they read, but one loop can write both."""
    axes, by = axes_of("""x = f32[8] parameter(0)
        a = f32[8] tanh(x)
        b = f32[8] reverse(a), dimensions={0}
        ROOT t = (f32[8], f32[8]) tuple(a, b)""")
    axes.align(by["a"], by["b"])
    assert axes.dims(by["a"]) == axes.dims(by["b"])
    plan = make_plan(Computation("main", (by["x"],), by["t"]))
    assert [a.size for a in plan.axes] == [8]


def test_units_and_nothing_have_axes_too():
    axes, by = axes_of("""x = f32[1,3,1] parameter(0)
        y = f32[3] reshape(x)
        n = f32[0,3] parameter(1)
        m = f32[3,0] reshape(n)
        ROOT t = (f32[3], f32[3,0]) tuple(y, m)""")
    assert axes.dims(by["x"]) == ((), axes.dims(by["y"])[0], ())
    assert [axes.size(a) for a in axes.atoms(by["m"])] == [3, 0]


@pytest.mark.parametrize("seed", range(60))
def test_no_value_has_an_axis_twice(seed):
    """In random programs a value's atoms are distinct and multiply to its dimensions, and company is mutual."""
    program = random_program(seed)
    closed = jax.make_jaxpr(program.function)(*program.arguments)
    entry = run_passes(import_jaxpr(closed, "program").module).entry
    axes = Axes(entry.instructions)
    for i in entry.instructions:
        if not isinstance(i.shape, Shape):
            continue
        atoms = axes.atoms(i)
        assert len(set(atoms)) == len(atoms), i
        for dim, size in zip(axes.dims(i), i.dims, strict=True):
            product = 1
            for a in dim:
                product *= axes.size(a)
            assert product == size, i
    for atom, company in enumerate(axes._together):
        assert all(atom in axes._together[other] for other in company)
        assert not company or (axes._find(atom) == atom and axes._children[atom] is None)


def test_many_slices_of_one_axis_stay_linear():
    """Each slice opens an axis beside one that all share: what an axis was seen with must not be walked for each."""

    def many(x):
        return sum((lax.slice(x, (0, k), (4, k + 9)) * (k + 1.0) for k in range(400)), jnp.zeros(()))

    entry = run_passes(import_jaxpr(jax.make_jaxpr(many)(jnp.zeros((4, 1000))), "many").module).entry
    axes = Axes(entry.instructions)
    assert sum(map(len, axes._together)) < 4 * len(entry.instructions)
