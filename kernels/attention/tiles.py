"""Cutting the scores of one call into tiles, and its operands into matching blocks."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .spec import AttentionSpec


@dataclass(frozen=True)
class Tiles:
    """Which tiles one call has. Empty ones are in neither list.

    Blocks of queries are rows (B*K, G*block_q, F): the query heads that share a key
    head are rows of one matrix product, which therefore also sums dk and dv over them.
    Blocks of keys are columns (B*K, block_k, F).
    """

    spec: AttentionSpec
    block: tuple[int, int]  # queries, keys
    count: tuple[int, int]
    full: tuple[tuple[int, int], ...]  # every query of the tile sees every key
    partial: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, spec: AttentionSpec, limit: tuple[int, int]) -> "Tiles":
        """Cuts into tiles of at most `limit` (queries, keys)."""
        (bq, nq), (bk, nk) = _cut(spec.q_len, limit[0]), _cut(spec.kv_len, limit[1])
        full, partial = [], []
        for i in range(nq):
            for j in range(nk):
                corner = (i * bq, bq, j * bk, bk)
                # Where positions are data, so is what the band shows.
                if not (spec.positions or spec.band.meets(*corner)):
                    continue
                whole = (
                    spec.bias_shape is None
                    and spec.mask_shape is None
                    and not spec.ids
                    and not spec.positions
                    and (j + 1) * bk <= spec.kv_len
                    and spec.band.covers(*corner)
                )
                (full if whole else partial).append((i, j))
        return cls(spec, (bq, bk), (nq, nk), tuple(full), tuple(partial))

    def walk(self, visit: Callable, total: tuple[jax.Array, ...]):
        """Folds `visit(i, j, partial, total)` over the tiles, the full ones first."""
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

    def rows(self, x: jax.Array, padding: float = 0) -> jax.Array:
        """(B, T, N, F) -> (nq, B*K, G*block_q, F)."""
        spec, bq, nq = self.spec, self.block[0], self.count[0]
        pad = [(0, 0), (0, nq * bq - spec.q_len), (0, 0), (0, 0)]
        x = jnp.pad(x, pad, constant_values=padding)
        x = x.reshape(spec.batch, nq, bq, spec.kv_heads, spec.group, x.shape[-1])
        x = x.transpose(1, 0, 3, 4, 2, 5)
        return x.reshape(nq, spec.batch * spec.kv_heads, spec.group * bq, x.shape[-1])

    def unrows(self, x: jax.Array) -> jax.Array:
        """The inverse of `rows`."""
        spec, bq, nq = self.spec, self.block[0], self.count[0]
        x = x.reshape(nq, spec.batch, spec.kv_heads, spec.group, bq, x.shape[-1])
        x = x.transpose(1, 0, 4, 2, 3, 5)
        x = x.reshape(spec.batch, nq * bq, spec.heads, x.shape[-1])
        return x[:, : spec.q_len]

    def cols(self, x: jax.Array) -> jax.Array:
        """(B, S, K, F) -> (nk, B*K, block_k, F)."""
        spec, bk, nk = self.spec, self.block[1], self.count[1]
        x = jnp.pad(x, [(0, 0), (0, nk * bk - spec.kv_len), (0, 0), (0, 0)])
        x = x.reshape(spec.batch, nk, bk, spec.kv_heads, x.shape[-1])
        x = x.transpose(1, 0, 3, 2, 4)
        return x.reshape(nk, spec.batch * spec.kv_heads, bk, x.shape[-1])

    @property
    def whole_cols(self) -> bool:
        """Whether the blocks of keys fill the array, without padding."""
        return self.count[1] * self.block[1] == self.spec.kv_len

    def col_block(self, x: jax.Array, j) -> jax.Array:
        """Block j of `cols(x)`, if these are whole, without making the others."""
        bk = self.block[1]
        x = lax.dynamic_slice_in_dim(x, j * bk, bk, axis=1)
        heads = self.spec.batch * self.spec.kv_heads
        return x.swapaxes(1, 2).reshape(heads, bk, x.shape[-1])

    def uncols(self, x: jax.Array) -> jax.Array:
        """The inverse of `cols`."""
        spec, bk, nk = self.spec, self.block[1], self.count[1]
        x = x.reshape(nk, spec.batch, spec.kv_heads, bk, x.shape[-1])
        x = x.transpose(1, 0, 3, 2, 4)
        x = x.reshape(spec.batch, nk * bk, spec.kv_heads, x.shape[-1])
        return x[:, : spec.kv_len]

    def by_head(self, s: jax.Array) -> jax.Array:
        """A tile of scores (B*K, G*block_q, block_k) as (B, K, G, block_q, block_k)."""
        spec = self.spec
        return s.reshape(spec.batch, spec.kv_heads, spec.group, *self.block)

    def row_blocks(self, x: jax.Array) -> jax.Array:
        """A number for each query, (B, T) -> (nq, B, 1, 1, block_q, 1)."""
        (bq, _), (nq, _) = self.block, self.count
        x = jnp.pad(x, [(0, 0), (0, nq * bq - x.shape[1])])
        return x.reshape(x.shape[0], nq, bq).swapaxes(0, 1)[:, :, None, None, :, None]

    def col_blocks(self, x: jax.Array) -> jax.Array:
        """A number for each key, (B, S) -> (nk, B, 1, 1, 1, block_k)."""
        (_, bk), (_, nk) = self.block, self.count
        x = jnp.pad(x, [(0, 0), (0, nk * bk - x.shape[1])])
        return x.reshape(x.shape[0], nk, bk).swapaxes(0, 1)[:, :, None, None, None, :]

    def pad_operand(self, x: jax.Array) -> jax.Array:
        """Pads a bias or mask (b, n, t, s) to whole tiles on the axes that it has."""
        pads = [
            0 if size == 1 else count * block - size
            for size, count, block in zip(
                x.shape[2:], self.count, self.block, strict=True
            )
        ]
        return jnp.pad(x, [(0, 0), (0, 0), (0, pads[0]), (0, pads[1])])

    def operand(self, x: jax.Array, i, j) -> jax.Array:
        """The part of a padded bias or mask in one tile; broadcasts to `by_head`."""
        b, n, t, s = x.shape
        size = (b, n, min(t, self.block[0]), min(s, self.block[1]))
        x = lax.dynamic_slice(x, self._corner(x, i, j), size)
        heads = (1, 1) if n == 1 else (self.spec.kv_heads, self.spec.group)
        return x.reshape(b, *heads, *size[2:])

    def add_to_operand(self, total: jax.Array, ds: jax.Array, i, j) -> jax.Array:
        """Adds a tile of gradient to that of a padded bias, summed where that is 1."""
        b, n, t, s = total.shape
        # The axes of `by_head`; the heads are two of them.
        sizes = enumerate((b, n, n, t, s))
        summed = tuple(axis for axis, size in sizes if size == 1)
        ds = self.by_head(ds).sum(summed, keepdims=True)
        ds = ds.reshape(ds.shape[0], ds.shape[1] * ds.shape[2], *ds.shape[3:])
        start = self._corner(total, i, j)
        old = lax.dynamic_slice(total, start, ds.shape)
        return lax.dynamic_update_slice(total, old + ds, start)

    def _corner(self, x, i, j):
        zero = jnp.int32(0)
        row = zero if x.shape[2] == 1 else jnp.int32(i * self.block[0])
        col = zero if x.shape[3] == 1 else jnp.int32(j * self.block[1])
        return zero, zero, row, col


def _cut(length, limit):
    """(block, count): the fewest blocks of at most `limit`, as equal as may be."""
    count = -(-length // limit)
    return -(-length // count), count
