"""conv under JAX's transformations, on several devices, and compiled once."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from opsnn_jax import conv2d
from tests.ops.conv_cases import draw, value_and_vjp


class TransformationsTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_with_and_without_jit(self):
        arrays = draw(jax.random.key(0), (2, 8, 8, 3), (3, 3, 3, 4), "float32")
        y = self.variant(functools.partial(conv2d, implementation="winograd"))(*arrays)
        expected = conv2d(*arrays, implementation="reference")
        chex.assert_trees_all_close(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", [None, "direct", "winograd"])
@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0), (2, -1)])
def test_vmap_equals_a_loop(implementation, in_axes, key):
    x, w = draw(key, (2, 6, 5, 3), (3, 3, 3, 4), "float32", bias=False)
    xs, ws = (
        a if axis is None else jnp.stack([a, 2 * a, -a], axis)
        for a, axis in zip((x, w), in_axes, strict=True)
    )

    @jax.jit
    def gradients(x, w):
        def loss(x, w):
            return jnp.sum(conv2d(x, w, implementation=implementation) ** 2)

        return jax.grad(loss, (0, 1))(x, w)

    got = jax.vmap(gradients, in_axes)(xs, ws)
    for i in range(3):
        one = (
            a if axis is None else jnp.take(a, i, axis)
            for a, axis in zip((xs, ws), in_axes, strict=True)
        )
        each = jax.tree.map(lambda g, i=i: g[i], got)
        chex.assert_trees_all_close(each, gradients(*one), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", [None, "direct", "winograd"])
def test_grad_of_grad(implementation, key):
    def twice(implementation):
        def inner(x, w):
            return jnp.sum(conv2d(x, w, implementation=implementation) ** 3)

        def outer(x, w):
            return sum(jnp.sum(g**2) for g in jax.grad(inner, (0, 1))(x, w))

        return jax.jit(jax.grad(outer, (0, 1)))

    with jax.enable_x64(True):
        arrays = draw(key, (1, 5, 6, 2), (3, 3, 2, 3), "float64", bias=False)
        chex.assert_trees_all_close(
            twice(implementation)(*arrays), twice("reference")(*arrays), rtol=1e-10
        )


def test_grad_of_grad_in_half_precision(key):
    x, w = draw(key, (1, 5, 6, 2), (3, 3, 2, 3), "bfloat16", bias=False)

    def penalty(x):
        inner = jax.grad(lambda x: jnp.sum(conv2d(x, w).astype(jnp.float32) ** 2))(x)
        return jnp.sum(inner.astype(jnp.float32) ** 2)

    second = jax.jit(jax.grad(penalty))(x)
    assert second.dtype == jnp.bfloat16
    assert bool(jnp.isfinite(second.astype(jnp.float32)).all())


def test_remat_and_scan_with_a_half_precision_carry(key):
    x, w = draw(key, (1, 6, 6, 4), (3, 3, 4, 4), "bfloat16", bias=False)

    def loss(w, wrap):
        def layer(carry, _):
            return wrap(lambda c: conv2d(c, w))(carry), None

        return jnp.sum(jax.lax.scan(layer, x, None, length=3)[0].astype(jnp.float32))

    plain = jax.grad(loss)(w, lambda f: f)
    assert plain.dtype == jnp.bfloat16
    chex.assert_trees_all_equal(plain, jax.grad(loss)(w, jax.checkpoint))


@pytest.mark.parametrize("implementation", ["direct", "winograd", "pallas_tpu"])
def test_vmap_over_nothing(implementation, key):
    x, w = draw(key, (1, 4, 4, 2), (3, 3, 2, 2), "float32", bias=False)
    f = functools.partial(conv2d, implementation=implementation)
    assert jax.vmap(f, (None, 0))(x, w[None][:0]).shape == (0, 1, 4, 4, 2)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_gradients_keep_explicit_shardings(key):
    # The axes of jax.make_mesh are explicit: shardings are part of the types.
    arrays = draw(key, (4, 5, 3, 2), (3, 3, 2, 4), "float32")

    def loss(*a):
        return jnp.sum(conv2d(*a) ** 2)

    specs = P("d"), P(None, None, None, "d"), P()
    with jax.set_mesh(jax.make_mesh((4,), ("d",))):
        sharded = [jax.device_put(a, s) for a, s in zip(arrays, specs, strict=True)]
        got = jax.jit(jax.grad(loss, (0, 1, 2)))(*sharded)
        y = jax.eval_shape(conv2d, *sharded)
    assert y.sharding.spec == P("d", None, None, None)
    for g, a in zip(got, sharded, strict=True):
        assert g.sharding.is_equivalent_to(a.sharding, a.ndim)
    expected = jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)
    chex.assert_trees_all_close(
        jax.device_get(got), jax.device_get(expected), rtol=1e-5, atol=1e-4
    )


def test_the_tpu_kernel_lowers_in_shard_map():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    f = functools.partial(conv2d, implementation="pallas_tpu")
    f = jax.shard_map(f, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
    gradient = jax.jit(jax.grad(lambda x, w: jnp.sum(f(x, w)), (0, 1)))
    x, w = jnp.zeros((2, 8, 8, 4)), jnp.zeros((3, 3, 4, 6))
    lowered = gradient.trace(x, w).lower(lowering_platforms=("tpu",))
    assert "winograd_weight_gradient" in lowered.as_text()


def test_forward_mode_works_in_the_reference(key):
    arrays = draw(key, (1, 4, 4, 2), (3, 3, 2, 2), "float32")
    f = functools.partial(conv2d, implementation="reference")
    y, dy = jax.jvp(f, arrays, arrays)
    assert y.shape == dy.shape


def test_one_compilation_for_equal_calls(key):
    x, w = draw(key, (1, 5, 5, 2), (3, 3, 2, 2), "float32", bias=False)
    traces = []

    @jax.jit
    def f(x, w):
        traces.append(1)
        return conv2d(x, w, strides=[1, 1], padding=[(1, 1), (1, 1)])

    for _ in range(3):
        f(x, w)
    assert len(traces) == 1


def test_fp32_stays_fp32_under_x64(key):
    x, w, b = draw(key, (1, 6, 6, 2), (3, 3, 2, 2), "float32")
    for implementation in ("direct", "winograd"):
        f = functools.partial(conv2d, implementation=implementation)
        with jax.enable_x64(True):
            got = value_and_vjp(f, (x, w, b), jnp.ones((1, 6, 6, 2), "float32"))
        assert {g.dtype.name for g in got} == {"float32"}
    with jax.enable_x64(True):  # forward only: interpreting takes its time
        assert conv2d(x, w, b, implementation="pallas_tpu").dtype == jnp.float32


def test_same_bits_every_time(key):
    arrays = draw(key, (2, 17, 9, 5), (3, 3, 5, 7), "float32")
    f = jax.jit(lambda *a: value_and_vjp(conv2d, a, jnp.ones((2, 17, 9, 7))))
    first = f(*arrays)
    for _ in range(5):
        chex.assert_trees_all_equal(f(*arrays), first)


def test_without_jit_a_kernel_is_compiled_all_the_same(key):
    x, w = draw(key, (1, 4, 5, 3), (3, 3, 3, 2), "float32", bias=False)
    expected = conv2d(x, w)
    with jax.disable_jit():
        y, vjp = jax.vjp(conv2d, x, w)
        chex.assert_trees_all_close(y, expected, rtol=1e-6, atol=1e-6)
        assert [g.shape for g in vjp(y)] == [x.shape, w.shape]


@pytest.mark.parametrize(("channels", "groups"), [(64, 1), (8, 8), (8, 2)])
def test_a_batch_whose_size_is_not_known_is_exported(channels, groups, key):
    # With 64 channels and a known batch it would be Winograd.
    shape = (3, 3, channels // groups, channels)
    x, w = draw(key, (2, 12, 12, channels), shape, "float32", bias=False)

    def gradients(x):
        f = functools.partial(conv2d, groups=groups)
        return jax.grad(lambda x, w: jnp.sum(f(x, w) ** 2), (0, 1))(x, w)

    (batch,) = jax.export.symbolic_shape("batch")
    spec = jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype)
    exported = jax.export.export(jax.jit(gradients))(spec)
    chex.assert_trees_all_close(exported.call(x), gradients(x), rtol=1e-4, atol=1e-3)
    with pytest.raises(NotImplementedError, match="takes sizes that are known only"):
        f = functools.partial(conv2d, groups=groups, implementation="gemm")
        jax.export.export(jax.jit(lambda x: f(x, w)))(spec)
