"""Images as the depthwise TPU kernels see them: strips, a padded buffer, its taps.

An image is (row, column, channel): channels lie in lanes, columns in sublanes, rows in
an untiled dimension; so a tap is a load at another row or sublane of the buffer. A
signal of one dimension is an image of one row.

A kernel's grid is (channels, images, strips). The image comes whole, in the first of
its strips; row by row it is copied into the buffer, ahead of the block of rows that is
computed. A store has a slot of its own in a bundle, so within the arithmetic it is
free, if the compiler sees that no load needs what it writes: all rows of a block
are counted from one.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..tiling import LANES, SUBLANES, ceil_div, padded_bytes, round_up
from .spec import ConvSpec

# What one kernel may take of the 128 MiB of vector memory of a v5e or v6e core.
VMEM_LIMIT = 96 << 20

# Outputs that are computed at a time: vector registers of sums, and rows at most.
_SUMS = 32
_ROWS = 8

# Vector registers of outputs in a strip, at least: what a grid step costs is little
# beside them. More would leave more of the last image to be written after all else.
_STRIP = 384

# Vector registers that are copied at a time before the first block.
_COPIED = 64


@dataclass(frozen=True)
class Image:
    """A convolution in two dimensions, and how many channels a grid step takes."""

    spec: ConvSpec
    channels: int

    @property
    def height(self) -> int:
        return self.spec.out_spatial[0]

    @property
    def width(self) -> int:
        return self.spec.out_spatial[1]

    @property
    def rows(self) -> int:
        """Rows that are computed at a time, so that a load serves several taps."""
        even = [r for r in range(_ROWS // 2, _ROWS + 1) if self.height % r == 0]
        # Of 8 and 7, that which leaves most ways to cut an image into strips.
        even.sort(key=lambda r: (self.height // r % 2 == 0, r))
        return even[-1] if even else min(self.height, _ROWS)

    @property
    def ahead(self) -> int:
        """Rows that are met below those of one output."""
        return self.spec.extent[0] - 1

    @property
    def strip(self) -> int:
        """Rows in a strip: few, for its transfers run beside the steps before it."""
        registers = ceil_div(self.width, SUBLANES) * ceil_div(self.channels, LANES)
        whole = [
            rows
            for rows in range(self.rows, self.height, self.rows)
            if self.height % rows == 0 and rows * registers >= _STRIP
        ]
        return min(whole, default=self.height)

    @property
    def columns(self) -> int:
        """Columns that are computed at a time: whole registers."""
        columns = round_up(self.width, SUBLANES)
        return min(columns, _SUMS // self.rows * SUBLANES)

    @property
    def grid(self) -> tuple[int, int, int]:
        n, *_, c = self.spec.x_shape
        return ceil_div(c, self.channels), n, self.height // self.strip

    def image_block(self) -> pl.BlockSpec:
        """x of one image."""
        shape = (1, *self.spec.spatial, self.channels)
        return pl.BlockSpec(shape, lambda c, n, s: (n, 0, 0, c))

    def strip_block(self, channels: int) -> pl.BlockSpec:
        """A strip of what has y's rows and columns."""
        shape = (1, self.strip, self.width, channels)
        return pl.BlockSpec(shape, lambda c, n, s: (n, s, 0, c))

    def channels_block(self, rows: int) -> pl.BlockSpec:
        """What some channels have for all images: (rows, channels)."""
        return pl.BlockSpec((rows, self.channels), lambda c, n, s: (0, c))

    @property
    def buffer_shape(self) -> tuple[int, int, int]:
        """Of the padded image; the last block copies rows beyond it, of zeros."""
        width = round_up(self.width, SUBLANES) + self.spec.extent[1] - 1
        return self.height + self.ahead + self.rows, width, self.channels

    @property
    def vmem(self) -> int:
        """Bytes of the blocks, each twice, and of the buffer."""
        itemsize = jnp.dtype(self.spec.dtype).itemsize
        blocks = padded_bytes((*self.spec.spatial, self.channels), itemsize)
        # y, and at most z and the residual beside it.
        blocks += 3 * padded_bytes((self.strip, self.width, self.channels), itemsize)
        return 2 * blocks + padded_bytes(self.buffer_shape, 4)

    def met(self) -> list[tuple[int, int, int]]:
        """Of rows and of columns: the first that is met, where in the buffer it comes,
        and how many are met."""
        spec, each = self.spec, []
        for size, (lo, _), out, extent in zip(
            spec.spatial, spec.padding, spec.out_spatial, spec.extent, strict=True
        ):
            first, start = max(0, -lo), max(0, lo)
            count = min(size - first, out + extent - 1 - start)
            each.append((first, start, max(0, count)))
        if any(count == 0 for *_, count in each):
            # Then nothing is copied, and all of a row is left to be zeroed.
            return [(0, 0, 0)] * 2
        return each


