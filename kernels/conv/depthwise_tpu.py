"""Depthwise convolution as a Pallas TPU kernel: one or two dimensions, stride 1.

One grid step takes one image of 128 channels whole: copies it in fp32 into the middle
of a padded buffer, and computes row by row

    y[i, j, c] = sum_{p, q} buffer[i + d p, j + d' q, c] w[p, q, c]

on the vector unit. Channels lie in lanes, columns in sublanes, rows in an untiled
dimension; so a tap is a load at another row or sublane. A signal of one dimension is an
image of one row. Every element is read from HBM once and written once. dx is the same
kernel over dy with the flipped filter. dw keeps one vector of partial sums for every
tap.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..tiling import LANES, SUBLANES, ceil_div, padded_bytes, result_type, round_up
from .epilogue import empty_sum, finish
from .spec import ConvSpec
from .windows import transpose_filter

# What one kernel may take of the 128 MiB of vector memory of a v5e or v6e core.
_VMEM_LIMIT = 96 << 20

# Outputs that are computed at a time: vector registers of sums, and rows at most.
_SUMS = 32
_ROWS = 8


def refuses(spec: ConvSpec) -> str | None:
    """Why `spec` cannot be done, or None."""
    if spec.dtype not in ("float32", "bfloat16"):
        return f"takes float32 and bfloat16 only, got {spec.dtype}"
    if spec.rank == 3:
        return "takes one or two spatial dimensions only, got 3"
    if not spec.is_depthwise or spec.w_shape[-1] != spec.groups:
        return (
            "takes groups = C = O only, more than one; got "
            f"groups={spec.groups}, C = {spec.x_shape[-1]}, O = {spec.w_shape[-1]}"
        )
    if any(s != 1 for s in spec.strides):
        return f"takes no strides, got {spec.strides}"
    if max(_vmem(_as_image(s)) for s in (spec, _adjoint(spec))) > _VMEM_LIMIT:
        return f"takes images that fit vector memory only, got {spec.spatial}"
    return None


def forward(
    spec: ConvSpec,
    x: jax.Array,
    w: jax.Array,
    b: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    interpret: bool,
):
    """y = activation(conv(x, w) + b + residual)."""
    if spec.is_empty:
        return empty_sum(spec, b, residual)
    return _correlate(spec, x, w, b, residual, interpret)


def input_gradient(
    spec: ConvSpec, w: jax.Array, dy: jax.Array, *, interpret: bool
) -> jax.Array:
    """dx, by the same kernel on dy with the flipped filter."""
    if spec.is_empty:
        return jnp.zeros(spec.x_shape, spec.dtype)
    filter_ = transpose_filter(spec, w)
    return _correlate(_adjoint(spec), dy, filter_, None, None, interpret)


def weight_gradient(
    spec: ConvSpec, x: jax.Array, dy: jax.Array, *, interpret: bool
) -> jax.Array:
    """dw, summed over the images in one block."""
    if spec.is_empty:
        return jnp.zeros(spec.w_shape, spec.dtype)
    w_shape, spec = spec.w_shape, _as_image(spec)
    block_c, taps = _block_c(spec), math.prod(spec.kernel)
    dw = pl.pallas_call(
        functools.partial(_weight_gradient_kernel, spec=spec),
        grid=(ceil_div(spec.x_shape[-1], block_c), spec.x_shape[0]),
        in_specs=[_image(spec.spatial, block_c), _image(spec.out_spatial, block_c)],
        out_specs=pl.BlockSpec((taps, block_c), lambda c, n: (0, c)),
        out_shape=result_type((taps, spec.x_shape[-1]), jnp.float32),
        scratch_shapes=[
            _buffer(spec, block_c),
            pltpu.VMEM((_chunk(spec), block_c), jnp.float32),
            pltpu.VMEM((taps, SUBLANES, block_c), jnp.float32),
        ],
        compiler_params=_params("arbitrary"),
        cost_estimate=_cost(spec),
        interpret=interpret,
        name="depthwise_weight_gradient",
    )(x.reshape(spec.x_shape), dy.reshape(spec.y_shape))
    return dw.reshape(w_shape).astype(spec.dtype)


def _correlate(spec, x, w, b, residual, interpret):
    shape, spec = spec.y_shape, _as_image(spec)
    block_c, taps = _block_c(spec), math.prod(spec.kernel)
    y_spec = _image(spec.out_spatial, block_c)
    y_type = result_type(spec.y_shape, spec.dtype)
    b = jnp.zeros(w.shape[-1], x.dtype) if b is None else b
    more = [] if residual is None else [residual.reshape(spec.y_shape)]
    outs = pl.pallas_call(
        functools.partial(_correlate_kernel, spec=spec, has_residual=bool(more)),
        grid=(ceil_div(spec.x_shape[-1], block_c), spec.x_shape[0]),
        in_specs=[
            _image(spec.spatial, block_c),
            pl.BlockSpec((taps, block_c), lambda c, n: (0, c)),
            pl.BlockSpec((1, block_c), lambda c, n: (0, c)),
            *([y_spec] if more else []),
        ],
        out_specs=[y_spec] * (1 + spec.keep_preactivation),
        out_shape=[y_type] * (1 + spec.keep_preactivation),
        scratch_shapes=[_buffer(spec, block_c)],
        compiler_params=_params("arbitrary"),
        cost_estimate=_cost(spec),
        interpret=interpret,
        name="depthwise_correlate",
    )(x.reshape(spec.x_shape), w.reshape(taps, -1), b[None], *more)
    outs = [out.reshape(shape) for out in outs]
    return tuple(outs) if spec.keep_preactivation else outs[0]


# Kernel bodies. An image is (row, column, channel).


def _correlate_kernel(x_ref, w_ref, b_ref, *refs, spec: ConvSpec, has_residual: bool):
    """y (1, Ho, Wo, C) from x (1, H, W, C), w (taps, C) and b (1, C).

    After b comes the residual, if there is one; y, and z if the spec keeps it; and the
    padded image as scratch.
    """
    residual_ref = refs[0] if has_residual else None
    *y_refs, buffer_ref = refs[has_residual:]
    _fill(buffer_ref, x_ref, spec)
    chunk = _chunk(spec)
    weights = _f32(w_ref[...])
    bias = _f32(b_ref[...])

    def store(row, rows, start, size):
        sums = [0] * rows
        for k, i, tap in _taps(buffer_ref, row, rows, start, chunk, spec):
            sums[i] += tap * weights[k : k + 1]
        for i in range(rows):
            where = (0, row + i, pl.ds(start, size))
            more = residual_ref[where] if has_residual else None
            outs = finish(spec, sums[i][:size] + bias, residual=more)
            outs = outs if spec.keep_preactivation else (outs,)
            for ref, out in zip(y_refs, outs, strict=True):
                ref[where] = out

    _by_blocks(spec, store)


def _weight_gradient_kernel(
    x_ref, dy_ref, dw_ref, buffer_ref, dy_row_ref, sums_ref, *, spec: ConvSpec
):
    """dw (taps, C), summed over the images of the grid's inner dimension."""
    _fill(buffer_ref, x_ref, spec)
    chunk = _chunk(spec)

    @pl.when(pl.program_id(1) == 0)
    def _():
        sums_ref[...] = jnp.zeros_like(sums_ref)

    def add(row, rows, start, size):
        dy_rows = []
        for i in range(rows):
            # Zeros beyond the last column.
            if size < chunk:
                dy_row_ref[...] = jnp.zeros_like(dy_row_ref)
            dy_row_ref[:size] = _f32(dy_ref[0, row + i, pl.ds(start, size)])
            dy_rows.append(dy_row_ref[...])
        sums = [0] * math.prod(spec.kernel)
        for k, i, tap in _taps(buffer_ref, row, rows, start, chunk, spec):
            products = (tap * dy_rows[i]).reshape(-1, SUBLANES, tap.shape[-1])
            sums[k] += products.sum(0)
        for k, total in enumerate(sums):
            sums_ref[k] += total

    _by_blocks(spec, add)

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        dw_ref[...] = sums_ref[...].sum(1)


