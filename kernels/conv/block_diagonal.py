"""Grouped convolution as dense ones, with the groups on the diagonal of their filters.

A TPU's matrix unit multiplies by at least 128 x 128 numbers at a time, of which a group
of 8 channels fills a 256th; XLA pads each. On a CPU XLA takes groups one at a time, and
for dw every pair of channels. As many groups as fit stand here side by side in the
dense filter of a block of channels, as wide as suits the processor:

    w'[k, (i, c), (j, o)] = w[k, c, (j, o)] if i = j else 0     for groups i, j

y and dx are the same sums with zeros among their terms. dw is what lies on the diagonal
of the dense dw'; what lies beside it belongs to no group and is dropped.

Wide groups are blocks of their own, without zeros.

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


def groups_in_block(spec: ConvSpec, width: int = LANES) -> int:
    """How many groups fit in `width` channels, of input and of output."""
    widest = max(spec.w_shape[-2], spec.w_shape[-1] // spec.groups)
    return max(
        m
        for m in range(1, spec.groups + 1)
        if spec.groups % m == 0 and (m == 1 or m * widest <= width)
    )


def forward(
    spec: ConvSpec,
    x: jax.Array,
    w: jax.Array,
    b: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    width: int = LANES,
    looped: bool = False,
):
    """y = activation(conv(x, w) + b + residual), blocks `width` channels wide.

    `looped`, the blocks are those of one loop, else each is written out.
    """
    if spec.is_empty:
        return empty_sum(spec, b, residual)
    m = groups_in_block(spec, width)

    def fast(x, w):
        parts = _split(spec, x, m, looped), _filters(spec, w, m, looped)
        return _each(functools.partial(direct.correlate, _block(spec, m)), *parts)

    exact = functools.partial(direct.correlate, spec)
    sums = (fast if m == 1 else or_exact(fast, exact))(x, w)
    return finish(spec, sums, b, residual)


def input_gradient(
    spec: ConvSpec,
    w: jax.Array,
    dy: jax.Array,
    *,
    width: int = LANES,
    looped: bool = False,
) -> jax.Array:
    """dx, with the same filters."""
    if spec.is_empty:
        return jnp.zeros(spec.x_shape, spec.dtype)
    m = groups_in_block(spec, width)

    def fast(w, dy):
        parts = _filters(spec, w, m, looped), _split(spec, dy, m, looped)
        return _each(functools.partial(direct.input_gradient, _block(spec, m)), *parts)

    exact = functools.partial(direct.input_gradient, spec)
    return (fast if m == 1 else or_exact(fast, exact))(w, dy)


def weight_gradient(
    spec: ConvSpec,
    x: jax.Array,
    dy: jax.Array,
    *,
    width: int = LANES,
    looped: bool = False,
) -> jax.Array:
    """dw, the diagonal of each block's. No sum in it has terms of two groups."""
    if spec.is_empty:
        return jnp.zeros(spec.w_shape, spec.dtype)
    m = groups_in_block(spec, width)

    def diagonal(x, dy):
        dw = direct.weight_gradient(_block(spec, m), x, dy)
        outputs = dw.shape[-1]
        dw = jnp.where(_is_diagonal(spec, m)[:, :outputs], dw, 0)
        return dw.reshape(*spec.kernel, -1, spec.w_shape[-2], outputs).sum(-3)

    x, dy = (_split(spec, a, m, looped) for a in (x, dy))
    if not looped and len(x) == 2:
        # Else XLA for a TPU picks the channels of the first block anew for every
        # product of it: in bfloat16 a quarter of all cycles on a v6e.
        x[0] = lax.optimization_barrier(x[0])
    return _each(diagonal, x, dy)


def _block(spec, m):
    """The dense convolution of a block of m groups."""
    *kernel, channels, outputs = spec.w_shape
    return dataclasses.replace(
        spec,
        x_shape=(*spec.x_shape[:-1], m * channels),
        w_shape=(*kernel, m * channels, m * (outputs // spec.groups)),
        groups=1,
    )


def _split(spec, a, m, looped):
    """The channels of each block: a list, or stacked. (As groups of XLA: slower.)"""
    count = spec.groups // m
    if not looped:
        return jnp.split(a, count, axis=-1)
    return jnp.moveaxis(a.reshape(*a.shape[:-1], count, -1), -2, 0)


def _each(f, *parts):
    """f of each block, the results side by side."""
    if isinstance(parts[0], list):
        return jnp.concatenate([f(*p) for p in zip(*parts, strict=True)], axis=-1)
    blocks = jnp.moveaxis(lax.map(lambda p: f(*p), parts), 0, -2)
    return blocks.reshape(*blocks.shape[:-2], -1)


def _filters(spec, w, m, looped):
    """The dense filter of each block."""
    tiled = jnp.concatenate([w] * m, axis=-2)
    # Selected, for a product of a zero and an infinity is none.
    filters = jnp.where(_is_diagonal(spec, m), tiled, 0)
    # Else XLA may select anew for every product.
    return lax.optimization_barrier(_split(spec, filters, m, looped))


def _is_diagonal(spec, m):
    """Whether an input of a block and an output belong to one group."""
    *_, channels, outputs = spec.w_shape
    i = jnp.arange(m * channels)[:, None] // channels
    j = jnp.arange(outputs)[None, :] // (outputs // spec.groups) % m
    return i == j
