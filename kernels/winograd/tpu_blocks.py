"""How images are cut and laid out for the Winograd TPU kernels.

Images lie in sublanes, channels in lanes, rows and columns in untiled dimensions:
(H, W, N, C). The elements of a tile are then whole registers at other places, and a
small image wastes none. XLA lays out a batch of a multiple of 8 so by itself.

One step takes at most `MOST_TILES` tiles of the images of one register: part of a row
of them, or several rows of a narrow image. The window of inputs that it sees overlaps
that of its neighbours by r - 1 pixels.
"""

import dataclasses
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..conv.spec import ConvSpec
from ..tiling import LANES, SUBLANES, ceil_div, padded_bytes, round_up
from .transforms import Transform, transform

# What one kernel may take of the 64 MiB or more of vector memory of a TPU since v5, and
# how much of it its blocks: the rest is for values that do not fit registers.
VMEM_LIMIT = 60 << 20
_VMEM_BLOCKS = 48 << 20

# Tiles of an image in a step; of the 8 images of a register in fp32 they are 64: enough
# to hide that the filter is loaded for them, few enough for a row of frequencies to be
# at hand when the output transform adds it. In bfloat16 a register has twice the
# images, and a frequency one part instead of three.
MOST_TILES = 8

# Channels of a filter that are transformed together: a register of bfloat16.
CHUNK = 2 * SUBLANES


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of a correlation of x by w, or by dy for the gradient of the filter.

    Attributes:
      t: the transform of both dimensions.
      dtype: of x, and of what is computed.
      images, channels: as padded, to multiples of `batch` and of `CHUNK`.
      outputs: as they are; the last step may see more.
      batch: images of a step, as many as fill the sublanes of a register.
      rows, columns: of tiles in a step.
      steps: how many of them the rows, and the columns, of an image take.
      block_o: outputs of a step.
    """

    t: Transform
    dtype: str
    images: int
    channels: int
    outputs: int
    batch: int
    rows: int
    columns: int
    steps: tuple[int, int]
    block_o: int

    @property
    def grid(self) -> tuple[int, ...]:
        """(outputs, images, rows, columns): the filter changes least often."""
        steps_o = ceil_div(self.outputs, self.block_o)
        return steps_o, self.images // self.batch, *self.steps

    @property
    def tiles(self) -> int:
        """Rows of a product: the tiles of a step."""
        return self.rows * self.columns * self.batch

    @property
    def parts(self) -> int:
        """How many numbers of bfloat16 stand for a multiplicand."""
        return 3 if self.dtype == "float32" else 1

    @property
    def window(self) -> tuple[int, ...]:
        """The shape of what a step sees of x."""
        height, width, *_ = self.finished
        more = self.t.r - 1
        return (height + more, width + more, self.batch, self.channels)

    @property
    def finished(self) -> tuple[int, ...]:
        """The shape of a step's pixels."""
        m = self.t.m
        return (m * self.rows, m * self.columns, self.batch, self.block_o)

    @property
    def filters(self) -> tuple[int, ...]:
        """The shape of a step's filter."""
        return (self.t.r**2, self.channels, self.block_o)

    @property
    def turned(self) -> tuple[int, ...]:
        """The shape of what is transposed of a filter at once."""
        return (self.t.r**2, min(self.channels, LANES), self.block_o)

    @property
    def transformed(self) -> tuple[int, ...]:
        """The shape of one part of that, transformed."""
        return (self.t.n**2, self.channels, self.block_o)

    @property
    def fits(self) -> bool:
        """Whether there is vector memory for every kernel; what is piped, twice."""
        itemsize = jnp.dtype(self.dtype).itemsize
        pixels = self.finished
        window = 2 * padded_bytes(self.window, itemsize)
        row = self.rows * padded_bytes(self.window[1:], 4)
        sums = (self.t.m**2, self.tiles, self.block_o)
        filters = padded_bytes(self.filters, itemsize)
        forward = (
            self.parts * padded_bytes(self.transformed, 2)
            + padded_bytes(self.turned, 4)
            + 3 * 2 * padded_bytes(pixels, itemsize)  # y, z and the residual
            + padded_bytes(sums, 4)
        )
        gradient = (
            padded_bytes(self.transformed, 4)
            + 2 * padded_bytes(pixels, itemsize)
            + self.rows * padded_bytes(pixels[1:], 4)
        )
        return window + row + filters + max(forward, gradient) <= _VMEM_BLOCKS

    def window_spec(self) -> pl.BlockSpec:
        """The spec of `window`, of an x that `pad` made."""
        height, width, *_ = self.finished

        def start(o, n, h, w):
            return h * height, w * width, n * self.batch, 0

        return pl.BlockSpec(tuple(map(pl.Element, self.window)), start)

    def finished_spec(self) -> pl.BlockSpec:
        """The spec of `finished`, of an array (H, W, N, O) of any size."""
        return pl.BlockSpec(self.finished, lambda o, n, h, w: (h, w, n, o))

    def filter_spec(self) -> pl.BlockSpec:
        """The spec of `filters`, of an array (r*r, C, O): for all steps of an O."""
        return pl.BlockSpec(
            self.filters, lambda o, n, h, w: (0, 0, o), pipeline_mode=pl.Buffered(1)
        )

    def turned_spec(self) -> pl.BlockSpec:
        """The same of an array (r*r, O, C)."""
        r2, channels, outputs = self.filters
        return pl.BlockSpec(
            (r2, outputs, channels),
            lambda o, n, h, w: (0, o, 0),
            pipeline_mode=pl.Buffered(1),
        )

    def pad(self, spec: ConvSpec, x):
        """x, padded, or cropped where negative, to whole windows: (H, W, N, C)."""
        config = [(0, self.images - x.shape[0], 0)]
        for size, (lo, _), whole in zip(
            spec.spatial, spec.padding, self._whole_pixels, strict=True
        ):
            config.append((lo, whole + self.t.r - 1 - size - lo, 0))
        config.append((0, self.channels - x.shape[-1], 0))
        x = lax.pad(x, jnp.zeros((), x.dtype), config)
        return to_sublanes(x)

    def pad_pixels(self, dy):
        """dy, padded to whole blocks of pixels: (H, W, N, O)."""
        config = [(0, self.images - dy.shape[0], 0)]
        for size, whole in zip(dy.shape[1:3], self._whole_pixels, strict=True):
            config.append((0, whole - size, 0))
        dy = lax.pad(dy, jnp.zeros((), dy.dtype), [*config, (0, 0, 0)])
        return to_sublanes(dy)

    def pad_filter(self, w, axis: int = 2):
        """w, padded to whole chunks of channels, which are an axis of it: (r*r, C, O)
        or (r*r, O, C)."""
        config = [(0, 0)] * w.ndim
        config[axis] = (0, self.channels - w.shape[axis])
        w = jnp.pad(w, config)
        return w.reshape(-1, *w.shape[2:])

    @property
    def _whole_pixels(self):
        """Height and width of the pixels of all steps."""
        return [n * size for n, size in zip(self.steps, self.finished[:2], strict=True)]

    def cost(self) -> pl.CostEstimate:
        """Of the products of all tiles, for XLA's own model of the program."""
        t, tiles = self.t, self.tiles * math.prod(self.grid[1:])
        filters = t.n**2 * self.channels * self.outputs
        pixels = t.m**2 * tiles * (self.channels + self.outputs)
        itemsize = jnp.dtype(self.dtype).itemsize
        return pl.CostEstimate(
            flops=2 * tiles * filters,
            bytes_accessed=itemsize * (pixels + t.r**2 * self.channels * self.outputs),
            transcendentals=0,
        )


