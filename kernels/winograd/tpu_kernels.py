"""The bodies of the Winograd TPU kernels.

In them a pixel is a register or several: (images, channels), see `tpu_blocks.py`. The
tiles of a step are the rows of a matrix, row by row, the images of one together.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ..conv.epilogue import finish
from ..conv.spec import ConvSpec
from .tpu_blocks import CHUNK, Blocks


def correlate_kernel(
    bt_ref, at_ref, x_ref, w_ref, b_ref, *refs,
    spec: ConvSpec, blocks: Blocks, has_residual: bool,
):  # fmt: skip
    """Finished pixels from a window and the filter, (r*r, C, O).

    After b comes the residual, if there is one; y, and z if the spec keeps it; and
    scratch: u (parts, n*n, C, O), which the first step of an O fills for the others,
    and acc (m columns, m rows, tiles, O). There is one more, turned (r*r, some of C,
    O), if the filter is that of the pass whose gradient this is: (r*r, O, C), flipped.
    """
    residual_ref = refs[0] if has_residual else None
    results = has_residual + 1 + spec.keep_preactivation
    y_refs, (u_ref, acc_ref, *turned_refs) = refs[has_residual:results], refs[results:]
    t = blocks.t

    @pl.when(_is_first_of_outputs())
    def _():
        if turned_refs:
            _transform_turned(w_ref, *turned_refs, u_ref, blocks)
        else:
            _transform_filter(w_ref, u_ref, blocks)

    acc_ref[...] = jnp.zeros_like(acc_ref)

    # A loop, with coefficients read from scalar memory: unrolled, the 36 products of
    # F(4, 3) make a program that takes minutes to compile.
    @pl.loop(0, t.n)
    def _(p):
        rows = _combine_rows([bt_ref[p, i] for i in range(t.n)], x_ref, blocks)
        elements = _column_elements(rows, t.n, blocks)
        products = [
            _product(_parts(_combine(t.bt[q], elements), blocks), u_ref, p * t.n + q)
            for q in range(t.n)
        ]
        for j in range(t.m):
            across = _combine(t.at[j], products)
            acc_ref[j] += jnp.stack([at_ref[i, p] * across for i in range(t.m)])

    for i in range(t.m):
        y = _rows_of_pixels([acc_ref[j, i] for j in range(t.m)], blocks)
        if spec.activation == "relu":
            # Of a sum that overflowed to -inf on the way it would make a zero, which
            # `or_exact` could not tell from a finite result: so it is NaN.
            y += y - y
        y += _f32(b_ref[...])
        # Of every row of tiles, pixel row i.
        here = range(i, t.m * blocks.rows, t.m)
        more = None
        if has_residual:
            more = jnp.stack([residual_ref[h] for h in here]).reshape(y.shape)
        outs = finish(spec, y, residual=more)
        outs = outs if spec.keep_preactivation else (outs,)
        for ref, out in zip(y_refs, outs, strict=True):
            pixels = out.reshape(blocks.rows, *ref.shape[1:])
            for row, h in enumerate(here):
                ref[h] = pixels[row]


def weight_gradient_kernel(
    bt_ref, at_ref, x_ref, dy_ref, dw_ref, du_ref, *, blocks: Blocks
):
    """dw (r*r, C, O), from windows of x and their pixels of dy.

    Scratch: du (n*n, C, O), summed over all steps of an O.
    """
    t, g = blocks.t, blocks.t.array("g", jnp.float32)

    @pl.when(_is_first_of_outputs())
    def _():
        du_ref[...] = jnp.zeros_like(du_ref)

    @pl.loop(0, t.n)
    def _(p):
        x_rows = _combine_rows([bt_ref[p, i] for i in range(t.n)], x_ref, blocks)
        dy_rows = _combine_rows([at_ref[i, p] for i in range(t.m)], dy_ref, blocks)
        x_elements = _column_elements(x_rows, t.n, blocks)
        dy_elements = _column_elements(dy_rows, t.m, blocks)
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

    @pl.when(_is_last_of_outputs())
    def _():
        @pl.loop(0, blocks.channels // CHUNK)
        def _(k):
            chunk = _chunk(k)
            du = [du_ref[f, chunk] for f in range(t.n**2)]
            dw = jnp.stack(list(_both_sides(g.T, du)))
            dw_ref[:, chunk] = dw.astype(dw_ref.dtype)


def _transform_filter(w_ref, u_ref, blocks, start=0):
    """Fills u from w (r*r, channels, O), whose first channel is `start` of all."""
    t, g = blocks.t, blocks.t.array("g", jnp.float32)

    @pl.loop(0, w_ref.shape[1] // CHUNK)
    def _(k):
        chunk = _chunk(k)
        w = [_f32(w_ref[i, chunk]) for i in range(t.r**2)]
        chunk = pl.ds(pl.multiple_of(start + k * CHUNK, CHUNK), CHUNK)
        for f, element in enumerate(_both_sides(g, w)):
            for j, part in enumerate(_parts(element, blocks)):
                u_ref[j, f, chunk] = part


def _transform_turned(w_ref, turned_ref, u_ref, blocks):
    """Fills u from w (r*r, O, C), flipped in space.

    XLA would do both in main memory, which cost a tenth of dx of 512 channels.
    """
    taps, width, _ = turned_ref.shape

    @pl.loop(0, blocks.channels // width)
    def _(k):
        start = pl.multiple_of(k * width, width)
        for i in range(taps):
            turned_ref[i] = _f32(w_ref[taps - 1 - i, :, pl.ds(start, width)]).T
        _transform_filter(turned_ref, u_ref, blocks, start)


def _is_first_of_outputs():
    """Whether no step has come before with these outputs."""
    return _all([pl.program_id(axis) == 0 for axis in (1, 2, 3)])


def _is_last_of_outputs():
    """Whether no other step comes with these outputs."""
    return _all([pl.program_id(i) == pl.num_programs(i) - 1 for i in (1, 2, 3)])


def _all(conditions):
    return functools.reduce(jnp.logical_and, conditions)


def _chunk(k):
    return pl.ds(pl.multiple_of(k * CHUNK, CHUNK), CHUNK)


def _both_sides(matrix, x):
    """The elements of `matrix` X matrix^T, row by row, from those of X."""
    _, c = matrix.shape
    columns = [x[j::c] for j in range(c)]
    for left in matrix:
        half = [_combine(left, column) for column in columns]
        for right in matrix:
            yield _combine(right, half)


def _combine_rows(coefficients, ref, blocks):
    """For every row of tiles the sum of c times its pixel rows, from the first on."""
    starts = [blocks.t.m * row for row in range(blocks.rows)]
    return [
        _sum([c * _f32(ref[start + i]) for i, c in enumerate(coefficients)])
        for start in starts
    ]


def _column_elements(rows, count, blocks):
    """Column j of every tile, for j < count: matrices (tiles, C)."""
    m = blocks.t.m
    return [
        jnp.concatenate([row[m * k + j] for row in rows for k in range(blocks.columns)])
        for j in range(count)
    ]


def _rows_of_pixels(elements, blocks):
    """The inverse for the m elements of an output: (rows * columns * images, O)."""
    batch = blocks.batch
    return jnp.concatenate(
        [
            element[k * batch : (k + 1) * batch]
            for k in range(blocks.rows * blocks.columns)
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
    """Numbers of bfloat16 that sum up to x, each what the ones before it leave over."""
    parts = [x.astype(jnp.bfloat16)]
    while len(parts) < blocks.parts:
        x = x - _f32(parts[-1])
        parts.append(x.astype(jnp.bfloat16))
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
