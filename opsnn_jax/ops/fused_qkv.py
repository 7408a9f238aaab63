"""Queries, keys and values by one matrix product, and attention over them packed."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .arguments import as_float_array, as_int, as_precision
from .attention import flash_attention
from .rotary import rotary_embedding

# The default base of the rotary embedding.
_BASE = 10000.0


def fused_qkv(
    x: Float[Array, "*B T D"],
    w_qkv: Float[Array, "D N+2K H"],
    b_qkv: Float[Array, "N+2K H"] | None = None,
    *,
    kv_heads: int | None = None,
    rotary: bool = False,
    positions: Int[Array, "*B T"] | None = None,
    rotary_base: float = _BASE,
    rotary_dim: int | None = None,
    precision: lax.Precision | str | None = None,
) -> tuple[Array, Array, Array]:
    r"""Projects to queries, keys and values with one product, [q, k, v] = x w_qkv + b.

    They come out as flash_attention takes them, without a transpose between. The
    gradient of x is one product too: dx = [dq, dk, dv] w_qkv^T.

    Args:
      x: `(*B, T, D)`, of a float dtype.
      w_qkv: of x's dtype: `(D, N + 2K, H)`, heads of q first, then of k, then of v; or
        `(D, 3, N, H)`.
      b_qkv: added, of the shape of w_qkv without D; or None.
      kv_heads: K, of which N is a multiple. None means as many as query heads.
      rotary: turn q and k by `rotary_embedding`.
      positions, rotary_base, rotary_dim: of that, see there; not without it.
      precision: of the product.

    Returns:
      q `(*B, T, N, H)`, k and v `(*B, T, K, H)`, of x's dtype.

    Raises:
      TypeError, ValueError: for what does not fit.

    Precision:
      As `jax.lax.dot_general` in x's dtype; the bias is added after rounding.

    Example:
      >>> x, w = jnp.ones((2, 5, 16)), jnp.ones((16, 4 + 2 * 2, 8))
      >>> [part.shape for part in fused_qkv(x, w, kv_heads=2, rotary=True)]
      [(2, 5, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8)]
    """
    op = "fused_qkv"
    x, w = as_float_array(op, "x", x), as_float_array(op, "w_qkv", w_qkv)
    if w.ndim == 4 and w.shape[1] == 3:
        heads = w.shape[2]
        if kv_heads is not None and as_int(op, "kv_heads", kv_heads) != heads:
            raise ValueError(
                f"fused_qkv: w_qkv (D, 3, N, H) = {w.shape} has K = N = {heads} heads "
                f"of keys; got kv_heads={kv_heads}. For fewer pass (D, N + 2K, H)."
            )
        w, kv_heads = w.reshape(w.shape[0], 3 * heads, w.shape[3]), heads
    if x.ndim < 2 or w.ndim != 3 or w.shape[0] != x.shape[-1]:
        raise ValueError(
            "fused_qkv: w_qkv must have shape (D, N + 2K, H) or (D, 3, N, H), with the "
            f"features of x (*batch, T, D); got {jnp.shape(w_qkv)} with x {x.shape}. "
            "Reshape it."
        )
    if w.dtype != x.dtype:
        raise TypeError(
            f"fused_qkv: w_qkv must have x's dtype {x.dtype}; got {w.dtype}. Cast one."
        )
    qkv = jnp.tensordot(x, w, 1, precision=as_precision(op, precision))
    if b_qkv is not None:
        b = as_float_array(op, "b_qkv", b_qkv)
        if b.shape not in (w.shape[1:], jnp.shape(w_qkv)[1:]) or b.dtype != x.dtype:
            raise ValueError(
                f"fused_qkv: b_qkv must have shape {w.shape[1:]} and dtype {x.dtype}; "
                f"got {b.shape} of {b.dtype}. Reshape or cast it."
            )
        qkv = qkv + b.reshape((1,) * (x.ndim - 1) + w.shape[1:])
    given = positions is not None, rotary_dim is not None, rotary_base != _BASE
    if any(given) and not rotary:
        name = ("positions", "rotary_dim", "rotary_base")[given.index(True)]
        raise ValueError(
            f"fused_qkv: {name} is of the rotary embedding; got rotary={rotary}. Pass "
            f"rotary=True, or no {name}."
        )
    q, k, v = unpack(op, qkv, kv_heads)
    if rotary:
        options = dict(base=rotary_base, rotary_dim=rotary_dim)
        q, k = (rotary_embedding(part, positions, **options) for part in (q, k))
    return q, k, v


def flash_attention_packed(
    qkv: Float[Array, "*B T N+2K H"],
    bias: Any = None,
    mask: Any = None,
    *,
    kv_heads: int | None = None,
    **options: Any,
) -> Array | tuple[Array, Array]:
    """flash_attention of queries, keys and values in one array.

    Args:
      qkv: `(*B, T, N + 2K, H)`, heads of q first, then of k, then of v; or, where
        `kv_heads` is None, `(*B, T, 3, N, H)`.
      bias, mask, options: of flash_attention.
      kv_heads: K, for the first form.

    Returns:
      As flash_attention.

    Raises:
      TypeError, ValueError, NotImplementedError: as flash_attention does.

    Example:
      >>> flash_attention_packed(jnp.ones((2, 5, 3, 4, 8)), is_causal=True).shape
      (2, 5, 4, 8)
    """
    op = "flash_attention_packed"
    qkv = as_float_array(op, "qkv", qkv)
    if kv_heads is None:
        if qkv.ndim < 4 or qkv.shape[-3] != 3:
            raise ValueError(
                "flash_attention_packed: qkv must have shape (*B, T, 3, N, H); got "
                f"{qkv.shape}. For (*B, T, N + 2K, H) pass kv_heads."
            )
        *batch, _, kv_heads, features = qkv.shape
        qkv = qkv.reshape(*batch, 3 * kv_heads, features)
    elif qkv.ndim < 3:
        raise ValueError(
            "flash_attention_packed: qkv must have shape (*B, T, N + 2K, H) where "
            f"kv_heads is given; got {qkv.shape}. Insert the axes that it lacks."
        )
    return flash_attention(*unpack(op, qkv, kv_heads), bias, mask, **options)


def unpack(op: str, qkv: jax.Array, kv_heads: int | None) -> list[jax.Array]:
    """(..., N + 2K, H) in its three parts."""
    total = qkv.shape[-2]
    if kv_heads is None:
        if total % 3:
            raise ValueError(
                f"{op}: N + 2K = {total} heads are no 3N; got kv_heads=None. Pass K."
            )
        kv_heads = total // 3
    kv_heads = as_int(op, "kv_heads", kv_heads)
    heads = total - 2 * kv_heads
    if not (kv_heads > 0 and heads > 0 or kv_heads == total == 0):
        raise ValueError(
            f"{op}: kv_heads must leave heads for the queries, of N + 2K = {total}; "
            f"got {kv_heads}. Pass K."
        )
    if kv_heads and heads % kv_heads:
        raise ValueError(
            f"{op}: the heads of q must be a multiple of those of k and v; got {heads} "
            f"and {kv_heads}, of N + 2K = {total}. Pass another K."
        )
    return jnp.split(qkv, (heads, heads + kv_heads), axis=-2)
