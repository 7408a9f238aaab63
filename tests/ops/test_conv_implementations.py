"""Every XLA implementation of convolution against fp64, and which one is chosen."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opsnn_jax import conv, conv2d
from opsnn_jax.kernels.conv import depthwise_tpu_image, windows
from opsnn_jax.kernels.conv.spec import ConvSpec
from opsnn_jax.ops.conv_arguments import validate
from opsnn_jax.ops.conv_table import TABLE
from tests.ops.conv_cases import compare, draw

# name -> x, w and options that it takes: strides that leave a remainder, dilation,
# cropping, several outputs a channel, one pixel, and each number of dimensions.
CALLS = {
    "direct": [],
    "gemm": [
        ((2, 9, 8, 4), (3, 2, 4, 5), dict(strides=(2, 3))),
        ((2, 7, 6, 6), (3, 3, 2, 9), dict(groups=3, padding=((1, 0), (2, -1)))),
        ((1, 1, 1, 2), (3, 3, 2, 1), {}),
        ((3, 11, 4), (4, 2, 6), dict(groups=2, dilation=2, padding="CAUSAL")),
    ],
    "pointwise": [
        ((2, 5, 4, 8), (1, 1, 8, 5), dict(strides=(2, 3))),
        ((2, 7, 3), (1, 3, 4), dict(padding=((2, -1),))),
    ],
    "depthwise": [
        ((2, 9, 8, 3), (3, 2, 1, 3), dict(groups=3, strides=(2, 3))),
        ((2, 6, 7, 3), (3, 3, 1, 6), dict(groups=3, padding=((1, 0), (2, -1)))),
        ((2, 13, 5), (4, 1, 5), dict(groups=5, padding="CAUSAL", dilation=2)),
        ((1, 1, 1, 2), (3, 3, 1, 2), dict(groups=2)),
    ],
    "pallas_tpu_depthwise": [
        ((2, 9, 11, 3), (3, 2, 1, 3), dict(groups=3, padding=((2, -1), (-1, 2)))),
        ((2, 1, 37, 130), (1, 3, 1, 130), dict(groups=130, dilation=(1, 2))),
        ((2, 13, 5), (4, 1, 5), dict(groups=5, padding="CAUSAL", dilation=2)),
        # Its first rows are copied in several steps of a loop, and some that are left.
        ((2, 10, 130, 3), (3, 3, 1, 3), dict(groups=3)),
    ],
    "block_diagonal": [
        ((2, 9, 8, 6), (3, 2, 2, 9), dict(groups=3, strides=(2, 3))),
        # 74 groups of 2 by 3 in two blocks; two of 130 by 1 one by one.
        ((1, 4, 3, 148), (3, 3, 2, 222), dict(groups=74, padding=((1, 0), (2, -1)))),
        ((2, 5, 260), (3, 130, 2), dict(groups=2, dilation=2)),
        ((2, 3, 4, 3, 4), (2, 1, 3, 1, 8), dict(groups=4)),
    ],
    "block_diagonal_16": [
        # 24 groups of 2 by 3 in blocks of four; two of 3 by 17 one by one.
        ((2, 9, 8, 48), (3, 2, 2, 72), dict(groups=24, strides=(2, 3))),
        ((1, 7, 6, 6), (3, 3, 3, 34), dict(groups=2, padding=((1, 0), (2, -1)))),
    ],
    "phases": [
        # Outputs that leave a remainder, cropping, strides of one and above the filter.
        ((2, 11, 8, 3), (3, 5, 3, 4), dict(strides=(2, 3))),
        ((2, 9, 10, 2), (7, 3, 2, 5), dict(strides=2, padding=((3, -1), (-2, 1)))),
        ((1, 8, 7, 3), (2, 1, 3, 4), dict(strides=(3, 1), padding="VALID")),
        ((2, 13, 9, 2), (4, 2, 2, 3), dict(strides=(4, 3), padding="VALID")),
        ((2, 17, 2), (5, 2, 3), dict(strides=3, padding="CAUSAL")),
        ((1, 5, 4, 6, 2), (2, 3, 1, 2, 3), dict(strides=(2, 1, 3))),
    ],
    "planes": [
        ((2, 5, 5, 6, 2), (3, 2, 1, 2, 3), dict(strides=(2, 2, 1))),
        ((1, 6, 4, 3, 4), (2, 3, 3, 2, 4), dict(groups=2, dilation=(2, 1, 1))),
    ],
}  # fmt: skip
XLA = ["gemm", "pointwise", "depthwise", "block_diagonal", "planes", "phases"]
EACH = [(name, *call) for name, calls in CALLS.items() for call in calls]


@pytest.mark.parametrize(("implementation", "x", "w", "options"), EACH)
def test_against_fp64(implementation, x, w, options, key):
    compare(draw(key, x, w, "float32"), key, implementation=implementation, **options)


@pytest.mark.parametrize("padding", ["SAME", ((3, 3), (0, 1))])
def test_strips_of_an_image_join(padding, key, monkeypatch):
    monkeypatch.setattr(depthwise_tpu_image, "_STRIP", 1)  # one block of rows each
    arrays = draw(key, (2, 16, 5, 3), (3, 3, 1, 3), "float32")
    options = dict(groups=3, padding=padding, implementation="pallas_tpu_depthwise")
    spec = validate("conv", None, *arrays, groups=3, padding=padding)
    assert depthwise_tpu_image.as_image(spec).grid[-1] > 1
    compare(arrays, key, **options)


@pytest.mark.parametrize("implementation", XLA)
def test_half_precision_rounds_once(implementation, key):
    x, w, options = CALLS[implementation][0]
    compare(draw(key, x, w, "bfloat16"), key, implementation=implementation, **options)


@pytest.mark.parametrize("implementation", XLA)
def test_vmap_and_grad_of_grad(implementation, key):
    shape, w_shape, options = CALLS[implementation][0]
    x, w = draw(key, shape, w_shape, "float32", bias=False)

    def twice(implementation):
        def loss(x, w):
            y = conv(x, w, implementation=implementation, **options)
            return jnp.sum(y**3)

        def penalty(x, w):
            return sum(jnp.sum(g**2) for g in jax.grad(loss, (0, 1))(x, w))

        return jax.jit(jax.vmap(jax.grad(penalty, (0, 1)), (0, None)))

    xs = jnp.stack([x, -x])
    chex.assert_trees_all_close(
        twice(implementation)(xs, w), twice("reference")(xs, w), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize(
    "fits", [lambda p: p <= 1, lambda p: p <= 12, lambda p: p <= 48]
)
def test_slabs_cover_every_output_once(fits):
    spec = ConvSpec(
        (6, 9, 5, 2), (3, 2, 2, 3), "float32", (2, 1), ((1, 1), (0, 1)), (1, 1), 1
    )
    slabs = windows.Slabs(spec, fits)
    y = jnp.arange(math.prod(spec.y_shape)).reshape(spec.y_shape)
    parts = [slabs.of_output(y, i) for i in range(slabs.count)]
    np.testing.assert_array_equal(slabs.join(jnp.stack(parts)), y)
    x = jnp.arange(math.prod(spec.x_shape)).reshape(spec.x_shape)
    padded = windows.pad(spec, x)
    for k in windows.taps(spec):
        seen = [
            windows.tap(slabs.spec, slabs.of_input(padded, i), k)
            for i in range(slabs.count)
        ]
        whole = windows.tap(spec, padded, k)
        np.testing.assert_array_equal(slabs.join(jnp.stack(seen)), whole)


def test_gradients_inside_scan_are_those_outside(key):
    # dw must not depend on where XLA puts dimensions in order.
    x, w = draw(key, (2, 6, 6, 4), (3, 3, 4, 4), "float32", bias=False)

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def dw(w, scan, implementation):
        def layer(carry, _):
            return conv2d(carry, w, implementation=implementation), None

        carry = x
        if scan:
            return jax.lax.scan(layer, carry, None, length=3)[0].sum()
        for _ in range(3):
            carry, _ = layer(carry, None)
        return carry.sum()

    for implementation in (None, "direct"):
        gradients = [jax.grad(dw)(w, scan, implementation) for scan in (True, False)]
        chex.assert_trees_all_close(*gradients, rtol=1e-5)


@pytest.mark.parametrize("groups", [2, 3, 4, 6, 12])
def test_every_number_of_groups(groups, key):
    arrays = draw(key, (1, 4, 5, 12), (3, 3, 12 // groups, 12), "float32")
    compare(arrays, key, implementation="block_diagonal", groups=groups)


@pytest.mark.parametrize(
    "implementation", [None, "direct", "gemm", "block_diagonal", "block_diagonal_16"]
)
@pytest.mark.parametrize("value", [jnp.inf, jnp.nan])
def test_one_groups_infinity_stays_its_own(value, implementation, key):
    x, w = draw(key, (1, 5, 5, 4), (3, 3, 2, 4), "float32", bias=False)
    f = functools.partial(conv2d, groups=2, implementation=implementation)

    def spoilt(x, w, dy):
        """Which channels of y, dx and dw hold anything that is not finite."""
        y, vjp = jax.vjp(f, x, w)
        return [(~np.isfinite(a)).any((0, 1, 2)).tolist() for a in (y, *vjp(dy))]

    first, none = [True, True, False, False], [False] * 4
    bad_x, dy = x.at[0, 2, 2, 0].set(value), jnp.ones((1, 5, 5, 4))
    assert spoilt(bad_x, w, dy) == [first, none, first]
    assert not jnp.isfinite(f(bad_x, w)[0, 2, 2, :2]).any()
    third, fourth = [False, False, True, False], [False, False, False, True]
    second = [False, False, True, True]
    assert spoilt(x, w.at[1, 1, 0, 3].set(value), dy) == [fourth, third, none]
    assert spoilt(x, w, dy.at[0, 2, 2, 3].set(value)) == [none, second, fourth]


# What is chosen.

CHOSEN = [
    # x, w, options, and what runs forward, dx and dw on a CPU
    ((8, 56, 56, 64), (3, 3, 64, 64), {}, ("winograd", "winograd", "winograd")),
    ((8, 56, 56, 64), (3, 3, 64, 64), dict(strides=2), ("direct", "direct", "direct")),
    ((8, 14, 14, 256), (3, 3, 256, 256), {}, ("direct", "direct", "winograd")),
    ((8, 14, 14, 512), (3, 3, 512, 512), {}, ("direct", "direct", "direct")),
    ((1, 7, 7, 64), (3, 3, 64, 64), {}, ("direct", "direct", "direct")),
    ((32, 28, 28, 16), (3, 3, 16, 16), {}, ("direct", "direct", "direct")),
    ((8, 28, 28, 64), (1, 1, 64, 32), {}, ("pointwise",) * 3),
    ((8, 28, 28, 64), (3, 3, 1, 64), dict(groups=64), ("depthwise",) * 3),
    ((8, 28, 28, 64), (3, 3, 4, 64), dict(groups=16), ("block_diagonal_16",) * 3),
    ((8, 14, 14, 64), (3, 3, 32, 64), dict(groups=2), ("block_diagonal_16",) * 3),
    ((2, 4, 6, 6, 8), (3, 3, 3, 2, 8), dict(groups=4), ("gemm",) * 3),
    ((2, 4, 6, 6, 32), (3, 3, 3, 16, 32), dict(groups=2), ("planes", "planes", "gemm")),
    ((2, 8, 9, 9, 4), (3, 3, 3, 4, 4), {}, ("planes",) * 3),
    ((2, 16, 28, 28, 16), (3, 3, 3, 16, 16), {}, ("planes", "planes", "winograd")),
    ((2, 16, 28, 28, 32), (3, 3, 3, 32, 32), {}, ("winograd",) * 3),
    ((8, 28, 28, 64), (5, 5, 64, 64), {}, ("winograd", "winograd", "direct")),
    ((8, 224, 224, 3), (7, 7, 3, 64), dict(strides=2), ("direct", "phases", "direct")),
    ((8, 224, 224, 3), (16, 16, 3, 64), dict(strides=16), ("phases",) * 3),
]


@pytest.mark.parametrize(("x", "w", "options", "names"), CHOSEN)
def test_what_a_cpu_runs(x, w, options, names):
    arrays = (jax.ShapeDtypeStruct(shape, "float32") for shape in (x, w))
    spec = validate("conv", None, *arrays, None, **options)
    choice = TABLE.choose(None, spec)
    chosen = [dict(choice[name].by_platform) for name in ("fwd", "dx", "dw")]
    assert tuple(c["cpu"].name for c in chosen) == names
    on_tpu = "block_diagonal" if 1 < spec.groups < x[-1] else "direct"
    assert {c["tpu"].name for c in chosen} == {on_tpu}


def _chosen_for_a_tpu(x, w, dtype, **options):
    arrays = (jax.ShapeDtypeStruct(shape, dtype) for shape in (x, w))
    choice = TABLE.choose(None, validate("conv", None, *arrays, None, **options))
    passes = (dict(choice[name].by_platform) for name in ("fwd", "dx", "dw"))
    return {each["tpu"].name for each in passes}


HIGHEST, BOTH = dict(precision="highest"), dict(precision=("highest",) * 2)


@pytest.mark.parametrize(
    ("dtype", "x", "o", "options", "name"),
    [
        ("float32", (8, 28, 28, 256), 128, HIGHEST, "pallas_tpu"),
        ("float32", (8, 28, 28, 256), 128, BOTH, "pallas_tpu"),
        ("float32", (8, 28, 28, 256), 128, {}, "direct"),
        ("float32", (8, 28, 28, 256), 128, dict(precision="high"), "direct"),
        ("float32", (4, 28, 28, 256), 128, HIGHEST, "direct"),  # images
        ("float32", (8, 28, 28, 256), 64, HIGHEST, "direct"),  # channels
        ("float32", (8, 28, 28, 128), 128, HIGHEST, "pallas_tpu"),
        ("float32", (8, 27, 28, 128), 512, HIGHEST, "direct"),  # tiles
        ("float32", (8, 20, 22, 256), 256, HIGHEST, "pallas_tpu"),
        ("float32", (8, 19, 28, 256), 256, HIGHEST, "direct"),  # tiles
        ("float32", (8, 14, 14, 512), 512, HIGHEST, "direct"),  # tiles
        ("float32", (8, 7, 28, 512), 512, HIGHEST, "direct"),  # tiles
        ("float32", (8, 28, 28, 256), 128, HIGHEST | dict(strides=2), "direct"),
        ("bfloat16", (8, 28, 28, 256), 128, HIGHEST, "direct"),
    ],
)  # fmt: skip
def test_what_a_tpu_runs_of_dense_layers(dtype, x, o, options, name):
    w = (3, 3, x[-1], o)
    assert _chosen_for_a_tpu(x, w, dtype, **options) == {name}


def test_the_default_precision_of_jax_is_that_of_the_op():
    x, w = (8, 28, 28, 256), (3, 3, 256, 128)
    with jax.default_matmul_precision("float32"):
        assert _chosen_for_a_tpu(x, w, "float32") == {"pallas_tpu"}
        assert _chosen_for_a_tpu(x, w, "float32", precision="default") == {"direct"}
    with jax.default_matmul_precision("BF16_BF16_F32_X3"):
        assert _chosen_for_a_tpu(x, w, "float32") == {"direct"}


@pytest.mark.parametrize(
    ("x", "w", "options", "name"),
    [
        ((8, 56, 56, 128), (3, 3, 1, 128), {}, "pallas_tpu_depthwise"),
        ((4, 1024, 512), (4, 1, 512), dict(padding="CAUSAL"), "pallas_tpu_depthwise"),
        ((8, 28, 28, 256), (3, 3, 1, 256), {}, "direct"),  # columns
        ((8, 56, 56, 96), (3, 3, 1, 96), {}, "direct"),  # lanes
        ((8, 56, 56, 128), (3, 3, 1, 128), dict(padding="VALID"), "direct"),
        ((8, 56, 56, 128), (3, 3, 1, 128), dict(strides=2), "direct"),
        ((8, 56, 56, 128), (3, 3, 1, 256), {}, "direct"),  # two outputs a channel
    ],
)
def test_what_a_tpu_runs_depthwise(x, w, options, name):
    assert _chosen_for_a_tpu(x, w, "bfloat16", groups=x[-1], **options) == {name}
