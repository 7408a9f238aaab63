"""`lax.conv_general_dilated`'s signature over `conv`, for code written against it."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from opsnn_jax.dispatch import Requested

from .arguments import DTYPES
from .conv import conv


def conv_general_dilated(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers=None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding=None,
    *,
    implementation: Requested = None,
) -> jax.Array:
    """Convolves as `lax.conv_general_dilated` does, by `conv` where `conv` can.

    The arguments and the result are those of `lax.conv_general_dilated`, and
    `implementation` is that of `conv`. Layouts other than channels-last are transposed
    around the call. What `conv` does not know (a dilated input, batch groups, a result
    dtype or sharding of its own, no or more than three spatial dimensions, other
    dtypes) is computed by JAX; naming an implementation is then an error.

    Raises:
      NotImplementedError: if an implementation is named and `conv` cannot do the call.
      ValueError, TypeError: as `conv` and `lax.conv_general_dilated`.
    """
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    beyond = _beyond_conv(
        lhs, rhs, lhs_dilation, batch_group_count, preferred_element_type, out_sharding
    )
    if beyond and implementation is None:
        return lax.conv_general_dilated(
            lhs, rhs, window_strides, padding, lhs_dilation, rhs_dilation,
            dimension_numbers, feature_group_count, batch_group_count, precision,
            preferred_element_type, out_sharding,
        )  # fmt: skip
    if beyond:
        raise NotImplementedError(
            f"conv_general_dilated: {beyond} is computed by JAX only; got "
            f"implementation={implementation!r}. Pass implementation=None."
        )
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    n, c, *spatial = numbers.lhs_spec
    o, i, *kernel = numbers.rhs_spec
    y = conv(
        lax.transpose(lhs, (n, *spatial, c)),
        lax.transpose(rhs, (*kernel, i, o)),
        strides=tuple(window_strides),
        padding=padding,
        dilation=1 if rhs_dilation is None else tuple(rhs_dilation),
        groups=feature_group_count,
        precision=precision,
        implementation=implementation,
    )
    n, c, *spatial = numbers.out_spec
    where = {n: 0, c: y.ndim - 1} | {axis: k + 1 for k, axis in enumerate(spatial)}
    return lax.transpose(y, [where[axis] for axis in range(y.ndim)])


def _beyond_conv(
    lhs, rhs, lhs_dilation, batch_group_count, preferred, out_sharding
) -> str | None:
    """What of the call `conv` has no form for, or None."""
    if out_sharding is not None:
        return f"a result's own sharding (out_sharding={out_sharding})"
    if lhs_dilation is not None and any(d != 1 for d in lhs_dilation):
        return f"a dilated input (lhs_dilation={tuple(lhs_dilation)})"
    if batch_group_count != 1:
        return f"batch_group_count={batch_group_count}"
    if preferred is not None and preferred != lhs.dtype:
        return f"a result of another dtype (preferred_element_type={preferred})"
    if lhs.ndim not in (3, 4, 5):
        return f"an input of {lhs.ndim} dimensions"
    if lhs.dtype not in DTYPES:
        return f"an input of dtype {lhs.dtype}"
    if rhs.dtype != lhs.dtype:
        return f"a filter of dtype {rhs.dtype} with an input of {lhs.dtype}"
    return None
