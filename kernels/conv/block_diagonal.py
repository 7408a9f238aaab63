"""Grouped convolution as dense ones, with the groups on the diagonal of their filters.

A TPU's matrix unit multiplies by at least 128 x 128 numbers at a time, of which a group
of 8 channels fills a 256th; XLA pads each. As many groups as fit stand here side by
side in the dense filter of a block of channels:

    w'[k, (i, c), (j, o)] = w[k, c, (j, o)] if i = j else 0     for groups i, j

y and dx are the same sums with zeros among their terms. dw is what lies on the diagonal
of the dense dw'; what lies beside it belongs to no group and is dropped.

Non-finite inputs: a zero of w' makes NaN of an infinity in another group. A result that
is not finite is computed again directly.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from ..finite import or_exact
from ..tiling import LANES
from . import direct
from .epilogue import empty_sum, finish
from .spec import ConvSpec


def refuses(spec: ConvSpec) -> str | None:
    """Why `spec` cannot be done, or None."""
    return None if spec.groups > 1 else "takes groups only, more than one"


def groups_in_block(spec: ConvSpec) -> int:
    """How many groups of one size fill the matrix unit together."""
    widest = max(spec.w_shape[-2], spec.w_shape[-1] // spec.groups)
    return max(
        m
        for m in range(1, spec.groups + 1)
        if spec.groups % m == 0 and (m == 1 or m * widest <= LANES)
    )


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

    def fast(x, w):
        parts = zip(_split(spec, x), _filters(spec, w), strict=True)
        return _join(direct.correlate(_block(spec), *part) for part in parts)

    sums = or_exact(fast, functools.partial(direct.correlate, spec))(x, w)
    return finish(spec, sums, b, residual)


def input_gradient(spec: ConvSpec, w: jax.Array, dy: jax.Array) -> jax.Array:
    """dx, with the same filters."""
    if spec.is_empty:
        return jnp.zeros(spec.x_shape, spec.dtype)

    def fast(w, dy):
        parts = zip(_filters(spec, w), _split(spec, dy), strict=True)
        return _join(direct.input_gradient(_block(spec), *part) for part in parts)

    return or_exact(fast, functools.partial(direct.input_gradient, spec))(w, dy)


def weight_gradient(spec: ConvSpec, x: jax.Array, dy: jax.Array) -> jax.Array:
    """dw, the diagonal of each block's. No sum in it has terms of two groups."""
    if spec.is_empty:
        return jnp.zeros(spec.w_shape, spec.dtype)

    def diagonal(x, dy):
        dw = direct.weight_gradient(_block(spec), x, dy)
        outputs = dw.shape[-1]
        dw = jnp.where(_is_diagonal(spec)[:, :outputs], dw, 0)
        return dw.reshape(*spec.kernel, -1, spec.w_shape[-2], outputs).sum(-3)

    parts = zip(_split(spec, x), _split(spec, dy), strict=True)
    return _join(diagonal(*part) for part in parts)


def _block(spec):
    """The dense convolution of one block."""
    m = groups_in_block(spec)
    *kernel, channels, outputs = spec.w_shape
    return dataclasses.replace(
        spec,
        x_shape=(*spec.x_shape[:-1], m * channels),
        w_shape=(*kernel, m * channels, m * (outputs // spec.groups)),
        groups=1,
    )


def _split(spec, a):
    """The channels of each block. (Blocks as groups of XLA are slower on a TPU.)"""
    return jnp.split(a, spec.groups // groups_in_block(spec), axis=-1)


def _join(parts):
    return jnp.concatenate(list(parts), axis=-1)


def _filters(spec, w):
    """The dense filter of each block."""
    tiled = jnp.concatenate([w] * groups_in_block(spec), axis=-2)
    # Selected, for a product of a zero and an infinity is none.
    filters = jnp.where(_is_diagonal(spec), tiled, 0)
    # Else XLA may select anew for every product.
    return lax.optimization_barrier(_split(spec, filters))


def _is_diagonal(spec):
    """Whether an input of a block and an output belong to one group."""
    m = groups_in_block(spec)
    *_, channels, outputs = spec.w_shape
    i = jnp.arange(m * channels)[:, None] // channels
    j = jnp.arange(outputs)[None, :] // (outputs // spec.groups) % m
    return i == j
