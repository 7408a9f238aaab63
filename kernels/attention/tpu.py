"""Flash attention for TPUs, in Pallas: one kernel forward, two backward.

Arrays are (B, N, T, H) here, so that a block is (positions, features). The scores are
in units of log 2: `scale * log2(e)` is folded into the queries and the softmax takes
exp2, which is the TPU's own instruction. The grid's last axis walks over the blocks
that are summed, into scratch that lives as long as one block of the result.

A block at the end of a ragged array holds garbage behind the end. It may be NaN, so
what it would meet in a product is set to zero, not only its scores.

Backward takes the scores transposed, (keys, queries), for dk and dv: so every product
there is a plain one, and lse and delta lie along the lanes as they are stored.

Dao, "FlashAttention-2", 2023, algorithms 1 and 2.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..tiling import LANES, result_type
from .spec import AttentionSpec

# At most this many queries and keys in a tile. Large tiles keep the matrix unit busy
# between two steps of the grid; the scores of this one are 2 MiB of the 16 MiB of VMEM
# that a kernel gets, and exist about four times at once.
BLOCK = (512, 1024)

# Bytes of one head's features for which these blocks fit beside the scores; larger
# heads get smaller tiles.
_HEAD_BYTES = 512

_LOG2_E = math.log2(math.e)


def refuses(spec: AttentionSpec) -> str | None:
    """Why the kernels cannot do a call, or None."""
    if spec.dtype.name not in ("float32", "bfloat16"):
        return f"takes float32 and bfloat16, not {spec.dtype}"
    if spec.qk_dim == 0:
        return "takes no heads of size 0"
    if _shrinkage(spec) > BLOCK[0] // LANES:
        return f"takes no heads of {max(spec.qk_dim, spec.v_dim)} features"
    if spec.bias_shape is not None:
        return "takes no bias"
    if spec.mask_shape is not None:
        return "takes no mask"
    if spec.precision == lax.Precision.HIGH:
        return "has no precision HIGH, only DEFAULT and HIGHEST"
    return None


def fwd(
    spec: AttentionSpec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    interpret: bool = False,
    block: tuple[int, int] = BLOCK,
) -> tuple[jax.Array, jax.Array]:
    """See `AttentionSpec`."""
    block = _fit(spec, block)
    (bq, bk), (nq, nk) = block, _count(spec, block)
    rows, keys, stats = _index_maps(spec, block)
    out, lse = pl.pallas_call(
        functools.partial(_fwd_kernel, spec, block),
        grid=(spec.batch, spec.heads, nq, nk),
        in_specs=[
            _block(bq, spec.qk_dim, rows),
            _block(bk, spec.qk_dim, keys),
            _block(bk, spec.v_dim, keys),
        ],
        out_specs=[_block(bq, spec.v_dim, rows), _block(1, bq, stats)],
        out_shape=[
            result_type(_rows_shape(spec, spec.v_dim), spec.dtype),
            result_type(_stats_shape(spec), jnp.float32),
        ],
        scratch_shapes=[
            pltpu.VMEM((bq, spec.qk_dim), spec.dtype),
            pltpu.VMEM((bq, LANES), jnp.float32),
            pltpu.VMEM((bq, LANES), jnp.float32),
            pltpu.VMEM((bq, spec.v_dim), jnp.float32),
        ],
        compiler_params=_params(),
        cost_estimate=_cost(spec, products=2, arrays=(q, k, v, q)),
        interpret=interpret,
        name="attention_fwd",
    )(*(x.swapaxes(1, 2) for x in (q, k, v)))
    return out.swapaxes(1, 2), lse[:, :, 0]


def _fwd_kernel(
    spec, block, q_ref, k_ref, v_ref, out_ref, lse_ref, q_scr, top_scr, sum_scr, acc_scr
):
    i, j = pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _start():
        q_scr[...] = _in_log2(spec, q_ref[...])
        top_scr[...] = jnp.full_like(top_scr, -jnp.inf)
        sum_scr[...] = jnp.zeros_like(sum_scr)
        acc_scr[...] = jnp.zeros_like(acc_scr)

    def tile(partial):
        k, v = k_ref[...], v_ref[...]
        if partial:
            poison = _poison(k) + _poison(v)
            k, v = _finite(k), _finite(v)
        s = _dot(spec, q_scr[...], k, (1, 1))  # (bq, bk)
        if partial:
            s = jnp.where(_seen(spec, block, i, j, 0), s + poison, -jnp.inf)
        top_old = top_scr[...]
        top_new = jnp.maximum(top_old, jnp.max(s, axis=1, keepdims=True))
        # A row that has seen no key yet has -inf, and -inf - -inf would be NaN.
        shift = jnp.where(top_new == -jnp.inf, 0.0, top_new)
        p = jnp.exp2(s - shift[:, :1])
        decay = jnp.exp2(top_old - shift)
        top_scr[...] = top_new
        sum_scr[...] = sum_scr[...] * decay + jnp.sum(p, axis=1, keepdims=True)
        pv = _dot(spec, p.astype(v.dtype), v, (1, 0))
        acc_scr[...] = acc_scr[...] * decay[:, :1] + pv

    _visit(spec, block, i, j, tile)

    @pl.when(j == pl.num_programs(3) - 1)
    def _finish():
        dead = sum_scr[...] == 0
        total = jnp.where(dead, 1.0, sum_scr[...])
        out_ref[...] = (acc_scr[...] / total[:, :1]).astype(out_ref.dtype)
        lse = (top_scr[...] + jnp.log2(total)) / _LOG2_E
        lse_ref[...] = jnp.where(dead, -jnp.inf, lse).T[:1]


def bwd(
    spec: AttentionSpec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    dout: jax.Array,
    *,
    interpret: bool = False,
    block: tuple[int, int] = BLOCK,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `AttentionSpec`."""
    q, k, v, dout = (x.swapaxes(1, 2) for x in (q, k, v, dout))
    # With +inf a dead row has p = exp2(s - inf) = 0.
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse * _LOG2_E)[:, :, None]
    arrays = (q, k, v, dout, lse, delta[:, :, None])
    block = _fit(spec, block)
    dq = _bwd_dq(spec, block, arrays, interpret)
    dk, dv = _bwd_dkv(spec, block, arrays, interpret)
    return tuple(x.swapaxes(1, 2) for x in (dq, dk, dv))


