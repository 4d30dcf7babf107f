"""The kernels of a compilation as one C++ program that runs them thread by thread: for gdb and printf.

It includes the prelude's files where they lie, so that a debugger shows kernels, prelude and machine alike. Operands
are drawn from a fixed generator.
"""
from __future__ import annotations

from typing import Any

from ..codegen.kernel import KernelText
from ..codegen.prelude import simt_program_files
from ..hlo.shape import Shape

_HEAD = """\
// The CUDA kernels of {name}, run thread by thread on the CPU with drawn operands:
//   g++ -g -w FILE -lm -o simt && ./simt [SEED]        (0, the natural order, is the default)
// printf works in kernels and prelude; so do breakpoints, also of one thread, with the condition
//   if simt::now->block == 2 && simt::now->current->index == 3
"""
_LETTERS = {"IN": "I", "OUT": "O", "SCRATCH": "S"}


def simt_program(compilation: Any) -> str:
    """The program's text; each different kernel once."""
    kernels: dict[str, tuple[KernelText, list[Shape]]] = {}
    for c in compilation.clusters:
        if c.segments:
            text = c.text_in("cuda")
            operands = [o.array for o in c.instruction.operands]
            kernels.setdefault(text.symbol, (text, [*operands, *c.instruction.result_shapes, *text.scratch]))
    includes = "".join(f'#include "{path}"\n' for path in simt_program_files())
    bodies = "".join(f"\n{text.text}SIMT_ENTRY({text.symbol})\n" for text, _ in kernels.values())
    runs = "".join(_run(text, shapes) for text, shapes in kernels.values())
    main = ("int main(int count, char** words) {\n  int status = 0;\n"
            "  const unsigned long long seed = count > 1 ? strtoull(words[1], nullptr, 10) : 0;\n"
            f"{runs}  return status;\n}}\n")
    return f"{_HEAD.format(name=compilation.name)}{includes}{bodies}\n{main}"


def _run(text: KernelText, shapes: list[Shape]) -> str:
    buffers = [f'simt::buffer("{a.name}", {s.size}, {s.dtype.itemsize}, \'{_kind(s)}\')'
               for a, s in zip(text.arguments, shapes, strict=True)]
    buffers.append(f"simt::buffer(\"counters\", {text.counters}, 4, 'z')")
    kinds = "".join(_LETTERS[a.kind] for a in text.arguments) + "C"
    rows = "".join(f"        {b},\n" for b in buffers)
    return (f"  {{\n    simt::Region buffers[] = {{\n{rows}    }};\n"
            f'    status |= simt::run_and_print({text.symbol}_simt, "{text.symbol}", {text.blocks}, {text.threads}, '
            f'buffers, "{kinds}", seed);\n  }}\n')


def _kind(shape: Shape) -> str:
    """What to fill a buffer with: a letter of simt_program.h."""
    letters = {"f16": "h", "bf16": "b", "f32": "f", "c64": "f", "f64": "d", "c128": "d", "pred": "p"}
    return letters.get(shape.element_type, "i")