def as_image(spec: ConvSpec) -> Image:
    """The same convolution in two dimensions, 128 channels a step."""
    channels = min(spec.x_shape[-1], LANES)
    if spec.rank == 2:
        return Image(spec, channels)
    (n, length, c), (k, one, o) = spec.x_shape, spec.w_shape
    spec = dataclasses.replace(
        spec,
        x_shape=(n, 1, length, c),
        w_shape=(1, k, one, o),
        strides=(1, *spec.strides),
        padding=((0, 0), *spec.padding),
        dilation=(1, *spec.dilation),
    )
    return Image(spec, channels)


def compiler_params() -> pltpu.CompilerParams:
    # In order, for the buffer is kept from step to step.
    return pltpu.CompilerParams(
        dimension_semantics=("arbitrary",) * 3, vmem_limit_bytes=VMEM_LIMIT
    )


def cost(spec: ConvSpec) -> pl.CostEstimate:
    itemsize = jnp.dtype(spec.dtype).itemsize
    moved = math.prod(spec.x_shape) + math.prod(spec.y_shape)
    return pl.CostEstimate(
        flops=2 * spec.macs, bytes_accessed=moved * itemsize, transcendentals=0
    )


# In kernel bodies.


def begin(buffer_ref, x_ref, image: Image) -> None:
    """In the first strip of an image, puts what its first block meets into the buffer:
    in fp32, and zeros for its padding. Those left and right of all images stay."""
    _, (_, left, width) = image.met()
    ids = [pl.program_id(axis) == 0 for axis in range(3)]
    is_first = functools.reduce(jnp.logical_and, ids)

    # No row that is copied covers these.
    @pl.loop(0, jnp.where(is_first, buffer_ref.shape[0], 0))
    def _(row):
        for start, end in ((0, left), (left + width, buffer_ref.shape[1])):
            if start < end:
                zeros = jnp.zeros((end - start, image.channels), buffer_ref.dtype)
                buffer_ref[row, start:end] = zeros

    def copy_first():
        registers = ceil_div(width, SUBLANES) * ceil_div(image.channels, LANES)

        def copy(start, size):
            for i in range(size):
                _copy(buffer_ref, x_ref, start + i, image)

        _in_steps(image.ahead + image.rows, max(1, _COPIED // max(1, registers)), copy)

    if image.strip == image.height:
        copy_first()
    else:
        pl.when(ids[-1])(copy_first)


def _copy(buffer_ref, x_ref, row, image):
    """Makes a row of the buffer what the image has there, or zeros."""
    (first, start, count), (column, left, width) = image.met()
    if not width:
        return
    source = first + jnp.clip(row - start, 0, count - 1)
    part = x_ref[0, source, column : column + width]
    is_there = (row >= start) & (row < start + count)
    part = jnp.where(is_there, part, jnp.zeros_like(part))
    buffer_ref[row, left : left + width] = f32(part)


def by_blocks(buffer_ref, x_ref, image: Image, do: Callable) -> None:
    """Calls `do(row, rows, start, size, lanes, taps)` for blocks of outputs of a strip.

    A block has `rows` rows from `row` of the strip, `size` columns from `start`, and a
    slice of lanes. `taps` yields (k, i, what tap k meets for row `row + i`), in whole
    registers of columns.
    """
    above = pl.program_id(2) * image.strip

    def rows_of_blocks(row, rows):
        is_last = rows < image.rows or image.rows == image.height
        left = [] if is_last else [image.ahead + rows + i for i in range(image.rows)]

        def copy():
            if left:
                _copy(buffer_ref, x_ref, above + row + left.pop(0), image)

        for lane in range(0, image.channels, LANES):
            lanes = slice(lane, min(lane + LANES, image.channels))

            def block(start, size, lanes=lanes):
                # A loop's body must not use up what is to be copied once.
                between = copy if isinstance(start, int) else lambda: None
                taps = _taps(
                    buffer_ref, above + row, rows, start, size, lanes, between, image
                )
                do(row, rows, start, size, lanes, taps)

            _in_steps(image.width, image.columns, block)
        while left:
            copy()

    _in_steps(image.strip, image.rows, rows_of_blocks)


def _taps(buffer_ref, row, rows, start, size, lanes, between, image) -> Iterator:
    (height, width), (down, across) = image.spec.kernel, image.spec.dilation
    columns = round_up(size, SUBLANES)
    for source in range(rows + (height - 1) * down):
        uses = [
            (p, source - p * down)
            for p in range(height)
            if 0 <= source - p * down < rows
        ]
        for q in range(width if uses else 0):
            # Loaded once for the taps of one column.
            where = row + source, pl.ds(start + q * across, columns), lanes
            tap = buffer_ref[where]
            for p, i in uses:
                yield p * width + q, i, tap
        between()


def f32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _in_steps(length: int, block: int, do: Callable) -> None:
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
