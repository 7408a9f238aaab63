"""Winograd convolution fused into one Pallas TPU kernel: 3 x 3, stride 1.

One grid step takes a few tiles of several images with all their channels: transforms
them, multiplies frequency by frequency on the matrix unit, transforms back and writes
finished pixels. Neither the transformed tiles nor the transformed filter ever leave
vector memory. The kernels are in `tpu_kernels.py`, how images are cut and laid out for
them in `tpu_blocks.py`.

float32 uses F(4, 3). The matrix unit multiplies numbers of bfloat16, so multiplicands
are split into three of these, and the six larger products are summed: what XLA does for
`precision="highest"`, but the filter is split once, and each part of it loaded once a
step. bfloat16 uses F(2, 3), whose error with multiplicands rounded to bfloat16 is 1.7
times that of one output rounding.

Non-finite inputs: as in `xla.py`, a result that is not finite is computed again
directly.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..conv import direct, windows
from ..conv.epilogue import empty_sum
from ..conv.spec import ConvSpec
from ..finite import or_exact
from ..tiling import result_type
from . import tpu_kernels as kernels
from . import xla
from .tpu_blocks import (
    VMEM_LIMIT,
    blocks_of,
    coefficient_specs,
    coefficients,
    from_sublanes,
    to_sublanes,
)


def refuses(spec: ConvSpec) -> str | None:
    """Why `spec` cannot be done, or None."""
    if spec.dtype not in ("float32", "bfloat16"):
        return f"takes float32 and bfloat16 only, got {spec.dtype}"
    if spec.kernel != (3, 3):
        return f"takes 3 x 3 kernels only, got {spec.kernel}"
    if reason := xla.refuses(spec):
        return reason
    if spec.is_empty:
        return None
    if not all(blocks_of(s).fits for s in (spec, windows.over_dy(spec))):
        return (
            "takes no more channels than fit vector memory, about 1000, got "
            f"{' and '.join(map(str, spec.w_shape[-2:]))}"
        )
    return None


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


# Steps of one O share a transformed filter: only those of different ones are parallel.
_COMPILER_PARAMS = pltpu.CompilerParams(
    dimension_semantics=("parallel", *("arbitrary",) * 3), vmem_limit_bytes=VMEM_LIMIT
)


# The passes for finite results.


def fast_forward(spec: ConvSpec, x, w, b=None, residual=None, *, interpret: bool):
    blocks = blocks_of(spec)
    w = blocks.pad_filter(w)
    return _correlate(spec, blocks, x, w, b, residual, interpret)


def fast_input_gradient(spec: ConvSpec, w, dy, *, interpret: bool):
    spec = windows.over_dy(spec)
    blocks = blocks_of(spec)
    w = blocks.pad_filter(w, axis=3)
    return _correlate(spec, blocks, dy, w, None, None, interpret, turned=True)


def _correlate(spec, blocks, x, w, b, residual, interpret, turned=False):
    """x with w (r*r, C, O), or with (r*r, O, C), flipped, if it is to be turned."""
    x = blocks.pad(spec, x)
    outputs = spec.w_shape[-1]
    b = jnp.zeros(outputs, jnp.float32) if b is None else b
    more = [] if residual is None else [to_sublanes(residual)]
    y_type = result_type((*spec.out_spatial, spec.x_shape[0], outputs), spec.dtype)
    scratch = [
        pltpu.VMEM((blocks.parts, *blocks.transformed), jnp.bfloat16),
        pltpu.VMEM((blocks.t.m, blocks.t.m, blocks.tiles, blocks.block_o), jnp.float32),
    ]
    if turned:
        scratch.append(pltpu.VMEM(blocks.turned, jnp.float32))
    outs = pl.pallas_call(
        functools.partial(
            kernels.correlate_kernel, spec=spec, blocks=blocks, has_residual=bool(more)
        ),
        grid=blocks.grid,
        in_specs=[
            *coefficient_specs(),
            blocks.window_spec(),
            blocks.turned_spec() if turned else blocks.filter_spec(),
            pl.BlockSpec((1, blocks.block_o), lambda o, n, h, w: (0, o)),
            *[blocks.finished_spec() for _ in more],
        ],
        out_specs=[blocks.finished_spec()] * (1 + spec.keep_preactivation),
        out_shape=[y_type] * (1 + spec.keep_preactivation),
        scratch_shapes=scratch,
        compiler_params=_COMPILER_PARAMS,
        cost_estimate=blocks.cost(),
        interpret=interpret,
        name="winograd_correlate",
    )(*coefficients(blocks.t), x, w, b[None], *more)
    outs = tuple(map(from_sublanes, outs))
    return outs if spec.keep_preactivation else outs[0]


def fast_weight_gradient(spec: ConvSpec, x, dy, *, interpret: bool):
    blocks = blocks_of(spec)
    x, dy = blocks.pad(spec, x), blocks.pad_pixels(dy)
    dw = pl.pallas_call(
        functools.partial(kernels.weight_gradient_kernel, blocks=blocks),
        grid=blocks.grid,
        in_specs=[*coefficient_specs(), blocks.window_spec(), blocks.finished_spec()],
        out_specs=blocks.filter_spec(),
        out_shape=result_type(
            (blocks.t.r**2, blocks.channels, blocks.outputs), spec.dtype
        ),
        scratch_shapes=[pltpu.VMEM(blocks.transformed, jnp.float32)],
        compiler_params=_COMPILER_PARAMS,
        cost_estimate=blocks.cost(),
        interpret=interpret,
        name="winograd_weight_gradient",
    )(*coefficients(blocks.t), x, dy)
    return dw[:, : spec.w_shape[2]].reshape(spec.w_shape)
