"""The command line, as a person uses it: what each command prints, and a short clear message for each mistake."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from hlofuse import cli
from hlofuse.codegen.dialect import SIMT
from hlofuse.explore import dump
from hlofuse.explore.argument_spec import ArgumentSpecError, parse_argument
from hlofuse.runtime import simt
from hlofuse.runtime.host_compiler import find_compiler
from hlofuse.runtime.simt import build_simt_kernels

SOURCE = '''
import jax, jax.numpy as jnp
import numpy as np

def scale(x, y): return jax.jit(jnp.tanh)(x) * y + 1.0
def two(x): return x + x
two.example_args = (jax.ShapeDtypeStruct((5,), np.float32),)
def three(tree, axis): return jnp.sum(tree["w"] * tree["b"], axis)
def example(x): return jax.nn.softmax(x)
def picky(x): raise ValueError("wants more")
not_a_function = 3
EXAMPLE_ARGS = {"example": (np.ones((4, 8), np.float32),)}
'''

# Of processes that run elsewhere: they find the package that is tested.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}

HLO = """HloModule small

ENTRY main {
  x = f32[4,8]{1,0} parameter(0)
  y = f32[4,8]{1,0} exponential(x)
  ROOT z = f32[4,8]{1,0} add(y, y)
}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "raising.py").write_text("1 / 0\n")
    (tmp_path / "small.hlo").write_text(HLO)
    (tmp_path / "wrong.hlo").write_text(HLO.replace("exponential(x)", "exponential(q)"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("program", "broken", "raising"):
        sys.modules.pop(name, None)


@pytest.fixture
def run(folder, capsys):
    def run(*arguments: str) -> SimpleNamespace:
        try:
            status = cli.main(list(arguments))
        except SystemExit as error:  # argparse
            status = error.code
        captured = capsys.readouterr()
        return SimpleNamespace(status=status, out=captured.out, err=captured.err)

    return run


SCALE = ("program.py:scale", "--args", "f32[16,8]", "f32[16,8]")


@pytest.mark.parametrize(("stage", "expected"), [
    ("jaxpr", "tanh"),
    ("hlo", "HloModule"),
    ("optimized", "tanh("),
    ("fused", "kind=kLoop"),
    ("cuda", "__global__"),
    ("host", 'extern "C"'),
    ("simt", "SIMT_ENTRY(add_fusion"),
    ("after:inline_calls", "tanh("),
    ("inline_calls", "tanh("),
])  # fmt: skip
def test_dump_prints_each_stage(run, stage, expected):
    result = run("dump", *SCALE, "--stage", stage)
    assert result.status == 0, result.err
    assert expected in result.out and result.out.endswith("\n")
    assert result.err == "" or "changes nothing" in result.err


def test_after_a_pass_that_changes_nothing_is_what_it_was_given(run, folder):
    (folder / "twice.hlo").write_text(HLO.replace("add(y, y)", "add(y, y2)").replace(
        "  ROOT", "  y2 = f32[4,8]{1,0} exponential(x)\n  ROOT"))  # fmt: skip
    before, after, later = (run("dump", "twice.hlo", "--stage", f"after:{name}") for name in
                            ("inline_calls", "cse", "dce"))  # fmt: skip
    assert before.out.count("exponential(") == 2 and "inline_calls changes nothing" in before.err
    assert after.out.count("exponential(") == 1 and after.err == ""
    assert later.out == after.out and "dce changes nothing" in later.err


def test_dump_ptx(run):
    pytest.importorskip("nvidia", reason="needs the NVRTC wheel")
    result = run("dump", *SCALE, "--stage", "ptx", "--arch", "sm_80")
    assert result.status == 0, result.err
    assert ".target sm_80" in result.out and ".entry" in result.out
    assert ".target sm_90" in run("dump", *SCALE, "--stage", "ptx").out


def test_simt_runs_the_kernels(run):
    result = run("simt", *SCALE, "--seeds", "2")
    assert result.status == 0, result.err
    assert re.match(r"scale: 1 kernels, 2 seeds: nothing to report, .* at most \S+ from jax.jit$", result.out)


def test_simt_reports(run, monkeypatch):
    faulty = SIMT.prelude.replace("body(at, LANES);", "body(at + 1, 1);")
    monkeypatch.setattr(simt, "build_simt_kernels", lambda texts: build_simt_kernels(texts, faulty))
    result = run("simt", *SCALE, "--seed", "7")
    assert result.status == 2 and result.out == ""
    assert re.match(r"hlofuse: scale: seed 7: kernel add_fusion_\w+: .*of out were never written", result.err)


def test_the_simt_program_compiles_and_runs(run, folder):
    assert run("dump", *SCALE, "--stage", "simt", "-o", "simt.cpp").status == 0
    compiler = find_compiler()
    assert compiler is not None
    subprocess.run([*compiler.command, "-w", "simt.cpp", "-lm", "-o", "simt"], check=True)
    printed = subprocess.run(["./simt", "4"], check=True, capture_output=True, text=True).stdout
    assert re.match(r"add_fusion_\w+: 1 blocks of 32 threads\n  out: \S+ \(0x[0-9a-f]{8}\) ", printed)
    text = (folder / "simt.cpp").read_text()
    (folder / "faulty.cpp").write_text(text.replace("(int)128", "(int)136"))
    subprocess.run([*compiler.command, "-w", "faulty.cpp", "-lm", "-o", "faulty"], check=True)
    failed = subprocess.run("./faulty", capture_output=True, text=True)
    assert failed.returncode == 1 and "line 18: read outside of x: index 128, it has 128" in failed.stdout


def test_the_prelude_makes_the_source_complete(run):
    plain = run("dump", *SCALE, "--stage", "cuda").out
    complete = run("dump", *SCALE, "--stage", "cuda", "--prelude").out
    assert complete.endswith(plain) and len(complete) > 2 * len(plain)


@pytest.mark.parametrize("target", ["program:scale", "program.py:scale", "./program.py:scale"])
def test_targets_by_module_and_by_file(run, target):
    assert "tanh(" in run("dump", target, "--args", "f32[3]", "f32[3]", "--stage", "hlo").out


def test_arguments_that_the_file_provides(run):
    assert "f32[5]" in run("dump", "program.py:two", "--stage", "hlo").out
    assert "f32[4,8]" in run("dump", "program.py:example", "--stage", "hlo").out
    given = run("dump", "program.py:three", "--args", "{w: f32[2,3], b: f32[2,3]}", "1", "--stage", "hlo")
    assert "f32[2,3]" in given.out and "dimensions={1}" in given.out


def test_hlo_without_metadata(run):
    full, bare = (run("dump", *SCALE, "--stage", "hlo", *option).out for option in ([], ["--no-metadata"]))
    assert "program.py" in full and "metadata" not in bare
    assert len(full.splitlines()) == len(bare.splitlines())


def test_arguments_of_a_catalog(run):
    catalog = os.path.join(os.path.dirname(__file__), "catalog.py")
    assert "f32[16384,4096]" in run("dump", f"{catalog}:softmax", "--stage", "hlo").out
    assert "f32[9,77]" in run("dump", f"{catalog}:softmax", "--stage", "hlo", "--size", "small").out


def test_hlo_text_as_target(run):
    result = run("dump", "small.hlo", "--stage", "fused")
    assert result.status == 0, result.err
    assert "kind=kLoop" in result.out and "exponential(" in result.out
    assert "no jaxpr" in run("dump", "small.hlo", "--stage", "jaxpr").err


def test_explain(run):
    result = run("explain", *SCALE)
    assert result.status == 0, result.err
    assert "tanh" in result.out
    assert run("explain", *SCALE, "--fusion", "none").out != result.out


def test_passes_lists_the_pipeline_with_reasons(run):
    from hlofuse.passes import PIPELINE

    lines = run("passes").out.splitlines()
    assert len(lines) == len(PIPELINE)
    assert all(len(line.split()) > 3 for line in lines)


def test_output_file_is_replaced_whole(run, folder):
    (folder / "out.hlo").write_text("old")
    assert run("dump", *SCALE, "--stage", "hlo", "-o", "out.hlo").out == ""
    assert (folder / "out.hlo").read_text() == run("dump", *SCALE, "--stage", "hlo").out
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    result = run("dump", *SCALE, "-o", "no/such/folder/out.hlo")
    assert result.status == 2 and "no/such/folder" in result.err


@pytest.mark.parametrize(("arguments", "messages"), [
    (["dump", "program.py:scal", "--args", "f32[2]"], ["no function 'scal'", "did you mean 'scale'"]),
    (["dump", "program.py:not_a_function", "--args", "f32[2]"], ["no function, but of type int"]),
    (["dump", "program.py:scale"], ["no example arguments", "--args"]),
    (["dump", "program.py"], ["which function"]),
    (["dump", "nowhere.py:f", "--args", "f32[2]"], ["no such file", "nowhere.py"]),
    (["dump", "no_such_module:f", "--args", "f32[2]"], ["No module named 'no_such_module'"]),
    (["dump", "broken.py:f", "--args", "f32[2]"], ["syntax error"]),
    (["dump", "raising.py:f", "--args", "f32[2]"], ["ZeroDivisionError", "raising.py, line 1"]),
    (["dump", "program.py:picky", "--args", "f32[2]"], ["'picky' raised ValueError: wants more", "program.py, line"]),
    (["dump", "program.py:scale", "--args", "f32[2]", "f32[3]"], ["'scale' raised TypeError", "shapes"]),
    (["dump", "program.py:scale", "--args", "f32[2]"], ["'scale' raised TypeError", "'y'"]),
    (["dump", "program.py:scale", "--args", "f32[2", "f32[2]"], ["expected ','", "    f32[2\n         ^"]),
    (["dump", *SCALE, "--stage", "optimised"], ["'optimised'", "did you mean 'optimized'", "'ptx'", "'cse'"]),
    (["dump", *SCALE, "--stage", "after:cs"], ["pass 'cs'", "did you mean 'cse'"]),
    (["dump", *SCALE, "--stage", "cse#9"], ["Unknown stage 'cse#9'", "'cse'", "'fused'"]),
    (["dump", *SCALE, "--device", "h20"], ["device 'h20'", "'h200'", "'host'"]),
    (["dump", *SCALE, "--fusion", "colouring"], ["did you mean 'coloring'", "'greedy'"]),
    (["dump", *SCALE, "--arch", "sm_90"], ["--arch is for --stage ptx"]),
    (["simt", *SCALE, "--device", "a100"], ["runs the kernels of --device simt"]),
    (["simt", "small.hlo"], ["needs a function"]),
    (["dump", "missing.hlo"], ["missing.hlo", "No such file"]),
    (["dump", "small.hlo", "--args", "f32[2]"], ["names no function"]),
    (["dump", "wrong.hlo"], ["wrong.hlo, line 5", "exponential(q)", "^"]),
    (["explain", "wrong.hlo"], ["line 5"]),
    (["frobnicate"], ["invalid choice", "dump"]),
    ([], ["required"]),
])  # fmt: skip
def test_mistakes_get_a_short_message_and_status_2(run, arguments, messages):
    result = run(*arguments)
    assert result.status == 2, result.out
    assert result.out == ""
    assert all(message in result.err for message in messages), result.err
    assert "Traceback" not in result.err and len(result.err.splitlines()) < 16


def test_python_dash_m_and_a_closed_pipe(folder):
    command = [sys.executable, "-m", "hlofuse", "dump", *SCALE, "--stage", "hlo"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT)
    process.stdout.close()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0 and errors == b""


# ------------------------------------------------------------------------------------------- arguments as text


@pytest.mark.parametrize(("text", "shape", "dtype"), [
    ("f32[8,128]", (8, 128), "float32"), ("s32[]", (), "int32"), ("pred[3]", (3,), "bool"),
    ("u8[0,2]", (0, 2), "uint8"),
    ("float16[4]", (4,), "float16"), ("i32[4]", (4,), "int32"), ("bfloat16[1]", (1,), "bfloat16"),
    (" c64[ 2 , 3 ] ", (2, 3), "complex64"),
])  # fmt: skip
def test_array_arguments(text, shape, dtype):
    assert parse_argument(text) == jax.ShapeDtypeStruct(shape, dtype)


def test_nested_and_plain_arguments():
    assert parse_argument("(f32[2], (s32[], ), {a: 3})") == (
        jax.ShapeDtypeStruct((2,), np.float32), (jax.ShapeDtypeStruct((), np.int32),), {"a": 3})  # fmt: skip
    assert [parse_argument(t) for t in ("3", "-2.5", "1e3", "true", "False")] == [3, -2.5, 1e3, True, False]
    assert isinstance(parse_argument("3"), int) and isinstance(parse_argument("3.0"), float)
    assert jax.dtypes.issubdtype(parse_argument("key[]").dtype, jax.dtypes.prng_key)


@pytest.mark.parametrize(("text", "message", "caret"), [
    ("f33[2]", "unknown element type 'f33'", 0), ("f32", "expected '['", 3), ("f32[2,]]", "expected the end", 7),
    ("f32[x]", "expected a dimension", 4), ("f32[-1]", "expected a dimension", 4),
    ("f32[2.5]", "expected a dimension", 4),
    ("(f32[2]", "expected ','", 7), ("{f32[2]}", "expected ':'", 4), ("", "expected a type", 0),
    ("f32[2] $", "unexpected '$'", 7), ("f64[2]", "JAX_ENABLE_X64", 0), ("f32[2 3]", "expected ','", 6),
])  # fmt: skip
def test_malformed_arguments_show_the_place(text, message, caret):
    with pytest.raises(ArgumentSpecError) as caught:
        parse_argument(text)
    assert message in str(caught.value)
    assert caught.value.position == caret
    assert str(caught.value).splitlines()[-1] == "    " + " " * caret + "^"


# ------------------------------------------------------------------------------------------- dumps


@pytest.fixture
def compilation():
    from hlofuse.compiler import compile_function

    def dump_me(x):
        return jax.nn.softmax(x) + 1.0

    return compile_function(dump_me, jax.ShapeDtypeStruct((4, 8), np.float32), device="h200")


def test_dump_compilation_writes_every_stage(compilation, tmp_path):
    dump.dump_compilation(compilation, tmp_path / "new")
    dump.dump_compilation(compilation, tmp_path / "new")
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    first = [name for name in names if name.startswith(f"{compilation.fused.name}.")]
    stages = [name.split(".")[2] for name in first]
    assert stages[:2] == ["jaxpr", "hlo"] and stages[-2:] == ["cuda", "host"]
    assert [name.split(".")[1] for name in first] == [f"{i:02d}" for i in range(len(first))]
    assert len(stages) == len(compilation.snapshots) + 4
    assert len(names) == 2 * len(first)  # the second compilation did not replace the first's files
    assert "ENTRY" in (tmp_path / "new" / first[1]).read_text()


def test_a_dump_that_cannot_be_written_is_a_warning(compilation, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="HLOFUSE_DUMP_TO"):
        dump.dump_compilation(compilation, tmp_path / "file")


def test_hlofuse_dump_to(tmp_path):
    script = "import hlofuse, jax.numpy as jnp\n@hlofuse.jit\ndef shown(x): return jnp.exp(x) + 1\nshown(jnp.ones(8))\n"
    environment = {**ENVIRONMENT, "HLOFUSE_DUMP_TO": str(tmp_path / "dumps")}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=300)
    suffixes = {path.suffix for path in (tmp_path / "dumps").iterdir()}
    assert {".txt", ".hlo", ".cu", ".cpp"} <= suffixes
    assert any("shown" in path.name for path in (tmp_path / "dumps").iterdir())


def test_explanations_use_the_names_of_the_text():
    import jax.numpy as jnp

    from hlofuse.compiler import compile_function

    def normalize_columns(x):
        y = (x - x.mean(0)) / x.std(0)
        return y, y.max(1)

    text = compile_function(normalize_columns, jax.ShapeDtypeStruct((8192, 512), jnp.float32)).explain()
    kernels = [line for line in text.splitlines() if ": form " in line]
    assert len(kernels) == len(set(kernels)) > 1
    assert "reduces other axes than reduce" in text and "<" not in text


def test_stablehlo_is_recognized(folder, capsys):
    (folder / "stable.mlir").write_text("module @jit_f {\n}\n")
    assert cli.main(["explain", "stable.mlir"]) == 2
    assert ".as_text('hlo')" in capsys.readouterr().err
