"""What is known of a block of queries or keys from the ids and positions in it.

The least and the greatest of each tell whether a block of scores is empty, and whether
it is full, from two numbers a block: an array of size O(T / block + S / block).
"""

import jax
import jax.numpy as jnp

from .spec import AttentionSpec


def block_ranges(
    ids: jax.Array | None, positions: jax.Array | None, block: int
) -> jax.Array:
    """(B, blocks, 2 or 4): least and greatest id, least and greatest position.

    Each of them only where the call has it.

    Args:
      ids, positions: (B, L), of queries or of keys; None where the call has none.
      block: how many of them form a block; the last one may be shorter.
    """
    columns = []
    for x in (ids, positions):
        if x is not None:
            x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % block)], mode="edge")
            x = x.reshape(x.shape[0], -1, block)
            columns += [x.min(-1), x.max(-1)]
    return jnp.stack(columns, axis=-1)


def may_meet(spec: AttentionSpec, q: list, kv: list):
    """Whether any query of a block may see any key of another; `q`, `kv`: ranges."""
    result, q, kv = True, list(q), list(kv)
    if spec.ids:
        (q_low, q_high), (kv_low, kv_high) = _take(q), _take(kv)
        result = (q_low <= kv_high) & (kv_low <= q_high)
    if spec.positions:
        result = result & spec.band.meets(*_start_and_length(_take(q), _take(kv)))
    return result


def all_seen(spec: AttentionSpec, q: list, kv: list):
    """Whether every query of a block sees every key of another, for sure."""
    result, q, kv = True, list(q), list(kv)
    if spec.ids:
        (q_low, q_high), (kv_low, kv_high) = _take(q), _take(kv)
        result = (q_low == q_high) & (kv_low == kv_high) & (q_low == kv_low)
    if spec.positions:
        result = result & spec.band.covers(*_start_and_length(_take(q), _take(kv)))
    return result


def _take(ranges):
    return ranges.pop(0), ranges.pop(0)


def _start_and_length(q, kv):
    return q[0], q[1] - q[0] + 1, kv[0], kv[1] - kv[0] + 1
