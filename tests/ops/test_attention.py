"""The contract of flash_attention: values, gradients, transforms, and errors."""

import functools
import os
import subprocess
import sys
import textwrap

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
from jax import lax
from jax.sharding import PartitionSpec as P

from opsnn_jax.ops.attention import flash_attention

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
    args = (*make(key, *shape, dtype=dtype), None, None, causal)
    check_against_exact(out_and_grads(*args), args, plain(*args))


@pytest.mark.parametrize("dim", [1, 3, 80, 192, 512])
def test_head_sizes(key, dim):
    args = (*make(key, 1, 7, 9, 2, 1, dim), None, None, True)
    check_against_exact(out_and_grads(*args), args, plain(*args))


def test_reference_is_the_formula(key):
    arrays = make(key, 2, 5, 7, 4, 2, 8, 3)
    bias = jax.random.normal(key, (1, 4, 1, 7))
    mask = jax.random.bernoulli(key, 0.7, (2, 1, 5, 7)).at[0, 0, 2].set(False)
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
    bias = jax.random.normal(key, shape, dtypes[1])
    ours = out_and_grads(*arrays, bias, None, False)
    assert ours["dbias"].shape == shape
    assert ours["dbias"].dtype == dtypes[1]
    bias = bias.reshape((1,) * (4 - bias.ndim) + shape)
    ours["dbias"] = ours["dbias"].reshape(bias.shape)
    check_against_exact(ours, (*arrays, bias, None, False))


def test_gradient_of_a_bias_over_several_tiles(key):
    arrays = make(key, 2, 520, 600, 2, 1, 8)
    for shape in ((1, 2, 520, 600), (2, 1, 1, 600)):
        bias = jax.random.normal(key, shape)
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
    mask = jax.random.bernoulli(key, 0.6, shape)
    ours = out_and_grads(*arrays, None, mask, False, implementation)
    mask = mask.reshape((1,) * (4 - mask.ndim) + shape)
    check_against_exact(ours, (*arrays, None, mask, False))


def test_mask_over_several_blocks_of_the_gpu(key):
    arrays = make(key, 2, 140, 150, 2, 1, 8)
    mask = jax.random.bernoulli(key, 0.6, (2, 1, 140, 150))
    ours = out_and_grads(*arrays, None, mask, True, "pallas_gpu")
    check_against_exact(ours, (*arrays, None, mask, True))


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_gradients_are_the_slope_of_the_function(key, implementation):
    with jax.enable_x64(True):
        arrays = make(key, 1, 4, 6, 4, 2, 3, 5, dtype=jnp.float64)
        *args, dout = arrays
        args.append(jax.random.normal(key, (1, 4, 1, 6), jnp.float64))

        def f(*args):
            out = flash_attention(*args, is_causal=True, implementation=implementation)
            return jnp.vdot(out, dout)

        grads = jax.grad(f, tuple(range(4)))(*args)
        step = 1e-5
        for i, grad in enumerate(grads):
            direction = jax.random.normal(
                jax.random.key(i), args[i].shape, args[i].dtype
            )
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


# Rows and positions that do not count.


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


# Faults of other libraries.


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


# Transforms.


def loss(q, k, v, bias=None, implementation=None):
    out = flash_attention(q, k, v, bias, is_causal=True, implementation=implementation)
    return jnp.sum(jnp.square(out.astype(f32)))


def check_close(got, want):
    def check(a, b):
        b = np.asarray(b)
        atol = 2e-5 * max(1, np.abs(b).max())  # sums of terms as large as the result
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)

    jax.tree.map(check, got, want)


def test_vmap_over_any_argument(key):
    q, k, v, _ = make(key, 2, 3, 5, 2, 1, 4)
    bias = jax.random.normal(key, (2, 1, 3, 5))
    args = [q, k, v, bias]
    grad = jax.jit(jax.grad(loss, (0, 1, 2, 3)))
    for axes in ((0, 1, 2, 0), (None, 1, None, None)):
        stacked = [
            x if a is None else jnp.stack([x, -x], a)
            for x, a in zip(args, axes, strict=True)
        ]
        got = jax.jit(jax.vmap(grad, axes))(*stacked)
        for i in range(2):
            one = [
                x if a is None else lax.index_in_dim(x, i, a, keepdims=False)
                for x, a in zip(stacked, axes, strict=True)
            ]
            check_close([g[i] for g in got], list(grad(*one)))


