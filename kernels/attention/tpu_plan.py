"""How one call of attention is cut into a grid of blocks on a TPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..tiling import LANES, round_up
from .ranges import block_ranges
from .spec import AttentionSpec, Extra, in_log2

# At most this many queries in a block, keys in a block, and keys in a strip.
#
# A kernel works on one strip of keys at a time; its scores are 4 MiB of VMEM forward,
# 2 MiB backward. The strips of a block are unrolled into one stretch of code, in which
# the products of a strip overlap with the softmax of its neighbours: a longer stretch
# keeps the matrix unit busy for a greater part of the time.
FORWARD = (1024, 4096, 1024)
BACKWARD = (1024, 4096, 512)

# Where what is seen has an edge, larger tiles would hold more that is hidden.
_WITH_EDGES = (512, 4096, 512)

# A bias or mask of all scores brings blocks as large as the scores, twice.
_BLOCK_WITH_SCORES = (512, 1024, 512)

# Bytes of one head's features for which queries and strips of this size fit beside
# each other, and for which a whole block of keys does, with its gradients; larger heads
# get smaller ones.
_STRIP_HEAD_BYTES = 512
_BLOCK_HEAD_BYTES = 256

# The greatest `shrinkage`: the smallest of the blocks above is one of LANES then.
MOST_SHRINKAGE = 4

# What a kernel may use of the 64 MiB and more of VMEM of every TPU since v5. The
# compiler would allow itself 16 MiB.
_VMEM = 32 * 2**20


class Inputs(NamedTuple):
    """The operands of `Extra` as kernels take them; None where the call has none."""

    bias: jax.Array | None = None  # as in `Extra`, float32 or bfloat16
    mask: jax.Array | None = None  # as in `Extra`, integers
    q_ids: jax.Array | None = None  # (B, 1, T)
    kv_ids: jax.Array | None = None  # (B, 1, S)
    q_positions: jax.Array | None = None  # (B, 1, T)
    kv_positions: jax.Array | None = None  # (B, 1, S)
    q_ranges: jax.Array | None = None  # (B, query blocks, 1, 2 or 4), see `ranges`
    kv_ranges: jax.Array | None = None  # (B, key blocks, pieces of a block, 2 or 4)
    # Two axes, so that there are two whole ones beside a mapped axis as well.
    sinks: jax.Array | None = None  # (1, N), in units of log 2
    seed: jax.Array | None = None  # (1, 2)

    @property
    def present(self) -> tuple:
        return tuple(x for x in self if x is not None)

    def take(self, refs: tuple) -> tuple["Inputs", tuple]:
        """References to those that are present, and the rest of `refs`."""
        rest = iter(refs)
        mine = Inputs(*(None if x is None else next(rest) for x in self))
        return mine, tuple(rest)


@dataclass(frozen=True)
class Plan:
    """The blocks of one call, and what its kernels have in common.

    A block of keys consists of strips, which a kernel takes whole where no query of the
    block needs a mask. Elsewhere it goes by pieces, so that little of what is hidden is
    computed.

    A kernel's `place` gives (b, n, i, j) of its grid indices: batch, query head, block
    of queries, block of keys.
    """

    spec: AttentionSpec
    block: tuple[int, int]
    strip: int
    interpret: bool

    @classmethod
    def of(
        cls, spec: AttentionSpec, limit: tuple[int, int, int], interpret: bool
    ) -> "Plan":
        """Blocks and strips of at most `limit`, and of whole registers of lanes."""
        for shape in (spec.bias_shape, spec.mask_shape):
            if shape is not None and 1 not in shape[2:]:
                limit = tuple(map(min, limit, _BLOCK_WITH_SCORES))
        most_queries, most_keys, most_strip = limit
        shrink = shrinkage(spec)
        block_q = _even_part(spec.q_len, most_queries // shrink)
        strip = _even_part(spec.kv_len, most_strip // shrink)
        strips = pl.cdiv(spec.kv_len, strip)
        head_bytes = round_up(_features(spec), LANES) * spec.dtype.itemsize
        most_keys = most_keys // pl.cdiv(head_bytes, _BLOCK_HEAD_BYTES)
        blocks = pl.cdiv(strips, max(most_keys // strip, 1))
        return cls(spec, (block_q, pl.cdiv(strips, blocks) * strip), strip, interpret)

    @property
    def strips(self) -> int:
        """How many a block of keys has."""
        return self.block[1] // self.strip

    @property
    def piece(self) -> int:
        """Keys of a piece: half a strip, if that is whole registers of lanes.

        No fewer than there are queries: of a diagonal they would see all pieces.
        """
        halved = self.strip > self.block[0] and self.strip % (2 * LANES) == 0
        return self.strip // 2 if halved else self.strip

    @property
    def pieces(self) -> int:
        """How many a block of keys has."""
        return self.block[1] // self.piece

    @property
    def count(self) -> tuple[int, int]:
        return (
            pl.cdiv(self.spec.q_len, self.block[0]),
            pl.cdiv(self.spec.kv_len, self.block[1]),
        )

    def inputs(self, extra: Extra) -> Inputs:
        """The operands as kernels take them."""
        bias, mask = extra.bias, extra.mask
        if bias is not None and (bias.dtype != jnp.bfloat16 or 1 in bias.shape[2:]):
            bias = bias.astype(jnp.float32)
        if mask is not None:
            mask = mask.astype(jnp.int32 if 1 in mask.shape[2:] else jnp.int8)
        vectors = extra[2:6]
        ranges = (None, None)
        if self.spec.ids or self.spec.positions:
            ranges = (
                block_ranges(extra.q_ids, extra.q_positions, self.block[0])[:, :, None],
                self._key_ranges(extra.kv_ids, extra.kv_positions),
            )
        sinks, seed = extra.sinks, extra.seed
        if sinks is not None:
            sinks = sinks[None].astype(jnp.float32)
            sinks = jnp.where(sinks == -jnp.inf, sinks, in_log2(sinks))
        return Inputs(
            bias,
            mask,
            *(x if x is None else x[:, None, :] for x in vectors),
            *ranges,
            sinks,
            None if seed is None else seed[None],
        )

    def _key_ranges(self, ids, positions):
        """(B, key blocks, pieces, columns): the ranges of each piece."""
        x = block_ranges(ids, positions, self.piece)
        missing = -x.shape[1] % self.pieces
        x = jnp.pad(x, [(0, 0), (0, missing), (0, 0)], mode="edge")
        return x.reshape(x.shape[0], -1, self.pieces, x.shape[2])

    def input_specs(self, inputs: Inputs, place: Callable) -> list[pl.BlockSpec]:
        """Block specs of the inputs that are present."""

        def scores(x):
            sizes = tuple(
                1 if n == 1 else block
                for n, block in zip(x.shape[2:], self.block, strict=True)
            )

            def index(*grid):
                return tuple(
                    0 if n == 1 else at
                    for n, at in zip(x.shape, place(*grid), strict=True)
                )

            return pl.BlockSpec((None, None, *sizes), index)

        def vector(axis):
            def index(*grid):
                where = place(*grid)
                return where[0], 0, where[2 + axis]

            return pl.BlockSpec((None, 1, self.block[axis]), index)

        def ranges(x, axis):
            def index(*grid):
                where = place(*grid)
                return where[0], where[2 + axis], 0, 0

            return pl.BlockSpec(
                (None, None, *x.shape[2:]), index, memory_space=pltpu.SMEM
            )

        whole = pl.BlockSpec(memory_space=pltpu.SMEM)
        make = Inputs(
            bias=scores,
            mask=scores,
            q_ids=lambda x: vector(0),
            kv_ids=lambda x: vector(1),
            q_positions=lambda x: vector(0),
            kv_positions=lambda x: vector(1),
            q_ranges=lambda x: ranges(x, 0),
            kv_ranges=lambda x: ranges(x, 1),
            sinks=lambda x: whole,
            seed=lambda x: whole,
        )
        return [f(x) for f, x in zip(make, inputs, strict=True) if x is not None]

    def rows(self, features: int, place: Callable) -> pl.BlockSpec:
        """A block of queries, of an array (B, N, T, features)."""

        def index(*grid):
            b, n, i, _ = place(*grid)
            return b, n, i, 0

        return pl.BlockSpec((None, None, self.block[0], features), index)

    def keys(self, features: int, place: Callable) -> pl.BlockSpec:
        """A block of keys, of an array (B, K, S, features)."""

        def index(*grid):
            b, n, _, j = place(*grid)
            return b, lax.div(n, self.spec.group), j, 0

        return pl.BlockSpec((None, None, self.block[1], features), index)

    def stats(self, place: Callable) -> pl.BlockSpec:
        """A number for each query of a block, of an array (B, N, 1, T)."""

        def index(*grid):
            b, n, i, _ = place(*grid)
            return b, n, 0, i

        return pl.BlockSpec((None, None, 1, self.block[0]), index)

    def by_queries(self, b, n, i, j):
        """The place on a grid (B, N, query block, key block).

        Of an empty tile the keys are those that are there already: none are fetched.
        """
        band, last = self._band_of_indices(), self.count[1] - 1
        bq, bk = self.block
        if band.upper is not None:
            end = i * bq + bq - 1 + band.upper
            j = jnp.minimum(j, jnp.clip(lax.div(end, bk), 0, last))
        if band.lower is not None:
            start = jnp.maximum(i * bq + band.lower, 0)
            j = jnp.maximum(j, jnp.minimum(lax.div(start, bk), last))
        return b, n, i, j

    def by_keys(self, b, n, step, j):
        """The place on a grid (B, K, query head of the key's and block), for one j.

        The last axis walks over the query heads of a key head, and in each over its
        blocks of queries.
        """
        band, (nq, _) = self._band_of_indices(), self.count
        bq, bk = self.block
        i = lax.rem(step, nq)
        if band.upper is not None:
            start = jnp.maximum(j * bk - band.upper, 0)
            i = jnp.maximum(i, jnp.minimum(lax.div(start, bq), nq - 1))
        if band.lower is not None:
            end = j * bk + bk - 1 - band.lower
            i = jnp.minimum(i, jnp.clip(lax.div(end, bq), 0, nq - 1))
        return b, self.query_head(n, step), i, j

    def query_head(self, n, step):
        """The query head of a step on the grid of `by_keys`."""
        return n * self.spec.group + lax.div(step, self.count[0])

    def _band_of_indices(self):
        return type(self.spec.band)() if self.spec.positions else self.spec.band


def largest_block(
    spec: AttentionSpec, whole: tuple[int, int, int]
) -> tuple[int, int, int]:
    """`whole` (`FORWARD` or `BACKWARD`), unless some tiles may be seen in part."""
    edges = spec.ids or spec.bias_shape or spec.mask_shape or not spec.band.full
    return _WITH_EDGES if edges else whole


def shrinkage(spec: AttentionSpec) -> int:
    """By how much the blocks must be smaller for the size of the heads."""
    return pl.cdiv(_features(spec) * spec.dtype.itemsize, _STRIP_HEAD_BYTES)


def _features(spec):
    return max(spec.qk_dim, spec.v_dim)


def _even_part(length, most):
    """The size of the fewest equal parts of at most `most`, in whole registers."""
    parts = pl.cdiv(length, max(most // LANES, 1) * LANES)
    return round_up(pl.cdiv(length, parts), LANES)


def compiler_params(parallel: int = 3, arbitrary: int = 1) -> pltpu.CompilerParams:
    """For a grid whose first axes are independent and whose last are summed over."""
    return pltpu.CompilerParams(
        dimension_semantics=("parallel",) * parallel + ("arbitrary",) * arbitrary,
        vmem_limit_bytes=_VMEM,
    )
