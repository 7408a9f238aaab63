"""The TPU kernel of the backward pass: Dao, "FlashAttention-2", 2023, algorithm 2.

One kernel makes the scores once for dq, dk and dv: five products. A call of it sees one
block of keys, whose dk and dv it sums in scratch over all queries. Of dq each step
makes the part of these keys, so where there are several blocks of keys, the calls hand
on the sum of dq, in float32.

The scores are transposed, (keys, queries): so all products but that for dq are plain
ones, and lse and delta lie along the lanes as they are stored.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..tiling import result_type
from .cost import cost
from .spec import weights
from .tpu_plan import Inputs, Plan, compiler_params
from .tpu_tile import Tile, finite, scaled, where
from .tpu_visit import sees_whole_blocks, visit

# q, k, v, dout as (B, heads, length, features); lse in units of log 2 and +inf for rows
# that see no key, and delta, as (B, N, 1, T).
Arrays = tuple[jax.Array, ...]


def gradients(
    plan: Plan, arrays: Arrays, inputs: Inputs
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq (B, N, T, H), dk (B, K, S, H) and dv (B, K, S, Hv)."""
    spec, blocks = plan.spec, plan.count[1]
    if blocks == 1:
        return _of_block(plan, 0, None, arrays, inputs)

    def step(dq, j):
        dq, dk, dv = _of_block(plan, j, dq, arrays, inputs)
        return dq, (dk, dv)

    dq = jnp.zeros(arrays[0].shape, jnp.float32)
    dq, parts = lax.scan(step, dq, jnp.arange(blocks))
    dk, dv = (_joined(x, spec.kv_len) for x in parts)
    return (dq * spec.scale).astype(spec.dtype), dk, dv


def _joined(x, length):
    """(B, K, length, features) of blocks of keys (blocks, B, K, block, features)."""
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], -1, x.shape[4])[:, :, :length]


def _of_block(plan, j, dq, arrays, inputs):
    """The parts of one block of keys, that of dq added to `dq` if it is given."""
    spec, (bq, bk), nq = plan.spec, plan.block, plan.count[0]
    last = dq is None  # and first

    def place(b, n, step, j_ref):
        return plan.by_keys(b, n, step, j_ref[0])

    def dq_index(b, n, step, j_ref):
        return b, plan.query_head(n, step), lax.rem(step, nq), 0

    def dkv(features):
        block = (None, None, bk, features)
        return pl.BlockSpec(block, lambda b, n, step, j_ref: (b, n, 0, 0))

    dq_spec = pl.BlockSpec((None, None, bq, spec.qk_dim), dq_index)
    kv_shape = spec.batch, spec.kv_heads, spec.kv_len if last else bk
    operands = (jnp.full((1,), j, jnp.int32), *arrays, *inputs.present)
    operands += () if last else (dq,)
    return pl.pallas_call(
        functools.partial(_kernel, plan, inputs),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(spec.batch, spec.kv_heads, spec.group * nq),
            in_specs=[
                *array_specs(plan, place),
                *plan.input_specs(inputs, place),
                *([] if last else [dq_spec]),
            ],
            out_specs=[dq_spec, dkv(spec.qk_dim), dkv(spec.v_dim)],
            scratch_shapes=[
                pltpu.VMEM((bq, spec.qk_dim), spec.dtype),
                pltpu.VMEM((bq, spec.qk_dim), jnp.float32),
                pltpu.VMEM((bk, spec.qk_dim), jnp.float32),
                pltpu.VMEM((bk, spec.v_dim), jnp.float32),
            ],
        ),
        out_shape=[
            result_type(arrays[0].shape, spec.dtype if last else jnp.float32),
            result_type((*kv_shape, spec.qk_dim), spec.dtype),
            result_type((*kv_shape, spec.v_dim), spec.dtype),
        ],
        input_output_aliases={} if last else {len(operands) - 1: 0},
        compiler_params=compiler_params(2),
        cost_estimate=cost(
            spec, products=5, arrays=(*arrays, *arrays[:3], *inputs.present)
        ),
        interpret=plan.interpret,
        name="attention_bwd",
    )(*operands)