def _bwd_dq(spec, block, arrays, interpret):
    (bq, bk), (nq, nk) = block, _count(spec, block)
    rows, keys, stats = _index_maps(spec, block)
    return pl.pallas_call(
        functools.partial(_bwd_dq_kernel, spec, block),
        grid=(spec.batch, spec.heads, nq, nk),
        in_specs=[
            _block(bq, spec.qk_dim, rows),
            _block(bk, spec.qk_dim, keys),
            _block(bk, spec.v_dim, keys),
            _block(bq, spec.v_dim, rows),
            _block(1, bq, stats),
            _block(1, bq, stats),
        ],
        out_specs=_block(bq, spec.qk_dim, rows),
        out_shape=result_type(_rows_shape(spec, spec.qk_dim), spec.dtype),
        scratch_shapes=[
            pltpu.VMEM((bq, spec.qk_dim), spec.dtype),
            pltpu.VMEM((bq, LANES), jnp.float32),
            pltpu.VMEM((bq, LANES), jnp.float32),
            pltpu.VMEM((bq, spec.qk_dim), jnp.float32),
        ],
        compiler_params=_params(),
        cost_estimate=_cost(spec, products=3, arrays=(*arrays, arrays[0])),
        interpret=interpret,
        name="attention_bwd_dq",
    )(*arrays)


def _bwd_dq_kernel(
    spec,
    block,
    q_ref,
    k_ref,
    v_ref,
    dout_ref,
    lse_ref,
    delta_ref,
    dq_ref,
    q_scr,
    lse_scr,
    delta_scr,
    acc_scr,
):
    i, j = pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _start():
        q_scr[...] = _in_log2(spec, q_ref[...])
        for scr, ref in ((lse_scr, lse_ref), (delta_scr, delta_ref)):
            scr[...] = jnp.broadcast_to(ref[...], (LANES, block[0])).T
        acc_scr[...] = jnp.zeros_like(acc_scr)

    def tile(partial):
        k, v = k_ref[...], v_ref[...]
        if partial:
            k, v = _finite(k), _finite(v)
        s = _dot(spec, q_scr[...], k, (1, 1))  # (bq, bk)
        p = jnp.exp2(s - lse_scr[:, :1])
        dp = _dot(spec, dout_ref[...], v, (1, 1))
        ds = p * (dp - delta_scr[:, :1])
        if partial:
            ds = jnp.where(_seen(spec, block, i, j, 0), ds, 0.0)
        acc_scr[...] += _dot(spec, ds.astype(k.dtype), k, (1, 0))

    _visit(spec, block, i, j, tile)

    @pl.when(j == pl.num_programs(3) - 1)
    def _finish():
        dq_ref[...] = (acc_scr[...] * spec.scale).astype(dq_ref.dtype)


