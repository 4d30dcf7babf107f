"""`hlofuse.jit` itself: options, errors, stages, donation, failures of the optimizer, and what a call costs."""

from __future__ import annotations

import functools
import gc
import importlib.util
import pickle
import re
import statistics
import subprocess
import sys
import time
import weakref
from pathlib import Path

import jax
import jax.experimental.serialize_executable
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import EvaluatingExecutable, evaluating_pipeline

import hlofuse
from hlofuse import config, stages
from hlofuse.frontend.trace import trace_function
from hlofuse.runtime.array_function import has_cupy
from hlofuse.runtime.primitive import recorded_outcomes

x = np.linspace(0, 1, 64, dtype=np.float32)


def double(a):
    return a * 2 + 1


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    vars(double).clear()


# ---------------------------------------------------------------- options


def test_decorator_forms():
    @hlofuse.jit
    def bare(a):
        return a + 1

    @hlofuse.jit(fusion="greedy", static_argnums=1)
    def with_arguments(a, n):
        return a + n

    assert has_cupy() or isinstance(bare, type(jax.jit(double)))
    assert bare.__name__ == "bare"
    assert with_arguments.__name__ == "with_arguments"


def test_options_reach_the_pipeline(set_pipeline):
    seen = []

    def pipeline(closed, options, platform):
        seen.append((options.fusion, platform))
        return evaluating_pipeline(closed, options, platform)

    set_pipeline(pipeline)
    for fusion in config.FUSIONS:
        hlofuse.jit(double, fusion=fusion)(x)
    assert seen == [(fusion, "cpu") for fusion in config.FUSIONS]


def test_unknown_fusion_lists_the_valid_ones_when_decorating():
    with pytest.raises(hlofuse.errors.UnknownNameError, match="fusion 'colouring'; did you mean 'coloring'") as error:
        hlofuse.jit(double, fusion="colouring")
    assert error.value.valid == config.FUSIONS
    with pytest.raises(ValueError, match="'coloring', 'greedy', 'none', 'exact'"):
        hlofuse.jit(fusion=None)


@pytest.mark.skipif(importlib.util.find_spec("hlofuse.fusion.devices") is None, reason="no table of devices")
def test_unknown_device_lists_the_valid_ones_when_decorating():
    with pytest.raises(hlofuse.errors.UnknownNameError, match="Unknown device 'h2000'; did you mean 'h200'"):
        hlofuse.jit(double, device="h2000")
    assert "h200" in config.device_names()


def test_options_are_hashable_values():
    assert {hlofuse.Options(): 1}[hlofuse.Options(fusion="coloring")] == 1
    assert hlofuse.Options() != hlofuse.Options(fusion="none")