def _fill(buffer_ref, x_ref, spec):
    """Puts the image into the buffer, where its padding is zero."""

    @pl.when((pl.program_id(0) == 0) & (pl.program_id(1) == 0))
    def _():
        # The same elements are written in every step; the others stay zero.
        buffer_ref[...] = jnp.zeros_like(buffer_ref)

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
            buffer_ref[pl.ds(row + i, rows), column : column + width] = _f32(part)

        _in_steps(count, _rows(spec), copy)


def _overlap(size, lo, padded):
    """Which part of a dimension is met: its start there, in the buffer, its length."""
    source, start = max(0, -lo), max(0, lo)
    return source, start, max(0, min(size - source, padded - start))


def _taps(buffer_ref, row, rows, start, chunk, spec):
    """What each tap k meets for columns `start` to `start + chunk` of each row.

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
            tap = buffer_ref[row + source, pl.ds(start + q * across, chunk)]
            for p, i in uses:
                yield p * width + q, i, tap


def _by_blocks(spec, do):
    """Calls `do(row, rows, start, size)` for blocks of rows and columns of outputs."""
    height, width = spec.out_spatial

    def block(row, rows):
        _in_steps(width, _chunk(spec), functools.partial(do, row, rows))

    _in_steps(height, _rows(spec), block)


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


def _f32(x):
    return x.astype(jnp.float32)


# Shapes and blocks.


def _as_image(spec: ConvSpec) -> ConvSpec:
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


def _adjoint(spec: ConvSpec) -> ConvSpec:
    """The convolution of dy that gives dx, its padding not yet done."""
    return dataclasses.replace(
        spec,
        x_shape=spec.y_shape,
        padding=tuple(
            (e - 1 - lo, size - out + lo)
            for e, (lo, _), size, out in zip(
                spec.extent, spec.padding, spec.spatial, spec.out_spatial, strict=True
            )
        ),
        activation=None,
        keep_preactivation=False,
    )


def _block_c(spec) -> int:
    return min(spec.x_shape[-1], LANES)


def _chunk(spec) -> int:
    columns = round_up(spec.out_spatial[1], SUBLANES)
    return min(columns, _SUMS * SUBLANES // _rows(spec))


def _rows(spec) -> int:
    """Rows that are computed at a time, so that a load serves several taps."""
    return min(spec.out_spatial[0], _ROWS)


def _buffer_shape(spec, block_c):
    height, width = spec.out_spatial
    rows, columns = (e - 1 for e in spec.extent)
    return height + rows, round_up(width, _chunk(spec)) + columns, block_c


def _buffer(spec, block_c):
    return pltpu.VMEM(_buffer_shape(spec, block_c), jnp.float32)


def _vmem(spec) -> int:
    """Bytes of the blocks, each twice, and of the buffer."""
    itemsize, lanes = jnp.dtype(spec.dtype).itemsize, (_block_c(spec),)
    blocks = padded_bytes((*spec.spatial, *lanes), itemsize)
    # y, and at most z and the residual beside it.
    blocks += 3 * padded_bytes((*spec.out_spatial, *lanes), itemsize)
    return 2 * blocks + padded_bytes(_buffer_shape(spec, *lanes), 4)


def _image(spatial, block_c):
    return pl.BlockSpec((1, *spatial, block_c), lambda c, n: (n, 0, 0, c))


def _params(semantics):
    return pltpu.CompilerParams(
        dimension_semantics=(semantics, semantics), vmem_limit_bytes=_VMEM_LIMIT
    )


def _cost(spec):
    itemsize = jnp.dtype(spec.dtype).itemsize
    moved = math.prod(spec.x_shape) + math.prod(spec.y_shape)
    return pl.CostEstimate(
        flops=2 * spec.macs, bytes_accessed=moved * itemsize, transcendentals=0
    )
