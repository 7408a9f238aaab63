"""What a kernel must know about one call of attention, before it sees data."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..dtypes import accumulate_dtype
from .mask import Band


@dataclass(frozen=True)
class AttentionSpec:
    """Everything static about one call.

    The passes of every implementation have these signatures. `extra` holds the operands
    that the call has, in the order bias, mask; `lse` is the logarithm of the sum of
    exponentials of each row of scores, -inf for a row that sees no key.

      fwd(spec, q, k, v, *extra) -> out, lse
      bwd(spec, q, k, v, lse, delta, dout, *extra) -> dq, dk, dv[, dbias]

    out and dout are (B, T, N, Hv) of `dtype`, lse and delta (B, N, T) of `acc_dtype`.
    `delta` is the inner product of a row of out with its cotangent. Gradients have the
    shapes and dtypes of their primals. No size but H is 0.
    """

    batch: int  # B
    q_len: int  # T
    kv_len: int  # S
    heads: int  # N
    kv_heads: int  # K
    qk_dim: int  # H
    v_dim: int  # Hv
    dtype: np.dtype
    scale: float
    band: Band
    precision: lax.Precision | None
    bias_shape: tuple[int, int, int, int] | None  # each 1 or that of (B, N, T, S)
    mask_shape: tuple[int, int, int, int] | None

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads

    @property
    def acc_dtype(self) -> np.dtype:
        """The dtype of scores, statistics and sums: float32, or float64 for that."""
        return accumulate_dtype(self.dtype)

    def split(
        self, extra: tuple[jax.Array, ...]
    ) -> tuple[jax.Array | None, jax.Array | None]:
        """(bias, mask) of a pass's trailing operands, None where the call has none."""
        rest = list(extra)
        bias = rest.pop(0) if self.bias_shape is not None else None
        mask = rest.pop(0) if self.mask_shape is not None else None
        return bias, mask


def fence(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Takes non-finite values out of keys and values, and says where they were.

    A hidden key has probability 0, but 0 * NaN is NaN in the products with k and v.
    With the returned `poison` (0, or NaN where a key or its value was not finite) added
    to the scores before they are masked, a query that sees such a key still gets NaN,
    and no other one does.

    Args:
      k: (..., S, H).
      v: (..., S, Hv).

    Returns:
      k and v with zeros for what is not finite, and poison (..., S).
    """
    k_finite, v_finite = jnp.isfinite(k), jnp.isfinite(v)
    finite = k_finite.all(-1) & v_finite.all(-1)
    poison = jnp.where(finite, 0.0, jnp.nan).astype(k.dtype)
    return jnp.where(k_finite, k, 0), jnp.where(v_finite, v, 0), poison
