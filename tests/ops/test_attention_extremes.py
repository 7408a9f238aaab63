"""flash_attention of what is not finite, or nearly so: it reaches what sees it only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_truth import each, make, run


@each
@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_garbage_behind_a_cap_reaches_nothing_that_hides_it(
    key, implementation, garbage
):
    q, k, v, dout = make(key, 1, 5, 5, 1, 1, 4)
    operands = dict(q_lengths=jnp.array([4]), kv_lengths=jnp.array([4]))
    operands["bias"] = jnp.zeros((1, 1, 5, 5))

    def filled(x):
        q_, k_ = q.at[:, 4].set(x), k.at[:, 4].set(x)
        args = q_, k_, v, dout, jnp.zeros((1, 5, 1)), operands
        return run(*args, implementation, (("softcap", 0.7),))

    jax.tree.map(np.testing.assert_array_equal, filled(garbage), filled(0.0))


@each
def test_a_cap_does_not_hide_an_infinite_key(key, implementation):
    q, k, v, dout = make(key, 1, 5, 5, 1, 1, 4)
    # Of one sign, so that its product with each query is infinite, and no NaN.
    args = jnp.abs(q), k.at[:, 3].set(np.inf), v, dout, jnp.zeros((1, 5, 1)), {}
    got = run(*args, implementation, (("softcap", 0.7), ("is_causal", True)))
    for name in ("out", "dq"):
        assert np.isfinite(got[name][:, :3]).all(), name
        assert np.isnan(got[name][:, 3:]).all(), name


@each
def test_the_cotangent_of_a_row_that_sees_its_sink_alone_may_be_anything(
    key, implementation
):
    q, k, v, dout = make(key, 1, 4, 5, 1, 1, 4)
    mask = jnp.ones((1, 1, 4, 1), bool).at[:, :, 1].set(False)
    operands = dict(sinks=jnp.array([0.3]), mask=mask)

    def filled(x):
        args = dout.at[:, 1].set(x), jnp.ones((1, 4, 1)), operands
        return run(q, k, v, *args, implementation)

    jax.tree.map(np.testing.assert_array_equal, filled(np.nan), filled(0.0))


# Biases that are as large as a float32 can be.

LEAST = float(np.finfo(np.float32).min)


@each
def test_the_least_bias_hides_a_key_as_minus_infinity_does(key, implementation):
    q, k, v, dout = make(key, 1, 4, 5, 2, 1, 4)
    hidden = jnp.zeros((1, 1, 1, 5), bool).at[..., 3].set(True)

    def filled(x):
        operands = {"bias": jnp.where(hidden, x, 0.5)}
        return run(q, k, v, dout, jnp.ones((1, 4, 2)), operands, implementation)

    got, want = filled(LEAST), filled(-jnp.inf)
    for name, x in want.items():
        np.testing.assert_allclose(got[name], x, 1e-6, 1e-6, err_msg=name)


@each
def test_the_least_bias_of_all_keys_hides_none(key, implementation):
    q, k, v, dout = make(key, 1, 4, 5, 1, 1, 4)
    operands = {"bias": jnp.zeros((1, 1, 4, 5)).at[:, :, 2].set(LEAST)}
    got = run(q, k, v, dout, jnp.zeros((1, 4, 1)), operands, implementation)
    np.testing.assert_allclose(got["out"][:, 2], v.mean(1), rtol=1e-5)
    assert got["lse"].min() < -2e38
    assert all(np.isfinite(x).all() for x in got.values())


@each
@pytest.mark.parametrize("bias", [3e38, np.inf, np.nan])
def test_the_greatest_bias_and_what_is_greater(key, implementation, bias):
    q, k, v, dout = make(key, 1, 4, 5, 1, 1, 4)
    operands = {"bias": jnp.zeros((1, 1, 4, 5)).at[:, :, 2, 3].set(bias)}
    got = run(q, k, v, dout, jnp.zeros((1, 4, 1)), operands, implementation)
    others = [0, 1, 3]
    assert np.isfinite(got["out"][:, others]).all()
    if np.isfinite(bias) and implementation != "pallas_tpu":
        np.testing.assert_allclose(got["out"][:, 2], v[:, 3], rtol=1e-6)
        assert all(np.isfinite(x).all() for x in got.values())
    else:
        assert np.isnan(got["out"][:, 2]).all()
