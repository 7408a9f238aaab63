"""Depthwise convolution by shifted multiply-adds, in one to three dimensions.

With m = O / C outputs for each channel c, output o = c m + j:

    y[n, i, o]  = sum_k x[n, s i + d k - lo, c] w[k, 0, o]

There is no product over channels that a matrix unit could do, so the processor's vector
unit does all: one multiply-add for each tap and output, of whole slices. XLA's own
convolution does C x C products, or one channel at a time. dx is the same sum over dy
with the transposed filter; dw[k, 0, o] is a sum over images and pixels.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from . import windows
from .epilogue import empty_sum, finish
from .spec import ConvSpec

# Elements of one partial sum of dw. All taps' sums of 16 KiB to 64 KiB each stay in a
# second-level cache, and each is several vector registers wide.
_PARTIAL = 1 << 13


def refuses(spec: ConvSpec) -> str | None:
    """Why `spec` cannot be done, or None."""
    if not spec.is_depthwise:
        return (
            "takes groups equal to the channels, and more than one; got "
            f"groups={spec.groups} for C = {spec.x_shape[-1]}"
        )
    return None


def forward(
    spec: ConvSpec,
    x: jax.Array,
    w: jax.Array,
    b: jax.Array | None = None,
    residual: jax.Array | None = None,
):
    """y = activation(conv(x, w) + b + residual)."""
    if spec.is_empty:
        return empty_sum(spec, b, residual)
    channels, dtype = spec.x_shape[-1], spec.accumulate_dtype
    padded = windows.pad(spec, x)
    w = w.reshape(*spec.kernel, channels, -1).astype(dtype)
    y = sum(
        windows.tap(spec, padded, k).astype(dtype)[..., None] * _channels(w[k], spec)
        for k in windows.taps(spec)
    )
    return finish(spec, y.reshape(spec.y_shape), b, residual)


def input_gradient(spec: ConvSpec, w: jax.Array, dy: jax.Array) -> jax.Array:
    """dx[n, j, c]: the m outputs of a channel add up."""
    if spec.is_empty:
        return jnp.zeros(spec.x_shape, spec.dtype)
    channels, dtype = spec.x_shape[-1], spec.accumulate_dtype
    turned = windows.adjoint(spec)
    spread = windows.spread(spec, dy)
    w = lax.rev(w, tuple(range(spec.rank)))
    w = w.reshape(*spec.kernel, channels, -1).astype(dtype)
    dx = 0
    for k in windows.taps(spec):
        slab = windows.tap(turned, spread, k).astype(dtype)
        products = slab.reshape(*spec.x_shape, -1) * _channels(w[k], spec)
        dx += sum(products[..., j] for j in range(products.shape[-1]))
    return dx.astype(spec.dtype)


def weight_gradient(spec: ConvSpec, x: jax.Array, dy: jax.Array) -> jax.Array:
    """dw[k, 0, o] = sum of x's tap k times dy, over images and pixels.

    Summed slab by slab over the image: a slab's products are added to partial sums of a
    slab's size, vector by vector, and those are reduced once, at the end.
    """
    if spec.is_empty:
        return jnp.zeros(spec.w_shape, spec.dtype)
    slabs = windows.Slabs(spec, lambda p: p * spec.w_shape[-1] <= _PARTIAL)
    one, channels, dtype = slabs.spec, spec.x_shape[-1], spec.accumulate_dtype
    padded = windows.pad(spec, x)

    def add(sums, i):
        slab, part = slabs.of_input(padded, i), slabs.of_output(dy, i)
        part = part.reshape(*part.shape[:-1], channels, -1).astype(dtype)
        return tuple(
            total + windows.tap(one, slab, k).astype(dtype)[..., None] * part
            for total, k in zip(sums, windows.taps(one), strict=True)
        ), None

    zeros = jnp.zeros((*one.y_shape[:-1], channels, one.w_shape[-1] // channels), dtype)
    sums = (zeros,) * math.prod(spec.kernel)
    sums, _ = lax.scan(add, sums, jnp.arange(slabs.count))
    dw = jnp.stack([total.sum(tuple(range(spec.rank + 1))) for total in sums])
    return dw.reshape(spec.w_shape).astype(spec.dtype)


def _channels(w, spec):
    """(C, m) against (N, *T, C, m)."""
    return w[(None,) * (spec.rank + 1)]