def test_vmap_of_vmap_and_of_a_mask(key):
    q, k, v, _ = make(key, 1, 3, 4, 1, 1, 4)
    masks = jax.random.bernoulli(key, 0.7, (2, 3, 1, 1, 3, 4))
    run = jax.jit(functools.partial(flash_attention, q, k, v, None))
    got = jax.vmap(jax.vmap(run))(masks)
    for i in range(2):
        for j in range(3):
            check_close(got[i, j], run(masks[i, j]))


@pytest.mark.parametrize("bias", [False, True])
def test_gradient_of_a_gradient(key, bias):
    q, k, v, _ = make(key, 1, 3, 4, 2, 1, 4)
    bias = jax.random.normal(key, (1, 1, 3, 4)) if bias else None
    wanted = (0, 1, 2) if bias is None else (0, 1, 2, 3)

    @functools.partial(jax.jit, static_argnums=4)
    def second(q, k, v, bias, implementation):
        def norm(*args):
            grads = jax.grad(loss, wanted)(*args, implementation)
            return sum(jnp.sum(jnp.square(g)) for g in grads)

        return jax.grad(norm, wanted)(q, k, v, bias)

    check_close(second(q, k, v, bias, None), second(q, k, v, bias, "reference"))


def test_gradient_of_a_gradient_over_several_tiles(key):
    q, k, v, _ = make(key, 1, 520, 530, 1, 1, 2)

    @functools.partial(jax.jit, static_argnums=3)
    def second(q, k, v, implementation):
        def norm(q):
            return jnp.sum(jax.grad(loss)(q, k, v, None, implementation) ** 2)

        return jax.grad(norm)(q)

    check_close(second(q, k, v, None), second(q, k, v, "reference"))


def test_reference_has_forward_mode_and_hessian(key):
    q, k, v, _ = make(key, 1, 2, 3, 1, 1, 2)

    def f(q):
        return loss(q, k, v, None, "reference")

    _, slope = jax.jit(lambda q: jax.jvp(f, (q,), (jnp.ones_like(q),)))(q)
    np.testing.assert_allclose(slope, jax.jit(jax.grad(f))(q).sum(), rtol=1e-5)
    hessian = jax.jit(jax.hessian(f))(q).reshape(4, 4)
    np.testing.assert_allclose(hessian, hessian.T, atol=1e-5)


def test_remat_saves_the_forward_pass_by_name(key):
    q, k, v, _ = make(key, 1, 3, 3, 1, 1, 4)
    policies = jax.checkpoint_policies
    named = policies.save_only_these_names("attention_out", "attention_lse")
    for policy, passes in ((None, 3), (named, 2)):
        step = jax.grad(
            lambda q, policy=policy: jax.checkpoint(loss, policy=policy)(q, k, v)
        )
        check_close(step(q), jax.grad(loss)(q, k, v))
        assert str(jax.make_jaxpr(step)(q)).count("opsnn_pass") == passes


def test_scan_with_a_bf16_carry_and_remat(key):
    q, k, v, _ = make(key, 1, 3, 3, 1, 1, 4, dtype=bf16)

    @jax.jit
    def run(q):
        layer = jax.checkpoint(lambda x, _: (flash_attention(x, k, v), None))
        return jnp.sum(lax.scan(layer, q, None, 2)[0].astype(f32))

    assert jax.grad(run)(q).dtype == bf16


def test_equal_calls_are_traced_once(key):
    q, k, v, _ = make(key, 1, 3, 3, 1, 1, 4)
    traced = []

    @jax.jit
    def run(q):
        traced.append(q)
        return flash_attention(q, k, v, scale=0.5)

    for x in (q, run(q), np.asarray(q)):
        run(x)
    assert len(traced) == 1


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from opsnn_jax.ops.attention import flash_attention

mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
keys = jax.random.split(jax.random.key(0), 4)
q = jax.random.normal(keys[0], (4, 3, 2, 4))
k, v = jax.random.normal(keys[1], (2, 2, 5, 1, 4))  # the same on every shard
bias = jax.random.normal(keys[2], (2, 1, 5))
mask = jnp.ones((2, 1, 1, 5), bool).at[..., 4].set(False)

def f(q, k, v, bias):
    return flash_attention(q, k, v, bias, mask)

def loss(f):
    return lambda *args: jnp.sum(f(*args) ** 2)

def whole(q, k, v, bias):
    return jnp.concatenate([f(q[:2], k, v, bias), f(q[2:], k, v, bias)])

want = jax.grad(loss(whole), (0, 1, 2, 3))(q, k, v, bias)
for check in (True, False):
    sharded = jax.shard_map(
        f, mesh=mesh, in_specs=(P("i"), P(), P(), P()), out_specs=P("i"),
        check_vma=check,
    )
    got = jax.jit(jax.grad(loss(sharded), (0, 1, 2, 3)))(q, k, v, bias)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, atol=1e-5)
