"""Winograd convolution as plain XLA operations: stride 1, one to three dimensions.

Forward, input gradient and weight gradient are three readings of one trilinear form,
with U = G w, V = BT x and Z = A dy (transforms applied along every spatial axis):

    y  = AT [sum_C V U]        dx = the same with dy and the rotated filter
    dw = GT [sum_tiles V Z]

All three have the rounding error that `Transform.kappa` predicts. Everything is done in
fp32 (fp64 for fp64 data) and rounded once, at the end: half-precision inputs are exact
in fp32, and the processors this is meant for multiply fp32 at least as fast.

The images are worked through in blocks of tile rows, so that a transformed block,
n^2/m^2 times the size of its input, stays in cache. A block is of one image, or of
whole ones, so that its outputs lie together.

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

from ..conv import direct, windows
from ..conv.epilogue import empty_sum, finish
from ..conv.spec import ConvSpec
from ..finite import or_exact
from .transforms import Transform, transform

# Outputs per tile and axis by taps: the most for which the six products of F(4, 3) and
# its points are enough, but for seven taps. F(4, 3) does a quarter of the direct form's
# products in 2-D; F(6, 3) a fifth, with four times the rounding error.
_TILES = {1: 1, 2: 3, 3: 4, 4: 3, 5: 2, 7: 2}

# Along the first of three axes F(2, 3), lest the error grow with each dimension.
_DEPTH_TILE = 2

# Tiles of a block: enough for each frequency's product to be worth reading the filter
# again, few enough to stay in cache. For dw, which is read and written, twice as many.
_BLOCK_TILES = 64
_BLOCK_TILES_DW = 128


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
    dy = dy.reshape(dy.shape[0], -1, ts[0].m, *dy.shape[2:])
    blocks = _blocks(spec, x, ts, _BLOCK_TILES_DW)

    def block(i):
        v = _input_transform(spec, blocks.of_input(x, i), ts)  # (*n, N, *tiles, C)
        dyb = blocks.of_output(dy, i)  # (N, tiles, m, *S, O)
        dyb = dyb.reshape(dyb.shape[0], -1, *dyb.shape[3:])
        z = _expand(spec, dyb, ts)  # (*n, N, *tiles, O)
        return _product(spec, v, z, contract_tiles=True)

    du = block(0)
    if blocks.count > 1:
        du, _ = lax.scan(
            lambda acc, i: (acc + block(i), None), du, jnp.arange(1, blocks.count)
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
    blocks = _blocks(spec, x, ts, _BLOCK_TILES)

    def block(i):
        v = _input_transform(spec, blocks.of_input(x, i), ts)
        products = _product(spec, v, u).reshape(*v.shape[:-1], w.shape[-1])
        return _output_transform(products, ts)

    y = blocks.join(lax.map(block, jnp.arange(blocks.count)))
    return y[:, *(slice(0, size) for size in out_spatial)]


def transforms(spec: ConvSpec, m: int | None = None) -> list[Transform]:
    """The transform of each axis; one with one tap is left as it is."""
    default = dict(enumerate(_TILES[r] for r in spec.kernel))
    if spec.rank == 3 and spec.kernel[0] == 3:
        default[0] = _DEPTH_TILE
    return [
        transform(1 if r == 1 else m or default[axis], r)
        for axis, r in enumerate(spec.kernel)
    ]


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


def _blocks(spec, padded, ts, most) -> windows.Slabs:
    """`padded` in blocks of at most `most` tiles, a tile being what one output was."""
    tile_by_tile = dataclasses.replace(
        spec,
        x_shape=padded.shape,
        w_shape=(*(t.n for t in ts), *spec.w_shape[-2:]),
        strides=tuple(t.m for t in ts),
        padding=((0, 0),) * spec.rank,
    )
    return windows.Slabs(tile_by_tile, lambda count: count <= most)


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
    rank = len(ts)
    for axis, t in enumerate(ts):
        at = t.array("at", products.dtype)
        products = _apply(at, _unstack(products, axis), axis)
    # (*m, N, *tiles, O), interleaved by one copy: each in a transform of its own would
    # keep XLA from working on whole vectors of channels.
    n, *tiles, o = products.shape[rank:]
    order = [axis for i in range(rank) for axis in (rank + 1 + i, i)]
    y = lax.transpose(products, (rank, *order, 2 * rank + 1))
    return y.reshape(n, *(c * t.m for c, t in zip(tiles, ts, strict=True)), o)


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
