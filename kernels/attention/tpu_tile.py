"""One tile of scores inside a TPU kernel: a block of queries by a part of the keys.

The scores are in units of log 2: `scale * log2(e)` is folded into the queries and the
softmax takes exp2, which is the TPU's own instruction.

A block at the end of a ragged array holds garbage behind the end. It may be NaN, so
what it would meet in a product is set to zero, not only its scores.
"""

import jax.numpy as jnp
from jax import lax

from ..tiling import LANES
from .dropout import keep
from .spec import GREATEST, LOG2_E
from .tpu_plan import Inputs, Plan


class Tile:
    """The tile of one place of the grid and some of its keys, (block_q, keys.size).

    Or transposed. `keys` is a slice of the block of keys.
    """

    def __init__(self, plan: Plan, inputs: Inputs, place, keys, transposed=False):
        self.plan, self.spec, self.inputs = plan, plan.spec, inputs
        self.place, self.keys, self.transposed = place, keys, transposed

    def scores(self, q, k):
        """Scores of `scaled(q)`, and their slope by the product (None if it is 1)."""
        s = self.dot(k, q, (1, 1)) if self.transposed else self.dot(q, k, (1, 1))
        if self.spec.softcap is None:
            return s, None
        t = jnp.tanh(s)
        return t * (self.spec.softcap * LOG2_E), 1.0 - t * t

    def with_bias(self, s):
        """Scores with the bias, and which of them count."""
        seen = self._seen()
        if self.inputs.bias is not None:
            bias = self._oriented(self._part(self.inputs.bias).astype(jnp.float32))
            bias = jnp.broadcast_to(bias, s.shape)
            present = bias != -jnp.inf
            # `in_log2` but for its other end, which would cost as much again: a bias of
            # more than 2.3e38 becomes infinite, so that its row is NaN.
            s, seen = s + jnp.maximum(bias * LOG2_E, -GREATEST), seen & present
        return s, seen

    def dropped(self, p, scaled: bool = False):
        """Dropout of the tile: of its weights, or of their cotangents.

        The factor of what is kept is left out unless `scaled`.
        """
        if self.inputs.seed is None:
            return p
        b, n, i, _ = self.place
        bq, axis = self.plan.block[0], int(self.transposed)
        row, col = (
            start + lax.broadcasted_iota(jnp.int32, shape[:: 1 - 2 * axis], along)
            for start, shape, along in (
                (i * bq, (bq, 1), axis),
                (self._first_key, (1, self.keys.size), 1 - axis),
            )
        )
        seed = self.inputs.seed[0, 0], self.inputs.seed[0, 1]
        head = jnp.int32(b * self.spec.heads + n)
        kept = keep(seed, head, row, col, self.spec.dropout_rate)
        return jnp.where(kept, p * self.spec.keep_scale if scaled else p, 0.0)

    def dot(self, a, b, contract):
        dims = (((contract[0],), (contract[1],)), ((), ()))
        # Products of bfloat16 are exact in one pass.
        exact = self.spec.dtype != jnp.float32
        return lax.dot_general(
            a,
            b,
            dims,
            precision=lax.Precision.DEFAULT if exact else self.spec.precision,
            preferred_element_type=jnp.float32,
        )

    def _seen(self):
        """Which scores of the tile count."""
        spec, inputs = self.spec, self.inputs
        bq, i, axis = self.plan.block[0], self.place[2], int(self.transposed)
        shape = (bq, self.keys.size)[:: 1 - 2 * axis]
        row = i * bq + lax.broadcasted_iota(jnp.int32, shape, axis)
        col = self._first_key + lax.broadcasted_iota(jnp.int32, shape, 1 - axis)
        inside = True
        if spec.kv_len % self.plan.block[1]:
            inside = col < spec.kv_len
        if spec.q_len % bq:
            inside = inside & (row < spec.q_len)
        if spec.positions:
            row = self._along_queries(inputs.q_positions)
            col = self._along_keys(inputs.kv_positions)
        seen = spec.band.visible(row, col) & inside
        if spec.ids:
            seen = seen & (
                self._along_queries(inputs.q_ids) == self._along_keys(inputs.kv_ids)
            )
        if inputs.mask is not None:
            mask = self._oriented(self._part(inputs.mask).astype(jnp.int32))
            seen = seen & (jnp.broadcast_to(mask, shape) != 0)
        return seen

    @property
    def _first_key(self):
        return self.place[3] * self.plan.block[1] + self.keys.start

    def _part(self, ref):
        """What belongs to these keys, of a bias or mask or of a row for all keys."""
        return ref[...] if ref.shape[1] == 1 else ref[:, self.keys]

    def _along_queries(self, ref):
        return ref[...] if self.transposed else column(ref[...])

    def _along_keys(self, ref):
        return column(self._part(ref)) if self.transposed else self._part(ref)

    def _oriented(self, x):
        """Part of a bias or mask, (block_q or 1, block_k or 1), in the tile's axes."""
        if not self.transposed:
            return x
        if x.shape[0] == 1:
            return column(x)
        if x.shape[1] == 1:
            return jnp.broadcast_to(x, (x.shape[0], LANES)).T[:1]
        return x.T


def scaled(spec, q):
    """Queries such that their products with keys are what `Tile.scores` takes."""
    factor = spec.scale * LOG2_E
    if spec.softcap is not None:
        factor = spec.scale / spec.softcap
    return (q.astype(jnp.float32) * factor).astype(q.dtype)


def column(row):
    """(1, L) as (L, 1)."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]


def finite(x):
    """`spec.finite`, by operations that every TPU has in bfloat16 too."""
    return where(jnp.abs(x.astype(jnp.float32)) < jnp.inf, x)


def where(condition, x):
    """`x` or 0. Selected in float32: not every TPU compares and selects in bfloat16."""
    return jnp.where(condition, x.astype(jnp.float32), 0.0).astype(x.dtype)


def poison(x):
    """(1, rows): NaN for each row of `x` that holds NaN or infinity, else 0."""
    ones = jnp.ones((8, x.shape[1]), x.dtype)
    zeros = (x.astype(jnp.float32) * 0.0).astype(x.dtype)
    dims = (((1,), (1,)), ((), ()))
    return lax.dot_general(ones, zeros, dims, preferred_element_type=jnp.float32)[:1]
