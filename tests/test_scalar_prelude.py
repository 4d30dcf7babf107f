"""The scalar prelude: every element-wise row for every fusible type, compiled by the machine's C++ compiler, against
jax.lax on values that break naive C; transcendental functions against extended precision, within a stated bound."""
from __future__ import annotations

import ctypes
import itertools
import math
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from hlofuse.codegen import scalar_expr as scalar
from hlofuse.codegen.prelude import prelude
from hlofuse.hlo import builder
from hlofuse.hlo.module import Instruction
from hlofuse.hlo.opcode import OPCODES, Kind, infer_shape
from hlofuse.hlo.shape import COMPLEX, INTEGERS, Shape, dtype_of
from hlofuse.hlo.shape_rules import ShapeError
from hlofuse.runtime import host_compiler, nvrtc

TYPES = ("pred", "s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64", "f16", "bf16", "f32", "f64", "c64", "c128")
REALS = ("f16", "bf16", "f32", "f64")

# Largest error in units of the last place, against extended precision; 16-bit results are rounded correctly.
ULPS = {"exponential": 1.5, "log": 1.5, "logistic": 4, "tanh": 2.5, "sqrt": 0.51, "rsqrt": 1.6}
DEFAULT_ULPS = 4.0
COMPLEX_ERROR = 20.0  # units of the last place of the result's absolute value

# Where HLO takes a type that jax.lax refuses, what XLA does with it stands beside.
LAX: dict[str, Callable[..., Any]] = {
    "abs": lambda x: x if x.dtype.kind == "u" else lax.abs(x),
    "add": lambda x, y: lax.bitwise_or(x, y) if x.dtype == bool else lax.add(x, y),
    "multiply": lambda x, y: lax.bitwise_and(x, y) if x.dtype == bool else lax.mul(x, y),
    "real": lambda x: lax.real(x) if x.dtype.kind == "c" else x,
    "imag": lambda x: lax.imag(x) if x.dtype.kind == "c" else lax.full_like(x, 0),
    "round-nearest-even": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    "and": lax.bitwise_and, "atan2": lax.atan2, "cbrt": lax.cbrt, "ceil": lax.ceil, "clamp": lax.clamp,
    "complex": lax.complex, "cosine": lax.cos, "count-leading-zeros": lax.clz, "divide": lax.div, "erf": lax.erf,
    "exponential": lax.exp, "exponential-minus-one": lax.expm1, "floor": lax.floor, "is-finite": lax.is_finite,
    "log": lax.log, "log-plus-one": lax.log1p, "logistic": lax.logistic, "maximum": lax.max, "minimum": lax.min,
    "negate": lax.neg, "not": lax.bitwise_not, "or": lax.bitwise_or, "popcnt": lax.population_count, "power": lax.pow,
    "remainder": lax.rem, "round-nearest-afz": lax.round, "rsqrt": lax.rsqrt, "select": lax.select,
    "shift-left": lax.shift_left, "shift-right-arithmetic": lax.shift_right_arithmetic,
    "shift-right-logical": lax.shift_right_logical, "sign": lax.sign, "sine": lax.sin, "sqrt": lax.sqrt,
    "subtract": lax.sub, "tan": lax.tan, "tanh": lax.tanh, "sinh": lax.sinh, "cosh": lax.cosh, "asin": lax.asin,
    "acos": lax.acos, "asinh": lax.asinh, "acosh": lax.acosh, "atanh": lax.atanh, "xor": lax.bitwise_xor,
}
# What rounds: compared with the true value. Everything else is compared with jax.lax bit for bit.
TRUTH: dict[str, Callable[..., Any]] = {
    "exponential": np.exp, "exponential-minus-one": np.expm1, "log": np.log, "log-plus-one": np.log1p,
    "logistic": lambda x: 1 / (1 + np.exp(-x)), "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "cbrt": np.cbrt,
    "sine": np.sin, "cosine": np.cos, "tan": np.tan, "tanh": np.tanh, "sinh": np.sinh, "cosh": np.cosh,
    "asin": np.arcsin, "acos": np.arccos, "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh,
    "erf": np.vectorize(math.erf, otypes=[np.longdouble]), "power": np.power, "atan2": np.arctan2,
    "abs": np.abs, "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide,
    "negate": np.negative, "sign": lambda z: np.where(z == 0, 0, z / np.where(z == 0, 1, np.abs(z))),
}
COMPARED_WITH_TRUTH = frozenset({name for name, row in OPCODES.items() if row.unit == "special"})


