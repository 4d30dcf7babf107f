"""Arrays of more than 2^31 elements, and of just less: nothing is allocated, the kernels' text is read."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from hlofuse.compiler import Cluster, compile_function


def only_cluster(fn, *dims: int, dtype=jnp.float32, device: str = "h200") -> Cluster:
    return compile_function(fn, jax.ShapeDtypeStruct(dims, dtype), device=device).clusters[0]


@pytest.mark.parametrize("total", [10**6, 2**30, 2**31 - 2**17, 2**31 + 1])
@pytest.mark.parametrize("device", ["h200", "host"])
def test_the_end_of_the_last_chunk_is_a_number_of_the_index_type(total, device) -> None:
    text = only_cluster(jnp.sum, total, device=device).text
    assert text.form == "full"
    found = re.search(r"const (int|long long) begin = .* \* (\d+);", text.text)
    assert found
    assert found[1] == "long long" or text.blocks * int(found[2]) < 2**31


def test_short_rows_are_no_more_than_block_numbers() -> None:
    fits, too_many = (only_cluster(lambda x: x.sum(-1), n, 64) for n in (2**31 - 1, 2**31))
    assert fits.text.blocks < 2**31
    assert "2147483648 blocks" in too_many.refusal
