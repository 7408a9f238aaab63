"""Flash attention in plain XLA operations: tiles of scores, never all of them.

The list of tiles that are not empty is known before any data, so one `lax.scan` walks
over exactly these, first the full tiles, which need no mask, then the partial ones.
Tiles that only ids and positions leave empty are skipped when they are reached. The
order is the same in every run, and so are the bits. A scan of known length also keeps
both passes differentiable by JAX.

Forward: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
Backward: Dao et al., "FlashAttention", 2022, algorithm 4, all gradients in one walk.
"""

import jax
import jax.numpy as jnp
from jax import lax

from .scores import Scores, at
from .spec import AttentionSpec, finite, refuses_unknown
from .tiles import Tiles

# At most this many queries and keys in a tile: large enough for the matrix products. A
# tile holds all heads; of many, fewer queries, so that its scores lie in the caches of
# a CPU as softmax passes over them.
BLOCK = (512, 512)
_MANY_HEADS = 16

# In the backward pass a masked tile costs much more than one that is not. Few tiles of
# a band would be mostly mask: then it is followed by smaller ones.
SMALL_BLOCK = (256, 256)
_SHORT = 1024


def refuses(spec: AttentionSpec) -> str | None:
    """Why it cannot do a call, or None."""
    return refuses_unknown(T=spec.q_len, S=spec.kv_len)


