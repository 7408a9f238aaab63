"""Bias, residual and activation: values, gradients, one rounding; folded batch norm."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opsnn_jax import conv, conv2d, fold_batchnorm, separable_conv2d
from opsnn_jax.ops.conv_table import TABLE
from tests import draws
from tests.numerics import assert_as_accurate
from tests.ops.conv_cases import draw, value_and_vjp

# A call that each implementation takes, its result as large as x.
CALLS = {
    name: ((2, 5, 6, 3), (3, 3, 3, 4), {})
    for name in TABLE.implementations
} | {
    "pointwise": ((2, 5, 6, 3), (1, 1, 3, 4), {}),
    "depthwise": ((2, 5, 6, 4), (3, 3, 1, 4), dict(groups=4)),
    "block_diagonal": ((2, 5, 6, 4), (3, 3, 2, 4), dict(groups=2)),
    "block_diagonal_16": ((2, 5, 6, 4), (3, 3, 2, 4), dict(groups=2)),
    "phases": ((2, 5, 6, 3), (3, 3, 3, 4), dict(strides=2, padding=((3, 3), (4, 3)))),
    "pallas_tpu_depthwise": ((2, 5, 6, 4), (3, 3, 1, 4), dict(groups=4)),
    "planes": ((2, 3, 4, 5, 3), (3, 1, 3, 3, 4), {}),
}  # fmt: skip


# The kernels have the same lines for gelu and silu.
PALLAS = [name for name in CALLS if name.startswith("pallas")]
CASES = [
    *itertools.product([n for n in CALLS if n not in PALLAS], ["relu", "gelu", "silu"]),
    *itertools.product(PALLAS, ["gelu"]),
    *(pytest.param(name, "relu", marks=pytest.mark.slow) for name in PALLAS),
]


@pytest.mark.parametrize(("implementation", "activation"), CASES)
def test_values_and_gradients_of_all_operands(implementation, activation, key):
    x_shape, w_shape, options = CALLS[implementation]
    x, w, b = draw(key, x_shape, w_shape, "float32")
    residual = draws.normal(key, (*x_shape[:-1], 4), jnp.float32)
    dy = draws.normal(jax.random.fold_in(key, 1), residual.shape, jnp.float32)

    def run(implementation, *arrays):
        def f(x, w, b, residual):
            return conv(
                x, w, b, residual=residual, activation=activation,
                implementation=implementation, **options,
            )  # fmt: skip

        return value_and_vjp(f, arrays, dy)

    got = jax.jit(functools.partial(run, implementation))(x, w, b, residual)
    expected = jax.jit(functools.partial(run, "reference"))(x, w, b, residual)
    chex.assert_trees_all_close(got, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("with_bias", [True, False])
def test_a_residual_needs_no_bias(with_bias, key):
    x, w, b = draw(key, (1, 4, 4, 2), (3, 3, 2, 2), "float32")
    b = b if with_bias else None
    plain = conv2d(x, w, b)
    chex.assert_trees_all_close(conv2d(x, w, b, residual=x), plain + x, rtol=1e-6)


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
@pytest.mark.parametrize("implementation", ["direct", "winograd", "gemm"])
def test_the_epilogue_rounds_once(implementation, activation, key):
    # In half precision the sum of 1 and 2**-9, twice, is 1 when rounded in between.
    x = jnp.zeros((1, 3, 3, 1), "bfloat16").at[0, 1, 1, 0].set(1)
    w = jnp.zeros((3, 3, 1, 1), "bfloat16").at[1, 1].set(1)
    small = jnp.full((1,), 2**-8, "bfloat16")
    y = conv2d(
        x, w, small, residual=jnp.full_like(x, 2**-8), activation=activation,
        implementation=implementation,
    )  # fmt: skip
    exact = getattr(jax.nn, activation)(jnp.float32(1 + 2**-7))
    assert y[0, 1, 1, 0] == exact.astype("bfloat16")


def test_grad_of_grad_through_an_activation(key):
    x, w, b = draw(key, (1, 4, 4, 2), (3, 3, 2, 2), "float32")

    def twice(implementation):
        def loss(x, w):
            y = conv2d(x, w, b, activation="gelu", implementation=implementation)
            return jnp.sum(y**2)

        penalty = jax.grad(lambda x, w: jnp.sum(jax.grad(loss)(x, w) ** 2), (0, 1))
        return jax.jit(penalty)

    chex.assert_trees_all_close(
        twice("direct")(x, w), twice("reference")(x, w), rtol=1e-3, atol=1e-4
    )


def test_what_an_epilogue_refuses(key):
    x, w, b = draw(key, (1, 4, 4, 2), (3, 3, 2, 2), "float32")
    with pytest.raises(ValueError, match="activation must be None or one of 'relu'"):
        conv2d(x, w, activation="tanh")
    with pytest.raises(ValueError, match=r"residual must have the shape .*\(1, 4, 4"):
        conv2d(x, w, residual=x[:, :3])
    with pytest.raises(TypeError, match="residual must have the dtype of x"):
        conv2d(x, w, residual=x.astype("bfloat16"))
    with pytest.raises(TypeError, match="unexpected keyword argument 'stride'"):
        conv2d(x, w, stride=2)


@pytest.mark.parametrize("with_bias", [True, False])
def test_folded_batch_norm_is_the_two_in_turn(with_bias, key):
    with jax.enable_x64(True):
        x, w, b = draw(key, (2, 5, 5, 3), (3, 3, 3, 4), "float64")
        b = b if with_bias else None
        vectors = draws.uniform(key, (4, 4), jnp.float64) + 0.5
        gamma, beta, mean, var = np.asarray(vectors)  # numpy's broadcast over images
        z = np.asarray(conv2d(x, w, b))
        expected = gamma * (z - mean) / np.sqrt(var + 1e-3) + beta
        folded = fold_batchnorm(w, b, gamma, beta, mean, var, eps=1e-3)
        np.testing.assert_allclose(conv2d(x, *folded), expected, rtol=1e-12, atol=1e-12)
        plain = fold_batchnorm(w, b, None, None, mean, var, eps=1e-3)
        got = np.asarray(conv2d(x, *plain)) * gamma + beta
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


def test_folding_half_precision_weights_rounds_once(key):
    _, w, _ = draw(key, (1, 3, 3, 3), (3, 3, 3, 4), "bfloat16")
    gamma, beta, mean, var = draws.uniform(key, (4, 4), jnp.float32) + 0.5
    folded, bias = fold_batchnorm(w, None, gamma, beta, mean, var)
    assert folded.dtype == bias.dtype == jnp.bfloat16
    wide = fold_batchnorm(w.astype(jnp.float32), None, gamma, beta, mean, var)
    chex.assert_trees_all_equal(folded, wide[0].astype("bfloat16"))
    chex.assert_trees_all_equal(bias, wide[1].astype("bfloat16"))
    with pytest.raises(ValueError, match=r"var must have shape \(O,\) = \(4,\)"):
        fold_batchnorm(w, None, gamma, beta, mean, var[:3])


def test_separable_is_depthwise_then_pointwise(key):
    x, depthwise, _ = draw(key, (2, 7, 6, 3), (3, 3, 1, 6), "float32")
    _, pointwise, b = draw(key, (1, 1, 1, 6), (1, 1, 6, 4), "float32")

    def plain(x, depthwise, pointwise, b):
        reference = functools.partial(conv2d, implementation="reference")
        y = reference(x, depthwise, groups=3, strides=2)
        return jax.nn.relu(reference(y, pointwise, b))

    ours = functools.partial(separable_conv2d, strides=2, activation="relu")
    arrays = (x, depthwise, pointwise, b)
    dy = jnp.ones((2, 4, 3, 4))
    # Each in one program; op by op, XLA would compile each op of them.
    ours_vjp, plain_vjp = (
        jax.jit(functools.partial(value_and_vjp, f)) for f in (ours, plain)
    )
    got, expected = ours_vjp(arrays, dy), plain_vjp(arrays, dy)
    with jax.enable_x64(True):
        wide = tuple(np.asarray(a, np.float64) for a in arrays)
        exact = plain_vjp(wide, np.asarray(dy, np.float64))
    for g, p, t in zip(got, expected, exact, strict=True):
        assert_as_accurate(g, p, t, terms=9 + 6)  # taps, then channels
    first = jnp.moveaxis(x, -1, 1)
    y = ours(first, depthwise, pointwise, b, layout="channels_first")
    chex.assert_trees_all_close(jnp.moveaxis(y, 1, -1), got[0], rtol=1e-6)
    with pytest.raises(ValueError, match="with M = 6"):
        separable_conv2d(x, depthwise, pointwise[:, :, :5])
