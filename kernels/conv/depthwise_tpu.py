"""Depthwise convolution as a Pallas TPU kernel: one or two dimensions, stride 1.

One grid step takes a strip of one image, of 128 channels. With the image in fp32 in the
middle of a padded buffer it computes, row by row,

    y[i, j, c] = sum_{p, q} buffer[i + d p, j + d' q, c] w[p, q, c]

on the vector unit. Every element is read from HBM once and written once. dx is the same
kernel over dy with the flipped filter. dw keeps one vector of partial sums for every
tap. How images lie in memory is in `depthwise_tpu_image.py`.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..tiling import SUBLANES, result_type, round_up
from . import depthwise_tpu_image as images
from .depthwise_tpu_image import Image, as_image, f32
from .epilogue import empty_sum, finish
from .spec import ConvSpec
from .windows import over_dy, transpose_filter


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
    if max(as_image(s).vmem for s in (spec, over_dy(spec))) > images.VMEM_LIMIT:
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
    return _correlate(over_dy(spec), dy, filter_, None, None, interpret)


def weight_gradient(
    spec: ConvSpec, x: jax.Array, dy: jax.Array, *, interpret: bool
) -> jax.Array:
    """dw, summed over the images in one block."""
    if spec.is_empty:
        return jnp.zeros(spec.w_shape, spec.dtype)
    w_shape, image = spec.w_shape, as_image(spec)
    spec, channels, taps = image.spec, image.channels, math.prod(spec.kernel)
    dw = pl.pallas_call(
        functools.partial(_weight_gradient_kernel, image=image),
        grid=image.grid,
        in_specs=[image.image_block(), image.strip_block(channels)],
        out_specs=image.channels_block(taps),
        out_shape=result_type((taps, spec.x_shape[-1]), jnp.float32),
        scratch_shapes=[
            pltpu.VMEM(image.buffer_shape, jnp.float32),
            pltpu.VMEM((image.columns, channels), jnp.float32),
            pltpu.VMEM((taps, SUBLANES, channels), jnp.float32),
        ],
        compiler_params=images.compiler_params(),
        cost_estimate=images.cost(spec),
        interpret=interpret,
        name="depthwise_weight_gradient",
    )(x.reshape(spec.x_shape), dy.reshape(spec.y_shape))
    return dw.reshape(w_shape).astype(spec.dtype)


def _correlate(spec, x, w, b, residual, interpret):
    shape, image = spec.y_shape, as_image(spec)
    spec, taps = image.spec, math.prod(spec.kernel)
    y_spec = image.strip_block(image.channels)
    y_type = result_type(spec.y_shape, spec.dtype)
    operands = [x.reshape(spec.x_shape), w.reshape(taps, -1)]
    in_specs = [image.image_block(), image.channels_block(taps)]
    if b is not None:
        operands.append(b[None])
        in_specs.append(image.channels_block(1))
    if residual is not None:
        operands.append(residual.reshape(spec.y_shape))
        in_specs.append(y_spec)
    outs = pl.pallas_call(
        functools.partial(
            _correlate_kernel,
            image=image,
            has_bias=b is not None,
            has_residual=residual is not None,
        ),
        grid=image.grid,
        in_specs=in_specs,
        out_specs=[y_spec] * (1 + spec.keep_preactivation),
        out_shape=[y_type] * (1 + spec.keep_preactivation),
        scratch_shapes=[pltpu.VMEM(image.buffer_shape, jnp.float32)],
        compiler_params=images.compiler_params(),
        cost_estimate=images.cost(spec),
        interpret=interpret,
        name="depthwise_correlate",
    )(*operands)
    outs = [out.reshape(shape) for out in outs]
    return tuple(outs) if spec.keep_preactivation else outs[0]


# Kernel bodies.


def _correlate_kernel(x_ref, w_ref, *refs, image: Image, has_bias, has_residual):
    """A strip of y (1, rows, Wo, C) from x (1, H, W, C) and w (taps, C).

    After w come b (1, C) and the residual, if there are; y, and z if the spec keeps it;
    and the padded image as scratch.
    """
    spec, refs = image.spec, list(refs)
    bias = f32(refs.pop(0)[...]) if has_bias else None
    residual_ref = refs.pop(0) if has_residual else None
    *y_refs, buffer_ref = refs
    images.begin(buffer_ref, x_ref, image)
    weights = f32(w_ref[...])

    def store(row, rows, start, size, _, taps):
        sums = [None] * rows
        for k, i, tap in taps:
            product = tap * weights[k : k + 1]
            sums[i] = product if sums[i] is None else sums[i] + product
        for i in range(rows):
            where = (0, row + i, pl.ds(start, size))
            total = sums[i][:size]
            if has_bias:
                total += bias
            more = residual_ref[where] if has_residual else None
            outs = finish(spec, total, residual=more)
            outs = outs if spec.keep_preactivation else (outs,)
            for ref, out in zip(y_refs, outs, strict=True):
                ref[where] = out

    images.by_blocks(buffer_ref, x_ref, image, store)


def _weight_gradient_kernel(
    x_ref, dy_ref, dw_ref, buffer_ref, dy_row_ref, sums_ref, *, image: Image
):
    """dw (taps, C), summed over the images and strips of the grid's inner dimensions.

    Beside x comes a strip of dy.
    """
    images.begin(buffer_ref, x_ref, image)

    first, last = (
        (pl.program_id(1) == n) & (pl.program_id(2) == s)
        for n, s in ((0, 0), (pl.num_programs(1) - 1, pl.num_programs(2) - 1))
    )

    @pl.when(first)
    def _():
        sums_ref[...] = jnp.zeros_like(sums_ref)

    def add(row, rows, start, size, _, taps):
        dy_rows, columns = [], round_up(size, SUBLANES)
        for i in range(rows):
            dy_row = f32(dy_ref[0, row + i, pl.ds(start, size)])
            if size < columns:
                # Zeros beyond the last column.
                dy_row_ref[...] = jnp.zeros_like(dy_row_ref)
                dy_row_ref[:size] = dy_row
                dy_row = dy_row_ref[:columns]
            dy_rows.append(dy_row)
        sums = [0] * math.prod(image.spec.kernel)
        for k, i, tap in taps:
            products = (tap * dy_rows[i]).reshape(-1, SUBLANES, tap.shape[-1])
            sums[k] += products.sum(0)
        for k, total in enumerate(sums):
            sums_ref[k] += total

    images.by_blocks(buffer_ref, x_ref, image, add)

    @pl.when(last)
    def _():
        dw_ref[...] = sums_ref[...].sum(1)
