"""Winograd convolution fused into one Pallas TPU kernel: 3 x 3, stride 1, NHWC.

One grid step takes `rows` tile rows of one image with all their channels: transforms
them, multiplies frequency by frequency on the matrix unit, transforms back and writes
finished pixels. The transformed tiles never leave vector memory.

Layout. Channels lie in lanes, tile columns in sublanes, image rows in untiled
dimensions, split as (tile row, row of the tile). Element j of every tile along a row is
then a load with sublane stride m, and tiles are put back together by a store with the
same stride; both work on one tile of 128 lanes at a time. A block of m * rows input
rows needs r - 1 rows of the next block; they come as a second, m rows high view of the
same array.

float32 uses F(4, 3) with full-precision products; bfloat16 uses F(2, 3), whose error
with multiplicands rounded to bfloat16 is 1.7 times that of one output rounding.

Non-finite inputs: as in `xla.py`, a result that is not finite is computed again
directly.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..conv import direct
from ..conv.epilogue import empty_sum, finish
from ..conv.spec import ConvSpec
from ..finite import or_exact
from ..tiling import LANES, SUBLANES, ceil_div, padded_bytes, result_type, round_up
from . import xla
from .transforms import Transform, transform

# What one kernel may take of the 128 MiB of vector memory of a v5e or v6e core, and how
# much of it the blocks are sized for: the rest is for values that do not fit registers.
_VMEM_LIMIT = 96 << 20
_VMEM_BLOCKS = 24 << 20


def refuses(spec: ConvSpec) -> str | None:
    """Why `spec` cannot be done, or None."""
    if spec.dtype not in ("float32", "bfloat16"):
        return f"takes float32 and bfloat16 only, got {spec.dtype}"
    if spec.kernel != (3, 3):
        return f"takes 3 x 3 kernels only, got {spec.kernel}"
    return xla.refuses(spec)


def forward(
    spec: ConvSpec,
    x: jax.Array,
    w: jax.Array,
    b: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    interpret: bool,
):
    """y = activation(conv(x, w) + b + residual)."""
    if spec.is_empty:
        return empty_sum(spec, b, residual)
    fast = functools.partial(fast_forward, spec, interpret=interpret)
    exact = functools.partial(direct.forward, xla.exactly(spec))
    return or_exact(fast, exact)(*(a for a in (x, w, b, residual) if a is not None))


def input_gradient(
    spec: ConvSpec, w: jax.Array, dy: jax.Array, *, interpret: bool
) -> jax.Array:
    """dx, by the same kernel on dy with the rotated filter."""
    if spec.is_empty:
        return jnp.zeros(spec.x_shape, spec.dtype)
    fast = functools.partial(fast_input_gradient, spec, interpret=interpret)
    exact = functools.partial(direct.input_gradient, xla.exactly(spec))
    return or_exact(fast, exact)(w, dy)


def weight_gradient(
    spec: ConvSpec, x: jax.Array, dy: jax.Array, *, interpret: bool
) -> jax.Array:
    """dw = GT [sum over tiles of (BT x)^T (A dy)] G."""
    if spec.is_empty:
        return jnp.zeros(spec.w_shape, spec.dtype)
    fast = functools.partial(fast_weight_gradient, spec, interpret=interpret)
    exact = functools.partial(direct.weight_gradient, xla.exactly(spec))
    return or_exact(fast, exact)(x, dy)


# The passes for finite results.


def fast_forward(spec: ConvSpec, x, w, b=None, residual=None, *, interpret: bool):
    pads = [lo for lo, _ in spec.padding]
    b = jnp.zeros(w.shape[-1], x.dtype) if b is None else b
    return _correlate(spec, x, w, b, residual, pads, spec.out_spatial, interpret)


def fast_input_gradient(spec: ConvSpec, w, dy, *, interpret: bool):
    rotated = jnp.swapaxes(lax.rev(w, (0, 1)), -1, -2)
    pads = [2 - lo for lo, _ in spec.padding]
    b = jnp.zeros(rotated.shape[-1], dy.dtype)
    spec = dataclasses.replace(spec, activation=None)
    return _correlate(spec, dy, rotated, b, None, pads, spec.spatial, interpret)


def fast_weight_gradient(spec: ConvSpec, x, dy, *, interpret: bool):
    t = _transform(spec)
    channels, outputs = spec.w_shape[-2:]
    block_o = _block_o(outputs)
    tiles_h, tiles_w = _tiles(spec.out_spatial, t)
    rows = _rows_per_step(t, tiles_h, tiles_w, channels, block_o)
    steps_h = ceil_div(tiles_h, rows)
    x = _pad(x, [lo for lo, _ in spec.padding], steps_h * rows, tiles_w, t, halo=True)
    dy = _pad(dy, (0, 0), steps_h * rows, tiles_w, t, halo=False)
    padded_c, padded_o = x.shape[-1], dy.shape[-1]

    du = pl.pallas_call(
        functools.partial(_weight_gradient_kernel, t=t, rows=rows, tiles_w=tiles_w),
        grid=(ceil_div(outputs, block_o), x.shape[0], steps_h),
        in_specs=[
            *_coefficient_specs(),
            *_image_specs(x.shape, rows, lambda o, n, h: (n, h)),
            pl.BlockSpec(
                (1, rows, t.m, t.m * tiles_w, block_o),
                lambda o, n, h: (n, h, 0, 0, o),
            ),
        ],
        out_specs=pl.BlockSpec(
            (t.n * t.n, padded_c, block_o), lambda o, n, h: (0, 0, o)
        ),
        out_shape=result_type((t.n * t.n, padded_c, padded_o), jnp.float32),
        scratch_shapes=[
            pltpu.VMEM((rows + 1, *x.shape[2:]), jnp.float32),
            _by_lane_tiles(rows, x.shape[3], padded_c),
            _by_lane_tiles(rows, t.m * tiles_w, block_o),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=_VMEM_LIMIT,
        ),
        cost_estimate=_cost(t, x.shape[0] * steps_h * rows * tiles_w, spec),
        interpret=interpret,
        name="winograd_weight_gradient",
    )(*_coefficients(t), x, x, dy)
    dw = _map_frequencies(t.array("g", jnp.float32).T, du, spec.dtype, interpret)
    return dw.reshape(3, 3, padded_c, padded_o)[:, :, :channels, :outputs]


def _correlate(spec, x, w, b, residual, pads, out_spatial, interpret):
    """x (N, H, W, C), padded at the low ends by `pads`, with w (3, 3, C, O)."""
    t = _transform(spec)
    batch, (channels, outputs) = x.shape[0], w.shape[-2:]
    block_o = _block_o(outputs)
    tiles_h, tiles_w = _tiles(out_spatial, t)
    rows = _rows_per_step(t, tiles_h, tiles_w, channels, block_o)
    steps_h = ceil_div(tiles_h, rows)
    x = _pad(x, pads, steps_h * rows, tiles_w, t, halo=True)
    w = _pad_lanes(w, -2).reshape(9, x.shape[-1], outputs)
    u = _map_frequencies(t.array("g", jnp.float32), w, x.dtype, interpret)
    y_spec = pl.BlockSpec(
        (1, t.m * rows, out_spatial[1], block_o), lambda o, n, h: (n, h, 0, o)
    )
    y_type = result_type((batch, *out_spatial, outputs), x.dtype)
    outs = pl.pallas_call(
        functools.partial(
            _correlate_kernel,
            spec=spec,
            t=t,
            rows=rows,
            tiles_w=tiles_w,
            has_residual=residual is not None,
        ),
        grid=(ceil_div(outputs, block_o), batch, steps_h),
        in_specs=[
            *_coefficient_specs(),
            *_image_specs(x.shape, rows, lambda o, n, h: (n, h)),
            pl.BlockSpec((t.n * t.n, x.shape[-1], block_o), lambda o, n, h: (0, 0, o)),
            pl.BlockSpec((1, block_o), lambda o, n, h: (0, o)),
            *([] if residual is None else [y_spec]),
        ],
        out_specs=[y_spec] * (1 + spec.keep_preactivation),
        out_shape=[y_type] * (1 + spec.keep_preactivation),
        scratch_shapes=[
            pltpu.VMEM((rows + 1, *x.shape[2:]), jnp.float32),
            _by_lane_tiles(rows, x.shape[3], x.shape[-1]),
            pltpu.VMEM((t.m, t.m, rows, tiles_w, block_o), jnp.float32),
            _by_lane_tiles(rows, t.m * tiles_w, block_o),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel"),
            vmem_limit_bytes=_VMEM_LIMIT,
        ),
        cost_estimate=_cost(t, batch * steps_h * rows * tiles_w, spec),
        interpret=interpret,
        name="winograd_correlate",
    )(*_coefficients(t), x, x, u, b[None], *([] if residual is None else [residual]))
    return tuple(outs) if spec.keep_preactivation else outs[0]


# Kernel bodies. In them an image is (tile row, row of the tile, column, channel), and a
# buffer "by lane tiles" is (lane tile, tile row, column, 128 channels).


def _correlate_kernel(
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


def _weight_gradient_kernel(
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


def _map_frequencies_kernel(x_ref, y_ref, *, matrix):
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


# Blocks.


def _transform(spec: ConvSpec) -> Transform:
    return transform(4 if spec.dtype == "float32" else 2, 3)


def _block_o(outputs: int) -> int:
    """Output channels per block: two lane tiles feed the 256-wide unit of a v6e."""
    return min(outputs, LANES) if outputs < 2 * LANES else 2 * LANES


def _tiles(out_spatial, t) -> tuple[int, int]:
    """Tile rows and tile columns; columns in whole sublane tiles, so that (rows,
    columns, C) is a matrix of tiles by channels without moving data."""
    height, width = out_spatial
    return ceil_div(height, t.m), round_up(ceil_div(width, t.m), SUBLANES)


def _rows_per_step(t, tiles_h, tiles_w, channels, block_o) -> int:
    """The most tile rows whose buffers fit the budget beside the transformed filter."""
    width = t.m * tiles_w + SUBLANES
    per_row = (
        # the block twice (double buffered), its fp32 copy, one transformed row
        (3 * t.m + 1) * padded_bytes((width, channels), 4)
        # accumulators, the finished block, the output block twice
        + 4 * t.m * t.m * padded_bytes((tiles_w, block_o), 4)
    )
    filters = 2 * t.n * t.n * padded_bytes((channels, block_o), 4)
    most = max(1, (_VMEM_BLOCKS - min(filters, _VMEM_BLOCKS)) // per_row)
    steps = ceil_div(tiles_h, min(most, tiles_h))
    return ceil_div(tiles_h, steps)  # steps of even height waste the fewest rows


def _pad(x, pads, tiles_h, tiles_w, t, halo):
    """Pads, or crops where negative, to whole blocks: (N, tile rows, m, W, C).

    A halo is one more tile row, and columns in whole sublane tiles.
    """
    config = [(0, 0, 0)]
    wanted = (
        t.m * (tiles_h + (1 if halo else 0)),
        t.m * tiles_w + (SUBLANES if halo else 0),
    )
    for size, lo, want in zip(x.shape[1:-1], pads, wanted, strict=True):
        config.append((lo, want - size - lo, 0))
    x = lax.pad(x, jnp.zeros((), x.dtype), [*config, (0, 0, 0)])
    x = _pad_lanes(x, -1)
    return x.reshape(x.shape[0], -1, t.m, *x.shape[2:])


def _pad_lanes(x, axis):
    """Pads channels to whole lane tiles, where they are more than one."""
    channels = x.shape[axis]
    extra = round_up(channels, LANES) - channels if channels > LANES else 0
    config = [(0, 0, 0)] * x.ndim
    config[axis] = (0, extra, 0)
    return lax.pad(x, jnp.zeros((), x.dtype), config)


def _image_specs(shape, rows, position):
    """The specs of an image block and of its halo; `position(*grid)` is (n, h)."""

    def block(*grid):
        n, h = position(*grid)
        return n, h, 0, 0, 0

    def halo(*grid):
        n, h = position(*grid)
        return n, (h + 1) * rows, 0, 0, 0

    return (
        pl.BlockSpec((1, rows, *shape[2:]), block),
        pl.BlockSpec((1, 1, *shape[2:]), halo),
    )


def _coefficient_specs():
    return [pl.BlockSpec(memory_space=pltpu.SMEM)] * 2


def _coefficients(t):
    return t.array("bt", jnp.float32), t.array("at", jnp.float32)


def _by_lane_tiles(rows, width, channels):
    lanes = min(channels, LANES)
    return pltpu.VMEM((channels // lanes, rows, width, lanes), jnp.float32)


def _map_frequencies(matrix, x, dtype, interpret):
    """matrix x matrix^T over the two axes that the first stands for.

    x (c*c, C, O) gives (r*r, C, O).
    """
    r, c = matrix.shape
    _, channels, outputs = x.shape
    block_c, block_o = min(channels, 2 * SUBLANES), _block_o(outputs)
    return pl.pallas_call(
        functools.partial(_map_frequencies_kernel, matrix=matrix),
        grid=(ceil_div(channels, block_c), ceil_div(outputs, block_o)),
        in_specs=[pl.BlockSpec((c * c, block_c, block_o), lambda i, o: (0, i, o))],
        out_specs=pl.BlockSpec((r * r, block_c, block_o), lambda i, o: (0, i, o)),
        out_shape=result_type((r * r, channels, outputs), dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel")
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * r * c * (r + c) * channels * outputs,
            bytes_accessed=(c * c + r * r) * channels * outputs * 4,
            transcendentals=0,
        ),
        interpret=interpret,
        name="winograd_map_frequencies",
    )(x)


def _cost(t, tiles, spec):
    channels, outputs = spec.w_shape[-2:]
    itemsize = jnp.dtype(spec.dtype).itemsize
    pixels = t.m * t.m * tiles
    return pl.CostEstimate(
        flops=2 * t.n * t.n * tiles * channels * outputs,
        bytes_accessed=itemsize
        * (pixels * (channels + outputs) + t.n * t.n * math.prod(spec.w_shape[-2:])),
        transcendentals=0,
    )
