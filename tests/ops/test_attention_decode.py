"""attention_decode, fused_qkv, rotary_embedding: each is what it stands for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opsnn_jax import (
    attention_decode,
    flash_attention,
    flash_attention_packed,
    fused_qkv,
    rotary_embedding,
)
from tests import draws


def close(got, want, tolerance=2e-6):
    def check(a, b):
        scale = max(1, float(np.abs(np.asarray(b, np.float32)).max()))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)

    jax.tree.map(check, got, want)


def cache(key, batch=3, size=12, kv_heads=2, features=4):
    keys = jax.random.split(key, 2)
    shape = (batch, size, kv_heads, features)
    return [draws.normal(k, shape) for k in keys]


@pytest.mark.parametrize(
    "implementation",
    [None, "reference", pytest.param("pallas_tpu", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("splits", [1, 5])
def test_decode_is_the_end_of_a_causal_call(key, implementation, splits):
    k, v = cache(key)
    q = draws.normal(key, (3, 2, 6, 4))
    lengths = jnp.array([5, 12, 1])  # the last example has room for one query only
    sinks = jnp.arange(6.0) / 3
    options = dict(softcap=3.0, scale=0.4, return_lse=True)

    @jax.jit
    def decode(q, k, v, lengths):
        more = dict(splits=splits, window=6, implementation=implementation)
        return attention_decode(q, k, v, lengths, sinks=sinks, **more, **options)

    @jax.jit
    def causal(q, k, v):
        more = dict(is_causal=True, causal_align="bottom_right", window=(6, 0))
        more["implementation"] = "reference"
        return flash_attention(q, k, v, sinks=sinks, **more, **options)

    behind = (jnp.arange(12)[None] >= lengths[:, None])[..., None, None]
    got = decode(q, *(jnp.where(behind, jnp.nan, x) for x in (k, v)), lengths)
    for b, length in enumerate(np.asarray(lengths)):
        # Sliced by numpy: JAX would compile each slice.
        out, lse = causal(
            *(np.asarray(x)[b : b + 1] for x in (q, k[:, :length], v[:, :length]))
        )
        close((got[0][b], got[1][b]), (out[0], lse[0]))


def test_decode_of_one_token_and_its_gradient(key):
    k, v = cache(key)
    q = draws.normal(key, (3, 4, 4))
    lengths = jnp.array([0, 7, 12])
    decode = jax.jit(attention_decode, static_argnames="splits")
    out = decode(q, k, v, lengths, splits=3)
    assert out.shape == q.shape
    assert not out[0].any()

    @functools.partial(jax.jit, static_argnames="splits")
    @functools.partial(jax.grad, argnums=(0, 1, 2))
    def gradients(q, k, v, splits):
        return jnp.sum(jnp.sin(attention_decode(q, k, v, lengths, splits=splits)))

    grads = [gradients(q, k, v, splits=splits) for splits in (1, 4)]
    close(*grads)
    assert not grads[1][0][0].any()
    assert not grads[1][1][1, 7:].any()


def test_decode_with_a_length_for_all(key):
    k, v = cache(key)
    q = draws.normal(key, (3, 4, 4))
    each = attention_decode(q, k, v, jnp.full(3, 5))
    np.testing.assert_array_equal(attention_decode(q, k, v, np.int32(5)), each)


@pytest.mark.parametrize("batch, tokens, size", [(0, 1, 6), (2, 0, 6), (2, 1, 0)])
def test_decode_of_nothing(batch, tokens, size):
    cache = jnp.ones((batch, size, 2, 8))
    out, lse = attention_decode(
        jnp.ones((batch, tokens, 4, 8)), cache, cache, jnp.ones(batch, int),
        splits=3, return_lse=True,
    )  # fmt: skip
    assert out.shape == (batch, tokens, 4, 8)
    np.testing.assert_array_equal(lse, np.full((batch, tokens, 4), -np.inf))


def test_decode_takes_integers_of_numpy(key):
    k, v = cache(key)
    call = functools.partial(attention_decode, jnp.ones((3, 4, 4)), k, v, np.int32(5))
    np.testing.assert_array_equal(call(splits=np.int64(3)), call(splits=3))
    np.testing.assert_array_equal(call(window=2**40), call())


@pytest.mark.parametrize(
    "change, error, match",
    [
        (dict(q=jnp.ones((2, 4, 4))), ValueError, r"q must be \(B, T, N, H\)"),
        (dict(q=jnp.ones((3, 1, 3, 4))), ValueError, r"a multiple .* got 3 and 2"),
        (dict(lengths=jnp.ones(3)), TypeError, r"lengths must be integers"),
        (dict(lengths=jnp.ones(2, int)), ValueError, r"lengths must have shape"),
        (dict(splits=0), ValueError, r"splits must be"),
        (dict(splits=True), TypeError, r"splits must be an int"),
        (
            dict(q=jnp.ones((3, 4, 5))),
            ValueError,
            r"caches must have shapes .* q \(3, 1",
        ),
        (dict(v_cache=jnp.ones((3, 8, 2, 4))), ValueError, r"caches must .* \(3, 8, 2"),
        (dict(v_cache=jnp.ones((2, 12, 2, 4))), ValueError, r"caches must have shapes"),
        (dict(v_cache=jnp.ones((3, 12, 1, 4))), ValueError, r"caches must have shapes"),
        (dict(sinks=jnp.ones(1)), ValueError, r"sinks must have shape .* \(4,\)"),
        (dict(sinks=jnp.ones(())), ValueError, r"sinks must have shape .* got \(\)"),
        (dict(sinks=jnp.ones(4, int)), TypeError, r"sinks must have dtype"),
        (dict(sinks=[1.0] * 4), TypeError, r"sinks must be an array; got list"),
    ],
)
def test_decode_errors(change, error, match):
    x = jnp.ones((3, 12, 2, 4))
    call = dict(q=jnp.ones((3, 4, 4)), k_cache=x, v_cache=x, lengths=jnp.ones(3, int))
    with pytest.raises(error, match=r"^attention_decode: .*" + match):
        attention_decode(**call | change)


# Rotary embedding.


def test_rotary_scores_depend_on_the_distance_alone(key):
    q, k = draws.normal(key, (2, 1, 1, 1, 8))
    turn = functools.partial(rotary_embedding, base=100.0)

    def score(i, j):
        a, b = turn(q, jnp.array([[i]])), turn(k, jnp.array([[j]]))
        return jnp.vdot(a, b)

    np.testing.assert_allclose(score(7, 3), score(104, 100), rtol=1e-4)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3
    np.testing.assert_array_equal(turn(q, jnp.array([0])), q)


def test_rotary_is_its_formula_and_keeps_norms(key):
    x = draws.normal(key, (2, 5, 3, 6), jnp.bfloat16)
    y = rotary_embedding(x, rotary_dim=4)
    wide = np.asarray(x, np.float64)
    pairs = wide[..., :2] + 1j * wide[..., 2:4]
    angles = np.arange(5)[:, None] * 10000.0 ** (-np.arange(2) / 2)
    turned = pairs * np.exp(1j * angles)[:, None]
    want = np.concatenate([turned.real, turned.imag, wide[..., 4:]], -1)
    np.testing.assert_allclose(np.asarray(y, np.float64), want, rtol=2**-8, atol=1e-6)
    assert y.dtype == x.dtype


@pytest.mark.parametrize(
    "x, options, error, match",
    [
        (jnp.ones((2, 3)), {}, ValueError, "x must have axes"),
        (jnp.ones((2, 3, 5)), {}, ValueError, "rotary_dim must be an even"),
        (jnp.ones((2, 3, 4)), dict(rotary_dim=6), ValueError, "rotary_dim must be"),
        (jnp.ones((2, 3, 4)), dict(rotary_dim=True), TypeError, "rotary_dim must be"),
        (jnp.ones((2, 3, 4)), dict(base=0), ValueError, "base must be a positive"),
        (
            jnp.ones((2, 3, 4)),
            dict(positions=jnp.ones(2)),
            TypeError,
            "positions must be integers",
        ),
        (
            jnp.ones((2, 3, 4)),
            dict(positions=jnp.ones(3, int)),
            ValueError,
            "positions must broadcast",
        ),
    ],
)
def test_rotary_errors(x, options, error, match):
    with pytest.raises(error, match=match):
        rotary_embedding(x, **options)


# Packed projections.


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_fused_qkv_is_three_projections(key, kv_heads):
    keys = jax.random.split(key, 3)
    x = draws.normal(keys[0], (2, 5, 12))
    w = draws.normal(keys[1], (12, 4 + 2 * kv_heads, 6))
    b = draws.normal(keys[2], w.shape[1:])
    parts = (4, 4 + kv_heads)
    got = list(fused_qkv(x, w, b, kv_heads=kv_heads, rotary=True))
    ws, bs = (jnp.split(a, parts, axis=-2) for a in (w, b))
    want = [
        jnp.einsum("btd,dnh->btnh", x, w) + b[None, None]
        for w, b in zip(ws, bs, strict=True)
    ]
    close(got, [rotary_embedding(want[0]), rotary_embedding(want[1]), want[2]], 1e-5)


def test_packed_attention(key):
    qkv = draws.normal(key, (2, 5, 3, 4, 6))
    want = flash_attention(*(qkv[:, :, i] for i in range(3)), is_causal=True)
    np.testing.assert_array_equal(flash_attention_packed(qkv, is_causal=True), want)
    flat = qkv[:, :, :2].reshape(2, 5, 8, 6)
    got = flash_attention_packed(flat, kv_heads=2, window=(1, 0), return_lse=True)
    want = flash_attention(
        flat[:, :, :4], flat[:, :, 4:6], flat[:, :, 6:], window=(1, 0), return_lse=True
    )
    jax.tree.map(np.testing.assert_array_equal, got, want)
    w = draws.normal(key, (6, 3, 4, 8))
    parts = fused_qkv(qkv[:, :, 0, 0], w)
    assert [x.shape for x in parts] == [(2, 5, 4, 8)] * 3


def test_the_packed_take_integers_of_numpy():
    x, w = jnp.ones((2, 5, 8)), jnp.ones((8, 8, 4))
    one, other = (fused_qkv(x, w, kv_heads=k) for k in (np.int64(2), 2))
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert fused_qkv(x, jnp.ones((8, 3, 4, 2)), kv_heads=4)[1].shape == (2, 5, 4, 2)


@pytest.mark.parametrize("batch, length, heads", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
@pytest.mark.parametrize("features", [0, 8])
def test_packed_sizes_of_0(batch, length, heads, features):
    packed = jnp.ones((batch, length, 3, heads, features))
    assert flash_attention_packed(packed).shape == (batch, length, heads, features)
    x, w = jnp.ones((batch, length, features)), jnp.ones((features, 3, heads, 6))
    for part in fused_qkv(x, w):
        np.testing.assert_array_equal(
            part, np.full((batch, length, heads, 6), features)
        )
    assert fused_qkv(x, w[..., :0])[0].shape == (batch, length, heads, 0)


@pytest.mark.parametrize(
    "call, error, match",
    [
        (
            lambda: fused_qkv(jnp.ones((2, 3)), jnp.ones((4, 6, 2))),
            ValueError,
            r"w_qkv must have shape .*\(4, 6, 2\)",
        ),
        (
            lambda: fused_qkv(jnp.ones((2, 3)), jnp.ones((3, 6, 2), jnp.bfloat16)),
            TypeError,
            "w_qkv must have x's dtype",
        ),
        (
            lambda: fused_qkv(jnp.ones((2, 3)), jnp.ones((3, 6, 2)), jnp.ones(2)),
            ValueError,
            "b_qkv must have shape",
        ),
        (
            lambda: fused_qkv(jnp.ones((2, 3)), jnp.ones((3, 6, 2)), kv_heads=3),
            ValueError,
            "kv_heads must leave heads",
        ),
        (
            lambda: fused_qkv(
                jnp.ones((2, 3)), jnp.ones((3, 6, 2)), positions=jnp.arange(2)
            ),
            ValueError,
            "positions is of the rotary",
        ),
        (
            lambda: fused_qkv(jnp.ones((2, 3)), jnp.ones((3, 6, 2)), rotary_dim=2),
            ValueError,
            "rotary_dim is of the rotary",
        ),
        (
            lambda: fused_qkv(jnp.ones((2, 3)), jnp.ones((3, 6, 2)), rotary_base=1.0),
            ValueError,
            "rotary_base is of the rotary",
        ),
        (
            lambda: fused_qkv(jnp.ones((2, 3)), jnp.ones((3, 3, 4, 2)), kv_heads=2),
            ValueError,
            "has K = N = 4 heads of keys; got kv_heads=2",
        ),
        (
            lambda: fused_qkv(jnp.ones((2, 3)), jnp.ones((3, 10, 2)), kv_heads=3),
            ValueError,
            "must be a multiple .* got 4 and 3",
        ),
        (
            lambda: fused_qkv(jnp.ones((2, 3)), jnp.ones((3, 3, 2)), kv_heads=True),
            TypeError,
            "kv_heads must be an int",
        ),
        (
            lambda: flash_attention_packed(jnp.ones(8), kv_heads=1),
            ValueError,
            r"qkv must have shape \(\*B, T, N \+ 2K, H\) .* got \(8,\)",
        ),
        (
            lambda: flash_attention_packed(jnp.ones((2, 3, 5, 4, 2))),
            ValueError,
            r"qkv must have shape .*\(2, 3, 5, 4, 2\)",
        ),
    ],
)
def test_packed_errors(call, error, match):
    with pytest.raises(error, match=match):
        call()
