"""Grouped-query self-attention for flax.linen."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from opsnn_jax.dispatch import Requested
from opsnn_jax.nn.grouped import (
    GroupedHeads,
    check_decode,
    check_input,
    head_size,
)


class GroupedQueryAttention(nn.Module):
    """Causal self-attention whose key heads serve several query heads each.

    One product makes queries, keys and values. With `decode`, keys and values are kept
    in the collection "cache": `init` is given an input of the full length, and each
    later call the next token or tokens.

    Attributes:
      num_heads: N, of queries.
      num_kv_heads: K, of keys and values; N is a multiple of it.
      head_dim: H; the features of the input / N if None.
      rotary_base: of the rotary embedding; None for no embedding.
      window: how many keys before its own a query sees; None for all.
      softcap: as in flash_attention.
      use_bias: whether both projections add a bias.
      dropout_rate: of the attention weights, with the rng "dropout".
      deterministic: no dropout; here or in the call.
      decode: whether to use the cache.
      dtype: of the computation; that of input and parameters if None.
      param_dtype: of the parameters.
      precision: of all products.
      implementation: as in flash_attention.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int | None = None
    rotary_base: float | None = 10000.0
    window: int | None = None
    softcap: float | None = None
    use_bias: bool = False
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    decode: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: lax.Precision | str | None = None
    implementation: Requested = None

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        deterministic: bool | None = None,
    ) -> jax.Array:
        """Attends.

        Args:
          x: `(B, T, D)`.
          positions: integers, `(B, T)`, of the rotary embedding; 0, 1, ... if None. Not
            with a cache, which counts by itself.
          segment_ids: integers, `(B, T)`: each token sees its own segment. Not with a
            cache.
          deterministic: no dropout.

        Returns:
          `(B, T, D)`. NaN for tokens that the cache has no room for; it keeps those
          that it holds.

        Raises:
          ValueError: for options that do not go with a cache, or another shape of `x`.
        """
        check_input(x)
        batch, tokens, width = x.shape
        if self.decode:
            check_decode(positions, segment_ids)
        size = head_size(width, self.num_heads, self.num_kv_heads, self.head_dim)
        same = dict(
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
        )
        features = self.num_heads + 2 * self.num_kv_heads, size
        qkv = nn.DenseGeneral(features, name="qkv", **same)(x)
        heads = GroupedHeads(
            self.num_kv_heads,
            self.rotary_base,
            self.window,
            self.softcap,
            self.precision,
            self.implementation,
        )
        filled = self.has_variable("cache", "cache_index")
        if self.decode:
            shape = batch, tokens, self.num_kv_heads, size
            k, v = (
                self.variable("cache", name, jnp.zeros, shape, qkv.dtype)
                for name in ("cached_key", "cached_value")
            )
            index = self.variable("cache", "cache_index", jnp.zeros, (), jnp.int32)
        if self.decode and filled:
            out, k.value, v.value = heads.decode(qkv, k.value, v.value, index.value)
            index.value = index.value + tokens
        else:
            rate = self.dropout_rate
            if rate and nn.merge_param(
                "deterministic", self.deterministic, deterministic
            ):
                rate = 0.0
            rng = self.make_rng("dropout") if rate else None
            out = heads.attend(qkv, positions, segment_ids, rate, rng)
        return nn.DenseGeneral(width, axis=(-2, -1), name="out", **same)(out)
