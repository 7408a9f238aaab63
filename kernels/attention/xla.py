"""Flash attention in plain XLA operations: tiles of scores, never all of them.

The list of tiles that are not empty is known before any data, so one `lax.scan` walks
over exactly these, first the full tiles, which need no mask, then the partial ones.
The order is the same in every run, and so are the bits. A scan of known length also
keeps both passes differentiable by JAX.

Forward: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
Backward: Dao et al., "FlashAttention", 2022, algorithm 4, all gradients in one walk.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .spec import AttentionSpec, fence

# A tile of this many queries and keys is large enough for the matrix products, and its
# scores still lie in the caches of a CPU while softmax passes over them.
_BLOCK_Q = 256
_BLOCK_K = 512


def fwd(
    spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, *extra: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See `AttentionSpec`."""
    tiles = _Tiles.of(spec)
    call = _Call(spec, tiles, q, k, v, *extra)

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
    out = jnp.where(dead[..., None], 0, out / weight[..., None])
    lse = jnp.where(dead, -jnp.inf, _finite(top) + jnp.log(weight))
    return call.unrows(out).astype(spec.dtype), call.unrows_of_one(lse)


def bwd(
    spec: AttentionSpec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    dout: jax.Array,
    *extra: jax.Array,
) -> tuple[jax.Array, ...]:
    """See `AttentionSpec`."""
    tiles = _Tiles.of(spec)
    call = _Call(spec, tiles, q, k, v, *extra)
    dout = call.rows(dout)
    # With +inf a dead row has p = exp(s - inf) = 0; rows of padding are dead too.
    lse = call.rows_of_one(jnp.where(lse == -jnp.inf, jnp.inf, lse), jnp.inf)
    delta = call.rows_of_one(delta, 0)

    def tile(i, j, partial, total):
        s, k_j, v_j = call.scores(i, j, partial)
        q_i, dout_i = call.q_block(i), call.widen(_at(dout, i))
        p = jnp.exp(s - _at(lse, i)[..., None])
        ds = p * (call.dot(dout_i, v_j, (2, 2)) - _at(delta, i)[..., None])
        if partial:
            # A row that is NaN must stay so, but not at the keys that it does not see.
            seen = s != -jnp.inf
            p, ds = jnp.where(seen, p, 0), jnp.where(seen, ds, 0)
        dq, dk, dv, *dbias = total
        dq = _add_at(dq, call.dot(ds, k_j, (2, 1)), i)
        dk = _add_at(dk, call.dot(ds, q_i, (1, 1)), j)
        dv = _add_at(dv, call.dot(p, dout_i, (1, 1)), j)
        if dbias:
            dbias = [call.add_to_bias(dbias[0], ds, i, j)]
        return (dq, dk, dv, *dbias)

    start = [
        jnp.zeros(call.q.shape, spec.acc_dtype),
        jnp.zeros(call.k.shape, spec.acc_dtype),
        jnp.zeros(call.v.shape, spec.acc_dtype),
    ]
    if call.bias is not None:
        start.append(jnp.zeros(call.bias.shape, spec.acc_dtype))
    dq, dk, dv, *dbias = tiles.walk(tile, tuple(start))
    dq, dk, dv = call.unrows(dq * spec.scale), call.uncols(dk), call.uncols(dv)
    grads = [g.astype(spec.dtype) for g in (dq, dk, dv)]
    if dbias:
        b, n, t, s = spec.bias_shape
        grads.append(dbias[0][:b, :n, :t, :s].astype(extra[0].dtype))
    return tuple(grads)


