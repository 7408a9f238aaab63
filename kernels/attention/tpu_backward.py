"""The TPU kernels of the backward pass: Dao, "FlashAttention-2", 2023, algorithm 2.

One kernel for dq, which sums over keys; one for dk and dv, which sum over queries. That
one takes the scores transposed, (keys, queries): so every product there is a plain one,
and lse and delta lie along the lanes as they are stored. A third one, for the bias,
sums over whatever the bias is broadcast over.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..tiling import LANES, result_type
from .tpu_plan import Inputs, Plan, compiler_params
from .tpu_tile import Tile, column, finite, where

# q, k, v, dout as (B, heads, length, features); lse in units of log 2 and +inf for rows
# that see no key, and delta, as (B, N, 1, T).
Arrays = tuple[jax.Array, ...]


def query_gradient(plan: Plan, arrays: Arrays, inputs: Inputs) -> jax.Array:
    """dq, (B, N, T, H)."""
    spec, (bq, _), (nq, nk) = plan.spec, plan.block, plan.count
    return pl.pallas_call(
        functools.partial(_dq_kernel, plan, inputs),
        grid=(spec.batch, spec.heads, nq, nk),
        in_specs=_array_specs(plan, inputs, plan.by_queries),
        out_specs=plan.rows(spec.qk_dim, plan.by_queries),
        out_shape=result_type(arrays[0].shape, spec.dtype),
        scratch_shapes=[
            pltpu.VMEM((bq, spec.qk_dim), spec.dtype),
            pltpu.VMEM((bq, LANES), jnp.float32),
            pltpu.VMEM((bq, LANES), jnp.float32),
            pltpu.VMEM((bq, spec.qk_dim), jnp.float32),
        ],
        compiler_params=compiler_params(),
        cost_estimate=plan.cost(
            products=3, arrays=(*arrays, arrays[0], *inputs.present)
        ),
        interpret=plan.interpret,
        name="attention_bwd_dq",
    )(*arrays, *inputs.present)


def _dq_kernel(plan, inputs, q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, *refs):
    inputs, (dq_ref, q_scr, lse_scr, delta_scr, acc_scr) = inputs.take(refs)
    place = tuple(map(pl.program_id, range(4)))
    tile = Tile(plan, inputs, place)

    @pl.when(place[3] == 0)
    def _start():
        q_scr[...] = tile.queries(q_ref[...])
        for scr, ref in ((lse_scr, lse_ref), (delta_scr, delta_ref)):
            scr[...] = jnp.broadcast_to(ref[...], (LANES, plan.block[0])).T
        acc_scr[...] = jnp.zeros_like(acc_scr)

    def run(partial):
        k, v = k_ref[...], v_ref[...]
        if partial:
            k, v = finite(k), finite(v)
        ds, slope = _score_cotangents(
            tile,
            (q_scr[...], k, v, dout_ref[...]),
            (lse_scr[:, :1], delta_scr[:, :1]),
            partial,
        )
        ds = ds if slope is None else ds * slope
        acc_scr[...] += tile.dot(ds.astype(k.dtype), k, (1, 0))

    tile.visit(run)

    @pl.when(place[3] == pl.num_programs(3) - 1)
    def _finish():
        dq_ref[...] = (acc_scr[...] * plan.spec.scale).astype(dq_ref.dtype)


def _score_cotangents(tile, arrays, stats, partial):
    """dscores (bq, bk) of a tile, and the slope of the scores by their products."""
    (q, k, v, dout), (lse, delta) = arrays, stats
    s, slope = tile.scores(q, k)
    if partial:
        s, seen = tile.with_bias(s)
    p = jnp.exp2(s - lse)
    dp = tile.dropped(tile.dot(dout, v, (1, 1)), scaled=True)
    ds = p * (dp - delta)
    if partial:
        ds = jnp.where(seen, ds, 0.0)
    return ds, slope


def key_gradients(
    plan: Plan, arrays: Arrays, inputs: Inputs
) -> tuple[jax.Array, jax.Array]:
    """dk, (B, K, S, H), and dv, (B, K, S, Hv)."""
    spec, (_, bk), (nq, nk) = plan.spec, plan.block, plan.count
    return pl.pallas_call(
        functools.partial(_dkv_kernel, plan, inputs),
        grid=(spec.batch, spec.kv_heads, nk, spec.group * nq),
        in_specs=_array_specs(plan, inputs, plan.by_keys),
        out_specs=[plan.keys(n, plan.by_keys) for n in (spec.qk_dim, spec.v_dim)],
        out_shape=[result_type(x.shape, spec.dtype) for x in (arrays[1], arrays[2])],
        scratch_shapes=[
            pltpu.VMEM((bk, spec.qk_dim), jnp.float32),
            pltpu.VMEM((bk, spec.v_dim), jnp.float32),
        ],
        compiler_params=compiler_params(),
        cost_estimate=plan.cost(
            products=4, arrays=(*arrays, *arrays[1:3], *inputs.present)
        ),
        interpret=plan.interpret,
        name="attention_bwd_dkv",
    )(*arrays, *inputs.present)


def _dkv_kernel(plan, inputs, q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, *refs):
    inputs, (dk_ref, dv_ref, dk_scr, dv_scr) = inputs.take(refs)
    spec, bq, nq = plan.spec, plan.block[0], plan.count[0]
    b, n, j, step = map(pl.program_id, range(4))
    i = lax.rem(step, nq)
    place = b, n * spec.group + lax.div(step, nq), i, j
    tile = Tile(plan, inputs, place, transposed=True)

    @pl.when(step == 0)
    def _start():
        dk_scr[...] = jnp.zeros_like(dk_scr)
        dv_scr[...] = jnp.zeros_like(dv_scr)

    def run(partial):
        q, k, v, dout = q_ref[...], k_ref[...], v_ref[...], dout_ref[...]
        if partial:
            # Behind the last query lies garbage. What the user's NaN makes NaN is told
            # by lse and delta, but only at the keys that the query sees.
            row = i * bq + lax.broadcasted_iota(jnp.int32, (bq, 1), 0)
            q, dout = (where(row < spec.q_len, finite(x)) for x in (q, dout))
            k, v = finite(k), finite(v)
        s, slope = tile.scores(tile.queries(q), k)  # (bk, bq)
        if partial:
            s, seen = tile.with_bias(s)
        p = jnp.exp2(s - lse_ref[...])
        dp = tile.dropped(tile.dot(v, dout, (1, 1)), scaled=True)
        ds = p * (dp - delta_ref[...])
        if partial:
            p = jnp.where(seen, p + 0.0 * delta_ref[...], 0.0)
            ds = jnp.where(seen, ds, 0.0)
        ds = ds if slope is None else ds * slope
        dv_scr[...] += tile.dot(tile.dropped(p).astype(dout.dtype), dout, (1, 0))
        dk_scr[...] += tile.dot(ds.astype(q.dtype), q, (1, 0))

    tile.visit(run, queries_end=True)

    @pl.when(step == pl.num_programs(3) - 1)
    def _finish():
        dk_ref[...] = (dk_scr[...] * spec.scale).astype(dk_ref.dtype)
        dv = dv_scr[...]
        if inputs.seed is not None:
            dv = dv * spec.keep_scale
        dv_ref[...] = dv.astype(dv_ref.dtype)


def bias_gradient(plan: Plan, arrays: Arrays, inputs: Inputs) -> jax.Array:
    """dbias, of the shape and dtype of `inputs.bias`.

    The axes over which it is summed come last in the grid, whichever they are.
    """
    spec, bias = plan.spec, inputs.bias
    sizes = spec.batch, spec.heads, *plan.count
    kept = [axis for axis in range(4) if bias.shape[axis] != 1]
    summed = [axis for axis in range(4) if bias.shape[axis] == 1]
    order = (*kept, *summed)

    def place(*grid):
        return tuple(grid[order.index(axis)] for axis in range(4))

    specs = _array_specs(plan, inputs, place)
    out_spec = plan.input_specs(Inputs(bias=bias), place)[0]
    return pl.pallas_call(
        functools.partial(_dbias_kernel, plan, inputs, place, len(kept)),
        grid=tuple(sizes[axis] for axis in order),
        in_specs=specs,
        out_specs=out_spec,
        out_shape=result_type(bias.shape, bias.dtype),
        scratch_shapes=[pltpu.VMEM(out_spec.block_shape[2:], jnp.float32)],
        compiler_params=compiler_params(len(kept), len(summed)),
        cost_estimate=plan.cost(products=2, arrays=(*arrays, *inputs.present, bias)),
        interpret=plan.interpret,
        name="attention_bwd_dbias",
    )(*arrays, *inputs.present)


def _dbias_kernel(
    plan,
    inputs,
    place,
    kept,
    q_ref,
    k_ref,
    v_ref,
    dout_ref,
    lse_ref,
    delta_ref,
    *refs,
):
    inputs, (dbias_ref, acc_scr) = inputs.take(refs)
    grid = tuple(map(pl.program_id, range(4)))
    tile = Tile(plan, inputs, place(*grid))
    first = last = True
    for axis in range(kept, 4):
        first = first & (grid[axis] == 0)
        last = last & (grid[axis] == pl.num_programs(axis) - 1)

    def start():
        acc_scr[...] = jnp.zeros_like(acc_scr)

    def run(partial):
        ds, _ = _score_cotangents(
            tile,
            (
                tile.queries(q_ref[...]),
                *map(finite, (k_ref[...], v_ref[...])),
                dout_ref[...],
            ),
            (column(lse_ref[...]), column(delta_ref[...])),
            partial,
        )
        for axis, size in enumerate(acc_scr.shape):
            if size == 1:
                ds = jnp.sum(ds, axis=axis, keepdims=True)
        acc_scr[...] += ds

    def finish():
        dbias_ref[...] = acc_scr[...].astype(dbias_ref.dtype)

    _when(first, start)
    tile.visit(run)
    _when(last, finish)


def _when(condition, run):
    """`pl.when`, also for what is known to be true."""
    if condition is True:
        run()
    else:
        pl.when(condition)(run)


def _array_specs(plan, inputs, place):
    spec = plan.spec
    return [
        plan.rows(spec.qk_dim, place),
        plan.keys(spec.qk_dim, place),
        plan.keys(spec.v_dim, place),
        plan.rows(spec.v_dim, place),
        plan.stats(place),
        plan.stats(place),
        *plan.input_specs(inputs, place),
    ]