@dataclass(frozen=True)
class Case:
    """One operation on given operand types, and its position among the compiled functions."""

    opcode: str
    types: tuple[str, ...]
    result: str
    attrs: dict[str, Any] = field(default_factory=dict)

    @property
    def instruction(self) -> Instruction:
        operands = [builder.parameter(n, Shape(t)) for n, t in enumerate(self.types)]
        return builder.make(self.opcode, *operands, shape=Shape(self.result), **self.attrs)

    def __str__(self) -> str:
        details = "".join(f",{value}" for value in self.attrs.values())
        return f"{self.opcode}({','.join(self.types)}{details})->{self.result}"


def _cases() -> Iterator[Case]:
    for opcode, row in OPCODES.items():
        if row.kind is not Kind.ELEMENTWISE or opcode not in LAX:
            continue
        for element_type in TYPES:
            types = ("pred", element_type, element_type) if opcode == "select" else (element_type,) * (row.arity or 0)
            try:
                shape = infer_shape(opcode, [Shape(t) for t in types], {})
            except ShapeError:
                continue
            assert isinstance(shape, Shape)
            yield Case(opcode, types, shape.element_type)
    for element_type, direction in itertools.product(TYPES, ("EQ", "NE", "LT", "LE", "GT", "GE")):
        if element_type not in COMPLEX or direction in ("EQ", "NE"):
            yield Case("compare", (element_type,) * 2, "pred", {"direction": direction})
    for source, target in itertools.product(TYPES, TYPES):
        if source != target:
            yield Case("convert", (source,), target)
    for width in (("s8", "u8"), ("s16", "u16", "f16", "bf16"), ("s32", "u32", "f32"), ("s64", "u64", "f64")):
        for source, target in itertools.permutations(width, 2):
            yield Case("bitcast-convert", (source,), target)
    for element_type, (exponent, mantissa) in itertools.product(REALS, ((5, 10), (8, 7), (4, 3), (8, 23), (11, 52))):
        yield Case("reduce-precision", (element_type,), element_type,
                   {"exponent_bits": exponent, "mantissa_bits": mantissa})


CASES = [case for case in _cases() if scalar.has_scalar_expr(case.instruction)]


def _loop(name: str, case: Case, marks: str = "") -> str:
    """A function that applies one operation to arrays."""
    arrays = ", ".join(f"const {scalar.storage_type(t)}* __restrict x{n}" for n, t in enumerate(case.types))
    loads = [scalar.load_expr(f"x{n}[i]", t) for n, t in enumerate(case.types)]
    names = [f"v{n}" for n in range(len(case.types))]
    values = "".join(f"    const {scalar.c_type(t)} {name} = {load};\n"
                     for t, name, load in zip(case.types, names, loads, strict=True))
    expr = scalar.scalar_expr(case.instruction, names, case.types)
    result = scalar.storage_type(case.result)
    return (f'extern "C" {marks}void {name}({arrays}, {result}* __restrict y, long long n) {{\n'
            f"  for (long long i = 0; i < n; i++) {{\n{values}"
            f"    const {scalar.c_type(case.result)} value = {expr};\n"
            f"    y[i] = {scalar.store_expr('value', case.result)};\n  }}\n}}\n")