@dataclass(frozen=True)
class _Tiles:
    """How the scores of one call are cut."""

    block: tuple[int, int]  # queries, keys
    count: tuple[int, int]
    full: tuple[tuple[int, int], ...]  # the tiles that every query sees whole
    partial: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, spec: AttentionSpec) -> "_Tiles":
        (bq, nq), (bk, nk) = _cut(spec.q_len, _BLOCK_Q), _cut(spec.kv_len, _BLOCK_K)
        full, partial = [], []
        for i in range(nq):
            for j in range(nk):
                corner = (i * bq, bq, j * bk, bk)
                if not spec.band.meets(*corner):
                    continue
                whole = (
                    spec.bias_shape is None
                    and spec.mask_shape is None
                    and (j + 1) * bk <= spec.kv_len
                    and spec.band.covers(*corner)
                )
                (full if whole else partial).append((i, j))
        return cls((bq, bk), (nq, nk), tuple(full), tuple(partial))

    def walk(self, visit: Callable, total: tuple[jax.Array, ...]):
        """Folds `visit(i, j, partial, total)` over the tiles."""
        for tiles, partial in ((self.full, False), (self.partial, True)):
            if len(tiles) == 1:
                total = visit(*tiles[0], partial, total)
            elif tiles:
                total, _ = lax.scan(
                    lambda acc, ij, partial=partial: (visit(*ij, partial, acc), None),
                    total,
                    tuple(np.array(tiles, np.int32).T),
                )
        return total


