"""What layerwise sets and records: misspelt ways, integers, hidden layers."""

import sys

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

from opsnn_jax.check import layerwise


@pytest.fixture(autouse=True)
def promotion_as_flax_does():
    """Flax's own layers promote, which the strict setting of these tests forbids."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def x(key):
    return jax.random.normal(key, (5, 4))


@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize(
    ("way", "field"),
    [
        ("bflaot16", "implementation"),
        ("winograd", "implementation"),
        ({"dtpye": jnp.bfloat16}, "dtpye"),
        ({"dtype": jnp.bfloat16, "strides": 2}, "strides"),
    ],
)
def test_way_that_sets_nothing_is_refused(key, x, side, way, field):
    model = nn.Sequential([nn.Dense(4)])
    text = f"layerwise: {side}=.* sets '{field}', but no module"
    with pytest.raises(ValueError, match=text):
        layerwise(model, model.init(key, x), x, **{side: way})
    with pytest.raises(ValueError, match=text):
        layerwise(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), None, x, **{side: way})


def test_dtype_needs_no_field_where_the_input_carries_it(key, x):
    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.ones, (1, 4))
            return x * w.astype(x.dtype)

    model = Plain()
    report = layerwise(model, model.init(key, x), x, a="bfloat16")
    assert report.ok and report.rows[0].dtypes == ("bfloat16", "float32")
    with pytest.raises(ValueError, match="sets 'dtype'"):
        layerwise(Plain(), model.init(key, x), jnp.ones((5, 4), int), a="bfloat16")


def test_integers_beside_the_output_are_left_out(key, x):
    class Top(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.Dense(3)(x)
            return {"y": y, "at": jnp.argmax(y, axis=-1)}

    class Index(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.argmax(x, axis=-1)

    class Both(nn.Module):
        @nn.compact
        def __call__(self, x):
            top = Top()(x)
            return top["y"], Index()(top["y"])

    report = layerwise(Both(), Both().init(key, x), x, a="bfloat16")
    assert [row.layer for row in report.rows] == ["Top_0/Dense_0", "Top_0", "(model)"]
    assert report.ok


@pytest.mark.parametrize("kind", ["remat", "scan", "rnn"])
def test_layers_inside_a_transform_are_named_not_recorded(key, x, kind):
    class Cell(nn.Module):
        @nn.compact
        def __call__(self, carry, _):
            return nn.Dense(4)(carry), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(4, name="before")(x)
            if kind == "remat":
                return nn.remat(nn.Dense)(4, name="inside")(x)
            if kind == "rnn":
                return nn.RNN(nn.SimpleCell(4), name="inside")(x[None])[0]
            split = {"params": True}
            loop = nn.scan(Cell, {"params": 0}, split_rngs=split, length=2)
            return loop(name="inside")(x, None)[0]

    report = layerwise(Net(), Net().init(key, x), x)
    layers = [row.layer for row in report.rows]
    assert layers[0] == "before" and layers[-1] == "(model)"
    assert report.hidden
    assert f"Not recorded, inside a transform: {report.hidden[0]}" in str(report)
    assert report.ok


def test_layer_inside_a_transform_of_nnx_is_named(x):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.inside = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            return nnx.remat(lambda m, x: m(x))(self.inside, x)

    report = layerwise(Net(nnx.Rngs(0)), None, x)
    assert report.hidden == ("inside",)
    assert [row.layer for row in report.rows] == ["(model)"]


def test_without_flax_it_says_what_to_install(monkeypatch, x):
    monkeypatch.setitem(sys.modules, "flax.linen", None)
    with pytest.raises(ImportError, match="layerwise needs flax: pip install flax"):
        layerwise(object(), None, x)


def test_complex_output_is_refused(key, x):
    class Spectrum(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.fft.fft(nn.Dense(3)(x))

    with pytest.raises(ValueError, match="layerwise: .* got complex64"):
        layerwise(Spectrum(), Spectrum().init(key, x), x)
