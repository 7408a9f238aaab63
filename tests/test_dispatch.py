"""The implementation table and its primitive, on a small op of the test's own."""

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from opsnn_jax.dispatch import Implementation, Table, deferred
from opsnn_jax.kernels.tiling import result_type
from opsnn_jax.meshes import align_varying


def _double_kernel(x_ref, y_ref):
    y_ref[...] = x_ref[...] * 2


def _pallas(spec, x, *, interpret):
    shape = result_type(x.shape, x.dtype)
    return pl.pallas_call(_double_kernel, out_shape=shape, interpret=interpret)(x)


def _refuses_odd(spec):
    return "takes even sizes only" if spec[0] % 2 else None


PLAIN = Implementation("plain", {"fwd": lambda spec, x: x * 2.0})
KERNEL = Implementation(
    "kernel", {"fwd": _pallas}, ("tpu",), refuses=_refuses_odd, pallas=True
)
ELSEWHERE = Implementation("elsewhere", {"fwd": lambda spec, x: x * 2.0}, ("cuda",))
BROKEN = Implementation(
    "broken", {"fwd": PLAIN.passes["fwd"]}, refuses=deferred("no_such_module", "f")
)
TABLE = Table(
    "double",
    (PLAIN, KERNEL, ELSEWHERE, BROKEN),
    lambda name, platform, spec: ("kernel", "elsewhere", "plain"),
    plain=PLAIN,
)


def double(x, implementation=None):
    TABLE.check(implementation)
    return TABLE.choose(implementation, x.shape)["fwd"](x)


def chosen(implementation, shape=(4,)):
    choice = TABLE.choose(implementation, shape)
    return {p: i.name for p, i in choice["fwd"].by_platform}


def test_each_platform_gets_its_first_that_can():
    assert chosen(None) == {
        "cpu": "plain", "tpu": "kernel", "cuda": "elsewhere", "rocm": "plain"
    }  # fmt: skip
    assert chosen(None, (3,))["tpu"] == "plain"
    assert chosen(("kernel", "plain"))["cpu"] == "plain"


def test_a_name_means_exactly_that_one():
    # On a CPU a Pallas kernel that is named runs in the interpreter.
    assert chosen("kernel") == {"cpu": "kernel", "tpu": "kernel"}
    x = jnp.arange(4.0)
    chex.assert_trees_all_equal(double(x, "kernel"), 2 * x)
    with pytest.raises(NotImplementedError, match="'kernel' takes even sizes only"):
        double(jnp.ones(3), "kernel")


def test_all_refusals_are_listed():
    with pytest.raises(NotImplementedError) as error:
        double(jnp.ones(3), ("elsewhere", "kernel"))
    assert "'elsewhere' does not run on cpu" in str(error.value)
    assert "'kernel' does not run on cpu" in str(error.value)


def test_a_kernel_that_cannot_be_imported_is_refused():
    with pytest.raises(NotImplementedError, match="cannot be imported with JAX"):
        double(jnp.ones(4), "broken")
    assert chosen(("broken", "plain"))["cpu"] == "plain"


@pytest.mark.parametrize(
    ("implementation", "message"),
    [
        ("nothing", "got 'nothing'"),
        (("plain", "nothing"), "got 'nothing'"),
        ((), "got an empty sequence"),
        (("reference", "plain"), "Pass implementation='reference' alone"),
    ],
)
def test_unknown_names(implementation, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        double(jnp.ones(4), implementation)


def test_one_trace_exports_to_every_platform():
    x = jnp.arange(1024.0).reshape(8, 128)
    platforms = ("cpu", "tpu", "cuda")
    exported = jax.export.export(jax.jit(double), platforms=platforms)(x)
    assert exported.platforms == platforms
    assert "tpu_custom_call" in exported.mlir_module()
    chex.assert_trees_all_equal(exported.call(x), 2 * x)


def test_a_kernel_is_not_partitioned_but_replaced_or_refused():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, P("d"))
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=sharding)

    def lowered(f):
        return jax.jit(f).trace(x).lower(lowering_platforms=("tpu",)).as_text()

    assert "tpu_custom_call" not in lowered(double)
    assert "tpu_custom_call" not in lowered(jax.vmap(double))
    named = functools.partial(double, implementation="kernel")
    with pytest.raises(NotImplementedError, match="over 2 devices.*shard_map"):
        lowered(named)
    for f in (double, named):
        inside = jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
        assert "tpu_custom_call" in lowered(inside)


