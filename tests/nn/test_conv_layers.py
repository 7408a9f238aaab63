"""The Conv layers against flax's own: parameters, results, gradients."""

import chex
import flax.linen as flax_linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from jax import lax

from opsnn_jax import conv2d, conv_general_dilated
from opsnn_jax.nn import linen, nnx
from tests import draws

OPTIONS = [
    dict(kernel_size=(3, 3)),
    dict(kernel_size=(3, 2), strides=2, padding=((1, 0), (0, 1)), use_bias=False),
    dict(kernel_size=3, padding="CIRCULAR"),
    dict(kernel_size=(3, 3), feature_group_count=2, kernel_dilation=2),
    dict(kernel_size=(3, 3), input_dilation=2, padding=1),
]


@pytest.mark.parametrize("options", OPTIONS)
def test_linen_conv_is_flax_conv(options, key):
    rank = 1 if isinstance(options["kernel_size"], int) else 2
    x = draws.normal(key, (2, 8, 7, 4)[: rank + 1] + (4,))
    ours, theirs = linen.Conv(6, **options), flax_linen.Conv(6, **options)
    variables = theirs.init(key, x)
    chex.assert_trees_all_equal(ours.init(key, x), variables)
    chex.assert_trees_all_close(
        ours.apply(variables, x), theirs.apply(variables, x), rtol=1e-5, atol=1e-5
    )
    assert type(ours).__name__ == "Conv"  # flax names parameters after the class


@pytest.mark.parametrize("options", OPTIONS)
def test_nnx_conv_is_flax_conv(options, key):
    rank = 1 if isinstance(options["kernel_size"], int) else 2
    x = draws.normal(key, (2, 8, 7, 4)[: rank + 1] + (4,))
    ours = nnx.Conv(4, 6, **options, rngs=flax_nnx.Rngs(0))
    theirs = flax_nnx.Conv(4, 6, **options, rngs=flax_nnx.Rngs(0))
    chex.assert_trees_all_equal(
        flax_nnx.to_pure_dict(flax_nnx.state(ours, flax_nnx.Param)),
        flax_nnx.to_pure_dict(flax_nnx.state(theirs, flax_nnx.Param)),
    )
    chex.assert_trees_all_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


def test_compute_dtype_and_batch_dimensions(key):
    x = draws.normal(key, (2, 3, 6, 5, 4))
    ours = linen.Conv(6, (3, 3), dtype=jnp.float16)
    variables = ours.init(key, x)
    y = ours.apply(variables, x)
    assert y.shape == (2, 3, 6, 5, 6)
    assert y.dtype == jnp.float16
    gradient = jax.grad(lambda v: ours.apply(v, x).astype(jnp.float32).sum())(variables)
    assert {g.dtype.name for g in jax.tree.leaves(gradient)} == {"float32"}


@pytest.mark.parametrize(
    "numbers", [None, ("NCHW", "OIHW", "NHWC"), ("HWNC", "IHWO", "NCHW")]
)
def test_lax_signature_in_any_layout(numbers, key):
    lhs = draws.normal(key, (6, 6, 6, 6))
    rhs = draws.normal(key, (6, 6, 6, 6))
    arguments = (lhs, rhs, (1, 2), "SAME")
    got = conv_general_dilated(*arguments, dimension_numbers=numbers)
    expected = lax.conv_general_dilated(*arguments, dimension_numbers=numbers)
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float64", "float8_e4m3fn"])
def test_lax_signature_takes_what_lax_takes(dtype):
    # float64 is float32 while jax_enable_x64 is off; padding has one form more.
    x = np.ones((1, 1, 3, 3)).astype(dtype)
    arguments = (x, x[..., :2, :2], (1, 1), "SAME_LOWER")
    got, expected = (
        f(*arguments) for f in (conv_general_dilated, lax.conv_general_dilated)
    )
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got.astype("float32"), expected.astype("float32"))


def test_a_flax_variable_is_an_array():
    w = flax_nnx.Param(jnp.ones((1, 1, 2, 3)))
    assert conv2d(jnp.ones((1, 4, 4, 2)), w).shape == (1, 4, 4, 3)


def test_what_only_lax_can_do():
    x = jnp.ones((1, 2, 5, 5), jnp.int32)
    y = conv_general_dilated(x, x[..., :3, :3], (1, 1), "SAME")
    assert y.dtype == jnp.int32
    with pytest.raises(NotImplementedError, match="an input of dtype int32"):
        conv_general_dilated(x, x, (1, 1), "SAME", implementation="direct")
