"""The GPU kernel of the forward pass: Dao, "FlashAttention-2", 2023, algorithm 1."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .gpu_plan import Plan
from .gpu_tile import Tile
from .spec import LOG2_E, Extra, finite


def forward(
    plan: Plan, q: jax.Array, k: jax.Array, v: jax.Array, inputs: Extra
) -> tuple[jax.Array, jax.Array]:
    """out (B, T, N, Hv) and lse (B, N, T)."""
    spec = plan.spec
    return plan.call(
        functools.partial(_kernel, plan),
        "attention_fwd",
        (plan.count[0], spec.heads, spec.batch),
        (q, k, v, *inputs.present, *plan.bounds(1, inputs)),
        [
            ((*q.shape[:3], spec.v_dim), spec.dtype),
            ((spec.batch, spec.heads, spec.q_len), jnp.float32),
        ],
        products=2,
    )


def _kernel(plan, q_ref, k_ref, v_ref, *refs):
    spec = plan.spec
    inputs, bounds, (out_ref, lse_ref) = plan.take(refs)
    i, n, b = map(pl.program_id, range(3))
    if spec.band.upper is not None:
        i = plan.count[0] - 1 - i  # the blocks with the most keys first
    mine = Tile(plan, inputs, (b, n, i, 0))
    q = mine.queries(q_ref, spec.qk_dim)

    def visit(j, partial, total):
        top_old, weight, acc = total
        tile = Tile(plan, inputs, (b, n, i, j), partial)
        k, v = tile.keys(k_ref, spec.qk_dim), tile.keys(v_ref, spec.v_dim)
        product = tile.products(q, k)  # (bq, bk)
        s, _ = tile.scores(product)
        if partial:
            # A key that is not finite makes its products so: 0 times them is poison.
            # Of values it is a sum, for Triton reduces no booleans.
            poison = jnp.sum((v - finite(v)).astype(s.dtype), axis=1) * 0.0
            v = finite(v)
            s = s + product * 0.0 + poison[None, :]
            s = jnp.where(tile.seen(), s, -jnp.inf)
        top = jnp.maximum(top_old, jnp.max(s, axis=1))
        # A row that has seen no key yet has -inf, and -inf - -inf would be NaN.
        shift = jnp.where(top == -jnp.inf, 0.0, top) if partial else top
        p, decay = jnp.exp2(s - shift[:, None]), jnp.exp2(top_old - shift)
        weight = weight * decay + jnp.sum(p, axis=1)
        pv = tile.dot(tile.dropped(p).astype(v.dtype), v, (1, 0))
        return top, weight, acc * decay[:, None] + pv

    bq = plan.block[0]
    top = jnp.full((bq,), -jnp.inf, jnp.float32)
    weight = jnp.zeros((bq,), jnp.float32)
    if inputs.sinks is not None:
        # A key that every query sees, with a value of 0.
        top = jnp.full((bq,), inputs.sinks[n], jnp.float32)
        weight = jnp.where(top == -jnp.inf, 0.0, 1.0)
    acc = jnp.zeros((bq, v_ref.shape[3]), jnp.float32)
    top, weight, acc = plan.walk(1, b, i, bounds, visit, (top, weight, acc))
    dead = weight == 0
    weight = jnp.where(dead, 1.0, weight)
    mine.store_queries(out_ref, acc / weight[:, None], spec.v_dim)
    lse = top * (1 / LOG2_E) + jnp.log(weight)
    mine.store_stats(lse_ref, jnp.where(dead, -jnp.inf, lse))
