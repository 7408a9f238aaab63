"""Running an op in a wider dtype, and telling whether it really did.

An op that rounds its float64 input to float32 inside gives a float64 output with the
error of float32. Called the truth, it would hide that error; `narrowing` finds it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

from .arguments import first_line, is_differentiable


class NotInFloat64(Exception):
    """The op cannot be run in float64 throughout; the message says why."""


def widen(tree: Any, dtype: Any = np.float64) -> Any:
    """Every floating-point array as a numpy array of `dtype`; other leaves as are."""
    return jax.tree.map(
        lambda leaf: (
            np.asarray(leaf).astype(dtype) if is_differentiable(leaf) else leaf
        ),
        tree,
    )


def in_float64(
    op: Callable, args: Sequence[Any], options: Mapping[str, Any] | None = None
) -> Any:
    """Runs `op` in float64 and returns its outputs as numpy arrays.

    Raises:
      NotInFloat64: if the op refuses float64 or fails in it, rounds to a narrower dtype
        inside, or returns one.
    """
    options = dict(options or {})
    with jax.enable_x64(True):
        wide = widen(tuple(args))
        why = refusal(op, wide, options)
        if why is not None:
            raise NotInFloat64(why)
        try:
            return jax.tree.map(np.asarray, op(*wide, **options))
        except Exception as error:
            # What can be traced need not have a lowering.
            raise NotInFloat64(f"it fails there ({first_line(error)})") from error


def refusal(
    op: Callable, wide: Sequence[Any], options: Mapping[str, Any]
) -> str | None:
    """Why `op` does not compute throughout in the dtype of `wide`, or None if it does.

    All floating-point arrays of `wide` have one dtype. For float64, call this with x64
    enabled.
    """
    leaves, tree = jax.tree.flatten(tuple(wide))
    where = [i for i, leaf in enumerate(leaves) if is_differentiable(leaf)]
    # A function of integers alone makes its floating-point numbers itself.
    dtype = leaves[where[0]].dtype if where else np.dtype(np.float64)

    def of_arrays(*arrays):
        mixed = list(leaves)
        for i, array in zip(where, arrays, strict=True):
            mixed[i] = array
        return op(*jax.tree.unflatten(tree, mixed), **options)

    try:
        jaxpr = jax.make_jaxpr(of_arrays)(*(leaves[i] for i in where))
    except Exception as error:
        # Whatever the op raises: a table by dtype, say, raises KeyError.
        return f"it does not take {dtype} ({first_line(error)})"
    narrow = narrowing(jaxpr.jaxpr, jnp.finfo(dtype).bits)
    if narrow is not None:
        return f"it rounds to {narrow} inside"
    for aval in jaxpr.out_avals:
        if 0 < _float_bits(aval) < jnp.finfo(dtype).bits:
            return f"it returns {aval.dtype}, not {dtype}"
    return None


def narrowing(jaxpr: Any, bits: int) -> str | None:
    """The first dtype of fewer bits that an equation makes of data of `bits` bits."""
    for eqn in jaxpr.eqns:
        if any(_float_bits(v.aval) == bits for v in eqn.invars):
            for out in eqn.outvars:
                if 0 < _float_bits(out.aval) < bits:
                    return str(out.aval.dtype)
        for inner in jaxprs_in_params(eqn.params):
            found = narrowing(inner, bits)
            if found is not None:
                return found
    return None


def coarsest(jaxpr: Any) -> list[np.dtype]:
    """The floating dtype of the largest epsilon that equations produce, if any does."""
    found = []
    for eqn in jaxpr.eqns:
        found += [out.aval.dtype for out in eqn.outvars if _float_bits(out.aval)]
        for inner in jaxprs_in_params(eqn.params):
            found += coarsest(inner)
    return sorted(found, key=lambda dtype: jnp.finfo(dtype).eps)[-1:]


def _float_bits(aval):
    dtype = getattr(aval, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return 0
    return jnp.finfo(dtype).bits
