"""Import rules of special functions that HLO has no opcode for.

erfc and erf_inv are written out, since they are common and short. The others, and the rare random generators, become
what JAX itself lowers them to: its HLO for this one equation, parsed and copied in.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hlofuse.errors import HlofuseError
from hlofuse.frontend import jaxpr_compat as compat
from hlofuse.frontend.elementwise_rules import opcode_rule
from hlofuse.frontend.scope import Rule, Scope
from hlofuse.hlo.module import Instruction, Module
from hlofuse.hlo.parser import parse_module
from hlofuse.hlo.shape import COMPLEX

# Coefficients from the constant term up, of Chebyshev interpolants computed with 60 digits and rewritten in powers.
# erfc(x) = exp(-x²) t P(2t - 1) with t = 1 / (1 + 0.4 x), for x >= 0; largest relative error 5e-9 and 3e-18.
_ERFC = {
    "f32": (0.421612726, 0.321860772, 0.18156581, 0.068499795, 0.0113426705, -0.00335325275, -0.00191894447,
            0.000165569994, 0.000263716324, -1.08028519e-05, -2.80640517e-05),
    "f64": (0.4216127281222872, 0.32186073977565954, 0.1815656466592384, 0.06850045809842253, 0.011344620052797892,
            -0.003357217721132364, -0.0019275142092821508, 0.0001756833090065551, 0.0002810774893413557,
            -2.3323135207975702e-05, -4.504192982418149e-05, 7.812898767874912e-06, 7.2977235200875555e-06,
            -2.701541621103883e-06, -9.327979411579267e-07, 7.841919445465306e-07, -2.6981676319364095e-09,
            -1.772008600010414e-07, 5.568439822036945e-08, 2.5254402873036906e-08, -2.1475709432256136e-08,
            1.968776352062004e-10, 4.54466618282478e-09, -9.976553344476051e-10, -4.5577350277541383e-10,
            1.6184398214107337e-10),
}
# erf_inv(x) = x P(w - 2.5) for w < 5, else x Q(√w - 3.2), with w = -log(1 - x²).
_ERF_INV_F32 = (
    (1.50140936, 0.246640289, -0.00417738976, -0.00125274842, 0.000218346915, -4.9597435e-06, -3.46335617e-06,
     4.6542873e-07, 2.32858445e-08, -8.73983097e-09),
    (3.03363651, 1.00469241, 0.00597648317, -0.0042936552, 0.00292327569, -0.00199505776, 0.0011603397,
     -0.000356300635, -0.000116424501, 9.88480582e-05),
)
# The same in float64: x P(w - 3.125) for w < 6.25, x Q(√w - 3.25) for w < 16, else x R(√w - 5.05).
_ERF_INV_F64 = (
    (1.6536545626831027, 0.2401581824255897, -0.006033670871427803, -0.0007407025341668028, 0.00018673420802445552,
     -1.3882523361584087e-05, -1.365469184753234e-06, 4.234787770422557e-07, -2.9070382513851824e-08,
     -4.112633280947279e-09, 1.0512182736096884e-09, -5.415435817169476e-11, -1.2976921089952883e-11,
     2.633559907621316e-12, -8.117720363510667e-14, -4.0552462575666954e-14, 6.5955746141136816e-15,
     2.1532989801742722e-17, -1.301058090875769e-16, 1.113205089717972e-17, 1.1472892499658116e-18,
     -1.6799573252473116e-19, -1.062661045960373e-21),
    (3.0838856104922208, 1.0052589676941592, 0.005370914553571544, -0.0037512085075576363, 0.0024914420969882754,
     -0.001688275556321603, 0.0009532893636238467, -0.00035503751692834046, 2.403125811582288e-05,
     6.82848304945795e-05, -4.73189897999412e-05, 1.2475377015983698e-05, 2.925746394013068e-06,
     -4.014010335785518e-06, 1.498682725581901e-06, 1.8388706833090645e-08, -2.7131624527580294e-07,
     9.069252863037179e-08, 6.854906430026906e-10),
    (4.90042105144364, 1.010285017597772, -0.00016985809149407723, -0.0002003120066801637, 7.124031543867e-05,
     -1.8374536140563498e-05, 4.193853603482637e-06, -9.070860156214197e-07, 2.0161975372397836e-07,
     -5.493200339439859e-08, 2.1820016607666344e-08, -1.1207416116229174e-08, 5.808688121501715e-09,
     -2.631157962159923e-09, 1.0458253452277027e-09, -3.868056255833797e-10, 7.866328920977609e-11,
     2.8902020023840455e-11, -1.5682586349208766e-11),
)


def real_function(formula: Callable[[Scope, Instruction], Instruction]) -> Rule:
    """A formula in float32 or float64; narrower floats go through float32."""

    def rule(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction]:
        x = operands[0]
        wide = scope.convert(x, x.element_type if x.element_type == "f64" else "f32")
        return [scope.convert(formula(scope, wide), x.element_type)]

    return rule


def polynomial(scope: Scope, x: Instruction, coefficients: Sequence[float]) -> Instruction:
    result = scope.like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = scope.add(scope.mul(result, x), coefficient)
    return result


def erfc(scope: Scope, x: Instruction) -> Instruction:
    """Relative accuracy on the whole line; 2 - erfc(-x) on the left."""
    size = scope.unary("abs", x)
    t = scope.div(scope.like(x, 1), scope.add(scope.mul(size, 0.4), 1))
    tail = scope.mul(t, polynomial(scope, scope.sub(scope.add(t, t), 1), _ERFC[x.element_type]))
    decay = scope.unary("exponential", scope.unary("negate", scope.mul(size, size)))
    right = scope.mul(decay, tail)
    return scope.select(scope.compare("LT", x, 0), scope.sub(scope.like(x, 2), right), right)


def erf_inv(scope: Scope, x: Instruction) -> Instruction:
    """NaN outside of [-1, 1], infinite at its ends."""
    one = scope.like(x, 1)
    w = scope.unary("negate", scope.unary("log", scope.mul(scope.sub(one, x), scope.add(one, x))))
    root = scope.unary("sqrt", w)
    if x.element_type == "f32":
        p, q = _ERF_INV_F32
        ratio = _either(scope, scope.compare("LT", w, 5), (w, 2.5, p), (root, 3.2, q))
    else:
        center, middle, far = _ERF_INV_F64
        beyond = _either(scope, scope.compare("LT", w, 16), (root, 3.25, middle), (root, 5.05, far))
        ratio = scope.select(scope.compare("LT", w, 6.25), polynomial(scope, scope.sub(w, 3.125), center), beyond)
    at_end = scope.compare("EQ", scope.unary("abs", x), 1)
    return scope.mul(x, scope.select(at_end, scope.like(x, float("inf")), ratio))


Fit = tuple[Instruction, float, Sequence[float]]


def _either(scope: Scope, is_first: Instruction, first: Fit, second: Fit) -> Instruction:
    """One Horner scheme whose argument and coefficients are selected: half the work of two."""
    (x1, center1, coefficients1), (x2, center2, coefficients2) = first, second
    x = scope.select(is_first, scope.sub(x1, center1), scope.sub(x2, center2))
    result: Instruction | None = None
    for a, b in zip(reversed(coefficients1), reversed(coefficients2), strict=True):
        term = scope.select(is_first, scope.like(x, a), b)
        result = term if result is None else scope.add(scope.mul(result, x), term)
    assert result is not None
    return result


# --- what JAX lowers to -------------------------------------------------------------------------------------------

_expansions: dict[Any, Module | None] = {}


def expanded(scope: Scope, eqn: Any, operands: list[Instruction]) -> list[Instruction] | None:
    """The instructions that JAX lowers this equation to; None (opaque) where those call a library."""
    key = compat.equation_key(eqn)
    if key not in _expansions:
        _expansions[key] = _expansion(eqn)
    module = _expansions[key]
    if module is None:
        return None
    new: dict[Instruction, Instruction] = dict(zip(module.entry.parameters, operands, strict=True))
    for i in module.entry.instructions:
        if _is_sharding(i):
            new[i] = new[i.operands[0]]
        elif i not in new:
            new[i] = Instruction(i.opcode, i.shape, tuple(new[o] for o in i.operands), i.attrs, "", scope.metadata)
    return [new[output] for output in module.entry.outputs]


def _expansion(eqn: Any) -> Module | None:
    try:
        module = parse_module(compat.lowered_text(eqn))
    except HlofuseError:
        return None
    calls = [i for c in module.computations for i in c.instructions if i.opcode == "custom-call"]
    return module if all(_is_sharding(i) and i in module.entry.users for i in calls) else None


def _is_sharding(instruction: Instruction) -> bool:
    """JAX's note on how a value is distributed, which is its operand."""
    return instruction.opcode == "custom-call" and instruction.attrs["custom_call_target"] == "Sharding"


def expanded_if_complex(opcode: str) -> Rule:
    """An opcode that XLA computes for real numbers only."""
    real = opcode_rule(opcode)

    def rule(scope: Scope, eqn: Any, operands: list[Instruction]) -> Sequence[Instruction] | None:
        return (expanded if operands[0].element_type in COMPLEX else real)(scope, eqn, operands)

    return rule


_HYPERBOLIC = ("sinh", "cosh", "asin", "acos", "asinh", "acosh", "atanh")
_EXPANDED = ("lgamma", "digamma", "igamma", "igammac", "igamma_grad_a", "random_gamma_grad", "zeta", "polygamma",
             "bessel_i0e", "bessel_i1e", "regularized_incomplete_beta", "random_gamma", "philox2x32", "philox4x32",
             "threefry4x32", "lu_pivots_to_permutation", "ragged_dot_general")

RULES: dict[str, Rule] = {
    "erfc": real_function(erfc),
    "erf_inv": real_function(erf_inv),
    **{name: expanded_if_complex(name) for name in _HYPERBOLIC},
    **dict.fromkeys(_EXPANDED, expanded),
}