def test_a_kernel_that_cannot_be_exported_is_replaced_or_refused():
    kernel = dataclasses.replace(KERNEL, exports=False)
    order = ("kernel", "plain")
    table = Table("double", (PLAIN, kernel), lambda *_: order, plain=PLAIN)

    def exported(implementation):
        f = jax.jit(lambda x: table.choose(implementation, x.shape)["fwd"](x))
        return jax.export.export(f, platforms=("tpu",))(jnp.ones((8, 128)))

    assert "tpu_custom_call" not in exported(None).mlir_module()
    with pytest.raises(NotImplementedError, match="'kernel' cannot be exported"):
        exported("kernel")


def test_a_platform_where_nothing_runs_says_so_when_lowered():
    f = jax.jit(functools.partial(double, implementation="kernel"))
    with pytest.raises(NotImplementedError, match="'kernel' does not run on cuda"):
        jax.export.export(f, platforms=("cuda",))(jnp.ones(4))


@pytest.mark.parametrize("implementation", [None, "kernel"])
def test_vmap_over_any_axis(implementation):
    x = jnp.arange(24.0).reshape(2, 4, 3)
    f = functools.partial(double, implementation=implementation)
    chex.assert_trees_all_equal(jax.vmap(f, in_axes=2, out_axes=2)(x), 2 * x)
    chex.assert_trees_all_equal(jax.vmap(jax.vmap(f), in_axes=2)(x).shape, (3, 2, 4))


def test_derivatives_of_a_pass_are_those_of_the_plain_formula():
    y, dy = jax.jvp(functools.partial(double, implementation="kernel"),
                    (jnp.ones(4),), (jnp.arange(4.0),))  # fmt: skip
    chex.assert_trees_all_equal(dy, 2 * jnp.arange(4.0))
    gradient = jax.grad(lambda x: double(x, "kernel").sum())(jnp.ones(4))
    chex.assert_trees_all_equal(gradient, jnp.full(4, 2.0))


def test_equal_calls_are_compiled_once():
    count = []
    plain = Implementation("plain", {"fwd": lambda spec, x: count.append(1) or x})
    table = Table("counted", (plain,), lambda *_: ("plain",), plain=plain)
    for _ in range(3):
        table.choose(None, (4,))["fwd"](jnp.ones(4))
    assert len(count) == 2  # once for its shape, once to compile it


def test_arrays_are_made_to_vary_alike():
    def varying(array):
        return jax.typeof(array).manual_axis_type.varying

    def f(x, w):
        assert (varying(x), varying(w)) == ({"d"}, set())
        x, w, absent = align_varying(x, w, None)
        assert varying(x) == varying(w) == {"d"}
        assert absent is None
        return x * w

    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    jax.shard_map(f, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))(
        jnp.arange(2.0), jnp.ones(2)
    )


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("implementation", ["plain", "kernel"])
def test_shard_map_sums_the_gradient_of_a_replicated_argument(
    implementation, check_vma
):
    def product(x, w):
        x, w = align_varying(x, w)
        return double(x * w, implementation)

    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    f = jax.shard_map(
        product,
        mesh=mesh,
        in_specs=(P("d"), P()),
        out_specs=P("d"),
        check_vma=check_vma,
    )
    x, w = jnp.arange(8.0), jnp.ones(2)
    dx, dw = jax.jit(jax.grad(lambda x, w: f(x, w).sum(), (0, 1)))(x, w)
    np.testing.assert_array_equal(dx, np.full(8, 2.0))
    np.testing.assert_array_equal(dw, 2 * np.arange(8.0).reshape(4, 2).sum(0))
