"""Convolution with one tap: a matrix product over the pixels.

    y = x' w        dx' = dy w^T        dw = x'^T dy

with x' the strided, padded input as (pixels, C) and w as (C, O).
"""

import jax
import jax.numpy as jnp
from jax import lax

from . import windows
from .epilogue import empty_sum, finish
from .spec import ConvSpec


def refuses(spec: ConvSpec) -> str | None:
    """Why `spec` cannot be done, or None."""
    if any(k != 1 for k in spec.kernel):
        return f"takes 1-tap kernels only, got {spec.kernel}"
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
    """y = activation(x' w + b + residual)."""
    if spec.is_empty:
        return empty_sum(spec, b, residual)
    return finish(spec, correlate(spec, x, w), b, residual)


def correlate(spec: ConvSpec, x: jax.Array, w: jax.Array) -> jax.Array:
    """The sums of products (N, *T, O), fp32 or wider."""
    sums = _dot(spec, _pixels(spec, x), _matrix(w), ((1,), (0,)))
    return sums.reshape(spec.y_shape)


def input_gradient(spec: ConvSpec, w: jax.Array, dy: jax.Array) -> jax.Array:
    """dx: zero where no output looks."""
    if spec.is_empty:
        return jnp.zeros(spec.x_shape, spec.dtype)
    dx = _dot(spec, dy.reshape(-1, dy.shape[-1]), _matrix(w), ((1,), (1,)))
    dx = dx.reshape(*spec.y_shape[:-1], -1).astype(spec.dtype)
    return windows.spread(spec, dx)


def weight_gradient(spec: ConvSpec, x: jax.Array, dy: jax.Array) -> jax.Array:
    """dw = x'^T dy."""
    if spec.is_empty:
        return jnp.zeros(spec.w_shape, spec.dtype)
    dw = _dot(spec, _pixels(spec, x), dy.reshape(-1, dy.shape[-1]), ((0,), (0,)))
    return dw.reshape(spec.w_shape).astype(spec.dtype)


def _pixels(spec, x):
    seen = windows.tap(spec, windows.pad(spec, x), (0,) * spec.rank)
    return seen.reshape(-1, x.shape[-1])


def _matrix(w):
    return w.reshape(w.shape[-2:])


def _dot(spec, a, b, contract):
    return lax.dot_general(
        a,
        b,
        (contract, ((), ())),
        precision=spec.precision,
        preferred_element_type=spec.accumulate_dtype,
    )
