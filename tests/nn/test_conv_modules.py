"""ConvTranspose against flax's; DepthwiseConv, SeparableConv and ConvBNAct."""

import functools

import chex
import flax.linen as flax_linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from opsnn_jax.nn import linen, nnx
from tests import draws

TRANSPOSED = [
    dict(kernel_size=(3, 3), strides=(2, 2)),
    dict(kernel_size=(4, 3), strides=(2, 1), padding="VALID", use_bias=False),
    dict(kernel_size=(3, 3), strides=(2, 2), padding="CIRCULAR"),
    dict(kernel_size=(4, 4), strides=(2, 3), padding="CIRCULAR", transpose_kernel=True),
    dict(kernel_size=3, padding=((1, 2),), kernel_dilation=2),
]


@pytest.mark.parametrize("options", TRANSPOSED)
def test_linen_conv_transpose_is_flax_conv_transpose(options, key):
    rank = 1 if isinstance(options["kernel_size"], int) else 2
    x = draws.normal(key, (2, 2, 5, 4)[: rank + 2][-rank - 1 :] + (3,))
    ours = linen.ConvTranspose(6, **options)
    theirs = flax_linen.ConvTranspose(6, **options)
    variables = theirs.init(key, x)
    chex.assert_trees_all_equal(ours.init(key, x), variables)
    for images in (x, jnp.stack([x, -x]), x[0]):
        chex.assert_trees_all_close(
            ours.apply(variables, images), theirs.apply(variables, images),
            rtol=1e-5, atol=1e-5,
        )  # fmt: skip


@pytest.mark.parametrize("options", TRANSPOSED[1:4:2])
def test_nnx_conv_transpose_is_flax_conv_transpose(options, key):
    x = draws.normal(key, (2, 5, 4, 3))
    ours = nnx.ConvTranspose(3, 6, **options, rngs=flax_nnx.Rngs(0))
    theirs = flax_nnx.ConvTranspose(3, 6, **options, rngs=flax_nnx.Rngs(0))
    chex.assert_trees_all_equal(
        flax_nnx.to_pure_dict(flax_nnx.state(ours, flax_nnx.Param)),
        flax_nnx.to_pure_dict(flax_nnx.state(theirs, flax_nnx.Param)),
    )
    chex.assert_trees_all_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


def test_a_masked_transposed_kernel(key):
    x, mask = jnp.ones((1, 4, 2)), np.tril(np.ones((3, 2, 3), np.float32))
    ours = linen.ConvTranspose(3, 3, mask=mask)
    theirs = flax_linen.ConvTranspose(3, 3, mask=mask)
    variables = theirs.init(key, x)
    chex.assert_trees_all_close(
        ours.apply(variables, x), theirs.apply(variables, x), rtol=1e-5
    )
    with pytest.raises(ValueError, match="mask must have the shape of the kernel"):
        linen.ConvTranspose(3, 3, mask=mask[:1]).init(key, x)


def test_depthwise_is_a_conv_with_a_group_for_each_channel(key):
    x = draws.normal(key, (2, 6, 5, 3))
    ours = linen.DepthwiseConv((3, 3), multiplier=2, strides=2)
    variables = ours.init(key, x)
    theirs = flax_linen.Conv(6, (3, 3), 2, feature_group_count=3)
    inner = {"params": variables["params"]["depthwise"]}
    chex.assert_trees_all_close(
        ours.apply(variables, x), theirs.apply(inner, x), rtol=1e-5, atol=1e-5
    )
    other = nnx.DepthwiseConv(3, (3, 3), 2, multiplier=2, rngs=flax_nnx.Rngs(0))
    flax_nnx.update(other, {"kernel": inner["params"]["kernel"]})
    chex.assert_trees_all_close(other(x), theirs.apply(inner, x), rtol=1e-5, atol=1e-5)


def test_separable_is_depthwise_then_pointwise(key):
    x = draws.normal(key, (2, 6, 5, 3))
    ours = linen.SeparableConv(4, (3, 3))
    variables = ours.init(key, x)
    shapes = jax.tree.map(jnp.shape, variables["params"])
    assert shapes == {
        "depthwise": {"depthwise": {"kernel": (3, 3, 1, 3)}},
        "pointwise": {"kernel": (1, 1, 3, 4), "bias": (4,)},
    }
    other = nnx.SeparableConv(3, 4, (3, 3), rngs=flax_nnx.Rngs(0))
    params = variables["params"]
    other.depthwise.kernel[...] = params["depthwise"]["depthwise"]["kernel"]
    other.pointwise.kernel[...] = params["pointwise"]["kernel"]
    chex.assert_trees_all_close(
        other(x), ours.apply(variables, x), rtol=1e-5, atol=1e-5
    )


