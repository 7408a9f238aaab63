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

        Tokens that the cache has no room for are not written, and give NaN.
        """
        tokens, size = qkv.shape[1], k_cache.shape[1]
        places = index + jnp.arange(tokens, dtype=jnp.int32)
        q, k, v = self._split(qkv, places)
        # Not dynamic_update_slice: it would move the start of what ends behind the
        # cache, and overwrite earlier tokens.
        k_cache, v_cache = (
            cache.at[:, places].set(
                new.astype(cache.dtype),
                mode="drop",
                indices_are_sorted=True,
                unique_indices=True,
            )
            for cache, new in ((k_cache, k), (v_cache, v))
        )
        out = attention_decode(
            q,
            k_cache.astype(q.dtype),
            v_cache.astype(q.dtype),
            index + tokens,
            window=self.window,
            softcap=self.softcap,
            precision=self.precision,
            implementation=self.implementation,
        )
        room = (places < size)[None, :, None, None]
        return jnp.where(room, out, jnp.nan), k_cache, v_cache

    def _split(self, qkv, positions):
        q, k, v = unpack("GroupedQueryAttention", qkv, self.kv_heads)
        if self.rotary_base is not None:
            base = self.rotary_base
            q, k = (rotary_embedding(x, positions, base=base) for x in (q, k))
        return q, k, v


def check_input(x: jax.Array) -> None:
    """Raises ValueError for what is not (B, T, D)."""
    if x.ndim != 3:
        raise ValueError(
            f"GroupedQueryAttention: x must have shape (B, T, D); got {x.shape}. "
            "Insert the axis that it lacks, or map over further ones with vmap."
        )


def check_decode(positions: jax.Array | None, segment_ids: jax.Array | None) -> None:
    """Raises ValueError for options that a cache, which counts by itself, has not."""
    for name, x in (("positions", positions), ("segment_ids", segment_ids)):
        if x is not None:
            raise ValueError(
                f"GroupedQueryAttention: {name} cannot be combined with a cache, in "
                f"which each token follows the one before. Pass no {name} to decode."
            )


def head_size(width: int, heads: int, kv_heads: int, size: int | None) -> int:
    """H; raises ValueError for heads that do not divide."""
    if heads < 1 or kv_heads < 1:
        raise ValueError(
            "GroupedQueryAttention: num_heads and num_kv_heads must be positive; got "
            f"{heads} and {kv_heads}. Choose others."
        )
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
