"""Spells instructions for the import rules: every helper knows its result's shape, so no shape rule runs.

An `Emitter` holds the metadata of the equation that is being imported and stamps it on all it makes. It knows nothing
of jaxprs; `scope.Scope` adds those.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hlofuse.hlo.builder import make
from hlofuse.hlo.module import NO_METADATA, Computation, Instruction, Metadata
from hlofuse.hlo.shape import AnyShape, Shape, TupleShape, dtype_of

PRED = "pred"


class Emitter:
    """Makes instructions of one computation. Scalar constants are shared within it."""

    def __init__(self) -> None:
        self.metadata: Metadata = NO_METADATA
        self._scalars: dict[tuple[str, bytes], Instruction] = {}

    def emit(self, opcode: str, *operands: Instruction, shape: AnyShape, **attrs: Any) -> Instruction:
        return make(opcode, *operands, shape=shape, metadata=self.metadata, **attrs)

    # --- constants -------------------------------------------------------------------------------------------------

    def literal(self, value: np.ndarray, element_type: str) -> Instruction:
        """A constant of any rank; `value` must have the element type's dtype already."""
        if value.ndim:
            return self.emit("constant", shape=Shape(element_type, value.shape), literal=value)
        key = (element_type, value.tobytes())
        if key not in self._scalars:
            self._scalars[key] = make("constant", shape=Shape(element_type), literal=value)
        return self._scalars[key]

    def scalar(self, value: Any, element_type: str) -> Instruction:
        return self.literal(np.asarray(value, dtype_of(element_type)), element_type)

    def full(self, value: Any, shape: Shape) -> Instruction:
        return self.broadcast(self.scalar(value, shape.element_type), shape.dims)

    def like(self, x: Instruction, value: Any) -> Instruction:
        """`value` in the shape and element type of `x`."""
        return self.full(value, x.array)

    def iota(self, shape: Shape, dimension: int) -> Instruction:
        return self.emit("iota", shape=shape, iota_dimension=dimension)

    # --- element-wise ----------------------------------------------------------------------------------------------

    def unary(self, opcode: str, x: Instruction, element_type: str | None = None) -> Instruction:
        return self.emit(opcode, x, shape=x.array if element_type is None else x.array.with_type(element_type))

    def binary(self, opcode: str, x: Instruction, y: Instruction | float) -> Instruction:
        """`y` may be a Python number: it takes the shape and type of `x`."""
        return self.emit(opcode, x, y if isinstance(y, Instruction) else self.like(x, y), shape=x.shape)

    def add(self, x: Instruction, y: Instruction | float) -> Instruction:
        return self.binary("add", x, y)

    def sub(self, x: Instruction, y: Instruction | float) -> Instruction:
        return self.binary("subtract", x, y)

    def mul(self, x: Instruction, y: Instruction | float) -> Instruction:
        return self.binary("multiply", x, y)

    def div(self, x: Instruction, y: Instruction | float) -> Instruction:
        return self.binary("divide", x, y)

    def compare(self, direction: str, x: Instruction, y: Instruction | float, order: str | None = None) -> Instruction:
        """`order="TOTALORDER"` compares floats as sign-magnitude integers."""
        other = y if isinstance(y, Instruction) else self.like(x, y)
        shape = x.array.with_type(PRED)
        if order is None:
            return self.emit("compare", x, other, shape=shape, direction=direction)
        return self.emit("compare", x, other, shape=shape, direction=direction, type=order)

    def select(self, predicate: Instruction, on_true: Instruction, on_false: Instruction | float) -> Instruction:
        other = on_false if isinstance(on_false, Instruction) else self.like(on_true, on_false)
        return self.emit("select", predicate, on_true, other, shape=on_true.shape)

    def convert(self, x: Instruction, element_type: str) -> Instruction:
        """As `lax.convert_element_type`: to pred is `x != 0`, complex to real drops the imaginary part."""
        if x.element_type == element_type:
            return x
        if x.element_type in ("c64", "c128") and element_type not in ("c64", "c128"):
            if element_type == PRED:  # JAX reads the real part only
                return self.convert(self.real(x), PRED)
            return self.convert(self.real(x), element_type)
        if element_type == PRED:
            return self.compare("NE", x, 0)
        return self.unary("convert", x, element_type)

    def real(self, x: Instruction) -> Instruction:
        return self.unary("real", x, "f32" if x.element_type == "c64" else "f64")

    def imag(self, x: Instruction) -> Instruction:
        return self.unary("imag", x, "f32" if x.element_type == "c64" else "f64")

    def complex(self, real: Instruction, imag: Instruction) -> Instruction:
        element_type = "c64" if real.element_type == "f32" else "c128"
        return self.emit("complex", real, imag, shape=real.array.with_type(element_type))

    # --- shape -----------------------------------------------------------------------------------------------------

    def reshape(self, x: Instruction, dims: Sequence[int]) -> Instruction:
        dims = tuple(dims)
        return x if dims == x.dims else self.emit("reshape", x, shape=x.array.with_dims(dims))

    def broadcast(self, x: Instruction, dims: Sequence[int], dimensions: Sequence[int] = ()) -> Instruction:
        """HLO's broadcast: operand axis i is result axis `dimensions[i]`, of the same size."""
        dims, dimensions = tuple(dims), tuple(dimensions)
        if dims == x.dims and dimensions == tuple(range(len(dims))):
            return x
        return self.emit("broadcast", x, shape=x.array.with_dims(dims), dimensions=dimensions)

    def broadcast_in_dim(self, x: Instruction, dims: Sequence[int], dimensions: Sequence[int]) -> Instruction:
        """As `lax.broadcast_in_dim`: operand axes of size 1 also stretch."""
        dims = tuple(dims)
        kept = [i for i, d in enumerate(dimensions) if x.dims[i] == dims[d]]
        if len(kept) < x.array.rank:
            x = self.reshape(x, [x.dims[i] for i in kept])
        return self.broadcast(x, dims, [dimensions[i] for i in kept])

    def broadcast_to(self, x: Instruction, dims: Sequence[int]) -> Instruction:
        """Trailing axes align, as NumPy; axes of size 1 stretch."""
        if x.dims == tuple(dims):
            return x
        return self.broadcast_in_dim(x, dims, range(len(dims) - x.array.rank, len(dims)))

    def transpose(self, x: Instruction, permutation: Sequence[int]) -> Instruction:
        permutation = tuple(permutation)
        if permutation == tuple(range(len(permutation))):
            return x
        dims = tuple(x.dims[p] for p in permutation)
        return self.emit("transpose", x, shape=x.array.with_dims(dims), dimensions=permutation)

    def slice(self, x: Instruction, starts: Sequence[int], limits: Sequence[int],
              strides: Sequence[int] | None = None) -> Instruction:
        strides = [1] * len(starts) if strides is None else strides
        bounds = tuple(zip(starts, limits, strides, strict=True))
        dims = tuple(max(0, -(-(limit - start) // stride)) for start, limit, stride in bounds)
        if dims == x.dims and all(stride == 1 for stride in strides):
            return x
        return self.emit("slice", x, shape=x.array.with_dims(dims), slice=bounds)

    def slice_axis(self, x: Instruction, axis: int, start: int, limit: int) -> Instruction:
        starts, limits = [0] * x.array.rank, list(x.dims)
        starts[axis], limits[axis] = start, limit
        return self.slice(x, starts, limits)

    def take(self, x: Instruction, axis: int, index: int) -> Instruction:
        """One position of an axis, the axis removed."""
        return self.reshape(self.slice_axis(x, axis, index, index + 1), x.dims[:axis] + x.dims[axis + 1:])

    def concatenate(self, xs: Sequence[Instruction], axis: int) -> Instruction:
        if len(xs) == 1:
            return xs[0]
        dims = list(xs[0].dims)
        dims[axis] = sum(x.dims[axis] for x in xs)
        return self.emit("concatenate", *xs, shape=xs[0].array.with_dims(dims), dimensions=(axis,))

    def dynamic_slice(self, x: Instruction, indices: Sequence[Instruction], sizes: Sequence[int]) -> Instruction:
        sizes = tuple(sizes)
        return self.emit("dynamic-slice", x, *indices, shape=x.array.with_dims(sizes), dynamic_slice_sizes=sizes)

    def dynamic_update_slice(self, x: Instruction, update: Instruction, indices: Sequence[Instruction]) -> Instruction:
        return self.emit("dynamic-update-slice", x, update, *indices, shape=x.shape)

    # --- computations and tuples -----------------------------------------------------------------------------------

    def reduce(self, x: Instruction, init: Instruction, dimensions: Sequence[int],
               to_apply: Computation) -> Instruction:
        dimensions = tuple(sorted(dimensions))
        dims = [d for axis, d in enumerate(x.dims) if axis not in dimensions]
        return self.emit("reduce", x, init, shape=x.array.with_dims(dims), dimensions=dimensions, to_apply=to_apply)

    def tuple(self, operands: Sequence[Instruction]) -> Instruction:
        return self.emit("tuple", *operands, shape=TupleShape(tuple(o.shape for o in operands)))

    def elements(self, operand: Instruction) -> list[Instruction]:
        """`get-tuple-element` of everything in a tuple."""
        assert isinstance(operand.shape, TupleShape)
        return [self.emit("get-tuple-element", operand, shape=shape, index=index)
                for index, shape in enumerate(operand.shape.elements)]