@dataclass
class Build:
    """A compiler at work, then its library."""

    process: subprocess.Popen[str]
    library: Path

    def load(self) -> ctypes.CDLL:
        _, messages = self.process.communicate()
        assert self.process.returncode == 0, messages
        return ctypes.CDLL(str(self.library))


def _start_build(text: str, folder: Path, name: str, *flags: str) -> Build:
    """Builds as kernels are built."""
    compiler = host_compiler.find_compiler()
    if compiler is None:
        pytest.skip(host_compiler.INSTALL_HINT)
    tools = host_compiler.toolchain(compiler)
    source, library = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(text)
    command = [*compiler.command, *host_compiler.HOST_FLAGS, "-march=native", "-shared", "-fPIC", *flags,
               f"-DHLOFUSE_VECTOR_MATH={int(tools.vector_math)}", str(source), "-o", str(library), *tools.link_flags]
    return Build(subprocess.Popen(command, stderr=subprocess.PIPE, text=True), library)


@pytest.fixture(scope="module")
def apply(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], np.ndarray]:
    """The result of a case on its operands, computed by the compiled expression; two units are built at a time."""
    folder = tmp_path_factory.mktemp("prelude")
    halves = [range(start, len(CASES), 2) for start in (0, 1)]
    texts = [prelude("host") + "".join(_loop(f"apply{n}", CASES[n]) for n in half) for half in halves]
    builds = [_start_build(text, folder, f"unit{number}") for number, text in enumerate(texts)]
    libraries = [build.load() for build in builds]

    def run(number: int) -> np.ndarray:
        operands = _operands(CASES[number])
        result = np.empty(operands[0].shape, dtype_of(CASES[number].result))
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (*operands, result)]
        libraries[number % 2][f"apply{number}"](*pointers, ctypes.c_longlong(result.size))
        return result

    return run


def _values(element_type: str, seed: int = 0) -> np.ndarray:
    """Values that break naive code, then random ones."""
    random = np.random.default_rng(seed)
    dtype = dtype_of(element_type)
    if element_type == "pred":
        return np.array([False, True])
    if element_type in INTEGERS:
        info = np.iinfo(dtype)
        edges = {info.min, info.min + 1, info.max, info.max - 1, info.max // 2 + 1, 0, 1, 2, 3, 7, 8, 15, 16, 31, 32,
                 33, 63, 64, 100, -1, -2, -3, -7, -32,
                 257 * 2**16 + 1, 2**24 + 1, 2**25 + 3, 2049 * 2**13 + 1, 2**53 + 1}
        some = [v for v in sorted(edges) if info.min <= v <= info.max]
        wide = random.integers(info.min, info.max, 8, dtype=dtype, endpoint=True)
        return np.concatenate([np.array(some, dtype), wide])
    if element_type in COMPLEX:
        part = _values("f32" if element_type == "c64" else "f64", seed)
        part = part[np.isfinite(part) & (np.abs(part) < 80) & ((np.abs(part) > 1e-3) | (part == 0))]
        grid = part[:24, None] + 1j * part[None, ::-1][:, :24]
        return grid.ravel().astype(dtype)
    tiny, largest = _smallest_normal(element_type), float(ml_dtypes.finfo(dtype).max)
    halves = [0.5, 1.5, 2.5, 3.5, 0.4999, 0.49999997, 0.99999, 1.0, 2.0, 3.0, 7.5, 0.1]
    large = [127.0, 128.0, 127.5, 255.0, 255.9, 256.0, 32767.5, 65504.0, 65519.0, 65520.0, 2.0**24, 2.0**24 + 2,
             2.0**31, 2147483520.0, 2.0**32, 4294967040.0, 2.0**63, 2.0**64, 1e10, 1e19, 1e30]
    limits = [88.7, 88.8, 87.3, 89.5, 103.9, 104.5, 9.0, 20.0, 709.7, 745.1, 1e-3, 1e-7, 1e-20, 1.5707964, 3.1415927]
    ties = [1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-11 + 2.0**-40, 1 + 2.0**-24 + 2.0**-52, 1 + 2.0**-8, 1 + 2.0**-11]
    magnitudes = [0.0, tiny, largest, math.inf, *halves, *large, *limits, *ties]
    spread = np.exp(random.uniform(-8, 5, 24)) * random.choice([-1, 1], 24)
    values = np.array([*magnitudes, *[-m for m in magnitudes], math.nan, *spread, *random.uniform(-1, 1, 24)])
    with np.errstate(over="ignore"):
        values = values.astype(dtype)
    as_double = values.astype(np.float64)
    return values[(np.abs(as_double) >= tiny) | (as_double == 0) | np.isnan(as_double)]


