"""The compilers take what the interpreter takes: any sizes, by the op's own choice.

Interpreted, a kernel knows no tile of 8 x 128 and no end of VMEM; these calls go
through the real compiler, forward and backward, as a user makes them.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from aot_kernels import spec

from opsnn_jax import conv1d, conv2d, flash_attention, separable_conv2d
from opsnn_jax.aot import compile_for

pytestmark = pytest.mark.aot

CALLS = {
    "one pixel": (conv2d, ((1, 1, 1, 1), (3, 3, 1, 1)), {}),
    "prime sizes": (conv2d, ((2, 13, 17, 7), (3, 3, 7, 11)), {}),
    "named Winograd": (
        conv2d, ((1, 5, 37, 3), (3, 3, 3, 130)), {"implementation": "pallas_tpu"},
    ),
    "strides and groups": (
        conv2d, ((1, 9, 7, 6), (3, 3, 2, 9)), {"strides": 2, "groups": 3},
    ),
    "causal": (conv1d, ((2, 33, 5), (4, 1, 5)), {"padding": "CAUSAL", "groups": 5}),
    "depthwise in strips": (
        conv2d, ((1, 32, 56, 128), (5, 5, 1, 128)), {"groups": 128},
    ),
    "separable by choice": (
        separable_conv2d, ((2, 12, 24, 256), (3, 3, 1, 256), (1, 1, 256, 3)), {},
    ),
    "separable, prime sizes": (
        separable_conv2d, ((1, 13, 7, 130), (3, 2, 1, 130), (1, 1, 130, 5)),
        {"implementation": "pallas_tpu_separable", "padding": [(2, -1), (-1, 1)]},
    ),
    "one token": (flash_attention, ((1, 1, 1, 1),) * 3, {}),
    "block + 1": (flash_attention, ((1, 129, 2, 40),) * 3, {"is_causal": True}),
    "few queries, long keys": (
        flash_attention, ((1, 3, 6, 72), (1, 1031, 2, 72), (1, 1031, 2, 200)), {},
    ),
    "bias": (
        flash_attention,
        ((2, 17, 2, 8), (2, 19, 1, 8), (2, 19, 1, 8), (2, 1, 1, 19)),
        {},
    ),
}  # fmt: skip


# Either generation with the dtype that is harder for it: v5e computes in float32 only.
@pytest.mark.parametrize(
    "target, dtype", [("tpu-v5e", "bfloat16"), ("tpu-v6e", "float32")]
)
@pytest.mark.parametrize("name", CALLS)
def test_forward_and_backward_compile(name, target, dtype, compiles_for):
    compiles_for(target)
    _compile(name, target, dtype)


@pytest.mark.parametrize("name", ["prime sizes", "block + 1"])
def test_float16_compiles_by_another_implementation(name, compiles_for):
    compiles_for("tpu-v5e")
    _compile(name, "tpu-v5e", "float16")


def _compile(name, target, dtype):
    op, shapes, options = CALLS[name]
    f = functools.partial(op, **options)

    def value_and_gradients(*arrays):
        out, pull = jax.vjp(f, *arrays)
        return out, pull(jnp.ones_like(out))

    report = compile_for(
        value_and_gradients, *(spec(*s, dtype=dtype) for s in shapes), target=target
    )
    assert report.ok, report.error
