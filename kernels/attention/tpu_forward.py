"""The TPU kernel of the forward pass: Dao, "FlashAttention-2", 2023, algorithm 1.

The grid's last axis walks over the blocks of keys, and sums into scratch that lives as
long as one block of queries: the greatest score of each row in every lane, the sum of
the weights apart for each lane, and the weighted sum of the values.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..tiling import LANES, ceil_div, result_type
from .cost import cost
from .spec import GREATEST, LOG2_E
from .tpu_plan import Inputs, Plan, compiler_params
from .tpu_tile import Tile, finite, poison, scaled
from .tpu_visit import visit


def forward(
    plan: Plan, q: jax.Array, k: jax.Array, v: jax.Array, inputs: Inputs
) -> tuple[jax.Array, jax.Array]:
    """out (B, N, T, Hv) and lse (B, N, T) of q (B, N, T, H) and k, v (B, K, S, ...)."""
    spec, (bq, _), (nq, nk) = plan.spec, plan.block, plan.count
    rows, place = (spec.batch, spec.heads), plan.by_queries
    out, lse = pl.pallas_call(
        functools.partial(_kernel, plan, inputs),
        grid=(*rows, nq, nk),
        in_specs=[
            plan.rows(spec.qk_dim, place),
            plan.keys(spec.qk_dim, place),
            plan.keys(spec.v_dim, place),
            *plan.input_specs(inputs, place),
        ],
        out_specs=[plan.rows(spec.v_dim, place), plan.stats(place)],
        out_shape=[
            result_type((*rows, spec.q_len, spec.v_dim), spec.dtype),
            result_type((*rows, 1, spec.q_len), jnp.float32),
        ],
        scratch_shapes=[
            pltpu.VMEM((bq, spec.qk_dim), spec.dtype),
            pltpu.VMEM((bq, LANES), jnp.float32),
            pltpu.VMEM((bq, LANES), jnp.float32),
            pltpu.VMEM((bq, spec.v_dim), jnp.float32),
        ],
        compiler_params=compiler_params(),
        cost_estimate=cost(spec, products=2, arrays=(q, k, v, q, *inputs.present)),
        interpret=plan.interpret,
        name="attention_fwd",
    )(q, k, v, *inputs.present)
    return out, lse[:, :, 0]


def _kernel(plan, inputs, q_ref, k_ref, v_ref, *refs):
    inputs, (out_ref, lse_ref, q_scr, top_scr, sum_scr, acc_scr) = inputs.take(refs)
    b, n, i, j = map(pl.program_id, range(4))
    place = b, n, i, (0 if plan.count[1] == 1 else j)

    @pl.when(j == 0)
    def _start():
        q_scr[...] = scaled(plan.spec, q_ref[...])
        if inputs.sinks is None:
            # Not -inf, of which -inf - -inf would make NaN.
            top_scr[...] = jnp.full_like(top_scr, -GREATEST)
            sum_scr[...] = jnp.zeros_like(sum_scr)
        else:
            # A key that every query sees, with a value of 0.
            sink = inputs.sinks[0, n]
            top_scr[...] = jnp.full_like(top_scr, jnp.maximum(sink, -GREATEST))
            lane = lax.broadcasted_iota(jnp.int32, sum_scr.shape, 1)
            seen = (lane == 0) & (sink != -jnp.inf)
            sum_scr[...] = jnp.where(seen, 1.0, 0.0)
        acc_scr[...] = jnp.zeros_like(acc_scr)

    def run(keys, partial):
        tile = Tile(plan, inputs, place, keys)
        k, v = k_ref[keys], v_ref[keys]
        if partial:
            poisoned = poison(k) + poison(v)
            k, v = finite(k), finite(v)
        s, _ = tile.scores(q_scr[...], k)  # (bq, keys)
        if partial:
            s, seen = tile.with_bias(s)
            s = jnp.where(seen, s + poisoned, -jnp.inf)
        top_old = top_scr[...]
        top_new = jnp.maximum(top_old, jnp.max(s, axis=1, keepdims=True))
        p = jnp.exp2(s - _widened(top_new, keys.size))
        decay = jnp.exp2(top_old - top_new)
        top_scr[...] = top_new
        sum_scr[...] = sum_scr[...] * decay + _lane_sums(p)
        pv = tile.dot(tile.dropped(p).astype(v.dtype), v, (1, 0))
        acc_scr[...] = acc_scr[...] * _widened(decay, pv.shape[1]) + pv

    visit(plan, inputs, place, run)

    @pl.when(j == pl.num_programs(3) - 1)
    def _finish():
        total = jnp.sum(sum_scr[...], axis=1, keepdims=True)
        dead = total == 0
        total = jnp.where(dead, 1.0, total)
        out = acc_scr[...] / total
        if inputs.seed is not None:
            out = out * plan.spec.keep_scale
        out_ref[...] = out.astype(out_ref.dtype)
        lse = (top_scr[...] + jnp.log2(total)) / LOG2_E
        lse_ref[...] = jnp.where(dead, -jnp.inf, lse).T[:1]


def _widened(x, columns):
    """Equal lanes (rows, 128) as (rows, columns): no lane moves."""
    return jnp.tile(x, (1, ceil_div(columns, LANES)))[:, :columns]


def _lane_sums(p):
    """(rows, 128) of (rows, n * 128): sums of what is in the same lane.

    The lanes are summed once for all keys, at the end: inside of a register that is
    slow.
    """
    parts = (p[:, at : at + LANES] for at in range(0, p.shape[1], LANES))
    return functools.reduce(jnp.add, parts)