def _bwd_dkv(spec, block, arrays, interpret):
    (bq, bk), (nq, nk), group = block, _count(spec, block), spec.group

    # The last axis of the grid walks over the query heads of a key head, and in each
    # over its blocks of queries.
    def head_and_block(n, j, step):
        i = _query_block(spec, block, lax.rem(step, nq), j)
        return n * group + lax.div(step, nq), i

    def rows(b, n, j, step):
        return b, *head_and_block(n, j, step), 0

    def stats(b, n, j, step):
        head, i = head_and_block(n, j, step)
        return b, head, 0, i

    def keys(b, n, j, step):
        return b, n, j, 0

    return pl.pallas_call(
        functools.partial(_bwd_dkv_kernel, spec, block),
        grid=(spec.batch, spec.kv_heads, nk, group * nq),
        in_specs=[
            _block(bq, spec.qk_dim, rows),
            _block(bk, spec.qk_dim, keys),
            _block(bk, spec.v_dim, keys),
            _block(bq, spec.v_dim, rows),
            _block(1, bq, stats),
            _block(1, bq, stats),
        ],
        out_specs=[_block(bk, spec.qk_dim, keys), _block(bk, spec.v_dim, keys)],
        out_shape=[result_type(x.shape, spec.dtype) for x in (arrays[1], arrays[2])],
        scratch_shapes=[
            pltpu.VMEM((bk, spec.qk_dim), jnp.float32),
            pltpu.VMEM((bk, spec.v_dim), jnp.float32),
        ],
        compiler_params=_params(),
        cost_estimate=_cost(spec, products=4, arrays=(*arrays, *arrays[1:3])),
        interpret=interpret,
        name="attention_bwd_dkv",
    )(*arrays)


def _bwd_dkv_kernel(
    spec,
    block,
    q_ref,
    k_ref,
    v_ref,
    dout_ref,
    lse_ref,
    delta_ref,
    dk_ref,
    dv_ref,
    dk_scr,
    dv_scr,
):
    nq, _ = _count(spec, block)
    j, step = pl.program_id(2), pl.program_id(3)
    i = lax.rem(step, nq)

    @pl.when(step == 0)
    def _start():
        dk_scr[...] = jnp.zeros_like(dk_scr)
        dv_scr[...] = jnp.zeros_like(dv_scr)

    def tile(partial):
        q, k, v, dout = q_ref[...], k_ref[...], v_ref[...], dout_ref[...]
        if partial:
            k, v = _finite(k), _finite(v)
            # Behind the last query lies garbage; a NaN of the user's stays.
            row = i * block[0] + lax.broadcasted_iota(jnp.int32, (block[0], 1), 0)
            q, dout = (_where(row < spec.q_len, x) for x in (q, dout))
        s = _dot(spec, k, _in_log2(spec, q), (1, 1))  # (bk, bq)
        p = jnp.exp2(s - lse_ref[...])
        ds = p * (_dot(spec, v, dout, (1, 1)) - delta_ref[...])
        if partial:
            seen = _seen(spec, block, i, j, 1)
            p, ds = jnp.where(seen, p, 0.0), jnp.where(seen, ds, 0.0)
        dv_scr[...] += _dot(spec, p.astype(dout.dtype), dout, (1, 0))
        dk_scr[...] += _dot(spec, ds.astype(q.dtype), q, (1, 0))

    _visit(spec, block, i, j, tile, queries_end=True)

    @pl.when(step == pl.num_programs(3) - 1)
    def _finish():
        dk_ref[...] = (dk_scr[...] * spec.scale).astype(dk_ref.dtype)
        dv_ref[...] = dv_scr[...].astype(dv_ref.dtype)


