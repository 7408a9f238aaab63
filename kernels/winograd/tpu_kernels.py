"""The bodies of the Winograd TPU kernels.

In them an image is (tile row, row of the tile, column, channel), and a buffer "by lane
tiles" is (lane tile, tile row, column, 128 channels), see `tpu_blocks.py`.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ..conv.epilogue import finish
from ..conv.spec import ConvSpec
from .transforms import Transform


def correlate_kernel(
    bt_ref, at_ref, x_ref, halo_ref, u_ref, b_ref, *refs,
    spec: ConvSpec, t: Transform, rows: int, tiles_w: int, has_residual: bool,
):  # fmt: skip
    """y (1, m*rows, W, O) from an image block and u (n*n, C, O).

    After b comes the residual, if there is one; y, and z if the spec keeps it; and
    scratch: image (rows + 1, m, W, C), acc (m, m, rows, tiles_w, O), row and out by
    lane tiles.
    """
    residual_ref = refs[0] if has_residual else None
    *y_refs, image_ref, row_ref, acc_ref, out_ref = refs[has_residual:]
    _load_image(x_ref, halo_ref, image_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)

    # A loop, with coefficients read from scalar memory: unrolled, the 36 products of
    # F(4, 3) make a program that takes minutes to compile.
    @pl.loop(0, t.n)
    def _(p):
        down = [bt_ref[p, i] * e for i, e in enumerate(_rows(image_ref, t, rows))]
        _store_by_lanes(row_ref, _sum(down))
        elements = _column_elements(row_ref, t.n, t, tiles_w)
        products = []
        for q in range(t.n):
            v = _combine(t.bt[q], elements)  # (rows, tiles_w, C)
            v = v.reshape(rows * tiles_w, -1).astype(u_ref.dtype)
            product = _dot(v, u_ref[p * t.n + q], ((1,), (0,)))
            products.append(product.reshape(rows, tiles_w, -1))
        for j in range(t.m):
            across = _combine(t.at[j], products)
            for i in range(t.m):
                acc_ref[i, j] += at_ref[i, p] * across

    width, lanes = y_refs[0].shape[2], out_ref.shape[-1]
    bias = _f32(b_ref[...])[None]  # (1, 1, O)
    for i in range(t.m):
        for j in range(t.m):
            columns = pl.ds(j, tiles_w, t.m)
            for k in range(out_ref.shape[0]):
                part = acc_ref[i, j, :, :, k * lanes : (k + 1) * lanes]
                out_ref[pl.ds(k, 1), :, columns, :] = part[None]
        y = jnp.concatenate([out_ref[k] for k in range(out_ref.shape[0])], -1)
        y = y[:, :width]
        if spec.activation == "relu":
            # Of a sum that overflowed to -inf on the way it would make a zero.
            y += y - y
        y += bias
        for r in range(rows):
            row = r * t.m + i
            more = residual_ref[0, row] if has_residual else None
            outs = finish(spec, y[r], residual=more)
            outs = outs if spec.keep_preactivation else (outs,)
            for ref, out in zip(y_refs, outs, strict=True):
                ref[0, row] = out


def weight_gradient_kernel(
    bt_ref, at_ref, x_ref, halo_ref, dy_ref, du_ref, image_ref, row_ref, dy_row_ref,
    *, t: Transform, rows: int, tiles_w: int,
):  # fmt: skip
    """du (n*n, C, O), summed over the grid, from an image block and dy's block.

    dy (1, rows, m, m*tiles_w, O).
    """

    @pl.when((pl.program_id(1) == 0) & (pl.program_id(2) == 0))
    def _():
        du_ref[...] = jnp.zeros_like(du_ref)

    _load_image(x_ref, halo_ref, image_ref)

    @pl.loop(0, t.n)
    def _(p):
        down = [bt_ref[p, i] * e for i, e in enumerate(_rows(image_ref, t, rows))]
        _store_by_lanes(row_ref, _sum(down))
        dy_down = [at_ref[i, p] * _f32(dy_ref[0, :, i]) for i in range(t.m)]
        _store_by_lanes(dy_row_ref, _sum(dy_down))
        x_elements = _column_elements(row_ref, t.n, t, tiles_w)
        dy_elements = _column_elements(dy_row_ref, t.m, t, tiles_w)
        for q in range(t.n):
            v = _combine(t.bt[q], x_elements)
            z = _combine([t.at[j][q] for j in range(t.m)], dy_elements)
            v, z = (a.reshape(rows * tiles_w, -1).astype(x_ref.dtype) for a in (v, z))
            du_ref[p * t.n + q] += _dot(v, z, ((0,), (0,)))


def map_frequencies_kernel(x_ref, y_ref, *, matrix):
    """y = matrix x matrix^T over two leading axes: x (c*c, ...) -> y (r*r, ...)."""
    r, c = matrix.shape
    half = [
        [_combine(matrix[i], [_f32(x_ref[k * c + j]) for k in range(c)])
         for j in range(c)]
        for i in range(r)
    ]  # fmt: skip
    for i in range(r):
        for j in range(r):
            y_ref[i * r + j] = _combine(matrix[j], half[i]).astype(y_ref.dtype)


def _load_image(x_ref, halo_ref, image_ref):
    """Joins a block and its halo, x (1, rows, m, W, C) and (1, 1, m, W, C), in fp32."""
    rows = x_ref.shape[1]
    image_ref[:rows] = _f32(x_ref[0])
    image_ref[rows:] = _f32(halo_ref[0])


def _rows(image_ref, t, rows):
    """Row i of every tile row, for i < n: n arrays (rows, W, C)."""
    return [image_ref[pl.ds(i // t.m, rows), i % t.m] for i in range(t.n)]


def _store_by_lanes(ref, value):
    """value (rows, W, C) into ref (C / lanes, rows, W, lanes)."""
    lanes = ref.shape[-1]
    for k in range(ref.shape[0]):
        ref[k] = value[:, :, k * lanes : (k + 1) * lanes]


def _column_elements(row_ref, count, t, tiles_w):
    """Column j of every tile, for j < count: arrays (rows, tiles_w, C)."""

    def column(j):
        strided = pl.ds(j, tiles_w, t.m)
        parts = [row_ref[pl.ds(k, 1), :, strided, :] for k in range(row_ref.shape[0])]
        return jnp.concatenate(parts, axis=-1)[0]

    return [column(j) for j in range(count)]


def _combine(coefficients, values):
    """The sum of c * v; zeros cost nothing."""
    terms = [
        v if c == 1 else v * float(c)
        for c, v in zip(coefficients, values, strict=True)
        if c != 0
    ]
    return _sum(terms)


def _sum(terms):
    return functools.reduce(jnp.add, terms)


def _f32(x):
    return x.astype(jnp.float32)


def _dot(a, b, contract):
    return lax.dot_general(
        a,
        b,
        (contract, ((), ())),
        # The accuracy of F(4, 3) rests on unrounded fp32 multiplicands; products of
        # bfloat16 are exact in fp32 as they are.
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
