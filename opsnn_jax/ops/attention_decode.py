"""Attention of a few new tokens over a long cache of keys and values."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from opsnn_jax.dispatch import Requested

from .arguments import as_array, as_float_array, as_int
from .attention import flash_attention
from .attention_arguments import as_sinks

_OP = "attention_decode"


def attention_decode(
    q: Float[Array, "B T N H"],
    k_cache: Float[Array, "B S K H"],
    v_cache: Float[Array, "B S K Hv"],
    lengths: Int[Array, "B"],
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
    splits: int = 1,
    return_lse: bool = False,
    precision: lax.Precision | str | None = None,
    implementation: Requested = None,
) -> Float[Array, "B T N Hv"] | tuple[Array, Array]:
    r"""flash_attention of the last T tokens over a cache, causal, split over S.

    Token t of T stands at position lengths - T + t, and sees the keys up to its own.
    Positions go on where `lengths` are more than S.
    The cache is cut into parts, p, that are computed side by side and merged:

        lse = log sum_p exp(lse_p)      out = sum_p exp(lse_p - lse) out_p

    The query heads that share a key head are rows of one product, so each key is read
    once.

    Args:
      q: queries of the new tokens, `(B, T, N, H)`; `(B, N, H)` for one token.
      k_cache: keys, `(B, S, K, H)`, those of the new tokens written already.
      v_cache: values, `(B, S, K, Hv)`. What lies behind `lengths` in both may be
        anything.
      lengths: integers, `(B,)` or `()`: how many keys count, the new ones among them.
      scale, softcap, sinks, precision, implementation: as in flash_attention.
      window: a query sees so many keys before its own; None for all.
      splits: into how many parts; the next lower divisor of S is taken. More than one
        pays where batch and heads are too few to fill a device, and costs where a part
        has nothing to attend to.
      return_lse: also returns lse, `(B, T, N)`.

    Returns:
      `(B, T, N, Hv)`, or `(B, N, Hv)` for one token, of q's dtype.

    Raises:
      TypeError, ValueError, NotImplementedError: as flash_attention does.

    Precision:
      That of flash_attention. With several parts, each is rounded to q's dtype before
      they are merged in float32, so the result is rounded twice.

    Example:
      >>> cache = jnp.ones((2, 64, 2, 8))
      >>> attention_decode(jnp.ones((2, 4, 8)), cache, cache, jnp.array([9, 30])).shape
      (2, 4, 8)

    References:
      Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context inference", 2023.
    """
    q, k, v = (
        as_float_array(_OP, name, x)
        for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache))
    )
    single = q.ndim == 3
    q = q[:, None] if single else q
    lengths = _check(q, k, v, lengths)
    batch, tokens, heads, features = q.shape
    size, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    parts = _parts(size, splits)
    sinks = as_sinks(_OP, sinks, heads)

    # (B, T, K G, H) -> (B, T G, K, H): the queries of a key head are rows.
    rows = q.reshape(batch, tokens, kv_heads, group, features).swapaxes(2, 3)
    rows = rows.reshape(batch, tokens * group, kv_heads, features)
    places = lengths[:, None] - tokens + jnp.arange(tokens, dtype=jnp.int32)[None]
    places = jnp.repeat(places, group, axis=1)

    def cut(x):
        return x.reshape(batch * parts, size // parts, *x.shape[2:])

    def copied(x):
        return jnp.repeat(x, parts, axis=0)

    keys = jnp.arange(size, dtype=jnp.int32).reshape(parts, size // parts)
    out, lse = flash_attention(
        copied(rows),
        cut(jnp.asarray(k)),
        cut(jnp.asarray(v)),
        scale=scale,
        window=None if window is None else (window, 0),
        q_positions=copied(places),
        kv_positions=jnp.tile(keys, (batch, 1)),
        softcap=softcap,
        return_lse=True,
        precision=precision,
        implementation=implementation,
    )

    def by_token(x):
        """(B P, T G, K, ...) -> (B, P, T, N, ...)"""
        x = x.reshape(batch, parts, tokens, group, kv_heads, *x.shape[3:])
        return x.swapaxes(3, 4).reshape(batch, parts, tokens, heads, *x.shape[5:])

    out, lse = _merge(by_token(out), by_token(lse), sinks)
    if single:
        out, lse = out[:, 0], lse[:, 0]
    return (out, lse) if return_lse else out


def _merge(out, lse, sinks):
    """The parts (B, P, T, N, ...) as one, and the sinks as one more, of value 0."""
    if out.shape[1] == 1 and sinks is None:
        return out[:, 0], lse[:, 0]
    top = jnp.max(lse, axis=1, keepdims=True)
    if sinks is not None:
        sinks = sinks.astype(lse.dtype)[None, None, None, :]
        top = jnp.maximum(top, sinks)
    top = lax.stop_gradient(jnp.where(top == -jnp.inf, 0, top))
    weights = jnp.exp(lse - top)
    total = jnp.sum(weights, axis=1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    dead = total == 0
    total = jnp.where(dead, 1, total)
    merged = jnp.sum(out.astype(lse.dtype) * (weights / total)[..., None], axis=1)
    lse = jnp.where(dead, -jnp.inf, top + jnp.log(total))
    return merged.astype(out.dtype), lse[:, 0]


def _parts(size: int, splits: Any) -> int:
    splits = as_int(_OP, "splits", splits)
    if splits < 1:
        raise ValueError(
            f"attention_decode: splits must be positive; got {splits}. Pass 1 for a "
            "cache in one piece."
        )
    return next((n for n in range(splits, 1, -1) if size % n == 0), 1)


def _check(q, k, v, lengths) -> jax.Array:
    """`lengths` as int32 (B,); raises for shapes that the code above cannot take."""
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4 or q.shape[0] != k.shape[0]:
        raise ValueError(
            "attention_decode: q must be (B, T, N, H) or (B, N, H), the caches (B, S, "
            f"K, H) and (B, S, K, Hv); got {q.shape}, {k.shape} and {v.shape}. Map "
            "over further axes with jax.vmap."
        )
    heads, kv_heads = q.shape[2], k.shape[2]
    if not kv_heads or heads % kv_heads:
        raise ValueError(
            "attention_decode: the heads of q must be a multiple of those of the "
            f"caches; got {heads} and {kv_heads}. Repeat or drop heads."
        )
    if k.shape[3] != q.shape[3] or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            "attention_decode: the caches must have shapes (B, S, K, H) and (B, S, K, "
            f"Hv), with B and H of q; got {k.shape} and {v.shape} with q {q.shape}. "
            "Match them."
        )
    lengths = as_array(_OP, "lengths", lengths)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(
            f"attention_decode: lengths must be integers; got {lengths.dtype}. Cast "
            "them with .astype(jnp.int32)."
        )
    if lengths.shape not in ((), (q.shape[0],)):
        raise ValueError(
            f"attention_decode: lengths must have shape (B,) = ({q.shape[0]},) or (); "
            f"got {lengths.shape}. Give one for each example."
        )
    return jnp.broadcast_to(jnp.asarray(lengths).astype(jnp.int32), q.shape[:1])
