"""The bodies of the Winograd TPU kernels.

In them a pixel is a register or several: (images, channels), see `tpu_blocks.py`. The
tiles of a step are the rows of a matrix, column by column, the images of one together.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ..conv.epilogue import finish
from ..conv.spec import ConvSpec
from .tpu_blocks import Blocks


def correlate_kernel(
    bt_ref, at_ref, x_ref, u_ref, b_ref, *refs,
    spec: ConvSpec, blocks: Blocks, has_residual: bool,
):  # fmt: skip
    """Finished pixels from a window and u (parts, n*n, C, O).

    After b comes the residual, if there is one; y, and z if the spec keeps it; and
    scratch: acc (m columns, m rows, tiles, O).
    """
    residual_ref = refs[0] if has_residual else None
    *y_refs, acc_ref = refs[has_residual:]
    t = blocks.t
    acc_ref[...] = jnp.zeros_like(acc_ref)

    # A loop, with coefficients read from scalar memory: unrolled, the 36 products of
    # F(4, 3) make a program that takes minutes to compile.
    @pl.loop(0, t.n)
    def _(p):
        row = _sum([bt_ref[p, i] * _f32(x_ref[i]) for i in range(t.n)])
        elements = _column_elements(row, t.n, blocks)
        products = [
            _product(_parts(_combine(t.bt[q], elements), blocks), u_ref, p * t.n + q)
            for q in range(t.n)
        ]
        for j in range(t.m):
            across = _combine(t.at[j], products)
            acc_ref[j] += jnp.stack([at_ref[i, p] * across for i in range(t.m)])

    for i in range(t.m):
        elements = [acc_ref[j, i] for j in range(t.m)]
        y = _row_of_pixels(elements, blocks)
        if spec.activation == "relu":
            # Of a sum that overflowed to -inf on the way it would make a zero, which
            # `or_exact` could not tell from a finite result: so it is NaN.
            y += y - y
        y += _f32(b_ref[...])
        more = residual_ref[i].reshape(y.shape) if has_residual else None
        outs = finish(spec, y, residual=more)
        outs = outs if spec.keep_preactivation else (outs,)
        for ref, out in zip(y_refs, outs, strict=True):
            ref[i] = out.reshape(ref.shape[1:])


def weight_gradient_kernel(bt_ref, at_ref, x_ref, dy_ref, du_ref, *, blocks: Blocks):
    """du (n*n, C, O), summed over the grid, from a window of x and its pixels of dy."""
    t = blocks.t
    first = [pl.program_id(axis) == 0 for axis in (1, 2, 3)]

    @pl.when(functools.reduce(jnp.logical_and, first))
    def _():
        du_ref[...] = jnp.zeros_like(du_ref)

    @pl.loop(0, t.n)
    def _(p):
        row = _sum([bt_ref[p, i] * _f32(x_ref[i]) for i in range(t.n)])
        dy_row = _sum([at_ref[i, p] * _f32(dy_ref[i]) for i in range(t.m)])
        x_elements = _column_elements(row, t.n, blocks)
        dy_elements = _column_elements(dy_row, t.m, blocks)
        for q in range(t.n):
            v = _parts(_combine(t.bt[q], x_elements), blocks)
            z = _parts(_combine([t.at[j][q] for j in range(t.m)], dy_elements), blocks)
            # The pairs of `_product`, side by side along the tiles that are summed.
            pairs = [(i, j) for i in range(len(v)) for j in range(len(v) - i)]
            v, z = (
                jnp.concatenate([each[pair[k]] for pair in pairs])
                for k, each in enumerate((v, z))
            )
            du_ref[p * t.n + q] += _dot(v, z, ((0,), (0,)))


def map_frequencies_kernel(x_ref, y_ref, *, matrix):
    """y, the product of `matrix`, x and matrix^T over the axes that x's first holds.

    x (c*c, ...). In fp32; y (parts, r*r, ...) holds the result as parts, see `_split`.
    """
    r, c = matrix.shape
    x, (count, *_) = _f32(x_ref[...]), y_ref.shape
    columns = [[x[k * c + j] for k in range(c)] for j in range(c)]
    for i in range(r):
        half = [_combine(matrix[i], column) for column in columns]
        each = [_split(_combine(row, half), count, y_ref.dtype) for row in matrix]
        for k, part in enumerate(zip(*each, strict=True)):
            y_ref[k, i * r : (i + 1) * r] = jnp.stack(part)


def _column_elements(row, count, blocks):
    """Column j of every tile, for j < count: matrices (tiles, C)."""
    m = blocks.t.m
    return [
        jnp.concatenate([row[m * k + j] for k in range(blocks.columns)])
        for j in range(count)
    ]


def _row_of_pixels(elements, blocks):
    """The inverse for the m elements of an output: (columns * images, O)."""
    batch = blocks.batch
    return jnp.concatenate(
        [
            element[k * batch : (k + 1) * batch]
            for k in range(blocks.columns)
            for element in elements
        ]
    )


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


def _parts(x, blocks):
    return _split(x, blocks.parts, jnp.bfloat16)


def _split(x, count, dtype):
    """Numbers of `dtype` that sum up to x, each what the ones before it leave over."""
    parts = [x.astype(dtype)]
    while len(parts) < count:
        x = x - _f32(parts[-1])
        parts.append(x.astype(dtype))
    return parts


def _product(v, u_ref, f):
    """v (tiles, C) times u (C, O), each a sum of as many parts.

    Of three parts those six pairs are multiplied that fp32 can tell from none. All
    that meet the same part of u are rows of one product, which loads it once.
    """
    count, rows = len(v), v[0].shape[0]
    orders = [[] for _ in range(count)]
    for j in range(count):
        stacked = jnp.concatenate(v[: count - j]) if count - j > 1 else v[0]
        products = _dot(stacked, u_ref[j, f], ((1,), (0,)))
        for i in range(count - j):
            orders[i + j].append(products[i * rows : (i + 1) * rows])
    # The small ones first.
    return _sum([_sum(order) for order in reversed(orders)])


def _dot(a, b, contract):
    """Products of bfloat16 are exact in fp32, in which they are summed."""
    return lax.dot_general(
        a, b, (contract, ((), ())), preferred_element_type=jnp.float32
    )
