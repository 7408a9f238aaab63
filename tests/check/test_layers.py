"""layerwise names the first layer that departs, in linen and in nnx."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from opsnn_jax.check import layerwise


class Scale(nn.Module):
    """A layer with implementations, one of them wrong, one with a wrong gradient."""

    implementation: str = "right"

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.ones, x.shape[-1:])
        w = jnp.broadcast_to(w, x.shape)
        if self.implementation == "wrong":
            return x * w * 1.01
        if self.implementation == "wrong gradient":
            return x * w + 0.5 * (x - jax.lax.stop_gradient(x))
        return x * w


class Net(nn.Module):
    """Two branches, a repeated layer, and one that has implementations."""

    @nn.compact
    def __call__(self, x):
        first = nn.Dense(6, name="first")
        h = jnp.tanh(first(first(x)))
        left = nn.Dense(6, name="left")(h)
        return nn.Dense(3, name="last")(left + Scale(name="scale")(h))


class Block(nnx.Module):
    """Without its own activation, and with an implementation."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(6, 6, rngs=rngs)
        self.implementation = "right"

    def __call__(self, x):
        y = self.linear(x)
        return 1.01 * y if self.implementation == "wrong" else jnp.tanh(y)


class NnxNet(nnx.Module):
    """Blocks in a list."""

    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.last = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@pytest.fixture(autouse=True)
def promotion_as_flax_does():
    """Flax's own layers promote, which the strict setting of these tests forbids."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def linen(key):
    x = jax.random.normal(key, (5, 6))
    return Net(), Net().init(key, x), x


def test_same_way_twice_agrees_exactly(linen):
    report = layerwise(*linen)
    assert report.ok
    assert [row.layer for row in report.rows] == [
        "first", "first#2", "left", "scale", "last", "(model)",
    ]  # fmt: skip
    assert all(row.output == row.gradient == 0 for row in report.rows)


@pytest.mark.parametrize("way", ["bfloat16", jnp.float16, {"dtype": jnp.bfloat16}])
def test_half_precision_departs_by_its_rounding_only(linen, way):
    report = layerwise(*linen, a=way)
    assert report.ok
    assert 1e-5 < report.rows[0].output < 1e-2
    assert report.rows[0].dtypes[1] == "float32"


def test_policy_sets_the_compute_dtype(linen):
    class Policy:
        compute_dtype = "bfloat16"

    assert layerwise(*linen, a=Policy()).rows[0].dtypes == ("bfloat16", "float32")


def test_first_layer_that_departs_is_named(linen):
    report = layerwise(*linen, a="wrong", b="right")
    assert report.first == "scale"
    assert "OUTPUT" in str(report)
    assert {row.layer for row in report.rows if row.departs} >= {"scale", "last"}


def test_wrong_gradient_is_named_where_outputs_agree(linen):
    report = layerwise(*linen, a={"implementation": "wrong gradient"}, b=None)
    assert report.first is None
    # Seen from the loss, what lies before the wrong layer is the first to differ.
    assert report.first_gradient == "first#2"
    assert not report.ok


def test_ranges_and_forms(linen):
    report = layerwise(*linen)
    out = np.asarray(linen[0].apply(linen[1], linen[2]))
    low, high = report.rows[-1].range_a
    assert (low, high) == (pytest.approx(out.min()), pytest.approx(out.max()))
    assert report.table().row_count == 6
    assert report.to_dict()["first"] is None
    assert report.rows[-1].parameters is None


def test_nnx_names_the_block(key):
    model, x = NnxNet(nnx.Rngs(0)), jax.random.normal(key, (5, 6))
    assert layerwise(model, None, x).ok
    report = layerwise(model, None, x, a="wrong")
    assert report.first == "blocks/0"
    names = [row.layer for row in report.rows]
    assert names == [
        "blocks/0/linear", "blocks/0", "blocks/1/linear", "blocks/1", "last", "(model)",
    ]  # fmt: skip
    assert type(model.blocks[0]) is Block and model.blocks[0].implementation == "right"
    half = layerwise(model, None, x, a="bfloat16")
    assert half.ok and half.rows[0].dtypes == ("bfloat16", "float32")


def test_batch_statistics_are_left_alone(key):
    class WithStatistics(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            return nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))

    x = jax.random.normal(key, (7, 3))
    model = WithStatistics()
    variables = model.init(key, x)
    report = layerwise(model, variables, x, a="bfloat16", kwargs={"train": True})
    assert report.ok and len(report.rows) == 3


def test_bad_arguments_are_refused(linen):
    with pytest.raises(TypeError, match="flax.linen or flax.nnx module"):
        layerwise(jnp.sin, None, linen[2])
    with pytest.raises(TypeError, match="a and b must be"):
        layerwise(*linen, a=3.5)
    with pytest.raises(ValueError, match="params must be None"):
        layerwise(NnxNet(nnx.Rngs(0)), {}, linen[2])
