"""Grouped-query self-attention for flax.nnx."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from opsnn_jax.dispatch import Requested
from opsnn_jax.nn.grouped import (
    GroupedHeads,
    check_decode,
    check_input,
    head_size,
)


class GroupedQueryAttention(nnx.Module):
    """Causal self-attention whose key heads serve several query heads each.

    One product makes queries, keys and values. To decode, `init_cache` makes room, and
    each call with `decode=True` is given the next token or tokens.

    Args:
      num_heads: N, of queries.
      num_kv_heads: K, of keys and values; N is a multiple of it.
      features: D, of the input and the output.
      head_dim: H; features / N if None.
      rotary_base: of the rotary embedding; None for no embedding.
      window: how many keys before its own a query sees; None for all.
      softcap: as in flash_attention.
      use_bias: whether both projections add a bias.
      dropout_rate: of the attention weights.
      dtype: of the computation; that of input and parameters if None.
      param_dtype: of the parameters.
      precision: of all products.
      implementation: as in flash_attention.
      rngs: of the parameters, and of dropout where a call gives none.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        features: int,
        *,
        head_dim: int | None = None,
        rotary_base: float | None = 10000.0,
        window: int | None = None,
        softcap: float | None = None,
        use_bias: bool = False,
        dropout_rate: float = 0.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: lax.Precision | str | None = None,
        implementation: Requested = None,
        rngs: nnx.Rngs,
    ):
        size = head_size(features, num_heads, num_kv_heads, head_dim)
        self.size, self.dropout_rate = size, dropout_rate
        self.heads = GroupedHeads(
            num_kv_heads, rotary_base, window, softcap, precision, implementation
        )
        same = dict(
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            rngs=rngs,
        )
        packed = num_heads + 2 * num_kv_heads, size
        self.qkv = nnx.LinearGeneral(features, packed, **same)
        self.out = nnx.LinearGeneral((num_heads, size), features, axis=(-2, -1), **same)
        self.rngs = rngs.dropout.fork() if dropout_rate > 0 else None
        self.cached_key: nnx.Cache | None = nnx.data(None)
        self.cached_value: nnx.Cache | None = nnx.data(None)
        self.cache_index: nnx.Cache | None = nnx.data(None)

    def init_cache(self, batch: int, length: int, dtype: Any = jnp.float32) -> None:
        """Makes an empty cache for `batch` texts of up to `length` tokens."""
        shape = batch, length, self.heads.kv_heads, self.size
        self.cached_key = nnx.Cache(jnp.zeros(shape, dtype))
        self.cached_value = nnx.Cache(jnp.zeros(shape, dtype))
        self.cache_index = nnx.Cache(jnp.zeros((), jnp.int32))

    def __call__(
        self,
        x: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
        decode: bool = False,
    ) -> jax.Array:
        """Attends.

        Args:
          x: `(B, T, D)`.
          positions: integers, `(B, T)`, of the rotary embedding; 0, 1, ... if None. Not
            with a cache, which counts by itself.
          segment_ids: integers, `(B, T)`: each token sees its own segment. Not with a
            cache.
          deterministic: no dropout.
          rngs: of dropout.
          decode: `x` follows what is in the cache, and goes into it.

        Returns:
          `(B, T, D)`. NaN for tokens that the cache has no room for; it keeps those
          that it holds.

        Raises:
          ValueError: to decode without a cache, for options that do not go with one, or
            another shape of `x`.
        """
        check_input(x)
        if decode:
            check_decode(positions, segment_ids)
        qkv = self.qkv(x)
        if decode:
            if self.cache_index is None:
                raise ValueError(
                    "GroupedQueryAttention: decode=True needs a cache; there is none. "
                    "Call init_cache first."
                )
            index = self.cache_index[...]
            out, key, value = self.heads.decode(
                qkv, self.cached_key[...], self.cached_value[...], index
            )
            self.cached_key[...], self.cached_value[...] = key, value
            self.cache_index[...] = index + x.shape[1]
            return self.out(out)
        rate, rng = (0.0 if deterministic else self.dropout_rate), None
        if rate:
            rng = (self.rngs if rngs is None else rngs.dropout)()
        return self.out(self.heads.attend(qkv, positions, segment_ids, rate, rng))
