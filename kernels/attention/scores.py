"""The operands of one call in tiles, and the scores that they make, in XLA."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .dropout import keep
from .ranges import block_ranges, may_meet
from .spec import fence, finite
from .tiles import Tiles


class Tile(NamedTuple):
    """One tile of scores, (B*K, G*block_q, block_k), and the keys that made it."""

    s: jax.Array  # scores, -inf for hidden keys
    slope: jax.Array | None  # of s by the product of queries and keys; None if it is 1
    k: jax.Array  # (B*K, block_k, H)
    v: jax.Array  # (B*K, block_k, Hv)


class Scores:
    """The scores of one call, tile by tile."""

    def __init__(self, tiles: Tiles, q, k, v, *extra):
        self.spec, self.tiles = tiles.spec, tiles
        self.q = tiles.rows(q)
        # Keys that are visited once are cut out where they are used: an empty tile of a
        # long cache then costs nothing.
        self._in_place = tiles.count[0] == 1 and tiles.whole_cols
        self.k, self.v = (k, v) if self._in_place else (tiles.cols(k), tiles.cols(v))
        extra = self.spec.split(extra)
        self.bias, self.mask = (
            x if x is None else tiles.pad_operand(x) for x in (extra.bias, extra.mask)
        )
        self.sinks, self.seed = extra.sinks, extra.seed
        self._row_data = [
            None if x is None else tiles.row_blocks(x)
            for x in (extra.q_ids, extra.q_positions)
        ]
        self._col_data = [
            None if x is None else tiles.col_blocks(x)
            for x in (extra.kv_ids, extra.kv_positions)
        ]
        self._live = self._find_live(extra)

    def widen(self, x):
        return x.astype(self.spec.acc_dtype)

    def queries(self, i):
        """Block i of the scaled queries, (B*K, G*block_q, H)."""
        return self.widen(at(self.q, i)) * self.spec.scale

    def dot(self, a, b, contract):
        """Product of every head, summed over one axis of each operand."""
        if contract[0] == 1:
            # A transpose that XLA folds into a product costs it, on a CPU, the faster
            # one of its kernels.
            a, contract = lax.optimization_barrier(a.swapaxes(1, 2)), (2, contract[1])
        dims = (((contract[0],), (contract[1],)), ((0,), (0,)))
        return lax.dot_general(a, b, dims, precision=self.spec.precision)

    def tile(self, q_i, i, j, partial: bool) -> Tile:
        """Tile (i, j) for its scaled queries; `partial` unless all of it counts."""
        k, v = self._keys(self.k, j), self._keys(self.v, j)
        if not partial:
            s, slope = self._capped(self.dot(q_i, k, (2, 2)))
            return Tile(s, slope, k, v)
        # A key that is not finite makes its products so: 0 times them is its poison.
        # Therefore `product` is that of the keys as they are; only what multiplies k
        # after this, the backward pass, gets it without what is not finite.
        product = _product(self.spec.precision, q_i, k)
        k, (v, poison) = finite(k), fence(v)
        # Where it is NaN the slope would be too, though no query may see the key.
        s, slope = self._capped(
            product if self.spec.softcap is None else finite(product)
        )
        heads = self.tiles.by_head(s + product * 0 + poison[:, None, :])
        seen = self._seen(i, j)
        if self.bias is not None:
            bias = self.widen(self.tiles.operand(self.bias, i, j))
            present = bias != -jnp.inf
            seen = seen & present
            heads = heads + jnp.where(present, bias, 0)
        return Tile(jnp.where(seen, heads, -jnp.inf).reshape(s.shape), slope, k, v)

    def dropped(self, p, i, j):
        """Dropout of tile (i, j): of its weights, or of their cotangents."""
        if self.seed is None:
            return p
        spec = self.spec
        heads = jnp.arange(spec.batch * spec.heads, dtype=jnp.int32)
        heads = heads.reshape(spec.batch, spec.kv_heads, spec.group, 1, 1)
        seed = self.seed[0], self.seed[1]
        kept = keep(seed, heads, *self._indices(i, j), spec.dropout_rate)
        return jnp.where(kept.reshape(p.shape), p * spec.keep_scale, 0)

    def _keys(self, x, j):
        if self._in_place:
            return self.widen(self.tiles.col_block(x, j))
        return self.widen(at(x, j))

    def unless_empty(self, i, j, visit: Callable, empty: Callable):
        """`visit()`, or `empty()` if ids and positions hide all of tile (i, j)."""
        if self._live is None:
            return visit()
        return lax.cond(self._live[i, j], visit, empty)

    def _capped(self, s):
        cap = self.spec.softcap
        if cap is None:
            return s, None
        t = jnp.tanh(s * (1 / cap))
        return cap * t, 1 - t * t

    def _indices(self, i, j):
        bq, bk = self.tiles.block
        row = i * bq + lax.broadcasted_iota(jnp.int32, (1, 1, 1, bq, 1), 3)
        col = j * bk + lax.broadcasted_iota(jnp.int32, (1, 1, 1, 1, bk), 4)
        return row, col

    def _seen(self, i, j):
        spec = self.spec
        row, col = self._indices(i, j)
        seen = col < spec.kv_len
        if self.tiles.count[0] * self.tiles.block[0] != spec.q_len:
            # Queries of padding see nothing: a key that is NaN would make dk so.
            seen = seen & (row < spec.q_len)
        (q_ids, q_positions), (kv_ids, kv_positions) = self._row_data, self._col_data
        if spec.positions:
            row, col = at(q_positions, i), at(kv_positions, j)
        seen = seen & spec.band.visible(row, col)
        if spec.ids:
            seen = seen & (at(q_ids, i) == at(kv_ids, j))
        if self.mask is not None:
            seen = seen & self.tiles.operand(self.mask, i, j)
        return seen

    def _find_live(self, extra):
        """(nq, nk): which tiles any query of the batch may see a key in, or None."""
        spec, (bq, bk) = self.spec, self.tiles.block
        if self.tiles.count == (1, 1) or not (spec.ids or spec.positions):
            return None
        q = block_ranges(extra.q_ids, extra.q_positions, bq)[:, :, None]
        kv = block_ranges(extra.kv_ids, extra.kv_positions, bk)[:, None, :]
        live = may_meet(spec, jnp.unstack(q, axis=-1), jnp.unstack(kv, axis=-1))
        return live.any(0)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _product(precision, q, k):
    """q k^T of every head; what is not finite multiplies no tangent.

    A hidden key has a cotangent of 0, but 0 * NaN is NaN in the gradient of q.
    """
    dims = ((2,), (2,)), ((0,), (0,))
    return lax.dot_general(q, k, dims, precision=precision)


@_product.defjvp
def _product_jvp(precision, primals, tangents):
    (q, k), (dq, dk) = primals, tangents
    product = functools.partial(_product, precision)
    return product(q, k), product(dq, finite(k)) + product(finite(q), dk)


def at(x, i):
    """Block i of a stack of blocks."""
    return lax.dynamic_index_in_dim(x, i, 0, keepdims=False)
