"""conv_transpose against `lax.conv_transpose` and against torch's meaning of groups."""

import functools
import itertools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from opsnn_jax import conv_transpose
from tests import draws
from tests.numerics import assert_as_accurate
from tests.ops.conv_cases import draw, value_and_vjp

OPTIONS = list(
    itertools.product(
        [(1, 1), (2, 3), (4, 2)],
        ["SAME", "VALID", ((1, 2), (0, -1))],
        [(1, 1), (2, 1)],
        [False, True],
        [(3, 2), (1, 4)],
    )
)


@pytest.mark.parametrize(
    ("strides", "padding", "dilation", "transpose_kernel", "k"), OPTIONS[::5]
)
def test_as_lax(strides, padding, dilation, transpose_kernel, k, key):
    x, w = draw(key, (2, 4, 5, 3), (*k, 3, 4), "float32", bias=False)
    w = jnp.swapaxes(w, -1, -2) if transpose_kernel else w

    def plain(x, w):
        return lax.conv_transpose(
            x, w, strides, padding, rhs_dilation=dilation,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            transpose_kernel=transpose_kernel,
        )  # fmt: skip

    ours = functools.partial(
        conv_transpose, strides=strides, padding=padding, dilation=dilation,
        transpose_kernel=transpose_kernel,
    )  # fmt: skip
    dy = draws.normal(key, jax.eval_shape(plain, x, w).shape, jnp.float32)
    got, expected = (value_and_vjp(f, (x, w), dy) for f in (ours, plain))
    with jax.enable_x64(True):
        exact = value_and_vjp(
            plain, (x.astype(jnp.float64), w.astype(jnp.float64)), dy.astype("float64")
        )
    for g, p, t in zip(got, expected, exact, strict=True):
        # Each sum has at least the taps of one output, of 3 or 4 channels.
        assert_as_accurate(g, p, t, terms=3 * math.prod(k))
    reference = ours(x, w, implementation="reference")
    chex.assert_trees_all_close(reference, got[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("x", "w"), [((2, 5, 3), (3, 3, 4)), ((1, 2, 3, 4, 2), (3,) * 3 + (2, 3))]
)
def test_other_ranks_and_a_bias(x, w, key):
    x, w, b = draw(key, x, w, "float32")
    f = functools.partial(conv_transpose, strides=2)

    def gradients(implementation):
        def loss(*arrays):
            return jnp.sum(f(*arrays, implementation=implementation) ** 2)

        return jax.grad(loss, (0, 1, 2))(x, w, b)

    got, expected = gradients(None), gradients("reference")
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("transpose_kernel", [False, True])
def test_groups_are_convolutions_beside_each_other(transpose_kernel, key):
    x, w = draw(key, (1, 4, 3, 4), (3, 3, 2, 6), "float32", bias=False)
    f = functools.partial(conv_transpose, strides=2, transpose_kernel=transpose_kernel)
    if transpose_kernel:  # (*K, O / g, C): each group has its own C / g columns
        w = draws.normal(key, (3, 3, 3, 4), jnp.float32)
        parts = [f(x[..., :2], w[..., :2]), f(x[..., 2:], w[..., 2:])]
    else:
        parts = [f(x[..., :2], w[..., :3]), f(x[..., 2:], w[..., 3:])]
    y = f(x, w, groups=2)
    chex.assert_trees_all_close(y, jnp.concatenate(parts, -1), rtol=1e-5, atol=1e-5)


def test_vmap_scan_and_grad_of_grad(key):
    x, w = draw(key, (1, 3, 3, 2), (3, 3, 2, 2), "float32", bias=False)

    def penalty(implementation):
        def loss(x, w):
            y = conv_transpose(x, w, strides=2, implementation=implementation)
            return jnp.sum(y**3)

        def outer(x, w):
            return jnp.sum(jax.grad(loss, 1)(x, w) ** 2)

        return jax.jit(jax.vmap(jax.grad(outer, (0, 1)), (0, None)))

    xs = jnp.stack([x, 2 * x])
    chex.assert_trees_all_close(
        penalty(None)(xs, w), penalty("reference")(xs, w), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("x", [(0, 4, 4, 2), (1, 0, 4, 2), (2, 4, 4, 2)])
def test_nothing_comes_out_of_nothing(x, key):
    x, w, b = draw(key, x, (3, 3, 2, 3), "float32")
    padding = "SAME" if 0 in x.shape else ((-4, -4), (1, 1))
    y, vjp = jax.vjp(functools.partial(conv_transpose, padding=padding), x, w, b)
    reference = conv_transpose(x, w, b, padding=padding, implementation="reference")
    assert y.shape == reference.shape
    dx, dw, db = vjp(y)
    chex.assert_trees_all_equal(dw, jnp.zeros_like(w))
    assert dx.shape == x.shape


def test_bad_input(key):
    x, w = draw(key, (1, 4, 4, 2), (3, 3, 2, 3), "float32", bias=False)
    with pytest.raises(ValueError, match='conv_transpose: padding must be "SAME"'):
        conv_transpose(x, w, padding="CAUSAL")
    with pytest.raises(ValueError, match="conv_transpose: w must have shape"):
        conv_transpose(x, w[:, :, :1])
    with pytest.raises(TypeError, match="transpose_kernel must be a bool"):
        conv_transpose(x, w, transpose_kernel=1)
    with pytest.raises(ValueError, match="conv_transpose: strides must be"):
        conv_transpose(x, w, strides=0)
    with pytest.raises(ValueError, match=r"\(\*kernel, O / groups, C\) with C = 2"):
        conv_transpose(x, w, transpose_kernel=True)


def test_groups_may_be_numpy(key):
    x, w = draw(key, (1, 4, 4, 4), (3, 3, 2, 4), "float32", bias=False)
    y = conv_transpose(x, w, groups=np.int64(2), transpose_kernel=True)
    expected = conv_transpose(x, w, groups=2, transpose_kernel=True)
    chex.assert_trees_all_equal(y, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_gradient_of_a_bias_does_not_stop_growing(dtype):
    # 16384 is exact in both, and 512 ones are where bfloat16 stops.
    x, w, b = (jnp.ones(s, dtype) for s in ((64, 8, 8, 2), (2, 2, 2, 2), (2,)))
    y, vjp = jax.vjp(lambda b: conv_transpose(x, w, b, strides=2), b)
    np.testing.assert_array_equal(vjp(jnp.ones_like(y))[0], np.full(2, 16384, dtype))
