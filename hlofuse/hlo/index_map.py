"""Index expressions: sums of scaled variables, floor divisions and remainders, kept in one canonical form.

Equal expressions are equal objects by value, so a kernel reads an element once however many ways lead to it. Every
variable has a range, and ranges are what resolves divisions, remainders, clamps and the branches of pad and
concatenate.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache


@dataclass(frozen=True)
class Var:
    """A loop variable or a runtime integer spelled `name`, with low <= value <= high."""

    name: str
    low: int
    high: int


@dataclass(frozen=True)
class FloorDiv:
    value: Index
    divisor: int


@dataclass(frozen=True)
class Mod:
    value: Index
    divisor: int


Atom = Var | FloorDiv | Mod


@dataclass(frozen=True)
class Index:
    """constant + sum of coefficient * atom; terms are sorted, coefficients are not zero."""

    terms: tuple[tuple[Atom, int], ...] = ()
    constant: int = 0

    def __hash__(self) -> int:
        known: int | None = self.__dict__.get("_hash")
        if known is None:
            known = self.__dict__["_hash"] = hash((self.terms, self.constant))
        return known

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """The least and the greatest value that the variables' ranges allow (inclusive)."""
        low = high = self.constant
        for atom, scale in self.terms:
            a, b = _atom_bounds(atom)
            low += scale * (a if scale > 0 else b)
            high += scale * (b if scale > 0 else a)
        return low, high

    @cached_property
    def variables(self) -> frozenset[Var]:
        found: set[Var] = set()
        for atom, _ in self.terms:
            found |= {atom} if isinstance(atom, Var) else atom.value.variables
        return frozenset(found)

    @property
    def is_constant(self) -> bool:
        return not self.terms

    def __add__(self, other: Index | int) -> Index:
        if isinstance(other, int):
            return Index(self.terms, self.constant + other) if other else self
        if not other.terms:
            return self + other.constant
        return _sum_of(self, other)

    def __sub__(self, other: Index | int) -> Index:
        return self + (-other if isinstance(other, int) else other * -1)

    def __mul__(self, scale: int) -> Index:
        if scale == 0:
            return ZERO
        return self if scale == 1 else Index(tuple((a, c * scale) for a, c in self.terms), self.constant * scale)

    def __str__(self) -> str:
        return to_c(self)


ZERO = Index()
Indices = tuple[Index, ...]


def constant(value: int) -> Index:
    return Index((), value)


def variable(name: str, size: int) -> Index:
    """A loop variable over range(size); of a single value it is that value."""
    return var(name, 0, size - 1)


def var(name: str, low: int, high: int) -> Index:
    return constant(low) if low == high else Index(((Var(name, low, high), 1),))


def _atom_bounds(atom: Atom) -> tuple[int, int]:
    if isinstance(atom, Var):
        return atom.low, atom.high
    low, high = atom.value.bounds
    if isinstance(atom, FloorDiv):
        return low // atom.divisor, high // atom.divisor
    return (low, high) if 0 <= low and high < atom.divisor else (0, atom.divisor - 1)


def _size(term: tuple[Atom, int]) -> int:
    return -abs(term[1])


def _key(term: tuple[Atom, int]) -> tuple:
    atom, scale = term
    return (-abs(scale), repr(atom))


@lru_cache(maxsize=65536)
def _sum_of(a: Index, b: Index) -> Index:
    return _sum((*a.terms, *b.terms), a.constant + b.constant)


def _sum(terms: Sequence[tuple[Atom, int]], offset: int) -> Index:
    total: dict[Atom, int] = {}
    for atom, scale in terms:
        total[atom] = total.get(atom, 0) + scale
    kept = [(a, c) for a, c in total.items() if c]
    joined = _rejoin(kept)
    if joined is not None:
        return joined + offset
    if len(kept) > 1:   # to spell the atoms is dear, and rarely needed
        kept.sort(key=_size if len({abs(c) for _, c in kept}) == len(kept) else _key)
    return Index(tuple(kept), offset)


def _rejoin(terms: list[tuple[Atom, int]]) -> Index | None:
    """c*k * (v // k) + c * (v % k) => c * v: a linearized index after it was taken apart; None where none matches."""
    if not any([isinstance(atom, Mod) for atom, _ in terms]):
        return None
    scales = dict(terms)
    for atom, scale in terms:
        if isinstance(atom, Mod):
            quotient = floor_div(atom.value, atom.divisor)
            if len(quotient.terms) == 1 and quotient.terms[0][1] == 1:
                partner = quotient.terms[0][0]
                if scales.get(partner) == scale * atom.divisor:
                    rest = Index(tuple(t for t in terms if t[0] not in (atom, partner)))
                    return rest + (atom.value - quotient.constant * atom.divisor) * scale
    return None


