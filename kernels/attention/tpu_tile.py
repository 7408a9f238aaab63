"""One tile of scores inside a TPU kernel.

The scores are in units of log 2: `scale * log2(e)` is folded into the queries and the
softmax takes exp2, which is the TPU's own instruction.

A block at the end of a ragged array holds garbage behind the end. It may be NaN, so
what it would meet in a product is set to zero, not only its scores.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ..tiling import LANES
from .dropout import keep
from .ranges import all_seen, may_meet
from .tpu_plan import LOG2_E, Inputs, Plan


class Tile:
    """The tile at one place of the grid, (block_q, block_k), or transposed."""

    def __init__(self, plan: Plan, inputs: Inputs, place, transposed: bool = False):
        self.plan, self.spec, self.inputs = plan, plan.spec, inputs
        self.place, self.transposed = place, transposed

    def visit(self, run: Callable, queries_end: bool = False):
        """Calls `run(partial)` unless no query of the tile sees a key.

        `queries_end` says that rows behind the last query count too, as they do where
        the sum is over queries.
        """
        meets, whole = self._visible()
        (bq, bk), spec, (_, _, i, j) = self.plan.block, self.spec, self.place
        if spec.kv_len % bk:
            whole = whole & (j < spec.kv_len // bk)
        if queries_end and spec.q_len % bq:
            whole = whole & (i < spec.q_len // bq)
        if whole is True:
            run(partial=False)
        else:
            if whole is not False:
                pl.when(whole)(lambda: run(partial=False))
                meets = meets & jnp.logical_not(whole)
            if meets is True:
                run(partial=True)
            else:
                pl.when(meets)(lambda: run(partial=True))

    def _visible(self):
        """Whether any query sees any key here, and whether every one sees all."""
        (bq, bk), spec, (_, _, i, j) = self.plan.block, self.spec, self.place
        meets = whole = True
        if not spec.positions:
            corner = (i * bq, bq, j * bk, bk)
            meets, whole = spec.band.meets(*corner), spec.band.covers(*corner)
        if spec.ids or spec.positions:
            q, kv = (
                [ref[0, column] for column in range(ref.shape[1])]
                for ref in (self.inputs.q_ranges, self.inputs.kv_ranges)
            )
            meets, whole = meets & may_meet(spec, q, kv), whole & all_seen(spec, q, kv)
        if spec.bias_shape is not None or spec.mask_shape is not None:
            whole = False
        return meets, whole

    def queries(self, q):
        """Queries such that their products with keys are what `scores` takes."""
        factor = self.spec.scale * LOG2_E
        if self.spec.softcap is not None:
            factor = self.spec.scale / self.spec.softcap
        return (q.astype(jnp.float32) * factor).astype(q.dtype)

    def scores(self, q, k):
        """Scores of `queries(q)`, and their slope by the product (None if it is 1)."""
        s = self.dot(k, q, (1, 1)) if self.transposed else self.dot(q, k, (1, 1))
        if self.spec.softcap is None:
            return s, None
        t = jnp.tanh(s)
        return t * (self.spec.softcap * LOG2_E), 1.0 - t * t

    def with_bias(self, s):
        """Scores with the bias, and which of them count."""
        seen = self._seen()
        if self.inputs.bias is not None:
            bias = self._oriented(self.inputs.bias[...].astype(jnp.float32))
            bias = jnp.broadcast_to(bias, s.shape)
            present = bias != -jnp.inf
            s, seen = s + jnp.where(present, bias * LOG2_E, 0.0), seen & present
        return s, seen

    def dropped(self, p, scaled: bool = False):
        """Dropout of the tile: of its weights, or of their cotangents.

        The factor of what is kept is left out unless `scaled`.
        """
        if self.inputs.seed is None:
            return p
        b, n, i, j = self.place
        (bq, bk), axis = self.plan.block, int(self.transposed)
        row, col = (
            start + lax.broadcasted_iota(jnp.int32, shape[:: 1 - 2 * axis], along)
            for start, shape, along in (
                (i * bq, (bq, 1), axis),
                (j * bk, (1, bk), 1 - axis),
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
        (bq, bk), (_, _, i, j), axis = self.plan.block, self.place, int(self.transposed)
        shape = (bk, bq) if self.transposed else (bq, bk)
        row = i * bq + lax.broadcasted_iota(jnp.int32, shape, axis)
        col = j * bk + lax.broadcasted_iota(jnp.int32, shape, 1 - axis)
        inside = (col < spec.kv_len) & (row < spec.q_len)
        if spec.positions:
            row = self._along_queries(inputs.q_positions)
            col = self._along_keys(inputs.kv_positions)
        seen = spec.band.visible(row, col) & inside
        if spec.ids:
            seen = seen & (
                self._along_queries(inputs.q_ids) == self._along_keys(inputs.kv_ids)
            )
        if inputs.mask is not None:
            mask = self._oriented(inputs.mask[...].astype(jnp.int32))
            seen = seen & (jnp.broadcast_to(mask, shape) != 0)
        return seen

    def _along_queries(self, ref):
        return ref[...] if self.transposed else column(ref[...])

    def _along_keys(self, ref):
        return column(ref[...]) if self.transposed else ref[...]

    def _oriented(self, x):
        """Part of a bias or mask, (block_q or 1, block_k or 1), in the tile's axes."""
        if not self.transposed:
            return x
        if x.shape[0] == 1:
            return column(x)
        if x.shape[1] == 1:
            return jnp.broadcast_to(x, (x.shape[0], LANES)).T[:1]
        return x.T


def column(row):
    """(1, L) as (L, 1)."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]


def finite(x):
    """`x` with 0 for what is NaN or infinite."""
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
