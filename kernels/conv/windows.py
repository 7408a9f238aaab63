"""The inputs that the taps of a filter see, as slices of a padded array.

What is no convolution instruction is written with these: y is the sum over taps k of
`tap(spec, pad(spec, x), k)` times w[k]; dx is the same sum for `adjoint(spec)`, over
dy with zeros between its elements.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import lax

from .epilogue import empty_sum, finish
from .spec import ConvSpec


def passes(correlate: Callable) -> tuple[Callable, Callable]:
    """The passes "fwd" and "dx" of an implementation that has one sum for both.

    Args:
      correlate: `correlate(spec, padded, w)`, the sums (N, *T, O) in the accumulation
        dtype, of an input that is padded as `pad` does.
    """

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
        return finish(spec, correlate(spec, pad(spec, x), w), b, residual)

    def input_gradient(spec: ConvSpec, w: jax.Array, dy: jax.Array) -> jax.Array:
        """dx, by the same sum over dy with zeros between its elements."""
        if spec.is_empty:
            return jnp.zeros(spec.x_shape, spec.dtype)
        turned, filter_ = adjoint(spec), transpose_filter(spec, w)
        return correlate(turned, spread(spec, dy), filter_).astype(spec.dtype)

    return forward, input_gradient


def taps(spec: ConvSpec) -> Iterator[tuple[int, ...]]:
    """The position of every tap, in the order of w's elements."""
    return itertools.product(*map(range, spec.kernel))


def input_padding(spec: ConvSpec) -> list[tuple[int, int]]:
    """What makes of x exactly the inputs that the filter meets; it may be negative."""
    return [
        (lo, (out - 1) * stride + extent - size - lo)
        for size, out, stride, extent, lo in _axes(spec)
    ]


def output_padding(spec: ConvSpec) -> list[tuple[int, int]]:
    """What makes of dy, with zeros between, the input of the adjoint."""
    return [
        (extent - 1 - lo, size - ((out - 1) * stride + 1) + lo)
        for size, out, stride, extent, lo in _axes(spec)
    ]


def _axes(spec):
    starts = [lo for lo, _ in spec.padding]
    sizes = spec.spatial, spec.out_spatial, spec.strides, spec.extent, starts
    return zip(*sizes, strict=True)


def pad(spec: ConvSpec, x: jax.Array) -> jax.Array:
    """Pads, or crops where negative, x to exactly the inputs that the filter meets."""
    return _pad(x, [(*pair, 0) for pair in input_padding(spec)])


def tap(spec: ConvSpec, padded: jax.Array, k: tuple[int, ...]) -> jax.Array:
    """What tap k meets for every output: (N, *T, C)."""
    first = [i * d for i, d in zip(k, spec.dilation, strict=True)]
    last = [
        f + (out - 1) * stride + 1
        for f, out, stride in zip(first, spec.out_spatial, spec.strides, strict=True)
    ]
    n, *_, c = padded.shape
    return lax.slice(padded, (0, *first, 0), (n, *last, c), (1, *spec.strides, 1))


def adjoint(spec: ConvSpec) -> ConvSpec:
    """The spec of the convolution that gives dx: of `spread(spec, dy)`, with the
    transposed filter."""
    spatial = [s + e - 1 for s, e in zip(spec.spatial, spec.extent, strict=True)]
    *kernel, _, outputs = spec.w_shape
    return dataclasses.replace(
        spec,
        x_shape=(spec.x_shape[0], *spatial, outputs),
        w_shape=(*kernel, outputs // spec.groups, spec.x_shape[-1]),
        strides=(1,) * spec.rank,
        padding=((0, 0),) * spec.rank,
        activation=None,
        keep_preactivation=False,
    )


def over_dy(spec: ConvSpec) -> ConvSpec:
    """`adjoint` for strides of 1, as a convolution of dy that is yet to be padded."""
    padding = tuple(output_padding(spec))
    return dataclasses.replace(adjoint(spec), x_shape=spec.y_shape, padding=padding)


def spread(spec: ConvSpec, dy: jax.Array) -> jax.Array:
    """dy with stride - 1 zeros between its elements, padded to the adjoint's input."""
    zeros = [stride - 1 for stride in spec.strides]
    pairs = zip(output_padding(spec), zeros, strict=True)
    return _pad(dy, [(*pair, between) for pair, between in pairs])


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


def _pad(x, config):
    keep = (0, 0, 0)
    x = lax.pad(x, jnp.zeros((), x.dtype), [keep, *config, keep])
    # Else XLA may compute the padding anew at every tap.
    return lax.optimization_barrier(x)


class Slabs:
    """A convolution cut into slabs of `images` images and `rows` first-dimension rows.

    `spec` is that of one slab, of padded input; `count` how many there are.
    """

    def __init__(self, spec: ConvSpec, fits: Callable[[int], bool]):
        """Takes the largest slabs whose number of outputs, without channels, `fits`."""
        batch, (height, *rest) = spec.x_shape[0], spec.out_spatial
        area = math.prod(rest)
        self._rows = _largest_divisor(height, lambda r: fits(r * area))
        whole = self._rows == height
        self._images = _largest_divisor(
            batch, lambda n: n == 1 or (whole and fits(n * height * area))
        )
        self._steps = height // self._rows
        self.count = batch // self._images * self._steps
        self._stride = spec.strides[0]
        self._height = (self._rows - 1) * self._stride + spec.extent[0]
        padded = [
            (out - 1) * stride + extent
            for out, stride, extent in zip(
                spec.out_spatial, spec.strides, spec.extent, strict=True
            )
        ]
        self.spec = dataclasses.replace(
            spec,
            x_shape=(self._images, self._height, *padded[1:], spec.x_shape[-1]),
            padding=((0, 0),) * spec.rank,
        )

    def of_input(self, padded: jax.Array, i: jax.Array | int) -> jax.Array:
        """Slab i of `pad(spec, x)`."""
        return self._slab(padded, i, self._stride, self._height)

    def of_output(self, y: jax.Array, i: jax.Array | int) -> jax.Array:
        """Slab i of what has y's shape."""
        return self._slab(y, i, 1, self._rows)

    def join(self, slabs: jax.Array) -> jax.Array:
        """Slabs of outputs (count, images, rows, ...) put together."""
        count, images, rows, *rest = slabs.shape
        slabs = slabs.reshape(-1, self._steps, images, rows, *rest)
        return jnp.moveaxis(slabs, 1, 2).reshape(-1, self._steps * rows, *rest)

    def _slab(self, a, i, stride, height):
        n, step = i // self._steps, i % self._steps
        start = (n * self._images, step * self._rows * stride, *(0,) * (a.ndim - 2))
        return lax.dynamic_slice(a, start, (self._images, height, *a.shape[2:]))


def _largest_divisor(size: int, fits: Callable[[int], bool]) -> int:
    """The largest divisor of `size` that fits, or 1."""
    return max(d for d in range(1, size + 1) if size % d == 0 and (d == 1 or fits(d)))
