"""flash_attention with the conventions that flax's attention modules share."""

from typing import Any

import jax
import jax.numpy as jnp

from opsnn_jax.dispatch import Requested
from opsnn_jax.ops.arguments import as_float_array, as_precision
from opsnn_jax.ops.attention import flash_attention

_OP = "dot_product_attention"


def can_attend(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: Any, precision: Any
) -> bool:
    """Whether `attend` takes these.

    flax takes more: other dtypes, biases that are integers or Python numbers, and
    the precisions that name an algorithm.
    """
    try:
        for x in (query, key, value, *(() if bias is None else (bias,))):
            as_float_array(_OP, "operand", x)
        as_precision(_OP, precision)
    except (TypeError, ValueError):
        return False
    return query.dtype == key.dtype == value.dtype


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    *,
    is_causal: bool = False,
    precision: Any = None,
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
    single = query.ndim == key.ndim == value.ndim == 3
    if single:
        # As in flax: a bias or mask may have the batch axis that these do not.
        query, key, value = (x[None] for x in (query, key, value))
    out = flash_attention(
        query,
        key,
        value,
        bias,
        None if mask is None else jnp.asarray(mask).astype(bool),
        is_causal=is_causal,
        precision=precision,
        implementation=implementation,
    )
    return out[0] if single else out
