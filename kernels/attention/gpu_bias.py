"""The GPU kernels of the gradient of a bias: dscores, summed as the bias was broadcast.

They make the scores anew: what they sum over differs from what the other gradients do.
Every sum stays inside of one program or is XLA's, so that its order is fixed; atomic
adds would not fix it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from .gpu_backward import Arrays, cotangents
from .gpu_plan import Plan
from .gpu_tile import Tile
from .spec import Extra


def bias_gradient(plan: Plan, arrays: Arrays, inputs: Extra) -> jax.Array:
    """dbias, of the shape of the bias, float32 or as rounded to its dtype."""
    b, n, t, s = plan.spec.bias_shape
    if t > 1 and s > 1:
        return _of_pairs(plan, arrays, inputs).reshape(b, n, t, s)
    dbias = _of_rows(plan, arrays, inputs, axis=1 if s > 1 else 0)
    summed = [axis for axis, size in ((0, b), (1, n)) if size == 1]
    if (t, s) == (1, 1):
        summed.append(2)
    return dbias.sum(summed, keepdims=True).reshape(b, n, t, s)


def _of_pairs(plan, arrays, inputs):
    """Of a bias that both queries and keys vary, as (b n, T, S): summed over batch and
    heads in the kernel, for partial sums would be as many as there are scores."""
    b, n, t, s = plan.spec.bias_shape
    (dbias,) = plan.call(
        functools.partial(_pairs_kernel, plan),
        "attention_bwd_dbias",
        (*plan.count, n, b),
        (*arrays, *inputs.present),
        [((b * n, t, s), inputs.bias.dtype)],
        products=2,
    )
    return dbias


def _pairs_kernel(plan, q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, *refs):
    spec = plan.spec
    inputs, _, (dbias_ref,) = plan.take(refs, bounded=False)
    i, j, n, b = map(pl.program_id, range(4))
    batch, heads = (
        size if own == 1 else 1
        for own, size in zip(spec.bias_shape[:2], (spec.batch, spec.heads), strict=True)
    )

    def visit(index, total):
        place = b + lax.div(index, np.int32(heads)), n + lax.rem(index, np.int32(heads))
        tile = Tile(plan, inputs, (*place, i, j))
        return total + _dscores(
            tile, (q_ref, dout_ref), (k_ref, v_ref), (lse_ref, delta_ref)
        )

    # Nothing is to be summed where the band hides all of the block.
    count = jnp.int32(batch * heads)
    if not spec.positions:
        bq, bk = plan.block
        count = jnp.where(spec.band.meets(i * bq, bq, j * bk, bk), count, 0)
    total = jnp.zeros(plan.block, jnp.float32)
    total = lax.fori_loop(np.int32(0), count, visit, total)
    mine = Tile(plan, inputs, (b, n, i, j))
    mine.store_scores(dbias_ref, total, b * spec.bias_shape[1] + n)


def _of_rows(plan, arrays, inputs, axis):
    """dscores of every head, (B, N, T) or, for axis 1, (B, N, S): summed over all keys
    or over all queries."""
    spec = plan.spec
    length = (spec.q_len, spec.kv_len)[axis]
    (sums,) = plan.call(
        functools.partial(_rows_kernel, plan, axis),
        "attention_bwd_dbias",
        (plan.count[axis], spec.heads, spec.batch),
        (*arrays, *inputs.present, *plan.bounds(1 - axis, inputs)),
        [((spec.batch, spec.heads, length), jnp.float32)],
        products=2,
    )
    return sums


def _rows_kernel(plan, axis, q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, *refs):
    inputs, bounds, (sums_ref,) = plan.take(refs)
    at, n, b = map(pl.program_id, range(3))

    def visit(index, partial, total):
        place = (at, index) if axis == 0 else (index, at)
        tile = Tile(plan, inputs, (b, n, *place), partial)
        ds = _dscores(tile, (q_ref, dout_ref), (k_ref, v_ref), (lse_ref, delta_ref))
        return total + jnp.sum(ds, axis=1 - axis)

    total = jnp.zeros((plan.block[axis],), jnp.float32)
    total = plan.walk(1 - axis, b, at, bounds, visit, total)
    Tile(plan, inputs, (b, n, at, at)).store_stats(sums_ref, total, axis)


def _dscores(tile, rows, keys, stats):
    """dscores of a tile, (queries, keys), 0 where they do not count."""
    spec = tile.spec
    q, dout = map(tile.queries, rows, (spec.qk_dim, spec.v_dim))
    k, v = map(tile.keys, keys, (spec.qk_dim, spec.v_dim))
    _, ds, _ = cotangents(tile, (q, dout), (k, v), tuple(map(tile.stats, stats)))
    return ds
