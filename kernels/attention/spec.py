"""What a kernel must know about one call of attention, before it sees data."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..dtypes import accumulate_dtype
from .mask import Band

# Kernels that have exp2 as an instruction take their scores in units of log 2.
LOG2_E = 1.4426950408889634

# The greatest float32.
GREATEST = float(np.finfo(np.float32).max)


class Extra(NamedTuple):
    """The operands that only some calls have, in the order in which passes take them.

    A query sees a key only where their ids are equal; lengths and segments both become
    ids. Positions take the place of the indices in the call's `Band`.
    """

    bias: jax.Array | None = None  # (B, N, T, S), each of them or 1; any float dtype
    mask: jax.Array | None = None  # the same, boolean
    q_ids: jax.Array | None = None  # (B, T), int32
    kv_ids: jax.Array | None = None  # (B, S), int32
    q_positions: jax.Array | None = None  # (B, T), int32
    kv_positions: jax.Array | None = None  # (B, S), int32
    sinks: jax.Array | None = None  # (N,), any float dtype
    seed: jax.Array | None = None  # (2,), int32: random bits for dropout

    @property
    def present(self) -> tuple[jax.Array, ...]:
        """Those that are not None."""
        return tuple(x for x in self if x is not None)


@dataclass(frozen=True)
class AttentionSpec:
    """Everything static about one call.

    The passes of every implementation have these signatures. `extra` holds the operands
    of `Extra` that the call has; `lse` is the logarithm of the sum of exponentials of
    each row of scores, the sink among them, -inf for a row that sees no key.

      fwd(spec, q, k, v, *extra) -> out, lse
      bwd(spec, q, k, v, lse, delta, dout, *extra) -> dq, dk, dv[, dbias]

    out and dout are (B, T, N, Hv) of `dtype`, lse and delta (B, N, T) of `acc_dtype`.
    `delta` is the inner product of a row of out with its cotangent, less the cotangent
    of its lse. Gradients have the shapes and dtypes of their primals. No size but H is
    0.
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
    ids: bool = False  # q_ids and kv_ids are given
    positions: bool = False  # q_positions and kv_positions are given
    sinks: bool = False
    softcap: float | None = None
    dropout_rate: float = 0.0
    returns_lse: bool = False  # lse is a result of the call, and may be differentiated

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads

    @property
    def acc_dtype(self) -> np.dtype:
        """The dtype of scores, statistics and sums: float32, or float64 for that."""
        return accumulate_dtype(self.dtype)

    @property
    def keep_scale(self) -> float:
        """What dropout multiplies a weight by that it keeps."""
        return 0.0 if self.dropout_rate == 1 else 1 / (1 - self.dropout_rate)

    def split(self, extra: tuple) -> Extra:
        """The trailing operands of a pass by name."""
        has = Extra(
            self.bias_shape is not None,
            self.mask_shape is not None,
            self.ids,
            self.ids,
            self.positions,
            self.positions,
            self.sinks,
            self.dropout_rate > 0,
        )
        rest = iter(extra)
        return Extra(*(next(rest) if present else None for present in has))


def refuses_unknown(**sizes: int) -> str | None:
    """Why blocks cannot be cut of these sizes, or None if all of them are known.

    A size of `jax.export.symbolic_shape` is not: it has no order to compare it by.
    """
    unknown = [f"{n}={x}" for n, x in sizes.items() if not isinstance(x, int)]
    if not unknown:
        return None
    return f"takes sizes that are known only, got {', '.join(unknown)}"


def in_log2(x: jax.Array) -> jax.Array:
    """`x`, float32, in units of log 2; what is finite stays so, +inf and NaN too.

    The least float32, a usual bias of hidden keys, would become -inf, which hides all
    of them where it is the bias of all. -inf itself becomes the least: callers hide it.
    """
    return jnp.minimum(jnp.maximum(x * LOG2_E, -GREATEST), jnp.maximum(x, GREATEST))


def weights(spec: AttentionSpec, s: jax.Array, lse: jax.Array) -> jax.Array:
    """The softmax again, from scores and lse in units of log 2.

    A large bias of all keys of a row leaves lse no digits for what is added to it, and
    the change of units rounds it: the difference may be anything, but no weight is
    more than 1.
    """
    distance = s - lse
    if spec.bias_shape is not None:
        distance = jnp.minimum(distance, 0.0)
    return jnp.exp2(distance)


def fence(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Takes non-finite values out of keys or values, and says where they were.

    A hidden key has probability 0, but 0 * NaN is NaN in the products with k and v.
    With the returned `poison` (0, or NaN where a key or its value was not finite) added
    to the scores before they are masked, a query that sees such a key still gets NaN,
    and no other one does.

    Args:
      arrays: each (..., S, features).

    Returns:
      The arrays with zeros for what is not finite, and poison (..., S).
    """
    sound = (jnp.isfinite(x).all(axis=-1) for x in arrays)
    sound = functools.reduce(jnp.logical_and, sound)
    poison = jnp.where(sound, 0, jnp.nan).astype(arrays[0].dtype)
    return *map(finite, arrays), poison


def finite(x: jax.Array) -> jax.Array:
    """`x` with 0 for what is NaN or infinite."""
    return jnp.where(jnp.isfinite(x), x, 0)
