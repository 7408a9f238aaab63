"""Strided convolution as one of stride 1, over the phases of x as channels.

Along an axis of stride s, with output j, tap t = s a + p and A = ceil(k / s):

    y[j] = sum_t x[s j + t - lo] w[t] = sum_a (sum_p x_p[j + a] w_p[a])

where x_p[i] = x[s i + p - lo] is a phase of x, and w_p[a] = w[s a + p] or zero. So dx
has no zeros to multiply between the elements of dy, and few channels become s times as
many, along each axis; but where s does not divide k, w has zeros.

Non-finite inputs: such a zero makes NaN of an infinity that no tap meets. A result that
is not finite is computed again directly.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from ..finite import or_exact
from . import direct, pointwise
from .epilogue import empty_sum, finish
from .spec import ConvSpec


def refuses(spec: ConvSpec) -> str | None:
    """Why `spec` cannot be done, or None."""
    if all(s == 1 for s in spec.strides):
        return "takes strides only, more than one"
    if any(d != 1 for d in spec.dilation):
        return f"takes no dilation, got {spec.dilation}"
    if spec.groups != 1:
        return f"takes no groups, got {spec.groups}"
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
    phased = _phased(spec)
    exact = functools.partial(direct.correlate, spec)

    def fast(x, w):
        x, w = _of_input(spec, x), _of_filter(spec, w)
        return _module(phased).correlate(phased, x, w)

    sums = (or_exact(fast, exact) if _has_zeros(spec) else fast)(x, w)
    return finish(spec, sums, b, residual)


def input_gradient(spec: ConvSpec, w: jax.Array, dy: jax.Array) -> jax.Array:
    """dx, whose phases are the channels of another."""
    if spec.is_empty:
        return jnp.zeros(spec.x_shape, spec.dtype)
    phased = _phased(spec)

    def fast(w, dy):
        dx = _module(phased).input_gradient(phased, _of_filter(spec, w), dy)
        n, *counts, _ = dx.shape
        dx = dx.reshape(n, *counts, *spec.strides, spec.x_shape[-1])
        order = [axis for i in range(spec.rank) for axis in (1 + i, 1 + spec.rank + i)]
        dx = lax.transpose(dx, (0, *order, 2 * spec.rank + 1))
        sizes = [count * s for count, s in zip(counts, spec.strides, strict=True)]
        dx = dx.reshape(n, *sizes, spec.x_shape[-1])
        return _pad(dx, [(-lo, -hi) for lo, hi in _padding(spec)])

    exact = functools.partial(direct.input_gradient, spec)
    return (or_exact(fast, exact) if _has_zeros(spec) else fast)(w, dy)


def weight_gradient(spec: ConvSpec, x: jax.Array, dy: jax.Array) -> jax.Array:
    """dw, put together from those of the phases."""
    if spec.is_empty:
        return jnp.zeros(spec.w_shape, spec.dtype)
    phased = _phased(spec)
    dw = _module(phased).weight_gradient(phased, _of_input(spec, x), dy)
    rank = spec.rank
    dw = dw.reshape(*phased.kernel, *spec.strides, *spec.w_shape[-2:])
    order = [axis for i in range(rank) for axis in (i, rank + i)]
    dw = lax.transpose(dw, (*order, 2 * rank, 2 * rank + 1))
    taps = [a * s for a, s in zip(phased.kernel, spec.strides, strict=True)]
    dw = dw.reshape(*taps, *spec.w_shape[-2:])
    return dw[*(slice(k) for k in spec.kernel)]


def _phased(spec):
    """The convolution of stride 1."""
    n, *_, channels = spec.x_shape
    taps = [-(-k // s) for k, s in zip(spec.kernel, spec.strides, strict=True)]
    counts = [out + a - 1 for out, a in zip(spec.out_spatial, taps, strict=True)]
    channels *= math.prod(spec.strides)
    return dataclasses.replace(
        spec,
        x_shape=(n, *counts, channels),
        w_shape=(*taps, channels, spec.w_shape[-1]),
        strides=(1,) * spec.rank,
        padding=((0, 0),) * spec.rank,
    )


def _has_zeros(spec):
    return any(k % s for k, s in zip(spec.kernel, spec.strides, strict=True))


def _module(phased):
    # Of a filter as large as its stride one tap is left.
    return direct if pointwise.refuses(phased) else pointwise


def _padding(spec):
    """What makes of x whole phases; it may be negative."""
    axes = zip(
        _phased(spec).spatial, spec.strides, spec.spatial, spec.padding, strict=True
    )
    return [(lo, count * s - size - lo) for count, s, size, (lo, _) in axes]


def _of_input(spec, x):
    """x as (N, *counts, phases C)."""
    x = _pad(x, _padding(spec))
    n, *sizes, c = x.shape
    counts = [size // s for size, s in zip(sizes, spec.strides, strict=True)]
    split = [size for pair in zip(counts, spec.strides, strict=True) for size in pair]
    axes = range(1, 2 * spec.rank + 1)
    x = lax.transpose(
        x.reshape(n, *split, c), (0, *axes[::2], *axes[1::2], 2 * spec.rank + 1)
    )
    return x.reshape(n, *counts, -1)


def _of_filter(spec, w):
    """w as (*taps, phases C, O)."""
    taps = _phased(spec).kernel
    sizes = zip(taps, spec.strides, spec.kernel, strict=True)
    w = jnp.pad(w, [*((0, a * s - k) for a, s, k in sizes), (0, 0), (0, 0)])
    split = [size for pair in zip(taps, spec.strides, strict=True) for size in pair]
    axes, rank = range(2 * spec.rank), spec.rank
    w = lax.transpose(
        w.reshape(*split, *w.shape[-2:]),
        (*axes[::2], *axes[1::2], 2 * rank, 2 * rank + 1),
    )
    return w.reshape(*taps, -1, w.shape[-1])


def _pad(x, pairs):
    keep = (0, 0, 0)
    config = [keep, *((lo, hi, 0) for lo, hi in pairs), keep]
    return lax.pad(x, jnp.zeros((), x.dtype), config)
