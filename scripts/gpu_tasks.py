"""What gpu_check.py's children do: one function for each part, on one GPU or, in a dry run, on its NumPy twin.

Times of whole programs are of the device, in turn: n calls after a flush of the L2 cache each, less n flushes alone, so
that no call waits for the host. Kernels are timed by CUDA events.
"""

from __future__ import annotations

import functools
import platform
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import catalog
import jax
import jax.numpy as jnp
import loop_programs
import numpy as np

import hlofuse
from hlofuse.compiler import compile_for_arrays
from hlofuse.config import Options
from hlofuse.errors import HlofuseWarning
from hlofuse.explore import accuracy, float64_reference
from hlofuse.frontend.trace import trace_function
from hlofuse.runtime import nvrtc

CATALOG: dict[str, Any] = {**catalog.CATALOG, **loop_programs.CATALOG}
SAMPLES = 1 << 20  # elements of a result that are judged
FLUSH_BYTES = 256 << 20
ROUNDS = 4
SAMPLE_S = 0.04  # the calls of one round of one side


class Twin:
    """NumPy in place of CuPy, the host's clock in place of events."""

    runtime = "numpy"
    size = "small"

    @functools.cached_property
    def backend(self) -> Any:
        from hlofuse.runtime.array_backend import NumPyBackend

        return NumPyBackend(records=True)

    def array(self, x: Any) -> Any:
        return np.array(x)

    def host(self, x: Any) -> np.ndarray:
        return np.asarray(x)

    def synchronize(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def flush_jax(self) -> Any:
        return ()

    def timed(self, work: Callable[[], Any]) -> float:
        """Microseconds of the device's time."""
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) * 1e6

    def facts(self) -> dict[str, Any]:
        return {"device": platform.processor() or platform.machine()}


