"""What one kernel of attention costs, for XLA's own model of the program."""

import jax
from jax.experimental import pallas as pl

from .spec import AttentionSpec


def cost(
    spec: AttentionSpec, products: int, arrays: tuple[jax.Array, ...]
) -> pl.CostEstimate:
    """Of a kernel in which a score takes part in `products` matrix products.

    Args:
      arrays: all that the kernel reads and writes.
    """
    scores = spec.batch * spec.heads * spec.q_len * spec.kv_len
    if not spec.band.full:
        scores //= 2
    return pl.CostEstimate(
        flops=2 * products * scores * (spec.qk_dim + spec.v_dim) // 2,
        transcendentals=scores,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays),
    )
