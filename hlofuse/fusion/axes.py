"""Axes: which dimensions of which values are one and the same loop.

Every dimension is a sequence of *atoms*. Element-wise operations unify the atoms of operands and result, transposes
permute them, reshapes split them where factors allow, broadcasts and reductions add and drop them. An operation that
reads its operand elsewhere (a slice, a gather, a reshape without common factors) opens new atoms: a *shifted* edge.
Two dimensions of one value never share an atom, so `x + x.T` is a shifted read and not a diagonal.
"""
from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from hlofuse.fusion.cumulative import is_scanned
from hlofuse.fusion.loop_structure import LoopStructure, has_structure, loop_structure
from hlofuse.hlo.index_map import reshape_groups
from hlofuse.hlo.module import Instruction, post_order
from hlofuse.hlo.opcode import OPCODES, Kind
from hlofuse.hlo.shape import Shape, TupleShape

Dim = tuple[int, ...]          # the atoms of one dimension, outermost first; empty for a dimension of size 1
Dims = tuple[Dim, ...]


class Axes:
    """The atoms of every instruction of a list in post-order; `dims` and `mask` read them off afterwards."""

    def __init__(self, instructions: Iterable[Instruction], loops: Collection[Instruction] | None = None) -> None:
        """`loops` are the `while` instructions whose bodies have a part in this; None: all of them."""
        self._chosen = loops
        self._size: list[int] = []
        self._parent: list[int] = []
        self._children: list[Dim | None] = []
        self._together: list[set[int]] = []   # the other leaves that some value has beside a leaf
        self._raw: dict[Instruction, Dims] = {}
        self._resolved: dict[Instruction, Dims] = {}
        self.shifted: set[tuple[Instruction, int]] = set()   # (reader, operand number)
        self._scattered: dict[tuple[Instruction, bool, tuple[int, ...]], Dims] = {}
        self._in_loop = False
        self.permuted: set[tuple[Instruction, int, int]] = set()  # (loop, carry, dimension) of other axes in each step
        self._loops: dict[Instruction, tuple[Dims, ...]] = {}   # of each element of a loop's state
        for instruction in instructions:
            self._raw[instruction] = self._rule(instruction)

    # --- what others ask ------------------------------------------------------------------------------------------

    def dims(self, instruction: Instruction) -> Dims:
        """The final atoms of each dimension."""
        found = self._resolved.get(instruction)
        if found is None:
            found = self._resolved[instruction] = tuple(self._leaves(d) for d in self._raw[instruction])
        return found

    def atoms(self, instruction: Instruction) -> Dim:
        return tuple(a for dim in self.dims(instruction) for a in dim)

    def mask(self, instruction: Instruction) -> int:
        """The atoms as a bit set."""
        result = 0
        for atom in self.atoms(instruction):
            result |= 1 << atom
        return result

    def size(self, atom: int) -> int:
        return self._size[atom]

    def align(self, first: Instruction, second: Instruction) -> None:
        """Lets two values of equal dimensions share their loops, where no value forbids it. Before anything is read."""
        assert not self._resolved, "the axes have been read already"
        if first.dims == second.dims:
            for a, b in zip(self._raw[first], self._raw[second], strict=True):
                self._unify(a, b)

    def split(self, atom: int, outer: int) -> tuple[int, int]:
        """An atom as two, the outer one of so many points, in every value that has it. Before anything is read."""
        assert not self._resolved, "the axes have been read already"
        self._split(self._find(atom), outer)
        first, second = self._children[self._find(atom)] or ()
        return first, second

    # --- union and split ------------------------------------------------------------------------------------------

    def _new(self, size: int) -> Dim:
        if size == 1:
            return ()
        self._size.append(size)
        self._parent.append(len(self._parent))
        self._children.append(None)
        self._together.append(set())
        return (len(self._size) - 1,)

    def _find(self, atom: int) -> int:
        parent = self._parent
        while parent[atom] != atom:
            parent[atom] = parent[parent[atom]]
            atom = parent[atom]
        return atom

    def _leaves(self, dim: Dim) -> Dim:
        out: list[int] = []
        stack = list(reversed(dim))
        while stack:
            atom = self._find(stack.pop())
            children = self._children[atom]
            if children is None:
                out.append(atom)
            else:
                stack.extend(reversed(children))
        return tuple(out)

    def _top(self, stack: list[int]) -> int:
        """The leaf on top of a stack of atoms, which may have been split or joined since they were put there."""
        while True:
            atom = stack[-1] = self._find(stack[-1])
            children = self._children[atom]
            if children is None:
                return atom
            stack[-1:] = reversed(children)

    def _register(self, dims: Dims) -> Dims:
        atoms = [a for dim in dims for a in self._leaves(dim)]
        for atom in atoms:
            self._together[atom].update(atoms)
            self._together[atom].discard(atom)
        return dims

    def _split(self, atom: int, outer: int) -> None:
        """atom => (outer, rest): both keep the atom's company and each other's."""
        pieces = (*self._new(outer), *self._new(self._size[atom] // outer))
        company = self._together[atom]
        self._children[atom] = pieces
        self._together[atom] = set()
        for piece in pieces:
            self._together[piece] = {*company, *pieces} - {piece}
        for other in company:
            self._together[other].discard(atom)
            self._together[other].update(pieces)

    def _join(self, a: int, b: int) -> bool:
        """Makes two leaves one; False where some value has both."""
        if a == b:
            return True
        if b in self._together[a]:
            return False
        if len(self._together[a]) < len(self._together[b]):
            a, b = b, a
        self._parent[b] = a
        for other in self._together[b]:
            self._together[other].discard(b)
            self._together[other].add(a)
        self._together[a] |= self._together[b]
        self._together[b] = set()
        return True

    def _unify(self, left: Dim, right: Dim) -> bool:
        """Makes two dimensions of one size the same atoms; False where factors or company forbid it."""
        a, b = list(reversed(left)), list(reversed(right))
        while a and b:
            x, y = self._top(a), self._top(b)
            m, n = self._size[x], self._size[y]
            if m == n:
                if not self._join(x, y):
                    return False
                a.pop()
                b.pop()
            elif m and n and m % n == 0:
                self._split(x, n)
            elif m and n and n % m == 0:
                self._split(y, m)
            else:
                return False
        return not a and not b

    # --- a rule for each opcode -------------------------------------------------------------------------------------

    def _fresh(self, shape: Shape) -> Dims:
        return self._register(tuple(self._new(d) for d in shape.dims))

    def _rule(self, i: Instruction) -> Dims:
        if isinstance(i.shape, TupleShape):
            if i.opcode in ("reduce", "fusion-reduce"):
                return self._reduce(i)
            is_part = self._chosen is None or i in self._chosen or self._in_loop
            if i.opcode == "while" and is_part and has_structure(i):
                self._loop(loop_structure(i))
            return ()
        rule = getattr(self, "_" + i.opcode.replace("-", "_"), None)
        if rule is not None:
            return self._register(rule(i))
        if OPCODES[i.opcode].kind is Kind.ELEMENTWISE:
            return self._register(self._elementwise(i))
        return self._fresh(i.shape)

    def _elementwise(self, i: Instruction) -> Dims:
        result: Dims | None = None
        for k, operand in enumerate(i.operands):
            if operand.dims != i.dims:
                continue   # a scalar predicate or bound
            if self._in_loop and operand.opcode == "broadcast" and not operand.operands[0].dims:
                continue   # one number is at any place
            dims = self._raw[operand]
            if result is None:
                result = dims
            elif not all([self._unify(a, b) for a, b in zip(result, dims, strict=True)]):
                self.shifted.add((i, k))
        return result if result is not None else tuple(self._new(d) for d in i.dims)

    def _broadcast(self, i: Instruction) -> Dims:
        source = dict(zip(i.attrs["dimensions"], self._raw[i.operands[0]], strict=True))
        return tuple(source[k] if k in source else self._new(d) for k, d in enumerate(i.dims))

    def _transpose(self, i: Instruction) -> Dims:
        dims = self._raw[i.operands[0]]
        return tuple(dims[k] for k in i.attrs["dimensions"])

    def _reshape(self, i: Instruction) -> Dims:
        operand = i.operands[0]
        source = self._raw[operand]
        result: list[Dim] = []
        for (i0, i1), (j0, j1) in reshape_groups(i.dims, operand.dims):
            atoms = [a for dim in source[j0:j1] for a in self._leaves(dim)]
            taken = self._take(atoms, i.dims[i0:i1])
            if taken is None:
                self.shifted.add((i, 0))
                taken = [self._new(d) for d in i.dims[i0:i1]]
            result.extend(taken)
        return tuple(result)

    def _take(self, atoms: Sequence[int], sizes: Sequence[int]) -> list[Dim] | None:
        """Deals atoms out to dimensions of the given sizes, splitting them; None without common factors."""
        left = list(reversed(atoms))
        result: list[Dim] = []
        for size in sizes:
            dim: list[int] = []
            while size != 1:
                if not left or size == 0:
                    return None
                atom = self._top(left)
                left.pop()
                have = self._size[atom]
                if have == 0 or (size % have and have % size):
                    return None
                if size % have == 0:
                    dim.append(atom)
                    size //= have
                else:
                    self._split(atom, size)
                    first, second = self._children[atom] or ()
                    dim.append(first)
                    left.append(second)
                    size = 1
            result.append(tuple(dim))
        return result if not left else None

    def _reduce(self, i: Instruction) -> Dims:
        n = len(i.operands) // 2
        first = self._raw[i.operands[0]]
        for k in range(1, n):
            if not all([self._unify(a, b) for a, b in zip(first, self._raw[i.operands[k]], strict=True)]):
                self.shifted.add((i, k))
        return tuple(d for k, d in enumerate(first) if k not in i.attrs["dimensions"])

    def _get_tuple_element(self, i: Instruction) -> Dims:
        operand = i.operands[0]
        if operand in self._loops:
            return self._loops[operand][i.attrs["index"]]
        return self._raw[operand] if operand.opcode == "reduce" else tuple(self._new(d) for d in i.dims)

    def _loop(self, s: LoopStructure) -> None:
        """The body's values like any others. A carry has the same axes in every step, and so have carries of equal
        dimensions where nothing forbids it; a slice that a step writes lies along the stacked array's other axes."""
        state = [self._raw[o] for o in s.loop.operands[0].operands]
        for k in s.carries:
            state[k] = self._fresh(s.shape(k))
        self._raw.update((reader, state[k]) for reader, k in s.elements.items())
        outer, self._in_loop = self._in_loop, True
        for i in post_order((s.body.root, s.predicate)):
            if i not in self._raw:
                self._raw[i] = self._register(self._dot(i)) if i.opcode == "dot" else self._rule(i)
        self._in_loop = outer
        for k in s.carries:
            for d, (a, b) in enumerate(zip(state[k], self._raw[s.update(k)], strict=True)):
                if not self._unify(a, b):
                    self.permuted.add((s.loop, k, d))
        for k in s.carries:
            if not self._unified(state[k], self._raw[s.initial(k)]):
                self.shifted.add((s.loop, k))
            first = next(c for c in s.carries if s.shape(c).dims == s.shape(k).dims)
            self._unified(state[first], state[k])
        for t in s.stacked:
            for d, (a, b) in enumerate(zip(state[t.index], self._raw[t.update], strict=True)):
                if d != t.dim:
                    self._unify(a, b)
        self._loops[s.loop] = tuple(state)

    def _dot(self, i: Instruction) -> Dims:
        """A small product inside a loop: batch and free dimensions are the operands', if they are different ones."""
        sides = []
        for operand, side in zip(i.operands, ("lhs", "rhs"), strict=True):
            batch = tuple(i.attrs.get(f"{side}_batch_dims", ()))
            contracting = tuple(i.attrs[f"{side}_contracting_dims"])
            free = [d for d in range(len(operand.dims)) if d not in batch and d not in contracting]
            sides.append((self._raw[operand], batch, contracting, free))
        (left, *left_dims, left_free), (right, *right_dims, right_free) = sides
        for a, b in zip(left_dims, right_dims, strict=True):
            for m, n in zip(a, b, strict=True):
                self._unify(left[m], right[n])
        result = [left[d] for d in (*left_dims[0], *left_free)] + [right[d] for d in right_free]
        atoms = [a for dim in result for a in self._leaves(dim)]
        if len(set(atoms)) < len(atoms):
            self.shifted.update(((i, 0), (i, 1)))
            return tuple(self._new(d) for d in i.dims)
        return tuple(result)

    def _unified(self, left: Dims, right: Dims) -> bool:
        return all([self._unify(a, b) for a, b in zip(left, right, strict=True)])

    def _touched(self, i: Instruction, same: Sequence[bool], operand: int = 0) -> Dims:
        """The operand's atoms where `same`, new ones elsewhere."""
        if not all(same):
            self.shifted.add((i, operand))
        dims = self._raw[i.operands[operand]]
        return tuple(d if keep else self._new(n) for d, keep, n in zip(dims, same, i.dims, strict=True))

    def _slice(self, i: Instruction) -> Dims:
        whole = [(s, e, t) == (0, n, 1) for (s, e, t), n in zip(i.attrs["slice"], i.operands[0].dims, strict=True)]
        return self._touched(i, whole)

    def _pad(self, i: Instruction) -> Dims:
        return self._touched(i, [tuple(p) == (0, 0, 0) for p in i.attrs["padding"]])

    def _reduce_window(self, i: Instruction) -> Dims:
        if is_scanned(i):
            return self._raw[i.operands[0]]
        return self._touched(i, [(w.size, w.stride, w.pad_low, w.pad_high, w.lhs_dilate) == (1, 1, 0, 0, 1)
                                 for w in i.attrs["window"]])

    def _reverse(self, i: Instruction) -> Dims:
        return self._touched(i, [k not in i.attrs["dimensions"] or n == 1 for k, n in enumerate(i.dims)])

    def _dynamic_slice(self, i: Instruction) -> Dims:
        return self._touched(i, [a == b for a, b in zip(i.dims, i.operands[0].dims, strict=True)])

    def _concatenate(self, i: Instruction) -> Dims:
        axis = i.attrs["dimensions"][0]
        result = self._touched(i, [k != axis for k in range(len(i.dims))])
        for k, operand in enumerate(i.operands):
            self.shifted.add((i, k))
            for d, (a, b) in enumerate(zip(result, self._raw[operand], strict=True)):
                if d != axis:
                    self._unify(a, b)
        return result

    def _dynamic_update_slice(self, i: Instruction) -> Dims:
        result, update = self._raw[i.operands[0]], self._raw[i.operands[1]]
        self.shifted.add((i, 1))
        for a, b, n, m in zip(result, update, i.dims, i.operands[1].dims, strict=True):
            if n == m:
                self._unify(a, b)
        return result

    def _scatter(self, i: Instruction) -> Dims:
        """The array's own axes; index vectors and updates are read in loops of their own. What the same index vectors
        name is one loop, and so are windows of one size."""
        self.shifted.update((i, k) for k in range(1, len(i.operands)))
        dims = self._raw[i.operands[0]]
        attrs: Any = i.attrs
        named = (*attrs.get("input_batching_dims", ()), *attrs["scatter_dims_to_operand_dims"])
        window = [k for k in range(len(dims)) if k not in named]
        for where in (named, tuple(window)):
            key = (i.operands[len(i.operands) // 2], where is named, tuple(i.dims[k] for k in where))
            known = self._scattered.setdefault(key, tuple(dims[k] for k in where))
            for a, k in zip(known, where, strict=True):
                self._unify(a, dims[k])
        return dims

    def _gather(self, i: Instruction) -> Dims:
        attrs: Any = i.attrs
        self.shifted.add((i, 0))
        operand, indices = i.operands
        offset = attrs["offset_dims"]
        batching = tuple(attrs.get("operand_batching_dims", ()))
        dropped = (*attrs["collapsed_slice_dims"], *batching)
        window = [k for k in range(len(operand.dims)) if k not in dropped]
        batch_dims = [k for k in range(len(i.dims)) if k not in offset]
        index_dims = [k for k in range(len(indices.dims)) if k != attrs["index_vector_dim"]]
        if len(index_dims) < len(indices.dims) and indices.dims[attrs["index_vector_dim"]] > 1:
            self.shifted.add((i, 1))    # each number of a place is read for itself
        result: list[Dim] = [()] * len(i.dims)
        for k, source in zip(offset, window, strict=True):
            whole = attrs["slice_sizes"][source] == operand.dims[source]
            result[k] = self._raw[operand][source] if whole else self._new(i.dims[k])
        taken = {a for dim in result for a in self._leaves(dim)}
        for k, source in zip(batch_dims, index_dims, strict=True):
            result[k] = self._raw[indices][source]
            if not taken.isdisjoint(self._leaves(result[k])):   # x[argsort(x)]: the gathered axis is another loop
                self.shifted.add((i, 1))
                result[k] = self._new(i.dims[k])
        for source, where in zip(batching, attrs.get("start_indices_batching_dims", ()), strict=True):
            self._unify(self._raw[operand][source], self._raw[indices][where])
        return tuple(result)