def test_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HLOFUSE_STRICT", "yes")
    with pytest.raises(hlofuse.errors.UnknownNameError, match="value of HLOFUSE_STRICT 'yes'.*'0', '1'"):
        config.is_strict()
    monkeypatch.setenv("HLOFUSE_STRICT", "0")
    assert not config.is_strict()
    monkeypatch.setenv("HLOFUSE_DUMP_TO", str(tmp_path))
    assert config.dump_directory() == tmp_path
    monkeypatch.delenv("HLOFUSE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert config.cache_directory() == tmp_path / "hlofuse"


def test_parse_error_points_at_the_character():
    error = hlofuse.errors.ParseError("Expected a shape", line=3, column=6, source="\tx = f33[2]\n")
    message, place, source, caret = str(error).split("\n")
    assert message == "Expected a shape"
    assert "line 3, column 6" in place
    assert source[caret.index("^")] == "f"


# ---------------------------------------------------------------- errors are those of jax.jit


def generator(a):
    yield a


def misuse_inside(a):
    return a @ jnp.ones((3, 3))


MISUSES = {
    "not callable": lambda J: J(3),
    "a generator function": lambda J: J(generator),
    "an unknown keyword": lambda J: J(double, statick_argnums=0),
    "an unknown keyword, as decorator": lambda J: J(statick_argnums=0),
    "a donated index out of range": lambda J: J(double, donate_argnums=3),
    "a donated name that is none": lambda J: J(double, donate_argnames="b"),
    "a static index out of range": lambda J: J(double, static_argnums=3),
    "an argument both static and donated": lambda J: J(double, static_argnums=0, donate_argnums=0),
    "a string": lambda J: J(double)("text"),
    "an object": lambda J: J(double)([object()]),
    "an unhashable static argument": lambda J: J(double, static_argnums=0)([1, 2]),
    "too many arguments": lambda J: J(double)(x, x),
    "too few arguments": lambda J: J(double)(),
    "a branch on a traced value": lambda J: J(lambda a: a if a > 0 else -a)(1.0),
    "shapes that do not fit": lambda J: J(misuse_inside)(x),
    "a result that is no array": lambda J: J(lambda a: "text")(x),
    "a wrong type for a compiled call": lambda J: J(double).lower(x).compile()(x[:3]),
}


@pytest.mark.parametrize("misuse", MISUSES.values(), ids=MISUSES)
def test_misuse_raises_what_jax_jit_raises(misuse, any_pipeline):
    def raised(J):
        with pytest.raises(Exception) as info:  # noqa: PT011 - which one is what is compared
            misuse(J)
        # Where an object lies in memory differs; so may which of our line numbers is shown.
        return type(info.value), re.sub(r"0x[0-9a-f]+|line \d+|:\d+", "_", str(info.value))

    assert raised(hlofuse.jit) == raised(jax.jit)


def test_errors_and_equations_show_the_line_of_the_user():
    with pytest.raises(TypeError) as info:
        hlofuse.jit(misuse_inside)(x)
    assert any(entry.name == "misuse_inside" for entry in info.traceback)
    assert not any(Path(str(entry.path)).parent.name == "hlofuse" for entry in info.traceback)


# ---------------------------------------------------------------- tracing


def test_trace_function_names_operands_and_lifts_constants():
    table = jnp.arange(3.0)
    traced = trace_function(lambda params, unused, scale: params["w"] * scale + table, ({"w": x[:3]}, x, 2.0))
    assert traced.closed.jaxpr.debug_info.arg_names == ("", "params['w']", "scale")
    assert not traced.closed.consts
    assert [np.shape(v) for v in traced.operands] == [(3,), (3,), ()]


def test_trace_function_takes_shapes():
    traced = trace_function(double, (jax.ShapeDtypeStruct((4,), jnp.bfloat16),))
    assert [str(a.dtype) for a in traced.closed.out_avals] == ["bfloat16"]


def test_one_function_is_traced_and_compiled_once(set_pipeline):
    traces, compiles = [], []

    def counted(a):
        traces.append(1)
        return a + 1

    def pipeline(*args):
        compiles.append(1)
        return evaluating_pipeline(*args)

    set_pipeline(pipeline)
    for _ in range(3):
        hlofuse.jit(counted)(x)
    assert (len(traces), len(compiles)) == (1, 1)
    hlofuse.jit(counted, fusion="none")(x)
    assert (len(traces), len(compiles)) == (1, 2)


def test_a_function_that_is_not_used_any_more_is_freed(any_pipeline):
    def local(a):
        return a * 3

    hlofuse.jit(local)(x)
    reference = weakref.ref(local)
    del local
    gc.collect()
    assert reference() is None


def test_a_wrapper_of_a_compiled_function_is_another_function(any_pipeline):
    hlofuse.jit(double)(x)

    @functools.wraps(double)  # copies the attributes of `double`
    def negative(a):
        return -double(a)

    np.testing.assert_allclose(hlofuse.jit(negative)(x), -double(x))


def test_effectful_functions_are_traced_once(any_pipeline):
    traces = []

    def effectful(a):
        traces.append(1)
        jax.debug.callback(lambda v: None, a)
        return a + 1

    hlofuse.jit(effectful)(x)
    assert len(traces) == 1


# ---------------------------------------------------------------- stages


def test_stages_are_those_of_jax(any_pipeline):
    lowered = hlofuse.jit(double).lower(x)
    compiled = lowered.compile()
    assert isinstance(lowered, jax.stages.Lowered)
    assert isinstance(compiled, jax.stages.Compiled)
    assert "module @jit_double" in lowered.as_text()
    assert "HloModule" in compiled.as_text()
    assert lowered.out_info.shape == x.shape
    assert isinstance(lowered.cost_analysis(), dict)
    assert isinstance(compiled.cost_analysis(), dict)
    assert compiled.memory_analysis().argument_size_in_bytes == x.nbytes
    np.testing.assert_allclose(compiled(x), double(x))


def test_compiled_has_kernels_and_explains(any_pipeline):
    for stage in (hlofuse.jit(double).lower(x), hlofuse.jit(double).lower(x).compile()):
        assert len(stage.kernels) == 1
        assert len(stage.executables) == 1
        assert stage.explain()


def test_kernels_of_a_program_that_contains_optimized_functions(any_pipeline):
    outer = jax.jit(lambda a: hlofuse.jit(double)(a) + hlofuse.jit(lambda b: b - 1)(a))
    assert len(outer.lower(x).compile().kernels) == 2


def test_explain_says_why_a_function_runs_plain(any_pipeline):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    compiled = hlofuse.jit(double).lower(jax.device_put(x, sharding)).compile()
    assert compiled.kernels == ()
    assert compiled.explain() == "double: runs as plain JAX (automatic sharding over 8 devices)"
    assert "Nothing here" in jax.jit(double).lower(x).compile().explain()


def test_a_compiled_program_can_be_serialized(any_pipeline):
    serialize = jax.experimental.serialize_executable
    compiled = hlofuse.jit(double).lower(x).compile()
    loaded = serialize.deserialize_and_load(*serialize.serialize(compiled), execution_devices=jax.devices()[:1])
    np.testing.assert_allclose(loaded(x), double(x))
    (outcome,) = stages.outcomes(compiled)
    assert pickle.loads(pickle.dumps(outcome)).name == "double"


def test_importing_hlofuse_initializes_no_backend_and_no_optimizer():
    program = (
        "import sys, hlofuse; from jax._src import xla_bridge; assert not xla_bridge._backends;"
        "assert not {'hlofuse.compiler', 'cupy', 'jax.experimental.sparse'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(hlofuse.__file__).parents[1])


# ---------------------------------------------------------------- donation


def donated_operands(run) -> frozenset[int]:
    with recorded_outcomes() as outcomes:
        run()
    (outcome,) = outcomes
    return outcome.donated


def test_donated_arguments_reach_the_executable(set_pipeline):
    seen = []

    class Recording(EvaluatingExecutable):
        def __call__(self, *operands, donated):
            seen.append(donated)
            return super().__call__(*operands, donated=donated)

    set_pipeline(lambda closed, options, platform: Recording(closed))
    a = jnp.asarray(x)
    hlofuse.jit(double, donate_argnums=0)(a)
    assert seen == [{0}]
    assert a.is_deleted()


def test_donation_counts_operands_after_constants_and_unused_arguments(any_pipeline):
    table = jnp.asarray(x)

    def g(unused, a, b):
        return a * table, b.sum()

    jitted = hlofuse.jit(g, donate_argnums=1)
    assert donated_operands(lambda: jitted(x, jnp.asarray(x), jnp.asarray(x))) == {1}


def test_what_is_not_known_to_be_donated_is_not(any_pipeline):
    assert donated_operands(lambda: hlofuse.jit(double)(x)) == frozenset()
    # A call inside another program: its operand may be needed after it.
    inner = hlofuse.jit(lambda a: a * 2, donate_argnums=0)
    assert donated_operands(lambda: jax.jit(lambda a: inner(a) + a)(x)) == frozenset()
    # No result fits: JAX does not donate it, and says so.
    total = hlofuse.jit(lambda a: a.sum(), donate_argnums=0)
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        assert donated_operands(lambda: total(jnp.asarray(x))) == frozenset()


# ---------------------------------------------------------------- failures of the optimizer


class Broken(EvaluatingExecutable):
    def __call__(self, *operands, donated):
        raise ZeroDivisionError("broken kernel")


class WrongShape(EvaluatingExecutable):
    def __call__(self, *operands, donated):
        return [jnp.zeros(3)]


def broken_pipeline(closed, options, platform):
    raise ZeroDivisionError("broken pass")


FAILURES = {
    "in the pipeline": (broken_pipeline, "broken pass"),
    "in the executable": (lambda closed, options, platform: Broken(closed), "broken kernel"),
    "of the results": (lambda closed, options, platform: WrongShape(closed), r"results are \[\(\(3,\)"),
}


@pytest.mark.parametrize(("pipeline", "message"), FAILURES.values(), ids=FAILURES)
def test_a_failure_is_one_warning_and_the_function_runs_plain(pipeline, message, set_pipeline, monkeypatch):
    set_pipeline(pipeline)
    monkeypatch.setenv("HLOFUSE_STRICT", "0")
    with pytest.warns(hlofuse.HlofuseWarning, match=f"'double' runs as plain JAX.*{message}") as warned:
        compiled = hlofuse.jit(double).lower(x).compile()
    assert len(warned) == 1
    np.testing.assert_allclose(compiled(x), double(x))
    assert re.search(f"double: runs as plain JAX .failed: .*{message}", compiled.explain())


@pytest.mark.parametrize(("pipeline", "message"), FAILURES.values(), ids=FAILURES)
def test_a_failure_is_an_error_when_strict(pipeline, message, set_pipeline):
    set_pipeline(pipeline)
    with pytest.raises((ZeroDivisionError, hlofuse.HlofuseError), match=message) as info:
        hlofuse.jit(double)(x)
    assert "while hlofuse compiled 'double'" in "".join(info.value.__notes__)


# ---------------------------------------------------------------- cost of a call


def call_overhead(rounds: int = 15, calls: int = 2000) -> float:
    """Time of a call of a tiny function, over that of jax.jit: medians of interleaved rounds."""
    operand = jnp.asarray(x)

    def seconds(jitted) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            jitted(operand)
        return time.perf_counter() - start

    ours, theirs = hlofuse.jit(double), jax.jit(double)
    seconds(ours), seconds(theirs)
    samples = [(seconds(ours), seconds(theirs)) for _ in range(rounds)]
    return statistics.median(a for a, _ in samples) / statistics.median(b for _, b in samples)


def test_a_call_costs_what_a_call_of_jax_jit_costs(set_pipeline):
    # The pipeline evaluates the jaxpr, so that only the way there is timed. The figure is 1.0; the bound is that of a
    # busy machine, and still finds a Python function in the way of each call.
    set_pipeline(evaluating_pipeline)
    assert min(call_overhead(rounds=5, calls=500) for _ in range(4)) < 1.15


if __name__ == "__main__":
    from hlofuse.runtime import primitive

    primitive.set_pipeline(evaluating_pipeline)
    print(f"call overhead: {call_overhead():.3f} x jax.jit")


# ---------------------------------------------------------------- found by use


def test_a_loop_around_64_bit_work_needs_no_x64_mode():
    """Threefry counts in u64 inside the loop of a rejection sampler."""
    draw = functools.partial(jax.random.gamma, a=2.0, shape=(8,))
    key = jax.random.key(0)
    np.testing.assert_allclose(hlofuse.jit(draw)(key), jax.jit(draw)(key), rtol=1e-6)


def test_debug_nans_names_the_operation():
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="encountered in log"):
        hlofuse.jit(lambda a: jax.numpy.log(a - 2))(x)


def test_checkify_finds_errors_inside():
    from jax.experimental import checkify

    error, _ = checkify.checkify(hlofuse.jit(lambda a: jax.numpy.log(a - 2)), errors=checkify.nan_checks)(x)
    assert "nan generated by primitive: log" in error.get()
    error, _ = checkify.checkify(hlofuse.jit(lambda a, i: a[i] + 1), errors=checkify.index_checks)(x, x.size)
    assert "out-of-bounds" in error.get()