def blocks_of(spec: ConvSpec) -> Blocks:
    """The blocks of a correlation; F(4, 3), or for bfloat16, whose multiplicands are
    rounded, F(2, 3)."""
    t = transform(4 if spec.dtype == "float32" else 2, 3)
    image = [ceil_div(size, t.m) for size in spec.out_spatial]
    columns = _evenly(image[1], MOST_TILES)
    rows = _evenly(image[0], MOST_TILES // columns)
    batch = SUBLANES * 4 // jnp.dtype(spec.dtype).itemsize
    channels, outputs = spec.w_shape[-2:]
    blocks = Blocks(
        t=t,
        dtype=spec.dtype,
        images=round_up(spec.x_shape[0], batch),
        channels=_whole_chunks(channels),
        outputs=outputs,
        batch=batch,
        rows=rows,
        columns=columns,
        steps=(ceil_div(image[0], rows), ceil_div(image[1], columns)),
        block_o=_block_outputs(outputs),
    )
    if not blocks.fits and blocks.block_o > LANES:
        return dataclasses.replace(blocks, block_o=LANES)
    return blocks


def _evenly(count, most):
    """The least size of the fewest parts of `count` that are at most `most`."""
    return ceil_div(count, ceil_div(count, most))


def _block_outputs(outputs: int) -> int:
    """Outputs of a step: two lane tiles feed the 256-wide unit of a v6e."""
    return min(outputs, LANES) if outputs < 2 * LANES else 2 * LANES


def to_sublanes(x):
    """(N, H, W, C) with images in sublanes: (H, W, N, C)."""
    return jnp.transpose(x, (1, 2, 0, 3))


def from_sublanes(y):
    return jnp.transpose(y, (2, 0, 1, 3))


def _whole_chunks(channels):
    return round_up(channels, CHUNK if channels <= LANES else LANES)


def coefficient_specs() -> list[pl.BlockSpec]:
    """The specs of `coefficients`: scalars, read one by one."""
    return [pl.BlockSpec(memory_space=pltpu.SMEM)] * 2


def coefficients(t: Transform):
    """The matrices BT and AT."""
    return t.array("bt", jnp.float32), t.array("at", jnp.float32)
