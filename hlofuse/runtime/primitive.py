"""The JAX primitive that stands for an optimized function: it carries the plain jaxpr, and is optimized when lowered.

So derivatives and evaluation see the plain function and build nothing, and kernels are used wherever JAX lowers the
primitive: under jit, vmap, scan or shard_map. Where kernels would be wrong or slow (`plain_reason`) the plain jaxpr is
lowered. Every decision leaves an `Outcome`, which the compiled program holds. The optimizer itself is given by
`set_pipeline`: this module must not import it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from ..config import Options, is_strict
from ..errors import HlofuseError, HlofuseWarning
from ..frontend import jax_compat
from ..frontend.trace import trace_function


class Executable(Protocol):
    """What the pipeline makes of a jaxpr."""

    @property
    def kernels(self) -> Sequence[Any]: ...

    def __call__(self, *operands: Any, donated: frozenset[int]) -> Sequence[Any]:
        """A traceable JAX function. It may overwrite the operands numbered in `donated`, and no others."""
        ...

    def explain(self) -> str: ...


Pipeline = Callable[[Any, Options, str], Executable]


@dataclass(frozen=True)
class Outcome:
    """What became of one traced function: an executable, or the reason why it was lowered plain."""

    name: str
    executable: Executable | None
    plain_reason: str | None = None
    donated: frozenset[int] = frozenset()

    def explain(self) -> str:
        if self.executable is None:
            return f"{self.name}: runs as plain JAX ({self.plain_reason})"
        return self.executable.explain()

    def __reduce__(self) -> Any:
        # A serialized program (jax.experimental.serialize_executable) takes the facts along, not the live kernels.
        return Outcome, (self.name, None, self.plain_reason or "deserialized", self.donated)


_pipeline: Pipeline | None = None
_pipeline_platforms: frozenset[str] = frozenset()
_recorders: list[list[Outcome]] = []


def set_pipeline(pipeline: Pipeline, platforms: Sequence[str] = ("cpu", "cuda")) -> None:
    """Give the optimizer, and the platforms on which what it makes can run."""
    global _pipeline, _pipeline_platforms
    _pipeline, _pipeline_platforms = pipeline, frozenset(platforms)


@contextlib.contextmanager
def recorded_outcomes() -> Iterator[list[Outcome]]:
    """A list that gets the outcome of every function traced or lowered within the `with` block."""
    outcomes: list[Outcome] = []
    _recorders.append(outcomes)
    try:
        yield outcomes
    finally:
        # By identity: two empty lists are equal.
        _recorders[:] = [r for r in _recorders if r is not outcomes]


def call_optimized(name: str, fun: Callable, args: Sequence[Any], kwargs: Mapping[str, Any], options: Options) -> Any:
    """`fun(*args, **kwargs)`, within a trace of JAX, as one primitive. Arguments without a tracer are static."""
    traced = trace_function(fun, args, kwargs, is_static=jax_compat.holds_no_tracer)
    if traced.plain_reason:
        _record(Outcome(name, None, traced.plain_reason))
        return traced.assemble(jax_compat.eval_closed(traced.closed, *traced.operands))
    jax_compat.register_sparse_rule(hlofuse_p)
    return traced.assemble(hlofuse_p.bind(*traced.operands, jaxpr=traced.closed, name=name, options=options))


def _bind_batched(closed: Any, operands: Sequence[Any], *, name: str, options: Options) -> list[Any]:
    closed, constants = jax_compat.constants_to_operands(closed)
    return hlofuse_p.bind(*constants, *operands, jaxpr=closed, name=name, options=options)


def _lower(site: jax_compat.LoweringSite, *, jaxpr: Any, name: str, options: Options) -> Any:
    def lower_plain(reason: str) -> Any:
        return finish(Outcome(name, None, reason), site.emit(lambda *xs: jax_compat.eval_closed(jaxpr, *xs)))

    def finish(outcome: Outcome, results: Any) -> Any:
        _record(outcome)
        if not site.is_exported:  # JAX refuses to export a program that holds anything
            site.keep(outcome)
        return results

    if reason := plain_reason(site):
        return lower_plain(reason)
    try:
        if _pipeline is None:
            raise HlofuseError("no pipeline is set")
        executable = _pipeline(jaxpr, options, site.platforms[0])
        results = site.emit(lambda *xs: _checked(executable(*xs, donated=site.donated), jaxpr))
    except Exception as error:
        if is_strict():
            error.add_note(f"(while hlofuse compiled {name!r}; HLOFUSE_STRICT=1 makes this an error)")
            raise
        message = f"{type(error).__name__}: {error}"
        warnings.warn(f"{name!r} runs as plain JAX, because hlofuse failed. {message}", HlofuseWarning, stacklevel=2)
        return lower_plain(f"failed: {message}")
    return finish(Outcome(name, executable, None, site.donated), results)


def plain_reason(site: jax_compat.LoweringSite) -> str | None:
    """Why kernels cannot, or should not, be used at this place of a program; None if they can."""
    if site.is_exported:  # the program must run without us
        return "export"
    if len(site.platforms) > 1 or site.platforms[0] not in _pipeline_platforms:
        return f"platform {', '.join(site.platforms)}"
    if site.compute_type is not None:
        return f"compute_on {site.compute_type}"
    if site.is_partly_manual:
        return "partly manual mesh"
    if site.automatic_devices > 1:  # XLA would gather the operands of a kernel on every device
        return f"automatic sharding over {site.automatic_devices} devices"
    return None


def _checked(results: Sequence[Any], closed: Any) -> Sequence[Any]:
    got = [(a.shape, a.dtype) for a in map(jax.typeof, results)]
    expected = [(a.shape, a.dtype) for a in closed.out_avals]
    if got != expected:
        raise HlofuseError(f"the executable's results are {got}, the jaxpr's {expected}")
    return results


def _record(outcome: Outcome) -> None:
    for outcomes in _recorders:
        outcomes.append(outcome)


hlofuse_p = jax_compat.register_call_primitive("hlofuse", batch=_bind_batched, lower=_lower)