def _operands(case: Case) -> list[np.ndarray]:
    """All combinations of two operands' values; a third runs along."""
    columns = [_values(t, seed) for seed, t in enumerate(case.types)]
    if len(columns) == 1:
        return columns
    if case.types[0] in COMPLEX:
        columns = [column[::7] for column in columns]
    grid = [g.ravel() for g in np.meshgrid(*columns[-2:], indexing="ij")]
    if len(columns) == 3:
        grid.insert(0, np.resize(columns[0], grid[0].shape))
    return [np.ascontiguousarray(g) for g in grid]


def _lax_function(case: Case) -> Callable[..., Any]:
    if case.opcode == "compare":
        return {"EQ": lax.eq, "NE": lax.ne, "LT": lax.lt, "LE": lax.le, "GT": lax.gt, "GE": lax.ge}[
            case.attrs["direction"]]
    if case.opcode == "convert":
        return lambda x: lax.convert_element_type(x, dtype_of(case.result))
    if case.opcode == "bitcast-convert":
        return lambda x: lax.bitcast_convert_type(x, dtype_of(case.result))
    if case.opcode == "reduce-precision":
        return lambda x: lax.reduce_precision(x, **case.attrs)
    return LAX[case.opcode]


def _jax_results(numbers: list[int]) -> dict[int, np.ndarray]:
    """jax.lax's results of some cases, as one program."""
    operands = {n: _operands(CASES[n]) for n in numbers}
    with jax.enable_x64(True):
        program = jax.jit(lambda given: {n: _lax_function(CASES[n])(*given[n]) for n in given})
        return {n: np.asarray(value) for n, value in program(operands).items()}


def _grouped(opcodes: Callable[[str], bool]) -> list[Any]:
    groups: dict[str, list[int]] = {}
    for number, case in enumerate(CASES):
        if opcodes(case.opcode):
            groups.setdefault(case.opcode, []).append(number)
    return [pytest.param(numbers, id=opcode) for opcode, numbers in groups.items()]


def _smallest_normal(element_type: str) -> float:
    return float(ml_dtypes.finfo(dtype_of(element_type)).smallest_normal)


def _agrees(mine: np.ndarray, theirs: np.ndarray, element_type: str) -> np.ndarray:
    """Equal bits; any NaN for a NaN; anything below the normal numbers for another (XLA's threads flush those)."""
    if element_type in COMPLEX:
        part = "f32" if element_type == "c64" else "f64"
        return _agrees(mine.real, theirs.real, part) & _agrees(mine.imag, theirs.imag, part)
    if element_type not in REALS:
        return mine == theirs
    a, b = mine.astype(np.float64), theirs.astype(np.float64)
    tiny = _smallest_normal(element_type)
    flushed = (np.abs(a) < tiny) & (np.abs(b) < tiny) & ((a != 0) | (b != 0))
    return ((a == b) & (np.signbit(a) == np.signbit(b))) | (np.isnan(a) & np.isnan(b)) | flushed


