"""The GPU kernels of the backward pass: Dao, "FlashAttention-2", 2023, algorithm 2.

One kernel for dq, which walks over keys; one for dk and dv, which walks over queries.
That one takes the scores transposed, (keys, queries): they are then the left factor of
every product that sums over queries, as the registers hold them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from .gpu_plan import Plan
from .gpu_tile import Tile
from .spec import Extra, finite, weights

# q, k, v, dout as in `AttentionSpec`; lse in units of log 2 and +inf for rows that see
# no key, and delta, as (B, N, T).
Arrays = tuple[jax.Array, ...]


def query_gradient(plan: Plan, arrays: Arrays, inputs: Extra) -> jax.Array:
    """dq, (B, T, N, H)."""
    spec = plan.spec
    (dq,) = plan.call(
        functools.partial(_dq_kernel, plan),
        "attention_bwd_dq",
        (plan.count[0], spec.heads, spec.batch),
        (*arrays, *inputs.present, *plan.bounds(1, inputs)),
        [(arrays[0].shape, spec.dtype)],
        products=3,
    )
    return dq


def _dq_kernel(plan, q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, *refs):
    spec = plan.spec
    inputs, bounds, (dq_ref,) = plan.take(refs)
    i, n, b = map(pl.program_id, range(3))
    if spec.band.upper is not None:
        i = plan.count[0] - 1 - i  # the blocks with the most keys first
    mine = Tile(plan, inputs, (b, n, i, 0))
    rows = mine.queries(q_ref, spec.qk_dim), mine.queries(dout_ref, spec.v_dim)
    stats = mine.stats(lse_ref), mine.stats(delta_ref)

    def visit(j, partial, acc):
        tile = Tile(plan, inputs, (b, n, i, j), partial)
        keys = tile.keys(k_ref, spec.qk_dim), tile.keys(v_ref, spec.v_dim)
        _, _, dproduct = cotangents(tile, rows, keys, stats)
        k = finite(keys[0]) if partial else keys[0]
        return acc + tile.dot(dproduct.astype(k.dtype), k, (1, 0))

    acc = jnp.zeros((plan.block[0], q_ref.shape[3]), jnp.float32)
    acc = plan.walk(1, b, i, bounds, visit, acc)
    mine.store_queries(dq_ref, acc * spec.scale, spec.qk_dim)


def cotangents(tile, rows, keys, stats):
    """Weights and dscores of a tile, and the cotangents of its products of q and k.

    Args:
      rows: q and dout.
      keys: k and v.
      stats: lse and delta.
    """
    (q, dout), (k, v), (lse, delta) = rows, keys, stats
    s, slope = tile.scores(tile.products(q, k))
    p = weights(tile.spec, s, lse)
    products = (v, dout) if tile.transposed else (dout, v)
    dp = tile.dropped(tile.dot(*products, (1, 1)))
    ds = p * (dp - delta)
    dproduct = ds if slope is None else ds * slope
    if tile.partial:
        # A row that is NaN, as its lse or delta tells, must stay so, but not at the
        # keys that it does not see. Of those the slope, too, may be NaN.
        seen = tile.seen()
        p = jnp.where(seen, p + 0.0 * delta, 0.0)
        ds, dproduct = (jnp.where(seen, x, 0.0) for x in (ds, dproduct))
    return p, ds, dproduct


def key_gradients(
    plan: Plan, arrays: Arrays, inputs: Extra
) -> tuple[jax.Array, jax.Array]:
    """dk, (B, S, K, H), and dv, (B, S, K, Hv)."""
    spec = plan.spec
    return plan.call(
        functools.partial(_dkv_kernel, plan),
        "attention_bwd_dkv",
        (plan.count[1], spec.kv_heads, spec.batch),
        (*arrays, *inputs.present, *plan.bounds(0, inputs)),
        [(x.shape, spec.dtype) for x in arrays[1:3]],
        products=4,
    )


def _dkv_kernel(plan, q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, *refs):
    spec = plan.spec
    inputs, bounds, (dk_ref, dv_ref) = plan.take(refs)
    j, kv_head, b = map(pl.program_id, range(3))
    first = kv_head * spec.group
    mine = Tile(plan, inputs, (b, first, 0, j))
    keys = mine.keys(k_ref, spec.qk_dim), mine.keys(v_ref, spec.v_dim)

    def visit(n, i, partial, total):
        tile = Tile(plan, inputs, (b, n, i, j), partial, transposed=True)
        q, dout = tile.queries(q_ref, spec.qk_dim), tile.queries(dout_ref, spec.v_dim)
        stats = tile.stats(lse_ref), tile.stats(delta_ref)
        if partial:
            q, dout = finite(q), finite(dout)
        p, _, dproduct = cotangents(tile, (q, dout), keys, stats)
        dk, dv = total
        dv = dv + tile.dot(tile.dropped(p).astype(dout.dtype), dout, (1, 0))
        return dk + tile.dot(dproduct.astype(q.dtype), q, (1, 0)), dv

    def head(g, total):
        return plan.walk(
            0,
            b,
            j,
            bounds,
            lambda i, partial, total: visit(first + g, i, partial, total),
            total,
        )

    total = tuple(
        jnp.zeros((plan.block[1], ref.shape[3]), jnp.float32) for ref in (k_ref, v_ref)
    )
    if spec.group == 1:
        dk, dv = head(0, total)
    else:
        dk, dv = lax.fori_loop(np.int32(0), np.int32(spec.group), head, total)
    mine.store_keys(dk_ref, dk * spec.scale, spec.qk_dim)
    mine.store_keys(dv_ref, dv, spec.v_dim)
