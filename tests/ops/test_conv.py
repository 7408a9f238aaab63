"""conv: every implementation against fp64, and its gradients."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opsnn_jax import conv, conv1d, conv2d, conv3d
from tests import draws
from tests.compilation import AS_USERS_DO
from tests.numerics import errors
from tests.ops.conv_cases import compare, draw, value_and_vjp, winograd_bound

SHAPES = [
    # x, w, padding: ragged tiles, one pixel, cropping, wide filters of channels
    ((2, 7, 9, 3), (3, 3, 3, 5), "SAME"),
    ((1, 1, 1, 2), (3, 3, 2, 1), "SAME"),
    ((1, 5, 13, 1), (3, 3, 1, 17), ((0, 1), (2, -1))),
    ((3, 14, 15, 5), (3, 3, 5, 3), "VALID"),
    ((1, 20, 6, 4), (3, 3, 4, 4), ((-1, 3), (3, 0))),
]


@pytest.mark.optimized
@pytest.mark.parametrize(("x", "w", "padding"), SHAPES)
@pytest.mark.parametrize("implementation", ["direct", "winograd"])
def test_3x3_against_fp64(implementation, x, w, padding, key):
    arrays = draw(key, x, w, "float32")
    bound = winograd_bound(4, "float32") if implementation == "winograd" else None
    compare(
        arrays, key, padding=padding, implementation=implementation, bound=bound,
        compiler_options=AS_USERS_DO,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("implementation", ["direct", "winograd"])
def test_half_precision_rounds_once(implementation, dtype, key):
    # In both, an fp32 result is rounded once at the end.
    x, w, padding = SHAPES[0]
    arrays = draw(key, x, w, dtype)
    compare(arrays, key, padding=padding, implementation=implementation)


@pytest.mark.parametrize(
    ("dtype", "x", "w", "padding"),
    [
        pytest.param(
            "float32",
            (2, 11, 5, 130),
            (3, 3, 130, 2),
            ((-1, 3), (3, 0)),
            marks=pytest.mark.slow,
        ),
        ("bfloat16", (1, 5, 6, 8), (3, 3, 8, 130), "VALID"),
    ],
)
def test_pallas_tpu_against_fp64(dtype, x, w, padding, key):
    # float32 uses F(4, 3); bfloat16 F(2, 3), with rounded multiplicands.
    arrays = draw(key, x, w, dtype)
    bound = winograd_bound(4 if dtype == "float32" else 2, dtype)
    compare(arrays, key, padding=padding, implementation="pallas_tpu", bound=bound)


@pytest.mark.parametrize("implementation", ["direct", "winograd"])
def test_blocks_of_tile_rows_join(implementation, key):
    # Large enough for several blocks in the XLA form.
    arrays = draw(key, (2, 64, 33, 24), (3, 3, 24, 32), "float32")
    bound = winograd_bound(4, "float32") if implementation == "winograd" else None
    compare(arrays, key, padding="SAME", implementation=implementation, bound=bound)


OPTIONS = list(
    itertools.product(
        [(1, 1), (2, 2), (3, 2)],
        [(1, 1), (2, 1)],
        ["SAME", "VALID", ((1, 0), (2, -1))],
        [1, 2],
        [(3, 3), (1, 1), (2, 3)],
    )
)


@pytest.mark.parametrize(
    ("strides", "dilation", "padding", "groups", "k"), OPTIONS[::7]
)
def test_direct_options_against_reference_in_fp64(
    strides, dilation, padding, groups, k, key
):
    options = dict(strides=strides, dilation=dilation, padding=padding, groups=groups)
    with jax.enable_x64(True):
        arrays = draw(key, (2, 9, 8, 4), (*k, 4 // groups, 6), "float64")
        ours = functools.partial(conv2d, implementation="direct", **options)
        plain = functools.partial(conv2d, implementation="reference", **options)
        dy = draws.normal(key, plain(*arrays).shape, jnp.float64)
        chex.assert_trees_all_close(
            value_and_vjp(ours, arrays, dy), value_and_vjp(plain, arrays, dy),
            rtol=1e-12, atol=1e-12,
        )  # fmt: skip


@pytest.mark.parametrize("implementation", [None, "direct"])
@pytest.mark.parametrize(
    ("op", "x", "w", "options"),
    [
        (conv1d, (2, 11, 3), (4, 3, 5), dict(padding="CAUSAL", dilation=2)),
        (conv1d, (2, 11, 4), (3, 1, 8), dict(groups=4, strides=2)),
        (conv3d, (1, 4, 5, 6, 2), (3, 2, 1, 2, 3), dict(strides=(1, 2, 1))),
    ],
)
def test_other_ranks(op, x, w, options, implementation, key):
    arrays = draw(key, x, w, "float32")
    compare(arrays, key, implementation=implementation, **options)
    assert op(*arrays, **options).shape == conv(*arrays, **options).shape


def test_causal_sees_no_future(key):
    x, w = draw(key, (1, 9, 2), (3, 2, 4), "float32", bias=False)
    jacobian = jax.jacrev(lambda x: conv1d(x, w, padding="CAUSAL")[0].sum(-1))(x)
    influence = np.abs(np.asarray(jacobian[:, 0])).sum(-1)
    assert (influence[np.triu_indices(9, 1)] == 0).all()
    assert (np.diag(influence) > 0).all()


@pytest.mark.parametrize("implementation", ["direct", "winograd"])
def test_directional_finite_differences(implementation, key):
    with jax.enable_x64(True):
        arrays = draw(key, (2, 6, 5, 3), (3, 3, 3, 4), "float64")

        def loss(*a):
            return jnp.sum(jnp.tanh(conv2d(*a, implementation=implementation)))

        gradients = jax.grad(loss, argnums=(0, 1, 2))(*arrays)
        step = 1e-5
        for i, gradient in enumerate(gradients):
            v = draws.normal(jax.random.fold_in(key, i), gradient.shape, jnp.float64)
            ends = [
                loss(*arrays[:i], arrays[i] + s * v, *arrays[i + 1 :])
                for s in (step, -step)
            ]
            expected = (ends[0] - ends[1]) / (2 * step)
            np.testing.assert_allclose(jnp.vdot(gradient, v), expected, rtol=1e-8)


@pytest.mark.parametrize(
    ("size", "k", "stride", "pads"),
    [(224, 7, 2, (2, 3)), (6, 3, 2, (0, 1)), (5, 3, 2, (1, 1)), (8, 2, 2, (0, 0)),
     (7, 2, 3, (0, 1)), (6, 4, 1, (1, 2))],
)  # fmt: skip
def test_same_padding_puts_the_extra_pixel_at_the_end(size, k, stride, pads, key):
    x, w = draw(key, (1, size, 1), (k, 1, 2), "float32", bias=False)
    strided = functools.partial(conv1d, strides=stride)
    dy = jnp.ones((1, -(-size // stride), 2))
    same = value_and_vjp(strided, (x, w), dy)
    pairs = value_and_vjp(functools.partial(strided, padding=(pads,)), (x, w), dy)
    chex.assert_trees_all_equal(same, pairs)


@pytest.mark.parametrize(
    ("size", "k", "stride", "padding"),
    [(32, 3, 2, 1), (8, 3, 3, "VALID"), (4, 2, 3, 0)],
)
def test_untouched_pixels_have_zero_gradient(size, k, stride, padding, key):
    x, w = draw(key, (1, size, size, 2), (k, k, 2, 3), "float32", bias=False)
    f = functools.partial(conv2d, w=w, strides=stride, padding=padding)
    touched = jax.grad(lambda x: jnp.sum(f(x, w=jnp.ones_like(w))))(x)
    dx = jax.grad(lambda x: jnp.sum(f(x) ** 2))(x)
    assert dx.shape == x.shape
    assert bool((dx[touched == 0] == 0).all())


@pytest.mark.parametrize("x_shape", [(0, 5, 5, 2), (2, 2, 2, 2)])
def test_nothing_to_sum(x_shape, key):
    # An empty batch; a kernel larger than the image.
    x, w, b = draw(key, x_shape, (3, 3, 2, 4), "float32")
    f = functools.partial(conv2d, padding="VALID" if x_shape[0] else "SAME")
    y, vjp = jax.vjp(f, x, w, b)
    assert y.shape == ((0, 5, 5, 4) if x_shape[0] == 0 else (2, 0, 0, 4))
    dx, dw, db = vjp(y)
    assert dx.shape == x.shape
    chex.assert_trees_all_equal(dw, jnp.zeros_like(w))
    chex.assert_trees_all_equal(db, jnp.zeros_like(b))


@pytest.mark.parametrize("implementation", ["direct", "winograd"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 13, 15])
def test_sizes_that_fill_no_tile(implementation, size, key):
    x, w = draw(key, (1, size, size, 3), (3, 3, 3, 5), "float32", bias=False)
    with jax.enable_x64(True):
        truth = conv2d(
            x.astype(jnp.float64), w.astype(jnp.float64), implementation="reference"
        )
    assert errors(conv2d(x, w, implementation=implementation), truth)["max"] < 5e-6


@pytest.mark.parametrize("implementation", ["direct", "winograd", "pallas_tpu"])
def test_bias_is_added_before_the_one_rounding(implementation):
    # In bfloat16 1 + 2**-8 is 1, and so is that plus 2**-8; the sum is 1 + 2**-7.
    x = jnp.zeros((1, 3, 3, 2), "bfloat16")
    x = x.at[0, 1, 1].set(jnp.asarray([1, 2**-8], "bfloat16"))
    w = jnp.zeros((3, 3, 2, 1), "bfloat16").at[1, 1].set(1)
    b = jnp.full(1, 2**-8, "bfloat16")
    y = conv2d(x, w, b, padding="VALID", implementation=implementation)
    assert float(y[0, 0, 0, 0]) == 1 + 2**-7


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_of_filter_and_bias_are_summed_in_fp32(dtype):
    # 16,384 ones: a bfloat16 sum stops at 256, a float16 sum at 2048.
    x, w = jnp.ones((64, 16, 16, 4), dtype), jnp.ones((1, 1, 4, 1), dtype)
    _, vjp = jax.vjp(conv2d, x, w, jnp.zeros(1, dtype))
    _, dw, db = vjp(jnp.ones((64, 16, 16, 1), dtype))
    for gradient in (dw, db):
        assert gradient.dtype == dtype
        assert (np.asarray(gradient, np.float32) == 16384).all()


@pytest.mark.optimized
@pytest.mark.parametrize("implementation", ["reference", "direct", "winograd"])
@pytest.mark.parametrize(
    ("k", "padding"),
    [(3, ((-3, 1), (-1, -1))), (3, ((4, -1), (-3, 1))), (1, ((4, -1), (-3, 1)))],
)
def test_padding_of_both_signs(padding, k, implementation, key):
    # XLA's float32 convolution on a CPU reads out of bounds here.
    if implementation == "winograd" and k == 1:
        pytest.skip("3-tap kernels only")
    arrays = draw(key, (1, 15, 6, 8), (k, k, 8, 8), "float32", bias=False)

    def f(x, w):
        return conv2d(x, w, padding=padding, implementation=implementation)

    dy = draws.normal(key, jax.eval_shape(f, *arrays).shape, jnp.float32)
    run = functools.partial(value_and_vjp, f)
    got = jax.jit(run, compiler_options=AS_USERS_DO)(arrays, dy)
    x, w, dy = (np.asarray(a, np.float64) for a in (*arrays, dy))
    (a, b), (c, d) = ((max(p, 0), max(q, 0)) for p, q in padding)
    padded = np.pad(x, ((0, 0), (a, b), (c, d), (0, 0)))
    (a, b), (c, d) = ((max(-p, 0), max(-q, 0)) for p, q in padding)
    cropped = padded[:, a : padded.shape[1] - b, c : padded.shape[2] - d]
    y = sum(
        cropped[:, i : i + dy.shape[1], j : j + dy.shape[2]] @ w[i, j]
        for i in range(k)
        for j in range(k)
    )
    np.testing.assert_allclose(got[0], y, rtol=1e-5, atol=1e-5)
    # The gradients by the adjoint identity: <dy, y> = <dx, x> = <dw, w>.
    np.testing.assert_allclose(np.vdot(got[1], x), np.vdot(dy, y), rtol=1e-4)
    np.testing.assert_allclose(np.vdot(got[2], w), np.vdot(dy, y), rtol=1e-4)


@pytest.mark.parametrize("implementation", ["direct", "gemm", "pointwise", "reference"])
def test_negative_padding_crops(implementation):
    n = jnp.arange(8.0)
    x = 100 * jnp.arange(6.0)[:, None] + 10 * n[None]
    f = functools.partial(conv2d, implementation=implementation)
    y = f(x[None, :, :, None], jnp.ones((1, 1, 1, 1)), padding=((0, 0), (-5, 1)))
    chex.assert_trees_all_equal(y[0, 0, :, 0], jnp.array([50.0, 60.0, 70.0, 0.0]))


@pytest.mark.parametrize("implementation", [None, "direct", "gemm", "phases"])
@pytest.mark.parametrize(
    ("x", "w", "options"),
    [
        ((1, 3, 1), (2, 1, 1), dict(padding=((-5, 10),))),
        ((1, 1, 2), (2, 2, 2), dict(strides=4, padding=((4, 0),))),
        ((3, 3, 1, 2), (3, 4, 1, 4),
         dict(strides=(4, 3), padding=((9, -3), (6, 1)), groups=2)),
    ],
)  # fmt: skip
def test_one_end_is_cropped_beyond_the_other(x, w, options, implementation, key):
    if implementation == "phases" and ("groups" in options or len(options) == 1):
        pytest.skip("of strides only, without groups")
    x, w = draw(key, x, w, "float32", bias=False)

    def passes(implementation):
        y, vjp = jax.vjp(
            lambda x, w: conv(x, w, implementation=implementation, **options), x, w
        )
        return y, *vjp(jnp.cos(jnp.arange(float(y.size))).reshape(y.shape))

    for got, expected in zip(passes(implementation), passes("reference"), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
