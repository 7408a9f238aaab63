"""Convolution as matrix products of gathered inputs, with groups as a batch.

The taps along the last axis are gathered side by side, "im2row": cols (g, P, kw C / g)
for P pixels of a slab of the image. One product for each position of the other axes:

    y += cols_i w_i        dw_i += cols_i^T dy        dx = the same as y, of spread dy

Slabs are small enough for their cols to stay in cache. Everything is slices and matrix
products, which cost the same inside a loop (`lax.scan`) as outside; and a group's
products are its own, where XLA's convolution takes every pair of channels for dw.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jax import lax

from . import windows
from .spec import ConvSpec

# Bytes of the gathered inputs of a slab. A second-level cache holds 512 KiB to 2 MiB.
_SLAB_BYTES = 1 << 20


def weight_gradient(spec: ConvSpec, x: jax.Array, dy: jax.Array) -> jax.Array:
    """dw, summed over the slabs of the image."""
    if spec.is_empty:
        return jnp.zeros(spec.w_shape, spec.dtype)
    slabs, padded = _slabs(spec), windows.pad(spec, x)

    def add(dw, i):
        slab = slabs.of_input(padded, i)
        part = _by_group(spec, slabs.of_output(dy, i))
        part = part.reshape(spec.groups, -1, part.shape[-1])
        products = [_dot(spec, cols, part, 1) for cols in _cols(slabs.spec, slab)]
        return dw + jnp.stack(products), None

    *outer, last = spec.kernel
    channels, outputs = spec.w_shape[-2:]
    g = spec.groups
    shape = (math.prod(outer), g, last * channels, outputs // g)
    dw, _ = lax.scan(
        add, jnp.zeros(shape, spec.accumulate_dtype), jnp.arange(slabs.count)
    )
    dw = dw.reshape(*outer, g, last, channels, outputs // g)
    dw = jnp.moveaxis(dw, -4, -2)  # (*kernel, C / g, g, O / g)
    return dw.reshape(spec.w_shape).astype(spec.dtype)


def _correlate(spec, padded, w):
    """The sums (N, *T, O) of `pad(spec, x)` and w, in the accumulation dtype."""
    slabs, g = _slabs(spec), spec.groups
    last = spec.kernel[-1]
    channels, outputs = spec.w_shape[-2:]
    w = jnp.moveaxis(w.reshape(-1, last * channels, g, outputs // g), -2, 1)

    def slab(i):
        gathered = _cols(slabs.spec, slabs.of_input(padded, i))
        y = sum(
            _dot(spec, cols, taps, 2) for cols, taps in zip(gathered, w, strict=True)
        )
        return jnp.moveaxis(y, 0, 1).reshape(slabs.spec.y_shape)

    return slabs.join(lax.map(slab, jnp.arange(slabs.count)))


forward, input_gradient = windows.passes(_correlate)


def _cols(spec, padded):
    """For each position of the other axes the gathered inputs (g, P, kw C / g)."""
    grouped = _by_group(spec, padded)  # (g, N, *S, C / g)
    *outer, last = spec.kernel
    for k in itertools.product(*map(range, outer)):
        row = [
            jax.vmap(functools.partial(windows.tap, spec, k=(*k, j)))(grouped)
            for j in range(last)
        ]
        cols = jnp.concatenate(row, axis=-1)
        yield cols.reshape(spec.groups, -1, cols.shape[-1])


def _by_group(spec, a):
    """(..., g c) as (g, ..., c)."""
    return jnp.moveaxis(a.reshape(*a.shape[:-1], spec.groups, -1), -2, 0)


def _dot(spec, a, b, contract):
    """Products of each group over dimension `contract` of a, 1 of b."""
    return lax.dot_general(
        a,
        b,
        (((contract,), (1,)), ((0,), (0,))),
        precision=spec.precision,
        preferred_element_type=spec.accumulate_dtype,
    )


def _slabs(spec):
    itemsize = jnp.dtype(spec.dtype).itemsize
    per_pixel = spec.kernel[-1] * spec.x_shape[-1] * itemsize
    return windows.Slabs(spec, lambda pixels: pixels * per_pixel <= _SLAB_BYTES)