class Gpu(Twin):
    runtime = "cupy"
    size = "full"

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy
        self._junk = cupy.zeros(FLUSH_BYTES, cupy.uint8)
        self._jax_junk = jnp.zeros(FLUSH_BYTES // 4, jnp.float32)
        self._jax_fill = jax.jit(lambda x: x + 1, donate_argnums=0)

    @functools.cached_property
    def backend(self) -> Any:
        from hlofuse.runtime.cupy_backend import backend_of

        return backend_of(())

    def array(self, x: Any) -> Any:
        return self.cupy.asarray(np.asarray(x))

    def host(self, x: Any) -> np.ndarray:
        return self.cupy.asnumpy(x) if isinstance(x, self.cupy.ndarray) else np.asarray(x)

    def synchronize(self) -> None:
        self.cupy.cuda.get_current_stream().synchronize()

    def flush(self) -> None:
        self._junk += 1

    def flush_jax(self) -> Any:
        self._jax_junk = self._jax_fill(self._jax_junk)
        return self._jax_junk

    def timed(self, work: Callable[[], Any]) -> float:
        start, end = self.cupy.cuda.Event(), self.cupy.cuda.Event()
        self.flush()
        start.record()
        work()
        end.record()
        end.synchronize()
        return self.cupy.cuda.get_elapsed_time(start, end) * 1e3

    def facts(self) -> dict[str, Any]:
        import cupy

        properties = cupy.cuda.runtime.getDeviceProperties(0)
        return {"device": properties["name"].decode(), "compute_capability": self.backend.device.compute_capability,
                "sm_count": properties["multiProcessorCount"], "memory_gb": properties["totalGlobalMem"] / 1e9,
                "row": self.backend.spec.name, "cupy": cupy.__version__,
                "driver": cupy.cuda.runtime.driverGetVersion(), "jax_device": str(jax.devices()[0])}  # fmt: skip


@functools.cache
def machine(dry_run: bool) -> Twin:
    return Twin() if dry_run else Gpu()


def work(part: str, workload: str, dry_run: bool) -> dict[str, Any]:
    """The result of one task; what it raises is in it, and so is what hlofuse warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = PARTS[part](machine(dry_run), workload)
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()[-3000:]}
    if workload in CATALOG:    # what a program keeps on the device is wanted by the next
        hlofuse.jit(CATALOG[workload].fn, runtime=machine(dry_run).runtime).clear_cache()
        machine(dry_run).backend.release_memory()
    notes = list(dict.fromkeys(str(w.message)[:500] for w in caught if issubclass(w.category, HlofuseWarning)))
    # What fell back is right, and yet not what was asked for.
    return {**result, "ok": False, "warnings": notes} if notes else result


# ------------------------------------------------------------------------------------------------ is it right?


def environment(m: Twin, _: str) -> dict[str, Any]:
    reason = nvrtc.nvrtc_available()
    version = ".".join(map(str, nvrtc.nvrtc_version())) if reason is None else reason
    return {**m.facts(), "jax": jax.__version__, "python": platform.python_version(), "nvrtc": version}


def sampled(fn: Callable, count: int = SAMPLES) -> Callable:
    """The same, but of each result only up to `count` elements."""
    return lambda *args: [sample(x, count) for x in jax.tree.leaves(fn(*args))]


def sample(x: Any, count: int = SAMPLES) -> Any:
    return x.reshape(-1)[:: max(1, -(-x.size // count))]


def judge(m: Twin, name: str, size: str) -> dict[str, Any]:
    """Both runtimes beside jax.jit and float64."""
    workload = CATALOG[name]
    args = arguments(name, size)
    on_jax = jax.device_put(args)
    fn = sampled(workload.fn)
    theirs = [np.asarray(x) for x in jax.jit(fn)(*on_jax)]
    reference = float64_reference.evaluate(jax.make_jaxpr(fn)(*args), *jax.tree.leaves(on_jax))
    result: dict[str, Any] = {"ok": True}
    for side, call in (("xla", lambda: hlofuse.jit(workload.fn, runtime="xla")(*on_jax)),
                       (m.runtime, lambda: run_on_arrays(m, workload.fn, args))):  # fmt: skip
        try:
            ours = [m.host(sample(x)) for x in jax.tree.leaves(call())]
            verdict = accuracy.judge(ours, theirs, reference)
            result[f"{side}_error"], ok, reason = float(verdict.max_error), verdict.ok, verdict.reason
        except Exception as error:
            ok, reason = False, f"{type(error).__name__}: {error}\n{traceback.format_exc()[-1500:]}"
        if not ok:
            result["ok"], result[f"{side}_reason"] = False, reason
    return result


def run_on_arrays(m: Twin, fn: Callable, args: Sequence[Any]) -> Any:
    """Three times: the third call of one set of addresses is a replay."""
    f, arrays = hlofuse.jit(fn, runtime=m.runtime), jax.tree.map(m.array, args)
    first = [m.host(sample(x)).tobytes() for x in jax.tree.leaves(f(*arrays))]
    for _ in range(2):
        results = f(*arrays)
        again = [m.host(sample(x)).tobytes() for x in jax.tree.leaves(results)]
        if first != again:
            raise AssertionError("a later call gives other bits than the first")
    return results


@functools.lru_cache(maxsize=1)
def arguments(name: str, size: str) -> Any:
    return CATALOG[name].args(size)


def small(m: Twin, name: str) -> dict[str, Any]:
    return judge(m, name, "small")


def values(m: Twin, name: str) -> dict[str, Any]:
    return judge(m, name, m.size)


def first_calls(m: Twin, _: str) -> dict[str, Any]:
    """What else can go wrong, one line each."""
    x = np.random.default_rng(0).standard_normal((37, 64)).astype(np.float32)
    spd = (x @ x.T + 64 * np.eye(37)).astype(np.float32)
    cases: dict[str, tuple[Callable, list[Any]]] = {
        "element-wise": (lambda x: jnp.tanh(x) * 2, [x]),
        "sum over blocks": (lambda x: (x * x).sum(), [np.ones(1 << 22, np.float32)]),
        "product": (lambda x: x @ x.T, [x]),
        "product of halves": (lambda x: x @ x.T, [x.astype(np.float16)]),
        "product of bfloat16": (lambda x: (x.astype(jnp.bfloat16) @ x.T.astype(jnp.bfloat16)).astype(jnp.float32), [x]),
        "batched product": (lambda x: jnp.einsum("abc,adc->abd", x, x), [x.reshape(37, 4, 16)]),
        "transposed product": (lambda x: jnp.einsum("bnhd,bmhd->bhnm", x, x), [x.reshape(1, 37, 4, 16)]),
        "double product": (lambda x: x @ x.T, [x.astype(np.float64)]),
        "empty": (lambda x: (x + 1, x.sum(0)), [x[:0]]),
        "columns first": (lambda x: x + 1, [np.asfortranarray(x)]),
        "strided": (lambda x: x + 1, [x[::2, 1:]]),
        "not aligned": (lambda x: x + 1, [np.ones(1001, np.float32)]),
        "booleans": (lambda x: (x > 0) & (x < 1), [x]),
        "complex": (lambda x: jnp.abs(x * 1j + x), [x]),
        "sort": (lambda x: jnp.sort(x, axis=0), [x]),
        "fft": (lambda x: jnp.abs(jnp.fft.rfft(x)), [x]),
        "cholesky": (jax.lax.linalg.cholesky, [spd]),
        "not positive definite": (jax.lax.linalg.cholesky, [-spd]),
        "triangular solve": (lambda a: jax.lax.linalg.triangular_solve(a, a, left_side=True, lower=True), [spd]),
        "scatter by JAX": (lambda x: x.at[jnp.array([1, 1, 99])].add(1), [x]),
        "loop by JAX": (lambda x: jax.lax.fori_loop(0, 3, lambda i, y: jnp.sin(y), x), [x]),
        "random": (lambda x: x + jax.random.normal(jax.random.key(0), x.shape), [x]),
        "several streams": (lambda x: [jnp.sort(jnp.tanh(x * k).sum(1)).sum() for k in range(1, 5)], [x]),
    }  # fmt: skip
    result: dict[str, Any] = {"ok": True}
    for name, (fn, args) in cases.items():
        for side in ("xla", m.runtime):
            try:
                check_case(m, name, fn, args, side)
            except Exception as error:
                result["ok"] = False
                result[f"{name} ({side})"] = f"{type(error).__name__}: {str(error)[:600]}"
    result |= donation(m)
    return result


def check_case(m: Twin, name: str, fn: Callable, args: Sequence[Any], side: str) -> None:
    with jax.enable_x64(any(x.dtype == np.float64 for x in args)):
        want = [np.asarray(x) for x in jax.tree.leaves(jax.jit(fn)(*args))]
        if side == "xla":
            results = hlofuse.jit(fn, runtime="xla")(*args)
        else:
            arrays = [m.array(x) for x in args]
            arrays = [a[1:] if name == "not aligned" else a[::-1][::-1] for a in arrays]
            want = [w[1:] for w in want] if name == "not aligned" else want
            results = hlofuse.jit(fn, runtime=m.runtime)(*arrays)
        for got, expected in zip(map(m.host, jax.tree.leaves(results)), want, strict=True):
            if got.dtype != expected.dtype or got.shape != expected.shape:
                raise AssertionError(f"{got.dtype}{got.shape}, jax.jit has {expected.dtype}{expected.shape}")
            rough = got.dtype.itemsize == 2 or "product" in name    # by tensor cores, or not
            np.testing.assert_allclose(got.astype(np.complex128), expected.astype(np.complex128),
                                       rtol=2e-2 if rough else 1e-4, atol=5e-2 if rough else 1e-4)  # fmt: skip


def donation(m: Twin) -> dict[str, Any]:
    x = m.array(np.ones((64, 64), np.float32))
    f = hlofuse.jit(lambda x: jnp.sin(x) + 1, runtime=m.runtime, donate_argnums=0)
    address = m.backend.address(x)
    taken = m.backend.address(f(x)) == address
    y = m.array(np.ones((64, 64), np.float32))
    hlofuse.jit(lambda x: jnp.sin(x) + 1, runtime=m.runtime)(y)
    kept = bool((m.host(y) == 1).all())
    return {"donated memory is used": taken, "other memory is not": kept} | ({} if taken and kept else {"ok": False})


# ------------------------------------------------------------------------------------------------ how fast?


def copy(m: Twin, _: str) -> dict[str, Any]:
    """What a copy moves per second: the yardstick of everything that is bound by memory."""
    size = (1 << 30) if m.runtime == "cupy" else 1 << 22
    source = m.array(np.zeros(size, np.uint8))
    target = source.copy()
    times = [m.timed(lambda: m.backend.copy([source], target)) for _ in range(11)]
    return {"gb_per_s": 2 * size / statistics.median(times) * 1e-3}


def full(m: Twin, name: str) -> dict[str, Any]:
    """Times of both runtimes beside jax.jit's, and of a copy."""
    workload = CATALOG[name]
    args = arguments(name, m.size)
    on_jax, arrays = jax.device_put(args), jax.tree.map(m.array, args)
    sides = {"jax": of_jax(m, jax.jit(workload.fn), on_jax),
             "xla": of_jax(m, hlofuse.jit(workload.fn, runtime="xla"), on_jax),
             m.runtime: of_arrays(m, hlofuse.jit(workload.fn, runtime=m.runtime), arrays)}  # fmt: skip
    times = in_turn(sides)
    result: dict[str, Any] = {f"{side}_us": t for side, t in times.items()}
    if min(times.values()) > 0:
        result |= {"speed_xla": times["jax"] / times["xla"], "speed_cupy": times["jax"] / times[m.runtime]}
    executable = hlofuse.jit(workload.fn, runtime=m.runtime).executable(*arrays)
    launches = executable.compilation.launches()
    result |= {"launches": launches.total, "bytes": launches.bytes, "copy_share": None,
               "predicted_us": sum(c.cost.time_us for c in executable.compilation.entry.clusters)}  # fmt: skip
    bandwidth = copy(m, "")["gb_per_s"]
    result["copy_share"] = launches.bytes / max(times[m.runtime], 1e-3) * 1e-3 / bandwidth
    return result


def of_jax(m: Twin, f: Callable, args: Sequence[Any]) -> Callable[[int, bool], float]:
    """Seconds of n calls, or of the flushes that stand before them alone."""

    def seconds(count: int, only_flush: bool) -> float:
        jax.block_until_ready(m.flush_jax())
        start = time.perf_counter()
        last: Any = ()
        for _ in range(count):
            last = m.flush_jax()
            if not only_flush:
                last = f(*args)
        jax.block_until_ready(last)
        return time.perf_counter() - start

    return seconds


def of_arrays(m: Twin, f: Callable, args: Sequence[Any]) -> Callable[[int, bool], float]:
    def seconds(count: int, only_flush: bool) -> float:
        m.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            m.flush()
            if not only_flush:
                f(*args)
        m.synchronize()
        return time.perf_counter() - start

    return seconds


def in_turn(sides: dict[str, Callable[[int, bool], float]]) -> dict[str, float]:
    """The median time of a call of each, in µs of the device."""
    counts = {}
    for side, seconds in sides.items():
        for _ in range(3):  # builds, then records what is replayed
            seconds(1, False)
        counts[side] = max(2, min(50, int(SAMPLE_S / max(seconds(1, False), 1e-6))))
    samples: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(ROUNDS):
        for side, seconds in sides.items():
            n = counts[side]
            samples[side].append((seconds(n, False) - seconds(n, True)) / n * 1e6)
    return {side: statistics.median(s) for side, s in samples.items()}


def overhead(m: Twin, _: str) -> dict[str, Any]:
    """What a call of almost nothing takes the host, and what a replay saves of a program of many launches."""
    x = np.ones(64, np.float32)
    fn = lambda x: jnp.tanh(x) + 1  # noqa: E731
    on_jax, on_array = jax.device_put(x), m.array(x)
    result: dict[str, Any] = {}
    functions: dict[str, tuple[Callable, Any]] = {
        "jax_us": (jax.jit(fn), on_jax), "xla_us": (hlofuse.jit(fn, runtime="xla"), on_jax),
        "default_us": (hlofuse.jit(fn), on_jax), f"{m.runtime}_us": (hlofuse.jit(fn, runtime=m.runtime), on_array)}
    for name, (f, argument) in functions.items():
        for _round in range(5):
            f(argument)
        rounds = []
        for _round in range(ROUNDS):
            start = time.perf_counter()
            for _call in range(300):
                f(argument)
            rounds.append((time.perf_counter() - start) / 300 * 1e6)
            m.synchronize()
            jax.block_until_ready(jax.jit(fn)(on_jax))
        result[name] = statistics.median(rounds)
    workload = CATALOG["decoder_layer"]
    operands = [m.array(x) for x in trace_function(workload.fn, workload.args("small")).operands]
    for kind, records in (("eager", False), ("replayed", True)):
        executable = executable_of(m, workload.fn, workload.args("small"))
        executable._is_recordable = executable._is_recordable and records
        seconds = of_arrays(m, lambda *xs, run=executable: run(xs), operands)
        result[f"{kind}_us"] = in_turn({"": seconds})[""]
        result[f"{kind}_graphs"] = len(executable._replays)
    return result


def executable_of(m: Twin, fn: Callable, args: Sequence[Any]) -> Any:
    return compile_for_arrays(trace_function(fn, args).closed, Options(), m.backend, frozenset())


# JAX's own ways to make a loop faster on a GPU; the best of them is what a loop of ours is measured against.
LOOP_OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "double_buffering": {"xla_gpu_enable_while_loop_double_buffering": True},
    "unrolling": {"xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_AUTO_UNROLL"},
    "command_buffer": {"xla_gpu_graph_min_graph_size": 1,
                       "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CONDITIONAL,WHILE"},
}  # fmt: skip


