"""Shapes: an element type and dimensions, or a tuple of shapes.

Element types carry HLO's names (`f32`, `pred`, `bf16`). Shapes are logical: every array is dense and row-major, and a
layout that foreign text brings is turned into a transpose by the parser, never kept.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

# HLO's element type names and the NumPy scalar types that hold them. Types that are not fusible are listed too: every
# function runs, and these run through JAX.
_NUMPY_TYPES: dict[str, Any] = {
    "pred": np.bool_,
    "s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64,
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64,
    "c64": np.complex64, "c128": np.complex128,
    "s2": ml_dtypes.int2, "s4": ml_dtypes.int4, "u2": ml_dtypes.uint2, "u4": ml_dtypes.uint4,
    "f8e4m3fn": ml_dtypes.float8_e4m3fn, "f8e5m2": ml_dtypes.float8_e5m2, "f8e4m3": ml_dtypes.float8_e4m3,
    "f8e3m4": ml_dtypes.float8_e3m4, "f8e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "f8e5m2fnuz": ml_dtypes.float8_e5m2fnuz, "f8e4m3b11fnuz": ml_dtypes.float8_e4m3b11fnuz,
    "f8e8m0fnu": ml_dtypes.float8_e8m0fnu, "f4e2m1fn": ml_dtypes.float4_e2m1fn,
}
_DTYPES: dict[str, np.dtype] = {name: np.dtype(kind) for name, kind in _NUMPY_TYPES.items()}
_NAMES: dict[np.dtype, str] = {dtype: name for name, dtype in _DTYPES.items()}

SIGNED = frozenset({"s8", "s16", "s32", "s64"})
UNSIGNED = frozenset({"u8", "u16", "u32", "u64"})
INTEGERS = SIGNED | UNSIGNED
FLOATS = frozenset({"f16", "bf16", "f32", "f64"})
COMPLEX = frozenset({"c64", "c128"})
FUSIBLE = INTEGERS | FLOATS | COMPLEX | {"pred"}  # what generated kernels compute with


def dtype_of(element_type: str) -> np.dtype:
    """The NumPy dtype of an HLO element type name."""
    return _DTYPES[element_type]


def element_type_of(dtype: Any) -> str:
    """HLO's name of a NumPy-like dtype; `KeyError` for one that HLO has no name for."""
    return _NAMES[np.dtype(dtype)]


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense row-major array: `Shape("f32", (8, 16))` prints as `f32[8,16]{1,0}`."""

    element_type: str
    dims: tuple[int, ...] = ()

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def dtype(self) -> np.dtype:
        return _DTYPES[self.element_type]

    @property
    def byte_size(self) -> int:
        return 0 if self.element_type == "token" else self.size * self.dtype.itemsize

    def with_dims(self, dims: Sequence[int]) -> Shape:
        return Shape(self.element_type, tuple(dims))

    def with_type(self, element_type: str) -> Shape:
        return Shape(element_type, self.dims)

    def __str__(self) -> str:
        if self.element_type == "token":
            return "token[]"
        dims = ",".join(map(str, self.dims))
        layout = "{" + ",".join(map(str, reversed(range(self.rank)))) + "}" if self.rank else ""
        return f"{self.element_type}[{dims}]{layout}"


@dataclass(frozen=True, slots=True)
class TupleShape:
    """What an instruction with several results, or a computation's tuple root, has."""

    elements: tuple[AnyShape, ...]

    @property
    def byte_size(self) -> int:
        return sum(element.byte_size for element in self.elements)

    def __str__(self) -> str:
        return "(" + ", ".join(map(str, self.elements)) + ")"


AnyShape = Shape | TupleShape
TOKEN = Shape("token")


@functools.lru_cache(maxsize=4096)
def _shape(dtype: np.dtype, dims: tuple[int, ...]) -> Shape:
    return Shape(_NAMES[dtype], dims)


def shape_of(value: Any) -> Shape:
    """The shape of anything with `.shape` and `.dtype`: an array, an aval, a `ShapeDtypeStruct`."""
    return _shape(np.dtype(value.dtype), tuple(int(d) for d in value.shape))
