"""The CUDA text of every kernel compiles for the GPUs of today, without spills. No GPU is needed: NVRTC runs ptxas."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np
import pytest
from catalog import CATALOG
from random_kernels import random_module

from hlofuse.codegen.dialect import CUDA
from hlofuse.codegen.kernel import KernelText
from hlofuse.compiler import Compilation, compile_function, compile_module
from hlofuse.hlo.builder import computation, constant, element_of, make, parameter, tuple_of
from hlofuse.hlo.module import Module
from hlofuse.hlo.shape import Shape, TupleShape
from hlofuse.runtime.kernel_cache import KernelCache
from hlofuse.runtime.nvrtc import CudaBinary, CudaSource, KernelResources, compile_many, nvrtc_available

pytestmark = pytest.mark.skipif(nvrtc_available() is not None, reason=str(nvrtc_available()))

# Rows, columns and whole arrays; odd sizes, sizes that make whole vectors, and enough elements to be split over blocks.
REDUCTIONS = {
    "row": ((4000, 1024), (1,)), "odd row": ((300, 77), (1,)), "column": ((513, 96), (0,)),
    "split column": ((65536, 64), (0,)), "full": ((1 << 20,), (0,)), "middle": ((12, 50, 64), (1,)),
}  # fmt: skip
TYPES = ("pred", "s8", "u16", "s32", "u64", "f16", "bf16", "f32", "f64", "c64", "c128")


@functools.cache
def catalog_kernels(size: str) -> dict[str, KernelText]:
    """By workload and cluster."""
    return {f"{name}/{kernel.symbol}": kernel for name, workload in CATALOG.items()
            for kernel in kernels(compile_function(workload.fn, *workload.avals(size), device="h200"))}  # fmt: skip


def kernels(compilation: Compilation) -> list[KernelText]:
    return [cluster.text_in("cuda") for cluster in compilation.clusters if cluster.segments]


def resources(texts: Iterable[KernelText], arch: str) -> dict[str, KernelResources]:
    """What ptxas gave each kernel; fails with the compiler's words where one does not compile."""
    sources = {text.symbol: CudaSource(text.symbol, text.text) for text in texts}
    built = compile_many(list(sources.values()), arch, KernelCache(), prelude=CUDA.prelude)
    found = {}
    for symbol, binary in built.items():
        assert isinstance(binary, CudaBinary), f"{binary}\n{sources[symbol].text}"
        found[symbol] = binary.kernels[symbol]
    return found


@pytest.mark.parametrize("size, arch", [("full", "sm_80"), ("full", "sm_90"), ("full", "sm_100"), ("small", "sm_90")])
def test_catalog_kernels_compile_without_spills(size, arch):
    texts = catalog_kernels(size)
    found = resources(texts.values(), arch)
    spilling = {name: found[text.symbol] for name, text in texts.items()
                if found[text.symbol].spill_stores or found[text.symbol].spill_loads}  # fmt: skip
    assert not spilling
    for name, text in texts.items():
        figures = found[text.symbol]
        assert figures.registers * text.threads <= 65536, name
        assert figures.shared_bytes <= 48 * 1024, name


def reduction_module(element_type: str, dims: tuple[int, ...], axes: tuple[int, ...]) -> Module:
    """Σ of (x op x) over `axes`, and what is left of x when it is taken off, in one program."""
    x = parameter(0, Shape(element_type, dims))
    value = make("not" if element_type == "pred" else "multiply", *([x] if element_type == "pred" else [x, x]))
    opcode = "or" if element_type == "pred" else "add"
    a, b = parameter(0, Shape(element_type), "a"), parameter(1, Shape(element_type), "b")
    body = computation("reducer", (a, b), make(opcode, a, b))
    start = constant(np.zeros((), Shape(element_type).dtype), element_type)
    total = make("reduce", value, start, dimensions=axes, to_apply=body)
    rest = tuple(d for d in range(len(dims)) if d not in axes)
    again = make("broadcast", total, shape=x.array, dimensions=rest)
    left = make("xor" if element_type == "pred" else "subtract", x, again)
    return Module("reduction", computation("main", (x,), tuple_of([total, left])))


def argmin_module(element_type: str, dims: tuple[int, ...], axis: int) -> Module:
    """The least value and where it is: one reduction of two operands."""
    value, place = Shape(element_type), Shape("s32")
    x = parameter(0, value.with_dims(dims))
    index = make("iota", shape=place.with_dims(dims), iota_dimension=axis)
    a, i, b, j = (parameter(n, s, "aibj"[n]) for n, s in enumerate((value, place, value, place)))
    first = make("or", make("compare", a, b, direction="LT"),
                 make("and", make("compare", a, b, direction="EQ"), make("compare", i, j, direction="LT")))
    body = computation("least", (a, i, b, j), tuple_of([make("select", first, a, b), make("select", first, i, j)]))
    dtype = value.dtype
    high = np.asarray(np.inf if dtype.kind not in "iu" else np.iinfo(dtype).max, dtype)
    rest = tuple(n for d, n in enumerate(dims) if d != axis)
    best = make("reduce", x, index, constant(high, element_type), constant(0, "s32"), dimensions=(axis,), to_apply=body,
                shape=TupleShape((value.with_dims(rest), place.with_dims(rest))))
    return Module("argmin", computation("main", (x,), tuple_of([element_of(best, 0), element_of(best, 1)])))


def test_reductions_of_every_type_compile_in_every_form():
    modules = [reduction_module(element_type, *where) for element_type in TYPES for where in REDUCTIONS.values()]
    texts = [kernel for module in modules for kernel in kernels(compile_module(module, device="h200"))]
    forms = {text.form for text in texts}
    assert forms >= {"row", "full"} and any("column" in form for form in forms), forms
    found = resources(texts, "sm_90")
    assert len(found) >= 4 * len(TYPES)
    assert not [symbol for symbol, figures in found.items() if figures.spill_stores]


def test_argmin_compiles_in_every_form():
    texts = [kernel for dims, axis in (((3000, 1024), 1), ((3000, 512), 0), ((1 << 20,), 0), ((64, 9), 1))
             for element_type in ("f32", "bf16", "s32", "f64")
             for kernel in kernels(compile_module(argmin_module(element_type, dims, axis), device="h200"))]  # fmt: skip
    assert {"row", "full", "loop"} <= {text.form for text in texts}
    assert resources(texts, "sm_90")


def test_random_programs_compile_without_spills():
    texts = [kernel for seed in range(40) for kernel in kernels(compile_module(random_module(seed), device="h200"))]
    assert {"loop", "row", "full", "transpose"} <= {text.form for text in texts}
    found = resources(texts, "sm_90")
    assert not {symbol: figures for symbol, figures in found.items() if figures.spill_stores}
