"""Winograd convolution as plain XLA operations: stride 1, one to three dimensions.

Forward, input gradient and weight gradient are three readings of one trilinear form,
with U = G w, V = BT x and Z = A dy (transforms applied along every spatial axis):

    y  = AT [sum_C V U]        dx = the same with dy and the rotated filter
    dw = GT [sum_tiles V Z]

All three have the rounding error that `Transform.kappa` predicts. Everything is done in
fp32 (fp64 for fp64 data) and rounded once, at the end: half-precision inputs are exact
in fp32, and the processors this is meant for multiply fp32 at least as fast.

The image is worked through in blocks of tile rows, so that a transformed block, n^2/m^2
times the size of its input, stays in cache.

Non-finite inputs: the transforms would make NaN of a whole tile that holds an inf, and
of numbers near the largest. A result that is not finite is computed again directly.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from ..conv import direct
from ..conv.epilogue import empty_sum, finish
from ..conv.spec import ConvSpec
from ..finite import or_exact
from .transforms import Transform, transform

# Outputs per tile and axis by taps: the most for which the six products of F(4, 3) and
# its points are enough, but for seven taps. F(4, 3) does a quarter of the direct form's
# products in 2-D; F(6, 3) a fifth, with four times the rounding error.
_TILES = {1: 1, 2: 3, 3: 4, 4: 3, 5: 2, 7: 2}

# Bytes of a transformed block. A second-level cache holds 512 KiB to 2 MiB a core.
_BLOCK_BYTES = 1 << 20


def refuses(spec: ConvSpec) -> str | None:
    """Why `spec` cannot be done, or None."""
    if any(s != 1 for s in spec.strides):
        return f"takes no strides, got {spec.strides}"
    if any(d != 1 for d in spec.dilation):
        return f"takes no dilation, got {spec.dilation}"
    if spec.groups != 1:
        return f"takes no groups, got {spec.groups}"
    if any(k not in _TILES for k in spec.kernel) or max(spec.kernel) == 1:
        taps = ", ".join(map(str, _TILES))
        return f"takes kernels of {taps} taps, more than one in all; got {spec.kernel}"
    return None


def refuses_tile(m: int) -> Callable[[ConvSpec], str | None]:
    """`refuses` for tiles of m outputs along every axis with more than one tap."""

    def refuses_it(spec):
        reason = refuses(spec)
        if reason is None and any(k not in (1, 3, 5) for k in spec.kernel):
            reason = f"takes kernels of 1, 3 and 5 taps, got {spec.kernel}"
        if reason is None and m > 4 and 5 in spec.kernel:
            reason = f"has no accurate transform of 5 taps, got {spec.kernel}"
        return reason

    return refuses_it


def forward(
    spec: ConvSpec,
    x: jax.Array,
    w: jax.Array,
    b: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    m: int | None = None,
):
    """y = activation(conv(x, w) + b + residual), by tiles of m outputs an axis.

    By default F(4, 3), F(2, 5), F(3, 2), F(3, 4) and F(2, 7).
    """
    if spec.is_empty:
        return empty_sum(spec, b, residual)
    pads = [lo for lo, _ in spec.padding]
    correlate = or_exact(
        lambda x, w: _correlate(spec, x, w, pads, spec.out_spatial, m),
        functools.partial(direct.correlate, exactly(spec)),
    )
    return finish(spec, correlate(x, w), b, residual)


def input_gradient(
    spec: ConvSpec, w: jax.Array, dy: jax.Array, *, m: int | None = None
) -> jax.Array:
    """dx, by the same algorithm on dy with the rotated filter."""
    if spec.is_empty:
        return jnp.zeros(spec.x_shape, spec.dtype)
    pads = [k - 1 - lo for k, (lo, _) in zip(spec.kernel, spec.padding, strict=True)]

    def fast(w, dy):
        rotated = jnp.swapaxes(lax.rev(w, tuple(range(spec.rank))), -1, -2)
        sums = _correlate(spec, dy, rotated, pads, spec.spatial, m)
        return sums.astype(spec.dtype)

    return or_exact(fast, functools.partial(direct.input_gradient, exactly(spec)))(
        w, dy
    )


def weight_gradient(
    spec: ConvSpec, x: jax.Array, dy: jax.Array, *, m: int | None = None
) -> jax.Array:
    """dw = GT [sum over tiles of (BT x)^T (A dy)]."""
    if spec.is_empty:
        return jnp.zeros(spec.w_shape, spec.dtype)
    fast = functools.partial(_weight_gradient, spec, m)
    return or_exact(fast, functools.partial(direct.weight_gradient, exactly(spec)))(
        x, dy
    )


def exactly(spec: ConvSpec) -> ConvSpec:
    """For the direct form, where it stands in for this one: as accurate."""
    return dataclasses.replace(spec, precision=lax.Precision.HIGHEST)


def _weight_gradient(spec, m, x, dy):
    ts = transforms(spec, m)
    tiles = _tiles(spec.out_spatial, ts)
    x = _pad_to_tiles(x, ts, [lo for lo, _ in spec.padding], tiles)
    dy = _pad_to_tiles(dy, ts, [0] * spec.rank, tiles, halo=False)
    blocks, rows = _blocks(spec, x, dy.shape[-1], tiles, ts)

    def block(i):
        xb, dyb = _rows(x, ts[0], i, rows), _rows(dy, ts[0], i, rows, halo=False)
        v = _input_transform(spec, xb, ts)  # (*n, N, *tiles, C)
        z = _expand(spec, dyb, ts)  # (*n, N, *tiles, O)
        return _product(spec, v, z, contract_tiles=True)

    if blocks == 1:
        du = block(0)
    else:
        first = block(0)
        du, _ = lax.scan(
            lambda acc, i: (acc + block(i), None), first, jnp.arange(1, blocks)
        )
    dw = du.reshape(*(t.n for t in ts), *spec.w_shape[-2:])
    for axis, t in enumerate(ts):
        dw = _apply(t.array("g", spec.accumulate_dtype).T, _unstack(dw, axis), axis)
    return dw.astype(spec.dtype)


def _correlate(spec, x, w, pads, out_spatial, m):
    """The sums of x (N, *S, C), padded at the low end by `pads`, and w (*r, C, O)."""
    ts = transforms(spec, m)
    u = w.astype(spec.accumulate_dtype)
    for axis, t in enumerate(ts):
        u = _apply(t.array("g", u.dtype), _unstack(u, axis), axis)
    u = u.reshape(-1, *w.shape[-2:])  # (n^rank, C, O)

    tiles = _tiles(out_spatial, ts)
    x = _pad_to_tiles(x, ts, pads, tiles)
    blocks, rows = _blocks(spec, x, w.shape[-1], tiles, ts)

    def block(i):
        v = _input_transform(spec, _rows(x, ts[0], i, rows), ts)
        products = _product(spec, v, u).reshape(*v.shape[:-1], w.shape[-1])
        return _output_transform(products, ts)

    if blocks == 1:
        y = block(0)
    else:
        y = lax.map(block, jnp.arange(blocks))  # (blocks, N, m * rows, *S, O)
        y = jnp.moveaxis(y, 0, 1)
        y = y.reshape(y.shape[0], -1, *y.shape[3:])
    return y[:, *(slice(0, size) for size in out_spatial)]


def transforms(spec: ConvSpec, m: int | None = None) -> list[Transform]:
    """The transform of each axis; one with one tap is left as it is."""
    return [transform(1 if r == 1 else m or _TILES[r], r) for r in spec.kernel]


def _tiles(out_spatial, ts) -> list[int]:
    """How many tiles cover the output, along each axis."""
    return [-(-out // t.m) for out, t in zip(out_spatial, ts, strict=True)]


def _pad_to_tiles(x, ts, pads, tiles, halo=True):
    """Pads, or crops where negative, to m * tiles, and r - 1 more of halo."""
    config = [(0, 0, 0)]
    for size, lo, count, t in zip(x.shape[1:-1], pads, tiles, ts, strict=True):
        need = t.m * count + (t.r - 1 if halo else 0)
        config.append((lo, need - size - lo, 0))
    return lax.pad(x, jnp.zeros((), x.dtype), [*config, (0, 0, 0)])


def _blocks(spec, x, other_channels, tiles, ts) -> tuple[int, int]:
    """How many blocks of how many tile rows: (blocks, rows)."""
    area = math.prod(count * t.n for count, t in zip(tiles[1:], ts[1:], strict=True))
    channels = x.shape[-1] + other_channels
    itemsize = jnp.dtype(spec.accumulate_dtype).itemsize
    per_row = x.shape[0] * ts[0].n * area * channels * itemsize
    want = max(1, _BLOCK_BYTES // per_row)
    # A divisor, so that every block is whole.
    rows = max(r for r in range(1, tiles[0] + 1) if tiles[0] % r == 0 and r <= want)
    return tiles[0] // rows, rows


def _rows(x, t, i, rows, halo=True):
    """The input rows of block i."""
    size = rows * t.m + (t.r - 1 if halo else 0)
    if x.shape[1] == size:
        return x
    return lax.dynamic_slice_in_dim(x, i * rows * t.m, size, axis=1)


def _input_transform(spec, x, ts):
    """(N, *S, C) -> V (*n, N, *tiles, C)."""
    x = x.astype(spec.accumulate_dtype)
    for axis, t in enumerate(ts):
        x = _apply(t.array("bt", x.dtype), _tile_elements(x, axis, ts), axis)
    return x


def _expand(spec, dy, ts):
    """(N, m * tiles, O) -> Z = A dy (*n, N, *tiles, O)."""
    dy = dy.astype(spec.accumulate_dtype)
    for axis, t in enumerate(ts):
        elements = _tile_elements(dy, axis, ts, halo=False)
        dy = _apply(t.array("at", dy.dtype).T, elements, axis)
    return dy


def _output_transform(products, ts):
    """AT along every axis, tiles put back together: (N, *(m * tiles), O)."""
    for axis, t in reversed(list(enumerate(ts))):
        at = t.array("at", products.dtype)
        products = _apply(at, _unstack(products, axis), axis)
        # (*n before, m, N, *tiles before, tiles, ...): move m beside its tiles, merge.
        dim = axis + 1 + axis
        products = jnp.moveaxis(products, axis, dim + 1)
        shape = products.shape
        merged = (*shape[:dim], shape[dim] * t.m, *shape[dim + 2 :])
        products = products.reshape(merged)
    return products


def _tile_elements(x, axis, ts, halo=True):
    """The elements 0 .. n - 1 (or m - 1) of every tile along one spatial axis.

    x is (*done, N, *spatial, C) with `axis` transformed axes in front.
    """
    t = ts[axis]
    dim = axis + 1 + axis
    count = (x.shape[dim] - (t.r - 1 if halo else 0)) // t.m
    return [
        lax.slice_in_dim(x, i, i + t.m * (count - 1) + 1, t.m, axis=dim)
        for i in range(t.n if halo else t.m)
    ]


def _unstack(x, axis):
    return [lax.index_in_dim(x, i, axis, keepdims=False) for i in range(x.shape[axis])]


def _apply(matrix, elements, axis):
    """Rows of `matrix` as sums of `elements`, stacked at `axis`. Zeros cost nothing."""
    return jnp.stack(
        [
            sum(
                float(c) * e if c != 1 else e
                for c, e in zip(row, elements, strict=True)
                if c != 0
            )
            for row in matrix
        ],
        axis=axis,
    )


def _product(spec, a, b, contract_tiles=False):
    """The products of all frequencies as one batched matmul, accumulated in fp32."""
    freq = math.prod(a.shape[: spec.rank])
    a = a.reshape(freq, -1, a.shape[-1])
    if contract_tiles:
        b = b.reshape(freq, -1, b.shape[-1])
    return lax.dot_general(
        a,
        b,
        (((1,), (1,)) if contract_tiles else ((2,), (1,)), ((0,), (0,))),
        # The accuracy of F(m, r) rests on unrounded multiplicands.
        precision=lax.Precision.HIGHEST,
        preferred_element_type=spec.accumulate_dtype,
    )
