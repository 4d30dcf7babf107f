"""A jaxpr as an HLO module.

Arguments become parameters in order; arrays that the jaxpr closes over become trailing parameters, never literals, so
that equal programs over different arrays are one program. The root is the result, or a tuple of them if they are not
exactly one. Nested calls are inlined within a budget; an equation without a rule becomes an opaque instruction.
"""
from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hlofuse.frontend import (
    contraction_rules,
    control_rules,
    elementwise_rules,
    random_rules,
    reduction_rules,
    special_rules,
    structure_rules,
)
from hlofuse.frontend import jaxpr_compat as compat
from hlofuse.frontend.scope import Importer, Rule, Scope
from hlofuse.hlo.builder import computation, parameter
from hlofuse.hlo.module import Module
from hlofuse.hlo.to_jax import set_opaque_evaluator

set_opaque_evaluator(compat.evaluate_equation)

RULES: dict[str, Rule] = {
    **elementwise_rules.RULES,
    **special_rules.RULES,
    **structure_rules.RULES,
    **reduction_rules.RULES,
    **contraction_rules.RULES,
    **control_rules.RULES,
    **random_rules.RULES,
}


@dataclass(frozen=True, eq=False)
class Imported:
    """A module and the values of its trailing parameters, which the jaxpr closed over (key arrays as u32 data)."""

    module: Module
    consts: tuple[Any, ...]


def import_jaxpr(closed_jaxpr: Any, name: str = "main", parameter_names: Sequence[str] | None = None,
                 platform: str | None = None) -> Imported:
    """The HLO module of a closed jaxpr.

    Values of extended types (random keys) are u32 with the key's dimensions last, in parameters and results as well;
    `float0` is pred. `platform` ("cpu", "cuda") settles `lax.platform_dependent`. Raises `JaxprImportError` for a jaxpr
    with values that have no HLO type (references of the caller).
    """
    closed_jaxpr = compat.without_references(closed_jaxpr)
    body = compat.open_jaxpr(closed_jaxpr)
    importer = Importer(RULES, platform)
    captured = importer.captures(closed_jaxpr)
    names = [*(parameter_names or compat.argument_names(closed_jaxpr)), *[""] * len(body.invars)]
    parameters = [parameter(i, compat.physical_shape(v.aval), identifier(names[i]))
                  for i, v in enumerate(body.invars)]
    parameters += [parameter(len(parameters) + i, compat.physical_shape_of_value(c), f"captured{i}")
                   for i, c in enumerate(captured)]
    arguments = parameters[:len(body.invars)]
    scope = Scope(importer, captured, parameters[len(body.invars):])
    results = scope.evaluate(closed_jaxpr, arguments)
    root = results[0] if len(results) == 1 else scope.tuple(results)
    module = Module(identifier(name) or "main", computation("main", parameters, root, scope.effects))
    return Imported(module, tuple(compat.physical_value(c) for c in captured))


def identifier(name: str) -> str:
    """`params['w'][0]` as `params_w_0`: a name that HLO text allows."""
    words = re.sub(r"\W+", "_", name).strip("_")
    return f"_{words}" if words[:1].isdigit() else words
