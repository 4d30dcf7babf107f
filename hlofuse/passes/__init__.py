"""The passes, in order, each with the reason why it is there. Name = file = golden folder = command-line word."""
from __future__ import annotations

from hlofuse.passes.algebraic_simplifier import algebraic_simplifier
from hlofuse.passes.broadcast_sinking import broadcast_sinking
from hlofuse.passes.canonicalize import canonicalize
from hlofuse.passes.cast_simplifier import cast_simplifier
from hlofuse.passes.constant_folding import constant_folding
from hlofuse.passes.cse import cse
from hlofuse.passes.dce import dce
from hlofuse.passes.dot_canonicalizer import dot_canonicalizer
from hlofuse.passes.dot_operand_layout import dot_operand_layout
from hlofuse.passes.inline_calls import inline_calls
from hlofuse.passes.one_read_moments import one_read_moments
from hlofuse.passes.online_softmax import online_softmax
from hlofuse.passes.pass_manager import Pass, run_passes
from hlofuse.passes.reshape_mover import reshape_mover

PIPELINE: tuple[Pass, ...] = (
    Pass("inline_calls", inline_calls, "a call hides its instructions from everything else"),
    Pass("cse", cse, "what is written twice would be rewritten twice by all that follows"),
    Pass("canonicalize", canonicalize, "one spelling of each thing, so that later rules need no twins"),
    Pass("constant_folding", constant_folding, "what is known now need not be computed each time"),
    Pass("cast_simplifier", cast_simplifier, "conversions there and back cost bytes and hide equal values"),
    Pass("algebraic_simplifier", algebraic_simplifier, "identities that hold bit for bit"),
    Pass("reshape_mover", reshape_mover, "moves of elements merge, and meet what undoes them"),
    Pass("dot_canonicalizer", dot_canonicalizer, "a transpose in a dot's dimension numbers is free",
         dialects=("cuda",)),   # XLA:CPU has layouts for that, and is best at dots as they were written
    Pass("dot_operand_layout", dot_operand_layout, "a copy that a library call would make fuses with what comes before",
         dialects=("cuda",)),
    Pass("broadcast_sinking", broadcast_sinking, "compute before the broadcast, not once per copy"),
    Pass("one_read_moments", one_read_moments, "a variance that waits for its mean reads everything twice"),
    Pass("online_softmax", online_softmax, "a sum of exponentials that waits for their maximum reads everything twice",
         dialects=("cuda",)),   # a CPU's cache has what is read again, and scaling costs more than that
    Pass("cse", cse, "compute equal values once; barriers stay walls"),
    Pass("dce", dce, "results that nobody reads, loop carries first of all, cost time and memory"),
)

__all__ = ["PIPELINE", "Pass", "run_passes"]
