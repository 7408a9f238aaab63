"""Arithmetic of blocks: what TPU and GPU kernels of every family share."""

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

# A TPU vector register holds 8 sublanes of 128 lanes of 32 bits.
SUBLANES = 8
LANES = 128


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(size: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `size`."""
    return ceil_div(size, multiple) * multiple


def padded_bytes(shape: tuple[int, ...], itemsize: int) -> int:
    """Bytes of an array in TPU vector memory, its last two dimensions tiled."""
    *major, rows, lanes = (1, 1, *shape)
    packing = 4 // itemsize
    rows = round_up(rows, SUBLANES * packing)
    return math.prod(major) * rows * round_up(lanes, LANES) * itemsize


def result_type(shape: tuple[int, ...], dtype: DTypeLike) -> jax.core.ShapedArray:
    """What `pallas_call` takes as `out_shape`, also where `jax.shard_map` checks types.

    Of a ShapeDtypeStruct it demands there over which mesh axes the result varies. That
    plays no part any more where kernels are traced: the code of one shard is lowered.
    """
    return jax.core.ShapedArray(shape, jnp.dtype(dtype))
