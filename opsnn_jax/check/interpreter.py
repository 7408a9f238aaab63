"""Evaluates a function equation by equation, each in its own precision or in float64.

The function is traced once. Calls inside it, to jit, custom derivatives and remat, are
opened, so that every equation is a primitive. Control flow (scan, while, cond) is one
equation and keeps its own precision.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxprs_in_params

# Primitives whose one inner jaxpr is what they compute.
_CALLS = frozenset(
    {
        "jit",
        "pjit",
        "closed_call",
        "core_call",
        "remat",
        "remat2",
        "checkpoint",
        "custom_jvp_call",
        "custom_vjp_call",
    }
)
# Parameters that fix the dtype of a result.
_DTYPES = ("new_dtype", "preferred_element_type", "dtype", "out_dtype")


class Program:
    """A traced function as a flat list of equations.

    Attributes:
      equations: in order of execution, calls opened.
    """

    def __init__(self, f: Callable, args: Sequence[Any]):
        closed, shape = jax.make_jaxpr(f, return_shape=True)(*args)
        self._tree = jax.tree.structure(shape)
        self.equations: list[JaxprEqn] = []
        self._inputs = closed.jaxpr.invars
        self._values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        # An opened call's variables stand for those of its caller.
        self._alias: dict[Any, Any] = {}
        self._open(closed.jaxpr)
        self._outputs = [self._resolve(v) for v in closed.jaxpr.outvars]

    def run(self, args: Sequence[Any], wide: Callable[[int], bool]) -> list[Any]:
        """The outputs, with equation i in float64 where `wide(i)`.

        A value keeps the precision that it was computed in until an equation that is
        not wide takes it, which rounds it to the dtype of the trace. Call this with x64
        enabled.
        """
        values = dict(self._values)
        values |= zip(self._inputs, jax.tree.leaves(tuple(args)), strict=True)
        for i, eqn in enumerate(self.equations):
            operands = [self._read(values, v) for v in eqn.invars]
            outs = (_wide if wide(i) else _own)(eqn, operands)
            values |= zip(eqn.outvars, outs, strict=True)
        return [self._read(values, v) for v in self._outputs]

    def _open(self, jaxpr: Jaxpr) -> None:
        for eqn in jaxpr.eqns:
            inner = list(jaxprs_in_params(eqn.params))
            if eqn.primitive.name not in _CALLS or len(inner) != 1:
                self.equations.append(self._renamed(eqn))
                continue
            body = inner[0]
            consts = next(
                (p.consts for p in eqn.params.values() if isinstance(p, ClosedJaxpr)),
                [],
            )
            # One function called twice is one jaxpr: fresh variables for each call.
            body = jax.make_jaxpr(
                lambda *a, body=body, consts=consts: jax.core.eval_jaxpr(
                    body, consts, *a
                )
            )(*(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars))
            self._values |= zip(body.jaxpr.constvars, body.consts, strict=True)
            self._alias |= zip(body.jaxpr.invars, eqn.invars, strict=True)
            self._open(body.jaxpr)
            self._alias |= zip(eqn.outvars, body.jaxpr.outvars, strict=True)

    def _renamed(self, eqn: JaxprEqn) -> JaxprEqn:
        return eqn.replace(invars=[self._resolve(v) for v in eqn.invars])

    def _resolve(self, v):
        while not isinstance(v, Literal) and v in self._alias:
            v = self._alias[v]
        return v

    @staticmethod
    def _read(values, v):
        return v.val if isinstance(v, Literal) else values[v]


def _own(eqn, operands):
    """The equation as it was traced, on operands rounded to the dtypes of the trace."""
    rounded = [
        jnp.asarray(x, v.aval.dtype) if _is_float(v.aval) else x
        for x, v in zip(operands, eqn.invars, strict=True)
    ]
    return _bind(eqn, rounded, eqn.params)


def _wide(eqn, operands):
    """The equation in float64."""
    if any(True for _ in jaxprs_in_params(eqn.params)):
        return _own(eqn, operands)
    params = {
        name: np.dtype(np.float64)
        if name in _DTYPES and value is not None and jnp.issubdtype(value, jnp.floating)
        else value
        for name, value in eqn.params.items()
    }
    if eqn.primitive.name == "reduce_precision":
        return [_widened(operands[0])]
    return _bind(eqn, [_widened(x) for x in operands], params)


def _bind(eqn, operands, params):
    outs = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    return outs if eqn.primitive.multiple_results else [outs]


def _widened(x):
    return jnp.asarray(x, jnp.float64) if _is_float(jax.typeof(x)) else x


def _is_float(aval):
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)
