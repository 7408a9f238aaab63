"""The grouped-query layers: what they compute, and token by token with a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from opsnn_jax import flash_attention_packed, fused_qkv
from opsnn_jax.nn.linen_grouped import GroupedQueryAttention as Linen
from opsnn_jax.nn.nnx_grouped import GroupedQueryAttention as Nnx
from tests import draws

SETTINGS = dict(num_heads=4, num_kv_heads=2, window=3, softcap=5.0)


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)


def test_linen_is_its_parts(key):
    x = draws.normal(key, (2, 6, 8))
    layer = Linen(**SETTINGS, rotary_base=None)
    params = layer.init(key, x)
    w = params["params"]["qkv"]["kernel"]
    assert w.shape == (8, 4 + 2 * 2, 2)
    heads = jnp.concatenate(fused_qkv(x, w, kv_heads=2), axis=-2)
    out = flash_attention_packed(
        heads, kv_heads=2, is_causal=True, window=(3, 0), softcap=5.0
    )
    want = jnp.einsum("btnh,nhd->btd", out, params["params"]["out"]["kernel"])
    close(layer.apply(params, x), want)


def test_linen_with_a_cache_gives_the_same(key):
    x = draws.normal(key, (2, 6, 8))
    layer = Linen(**SETTINGS, decode=True)
    variables = jax.jit(layer.init)(key, x)
    want = jax.jit(Linen(**SETTINGS).apply)({"params": variables["params"]}, x)
    decode = jax.jit(functools.partial(layer.apply, mutable="cache"))
    outs, start = [], 0
    for count in (1, 3, 2):  # several tokens at once too
        part = x[:, start : start + count]
        out, cache = decode(variables, part)
        variables = variables | cache
        outs.append(out)
        start += count
    close(jnp.concatenate(outs, axis=1), want)
    out, _ = decode(variables, x[:, :1])
    assert np.isnan(out).all()  # there is no room


def test_nnx_with_a_cache_gives_the_same(key):
    x = draws.normal(key, (2, 5, 8))
    layer = Nnx(features=8, **SETTINGS, use_bias=True, rngs=nnx.Rngs(0))
    want = layer(x)
    with pytest.raises(ValueError, match="Call init_cache first"):
        layer(x, decode=True)
    layer.init_cache(2, 5)
    close(
        jnp.concatenate([layer(x[:, t : t + 1], decode=True) for t in range(5)], 1),
        want,
    )


def test_what_a_cache_has_no_room_for_spoils_nothing(key):
    x = draws.normal(key, (2, 7, 8))
    layer = Nnx(features=8, **SETTINGS, rngs=nnx.Rngs(0))
    want = layer(x)
    layer.init_cache(2, 6)

    @nnx.jit
    def decode(layer, x):
        return layer(x, decode=True)

    decode(layer, x[:, :4])
    before = np.asarray(layer.cached_key[...])
    got = decode(layer, x[:, 4:])  # three, with room for two
    close(got[:, :2], want[:, 4:6])
    assert np.isnan(got[:, 2]).all()
    np.testing.assert_array_equal(layer.cached_key[...][:, :4], before[:, :4])
    after = np.asarray(layer.cached_key[...])
    assert np.isnan(decode(layer, x)).all()  # more than the cache is long
    np.testing.assert_array_equal(layer.cached_key[...], after)
    assert decode(layer, x[:, :0]).shape == (2, 0, 8)


def test_a_cache_counts_by_itself(key):
    x, ids = jnp.ones((1, 2, 8)), jnp.zeros((1, 2), int)
    layer = Nnx(features=8, **SETTINGS, rngs=nnx.Rngs(0))
    layer.init_cache(1, 4)
    linen = Linen(**SETTINGS, decode=True)
    variables = linen.init(key, x)
    for name in ("positions", "segment_ids"):
        with pytest.raises(ValueError, match=f"{name} cannot be combined with a cache"):
            layer(x, decode=True, **{name: ids})
        with pytest.raises(ValueError, match=f"{name} cannot be combined with a cache"):
            linen.apply(variables, x, mutable="cache", **{name: ids})


def test_the_input_has_three_axes(key):
    for call in (
        lambda x: Nnx(features=8, **SETTINGS, rngs=nnx.Rngs(0))(x),
        lambda x: Linen(**SETTINGS).init(key, x),
    ):
        with pytest.raises(ValueError, match=r"x must have shape .* got \(2, 8\)"):
            call(jnp.ones((2, 8)))


def test_segments_and_dropout(key):
    x = draws.normal(key, (1, 6, 8))
    ids = jnp.array([[0, 0, 1, 1, 1, 1]])
    layer = Nnx(4, 2, 8, dropout_rate=0.5, rotary_base=None, rngs=nnx.Rngs(0))
    close(layer(x, segment_ids=ids)[:, 2:], layer(x[:, 2:]))
    quiet, loud, again = layer(x), *(layer(x, deterministic=False) for _ in range(2))
    assert np.abs(quiet - loud).max() > 1e-3
    assert np.abs(again - loud).max() > 1e-3
    linen = Linen(4, 2, dropout_rate=0.5)
    params = linen.init(key, x, deterministic=True)
    call = dict(rngs={"dropout": key}, deterministic=False)
    outs = [linen.apply(params, x, **call) for _ in range(2)]
    np.testing.assert_array_equal(*outs)
    assert np.abs(outs[0] - linen.apply(params, x, deterministic=True)).max() > 1e-3


@pytest.mark.parametrize(
    "heads, width, match",
    [
        ((3, 2), 6, "a multiple"),
        ((4, 2), 6, "must divide"),
        ((4, 0), 8, "must be positive; got 4 and 0"),
    ],
)
def test_errors(heads, width, match):
    with pytest.raises(ValueError, match=match):
        Nnx(*heads, width, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=match):
        Linen(*heads).init(jax.random.key(0), jnp.ones((1, 2, width)))
