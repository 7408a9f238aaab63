"""Small functions that the tests compile. Imported by name in the compiling process."""

import os

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

F32 = jnp.float32


def spec(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def matmul(x, y):
    return x @ y


def _product_kernel(x_ref, y_ref, o_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=F32)


def product(x, y, block=128, costed=True):
    """A blocked product: (M, K) times (K, N)."""
    (m, k), (_, n) = x.shape, y.shape
    cost = pl.CostEstimate(
        flops=2 * m * n * k, bytes_accessed=x.nbytes + y.nbytes, transcendentals=0
    )
    return pl.pallas_call(
        _product_kernel,
        grid=(m // block, n // block, k // block),
        in_specs=[
            pl.BlockSpec((block, block), lambda i, j, k: (i, k)),
            pl.BlockSpec((block, block), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((block, block), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), F32),
        cost_estimate=cost if costed else None,
        name="product",
    )(x, y)


def _double_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] + x_ref[...]


def double(x):
    """Holds all of `x` in VMEM at once."""
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(_double_kernel, out_shape=shape, name="double")(x)


def _sometimes_kernel(x_ref, o_ref):
    step = pl.program_id(0)
    o_ref[...] = x_ref[...]

    @pl.when(step < 2)
    def _():
        o_ref[...] = jnp.exp(x_ref[...])

    @pl.loop(0, step)
    def _(_):
        o_ref[...] = jnp.exp(o_ref[...])


def sometimes(x):
    """In the first two steps of 64 rows an exponential, in each one more for each step
    before."""
    block = pl.BlockSpec((64, 128), lambda i: (i, 0))
    return pl.pallas_call(
        _sometimes_kernel,
        grid=(len(x) // 64,),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x.shape, F32),
        name="sometimes",
    )(x)


def _asked_kernel(asked_ref, x_ref, o_ref):
    o_ref[...] = x_ref[...]

    @pl.when(asked_ref[0] > 0)
    def _():
        o_ref[...] = jnp.exp(x_ref[...])


def asked(numbers, x):
    """An exponential if the first number is positive."""
    from jax.experimental.pallas import tpu as pltpu

    return pl.pallas_call(
        _asked_kernel,
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec()],
        out_shape=jax.ShapeDtypeStruct(x.shape, F32),
        name="asked",
    )(numbers, x)


def _sort_kernel(x_ref, o_ref):
    o_ref[...] = jnp.sort(x_ref[...], axis=0)


def sort(x):
    """What Pallas cannot lower for a TPU."""
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(_sort_kernel, out_shape=shape)(x)


def device_kind(x):
    """Its output's length tells which device Pallas believes it compiles for."""
    from jax.experimental.pallas import tpu as pltpu

    return jnp.zeros(pltpu.get_tpu_info().mxu_column_size) + x


def fails(x, y):
    raise AssertionError("odd")


def abort(x):
    """Dies while it is traced, as a compiler with a failed check does."""
    os.abort()


def triton_product(x, y):
    from jax.experimental.pallas import triton

    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=F32)

    return pl.pallas_call(
        kernel,
        grid=(1,),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), F32),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        name="triton_product",
    )(x, y)
