"""The contract of flash_attention: values, gradients, masks and what is hidden."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_truth import (
    bf16,
    check_against_exact,
    exact,
    f16,
    f32,
    make,
    out_and_grads,
    plain,
)

from opsnn_jax.ops.attention import flash_attention
from tests import draws
from tests.compilation import AS_USERS_DO

# B, T, S, N, K, H, Hv: sizes 1, 3, primes, one more and one less than a block of
# queries or keys (512), grouped heads, and value features of their own.
CASES = [
    ((1, 1, 1, 1, 1, 1, 1), False, f32),
    ((2, 1, 97, 2, 2, 64, 64), True, f32),
    ((2, 3, 5, 6, 2, 3, 7), False, f16),
    ((1, 7, 127, 8, 1, 40, 16), False, f32),
    ((1, 129, 97, 3, 3, 13, 13), True, f32),
    ((1, 513, 511, 2, 1, 16, 8), False, bf16),
    ((1, 513, 511, 2, 1, 16, 8), True, f32),
    ((1, 511, 513, 1, 1, 8, 8), True, bf16),
    ((1, 511, 513, 1, 1, 8, 8), False, f32),
]


@pytest.mark.optimized
@pytest.mark.parametrize("shape, causal, dtype", CASES, ids=str)
def test_error_is_at_most_twice_that_of_the_plain_formula(key, shape, causal, dtype):
    arrays = (*make(key, *shape, dtype=dtype), None, None)
    ours, theirs = (
        jax.jit(functools.partial(f, causal=causal), compiler_options=AS_USERS_DO)
        for f in (out_and_grads, plain)
    )
    check_against_exact(ours(*arrays), (*arrays, causal), theirs(*arrays))


@pytest.mark.parametrize("dim", [1, 3, 80, 192, 512])
def test_head_sizes(key, dim):
    args = (*make(key, 1, 7, 9, 2, 1, dim), None, None, True)
    check_against_exact(out_and_grads(*args), args, plain(*args))


def test_reference_is_the_formula(key):
    arrays = make(key, 2, 5, 7, 4, 2, 8, 3)
    bias = draws.normal(key, (1, 4, 1, 7))
    mask = draws.bernoulli(key, 0.7, (2, 1, 5, 7)).at[0, 0, 2].set(False)
    args = (*arrays, bias, mask, True)
    check_against_exact(out_and_grads(*args, implementation="reference"), args)


B, N, T, S = 2, 2, 3, 4


BIASES = [
    (1, N, T, S),
    (B, 1, 1, S),
    (1, 1, T, S),
    (1, 1, 1, 1),
    (B, N, T, 1),
    (N, T, S),
    (T, S),
    (S,),
    (),
]


@pytest.mark.parametrize("shape", BIASES, ids=str)
def test_bias_of_every_broadcast_shape_has_its_gradient(key, shape):
    # The dtype of the bias is its own.
    dtypes = {4: (f32, f32), 3: (bf16, f32)}.get(len(shape), (f32, bf16))
    arrays = make(key, B, T, S, N, 1, 5, dtype=dtypes[0])
    bias = draws.normal(key, shape, dtypes[1])
    ours = out_and_grads(*arrays, bias, None, False)
    assert ours["dbias"].shape == shape
    assert ours["dbias"].dtype == dtypes[1]
    bias = bias.reshape((1,) * (4 - bias.ndim) + shape)
    ours["dbias"] = ours["dbias"].reshape(bias.shape)
    check_against_exact(ours, (*arrays, bias, None, False))


def test_gradient_of_a_bias_over_several_tiles(key):
    arrays = make(key, 2, 520, 600, 2, 1, 8)
    for shape in ((1, 2, 520, 600), (2, 1, 1, 600)):
        bias = draws.normal(key, shape)
        args = (*arrays, bias, None, True)
        check_against_exact(out_and_grads(*args), args, plain(*args))


MASKS = [(B, 1, 1, S), (1, 1, T, S), (B, 1, T, S), (B, N, 1, S), (T, S)]


@pytest.mark.parametrize(
    "implementation, shape",
    [
        *((None, shape) for shape in MASKS),
        ("pallas_gpu", (B, N, 1, S)),
        ("pallas_gpu", (B, 1, T, 1)),
        ("pallas_gpu", (1, N, 1, 1)),
    ],
    ids=str,
)
def test_mask_of_every_broadcast_shape(key, implementation, shape):
    arrays = make(key, B, T, S, N, N, 5)
    mask = draws.bernoulli(key, 0.6, shape)
    ours = out_and_grads(*arrays, None, mask, False, implementation)
    mask = mask.reshape((1,) * (4 - mask.ndim) + shape)
    check_against_exact(ours, (*arrays, None, mask, False))


def test_mask_over_several_blocks_of_the_gpu(key):
    arrays = make(key, 2, 140, 150, 2, 1, 8)
    mask = draws.bernoulli(key, 0.6, (2, 1, 140, 150))
    ours = out_and_grads(*arrays, None, mask, True, "pallas_gpu")
    check_against_exact(ours, (*arrays, None, mask, True))


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_gradients_are_the_slope_of_the_function(key, implementation):
    with jax.enable_x64(True):
        arrays = make(key, 1, 4, 6, 4, 2, 3, 5, dtype=jnp.float64)
        *args, dout = arrays
        args.append(draws.normal(key, (1, 4, 1, 6), jnp.float64))

        @jax.jit
        def f(*args):
            out = flash_attention(*args, is_causal=True, implementation=implementation)
            return jnp.vdot(out, dout)

        grads = jax.jit(jax.grad(f, tuple(range(4))))(*args)
        step = 1e-5
        for i, grad in enumerate(grads):
            direction = draws.normal(jax.random.key(i), args[i].shape, args[i].dtype)
            ends = []
            for sign in (step, -step):
                moved = list(args)
                moved[i] = moved[i] + sign * direction
                ends.append(f(*moved))
            slope = (ends[0] - ends[1]) / (2 * step)
            np.testing.assert_allclose(jnp.vdot(grad, direction), slope, rtol=1e-8)


def test_x64_changes_nothing_for_float32(key):
    arrays = make(key, 1, 3, 300, 1, 1, 4)
    want = out_and_grads(*arrays, None, None, True)
    with jax.enable_x64(True):
        got = out_and_grads(*arrays, None, None, True)
        wide = flash_attention(*make(key, 1, 3, 4, 1, 1, 4, dtype=jnp.float64)[:3])
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert got["out"].dtype == f32
    assert wide.dtype == jnp.float64


# The GPU kernel rounds the sum of a score and its bias: there the two differ by a bit.
@pytest.mark.parametrize("implementation", [None, "reference", "pallas_tpu"])
def test_dead_row_is_zero_for_a_mask_and_for_a_bias(key, implementation):
    arrays = make(key, 1, 3, 4, 1, 1, 8)
    arrays[3] = arrays[3].at[:, 1].set(0.0)  # nobody uses row 1
    mask = jnp.ones((1, 1, 3, 4), bool).at[:, :, 1].set(False)
    bias = jnp.where(mask, 0.0, -jnp.inf)
    by_mask = out_and_grads(*arrays, None, mask, False, implementation)
    by_bias = out_and_grads(*arrays, bias, None, False, implementation)
    for name in ("out", "dq", "dk", "dv"):
        np.testing.assert_array_equal(by_mask[name], by_bias[name])
        assert np.isfinite(by_mask[name]).all()
    assert np.isfinite(by_bias["dbias"]).all()
    for x in (by_mask["out"], by_mask["dq"]):
        assert not np.asarray(x[:, 1]).any()
    assert not np.asarray(by_bias["dbias"][:, :, 1]).any()


@pytest.mark.parametrize(
    "implementation", [None, "reference", "pallas_tpu", "pallas_gpu"]
)
@pytest.mark.parametrize("hidden_by", ["mask", "bias", "causal"])
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
def test_garbage_in_hidden_keys_does_not_leak(key, garbage, hidden_by, implementation):
    q, k, v, dout = make(key, 1, 3, 4, 2, 1, 8)
    mask = jnp.ones((1, 1, 1, 4), bool).at[..., 3].set(False)
    bias = jnp.where(mask, 0.0, -jnp.inf) if hidden_by == "bias" else None
    mask = mask if hidden_by == "mask" else None

    def run(k, v):
        causal = hidden_by == "causal"  # with T=3 and S=4 nobody sees key 3
        return out_and_grads(q, k, v, dout, bias, mask, causal, implementation)

    clean = run(k.at[:, 3].set(0.0), v.at[:, 3].set(0.0))
    dirty = run(k.at[:, 3].set(garbage), v.at[:, 3].set(garbage))
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    assert not np.asarray(dirty["dk"][:, 3]).any()
    assert not np.asarray(dirty["dv"][:, 3]).any()


@pytest.mark.parametrize(
    "implementation", [None, "reference", "pallas_tpu", "pallas_gpu"]
)
def test_nan_reaches_exactly_the_queries_that_see_it(key, implementation):
    q, k, v, dout = make(key, 1, 6, 6, 1, 1, 4)
    for dirty in (
        (k.at[:, 3, 0, 1].set(jnp.nan), v),
        (k, v.at[:, 3, 0, 1].set(jnp.nan)),
    ):
        got = out_and_grads(q, *dirty, dout, None, None, True, implementation)
        for name in ("out", "dq"):
            assert np.isfinite(got[name][:, :3]).all(), name
            assert np.isnan(got[name][:, 3:]).all(), name


@pytest.mark.parametrize(
    "implementation", [None, "reference", "pallas_tpu", "pallas_gpu"]
)
def test_row_that_is_nan_leaves_its_hidden_keys_alone(key, implementation):
    q, k, v, dout = make(key, 1, 6, 6, 1, 1, 4)
    half = jnp.arange(6) < 3
    mask = (half[:, None] == half[None, :])[None, None]
    clean = out_and_grads(q, k, v, dout, None, mask, False, implementation)
    k = k.at[:, 4, 0, 1].set(jnp.nan)  # makes the last three queries NaN
    dirty = out_and_grads(q, k, v, dout, None, mask, False, implementation)
    for name in ("out", "dq", "dk", "dv"):
        np.testing.assert_array_equal(dirty[name][:, :3], clean[name][:, :3])
    assert np.isnan(dirty["dv"][:, 3:]).all()


@pytest.mark.parametrize("sizes", [(3, 0), (0, 3), (0, 0)])
@pytest.mark.parametrize("implementation", [None, "xla", "reference", "pallas_gpu"])
def test_empty_lengths(sizes, implementation):
    t, s = sizes
    q, k = jnp.ones((1, t, 1, 8)), jnp.ones((1, s, 1, 8))
    for causal in (False, True):
        got = out_and_grads(q, k, k, q, None, None, causal, implementation)
        for name, like in (("out", q), ("dq", q), ("dk", k), ("dv", k)):
            np.testing.assert_array_equal(got[name], jnp.zeros_like(like))


@pytest.mark.parametrize(
    "implementation", [None, "reference", "pallas_tpu", "pallas_gpu"]
)
def test_lse_without_features_of_values(key, implementation):
    q, k, v, _ = make(key, 1, 3, 4, 2, 1, 4)

    def run(q, k, v):
        options = dict(is_causal=True, implementation=implementation, return_lse=True)
        out, lse = flash_attention(q, k, v, **options)
        return jnp.sum(jnp.sin(lse)), (out, lse)

    run = jax.jit(jax.grad(run, (0, 1), has_aux=True))
    (dq, dk), (out, lse) = run(q, k, v[..., :0])
    want_grads, (_, want) = run(q, k, v)
    assert out.shape == (1, 3, 2, 0)
    for a, b in zip((dq, dk, lse), (*want_grads, want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", [None, "xla", "reference"])
def test_heads_without_features_of_queries_weigh_all_keys_alike(key, implementation):
    v = draws.normal(key, (2, 4, 1, 3))
    q, k = jnp.ones((2, 3, 2, 0)), jnp.ones((2, 4, 1, 0))
    got = out_and_grads(
        q, k, v, jnp.ones((2, 3, 2, 3)), None, None, False, implementation
    )
    want = jnp.broadcast_to(v.mean(1, keepdims=True), (2, 3, 2, 3))
    np.testing.assert_allclose(got["out"], want, rtol=1e-5, atol=1e-6)
    assert got["dq"].shape == q.shape


def test_causal_is_aligned_top_left():
    for t, s in ((2, 5), (1, 5), (5, 2)):
        q, k = jnp.zeros((1, t, 1, 4)), jnp.zeros((1, s, 1, 4))
        v = jnp.eye(s)[None, :, None]
        weights = flash_attention(q, k, v, is_causal=True)[0, :, 0]
        seen = np.tri(t, s)
        np.testing.assert_allclose(weights, seen / seen.sum(1, keepdims=True), 1e-6)


def test_first_causal_row_is_the_first_value(key):
    q, k, v, _ = make(key, 1, 600, 600, 1, 1, 8)
    causal = flash_attention(q, k, v, is_causal=True)
    np.testing.assert_array_equal(causal[:, 0], v[:, 0])
    full = flash_attention(q, k, v)
    assert np.abs(causal - full)[:, 0].max() > 0.1


def test_causal_output_does_not_move_with_later_keys(key):
    q, k, v, _ = make(key, 1, 600, 600, 1, 1, 4)
    before = flash_attention(q, k, v, is_causal=True)
    after = flash_attention(
        q, k.at[:, 150:].add(1.0), v.at[:, 150:].add(1.0), is_causal=True
    )
    np.testing.assert_array_equal(before[:, :150], after[:, :150])


def test_grouped_heads_sum_their_gradients(key):
    for n, k_heads in ((6, 2), (8, 1)):
        args = (*make(key, 1, 5, 7, n, k_heads, 8), None, None, False)
        check_against_exact(out_and_grads(*args), args)


def test_shared_key_gradient_in_bf16_is_summed_in_fp32(key):
    arrays = make(key, 1, 4, 4, 64, 1, 8, dtype=bf16)
    ours = out_and_grads(*arrays, None, None, False)
    truth, _ = exact(*arrays, None, None, False)
    for name in ("dk", "dv"):
        error = np.abs(np.asarray(ours[name], np.float64) - truth[name]).max()
        assert error <= float(jnp.finfo(bf16).eps) / 2 * np.abs(truth[name]).max()


def test_fp16_scores_beyond_its_range_stay_finite():
    q = jnp.full((1, 4, 1, 128), 256.0, f16)
    v = jnp.arange(4.0, dtype=f16).reshape(1, 4, 1, 1)
    got = out_and_grads(q, q, v, jnp.ones_like(v), None, None, False)
    np.testing.assert_array_equal(got["out"], jnp.full_like(v, 1.5))
    assert all(np.isfinite(x).all() for x in got.values() if x is not None)


def test_the_same_call_gives_the_same_bits(key):
    arrays = make(key, 1, 520, 600, 2, 1, 8)
    first = out_and_grads(*arrays, None, None, True)
    for _ in range(10):
        again = out_and_grads(*arrays, None, None, True)
        jax.tree.map(np.testing.assert_array_equal, again, first)


def test_one_key_has_no_gradient_of_scores(key):
    args = (*make(key, 1, 97, 1, 1, 1, 64), None, None, False)
    check_against_exact(out_and_grads(*args), args)
