"""Kernels for a TPU under jax_enable_x64, where Python's integers have 64 bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opsnn_jax import conv2d, flash_attention, separable_conv2d

IMAGES = ((8, 56, 56, 128), (3, 3, 1, 128))
HEADS = ((1, 256, 2, 64),) * 3
IDS = np.zeros((1, 256), np.int64)
CALLS = {
    "winograd": (
        functools.partial(conv2d, precision="highest"),
        ((8, 28, 28, 128), (3, 3, 128, 128)),
    ),
    "depthwise": (functools.partial(conv2d, groups=128), IMAGES),
    "separable": (separable_conv2d, (*IMAGES, (1, 1, 128, 128))),
    "attention": (flash_attention, HEADS),
    "segments": (
        functools.partial(flash_attention, q_segment_ids=IDS, kv_segment_ids=IDS),
        HEADS,
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_kernels_are_lowered_under_x64(call):
    op, shapes = CALLS[call]

    def forward_and_backward(*arrays):
        y, vjp = jax.vjp(op, *arrays)
        return y, vjp(jnp.ones_like(y))

    with jax.enable_x64(True):
        specs = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
        traced = jax.jit(forward_and_backward).trace(*specs)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert {x.dtype.name for x in jax.tree.leaves(traced.out_info)} == {"float32"}
    assert "tpu_custom_call" in text
