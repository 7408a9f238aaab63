"""Winograd's tiles of every size and kernel, within the error that kappa predicts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opsnn_jax import conv, conv2d
from tests.numerics import assert_within
from tests.ops.conv_cases import compare, draw, winograd_bound

TILES = [
    # implementation, x, w, F(m, r), axes that it is applied to
    ("winograd", (2, 13, 5), (3, 5, 4), (4, 3), 1),
    ("winograd", (1, 7, 9, 3), (5, 5, 3, 4), (2, 5), 2),
    ("winograd", (1, 7, 6, 3), (2, 4, 3, 4), (3, 4), 2),
    ("winograd", (1, 5, 6, 7, 2), (3, 1, 3, 2, 3), (4, 3), 2),
    ("winograd", (1, 5, 6, 7, 2), (3, 3, 3, 2, 3), (4, 3), 3),
    ("winograd_f2", (2, 7, 9, 3), (3, 3, 3, 5), (2, 3), 2),
    ("winograd_f4", (1, 9, 7, 3), (5, 5, 3, 4), (4, 5), 2),
    ("winograd_f6", (2, 7, 13, 3), (3, 3, 3, 5), (6, 3), 2),
]


@pytest.mark.parametrize(("implementation", "x", "w", "tile", "axes"), TILES)
def test_within_the_predicted_error(implementation, x, w, tile, axes, key):
    bound = winograd_bound(tile[0], "float32", tile[1], axes)
    compare(draw(key, x, w, "float32"), key, implementation=implementation, bound=bound)


@pytest.mark.parametrize("channels", [64, 512])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("m", [2, 4])
def test_many_channels(m, dtype, channels, key):
    x, w = draw(key, (1, 8, 8, channels), (3, 3, channels, 8), dtype, bias=False)
    f = functools.partial(conv2d, implementation=f"winograd_f{m}")
    y = jax.jit(f)(x, w)
    wide = [np.asarray(a, np.float64) for a in (x, w)]
    padded = np.pad(wide[0], ((0, 0), (1, 1), (1, 1), (0, 0)))
    truth = sum(
        padded[:, i : i + 8, j : j + 8] @ wide[1][i, j]
        for i in range(3)
        for j in range(3)
    )
    # Halves are exact in fp32, and their result is rounded once.
    bound = winograd_bound(m, "float32")
    rounding = float(jnp.finfo(dtype).eps) / 2
    assert_within(y, truth, {kind: e + rounding for kind, e in bound.items()})


@pytest.mark.parametrize(
    ("x", "w", "names"),
    [
        (
            (1, 12, 12, 64),
            (3, 3, 64, 8),
            ["winograd_f2", "winograd_f4", "winograd_f6"],
        ),
        # Of three dimensions the default takes smaller tiles along the first.
        (
            (1, 8, 8, 8, 32),
            (3, 3, 3, 32, 8),
            ["winograd_f2", "winograd", "winograd_f4"],
        ),
    ],
)
def test_smaller_tiles_are_more_accurate(x, w, names, key):
    x, w = draw(key, x, w, "float32", bias=False)
    with jax.enable_x64(True):
        wide = x.astype(jnp.float64), w.astype(jnp.float64)
        truth = np.asarray(conv(*wide, implementation="reference"))
    small, middle, large = (
        np.sqrt(np.mean((np.asarray(conv(x, w, implementation=n)) - truth) ** 2))
        for n in names
    )
    assert small < middle < large


@pytest.mark.parametrize(
    ("implementation", "kernel", "message"),
    [
        ("winograd", (6, 3), "takes kernels of 1, 2, 3, 4, 5, 7 taps"),
        ("winograd", (1, 1), "more than one in all"),
        ("winograd_f6", (5, 5), "has no accurate transform of 5 taps"),
        ("winograd_f2", (4, 3), "takes kernels of 1, 3 and 5 taps"),
        ("pallas_tpu", (5, 5), "takes 3 x 3 kernels only"),
    ],
)
def test_what_has_no_accurate_transform(implementation, kernel, message):
    x, w = jnp.ones((1, 8, 8, 2)), jnp.ones((*kernel, 2, 2))
    with pytest.raises(NotImplementedError, match=message):
        conv(x, w, implementation=implementation)
