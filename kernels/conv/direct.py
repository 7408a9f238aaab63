"""Convolution of any kind by XLA's own convolution, forward and both gradients.

The gradients are convolutions again. Per spatial axis, with input size S, stride s,
dilation d, extent e = (k - 1) d + 1 and outputs O spanning o = (O - 1) s + 1 inputs:

    dx = conv(dy with s - 1 zeros between, flipped w with channels swapped),
         padding (e - 1 - lo,  S - o + lo)
    dw = conv(x, dy), N contracted, dy's taps s apart, outputs d apart,
         padding (lo,  o + e - 1 - S - lo)

Both are verified against `jax.vjp` of the forward, strides that leave a remainder and
negative padding included. XLA itself is never given negative padding: its float32
convolution on a CPU reads out of bounds there (openxla/xla issue 48713).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from . import gemm
from .epilogue import empty_sum, finish
from .spec import ConvSpec
from .windows import input_padding, output_padding, spread, transpose_filter

# In a lax.pad configuration: nothing at either end or between.
_KEEP = (0, 0, 0)


def forward(
    spec: ConvSpec,
    x: jax.Array,
    w: jax.Array,
    b: jax.Array | None = None,
    residual: jax.Array | None = None,
):
    """y = activation(conv(x, w) + b + residual), summed in fp32 or wider."""
    if spec.is_empty:
        return empty_sum(spec, b, residual)
    return finish(spec, correlate(spec, x, w), b, residual)


def correlate(spec: ConvSpec, x: jax.Array, w: jax.Array) -> jax.Array:
    """The sums of products (N, *T, O), fp32 or wider."""
    x, padding = crop(x, spec.padding)
    return lax.conv_general_dilated(
        x,
        w,
        window_strides=spec.strides,
        padding=padding,
        rhs_dilation=spec.dilation,
        dimension_numbers=_layout(spec.rank),
        feature_group_count=spec.groups,
        precision=spec.precision,
        preferred_element_type=spec.accumulate_dtype,
    )


def input_gradient(spec: ConvSpec, w: jax.Array, dy: jax.Array) -> jax.Array:
    """dx of x's shape, from w and dy."""
    if spec.is_empty:
        return jnp.zeros(spec.x_shape, spec.dtype)
    padding, strides = output_padding(spec), spec.strides
    if min(map(min, padding)) < 0:
        dy = spread(spec, dy)
        padding, strides = ((0, 0),) * spec.rank, (1,) * spec.rank
    dx = lax.conv_general_dilated(
        dy,
        transpose_filter(spec, w),
        window_strides=(1,) * spec.rank,
        padding=padding,
        lhs_dilation=strides,
        rhs_dilation=spec.dilation,
        dimension_numbers=_layout(spec.rank),
        feature_group_count=spec.groups,
        precision=spec.precision,
        preferred_element_type=spec.accumulate_dtype,
    )
    return dx.astype(spec.dtype)


def weight_gradient(spec: ConvSpec, x: jax.Array, dy: jax.Array) -> jax.Array:
    """dw of w's shape, from x and dy."""
    if spec.is_empty:
        return jnp.zeros(spec.w_shape, spec.dtype)
    convolve = functools.partial(_weight_gradient, spec)
    if spec.groups == 1 or spec.is_symbolic:
        return convolve(x, dy)
    # On a CPU XLA takes dw of groups over every pair of channels, and multiplies by
    # zero what belongs to no group: an infinity there would make NaN of all groups.
    by_group = functools.partial(gemm.weight_gradient, spec)
    return lax.platform_dependent(x, dy, cpu=by_group, default=convolve)


def _weight_gradient(spec, x, dy):
    x, padding = crop(x, input_padding(spec))
    # Channels play the batch, the batch is contracted. Transposed by hand: inside a
    # loop XLA does not put dimensions in order, and the fast form on a CPU needs that.
    space = tuple(range(1, spec.rank + 1))
    dw = lax.conv_general_dilated(
        lax.transpose(x, (spec.rank + 1, *space, 0)),
        lax.transpose(dy, (*space, 0, spec.rank + 1)),
        window_strides=spec.dilation,
        padding=padding,
        rhs_dilation=spec.strides,
        dimension_numbers=_layout(spec.rank),
        batch_group_count=spec.groups,
        precision=spec.precision,
        preferred_element_type=spec.accumulate_dtype,
    )
    dw = lax.transpose(dw, (*space, 0, spec.rank + 1))
    return dw.astype(spec.dtype)


def crop(x: jax.Array, padding) -> tuple[jax.Array, list[tuple[int, int]]]:
    """Pads x along the axes of negative padding; returns it and the padding left.

    Both ends at once: of an axis of 1, (-3, 4) leaves 2 elements, all of them padding.
    """
    done = [(*pair, 0) if min(pair) < 0 else _KEEP for pair in padding]
    left = [(0, 0) if min(pair) < 0 else pair for pair in padding]
    return lax.pad(x, jnp.zeros((), x.dtype), [_KEEP, *done, _KEEP]), left


def _layout(rank: int) -> tuple[str, str, str]:
    s = "DHW"[-rank:]
    return f"N{s}C", f"{s}IO", f"N{s}C"
