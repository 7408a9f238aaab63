"""Winograd convolution fused into one Pallas TPU kernel: 3 x 3, stride 1, NHWC.

One grid step takes `rows` tile rows of one image with all their channels: transforms
them, multiplies frequency by frequency on the matrix unit, transforms back and writes
finished pixels. The transformed tiles never leave vector memory. The kernels are in
`tpu_kernels.py`, how images are cut and laid out for them in `tpu_blocks.py`.

float32 uses F(4, 3) with full-precision products; bfloat16 uses F(2, 3), whose error
with multiplicands rounded to bfloat16 is 1.7 times that of one output rounding.

Non-finite inputs: as in `xla.py`, a result that is not finite is computed again
directly.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..conv import direct
from ..conv.epilogue import empty_sum
from ..conv.spec import ConvSpec
from ..finite import or_exact
from ..tiling import SUBLANES, ceil_div, result_type
from . import tpu_blocks as blocks
from . import tpu_kernels as kernels
from . import xla


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
    t = blocks.transform_of(spec)
    channels, outputs = spec.w_shape[-2:]
    block_o = blocks.block_outputs(outputs)
    tiles_h, tiles_w = blocks.tiles_of(spec.out_spatial, t)
    rows = blocks.rows_per_step(t, tiles_h, tiles_w, channels, block_o)
    steps_h = ceil_div(tiles_h, rows)
    x = blocks.pad(
        x, [lo for lo, _ in spec.padding], steps_h * rows, tiles_w, t, halo=True
    )
    dy = blocks.pad(dy, (0, 0), steps_h * rows, tiles_w, t, halo=False)
    padded_c, padded_o = x.shape[-1], dy.shape[-1]

    du = pl.pallas_call(
        functools.partial(
            kernels.weight_gradient_kernel, t=t, rows=rows, tiles_w=tiles_w
        ),
        grid=(ceil_div(outputs, block_o), x.shape[0], steps_h),
        in_specs=[
            *blocks.coefficient_specs(),
            *blocks.image_specs(x.shape, rows, lambda o, n, h: (n, h)),
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
            blocks.by_lane_tiles(rows, x.shape[3], padded_c),
            blocks.by_lane_tiles(rows, t.m * tiles_w, block_o),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=blocks.VMEM_LIMIT,
        ),
        cost_estimate=blocks.cost(t, x.shape[0] * steps_h * rows * tiles_w, spec),
        interpret=interpret,
        name="winograd_weight_gradient",
    )(*blocks.coefficients(t), x, x, dy)
    dw = _map_frequencies(t.array("g", jnp.float32).T, du, spec.dtype, interpret)
    return dw.reshape(3, 3, padded_c, padded_o)[:, :, :channels, :outputs]


def _correlate(spec, x, w, b, residual, pads, out_spatial, interpret):
    """x (N, H, W, C), padded at the low ends by `pads`, with w (3, 3, C, O)."""
    t = blocks.transform_of(spec)
    batch, (channels, outputs) = x.shape[0], w.shape[-2:]
    block_o = blocks.block_outputs(outputs)
    tiles_h, tiles_w = blocks.tiles_of(out_spatial, t)
    rows = blocks.rows_per_step(t, tiles_h, tiles_w, channels, block_o)
    steps_h = ceil_div(tiles_h, rows)
    x = blocks.pad(x, pads, steps_h * rows, tiles_w, t, halo=True)
    w = blocks.pad_lanes(w, -2).reshape(9, x.shape[-1], outputs)
    u = _map_frequencies(t.array("g", jnp.float32), w, x.dtype, interpret)
    y_spec = pl.BlockSpec(
        (1, t.m * rows, out_spatial[1], block_o), lambda o, n, h: (n, h, 0, o)
    )
    y_type = result_type((batch, *out_spatial, outputs), x.dtype)
    outs = pl.pallas_call(
        functools.partial(
            kernels.correlate_kernel,
            spec=spec,
            t=t,
            rows=rows,
            tiles_w=tiles_w,
            has_residual=residual is not None,
        ),
        grid=(ceil_div(outputs, block_o), batch, steps_h),
        in_specs=[
            *blocks.coefficient_specs(),
            *blocks.image_specs(x.shape, rows, lambda o, n, h: (n, h)),
            pl.BlockSpec((t.n * t.n, x.shape[-1], block_o), lambda o, n, h: (0, 0, o)),
            pl.BlockSpec((1, block_o), lambda o, n, h: (0, o)),
            *([] if residual is None else [y_spec]),
        ],
        out_specs=[y_spec] * (1 + spec.keep_preactivation),
        out_shape=[y_type] * (1 + spec.keep_preactivation),
        scratch_shapes=[
            pltpu.VMEM((rows + 1, *x.shape[2:]), jnp.float32),
            blocks.by_lane_tiles(rows, x.shape[3], x.shape[-1]),
            pltpu.VMEM((t.m, t.m, rows, tiles_w, block_o), jnp.float32),
            blocks.by_lane_tiles(rows, t.m * tiles_w, block_o),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel"),
            vmem_limit_bytes=blocks.VMEM_LIMIT,
        ),
        cost_estimate=blocks.cost(t, batch * steps_h * rows * tiles_w, spec),
        interpret=interpret,
        name="winograd_correlate",
    )(
        *blocks.coefficients(t),
        x,
        x,
        u,
        b[None],
        *([] if residual is None else [residual]),
    )
    return tuple(outs) if spec.keep_preactivation else outs[0]


def _map_frequencies(matrix, x, dtype, interpret):
    """matrix x matrix^T over the two axes that the first stands for.

    x (c*c, C, O) gives (r*r, C, O).
    """
    r, c = matrix.shape
    _, channels, outputs = x.shape
    block_c, block_o = min(channels, 2 * SUBLANES), blocks.block_outputs(outputs)
    return pl.pallas_call(
        functools.partial(kernels.map_frequencies_kernel, matrix=matrix),
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
