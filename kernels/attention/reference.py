"""Attention as one formula in plain jnp, with every score in memory: the definition."""

import jax
import jax.numpy as jnp

from .dropout import keep
from .spec import AttentionSpec, fence, finite


def attend(
    spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, *extra: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The "fwd" pass of `AttentionSpec`, differentiable by JAX to any order."""
    extra = spec.split(extra)
    q, k, v = (x.astype(spec.acc_dtype) for x in (q, k, v))
    k, v, poison = fence(k.swapaxes(1, 2), v.swapaxes(1, 2))  # (B,K,S,H)
    k, v, poison = (jnp.repeat(x, spec.group, axis=1) for x in (k, v, poison))
    # A query that is not finite makes its own row NaN, and nothing that it hides from.
    q_poison = jnp.where(jnp.isfinite(q).all(-1), 0.0, jnp.nan).swapaxes(1, 2)
    q = finite(q)

    s = jnp.einsum("btnh,bnsh->bnts", q * spec.scale, k, precision=spec.precision)
    if spec.softcap is not None:
        s = spec.softcap * jnp.tanh(s / spec.softcap)
    s = s + poison[:, :, None, :] + q_poison[:, :, :, None].astype(s.dtype)
    seen = _seen(spec, extra)
    if extra.bias is not None:
        bias = extra.bias.astype(spec.acc_dtype)
        seen = seen & (bias != -jnp.inf)
        s = s + jnp.where(bias != -jnp.inf, bias, 0)
    s = jnp.where(seen, s, -jnp.inf)

    top = jnp.max(s, axis=-1, keepdims=True)
    if extra.sinks is not None:
        sinks = extra.sinks.astype(spec.acc_dtype)[None, :, None, None]
        top = jnp.maximum(top, sinks)
    top = jax.lax.stop_gradient(jnp.where(top == -jnp.inf, 0, top))
    p = jnp.where(seen, jnp.exp(jnp.where(seen, s - top, 0)), 0)
    total = jnp.sum(p, axis=-1, keepdims=True)
    if extra.sinks is not None:
        total = total + jnp.exp(sinks - top)
    dead = total == 0
    total = jnp.where(dead, 1, total)
    # A row that is NaN must stay so, but not at the keys that it does not see.
    p = jnp.where(seen, p / total, 0)
    if extra.seed is not None:
        p = jnp.where(_kept(spec, extra.seed), p * spec.keep_scale, 0)
    out = jnp.einsum("bnts,bnsh->btnh", p, v, precision=spec.precision)
    # The cotangent of a row that sees no key may be anything; it ends here.
    alive = seen.any(-1).swapaxes(1, 2)[..., None]
    out = jnp.where(alive, out, 0)
    lse = jnp.where(dead, -jnp.inf, top + jnp.log(total))
    return out.astype(spec.dtype), lse[..., 0]


def _seen(spec, extra):
    """(B, N, T, S), each of them or 1."""
    row, col = jnp.arange(spec.q_len)[None], jnp.arange(spec.kv_len)[None]
    if spec.positions:
        row, col = extra.q_positions, extra.kv_positions
    seen = spec.band.visible(row[:, None, :, None], col[:, None, None, :])
    if spec.ids:
        same = extra.q_ids[:, None, :, None] == extra.kv_ids[:, None, None, :]
        seen = seen & same
    if extra.mask is not None:
        seen = seen & extra.mask
    return seen


def _kept(spec, seed):
    head, row, col = (
        jnp.arange(size, dtype=jnp.int32).reshape(shape)
        for size, shape in (
            (spec.batch * spec.heads, (spec.batch, spec.heads, 1, 1)),
            (spec.q_len, (1, 1, spec.q_len, 1)),
            (spec.kv_len, (1, 1, 1, spec.kv_len)),
        )
    )
    return keep((seed[0], seed[1]), head, row, col, spec.dropout_rate)
