"""One kernel for a depthwise convolution and the pointwise one after it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from opsnn_jax import separable_conv2d
from opsnn_jax.kernels.conv import depthwise_tpu_image
from tests import draws
from tests.numerics import assert_as_accurate
from tests.ops.conv_cases import draw, value_and_vjp

FUSED = "pallas_tpu_separable"
OPERANDS = ("x", "w_depthwise", "w_pointwise", "b", "residual")


def arrays_of(key, x, kernel, outputs, dtype, names):
    """The operands of these names, of 3 x 3 and so on with SAME padding."""
    c = x[-1]
    _, depthwise, _ = draw(key, x, (*kernel, 1, c), dtype)
    x, pointwise, b = draw(key, x, (1, 1, c, outputs), dtype)
    residual = jnp.sin(jnp.arange(x.size // c * outputs, dtype=jnp.float32))
    residual = residual.reshape(*x.shape[:-1], outputs).astype(dtype)
    every = dict(zip(OPERANDS, (x, depthwise, pointwise, b, residual), strict=True))
    return {name: every[name] for name in names}


# x, kernel, outputs, operands, dtype, options: ragged columns and lanes, rows that make
# several strips and a block of what is left, every epilogue.
CALLS = [
    ((2, 9, 11, 3), (3, 2), 5, OPERANDS, "float32", dict(activation="gelu")),
    ((1, 12, 7, 130), (3, 3), 4, OPERANDS[:3], "float32",
     dict(dilation=2, activation="relu")),
    ((2, 16, 5, 3), (3, 3), 5, OPERANDS[:4], "bfloat16", dict(activation="silu")),
]  # fmt: skip


@pytest.mark.parametrize(("x", "kernel", "outputs", "names", "dtype", "options"), CALLS)
def test_values_and_gradients_against_fp64(
    x, kernel, outputs, names, dtype, options, key, monkeypatch
):
    monkeypatch.setattr(depthwise_tpu_image, "_STRIP", 1)
    operands = arrays_of(key, x, kernel, outputs, dtype, names)

    def run(implementation):
        def f(*values):
            given = dict(zip(names, values, strict=True))
            return separable_conv2d(**given, implementation=implementation, **options)

        return f

    values = tuple(operands.values())
    dy = draws.normal(key, (*x[:-1], outputs), jnp.float32).astype(dtype)

    @jax.jit
    def each(values, dy):
        ours, plain = (value_and_vjp(run(i), values, dy) for i in (FUSED, "reference"))
        return ours, plain, run(FUSED)(*values)

    got, plain, alone = each(values, dy)
    with jax.enable_x64(True):
        wide = [np.asarray(a, np.float64) for a in values]
        exact = jax.jit(functools.partial(value_and_vjp, run("reference")))(
            wide, np.asarray(dy, np.float64)
        )
    # Alone, nothing is kept for a gradient.
    results = (alone, *got), (plain[0], *plain), (exact[0], *exact)
    for g, p, t in zip(*results, strict=True):
        assert_as_accurate(g, p, t, terms=dy.size // outputs)


def lowered(f, *arrays):
    return jax.jit(f).trace(*arrays).lower(lowering_platforms=("tpu",)).as_text()


def structs(width, **kwargs):
    shapes = (8, 56, width, 128), (3, 3, 1, 128), (1, 1, 128, 128)
    return [jax.ShapeDtypeStruct(shape, "bfloat16", **kwargs) for shape in shapes]


def test_a_tpu_runs_one_kernel_where_it_is_faster():
    assert lowered(separable_conv2d, *structs(56)).count('separable_conv"') == 1
    assert "tpu_custom_call" not in lowered(separable_conv2d, *structs(28))
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    split = structs(56, sharding=NamedSharding(mesh, P()))
    assert "tpu_custom_call" not in lowered(separable_conv2d, *split)
    named = functools.partial(separable_conv2d, implementation=FUSED)
    with pytest.raises(NotImplementedError, match="cannot partition"):
        lowered(named, *split)


def test_what_it_cannot_do_is_said_or_left_to_the_next(key):
    x, depthwise, pointwise = arrays_of(
        key, (1, 6, 5, 4), (3, 3), 3, "float32", OPERANDS[:3]
    ).values()
    f = functools.partial(separable_conv2d, x, depthwise, pointwise, strides=2)
    with pytest.raises(NotImplementedError, match="takes no strides"):
        f(implementation=FUSED)
    np.testing.assert_array_equal(
        f(implementation=(FUSED, "direct")), f(implementation="direct")
    )
    with pytest.raises(ValueError, match="must come first"):
        f(implementation=("direct", FUSED))
    with pytest.raises(ValueError, match="got 'nothing'"):
        f(implementation=(FUSED, "nothing"))
    with pytest.raises(NotImplementedError, match="precision DEFAULT and HIGHEST"):
        separable_conv2d(
            x, depthwise, pointwise, precision="high", implementation=FUSED
        )


def test_elsewhere_than_on_a_tpu_it_is_two_convolutions(key):
    arrays = arrays_of(key, (2, 3, 8, 128), (3, 3), 4, "float32", OPERANDS[:4])
    spec = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays.values()]
    assert "separable_conv" in lowered(separable_conv2d, *spec)

    @functools.partial(jax.jit, static_argnums=0)
    def each(implementation, x, *rest):
        @jax.checkpoint
        def f(x):
            return separable_conv2d(
                x, *rest, activation="gelu", implementation=implementation
            )

        return jax.vmap(jax.value_and_grad(lambda x: (f(x) ** 2).sum()))(x[:, None])

    values = arrays.values()
    for got, expected in zip(each(None, *values), each("direct", *values), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)