def _without_multiples(value: Index, divisor: int) -> tuple[Index, Index]:
    """(rest, whole) with value = rest + whole * divisor. C divides toward zero, so rest is never negative: its constant
    is the least that the variables' ranges allow."""
    rest = Index(tuple((a, c) for a, c in value.terms if c % divisor), value.constant % divisor)
    low = rest.bounds[0]
    if low < 0:
        rest = rest + -(low // divisor) * divisor
    whole = Index(tuple((a, c // divisor) for a, c in value.terms if c % divisor == 0),
                  (value.constant - rest.constant) // divisor)
    return rest, whole


def _coarse_and_fine(rest: Index, divisor: int) -> tuple[int, Index, Index] | None:
    """(f, coarse, fine) with rest = f * coarse + fine, 0 <= fine < f, and f > 1 a factor of the divisor."""
    for factor in sorted({math.gcd(divisor, c) for _, c in rest.terms}, reverse=True):
        if factor > 1:
            fine = Index(tuple((a, c) for a, c in rest.terms if c % factor), rest.constant % factor)
            if fine.bounds[0] >= 0 and fine.bounds[1] < factor:
                return factor, Index(tuple((a, c // factor) for a, c in rest.terms if c % factor == 0),
                                     rest.constant // factor), fine
    return None


@lru_cache(maxsize=65536)
def floor_div(value: Index, divisor: int) -> Index:
    """value // divisor, with everything that the divisor divides taken out."""
    if divisor == 1:
        return value
    rest, whole = _without_multiples(value, divisor)
    low, high = rest.bounds
    if low // divisor == high // divisor:
        return whole + low // divisor
    parts = _coarse_and_fine(rest, divisor)
    if parts is not None:   # (f*a + b) // (f*k) = a // k
        factor, coarse, _ = parts
        return whole + floor_div(coarse, divisor // factor)
    if len(rest.terms) == 1 and not rest.constant and rest.terms[0][1] == 1:
        atom = rest.terms[0][0]
        if isinstance(atom, FloorDiv):
            return whole + floor_div(atom.value, atom.divisor * divisor)
    return whole + Index(((FloorDiv(rest, divisor), 1),))


@lru_cache(maxsize=65536)
def mod(value: Index, divisor: int) -> Index:
    """value mod divisor, in [0, divisor)."""
    if divisor == 1:
        return ZERO
    rest, _ = _without_multiples(value, divisor)
    low, high = rest.bounds
    if low // divisor == high // divisor:
        return rest - (low // divisor) * divisor
    parts = _coarse_and_fine(rest, divisor)
    if parts is not None:   # (f*a + b) mod (f*k) = f * (a mod k) + b
        factor, coarse, fine = parts
        return mod(coarse, divisor // factor) * factor + fine
    if len(rest.terms) == 1 and not rest.constant and rest.terms[0][1] == 1:
        atom = rest.terms[0][0]
        if isinstance(atom, Mod) and atom.divisor % divisor == 0:
            return mod(atom.value, divisor)
    return Index(((Mod(rest, divisor), 1),))


def linearize(indices: Sequence[Index], dims: Sequence[int]) -> Index:
    """The row-major position of an element."""
    position, stride = ZERO, 1
    for index, dim in zip(reversed(indices), reversed(dims), strict=True):
        position = position + index * stride
        stride *= dim
    return position


def delinearize(position: Index, dims: Sequence[int]) -> tuple[Index, ...]:
    """The element's indices from its row-major position."""
    result: list[Index] = []
    stride = math.prod(dims)
    for k, dim in enumerate(dims):
        stride = stride // dim if dim else 0
        if dim == 1:
            result.append(ZERO)
            continue
        quotient = floor_div(position, stride)
        result.append(mod(quotient, dim) if k or quotient.bounds[1] >= dim or quotient.bounds[0] < 0 else quotient)
    return tuple(result)


def reshape_index(indices: Sequence[Index], result_dims: Sequence[int],
                  operand_dims: Sequence[int]) -> tuple[Index, ...]:
    """Where a reshape reads its operand, group by group, so that what is not split stays as it is."""
    if 0 in operand_dims:
        return tuple(ZERO for _ in operand_dims)
    out: list[Index] = []
    for (i0, i1), (j0, j1) in reshape_groups(result_dims, operand_dims):
        group = indices[i0:i1]
        if i1 - i0 == 1 and j1 - j0 == 1:
            out.append(group[0])
        else:
            position = linearize(group, result_dims[i0:i1])
            out.extend(delinearize(position, operand_dims[j0:j1]))
    return tuple(out)


def reshape_groups(a: Sequence[int], b: Sequence[int]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """The finest pairing of runs of axes of `a` and `b` with equal products, as ((i0, i1), (j0, j1))."""
    groups = []
    i = j = 0
    while i < len(a) or j < len(b):
        i0, j0 = i, j
        left = right = 1
        if i < len(a):
            left, i = a[i], i + 1
        if j < len(b):
            right, j = b[j], j + 1
        while left != right:
            if left < right and i < len(a):
                left, i = left * a[i], i + 1
            elif j < len(b):
                right, j = right * b[j], j + 1
            else:
                left, i = left * a[i], i + 1
        groups.append(((i0, i), (j0, j)))
    return groups


def is_run(index: Index, name: str, lanes: int) -> bool:
    """Whether `index` takes `lanes` neighboring values, from a multiple of `lanes` on, while variable `name` does."""
    step, multiple = _along(index, name, lanes)
    return step == 1 and multiple


def _along(index: Index, name: str, lanes: int) -> tuple[int | None, bool]:
    """How `index` changes per step of `name` within a run (None: not evenly), and whether it starts at a multiple."""
    step, multiple = 0, index.constant % lanes == 0
    for atom, scale in index.terms:
        inner, aligned = _atom_along(atom, name, lanes)
        if inner is None:
            return None, False
        step += scale * inner
        multiple = multiple and (aligned or scale % lanes == 0)
    return step, multiple


def _atom_along(atom: Atom, name: str, lanes: int) -> tuple[int | None, bool]:
    if isinstance(atom, Var):
        return (1, True) if atom.name == name else (0, lanes == 1)
    step, multiple = _along(atom.value, name, lanes)
    fits = step == 0 or step == 1 and multiple and atom.divisor % lanes == 0
    if not fits:
        return None, False
    if isinstance(atom, FloorDiv):
        return 0, lanes == 1
    return step, multiple and atom.divisor % lanes == 0


def renamed(index: Index, old: str, new: str) -> Index:
    """`index` with the variable `old` spelled `new`."""

    def rename(atom: Atom) -> Atom:
        if isinstance(atom, Var):
            return Var(new, atom.low, atom.high) if atom.name == old else atom
        return type(atom)(renamed(atom.value, old, new), atom.divisor)

    return Index(tuple((rename(atom), scale) for atom, scale in index.terms), index.constant)


def to_c(index: Index) -> str:
    """The expression in C; divisions and remainders are of values that are not negative."""
    parts: list[str] = []
    for atom, scale in index.terms:
        text = _atom_c(atom)
        if abs(scale) != 1:
            text = f"{text} * {abs(scale)}"
        parts.append(("- " if scale < 0 else "+ ") + text)
    if index.constant or not parts:
        parts.append(("- " if index.constant < 0 else "+ ") + str(abs(index.constant)))
    text = " ".join(parts)
    return text[2:] if text.startswith("+ ") else "-" + text[2:]


def _atom_c(atom: Atom) -> str:
    if isinstance(atom, Var):
        return atom.name
    assert atom.value.bounds[0] >= 0, f"C divides toward zero, and {atom} may be negative"
    inner = to_c(atom.value)
    if len(atom.value.terms) > 1 or atom.value.constant or (atom.value.terms and atom.value.terms[0][1] != 1):
        inner = f"({inner})"
    text = f"({inner} / {atom.divisor})" if isinstance(atom, FloorDiv) else f"({inner} % {atom.divisor})"
    return text


@dataclass(frozen=True)
class Condition:
    """low <= index < high, and `index - low` is a multiple of `step`."""

    index: Index
    low: int
    high: int
    step: int = 1

    @property
    def known(self) -> bool | None:
        a, b = self.index.bounds
        if b < self.low or a >= self.high:
            return False
        if self.step == 1 or (self.index - self.low).is_constant and (self.index - self.low).constant % self.step == 0:
            return True if self.low <= a and b < self.high else None
        return None

    def text(self) -> str:
        a, b = self.index.bounds
        parts = []
        if a < self.low:
            parts.append(f"{to_c(self.index)} >= {self.low}")
        if b >= self.high:
            parts.append(f"{to_c(self.index)} < {self.high}")
        if self.step != 1:
            parts.append(f"({to_c(self.index - self.low)}) % {self.step} == 0")
        return " && ".join(parts)
