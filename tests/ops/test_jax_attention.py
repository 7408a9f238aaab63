"""dot_product_attention gives what JAX's own gives, and what flax's modules want."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from opsnn_jax import dot_product_attention
from tests import draws

B, T, S, N, K, H = 2, 5, 7, 4, 2, 8


def arrays(key, t=T, s=S, dtype=jnp.float32):
    keys = jax.random.split(key, 3)
    shapes = (B, t, N, H), (B, s, K, H), (B, s, K, H)
    return [draws.normal(k, x, dtype) for k, x in zip(keys, shapes, strict=True)]


def check_same(got, want, dtype=jnp.float32):
    tolerance = 2e-5 if dtype == jnp.float32 else 4 * float(jnp.finfo(dtype).eps)

    def check(a, b):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        atol = tolerance * max(1, np.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)

    jax.tree.map(check, got, want)


def both(f, *args):
    """f(attention, *args) for ours and for JAX's."""
    with jax.numpy_dtype_promotion("standard"):  # JAX's own mixes bfloat16 with float32
        return [
            jax.jit(functools.partial(f, attention))(*args)
            for attention in (dot_product_attention, jax.nn.dot_product_attention)
        ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(is_causal=True, scale=0.3),
        dict(local_window_size=(2, 0)),
        dict(local_window_size=(0, 2)),
        dict(local_window_size=(0, 0)),
        dict(local_window_size=1),
        dict(local_window_size=(3, 1), is_causal=True),
        dict(key_value_seq_lengths=np.array([3, 7], np.int32)),
        dict(query_seq_lengths=np.array([3, 5], np.int32)),
        dict(
            query_seq_lengths=np.array([4, 2], np.int32),
            key_value_seq_lengths=np.array([7, 1], np.int32),
            is_causal=True,
        ),
        dict(bias=True, mask=True),
    ],
    ids=str,
)
def test_values_and_gradients_are_those_of_jax(key, options):
    options, dtype = dict(options), jnp.float32
    if "scale" in options or "bias" in options:
        dtype = jnp.bfloat16
    bias = mask = None
    if options.pop("bias", False):
        bias = draws.normal(key, (1, N, T, S))
    if options.pop("mask", False):
        mask = draws.bernoulli(key, 0.7, (B, 1, T, S)).at[..., 0].set(True)

    def f(attention, q, k, v):
        # JAX's rows behind a query's length are 0 in the output only.
        out, vjp = jax.vjp(lambda *x: attention(*x, bias, mask, **options), q, k, v)
        lengths = options.get("query_seq_lengths", np.full(B, T))
        valid = np.arange(T) < np.asarray(lengths)[:, None]
        dout = jnp.where(valid[..., None, None], jnp.cos(out.astype(jnp.float32)), 0)
        return out, vjp(dout.astype(dtype))

    check_same(*both(f, *arrays(key, dtype=dtype)), dtype)


def test_without_a_batch_axis_and_with_a_residual(key):
    q, k, v = (x[0] for x in arrays(key))

    def f(attention, q, k, v):
        bias = jnp.ones((1, 1, 1, S)) * 0.5
        call = dict(bias=bias, is_causal=True, return_residual=True)
        return attention(q, k, v, **call)

    got, want = both(f, q, k, v)
    check_same(got, want)
    assert got[1].shape == (T, N)


def test_a_scale_that_is_an_array(key):
    q, k, v = arrays(key)

    def f(attention, q, k, v, scale):
        return jax.grad(lambda s: attention(q, k, v, scale=s).sum())(scale)

    check_same(*both(f, q, k, v, jnp.float32(0.7)))


def test_a_query_that_sees_nothing_is_zero(key):
    q, k, v = arrays(key)
    mask = jnp.ones((1, 1, T, S), bool).at[..., 2, :].set(False)
    for options in (dict(mask=mask), dict(bias=jnp.where(mask, 0.0, -jnp.inf))):
        out = dot_product_attention(q, k, v, **options)
        assert not out[:, 2].any()
        assert np.isfinite(out).all()


def test_cudnn_is_no_reason_to_fail_where_there_is_none(key):
    q, k, v = arrays(key)
    out = dot_product_attention(q, k, v, implementation="cudnn")
    np.testing.assert_array_equal(out, dot_product_attention(q, k, v))


def test_the_mask_is_boolean(key):
    q, k, v = arrays(key)
    with pytest.raises(TypeError, match="mask must be boolean"):
        dot_product_attention(q, k, v, mask=jnp.ones((1, 1, T, S)))


def test_linen_module_takes_it(key):
    x = draws.normal(key, (2, 5, 8))
    mask = nn.make_causal_mask(x[..., 0])  # of float32
    ours, theirs = (
        nn.MultiHeadDotProductAttention(num_heads=2, **chosen)
        for chosen in (dict(attention_fn=dot_product_attention), {})
    )
    params = theirs.init(key, x)
    check_same(*(m.apply(params, x, mask=mask) for m in (ours, theirs)))
    dropout = nn.MultiHeadDotProductAttention(
        num_heads=2, dropout_rate=0.5, attention_fn=dot_product_attention
    )
    call = functools.partial(dropout.apply, params, x, rngs={"dropout": key})
    check_same(call(deterministic=True), theirs.apply(params, x))
    assert np.abs(call(deterministic=False) - call(deterministic=True)).max() > 1e-3


def test_nnx_module_takes_it(key):
    x = draws.normal(key, (2, 5, 8))
    ours, theirs = (
        nnx.MultiHeadAttention(
            4, 8, num_kv_heads=2, decode=False, rngs=nnx.Rngs(0), **chosen
        )
        for chosen in (dict(attention_fn=dot_product_attention), {})
    )
    mask = jnp.ones((2, 1, 5, 5), bool).at[..., 4].set(False)
    check_same(*(m(x, mask=mask, is_causal=False) for m in (ours, theirs)))
    with pytest.raises(ValueError, match="module must be None"):
        ours(x, sow_weights=True)