def _report(case: Case, bad: np.ndarray, operands: list[np.ndarray], mine: np.ndarray, wanted: np.ndarray) -> str:
    shown = [f"  {', '.join(str(o[i]) for o in operands)} -> {mine[i]!r}, wanted {wanted[i]!r}"
             for i in np.flatnonzero(bad)[:6]]
    return f"{case}: {bad.sum()} of {bad.size} differ\n" + "\n".join(shown)


def _is_exact(opcode: str) -> bool:
    return opcode not in COMPARED_WITH_TRUTH


@pytest.mark.filterwarnings("ignore:Casting complex values to real:numpy.exceptions.ComplexWarning")
@pytest.mark.parametrize("numbers", _grouped(_is_exact))
def test_exact_operations_equal_lax(apply: Callable[[int], np.ndarray], numbers: list[int]) -> None:
    numbers = [n for n in numbers if not (CASES[n].types[-1] in COMPLEX and CASES[n].opcode in TRUTH)]
    theirs, failures = _jax_results(numbers), []
    for number in numbers:
        case, operands = CASES[number], _operands(CASES[number])
        mine = apply(number)
        bad = ~_agrees(mine, theirs[number], case.result)
        if bad.any():
            failures.append(_report(case, bad, operands, mine, theirs[number]))
    assert not failures, "\n".join(failures)


def _spacing(truth: np.ndarray, element_type: str) -> np.ndarray:
    """The unit of the last place of a type at given values."""
    info = ml_dtypes.finfo(dtype_of(element_type))
    magnitude = np.maximum(np.abs(truth), float(info.smallest_normal))
    return np.exp2(np.floor(np.log2(magnitude))) * float(info.eps)


def _bound(case: Case) -> float:
    if case.result in ("f16", "bf16"):
        return 0.51
    return DEFAULT_ULPS if case.result == "f64" else ULPS.get(case.opcode, DEFAULT_ULPS)


def _agrees_special(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a == b) | (np.isnan(a) & np.isnan(b))


@pytest.mark.parametrize("numbers", _grouped(COMPARED_WITH_TRUTH.__contains__))
def test_special_functions_are_within_ulps_of_the_truth(apply: Callable[[int], np.ndarray], numbers: list[int]) -> None:
    failures = []
    numbers = [n for n in numbers if CASES[n].result in REALS]
    theirs = _jax_results(numbers)
    for number in numbers:
        case, operands = CASES[number], _operands(CASES[number])
        mine = apply(number).astype(np.longdouble)
        with np.errstate(all="ignore"):
            truth = TRUTH[case.opcode](*(o.astype(np.longdouble) for o in operands))
            rounded = truth.astype(dtype_of(case.result)).astype(np.longdouble)
            inside = np.isfinite(rounded)
            units = np.abs(mine - truth) / _spacing(np.where(inside, truth, 1), case.result)
            special = _agrees_special(mine, rounded) | _agrees_special(mine, theirs[number].astype(np.longdouble))
            smallest = 2 * _smallest_normal(case.result)
            tiny = (np.abs(truth) < smallest) & (np.abs(mine) <= smallest)
            bound = _bound(case)
        bad = ~np.where(inside, (units <= bound) | tiny, special)
        if bad.any():
            failures.append(_report(case, bad, operands, mine, truth))
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("number", [pytest.param(n, id=str(c)) for n, c in enumerate(CASES)
                                    if c.types[-1] in COMPLEX and c.opcode in TRUTH])
def test_complex_functions_are_close_to_the_truth(apply: Callable[[int], np.ndarray], number: int) -> None:
    case, operands = CASES[number], _operands(CASES[number])
    part = "f32" if case.types[-1] == "c64" else "f64"
    mine = apply(number).astype(np.clongdouble)
    with np.errstate(all="ignore"):
        truth = TRUTH[case.opcode](*(o.astype(np.clongdouble) for o in operands))
        rounded = truth.astype(np.complex64 if part == "f32" else np.complex128)
    inside = np.isfinite(rounded) & (np.abs(truth) > 1e-30)
    with np.errstate(all="ignore"):
        units = np.abs(mine - truth) / _spacing(np.where(inside, np.abs(truth), 1), part)
        if case.opcode == "power":  # exp(y log(x)): the error of the exponent is relative to it
            units /= 1 + np.abs(np.where(inside, np.log(np.where(truth == 0, 1, truth)), 0))
    bad = inside & ~(units <= COMPLEX_ERROR)
    assert not bad.any(), _report(case, bad, operands, mine, truth)