def _visit(spec, block, i, j, tile, queries_end=False):
    """Runs `tile(partial)` unless no query of the tile sees a key.

    `queries_end` says that rows behind the last query count too, as they do where the
    sum is over queries.
    """
    corner = (i * block[0], block[0], j * block[1], block[1])
    meets, whole = spec.band.meets(*corner), spec.band.covers(*corner)
    if spec.kv_len % block[1]:
        whole = whole & (j < spec.kv_len // block[1])
    if queries_end and spec.q_len % block[0]:
        whole = whole & (i < spec.q_len // block[0])
    if whole is True:
        tile(partial=False)
    else:
        pl.when(whole)(lambda: tile(partial=False))
        partial = jnp.logical_not(whole)
        partial = partial if meets is True else meets & partial
        pl.when(partial)(lambda: tile(partial=True))


def _seen(spec, block, i, j, query_axis):
    """Which scores of a tile count; queries lie along `query_axis`."""
    shape = block if query_axis == 0 else block[::-1]
    row = i * block[0] + lax.broadcasted_iota(jnp.int32, shape, query_axis)
    col = j * block[1] + lax.broadcasted_iota(jnp.int32, shape, 1 - query_axis)
    return spec.band.visible(row, col) & (col < spec.kv_len) & (row < spec.q_len)


def _index_maps(spec, block):
    """Of queries, keys and row statistics, on a grid (B, N, query block, key block)."""

    def rows(b, n, i, j):
        return b, n, i, 0

    def keys(b, n, i, j):
        return b, lax.div(n, spec.group), _key_block(spec, block, i, j), 0

    def stats(b, n, i, j):
        return b, n, 0, i

    return rows, keys, stats


def _key_block(spec, block, i, j):
    """The key block to have in VMEM: of an empty tile, one that is there already."""
    last = _count(spec, block)[1] - 1
    if spec.band.upper is not None:
        end = i * block[0] + block[0] - 1 + spec.band.upper
        j = jnp.minimum(j, jnp.clip(lax.div(end, block[1]), 0, last))
    if spec.band.lower is not None:
        start = jnp.maximum(i * block[0] + spec.band.lower, 0)
        j = jnp.maximum(j, jnp.minimum(lax.div(start, block[1]), last))
    return j


def _query_block(spec, block, i, j):
    last = _count(spec, block)[0] - 1
    if spec.band.upper is not None:
        start = jnp.maximum(j * block[1] - spec.band.upper, 0)
        i = jnp.maximum(i, jnp.minimum(lax.div(start, block[0]), last))
    if spec.band.lower is not None:
        end = j * block[1] + block[1] - 1 - spec.band.lower
        i = jnp.minimum(i, jnp.clip(lax.div(end, block[0]), 0, last))
    return i


def _in_log2(spec, q):
    return (q.astype(jnp.float32) * (spec.scale * _LOG2_E)).astype(q.dtype)


def _finite(x):
    return _where(jnp.abs(x.astype(jnp.float32)) < jnp.inf, x)


def _where(condition, x):
    """`x` or 0. Selected in float32: not every TPU compares and selects in bfloat16."""
    return jnp.where(condition, x.astype(jnp.float32), 0.0).astype(x.dtype)


def _poison(x):
    """(1, rows): NaN for each row of `x` that holds NaN or infinity, else 0."""
    ones = jnp.ones((8, x.shape[1]), x.dtype)
    zeros = (x.astype(jnp.float32) * 0.0).astype(x.dtype)
    dims = (((1,), (1,)), ((), ()))
    return lax.dot_general(ones, zeros, dims, preferred_element_type=jnp.float32)[:1]


def _dot(spec, a, b, contract):
    dims = (((contract[0],), (contract[1],)), ((), ()))
    # Products of bfloat16 are exact in one pass.
    precision = spec.precision if spec.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        a, b, dims, precision=precision, preferred_element_type=jnp.float32
    )


def _fit(spec, limit):
    """Sizes of a block: at most `limit`, and whole vector registers of lanes."""
    return tuple(
        LANES * min(most // _shrinkage(spec) // LANES, pl.cdiv(length, LANES))
        for most, length in zip(limit, (spec.q_len, spec.kv_len), strict=True)
    )


def _count(spec, block):
    return pl.cdiv(spec.q_len, block[0]), pl.cdiv(spec.kv_len, block[1])


def _shrinkage(spec):
    """By how much the blocks must be smaller for the size of the heads."""
    features = max(spec.qk_dim, spec.v_dim)
    return pl.cdiv(features * spec.dtype.itemsize, _HEAD_BYTES)


def _block(rows, columns, index_map):
    return pl.BlockSpec((None, None, rows, columns), index_map)


def _rows_shape(spec, features):
    return spec.batch, spec.heads, spec.q_len, features


def _stats_shape(spec):
    return spec.batch, spec.heads, 1, spec.q_len


def _params():
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
    )


def _cost(spec, products, arrays):
    scores = spec.batch * spec.heads * spec.q_len * spec.kv_len
    if spec.band.upper is not None or spec.band.lower is not None:
        scores //= 2
    return pl.CostEstimate(
        flops=2 * products * scores * (spec.qk_dim + spec.v_dim) // 2,
        transcendentals=scores,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays),
    )
