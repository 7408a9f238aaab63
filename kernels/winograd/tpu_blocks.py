"""How images are cut into blocks and laid out for the Winograd TPU kernels.

Channels lie in lanes, tile columns in sublanes, image rows in untiled dimensions, split
as (tile row, row of the tile). Element j of every tile along a row is then a load with
sublane stride m, and tiles are put back together by a store with the same stride; both
work on one tile of 128 lanes at a time. A block of m * rows input rows needs r - 1 rows
of the next block; they come as a second, m rows high view of the same array.
"""

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..conv.spec import ConvSpec
from ..tiling import LANES, SUBLANES, ceil_div, padded_bytes, round_up
from .transforms import Transform, transform

# What one kernel may take of the 128 MiB of vector memory of a v5e or v6e core, and how
# much of it the blocks are sized for: the rest is for values that do not fit registers.
VMEM_LIMIT = 96 << 20
_VMEM_BLOCKS = 24 << 20


def transform_of(spec: ConvSpec) -> Transform:
    """F(4, 3), or for bfloat16, whose multiplicands are rounded, F(2, 3)."""
    return transform(4 if spec.dtype == "float32" else 2, 3)


def block_outputs(outputs: int) -> int:
    """Output channels per block: two lane tiles feed the 256-wide unit of a v6e."""
    return min(outputs, LANES) if outputs < 2 * LANES else 2 * LANES


def tiles_of(out_spatial, t) -> tuple[int, int]:
    """Tile rows and tile columns; columns in whole sublane tiles, so that (rows,
    columns, C) is a matrix of tiles by channels without moving data."""
    height, width = out_spatial
    return ceil_div(height, t.m), round_up(ceil_div(width, t.m), SUBLANES)


def rows_per_step(t, tiles_h, tiles_w, channels, block_o) -> int:
    """The most tile rows whose buffers fit the budget beside the transformed filter."""
    width = t.m * tiles_w + SUBLANES
    per_row = (
        # the block twice (double buffered), its fp32 copy, one transformed row
        (3 * t.m + 1) * padded_bytes((width, channels), 4)
        # accumulators, the finished block, the output block twice
        + 4 * t.m * t.m * padded_bytes((tiles_w, block_o), 4)
    )
    filters = 2 * t.n * t.n * padded_bytes((channels, block_o), 4)
    most = max(1, (_VMEM_BLOCKS - min(filters, _VMEM_BLOCKS)) // per_row)
    steps = ceil_div(tiles_h, min(most, tiles_h))
    return ceil_div(tiles_h, steps)  # steps of even height waste the fewest rows


def pad(x, pads, tiles_h, tiles_w, t, halo):
    """Pads, or crops where negative, to whole blocks: (N, tile rows, m, W, C).

    A halo is one more tile row, and columns in whole sublane tiles.
    """
    config = [(0, 0, 0)]
    wanted = (
        t.m * (tiles_h + (1 if halo else 0)),
        t.m * tiles_w + (SUBLANES if halo else 0),
    )
    for size, lo, want in zip(x.shape[1:-1], pads, wanted, strict=True):
        config.append((lo, want - size - lo, 0))
    x = lax.pad(x, jnp.zeros((), x.dtype), [*config, (0, 0, 0)])
    x = pad_lanes(x, -1)
    return x.reshape(x.shape[0], -1, t.m, *x.shape[2:])


def pad_lanes(x, axis):
    """Pads channels to whole lane tiles, where they are more than one."""
    channels = x.shape[axis]
    extra = round_up(channels, LANES) - channels if channels > LANES else 0
    config = [(0, 0, 0)] * x.ndim
    config[axis] = (0, extra, 0)
    return lax.pad(x, jnp.zeros((), x.dtype), config)


def image_specs(shape, rows, position):
    """The specs of an image block and of its halo; `position(*grid)` is (n, h)."""

    def block(*grid):
        n, h = position(*grid)
        return n, h, 0, 0, 0

    def halo(*grid):
        n, h = position(*grid)
        return n, (h + 1) * rows, 0, 0, 0

    return (
        pl.BlockSpec((1, rows, *shape[2:]), block),
        pl.BlockSpec((1, 1, *shape[2:]), halo),
    )


def coefficient_specs() -> list[pl.BlockSpec]:
    """The specs of `coefficients`: scalars, read one by one."""
    return [pl.BlockSpec(memory_space=pltpu.SMEM)] * 2


def coefficients(t):
    """The matrices BT and AT."""
    return t.array("bt", jnp.float32), t.array("at", jnp.float32)


def by_lane_tiles(rows, width, channels) -> pltpu.VMEM:
    """A buffer (lane tile, row, column, up to 128 channels), for strided columns."""
    lanes = min(channels, LANES)
    return pltpu.VMEM((channels // lanes, rows, width, lanes), jnp.float32)


def cost(t, tiles, spec) -> pl.CostEstimate:
    """Of the products of all tiles, for XLA's own model of the program."""
    channels, outputs = spec.w_shape[-2:]
    itemsize = jnp.dtype(spec.dtype).itemsize
    pixels = t.m * t.m * tiles
    return pl.CostEstimate(
        flops=2 * t.n * t.n * tiles * channels * outputs,
        bytes_accessed=itemsize
        * (pixels * (channels + outputs) + t.n * t.n * math.prod(spec.w_shape[-2:])),
        transcendentals=0,
    )