def test_total_order(tmp_path: Path) -> None:
    """Sorted by it, every float stands where its sign and magnitude say, and NaNs at the ends by their signs."""
    case = Case("compare", ("f32", "f32"), "pred", {"direction": "LT", "type": "TOTALORDER"})
    library = _start_build(prelude("host") + _loop("total_less", case), tmp_path, "unit").load()
    ordered = np.array([-np.nan, -np.inf, -1.5, -1.0, -0.0, 0.0, 1.0, 1.5, np.inf, np.nan], np.float32)
    ordered[0], ordered[-1] = np.copysign(np.float32(np.nan), -1), np.copysign(np.float32(np.nan), 1)
    left, right = (np.ascontiguousarray(g.ravel()) for g in np.meshgrid(ordered, ordered, indexing="ij"))
    less = np.empty(left.shape, bool)
    library.total_less(*(ctypes.c_void_p(a.ctypes.data) for a in (left, right, less)), ctypes.c_longlong(less.size))
    positions = np.arange(ordered.size)
    np.testing.assert_array_equal(less.reshape(10, 10), positions[:, None] < positions[None, :])


# Loops that kernels live in; each must become a vector loop, calls to vector functions included.
HOT = [Case(opcode, (element_type,) * (OPCODES[opcode].arity or 0), element_type)
       for element_type, opcodes in {
           "f32": "add divide maximum minimum abs sign floor round-nearest-even round-nearest-afz clamp exponential "
                  "log tanh logistic sine cosine erf exponential-minus-one log-plus-one power sqrt rsqrt tan atan2 "
                  "cbrt",
           "f64": "add maximum exponential log tanh logistic sine erf power",
           "bf16": "add multiply maximum exponential tanh logistic", "f16": "add multiply maximum exponential tanh",
           "s32": "add multiply maximum sign abs shift-left shift-right-logical", "u32": "xor shift-left",
           "u8": "add maximum", "pred": "and not"}.items() for opcode in opcodes.split()]
HOT += [Case("convert", (source,), target) for source, target in (
    ("f32", "bf16"), ("bf16", "f32"), ("f32", "f16"), ("f16", "f32"), ("f32", "s32"), ("s32", "f32"), ("u8", "f32"),
    ("f32", "u8"), ("f32", "f64"), ("pred", "f32"), ("f32", "pred"))]
HOT += [Case("select", ("pred", "f32", "f32"), "f32"), Case("compare", ("f32", "f32"), "pred", {"direction": "GT"})]


def test_hot_loops_become_vector_loops(tmp_path: Path) -> None:
    compiler = host_compiler.find_compiler()
    if compiler is None or "clang" in compiler.identity or not host_compiler.toolchain(compiler).vector_math:
        pytest.skip("needs g++ and glibc's vector math, and reads g++'s remarks")
    text, first_lines = prelude("host"), {}
    for number, case in enumerate(HOT):
        first_lines[text.count("\n") + 1] = case
        text += _loop(f"hot{number}", case)
    build = _start_build(text, tmp_path, "unit", "-fopt-info-vec-optimized")
    _, messages = build.process.communicate()
    assert build.process.returncode == 0, messages
    vectorized = {int(line.split(":")[1]) for line in messages.splitlines() if "loop vectorized" in line}
    scalar_loops = [str(case) for line, case in first_lines.items() if not {line, line + 1, line + 2} & vectorized]
    assert not scalar_loops, scalar_loops


