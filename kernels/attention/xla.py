"""Flash attention in plain XLA operations: tiles of scores, never all of them.

The list of tiles that are not empty is known before any data, so one `lax.scan` walks
over exactly these, first the full tiles, which need no mask, then the partial ones.
The order is the same in every run, and so are the bits. A scan of known length also
keeps both passes differentiable by JAX.

Forward: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
Backward: Dao et al., "FlashAttention", 2022, algorithm 4, all gradients in one walk.
"""

import jax
import jax.numpy as jnp
from jax import lax

from .spec import AttentionSpec, fence
from .tiles import Tiles

# At most this many queries and keys in a tile: large enough for the matrix products,
# while its scores still lie in the caches of a CPU as softmax passes over them.
BLOCK = (256, 512)


def fwd(
    spec: AttentionSpec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *extra: jax.Array,
    block: tuple[int, int] = BLOCK,
) -> tuple[jax.Array, jax.Array]:
    """See `AttentionSpec`."""
    tiles = Tiles.of(spec, block)
    call = _Call(tiles, q, k, v, *extra)

    def tile(i, j, partial):
        s, _, v_j = call.scores(i, j, partial)
        top = jnp.max(lax.stop_gradient(s), axis=-1)
        p = jnp.exp(s - _finite(top)[..., None])
        return top, jnp.sum(p, axis=-1), call.dot(p, v_j, (2, 1))

    def merge(i, j, partial, total):
        row = _softmax_sum([_at(x, i) for x in total], tile(i, j, partial))
        return tuple(
            lax.dynamic_update_index_in_dim(x, r, i, 0)
            for x, r in zip(total, row, strict=True)
        )

    if tiles.count == (1, 1):
        total = tuple(x[None] for x in tile(0, 0, not tiles.full))
    else:
        rows = call.q.shape[:3]
        start = (
            jnp.full(rows, -jnp.inf, spec.acc_dtype),
            jnp.zeros(rows, spec.acc_dtype),
            jnp.zeros((*rows, spec.v_dim), spec.acc_dtype),
        )
        total = tiles.walk(merge, start)

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
    block: tuple[int, int] = BLOCK,
) -> tuple[jax.Array, ...]:
    """See `AttentionSpec`."""
    tiles = Tiles.of(spec, block)
    call = _Call(tiles, q, k, v, *extra)
    dout = tiles.rows(dout)
    # With +inf a dead row has p = exp(s - inf) = 0; the rows of padding are dead too.
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse).swapaxes(1, 2)[..., None]
    lse = tiles.rows(lse, padding=jnp.inf)
    delta = tiles.rows(delta.swapaxes(1, 2)[..., None])

    def tile(i, j, partial, total):
        s, k_j, v_j = call.scores(i, j, partial)
        q_i, dout_i = call.queries(i), call.widen(_at(dout, i))
        p = jnp.exp(s - _at(lse, i))
        ds = p * (call.dot(dout_i, v_j, (2, 2)) - _at(delta, i))
        if partial:
            # A row that is NaN must stay so, but not at the keys that it does not see.
            seen = s != -jnp.inf
            p, ds = jnp.where(seen, p, 0), jnp.where(seen, ds, 0)
        dq, dk, dv, *dbias = total
        dq = _add_at(dq, call.dot(ds, k_j, (2, 1)), i)
        dk = _add_at(dk, call.dot(ds, q_i, (1, 1)), j)
        dv = _add_at(dv, call.dot(p, dout_i, (1, 1)), j)
        return (dq, dk, dv, *(tiles.add_to_operand(x, ds, i, j) for x in dbias))

    shapes = [x.shape for x in (call.q, call.k, call.v, call.bias) if x is not None]
    start = tuple(jnp.zeros(shape, spec.acc_dtype) for shape in shapes)
    dq, dk, dv, *dbias = tiles.walk(tile, start)
    dq, dk, dv = tiles.unrows(dq * spec.scale), tiles.uncols(dk), tiles.uncols(dv)
    grads = [g.astype(spec.dtype) for g in (dq, dk, dv)]
    for x in dbias:
        b, n, t, s = spec.bias_shape
        grads.append(x[:b, :n, :t, :s].astype(extra[0].dtype))
    return tuple(grads)


class _Call:
    """The operands of one call in blocks, and the scores that they make."""

    def __init__(self, tiles, q, k, v, *extra):
        self.spec, self.tiles = tiles.spec, tiles
        self.q, self.k, self.v = tiles.rows(q), tiles.cols(k), tiles.cols(v)
        self.bias, self.mask = (
            x if x is None else tiles.pad_operand(x) for x in self.spec.split(extra)
        )

    def widen(self, x):
        return x.astype(self.spec.acc_dtype)

    def queries(self, i):
        return self.widen(_at(self.q, i)) * self.spec.scale

    def dot(self, a, b, contract):
        """Product of every head, summed over one axis of each operand."""
        dims = (((contract[0],), (contract[1],)), ((0,), (0,)))
        return lax.dot_general(a, b, dims, precision=self.spec.precision)

    def scores(self, i, j, partial):
        """One tile: scores with -inf for hidden keys, and the tile's keys and values.

        Returns s (B*K, G*block_q, block_k), k (B*K, block_k, H), v (B*K, block_k, Hv).
        """
        k, v = self.widen(_at(self.k, j)), self.widen(_at(self.v, j))
        if not partial:
            return self.dot(self.queries(i), k, (2, 2)), k, v
        k, v, poison = fence(k, v)
        s = self.dot(self.queries(i), k, (2, 2)) + poison[:, None, :]
        heads = self.tiles.by_head(s)
        seen = self._seen(i, j)
        if self.bias is not None:
            bias = self.widen(self.tiles.operand(self.bias, i, j))
            present = bias != -jnp.inf
            seen = seen & present
            heads = heads + jnp.where(present, bias, 0)
        return jnp.where(seen, heads, -jnp.inf).reshape(s.shape), k, v

    def _seen(self, i, j):
        (bq, bk), spec = self.tiles.block, self.spec
        row = i * bq + lax.broadcasted_iota(jnp.int32, (1, 1, 1, bq, 1), 3)
        col = j * bk + lax.broadcasted_iota(jnp.int32, (1, 1, 1, 1, bk), 4)
        seen = spec.band.visible(row, col) & (col < spec.kv_len)
        if self.mask is not None:
            seen = seen & self.tiles.operand(self.mask, i, j)
        return seen


def _finite(top):
    """A row maximum to subtract: -inf, of a row without keys, would make NaN."""
    return jnp.where(top == -jnp.inf, 0, top)


def _softmax_sum(a, b):
    """Sum of two (row maximum, sum of exponentials, weighted values)."""
    top = jnp.maximum(a[0], b[0])
    scale_a, scale_b = (jnp.exp(x[0] - _finite(top)) for x in (a, b))
    weight = a[1] * scale_a + b[1] * scale_b
    return top, weight, a[2] * scale_a[..., None] + b[2] * scale_b[..., None]


def _at(x, i):
    return lax.dynamic_index_in_dim(x, i, 0, keepdims=False)


def _add_at(total, part, i):
    return lax.dynamic_update_index_in_dim(total, _at(total, i) + part, i, 0)
