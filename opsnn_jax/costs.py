"""What a function multiplies, counted in its jaxpr."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr


def count_multiplies(f: Callable, *specs: jax.ShapeDtypeStruct) -> int:
    """Multiplications of floating-point numbers in `f(*specs)`.

    Of matrix products and convolutions (padding counted, as it is computed), and those
    element by element. A loop counts as often as it runs if that is known, once
    otherwise; of the branches of a condition the cheapest counts, as the others are for
    exceptions; a Pallas kernel counts half the flops that it states.

    >>> count_multiplies(lambda a, b: (a @ b) * 2.0,
    ...     jax.ShapeDtypeStruct((3, 4), "float32"),
    ...     jax.ShapeDtypeStruct((4, 5), "float32"))
    75
    """
    return _of_jaxpr(jax.make_jaxpr(f)(*specs).jaxpr)


def _of_jaxpr(jaxpr: Jaxpr) -> int:
    return sum(map(_of_equation, jaxpr.eqns))


def _of_equation(eqn) -> int:
    name, params = eqn.primitive.name, eqn.params
    outs = [v.aval for v in eqn.outvars]
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return math.prod(outs[0].shape) * math.prod(shape[d] for d in contracted)
    if name == "conv_general_dilated":
        filter_, numbers = eqn.invars[1].aval, params["dimension_numbers"]
        taps = math.prod(filter_.shape) // max(1, filter_.shape[numbers.rhs_spec[0]])
        return math.prod(outs[0].shape) * taps
    if name == "mul":
        return outs[0].size if jnp.issubdtype(outs[0].dtype, jnp.floating) else 0
    if name == "pallas_call":
        estimate = params.get("cost_estimate")
        return estimate.flops // 2 if estimate is not None else 0
    if name == "opsnn_pass":  # a pass within another, of which the plain form counts
        specs = (jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars)
        return count_multiplies(params["run"].as_plain(), *specs)
    inner = [_of_jaxpr(jaxpr) for jaxpr in _jaxprs(params)]
    if name == "cond":
        return min(inner, default=0)
    return sum(inner) * (params["length"] if name == "scan" else 1)


def _jaxprs(params) -> list[Jaxpr]:
    found = []
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, ClosedJaxpr):
                found.append(each.jaxpr)
            elif isinstance(each, Jaxpr):
                found.append(each)
    return found
