"""Layouts other than channels last: the same convolution, and exact round trips."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opsnn_jax import conv, conv2d, from_blocked, to_blocked
from tests import draws
from tests.ops.conv_cases import draw, value_and_vjp


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("layout", ["channels_first", "blocked"])
def test_the_same_values_and_gradients(layout, rank, key):
    # 5 and 7 channels fill no block of 4.
    space, kernel = (4, 5, 3)[:rank], (3, 2, 1)[:rank]
    x, w, b = draw(key, (2, *space, 5), (*kernel, 5, 7), "float32")
    residual = draws.normal(key, (2, *space, 7), jnp.float32)

    def into(a):
        return jnp.moveaxis(a, -1, 1) if layout != "blocked" else to_blocked(a, 4)

    def back(a, channels):
        if layout == "blocked":
            return from_blocked(a, channels)
        return jnp.moveaxis(a, 1, -1)

    def ours(x, w, b, residual):
        y = conv(
            into(x), w, b, residual=into(residual), activation="relu", layout=layout
        )
        assert y.shape == into(residual).shape
        return back(y, 7)

    def plain(x, w, b, residual):
        return conv(x, w, b, residual=residual, activation="relu")

    arrays = (x, w, b, residual)
    chex.assert_trees_all_close(
        value_and_vjp(ours, arrays, residual), value_and_vjp(plain, arrays, residual),
        rtol=1e-5, atol=1e-5,
    )  # fmt: skip


@pytest.mark.parametrize("channels", [1, 7, 8, 9, 16, 17])
@pytest.mark.parametrize(("dtype", "block"), [("float32", 8), ("bfloat16", 16)])
def test_blocks_round_trip_exactly(channels, dtype, block, key):
    x = draws.normal(key, (2, 3, channels), jnp.float32).astype(dtype)
    blocked = to_blocked(x)
    assert blocked.shape == (2, -(-channels // block), 3, block)
    chex.assert_trees_all_equal(from_blocked(blocked, channels), x)
    # What fills the last block is zeros, and its cotangent does not come back.
    assert int((blocked != 0).sum()) == x.size
    dx = jax.grad(lambda x: to_blocked(x).astype(jnp.float32).sum())(x)
    chex.assert_trees_all_equal(dx, jnp.ones_like(x))


@pytest.mark.parametrize("shape", [(0, 5, 5, 3), (2, 0, 5, 3)])
def test_blocks_of_nothing(shape, key):
    x, w = draw(key, shape, (3, 3, 3, 4), "float32", bias=False)
    chex.assert_trees_all_equal(from_blocked(to_blocked(x, np.int64(2)), 3), x)
    y = conv2d(to_blocked(x), w, layout="blocked")
    chex.assert_trees_all_equal(from_blocked(y, 4), conv2d(x, w))


def test_filled_channels_of_the_input_are_not_read(key):
    x, w = draw(key, (1, 4, 4, 5), (3, 3, 5, 3), "float32", bias=False)
    blocked = to_blocked(x)
    garbage = blocked.at[:, -1, ..., 5:].set(jnp.nan)
    y = conv2d(garbage, w, layout="blocked")
    chex.assert_trees_all_equal(y, conv2d(blocked, w, layout="blocked"))


def test_what_a_layout_refuses(key):
    x, w = draw(key, (1, 4, 4, 5), (3, 3, 5, 3), "float32", bias=False)
    with pytest.raises(ValueError, match="layout must be one of 'channels_last'"):
        conv2d(x, w, layout="NCHW")
    with pytest.raises(ValueError, match=r"x must have shape \(N, C, \*S\) with C = 5"):
        conv2d(x, w, layout="channels_first")
    with pytest.raises(ValueError, match=r"x must have shape \(N, C1, \*S, C0\)"):
        conv2d(x, w, layout="blocked")
    with pytest.raises(ValueError, match="with C1 = 1 for 5 channels"):
        conv2d(to_blocked(jnp.ones((1, 4, 4, 9))), w, layout="blocked")
    with pytest.raises(ValueError, match=r"C1 = ceil\(C / C0\)"):
        from_blocked(to_blocked(x), 9)
    with pytest.raises(ValueError, match="block must be a positive int"):
        to_blocked(x, 0)
    with pytest.raises(TypeError, match="channels must be an int"):
        from_blocked(to_blocked(x), 5.0)
    with pytest.raises(ValueError, match="groups must be at least 1"):
        conv2d(x, w, groups=0, layout="channels_first")
