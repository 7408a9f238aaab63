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

import jax
import jax.numpy as jnp
from jax import lax

from .spec import ConvSpec, empty_sum

# In a lax.pad configuration: nothing at either end or between.
_KEEP = (0, 0, 0)


def forward(
    spec: ConvSpec, x: jax.Array, w: jax.Array, b: jax.Array | None = None
) -> jax.Array:
    """y = conv(x, w) + b, summed in fp32 or wider, rounded once to the input dtype."""
    if 0 in spec.y_shape or 0 in w.shape:
        return empty_sum(spec, b)
    x, padding = crop(x, spec.padding)
    y = lax.conv_general_dilated(
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
    if b is not None:
        y = y + b.astype(y.dtype)[(None,) * (y.ndim - 1)]
    return y.astype(spec.dtype)


def input_gradient(spec: ConvSpec, w: jax.Array, dy: jax.Array) -> jax.Array:
    """dx of x's shape, from w and dy."""
    if 0 in spec.x_shape or 0 in spec.y_shape or 0 in w.shape:
        return jnp.zeros(spec.x_shape, spec.dtype)
    padding = [
        (extent - 1 - lo, size - ((out - 1) * stride + 1) + lo)
        for size, out, stride, extent, (lo, _) in zip(
            spec.spatial,
            spec.out_spatial,
            spec.strides,
            spec.extent,
            spec.padding,
            strict=True,
        )
    ]
    strides = spec.strides
    if min(map(min, padding)) < 0:
        config = [(*pair, s - 1) for pair, s in zip(padding, strides, strict=True)]
        dy = lax.pad(dy, jnp.zeros((), dy.dtype), [_KEEP, *config, _KEEP])
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
    if 0 in spec.x_shape or 0 in spec.y_shape or 0 in spec.w_shape:
        return jnp.zeros(spec.w_shape, spec.dtype)
    padding = [
        (lo, (out - 1) * stride + extent - size - lo)
        for size, out, stride, extent, (lo, _) in zip(
            spec.spatial,
            spec.out_spatial,
            spec.strides,
            spec.extent,
            spec.padding,
            strict=True,
        )
    ]
    x, padding = crop(x, padding)
    s = "DHW"[-spec.rank :]
    dw = lax.conv_general_dilated(
        x,
        dy,
        window_strides=spec.dilation,
        padding=padding,
        rhs_dilation=spec.strides,
        # Channels play the batch, the batch is contracted.
        dimension_numbers=(f"C{s}N", f"I{s}O", f"{s}NC"),
        batch_group_count=spec.groups,
        precision=spec.precision,
        preferred_element_type=spec.accumulate_dtype,
    )
    return dw.astype(spec.dtype)


def crop(x: jax.Array, padding) -> tuple[jax.Array, list[tuple[int, int]]]:
    """Crops x where `padding` is negative; returns it and the padding that is left."""
    cut = [(min(lo, 0), min(hi, 0), 0) for lo, hi in padding]
    left = [(max(lo, 0), max(hi, 0)) for lo, hi in padding]
    return lax.pad(x, jnp.zeros((), x.dtype), [_KEEP, *cut, _KEEP]), left


def transpose_filter(spec: ConvSpec, w: jax.Array) -> jax.Array:
    """Flips w in space and swaps its channels within each group.

    (*kernel, C / g, O) becomes (*kernel, O / g, C).
    """
    *kernel, c, o = w.shape
    g = spec.groups
    w = lax.rev(w, tuple(range(spec.rank)))
    w = w.reshape(*kernel, c, g, o // g)
    w = jnp.moveaxis(w, (-3, -2, -1), (-1, -2, -3))  # (*kernel, O / g, g, C / g)
    return w.reshape(*kernel, o // g, g * c)


def _layout(rank: int) -> tuple[str, str, str]:
    s = "DHW"[-rank:]
    return f"N{s}C", f"{s}IO", f"N{s}C"
