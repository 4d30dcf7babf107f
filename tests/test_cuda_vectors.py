"""How CUDA threads read and write: whole words of neighbors where they are aligned, short rows several to a block."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from hlofuse.codegen.dialect import CUDA
from hlofuse.codegen.kernel import KernelText
from hlofuse.compiler import compile_function
from hlofuse.hlo.index_map import constant, delinearize, floor_div, is_run, linearize, mod, variable
from hlofuse.runtime.nvrtc import compile_ptx, nvrtc_available

needs_nvrtc = pytest.mark.skipif(nvrtc_available() is not None, reason=str(nvrtc_available()))


def kernel(fn, *shapes: tuple[tuple[int, ...], str]) -> KernelText:
    """The one kernel of a function."""
    arguments = [jax.ShapeDtypeStruct(dims, dtype) for dims, dtype in shapes]
    (cluster,) = (c for c in compile_function(fn, *arguments, device="h200").clusters if c.segments)
    return cluster.text


def accesses(text: KernelText) -> set[str]:
    """Every kind of global load and store in the PTX, without the way through the caches."""
    ptx = compile_ptx(CUDA.prelude + text.text, "sm_90")
    return {m[1] + (m[2] or "") for m in re.finditer(r"\b(ld|st)\.global(?:\.nc)?(\.v[248])?\.\w+", ptx)}


def softmax(x):
    return jax.nn.softmax(x, axis=-1)


@needs_nvrtc
@pytest.mark.parametrize(("fn", "shapes"), [
    (lambda x, y: jnp.tanh(x) * y, [((1 << 20,), "float32")] * 2),
    (lambda x, b: jnp.sin(x + b), [((512, 1024), "float32"), ((1024,), "float32")]),
    (lambda x, y: x[:, 8:] + y, [((512, 1032), "float32"), ((512, 1024), "float32")]),
    (softmax, [((512, 4096), "float32")]),
    (softmax, [((9000, 128), "float32")]),
])  # fmt: skip
def test_aligned_lines_move_in_words_of_16_bytes(fn, shapes):
    text = kernel(fn, *shapes)
    assert accesses(text) == {"ld.v4", "st.v4"}, text.text


@needs_nvrtc
@pytest.mark.parametrize("dtype, lanes, expected", [
    ("float64", 2, {"ld.v2", "st.v2"}), ("float32", 4, {"ld.v4", "st.v4"}), ("bfloat16", 4, {"ld.v4", "st.v4"}),
    ("complex64", 2, {"ld.v4", "st.v4"}), ("int8", 4, {"ld.v4", "st.v4"}),
])  # fmt: skip
def test_a_word_has_at_most_16_bytes(dtype, lanes, expected):
    with jax.enable_x64(True):
        text = kernel(lambda x, y: x * y + x, ((4096, 256), dtype), ((4096, 256), dtype))
    assert f"LANES = {lanes} " in text.text
    assert accesses(text) == expected


@needs_nvrtc
def test_an_odd_end_keeps_the_words_of_the_rest():
    text = kernel(lambda x, y: x * y, *[((1_000_003,), "float32")] * 2)
    assert {"ld.v4", "st.v4"} <= accesses(text) and "for_tiles<" in text.text


@pytest.mark.parametrize("length, lanes", [(1024, 4), (1022, 2), (1021, 1)])
def test_lines_that_cannot_be_aligned_have_fewer_lanes(length, lanes):
    assert f"LANES = {lanes} " in kernel(lambda x, b: x + b, ((512, length), "float32"), ((length,), "float32")).text
    assert f"LANES = {lanes} " in kernel(softmax, ((512, length), "float32")).text


@needs_nvrtc
def test_an_unaligned_shift_is_read_element_by_element():
    text = kernel(lambda x, y: x[:, 1:] + y, ((512, 1028), "float32"), ((512, 1027), "float32"))
    assert accesses(text) == {"ld", "st"}
    text = kernel(lambda x, y: x[:, 1:] + y, ((512, 1025), "float32"), ((512, 1024), "float32"))
    assert accesses(text) == {"ld", "ld.v4", "st.v4"}


@needs_nvrtc
@pytest.mark.parametrize("width, stored", [(300, "st.v4"), (64, "st.v4"), (1024, "st.v4"), (7, "st")])
@pytest.mark.parametrize("mode", ["fill", "clip"])
def test_a_gathered_row_is_found_before_it_is_read(width, stored, mode):
    """Rows shorter than a run of threads are flattened: then the row's number is known in the lanes only."""
    text = kernel(lambda x, i: jnp.take(x, i, axis=0, mode=mode) * 2, ((100, width), "float32"), ((50,), "int32"))
    assert stored in accesses(text), text.text


@pytest.mark.parametrize("rows, length", [(20_000, 128), (20_001, 64), (9000, 500), (64, 128)])
def test_short_rows_share_a_block(rows, length):
    text = kernel(softmax, ((rows, length), "float32"))
    threads = int(re.search(r"THREADS = (\d+)", text.text)[1])
    groups = text.threads // threads
    assert text.blocks == -(-rows // groups)
    assert "BARRIER" not in text.text
    if rows > 1000:
        assert text.threads >= 128 and groups > 1 and text.blocks >= CUDA.split_below
    else:
        assert text.threads == 32
    assert ("return;" in text.text) == (rows % groups != 0)


@needs_nvrtc
def test_arguments_may_have_the_names_that_kernels_use():
    def names(counters, i0, j0, i, l, THREAD, BLOCK, block, blockIdx, buffers, count, begin, slot, v0):  # noqa: E741
        total = jnp.sin(counters) + i0 * j0 + i + l + THREAD + BLOCK
        return total + block + blockIdx + buffers + count + begin + slot + v0

    for dims in ((64, 4096), (7, 33), (100_000,)):
        compile_ptx(CUDA.prelude + kernel(names, *[(dims, "float32")] * 14).text)


def test_a_run_is_seen_through_divisions():
    v, i = variable("v", 4096), variable("i", 100)
    assert is_run(v, "v", 4) and is_run(v + 8, "v", 4) and is_run(i * 64 + v, "v", 4)
    assert is_run(mod(v, 8), "v", 4) and is_run(linearize(delinearize(v, (64, 64)), (64, 64)), "v", 4)
    assert is_run(i * 8 + mod(v, 4), "v", 4) and is_run(floor_div(v, 64) * 128 + mod(v, 64), "v", 4)
    assert not is_run(v + 1, "v", 4)                     # starts between two words
    assert not is_run(i * 3 + v, "v", 4)
    assert not is_run(v * 2, "v", 4) and not is_run(v * -1, "v", 4)
    assert not is_run(mod(v, 6), "v", 4)                 # turns back inside a run
    assert not is_run(floor_div(v, 6) * 4 + mod(v, 4), "v", 4)
    assert not is_run(i, "v", 4) and not is_run(constant(0), "v", 4)
    assert not is_run(floor_div(v, 2), "v", 4)
