"""Infinities and NaN reach exactly the outputs that they belong to, in every pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opsnn_jax import conv2d
from tests import draws

EACH = pytest.mark.parametrize(
    "implementation", [None, "direct", "gemm", "winograd", "pallas_tpu"]
)


@pytest.mark.parametrize(
    "implementation",
    [None, "direct", "gemm", "winograd"]
    + [pytest.param("pallas_tpu", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("value", [jnp.inf, -jnp.inf, jnp.nan])
def test_one_input_spoils_nine_outputs(value, implementation):
    # One at the corner of a tile, where Winograd's transforms would spoil 16.
    x = jnp.zeros((1, 6, 6, 1)).at[0, 2, 2, 0].set(value)
    w = jnp.ones((3, 3, 1, 1))

    def passes(x, w):
        y, vjp = jax.vjp(functools.partial(conv2d, implementation=implementation), x, w)
        return y, *vjp(jnp.ones_like(y))

    y, dx, dw = jax.jit(passes)(x, w)
    spoilt = np.zeros((6, 6), bool)
    spoilt[1:4, 1:4] = True
    np.testing.assert_array_equal(~np.isfinite(y[0, :, :, 0]), spoilt)
    np.testing.assert_array_equal(y[0, 1:4, 1:4, 0], np.full((3, 3), value))
    assert np.isfinite(dx).all()
    np.testing.assert_array_equal(dw, np.full_like(dw, value))


@EACH
def test_an_image_of_infinities_has_no_nan(implementation):
    x, w = jnp.full((1, 8, 8, 3), jnp.inf), jnp.full((3, 3, 3, 2), 0.5)
    y = jax.jit(functools.partial(conv2d, implementation=implementation))(x, w)
    assert bool((y == jnp.inf).all())


@EACH
def test_numbers_near_the_largest(implementation):
    # A sum of nine overflows only in the transforms.
    x, w = jnp.full((1, 8, 8, 1), 1e38), jnp.full((3, 3, 1, 1), 0.1)
    y = jax.jit(functools.partial(conv2d, implementation=implementation))(x, w)
    np.testing.assert_allclose(y[0, 1:-1, 1:-1], 9e37, rtol=1e-5)


@EACH
def test_an_overflow_on_the_way_is_not_hidden_by_relu(implementation):
    # F(4, 3) gives -inf for all of column 3, and nothing else that is not finite.
    x = (
        jnp.zeros((1, 6, 6, 1))
        .at[0, [1, 4], [5, 1], 0]
        .set(jnp.array([-1.9e38, 1.1e38]))
    )
    w = jnp.array([[0, 2, 2], [2, -1, -1], [-1, 1, 0]], "float32") / 4
    f = functools.partial(conv2d, padding="VALID", activation="relu")
    y = f(x, w[:, :, None, None], implementation=implementation)[0, :, :, 0]
    expected = np.zeros((4, 4))
    expected[[0, 2, 3], [3, 0, 1]] = 4.75e37, 2.75e37, 5.5e37
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e34)


@EACH
def test_a_product_that_overflows_is_not_hidden_by_relu(implementation):
    # One frequency of F(4, 3) has the largest product by far, and is in every result.
    signs = jnp.array([0.0, -1, -1, 1, 1, 0])
    x, w = 1e37 * jnp.outer(signs, signs), jnp.full((3, 3), -0.65)
    f = functools.partial(conv2d, padding="VALID", activation="relu")
    y = f(x[None, :, :, None], w[:, :, None, None], implementation=implementation)
    sums = np.array([-2, -1, 1, 2])
    expected = np.maximum(-6.5e36 * np.outer(sums, sums), 0)
    np.testing.assert_allclose(y[0, :, :, 0], expected, rtol=1e-5, atol=1e32)


def test_one_of_a_batch_that_is_mapped(key):
    x = draws.normal(key, (3, 1, 6, 6, 2)).at[1, 0, 2, 2, 0].set(jnp.inf)
    w = draws.normal(key, (2, 3, 3, 2, 2))
    f = functools.partial(conv2d, implementation="winograd")
    y = jax.jit(jax.vmap(jax.vmap(f, (None, 0)), (0, None)))(x, w)
    expected = jnp.stack([jnp.stack([f(a, b) for b in w]) for a in x])
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    assert np.isfinite(y[jnp.array([0, 2])]).all()


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize(
    ("kernel", "strides", "padding", "pixel"), [(2, 3, "VALID", 2), (3, 2, "SAME", 1)]
)
def test_phases_do_not_spread_what_a_filter_skips(
    kernel, strides, padding, pixel, value
):
    x = jnp.ones((1, 6, 6, 1)).at[0, pixel, pixel, 0].set(value)
    w = jnp.ones((kernel, kernel, 1, 1))

    @functools.partial(jax.jit, static_argnums=0)
    def y_and_dx(implementation):
        f = functools.partial(
            conv2d, strides=strides, padding=padding, implementation=implementation
        )
        y, vjp = jax.vjp(f, x, w)
        return y, vjp(jnp.ones_like(y).at[0, 0, 0, 0].set(value))[0]

    for got, expected in zip(y_and_dx("phases"), y_and_dx("direct"), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_gradient_far_out_is_that_of_a_line(sign, activation, dtype):
    # z overflows in float16, and a power of it in float32.
    x = jnp.full((1, 1, 1, 1), sign * {"float16": 700, "float32": 1e20}[dtype], dtype)
    w = jnp.full((1, 1, 1, 1), 100, dtype)
    f = functools.partial(conv2d, activation=activation)
    _, vjp = jax.vjp(f, x, w)
    dx, _ = vjp(jnp.ones_like(x))
    assert float(dx[0, 0, 0, 0]) == (100 if sign > 0 else 0)
