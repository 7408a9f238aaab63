"""What the grouped-query layers of linen and nnx share."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from opsnn_jax.dispatch import Requested
from opsnn_jax.ops.attention import flash_attention
from opsnn_jax.ops.attention_decode import attention_decode
from opsnn_jax.ops.fused_qkv import unpack
from opsnn_jax.ops.rotary import rotary_embedding


@dataclass(frozen=True)
class GroupedHeads:
    """Causal self-attention of packed heads, (B, T, N + 2K, H)."""

    kv_heads: int
    rotary_base: float | None
    window: int | None
    softcap: float | None
    precision: lax.Precision | str | None
    implementation: Requested

    def attend(
        self,
        qkv: jax.Array,
        positions: jax.Array | None,
        segment_ids: jax.Array | None,
        dropout_rate: float = 0.0,
        dropout_rng: jax.Array | None = None,
    ) -> jax.Array:
        """Over the whole of it, (B, T, N, H)."""
        q, k, v = self._split(qkv, positions)
        return flash_attention(
            q,
            k,
            v,
            is_causal=True,
            window=None if self.window is None else (self.window, 0),
            q_segment_ids=segment_ids,
            softcap=self.softcap,
            dropout_rate=dropout_rate,
            dropout_rng=dropout_rng,
            precision=self.precision,
            implementation=self.implementation,
        )

    def decode(
        self,
        qkv: jax.Array,
        k_cache: jax.Array,
        v_cache: jax.Array,
        index: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Of new tokens over a cache that holds `index`; the caches with the new ones.

        Past the end of the cache there is nothing to compute: the result is NaN.
        """
        tokens = qkv.shape[1]
        places = index + jnp.arange(tokens, dtype=jnp.int32)
        q, k, v = self._split(qkv, places)
        k_cache, v_cache = (
            lax.dynamic_update_slice_in_dim(cache, new.astype(cache.dtype), index, 1)
            for cache, new in ((k_cache, k), (v_cache, v))
        )
        end = index + tokens
        out = attention_decode(
            q,
            k_cache.astype(q.dtype),
            v_cache.astype(q.dtype),
            end,
            window=self.window,
            softcap=self.softcap,
            precision=self.precision,
            implementation=self.implementation,
        )
        return jnp.where(end <= k_cache.shape[1], out, jnp.nan), k_cache, v_cache

    def _split(self, qkv, positions):
        q, k, v = unpack("GroupedQueryAttention", qkv, self.kv_heads)
        if self.rotary_base is not None:
            base = self.rotary_base
            q, k = (rotary_embedding(x, positions, base=base) for x in (q, k))
        return q, k, v


def head_size(width: int, heads: int, kv_heads: int, size: int | None) -> int:
    """H; raises ValueError for heads that do not divide."""
    if heads % kv_heads:
        raise ValueError(
            "GroupedQueryAttention: num_heads must be a multiple of num_kv_heads; got "
            f"{heads} and {kv_heads}. Choose others."
        )
    if size is None and width % heads:
        raise ValueError(
            f"GroupedQueryAttention: num_heads {heads} must divide the features {width}"
            " of the input. Pass head_dim."
        )
    return width // heads if size is None else size