# One type of each width and class is enough for the compiler: the others are the same templates and macros.
CUDA_CASES = [(n, case) for n, case in enumerate(CASES)
              if (case.types[-1] in ("pred", "s16", "u32", "s64", "f32", "f64", "c64") and case.opcode != "compare")
              or case.opcode in ("add", "convert", "bitcast-convert", "maximum")]


@pytest.mark.parametrize("arch", ["sm_90"])
def test_expressions_compile_for_cuda(arch: str) -> None:
    if (reason := nvrtc.nvrtc_available()) is not None:
        pytest.skip(reason)
    kernels = [_loop(f"apply{n}", case, "__global__ ") for n, case in CUDA_CASES]
    assert nvrtc.compile_ptx(prelude("cuda") + "".join(kernels), arch).count(".entry") == len(CUDA_CASES)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_100"])
def test_inline_assembly_is_accepted_by_every_architecture(arch: str) -> None:
    """ptxas, unlike the compiler before it, reads what stands in asm()."""
    if (reason := nvrtc.nvrtc_available()) is not None:
        pytest.skip(reason)
    cases = [Case(opcode, (element_type,) * 2, element_type)
             for opcode in ("add", "maximum", "minimum") for element_type in REALS]
    kernels = [_loop(f"apply{n}", case, "__global__ ") for n, case in enumerate(cases)]
    assert len(nvrtc.compile_cuda(prelude("cuda") + "".join(kernels), arch).kernels) == len(cases)


LITERALS = [("s8", -128), ("u8", 255), ("s16", -32768), ("s32", -2**31), ("s32", 2**31 - 1), ("u32", 2**32 - 1),
            ("s64", -2**63), ("s64", 2**63 - 1), ("u64", 2**64 - 1), ("pred", True), ("f32", 0.1), ("f32", -0.0),
            ("f32", 3.4028235e38), ("f32", 1.1754944e-38), ("f32", 1e-42), ("f32", -math.inf), ("f32", math.nan),
            ("f32", 16777216.0), ("f64", 0.1), ("f64", 1.7976931348623157e308), ("f64", -math.inf), ("f64", 1 / 3),
            ("f64", 5e-324), ("c64", complex(0.1, -math.inf)), ("c128", complex(-0.0, 1 / 3))]


def test_literals_read_back_as_the_same_bits(tmp_path: Path) -> None:
    """Each also as an operand of a minus sign, where a literal's own sign must not make a decrement."""
    text = prelude("host")
    for number, (element_type, value) in enumerate(LITERALS):
        literal = scalar.literal_expr(value, element_type)
        text += f'extern "C" void put{number}({scalar.c_type(element_type)}* y) {{ *y = {literal}; }}\n'
        if element_type in ("f32", "f64"):
            negate = builder.make("negate", builder.parameter(0, Shape(element_type)))
            expr = scalar.scalar_expr(negate, [literal], [element_type])
            text += f'extern "C" void negative{number}({scalar.c_type(element_type)}* y) {{ *y = {expr}; }}\n'
    library = _start_build(text, tmp_path, "unit", "-O0").load()
    for number, (element_type, value) in enumerate(LITERALS):
        wanted = np.array([value], dtype_of(element_type))
        found = np.empty_like(wanted)
        library[f"put{number}"](ctypes.c_void_p(found.ctypes.data))
        assert _agrees(found, wanted, element_type).all() and (found.tobytes() == wanted.tobytes() or value != value)
        if element_type in ("f32", "f64"):
            library[f"negative{number}"](ctypes.c_void_p(found.ctypes.data))
            np.testing.assert_array_equal(found, -wanted)


def test_every_real_elementwise_row_has_an_expression() -> None:
    tested = {case.opcode for case in CASES}
    assert tested == {name for name, row in OPCODES.items() if row.kind is Kind.ELEMENTWISE}