class _Call:
    """The operands of one call, cut into blocks that lie whole in memory.

    Query blocks are (nq, B*K, G*block_q, H): the query heads that share a key head are
    rows of one matrix product, which therefore also sums dk and dv over them.
    """

    def __init__(self, spec, tiles, q, k, v, *extra):
        self.spec, self.tiles = spec, tiles
        self.q, self.k, self.v = self.rows(q), self.cols(k), self.cols(v)
        bias, mask = spec.split(extra)
        self.bias, self.mask = self._pad_scores(bias), self._pad_scores(mask)

    def widen(self, x):
        return x.astype(self.spec.acc_dtype)

    def q_block(self, i):
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
            return self.dot(self.q_block(i), k, (2, 2)), k, v
        k, v, poison = fence(k, v)
        s = self.dot(self.q_block(i), k, (2, 2)) + poison[:, None, :]
        heads = self._by_head(s)
        seen = self._seen(i, j)
        if self.bias is not None:
            bias = self.widen(self._scores_block(self.bias, i, j))
            present = bias != -jnp.inf
            seen = seen & present
            heads = heads + jnp.where(present, bias, 0)
        return jnp.where(seen, heads, -jnp.inf).reshape(s.shape), k, v

    def add_to_bias(self, total, ds, i, j):
        """Adds the gradient of one tile to that of the bias, summed where that is 1."""
        ds = self._by_head(ds)
        shape = self._scores_block(self.bias, i, j).shape
        ds = ds.sum(tuple(a for a, n in enumerate(shape) if n == 1), keepdims=True)
        ds = ds.reshape(ds.shape[0], ds.shape[1] * ds.shape[2], *ds.shape[3:])
        start = self._corner(total, i, j)
        old = lax.dynamic_slice(total, start, ds.shape)
        return lax.dynamic_update_slice(total, old + ds, start)

    def _by_head(self, s):
        spec, (bq, bk) = self.spec, self.tiles.block
        return s.reshape(spec.batch, spec.kv_heads, spec.group, bq, bk)

    def _seen(self, i, j):
        (bq, bk), spec = self.tiles.block, self.spec
        row = i * bq + lax.broadcasted_iota(jnp.int32, (1, 1, 1, bq, 1), 3)
        col = j * bk + lax.broadcasted_iota(jnp.int32, (1, 1, 1, 1, bk), 4)
        seen = spec.band.visible(row, col) & (col < spec.kv_len)
        if self.mask is not None:
            seen = seen & self._scores_block(self.mask, i, j)
        return seen

    def _pad_scores(self, x):
        """Pads an operand (b,n,t,s) to whole tiles on the axes that it has."""
        if x is None:
            return None
        wanted = [
            c * b for c, b in zip(self.tiles.count, self.tiles.block, strict=True)
        ]
        pads = [
            0 if n == 1 else w - n for n, w in zip(x.shape[2:], wanted, strict=True)
        ]
        return jnp.pad(x, [(0, 0), (0, 0), (0, pads[0]), (0, pads[1])])

    def _corner(self, x, i, j):
        bq, bk = self.tiles.block
        zero = jnp.int32(0)
        row = zero if x.shape[2] == 1 else jnp.int32(i * bq)
        col = zero if x.shape[3] == 1 else jnp.int32(j * bk)
        return zero, zero, row, col

    def _scores_block(self, x, i, j):
        """The part of a padded operand in one tile, as (b, K or 1, G or 1, t, s)."""
        bq, bk = self.tiles.block
        b, n, t, s = x.shape
        size = (b, n, 1 if t == 1 else bq, 1 if s == 1 else bk)
        x = lax.dynamic_slice(x, self._corner(x, i, j), size)
        heads = (1, 1) if n == 1 else (self.spec.kv_heads, self.spec.group)
        return x.reshape(b, *heads, *size[2:])

    def rows(self, x):
        """(B,T,N,F) -> (nq, B*K, G*block_q, F), zeros behind T."""
        spec, bq, nq = self.spec, self.tiles.block[0], self.tiles.count[0]
        x = jnp.pad(x, [(0, 0), (0, nq * bq - spec.q_len), (0, 0), (0, 0)])
        x = x.reshape(spec.batch, nq, bq, spec.kv_heads, spec.group, x.shape[-1])
        x = x.transpose(1, 0, 3, 4, 2, 5)
        return x.reshape(nq, spec.batch * spec.kv_heads, spec.group * bq, x.shape[-1])

    def unrows(self, x):
        spec, bq, nq = self.spec, self.tiles.block[0], self.tiles.count[0]
        x = x.reshape(nq, spec.batch, spec.kv_heads, spec.group, bq, x.shape[-1])
        x = x.transpose(1, 0, 4, 2, 3, 5)
        return x.reshape(spec.batch, nq * bq, spec.heads, x.shape[-1])[:, : spec.q_len]

    def rows_of_one(self, x, padding):
        """(B,N,T) -> (nq, B*K, G*block_q)."""
        spec, bq, nq = self.spec, self.tiles.block[0], self.tiles.count[0]
        x = jnp.pad(
            x,
            [(0, 0), (0, 0), (0, nq * bq - spec.q_len)],
            constant_values=padding,
        )
        x = x.reshape(spec.batch, spec.kv_heads, spec.group, nq, bq)
        x = x.transpose(3, 0, 1, 2, 4)
        return x.reshape(nq, spec.batch * spec.kv_heads, spec.group * bq)

    def unrows_of_one(self, x):
        spec, bq, nq = self.spec, self.tiles.block[0], self.tiles.count[0]
        x = x.reshape(nq, spec.batch, spec.kv_heads, spec.group, bq)
        x = x.transpose(1, 2, 3, 0, 4)
        return x.reshape(spec.batch, spec.heads, nq * bq)[..., : spec.q_len]

    def cols(self, x):
        """(B,S,K,F) -> (nk, B*K, block_k, F), zeros behind S."""
        spec, bk, nk = self.spec, self.tiles.block[1], self.tiles.count[1]
        x = jnp.pad(x, [(0, 0), (0, nk * bk - spec.kv_len), (0, 0), (0, 0)])
        x = x.reshape(spec.batch, nk, bk, spec.kv_heads, x.shape[-1]).transpose(
            1, 0, 3, 2, 4
        )
        return x.reshape(nk, spec.batch * spec.kv_heads, bk, x.shape[-1])

    def uncols(self, x):
        spec, bk, nk = self.spec, self.tiles.block[1], self.tiles.count[1]
        x = x.reshape(nk, spec.batch, spec.kv_heads, bk, x.shape[-1]).transpose(
            1, 0, 3, 2, 4
        )
        return x.reshape(spec.batch, nk * bk, spec.kv_heads, x.shape[-1])[
            :, : spec.kv_len
        ]


def _cut(length, limit):
    """(block, count): the fewest blocks of at most `limit`, as equal as may be."""
    count = -(-length // limit)
    return -(-length // count), count


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