def fwd(
    spec: AttentionSpec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *extra: jax.Array,
    block: tuple[int, int] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `AttentionSpec`."""
    tiles = Tiles.of(spec, block or _limit(spec))
    scores = Scores(tiles, q, k, v, *extra)
    rows = scores.q.shape[1:3]

    def tile(i, j, partial):
        s, _, _, v_j = scores.tile(scores.queries(i), i, j, partial)
        top = jnp.max(lax.stop_gradient(s), axis=-1)
        p = jnp.exp(s - _finite(top)[..., None])
        weight = jnp.sum(p, axis=-1)
        return top, weight, scores.dot(scores.dropped(p, i, j), v_j, (2, 1))

    def nothing():
        return (
            jnp.full(rows, -jnp.inf, spec.acc_dtype),
            jnp.zeros(rows, spec.acc_dtype),
            jnp.zeros((*rows, spec.v_dim), spec.acc_dtype),
        )

    def merge(i, j, partial, total):
        part = scores.unless_empty(i, j, lambda: tile(i, j, partial), nothing)
        row = _softmax_sum([at(x, i) for x in total], part)
        return tuple(
            lax.dynamic_update_index_in_dim(x, r, i, 0)
            for x, r in zip(total, row, strict=True)
        )

    if tiles.count == (1, 1):
        total = tuple(x[None] for x in tile(0, 0, not tiles.full))
    else:
        start = (jnp.stack([x] * tiles.count[0]) for x in nothing())
        total = tiles.walk(merge, tuple(start))
    if spec.sinks:
        total = _softmax_sum(_sinks(tiles, scores.sinks), total)

    top, weight, out = total
    dead = weight == 0
    weight = jnp.where(dead, 1, weight)
    out = tiles.unrows(out / weight[..., None]).astype(spec.dtype)
    lse = jnp.where(dead, -jnp.inf, _finite(top) + jnp.log(weight))
    return out, tiles.unrows(lse[..., None])[..., 0].swapaxes(1, 2)


def bwd(
    spec: AttentionSpec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    dout: jax.Array,
    *extra: jax.Array,
    block: tuple[int, int] | None = None,
) -> tuple[jax.Array, ...]:
    """See `AttentionSpec`."""
    tiles = Tiles.of(spec, block or _limit(spec, backward=True))
    scores = Scores(tiles, q, k, v, *extra)
    dout = tiles.rows(dout)
    # With +inf a dead row has p = exp(s - inf) = 0; the rows of padding are dead too.
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse).swapaxes(1, 2)[..., None]
    lse = tiles.rows(lse, padding=jnp.inf)
    delta = tiles.rows(delta.swapaxes(1, 2)[..., None])

    def tile(i, j, partial):
        """What tile (i, j) adds to dq_i, dk_j and dv_j, and its part of dbias."""
        q_i, dout_i = scores.queries(i), scores.widen(at(dout, i))
        # The scores are those of the forward pass, so that XLA can find them there.
        s, slope, k_j, v_j = scores.tile(q_i, i, j, partial)
        if partial:
            q_i, dout_i = finite(q_i), finite(dout_i)
        delta_i = at(delta, i)
        dp = scores.dropped(scores.dot(dout_i, v_j, (2, 2)), i, j)
        distance, dweight = s - at(lse, i), dp - delta_i
        if partial:
            # A row that is NaN, as its lse or delta tells, must stay so, but not at the
            # keys that it does not see. What is not finite there is hidden before it
            # multiplies, so that it does not reach the gradients of these gradients.
            seen = s != -jnp.inf
            distance = jnp.where(seen, distance, -jnp.inf)
            dweight = jnp.where(seen, dweight, 0)
            slope = slope if slope is None else jnp.where(seen, slope, 0)
        p = jnp.exp(distance)
        ds = p * dweight
        dproduct = ds if slope is None else ds * slope
        if partial:
            p = jnp.where(seen, p + 0 * delta_i, 0)
        dbias = () if spec.bias_shape is None else (ds,)
        dq = scores.dot(dproduct, k_j, (2, 1))
        dk = scores.dot(dproduct, q_i, (1, 1))
        dv = scores.dot(scores.dropped(p, i, j), dout_i, (1, 1))
        return dq, dk, dv, *dbias

    def add(i, j, partial, total):
        def visit():
            return tile(i, j, partial)

        def nothing():
            return jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(visit)
            )

        dq_i, dk_j, dv_j, *ds = scores.unless_empty(i, j, visit, nothing)
        dq, dk, dv, *dbias = total
        dbias = [
            tiles.add_to_operand(x, part, i, j)
            for x, part in zip(dbias, ds, strict=True)
        ]
        return _add_at(dq, dq_i, i), _add_at(dk, dk_j, j), _add_at(dv, dv_j, j), *dbias

    keys = tiles.count[1], spec.batch * spec.kv_heads, tiles.block[1]
    shapes = [scores.q.shape, (*keys, spec.qk_dim), (*keys, spec.v_dim)]
    if scores.bias is not None:
        shapes.append(scores.bias.shape)
    start = tuple(jnp.zeros(shape, spec.acc_dtype) for shape in shapes)
    dq, dk, dv, *dbias = tiles.walk(add, start)
    dq, dk, dv = tiles.unrows(dq * spec.scale), tiles.uncols(dk), tiles.uncols(dv)
    grads = [g.astype(spec.dtype) for g in (dq, dk, dv)]
    for x in dbias:
        b, n, t, s = spec.bias_shape
        grads.append(x[:b, :n, :t, :s].astype(extra[0].dtype))
    return tuple(grads)


def _limit(spec, backward=False):
    """The most queries and keys in a tile."""
    if backward and not spec.band.full and spec.kv_len <= _SHORT:
        return SMALL_BLOCK
    queries, keys = BLOCK
    if _has_many_heads(spec):
        queries //= 2
    return queries, keys


def _has_many_heads(spec):
    """Whether a tile holds many; a batch that is not known yet is taken for large."""
    heads = spec.batch * spec.heads
    return not isinstance(heads, int) or heads > _MANY_HEADS


def _finite(top):
    """A row maximum to subtract: -inf, of a row without keys, would make NaN."""
    return jnp.where(top == -jnp.inf, 0, top)


def _softmax_sum(a, b):
    """Sum of two (row maximum, sum of exponentials, weighted values)."""
    top = jnp.maximum(a[0], b[0])
    scale_a, scale_b = (jnp.exp(x[0] - _finite(top)) for x in (a, b))
    weight = a[1] * scale_a + b[1] * scale_b
    return top, weight, a[2] * scale_a[..., None] + b[2] * scale_b[..., None]


def _sinks(tiles, sinks):
    """The sinks as such a sum: a key of score `sink` and value 0 for every query."""
    spec = tiles.spec
    shape = spec.batch, spec.q_len, spec.heads, 1
    top = tiles.rows(jnp.broadcast_to(sinks[:, None], shape).astype(spec.acc_dtype))
    weight = jnp.where(top == -jnp.inf, 0, 1).astype(top.dtype)
    return top[..., 0], weight[..., 0], jnp.zeros((1, 1, 1, spec.v_dim), top.dtype)


def _add_at(total, part, i):
    return lax.dynamic_update_index_in_dim(total, at(total, i) + part, i, 0)