def plain_conv_bn_relu(x, kernel, gamma, beta, mean, var, residual):
    z = jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    # In numpy, which broadcasts vectors over images.
    z, gamma, beta, residual = (np.asarray(a) for a in (z, gamma, beta, residual))
    if mean is None:
        mean, var = z.mean((0, 1, 2)), z.var((0, 1, 2))
    mean, var = np.asarray(mean), np.asarray(var)
    return np.maximum(gamma * (z - mean) / np.sqrt(var + 1e-5) + beta + residual, 0)


def test_linen_conv_bn_act_trains_and_folds(key):
    x = draws.normal(key, (4, 5, 5, 3))
    layer = linen.ConvBNAct(6, (3, 3), momentum=0.5)
    variables = layer.init(key, x, train=True)
    kernel, residual = variables["params"]["kernel"], jnp.ones((4, 5, 5, 6))
    gamma, beta = draws.uniform(key, (2, 6)) + 0.5
    variables["params"]["norm"] = {"scale": gamma, "bias": beta}
    y, updates = layer.apply(
        variables, x, train=True, residual=residual, mutable=["batch_stats"]
    )
    args = (x, kernel, gamma, beta)
    expected = plain_conv_bn_relu(*args, None, None, residual)
    chex.assert_trees_all_close(y, expected, rtol=1e-4, atol=1e-4)
    statistics = updates["batch_stats"]["norm"]
    assert float(jnp.abs(statistics["mean"]).min()) > 0
    got = layer.apply({**variables, **updates}, x, train=False, residual=residual)
    expected = plain_conv_bn_relu(
        *args, statistics["mean"], statistics["var"], residual
    )
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-4)


def test_nnx_conv_bn_act_trains_and_folds(key):
    x = draws.normal(key, (4, 5, 5, 3))
    layer = nnx.ConvBNAct(3, 6, (3, 3), momentum=0.5, rngs=flax_nnx.Rngs(0))
    layer.norm.scale[...] = gamma = draws.uniform(key, (6,)) + 0.5
    residual, kernel = jnp.ones((4, 5, 5, 6)), layer.kernel[...]
    args = (x, kernel, gamma, jnp.zeros(6))
    y = layer(x, train=True, residual=residual)
    expected = plain_conv_bn_relu(*args, None, None, residual)
    chex.assert_trees_all_close(y, expected, rtol=1e-4, atol=1e-4)
    got = layer(x, train=False, residual=residual)
    expected = plain_conv_bn_relu(
        *args, layer.norm.mean[...], layer.norm.var[...], residual
    )
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        dict(dtype=jnp.bfloat16, preferred_element_type=jnp.float32, use_bias=False),
        dict(dtype=complex),
    ],
)
def test_transposed_what_only_flax_can_do(options, key):
    x = draws.normal(key, (2, 5, 4, 3))
    layers = [n.ConvTranspose(3, 6, (3, 3), **options, rngs=flax_nnx.Rngs(0))
              for n in (nnx, flax_nnx)]  # fmt: skip
    ours, theirs = (layer(x) for layer in layers)
    assert ours.dtype == theirs.dtype
    chex.assert_trees_all_equal(ours, theirs)
    layers = [n.ConvTranspose(6, (3, 3), **options) for n in (linen, flax_linen)]
    (ours, _), (theirs, _) = (layer.init_with_output(key, x) for layer in layers)
    assert ours.dtype == theirs.dtype
    chex.assert_trees_all_equal(ours, theirs)


def test_transposed_nothing_is_nothing(key):
    layer = linen.ConvTranspose(6, (3, 3))
    variables = layer.init(key, jnp.ones((1, 5, 4, 3)))
    assert layer.apply(variables, jnp.ones((2, 0, 5, 4, 3))).shape == (2, 0, 5, 4, 6)


@pytest.mark.parametrize("train", [True, False])
def test_conv_bn_act_takes_the_same_in_training_and_after(train, key):
    x = jnp.ones((2, 6, 4))
    with pytest.raises(ValueError, match="ConvBNAct: activation must be None or one"):
        nnx.ConvBNAct(4, 4, 3, activation="elu", rngs=flax_nnx.Rngs(0))
    with pytest.raises(ValueError, match="ConvBNAct: activation must be None or one"):
        linen.ConvBNAct(4, 3, activation="elu").init(key, x, train=train)
    layer = linen.ConvBNAct(4, 3)
    variables = layer.init(key, x, train=train)
    apply = functools.partial(
        layer.apply, variables, x, train=train, mutable=["batch_stats"]
    )
    y, _ = apply(residual=x.astype(jnp.bfloat16))
    assert y.dtype == jnp.float32
    with pytest.raises(ValueError, match="residual must have the shape of the result"):
        apply(residual=x[:1])