def loops(m: Twin, name: str) -> dict[str, Any]:
    workload = CATALOG[name]
    args = arguments(name, m.size)
    on_jax, arrays = jax.device_put(args), jax.tree.map(m.array, args)
    result: dict[str, Any] = {}
    sides: dict[str, Callable[[int, bool], float]] = {}
    for option, flags in LOOP_OPTIONS.items():
        try:
            compiled = jax.jit(workload.fn).lower(*on_jax).compile(compiler_options=flags)
            sides[f"jax_{option}"] = of_jax(m, compiled, on_jax)
        except Exception as error:
            result[f"jax_{option}_refused"] = str(error)[:200]
    sides["xla"] = of_jax(m, hlofuse.jit(workload.fn, runtime="xla"), on_jax)
    sides[m.runtime] = of_arrays(m, hlofuse.jit(workload.fn, runtime=m.runtime), arrays)
    times = in_turn(sides)
    best = min(t for side, t in times.items() if side.startswith("jax_"))
    return {**result, **{f"{side}_us": t for side, t in times.items()}, "best_jax_us": best,
            "speed_xla": best / max(times["xla"], 1e-3), "speed_cupy": best / max(times[m.runtime], 1e-3)}  # fmt: skip


def kernels(m: Twin, name: str) -> dict[str, Any]:
    """Every kernel of a workload by itself: predicted and measured time, estimated and true registers."""
    workload = CATALOG[name]
    args = arguments(name, m.size)
    executable = executable_of(m, workload.fn, args)
    executable._is_recordable = False
    launch = m.backend.launch
    times: dict[int, list[float]] = {}

    def timed_launch(kernel: Any, addresses: Sequence[int], counters: int) -> None:
        times.setdefault(id(kernel), []).append(m.timed(lambda: launch(kernel, addresses, counters)))

    operands = [m.array(x) for x in trace_function(workload.fn, args).operands]
    m.backend.launch = timed_launch
    try:
        for _ in range(5):
            executable(operands)
    finally:
        del m.backend.launch
    measured = {s.name: statistics.median(times[id(s.kernel)]) for s in executable.program.steps if s.kernel}
    truth = registers(m, executable)
    rows = []
    for c in executable.compilation.clusters:
        if c.segments and (symbol := c.text_in(m.backend.dialect).symbol) in measured:
            rows.append({"kernel": symbol, "form": c.form, "predicted_us": c.cost.time_us,
                         "measured_us": measured[symbol], "bytes": c.cost.bytes,
                         "registers_estimated": c.kernel.registers, "registers": truth.get(symbol)})  # fmt: skip
    return {"count": len(rows), "kernels": rows}


def registers(m: Twin, executable: Any) -> dict[str, int]:
    from hlofuse.codegen.dialect import CUDA
    from hlofuse.runtime.kernel_cache import default_cache

    if m.backend.dialect != "cuda" or nvrtc.nvrtc_available() is not None:
        return {}
    texts = [c.text_in("cuda") for c in executable.compilation.clusters if c.segments]
    sources = list({t.symbol: nvrtc.CudaSource(t.symbol, t.code) for t in texts}.values())
    built = nvrtc.compile_many(sources, m.backend.spec.arch, default_cache(), CUDA.prelude)
    return {symbol: b.kernels[symbol].registers for symbol, b in built.items() if isinstance(b, nvrtc.CudaBinary)}


PARTS: dict[str, Callable[[Twin, str], dict[str, Any]]] = {
    "environment": environment, "first_calls": first_calls, "small": small, "copy": copy, "full": full,
    "overhead": overhead, "values": values, "loops": loops, "kernels": kernels}