print("equal")
"""


def test_shard_map_sums_the_gradients_of_what_is_replicated():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SHARDED)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **flags},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "equal\n", done.stderr[-2000:]


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_gradients_keep_explicit_shardings(key, implementation):
    # The axes of jax.make_mesh are explicit: shardings are part of the types.
    q, k, v, _ = make(key, 1, 3, 5, 2, 1, 4)
    with jax.set_mesh(jax.make_mesh((1,), ("d",))):
        sharded = [jax.device_put(x, P("d")) for x in (q, k, v)]
        gradient = jax.grad(functools.partial(loss, implementation=implementation))
        dq = jax.eval_shape(gradient, *sharded)
    assert dq.sharding.spec == P("d", None, None, None)


# Errors.

GOOD = dict(
    q=jnp.zeros((2, 3, 4, 8)), k=jnp.zeros((2, 5, 2, 8)), v=jnp.zeros((2, 5, 2, 6))
)


@pytest.mark.parametrize(
    "change, error, match",
    [
        (dict(q=jnp.zeros((3, 4, 8))), ValueError, r"the same axes.* got \(3, 4, 8\)"),
        (dict(k=jnp.zeros((1, 5, 2, 8))), ValueError, r"k must have shape .*\(1, 5, 2"),
        (dict(k=jnp.zeros((2, 5, 2, 7))), ValueError, r"k must have shape"),
        (dict(v=jnp.zeros((2, 6, 2, 6))), ValueError, r"v must have shape .* k \(2, 5"),
        (dict(v=jnp.zeros((2, 5, 1, 6))), ValueError, r"v must have shape"),
        (dict(q=jnp.zeros((2, 3, 3, 8))), ValueError, r"a multiple .* got 3 and 2"),
        (dict(k=jnp.zeros((2, 5, 2, 8), bf16)), TypeError, r"one dtype; got float32"),
        (
            dict(q=jnp.zeros((2, 3, 4, 8), int)),
            TypeError,
            r"q must have dtype .*got int32",
        ),
        (dict(q=jnp.zeros((2, 3, 4, 8), "complex64")), TypeError, r"got complex64"),
        (
            dict(q=jnp.zeros((2, 3, 4, 8), "float8_e4m3fn")),
            TypeError,
            r"got float8_e4m3fn",
        ),
        (dict(q=np.zeros((2, 3, 4, 8))), TypeError, r"float64 but jax_enable_x64"),
        (dict(q=None), TypeError, r"q must be an array; got NoneType"),
        (dict(v="v"), TypeError, r"v must be an array; got str"),
        (dict(mask=jnp.ones((3, 5))), TypeError, r"mask must be boolean; got float32"),
        (dict(mask=jnp.ones((3, 4), bool)), ValueError, r"mask must broadcast .*3, 4"),
        (dict(bias=jnp.ones((2, 3, 5))), ValueError, r"bias must broadcast .*2, 3, 5"),
        (dict(bias=jnp.ones((1, 1, 1, 3, 5))), ValueError, r"bias must broadcast"),
        (dict(bias=jnp.ones((3, 5), int)), TypeError, r"bias must have dtype"),
        (dict(q=np.zeros((2, 3, 4, 8), ">f4")), TypeError, r"got >f4"),
        (dict(bias=[[0.0]]), TypeError, r"bias must be an array; got list"),
        (dict(scale=jnp.float32(1)), TypeError, r"scale must be a Python number"),
        (dict(scale="1"), TypeError, r"scale must be a Python number"),
        (dict(is_causal=jnp.array(True)), TypeError, r"is_causal must be a bool"),
        (dict(precision="best"), ValueError, r"precision must be .*'best'"),
        (dict(implementation="cudnn"), ValueError, r"implementation must be .*'cudnn'"),
        (dict(implementation=()), ValueError, r"implementation must be"),
        (dict(implementation=1), ValueError, r"implementation must be .* got 1"),
    ],
)
def test_errors_say_what_was_given(change, error, match):
    with pytest.raises(error, match=r"^flash_attention: .*" + match):
        flash_attention(**{**GOOD, **change})


def test_a_traced_scale_is_refused_with_advice():
    with pytest.raises(TypeError, match="Multiply q by an array scale"):
        jax.jit(lambda scale: flash_attention(**GOOD, scale=scale))(0.5)


def test_numpy_scalars_are_numbers():
    scaled = flash_attention(**GOOD, scale=np.float32(0.5), is_causal=np.True_)
    assert scaled.shape == (2, 3, 4, 6)
