"""The attention modules give what flax's own give, from flax's own parameters."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from opsnn_jax.nn import linen_attention, nnx_attention
from tests import draws

LINEN = [
    (linen_attention.MultiHeadDotProductAttention, nn.MultiHeadDotProductAttention),
    (linen_attention.MultiHeadAttention, nn.MultiHeadAttention),
]


def check_close(got, want):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6), got, want
    )


@pytest.mark.parametrize("ours, theirs", LINEN)
def test_linen_parameters_outputs_and_gradients_are_those_of_flax(key, ours, theirs):
    settings = dict(num_heads=2, qkv_features=8, out_features=3, normalize_qk=True)
    x = draws.normal(key, (2, 5, 6))
    mask = nn.make_causal_mask(x[..., 0])
    ours, theirs = ours(**settings), theirs(**settings)
    params = theirs.init(key, x)
    jax.tree.map(np.testing.assert_array_equal, ours.init(key, x), params)

    @jax.jit
    def both(params, x):
        def loss(params, x, module):
            out = module.apply(params, x, mask=mask)
            return jnp.sum(jnp.square(out)), out

        run = jax.value_and_grad(loss, (0, 1), has_aux=True)
        return run(params, x, ours), run(params, x, theirs)

    check_close(*both(params, x))


@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_linen_takes_any_number_of_batch_axes(key, batch):
    x = draws.normal(key, (*batch, 5, 8))
    ours, theirs = (module(num_heads=2) for module in LINEN[0])
    params = jax.jit(theirs.init)(key, x)

    @jax.jit
    def both(mask):
        return [m.apply(params, x, mask=mask) for m in (ours, theirs)]

    for shape in ((5, 5), (*batch, 2, 5, 5), (1,) * len(batch) + (1, 1, 5)):
        mask = draws.bernoulli(key, 0.6, shape).at[..., 0].set(True)
        check_close(*both(mask))


def test_linen_leaves_what_needs_the_weights_to_flax(key):
    x = draws.normal(key, (2, 5, 8))
    settings = dict(num_heads=2, dropout_rate=0.5, deterministic=False)
    ours, theirs = (module(**settings) for module in LINEN[0])
    params = theirs.init({"params": key, "dropout": key}, x)
    got, want = (
        module.apply(
            params, x, sow_weights=True, rngs={"dropout": key}, mutable="intermediates"
        )
        for module in (ours, theirs)
    )
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_linen_decodes_with_a_cache(key):
    x = draws.normal(key, (1, 3, 8))
    results = []
    for module in LINEN[0]:
        module = module(num_heads=2, decode=True)
        variables = module.init(key, x)
        outs = []
        for t in range(3):
            out, cache = module.apply(variables, x[:, t : t + 1], mutable="cache")
            variables = {**variables, **cache}
            outs.append(out)
        results.append((outs, variables))
    check_close(*results)


def test_linen_computes_in_the_dtype_it_is_given(key):
    x = draws.normal(key, (1, 4, 8))
    ours, theirs = (module(num_heads=2, dtype=jnp.bfloat16) for module in LINEN[0])
    params = theirs.init(key, x)
    got, want = ours.apply(params, x), theirs.apply(params, x)
    assert got.dtype == want.dtype == jnp.bfloat16
    eps = float(jnp.finfo(jnp.bfloat16).eps)
    got, want = (np.asarray(y, np.float32) for y in (got, want))
    np.testing.assert_allclose(got, want, rtol=0, atol=4 * eps * np.abs(want).max())


@pytest.mark.parametrize("settings", [{}, dict(num_kv_heads=2, normalize_qk=True)])
def test_nnx_parameters_outputs_and_gradients_are_those_of_flax(key, settings):
    settings = dict(
        num_heads=4, in_features=8, qkv_features=16, decode=False, **settings
    )
    ours, theirs = (
        module(**settings, rngs=nnx.Rngs(0))
        for module in (nnx_attention.MultiHeadAttention, nnx.MultiHeadAttention)
    )
    assert ours.attention_fn is nnx_attention.dot_product_attention
    pure = [nnx.to_pure_dict(nnx.state(m, nnx.Param)) for m in (ours, theirs)]
    jax.tree.map(np.testing.assert_array_equal, *pure)
    x = draws.normal(key, (2, 5, 8))
    mask = jnp.ones((2, 1, 5, 5), bool).at[1, ..., 4].set(False)

    @nnx.jit
    def run(module, x):
        def loss(module, x):
            out = module(x, mask=mask, is_causal=False)
            return jnp.sum(jnp.square(out)), out

        return nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(module, x)

    got, want = run(ours, x), run(theirs, x)
    check_close(jax.tree.leaves(got), jax.tree.leaves(want))


def test_nnx_is_causal_and_dropout(key):
    x = draws.normal(key, (1, 5, 8))
    for deterministic in (True, False):
        ours, theirs = (
            module(
                num_heads=2,
                in_features=8,
                decode=False,
                dropout_rate=0.5,
                deterministic=deterministic,
                rngs=nnx.Rngs(0),
            )
            for module in (nnx_attention.MultiHeadAttention, nnx.MultiHeadAttention)
        )
        mask = jnp.ones((1, 1, 5, 5), bool)
        # With dropout flax joins a boolean mask with a float one.
        with jax.numpy_dtype_promotion("standard"):
            got, want = (m(x, mask=mask, is_causal=True) for m in (ours, theirs))
        check_close(got, want)


@pytest.mark.parametrize("flax, ours", [(nn, linen_attention), (nnx, nnx_attention)])
def test_bias_mask_and_dtype_mean_what_they_do_in_flax(key, flax, ours):
    q, k, v = draws.normal(key, (3, 2, 5, 2, 4))
    bias = draws.normal(key, (1, 2, 1, 5))
    mask = draws.bernoulli(key, 0.6, (2, 1, 5, 5)).at[..., 0].set(True)
    got, want = (
        module.dot_product_attention(q, k, v, bias, mask) for module in (ours, flax)
    )
    check_close(got, want)
    got = ours.dot_product_attention(q, k, v, dtype=jnp.bfloat16)
    assert got.dtype == jnp.bfloat16


@pytest.mark.parametrize("flax, ours", [(nn, linen_attention), (nnx, nnx_attention)])
def test_what_only_flax_takes_is_computed_by_flax(key, flax, ours):
    q, k, v = draws.normal(key, (3, 2, 5, 2, 4))
    ints = jnp.arange(5).reshape(1, 1, 1, 5)
    for bias in (ints, ints > 2, np.ones((1, 1, 5, 5)), 0.5):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            call = [m.dot_product_attention(q, k, v, bias) for m in (ours, flax)]
        check_close(*call)
    call = [
        m.dot_product_attention(q, k, v, precision="BF16_BF16_F32")
        for m in (ours, flax)
    ]
    np.testing.assert_array_equal(*call)


@pytest.mark.parametrize("ours", [linen_attention, nnx_attention])
def test_another_batch_of_keys_is_refused_in_a_sentence(ours):
    q, k = jnp.ones((2, 5, 2, 4)), jnp.ones((3, 5, 2, 4))
    with pytest.raises(ValueError, match=r"k must have shape .* got \(3, 5, 2, 4\)"):
        ours.dot_product_attention(q, k, k)


def test_the_implementation_can_be_chosen(key):
    q = draws.normal(key, (1, 3, 2, 4))
    for module in (linen_attention, nnx_attention):
        with pytest.raises(ValueError, match="'nothing'"):
            module.dot_product_attention(q, q, q, implementation="nothing")