def _kernel(
    plan,
    inputs,
    j_ref,
    q_ref,
    k_ref,
    v_ref,
    dout_ref,
    lse_ref,
    delta_ref,
    *refs,
):
    inputs, refs = inputs.take(refs)
    *dq_in_ref, dq_ref, dk_ref, dv_ref, q_scr, dq_scr, dk_scr, dv_scr = refs
    spec, (bq, _), (nq, nk) = plan.spec, plan.block, plan.count
    b, n, step = map(pl.program_id, range(3))
    i = lax.rem(step, nq)
    place = b, plan.query_head(n, step), i, (0 if nk == 1 else j_ref[0])

    whole = sees_whole_blocks(plan)

    def start():
        dk_scr[...] = jnp.zeros_like(dk_scr)
        dv_scr[...] = jnp.zeros_like(dv_scr)

    def add(scr, keys, x):
        # Where each step runs all keys, its sums can start without a pass of zeros.
        scr[keys] = (jnp.where(step == 0, 0.0, scr[keys]) if whole else scr[keys]) + x

    if not whole:
        pl.when(step == 0)(start)
    q_scr[...] = scaled(spec, q_ref[...])
    dq_scr[...] = dq_in_ref[0][...] if dq_in_ref else jnp.zeros_like(dq_scr)

    def run(keys, partial):
        tile = Tile(plan, inputs, place, keys, transposed=True)
        q, k, v, dout = q_ref[...], k_ref[keys], v_ref[keys], dout_ref[...]
        if partial:
            # What the user's NaN makes NaN is told by lse and delta, but only at the
            # keys that the query sees. A bad row of scaled_q spoils no row but its own.
            q, dout = finite(q), finite(dout)
            if spec.q_len % bq:  # Behind the last query lies garbage.
                row = i * bq + lax.broadcasted_iota(jnp.int32, (bq, 1), 0)
                q, dout = (where(row < spec.q_len, x) for x in (q, dout))
            k, v = finite(k), finite(v)
        s, slope = tile.scores(q_scr[...], k)  # (keys, bq)
        if partial:
            s, seen = tile.with_bias(s)
        p = weights(spec, s, lse_ref[...])
        dp = tile.dropped(tile.dot(v, dout, (1, 1)), scaled=True)
        ds = p * (dp - delta_ref[...])
        if slope is not None:
            ds = ds * slope
        if partial:
            p = jnp.where(seen, p + 0.0 * delta_ref[...], 0.0)
            ds = jnp.where(seen, ds, 0.0)
        ds = ds.astype(q.dtype)
        add(dv_scr, keys, tile.dot(tile.dropped(p).astype(dout.dtype), dout, (1, 0)))
        add(dk_scr, keys, tile.dot(ds, q, (1, 0)))
        dq_scr[...] += tile.dot(ds, k, (0, 0))

    visit(plan, inputs, place, run, queries_end=True)
    dq_scale = 1.0 if dq_in_ref else spec.scale
    dq_ref[...] = (dq_scr[...] * dq_scale).astype(dq_ref.dtype)

    @pl.when(step == pl.num_programs(2) - 1)
    def _finish():
        dk_ref[...] = (dk_scr[...] * spec.scale).astype(dk_ref.dtype)
        dv = dv_scr[...]
        if inputs.seed is not None:
            dv = dv * spec.keep_scale
        dv_ref[...] = dv.astype(dv_ref.dtype)


def array_specs(plan: Plan, place) -> list[pl.BlockSpec]:
    """Block specs of `Arrays`."""
    spec = plan.spec
    return [
        plan.rows(spec.qk_dim, place),
        plan.keys(spec.qk_dim, place),
        plan.keys(spec.v_dim, place),
        plan.rows(spec.v_dim, place),
        plan.stats(place),
        plan.stats(place),
    ]
