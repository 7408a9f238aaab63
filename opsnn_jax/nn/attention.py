"""flash_attention with the conventions that flax's attention modules share."""

import math

import jax
import jax.numpy as jnp

from opsnn_jax.dispatch import Requested
from opsnn_jax.ops.arguments import DTYPES
from opsnn_jax.ops.attention import flash_attention


def can_attend(query: jax.Array, key: jax.Array, value: jax.Array, precision) -> bool:
    """Whether `attend` takes these; flax takes more dtypes and kinds of precision."""
    return (
        query.dtype == key.dtype == value.dtype
        and query.dtype.name in DTYPES
        and (precision is None or isinstance(precision, str | jax.lax.Precision))
    )


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    *,
    is_causal: bool = False,
    precision=None,
    implementation: Requested = None,
) -> jax.Array:
    """flash_attention over any number of batch axes, also none.

    Args:
      query: `(*batch, T, N, H)`.
      key: `(*batch, S, K, H)`.
      value: `(*batch, S, K, Hv)`.
      bias: broadcastable to `(*batch, N, T, S)`.
      mask: the same, of any dtype; what is 0 is hidden.

    Returns:
      `(*batch, T, N, Hv)`.
    """
    batch = query.shape[:-3]

    def join(x):
        return x.reshape(math.prod(batch), *x.shape[-3:])

    def join_scores(x):
        if x is None or (x.ndim <= 4 and len(batch) <= 1):
            return x
        x = x.reshape((1,) * (len(batch) + 3 - x.ndim) + x.shape)
        if any(n != 1 for n in x.shape[:-3]):
            x = jnp.broadcast_to(x, batch + x.shape[-3:])
        return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])

    out = flash_attention(
        join(query),
        join(key),
        join(value),
        join_scores(bias),
        None if mask is None else join_scores(mask.astype(bool)),
        is_causal=is_causal,
        precision=precision,
        implementation=implementation,
    )
    return out.reshape(*batch, *out.shape[-3:])
