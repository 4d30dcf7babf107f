"""The command line: `hlofuse dump`, `hlofuse explain`, `hlofuse simt`, `hlofuse passes`.

What a person got wrong is one short message on stderr and exit status 2; a traceback is a bug of this package.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import __version__
from .config import FUSIONS, Options, check_name, device_names
from .errors import HlofuseError

_DESCRIPTION = """\
See what hlofuse makes of a function: its HLO before and after each pass, the clusters and the reasons for them, the
generated kernels. No GPU is needed.

TARGET is module:function, file.py:function, or a file of HLO text. The arguments of a function come from --args, or
from the file: an attribute `example_args` of the function, or EXAMPLE_ARGS, a dict by function name.
"""
_ARCH = "sm_90"  # of --stage ptx for a device without one
_EXAMPLES = """\
examples:
  hlofuse dump model.py:loss --args 'f32[128,512]' 's32[128]' --stage optimized
  hlofuse dump model.py:loss --stage after:cse
  hlofuse dump jax.nn:softmax --args 'f32[1024,4096]' --stage cuda -o softmax.cu
  hlofuse explain program.hlo --device a100
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        text = arguments.run(arguments)
        return _write(text, arguments.output)
    except BrokenPipeError:
        # The reader has seen enough (`| head`); keep the interpreter from flushing into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except HlofuseError as error:
        print(f"hlofuse: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hlofuse", description=_DESCRIPTION, epilog=_EXAMPLES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    dump = commands.add_parser("dump", help="print one stage of a compilation")
    dump.set_defaults(run=_dump)
    _add_target(dump)
    dump.add_argument("--stage", default="fused", metavar="STAGE",
                      help="jaxpr, hlo, optimized, fused (the default), cuda, ptx, host, simt (a C++ program that runs "
                           "the CUDA kernels on the CPU), or the program after a pass: after:NAME (see `hlofuse "
                           "passes`; NAME#2 for its second time)")  # fmt: skip
    dump.add_argument("--arch", metavar="ARCH", help="of --stage ptx, such as sm_90; default: the device's")
    dump.add_argument("--prelude", action="store_true", help="before cuda or host: what the kernels are written with")
    _add_feedback(dump)
    dump.add_argument("--no-metadata", action="store_true", help="HLO without operation names and source lines")

    explain = commands.add_parser("explain", help="the clusters, and for every producer and consumer why (not) fused")
    explain.set_defaults(run=_explain)
    _add_target(explain)
    explain.add_argument("--json", action="store_true", help="the same as JSON")
    _add_feedback(explain)
    explain.add_argument("--force", action="append", default=[], metavar="A,B",
                         help="what changes with these two in one kernel; names as explain prints them; repeatable")
    explain.add_argument("--forbid", action="append", default=[], metavar="A,B", help="the same with these two apart")

    simt = commands.add_parser("simt", help="run the CUDA kernels on the CPU, thread by thread, and check every access")
    simt.set_defaults(run=_simt)
    _add_target(simt, device="simt")
    simt.add_argument("--seeds", type=int, default=5, metavar="N", help="orders of blocks and threads (default 5)")
    simt.add_argument("--seed", type=int, metavar="SEED", help="only this one; 0 is the natural order")

    passes = commands.add_parser("passes", help="list the passes in their order, with the reason for each")
    passes.set_defaults(run=_passes)
    passes.add_argument("-o", "--output", type=Path, metavar="FILE", help="write to FILE")
    return parser


def _add_feedback(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--feedback", action="store_true",
                        help="compile the CUDA kernels with NVRTC and split what spills registers; no GPU is needed")


def _add_target(parser: argparse.ArgumentParser, device: str = "h200") -> None:
    parser.add_argument("target", metavar="TARGET", help="module:function, file.py:function or a file of HLO text")
    parser.add_argument("--args", nargs="+", metavar="ARG", help="arguments: f32[8,128], s32[], (f32[2], f32[2]), "
                                                                "{w: f32[4]}, or a number (static)")  # fmt: skip
    parser.add_argument("--size", default="full", choices=("small", "full"), help="of a catalog workload's arguments")
    parser.add_argument("--device", default=device, metavar="DEVICE",
                        help=f"whose cost model decides (default {device})")  # fmt: skip
    parser.add_argument("--fusion", default="coloring", metavar="FUSION", help=", ".join(FUSIONS))
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write to FILE")


# ------------------------------------------------------------------------------------------- commands


def _dump(arguments: argparse.Namespace) -> str:
    from .codegen.dialect import DIALECTS
    from .explore.dump import STAGES, stage_text

    stage = arguments.stage.removeprefix("after:")
    # Before anything is compiled: a wrong name should not take seconds to find.
    _check_stage(stage, arguments.stage)
    if stage == "ptx":
        _check_nvrtc("--stage ptx", arguments.arch)
    elif arguments.arch is not None:
        raise HlofuseError("--arch is for --stage ptx")
    compilation = _compile(arguments)
    if stage == "ptx":
        return _ptx(compilation, arguments.arch)
    text = stage_text(compilation, stage, metadata=not arguments.no_metadata)
    if stage not in (*STAGES, *compilation.snapshots):
        print(f"hlofuse: {stage} changes nothing here; this is what it is given", file=sys.stderr)
    return f"{DIALECTS[stage].prelude}\n{text}" if arguments.prelude and stage in DIALECTS else text


def _explain(arguments: argparse.Namespace) -> str:
    force, forbid = ([_pair(text) for text in texts] for texts in (arguments.force, arguments.forbid))
    compilation = _compile(arguments)
    if not arguments.json:
        return compilation.explain(force, forbid)
    if force or forbid:
        compilation = compilation.recolored(force, forbid)
    return json.dumps(compilation.explanation(), indent=1)


def _pair(text: str) -> tuple[str, str]:
    names = [name.strip() for name in text.split(",")]
    if len(names) != 2 or not all(names):
        raise HlofuseError(f"{text!r} is not a pair of names, A,B")
    return names[0], names[1]


def _simt(arguments: argparse.Namespace) -> str:
    if arguments.device != "simt":
        raise HlofuseError("`hlofuse simt` runs the kernels of --device simt, which are those of the H200")
    options = Options(fusion=arguments.fusion)
    from .api import jit
    from .explore.target import load_target
    from .runtime.simt_trial import try_function

    target = load_target(arguments.target, arguments.args, arguments.size)
    if target.function is None:
        raise HlofuseError("`hlofuse simt` needs a function, as module:function or file.py:function")
    seeds = range(arguments.seeds) if arguments.seed is None else (arguments.seed,)
    ours = jit(target.function, fusion=options.fusion, device="simt")
    trial = try_function(ours, target.function, target.args, seeds)
    if trial.report is not None:
        raise HlofuseError(f"{target.name}: {trial.report}")
    return (f"{target.name}: {trial.kernels} kernels, {len(trial.seeds)} seeds: nothing to report, the same bits each "
            f"time; at most {trial.difference:.2g} from jax.jit")


def _passes(arguments: argparse.Namespace) -> str:
    from .passes import PIPELINE

    width = max(len(entry.name) for entry in PIPELINE)
    return "\n".join(f"{number:>2}  {entry.name:<{width}}  {entry.reason}" for number, entry in enumerate(PIPELINE, 1))


# ------------------------------------------------------------------------------------------- steps


def _check_stage(stage: str, given: str) -> None:
    from .explore.dump import STAGES
    from .passes import PIPELINE

    passes = tuple(dict.fromkeys(entry.name for entry in PIPELINE))
    name = stage.partition("#")[0]
    if given.startswith("after:"):
        check_name("pass", name, passes)
    else:
        check_name("stage", name, (*STAGES, *passes))


def _compile(arguments: argparse.Namespace) -> Any:
    check_name("device", arguments.device, device_names())
    if arguments.feedback:
        _check_nvrtc("--feedback", None)
    options = Options(fusion=arguments.fusion, feedback=arguments.feedback)
    from .compiler import compile_function, compile_module
    from .explore.target import load_target

    target = load_target(arguments.target, arguments.args, arguments.size)
    if target.module is not None:
        return compile_module(target.module, options, arguments.device)
    assert target.function is not None
    return compile_function(target.function, *target.args, options=options, device=arguments.device)


def _check_nvrtc(option: str, arch: str | None) -> None:
    from .runtime import nvrtc

    if (reason := nvrtc.nvrtc_available()) is not None:
        raise HlofuseError(f"{option} needs NVRTC: {reason}")
    if arch is not None:
        check_name("architecture", arch, nvrtc.supported_architectures())


def _ptx(compilation: Any, arch: str | None) -> str:
    from .codegen.dialect import DIALECTS
    from .explore.dump import kernel_text
    from .runtime import nvrtc

    text = f"{DIALECTS['cuda'].prelude}\n{kernel_text(compilation, 'cuda')}"
    return nvrtc.compile_ptx(text, arch or compilation.device.arch or _ARCH)


def _write(text: str, output: Path | None) -> int:
    from .explore.dump import write_atomically

    text = text if text.endswith("\n") else text + "\n"
    if output is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return 0
    try:
        write_atomically(output, text)
    except OSError as error:
        print(f"hlofuse: cannot write {output}: {error.strerror}", file=sys.stderr)
        return 2
    return 0
