"""`jax.nn.dot_product_attention` by flash_attention."""

import functools
import numbers
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PRNGKeyArray

from opsnn_jax.dispatch import Requested
from opsnn_jax.kernels.dtypes import accumulate_dtype

from .attention import flash_attention


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Requested = None,
    return_residual: bool = False,
    broadcast_dropout: bool | None = None,
    dropout_rng: PRNGKeyArray | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: lax.Precision | str | None = None,
    module: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""`jax.nn.dot_product_attention`, in blocks: a drop-in.

    The arguments up to `return_residual` are JAX's, with its defaults, and results are
    its results wherever a query sees a key. A query that sees none, for whatever
    reason, gives 0 and has no gradient, where JAX gives the mean of the values, NaN or
    0, by the reason. The arguments after it are those of flax's attention modules, so
    this is an `attention_fn` of theirs, in linen and in nnx.

    Args:
      query: `(B, T, N, H)` or `(T, N, H)`.
      key: `(B, S, K, H)` or `(S, K, H)`.
      value: of key's shape; its features may be others.
      bias: broadcastable to `(B, N, T, S)`.
      mask: boolean, broadcastable to `(B, N, T, S)`. Of any dtype, with 0 for what is
        hidden, if `broadcast_dropout` is given: such are flax's masks.
      scale: 1 / sqrt(H) if None. An array scales the queries, in their dtype.
      is_causal: query t sees the keys up to t.
      query_seq_lengths, key_value_seq_lengths: integers, `(B,)`.
      local_window_size: (left, right), both included; an int is both.
      implementation: as in flash_attention, but for "cudnn": where this process has no
        cuDNN, or that does not take the call, it is None.
      return_residual: also returns the logarithm of the sum of exponentials of the
        scores, `(B, T, N)` or `(T, N)`, of key's dtype, without a gradient.
      broadcast_dropout: each weight is drawn by itself, whatever it is.
      dropout_rng, dropout_rate: as in flash_attention.
      deterministic: no dropout.
      dtype: what query, key and value are cast to.
      precision: as in flash_attention.
      module: must be None. The weights that flax would store in it are never made.

    Returns:
      `(B, T, N, Hv)`, or `(T, N, Hv)`; with `return_residual` a tuple.

    Raises:
      TypeError, ValueError, NotImplementedError: as flash_attention does.

    Example:
      >>> q = jax.random.normal(jax.random.key(0), (2, 5, 8, 64))
      >>> dot_product_attention(q, q, q, is_causal=True).shape
      (2, 5, 8, 64)
    """
    if module is not None:
        raise ValueError(
            "dot_product_attention: module must be None; got "
            f"{type(module).__name__}. To store the weights, use the attention_fn of "
            "opsnn_jax.nn.linen or opsnn_jax.nn.nnx."
        )
    query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
    bias, mask = (x if x is None else jnp.asarray(x) for x in (bias, mask))
    if mask is not None and broadcast_dropout is not None:
        mask = mask.astype(bool)
    if scale is not None and not isinstance(scale, numbers.Real):
        wide = accumulate_dtype(query.dtype)
        query, scale = (query.astype(wide) * scale).astype(query.dtype), 1.0
    single = query.ndim == key.ndim == value.ndim == 3
    if single:
        # As in JAX: a bias or mask may have the batch axis that these do not.
        query, key, value = (x[None] for x in (query, key, value))
    attend = functools.partial(
        flash_attention,
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        window=local_window_size,
        q_lengths=_lengths(query_seq_lengths),
        kv_lengths=_lengths(key_value_seq_lengths),
        dropout_rate=0.0 if deterministic else dropout_rate,
        dropout_rng=dropout_rng,
        return_lse=return_residual,
        precision=precision,
    )
    try:
        result = attend(implementation=implementation)
    except NotImplementedError:
        # Programs that were written for a GPU also run on a CPU.
        if implementation != "cudnn":
            raise
        result = attend(implementation=None)
    result = jax.tree.map(lambda x: x[0], result) if single else result
    if not return_residual:
        return result
    out, lse = result
    return out, lax.stop_gradient(lse.astype(key.dtype))


def _lengths(x):
    return x if x is None else jnp.asarray(x)
