"""Attention as one formula in plain jnp, with every score in memory: the definition."""

import jax
import jax.numpy as jnp

from .spec import AttentionSpec, fence


def attend(
    spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, *extra: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The "fwd" pass of `AttentionSpec`, differentiable by JAX to any order."""
    bias, mask = spec.split(extra)
    q, k, v = (x.astype(spec.acc_dtype) for x in (q, k, v))
    k, v, poison = fence(k.swapaxes(1, 2), v.swapaxes(1, 2))  # (B,K,S,H)
    k, v, poison = (jnp.repeat(x, spec.group, axis=1) for x in (k, v, poison))

    s = jnp.einsum("btnh,bnsh->bnts", q * spec.scale, k, precision=spec.precision)
    s = s + poison[:, :, None, :]
    rows = jnp.arange(spec.q_len)[:, None]
    cols = jnp.arange(spec.kv_len)[None, :]
    seen = spec.band.visible(rows, cols)[None, None]
    if mask is not None:
        seen = seen & mask
    if bias is not None:
        bias = bias.astype(spec.acc_dtype)
        seen = seen & (bias != -jnp.inf)
        s = s + jnp.where(bias != -jnp.inf, bias, 0)
    s = jnp.where(seen, s, -jnp.inf)

    top = jax.lax.stop_gradient(jnp.max(s, axis=-1, keepdims=True))
    top = jnp.where(top == -jnp.inf, 0, top)
    p = jnp.where(seen, jnp.exp(jnp.where(seen, s - top, 0)), 0)
    total = jnp.sum(p, axis=-1, keepdims=True)
    dead = total == 0
    total = jnp.where(dead, 1, total)
    out = jnp.einsum("bnts,bnsh->btnh", p / total, v, precision=spec.precision)
    lse = jnp.where(dead, -jnp.inf, top + jnp.log(total))
    return out.astype(spec.dtype), lse[..., 0]
