"""Depthwise separable convolution as one Pallas TPU kernel, stride 1.

    z[i, j, c] = sum_{p, q} x[i + d p, j + d' q, c] w_depthwise[p, q, c]
    y[i, j, o] = activation(
        sum_c z[i, j, c] w_pointwise[c, o] + b[o] + residual[i, j, o]
    )

One grid step takes a strip of one image with all channels. The vector unit computes z
as in `depthwise_tpu.py`; rounded to x's dtype, as it would be between two convolutions,
it stays in vector memory, and the matrix unit multiplies all of it at once.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..tiling import SUBLANES, padded_bytes, result_type, round_up
from . import depthwise_tpu
from . import depthwise_tpu_image as images
from .depthwise_tpu_image import Image, f32
from .epilogue import finish
from .separable import SeparableSpec

# The lanes of a block of rows are unrolled, 128 at a time.
_CHANNELS = 2048


def refuses(spec: SeparableSpec) -> str | None:
    """Why `spec` cannot be done, or None."""
    if (reason := depthwise_tpu.refuses(spec.depthwise)) is not None:
        return reason
    if spec.depthwise.is_empty or spec.pointwise.is_empty:
        return "takes arrays with elements only"
    if _precision(spec) not in (None, lax.Precision.DEFAULT, lax.Precision.HIGHEST):
        return (
            f"takes precision DEFAULT and HIGHEST only, got {spec.pointwise.precision}"
        )
    if (channels := spec.depthwise.x_shape[-1]) > _CHANNELS:
        return f"takes at most {_CHANNELS} channels, got {channels}"
    if _vmem(spec) > images.VMEM_LIMIT:
        return (
            "takes images that fit vector memory with all their channels only, got "
            f"{spec.depthwise.x_shape}"
        )
    return None


def forward(
    spec: SeparableSpec,
    x: jax.Array,
    w_depthwise: jax.Array,
    w_pointwise: jax.Array,
    b: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    interpret: bool,
):
    """y, and what the spec keeps."""
    image, outputs = _image(spec), spec.pointwise.w_shape[-1]
    taps, channels = math.prod(spec.depthwise.kernel), image.channels
    operands = [
        x,
        w_depthwise.reshape(taps, channels),
        w_pointwise.reshape(channels, outputs),
    ]
    in_specs = [image.image_block(), *map(_whole, operands[1:])]
    if b is not None:
        operands.append(b[None])
        in_specs.append(_whole(operands[-1]))
    if residual is not None:
        operands.append(residual)
        in_specs.append(image.strip_block(outputs))
    widths = [outputs] * (1 + spec.pointwise.keep_preactivation)
    widths += [channels] * spec.keep_between
    shape = spec.depthwise.y_shape[:-1]
    outs = pl.pallas_call(
        functools.partial(
            _kernel,
            spec=spec,
            image=image,
            has_bias=b is not None,
            has_residual=residual is not None,
        ),
        grid=image.grid,
        in_specs=in_specs,
        out_specs=[image.strip_block(width) for width in widths],
        out_shape=[result_type((*shape, width), x.dtype) for width in widths],
        scratch_shapes=[
            pltpu.VMEM(image.buffer_shape, jnp.float32),
            pltpu.VMEM(_between_shape(image), jnp.float32),
        ],
        compiler_params=images.compiler_params(),
        cost_estimate=_cost(spec, operands, widths),
        interpret=interpret,
        name="separable_conv",
    )(*operands)
    return outs[0] if len(outs) == 1 else tuple(outs)


def _kernel(
    x_ref, w_depthwise_ref, w_pointwise_ref, *refs,
    spec: SeparableSpec, image: Image, has_bias, has_residual,
):  # fmt: skip
    """A strip of y (1, rows, Wo, O) from x (1, H, W, C), w_depthwise (taps, C) and
    w_pointwise (C, O).

    After these come b (1, O) and the residual, if there are; y and what else is kept;
    and as scratch the padded image, and z as a matrix of pixels.
    """
    refs = list(refs)
    bias = f32(refs.pop(0)[...]) if has_bias else None
    residual_ref = refs.pop(0) if has_residual else None
    *out_refs, buffer_ref, between_ref = refs
    kept_ref = out_refs.pop() if spec.keep_between else None
    images.begin(buffer_ref, x_ref, image)
    weights, columns = f32(w_depthwise_ref[...]), _columns(image)

    def convolve(row, rows, start, size, lanes, taps):
        sums = [None] * rows
        for k, i, tap in taps:
            product = tap * weights[k : k + 1, lanes]
            sums[i] = product if sums[i] is None else sums[i] + product
        for i, total in enumerate(sums):
            pixels = pl.ds((row + i) * columns + start, total.shape[0])
            between_ref[pixels, lanes] = total
            if spec.keep_between:
                where = (0, row + i, pl.ds(start, size), lanes)
                kept_ref[where] = total[:size].astype(kept_ref.dtype)

    images.by_blocks(buffer_ref, x_ref, image, convolve)
    sums = lax.dot_general(
        between_ref[...].astype(x_ref.dtype),
        w_pointwise_ref[...],
        (((1,), (0,)), ((), ())),
        precision=_precision(spec),
        preferred_element_type=jnp.float32,
    )
    for row in range(image.strip):
        total = sums[row * columns : row * columns + image.width]
        if has_bias:
            total += bias
        more = residual_ref[0, row] if has_residual else None
        outs = finish(spec.pointwise, total, residual=more)
        outs = outs if spec.pointwise.keep_preactivation else (outs,)
        for ref, out in zip(out_refs, outs, strict=True):
            ref[0, row] = out


def _image(spec):
    return Image(spec.depthwise, spec.depthwise.x_shape[-1])


def _whole(a):
    return pl.BlockSpec(a.shape, lambda c, n, s: (0, 0))


def _columns(image):
    """Of a row of z: whole registers, so that rows make a matrix without moving."""
    return round_up(image.width, SUBLANES)


def _between_shape(image):
    return image.strip * _columns(image), image.channels


def _precision(spec):
    # Products of bfloat16 are exact in fp32 as they are.
    return spec.pointwise.precision if spec.pointwise.dtype == "float32" else None


def _vmem(spec):
    image, outputs = _image(spec), spec.pointwise.w_shape[-1]
    itemsize = jnp.dtype(spec.pointwise.dtype).itemsize
    # Of y, at most its preactivation and the residual, and the filter, each twice.
    blocks = 3 * padded_bytes((image.strip, image.width, outputs), itemsize)
    blocks += padded_bytes((image.channels, outputs), itemsize)
    products = padded_bytes((_between_shape(image)[0], outputs), 4)
    return image.vmem + 2 * blocks + padded_bytes(_between_shape(image), 4) + products


def _cost(spec, operands, widths):
    itemsize = jnp.dtype(spec.pointwise.dtype).itemsize
    pixels = math.prod(spec.pointwise.y_shape[:-1])
    read = sum(a.size for a in operands)
    return pl.CostEstimate(
        flops=2 * (spec.depthwise.macs + spec.pointwise.macs),
        bytes_accessed=(read + pixels * sum(widths)) * itemsize,
        transcendentals=0,
    )
