"""Images as the depthwise TPU kernels see them: blocks, a padded buffer, its taps.

An image is (row, column, channel): channels lie in lanes, columns in sublanes, rows in
an untiled dimension; so a tap is a load at another row or sublane of the buffer. A
signal of one dimension is an image of one row.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..tiling import LANES, SUBLANES, padded_bytes, round_up
from .spec import ConvSpec

# What one kernel may take of the 128 MiB of vector memory of a v5e or v6e core.
VMEM_LIMIT = 96 << 20

# Outputs that are computed at a time: vector registers of sums, and rows at most.
_SUMS = 32
_ROWS = 8


def as_image(spec: ConvSpec) -> ConvSpec:
    """The same convolution in two dimensions."""
    if spec.rank == 2:
        return spec
    (n, length, c), (k, one, o) = spec.x_shape, spec.w_shape
    return dataclasses.replace(
        spec,
        x_shape=(n, 1, length, c),
        w_shape=(1, k, one, o),
        strides=(1, *spec.strides),
        padding=((0, 0), *spec.padding),
        dilation=(1, *spec.dilation),
    )


def block_channels(spec: ConvSpec) -> int:
    return min(spec.x_shape[-1], LANES)


def image_block(spatial: tuple[int, ...], channels: int) -> pl.BlockSpec:
    """One image of some channels, for a grid (channels, images)."""
    return pl.BlockSpec((1, *spatial, channels), lambda c, n: (n, 0, 0, c))


def channels_block(rows: int, channels: int) -> pl.BlockSpec:
    """What some channels have for all images: (rows, channels)."""
    return pl.BlockSpec((rows, channels), lambda c, n: (0, c))


def buffer(spec: ConvSpec) -> pltpu.VMEM:
    return pltpu.VMEM(_buffer_shape(spec), jnp.float32)


def vmem(spec: ConvSpec) -> int:
    """Bytes of the blocks, each twice, and of the buffer."""
    itemsize, lanes = jnp.dtype(spec.dtype).itemsize, (block_channels(spec),)
    blocks = padded_bytes((*spec.spatial, *lanes), itemsize)
    # y, and at most z and the residual beside it.
    blocks += 3 * padded_bytes((*spec.out_spatial, *lanes), itemsize)
    return 2 * blocks + padded_bytes(_buffer_shape(spec), 4)


def compiler_params() -> pltpu.CompilerParams:
    # In order, for the buffer keeps its zeros from step to step.
    return pltpu.CompilerParams(
        dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
    )


def cost(spec: ConvSpec) -> pl.CostEstimate:
    itemsize = jnp.dtype(spec.dtype).itemsize
    moved = math.prod(spec.x_shape) + math.prod(spec.y_shape)
    return pl.CostEstimate(
        flops=2 * spec.macs, bytes_accessed=moved * itemsize, transcendentals=0
    )


def most_columns(spec: ConvSpec) -> int:
    """Columns that are computed at a time: whole registers."""
    columns = round_up(spec.out_spatial[1], SUBLANES)
    return min(columns, _SUMS * SUBLANES // _most_rows(spec))


def _most_rows(spec):
    """Rows that are computed at a time, so that a load serves several taps."""
    return min(spec.out_spatial[0], _ROWS)


def _buffer_shape(spec):
    height, width = spec.out_spatial
    rows, columns = (e - 1 for e in spec.extent)
    width = round_up(width, SUBLANES) + columns
    return height + rows, width, block_channels(spec)


# In kernel bodies.


def fill(buffer_ref, x_ref, spec: ConvSpec) -> None:
    """Puts the image in fp32 into the middle of the buffer; its padding is zero."""
    # The same elements are written in every step; the others stay zero.
    is_first = (pl.program_id(0) == 0) & (pl.program_id(1) == 0)

    @pl.loop(0, jnp.where(is_first, buffer_ref.shape[0], 0))
    def _(row):
        buffer_ref[row] = jnp.zeros(buffer_ref.shape[1:], buffer_ref.dtype)

    rows, columns = (
        _overlap(size, lo, out + extent - 1)
        for size, (lo, _), out, extent in zip(
            spec.spatial, spec.padding, spec.out_spatial, spec.extent, strict=True
        )
    )
    (source, row, count), (first, column, width) = rows, columns
    if count and width:

        def copy(i, rows):
            part = x_ref[0, pl.ds(source + i, rows), first : first + width]
            buffer_ref[pl.ds(row + i, rows), column : column + width] = f32(part)

        _in_steps(count, _most_rows(spec), copy)


def _overlap(size, lo, padded):
    """Which part of a dimension is met: its start there, in the buffer, its length."""
    source, start = max(0, -lo), max(0, lo)
    return source, start, max(0, min(size - source, padded - start))


def taps(buffer_ref, row, rows: int, start, columns: int, spec: ConvSpec) -> Iterator:
    """What each tap k meets for `columns` columns from `start` of each row.

    Yields (k, i, what tap k meets for row `row + i`); each is loaded once for the taps
    of one column.
    """
    (height, width), (down, across) = spec.kernel, spec.dilation
    for source in range(rows + (height - 1) * down):
        uses = [
            (p, source - p * down)
            for p in range(height)
            if 0 <= source - p * down < rows
        ]
        for q in range(width if uses else 0):
            tap = buffer_ref[row + source, pl.ds(start + q * across, columns)]
            for p, i in uses:
                yield p * width + q, i, tap


def by_blocks(spec: ConvSpec, do: Callable) -> None:
    """Calls `do(row, rows, start, size, columns)` for blocks of outputs.

    A block has `size` columns, which lie in `columns`, whole registers.
    """
    height, width = spec.out_spatial

    def block(row, rows, start, size):
        do(row, rows, start, size, round_up(size, SUBLANES))

    def rows_of_blocks(row, rows):
        _in_steps(width, most_columns(spec), functools.partial(block, row, rows))

    _in_steps(height, _most_rows(spec), rows_of_blocks)


def f32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _in_steps(length, block, do):
    """Calls `do(start, size)` for whole blocks, and for what is left at the end."""
    whole = length // block
    if whole == 1:
        do(0, block)
    elif whole:

        @pl.loop(0, whole)
        def _(k):
            do(pl.multiple_of(k * block, block), block)

    if length % block:
        do(whole * block, length % block)
