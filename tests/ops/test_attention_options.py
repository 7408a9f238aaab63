"""lse, softcap, sinks, dropout and contradictions of flash_attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_truth import bf16, check_against_exact, each, f32, make, run

from opsnn_jax.kernels.attention.dropout import keep
from opsnn_jax.ops.attention import flash_attention
from tests import draws

SHAPE = (2, 5, 7, 4, 2, 6, 3)


def check(key, implementation, dtype=f32, operands=None, shape=SHAPE, **options):
    """Holds a call against the formulas; `weights` are those of dropout."""
    weights = options.pop("weights", None)
    operands = operands or {}
    arrays = make(key, *shape, dtype=dtype)
    dlse = draws.normal(key, arrays[0].shape[:-1])
    got = run(*arrays, dlse, operands, implementation, tuple(sorted(options.items())))
    args = (*arrays, operands.get("bias"), operands.get("mask"))
    check_against_exact(
        got,
        (*args, options.get("is_causal", False)),
        softcap=options.get("softcap"),
        sinks=operands.get("sinks"),
        weights=weights,
        dlse=dlse,
    )
    return got


@each
@pytest.mark.parametrize("dtype", [f32, bf16])
def test_lse_and_its_gradient(key, implementation, dtype):
    check(key, implementation, dtype, is_causal=True)


@each
def test_softcap(key, implementation):
    mask = draws.bernoulli(key, 0.7, (2, 1, 5, 7)).at[0, 0, 1].set(False)
    operands = {"mask": mask, "bias": draws.normal(key, (1, 4, 5, 1))}
    first = check(key, implementation, operands=operands, softcap=0.7)
    second = check(key, implementation, operands=operands, softcap=1.4)
    assert np.abs(first["out"] - second["out"]).max() > 1e-3


def test_slope_of_a_cap():
    q, k = jnp.full((1, 1, 1, 1), 30.0), jnp.ones((1, 1, 1, 1))
    f = functools.partial(flash_attention, k=k, v=k, softcap=50.0, scale=1.0)
    lse, slope = jax.value_and_grad(lambda q: f(q, return_lse=True)[1].sum())(q)
    np.testing.assert_allclose(lse, 50 * np.tanh(0.6), rtol=1e-6)
    np.testing.assert_allclose(slope, 1 - np.tanh(0.6) ** 2, rtol=1e-5)


@each
def test_sinks(key, implementation):
    sinks = jnp.array([0.3, -2.0, 40.0, -jnp.inf])
    mask = jnp.ones((2, 1, 5, 1), bool).at[1, 0, 2].set(False)
    got = check(key, implementation, operands={"sinks": sinks, "mask": mask})
    np.testing.assert_array_equal(got["lse"][1, 2], sinks)  # it sees nothing else
    assert not got["out"][1, 2].any()
    assert got["dsinks"][3] == 0
    assert np.isfinite(got["dsinks"]).all()


# Shapes of several tiles.
tiled = pytest.mark.parametrize(
    "implementation, t, s", [("xla", 520, 600), ("pallas_gpu", 140, 150)]
)


@tiled
def test_sinks_over_several_tiles(key, implementation, t, s):
    operands = {"sinks": jnp.array([1.0, -1.0]).astype(bf16)}
    shape = (1, t, s, 2, 1, 4)
    check(key, implementation, operands=operands, shape=shape, is_causal=True)


# The bias and the mask of a kernel, as everywhere.


@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (2, 1, 5, 1), (1, 4, 1, 7), (2, 4, 5, 7)], ids=str
)
def test_bias_of_a_kernel(key, implementation, shape):
    bias = draws.normal(key, shape, bf16).at[..., -1].add(-jnp.inf)
    bias = bias.at[0, 0, -1].set(-jnp.inf)  # hides all keys
    mask = draws.bernoulli(key, 0.7, shape)
    if shape == (1, 1, 1, 1):
        bias, mask = jnp.full(shape, 0.5), ~mask | mask
    check(key, implementation, operands={"bias": bias, "mask": mask}, is_causal=True)


# Dropout.


def kept(rng, b, n, t, s, rate):
    """m of the op's docstring, from the generator itself."""
    seed = jax.lax.bitcast_convert_type(
        jax.random.bits(rng, (2,), jnp.uint32), jnp.int32
    )
    head = jnp.arange(b * n, dtype=jnp.int32).reshape(b, n, 1, 1)
    row = jnp.arange(t, dtype=jnp.int32)[:, None]
    col = jnp.arange(s, dtype=jnp.int32)[None]
    with jax.numpy_rank_promotion("allow"):
        mask = keep((seed[0], seed[1]), head, row, col, rate)
    return np.asarray(mask) / (1 - rate)


@each
@pytest.mark.parametrize("dtype", [f32, bf16])
def test_dropout(key, implementation, dtype):
    weights = kept(key, 2, 4, 5, 7, 0.4)
    mask = jnp.ones((2, 1, 5, 1), bool).at[1, 0, 2].set(False)
    operands = {"dropout_rng": key, "mask": mask}
    options = dict(weights=weights, dropout_rate=0.4)
    check(key, implementation, dtype, operands=operands, **options)


@tiled
def test_dropout_is_the_same_for_all_blocks(key, implementation, t, s):
    weights = kept(key, 1, 2, t, s, 0.3)
    options = dict(weights=weights, dropout_rate=0.3, is_causal=True)
    shape, operands = (1, t, s, 2, 1, 4), {"dropout_rng": key}
    check(key, implementation, operands=operands, shape=shape, **options)


@each
def test_dropout_of_all_and_of_nothing(key, implementation):
    q, k, v, dout = make(key, *SHAPE)

    @functools.partial(jax.jit, static_argnums=0)
    def out_and_grad(rate, rng):
        f = functools.partial(
            flash_attention, dropout_rate=rate, dropout_rng=rng,
            implementation=implementation,
        )  # fmt: skip
        out, vjp = jax.vjp(f, q, k, v)
        return out, *vjp(dout)

    for x in out_and_grad(1, key):
        np.testing.assert_array_equal(x, jnp.zeros_like(x))
    jax.tree.map(
        np.testing.assert_array_equal, out_and_grad(0.0, key), out_and_grad(0.0, None)
    )


def test_dropout_with_gradient_of_a_gradient(key):
    q, k, v, _ = make(key, 1, 4, 5, 2, 1, 3)

    def norm(q, implementation):
        def loss(q):
            options = dict(dropout_rate=0.3, dropout_rng=key, softcap=2.0)
            out = flash_attention(q, k, v, **options, implementation=implementation)
            return jnp.sum(jnp.square(out))

        return jnp.sum(jnp.square(jax.grad(loss)(q)))

    got, want = (
        jax.jit(jax.grad(norm), static_argnums=1)(q, name)
        for name in (None, "reference")
    )
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_the_generator_is_as_random_as_it_should_be():
    rate, (b, n, t, s) = 0.25, (2, 3, 200, 300)
    masks = [kept(jax.random.key(i), b, n, t, s, rate) > 0 for i in range(3)]
    count = b * n * t * s

    def sigmas(share, mean, number):
        return abs(share - mean) / np.sqrt(mean * (1 - mean) / number)

    one = masks[0]
    # Of two independent weights, both are kept or both dropped this often.
    agree = (1 - rate) ** 2 + rate**2
    for mask in masks:
        assert sigmas(mask.mean(), 1 - rate, count) < 4
        for axis in range(4):
            per_line = mask.mean(tuple(a for a in range(4) if a != axis))
            worst = np.abs(per_line - (1 - rate)).max()
            assert worst < 5 * np.sqrt(rate * (1 - rate) * mask.shape[axis] / count)
    for other in (
        *masks[1:],
        *(np.roll(one, shift, axis) for axis in (1, 2, 3) for shift in (1, 2)),
        *(np.roll(one, 128, axis) for axis in (2, 3)),
        np.roll(one, 1, 0),
    ):
        assert sigmas((one == other).mean(), agree, count) < 5


# What contradicts itself.

X = jnp.ones((2, 3, 2, 4))
IDS = jnp.zeros((2, 3), jnp.int32)


@pytest.mark.parametrize(
    "options, error, match",
    [
        (dict(is_causal=True, q_positions=IDS), ValueError, r"is_causal cannot be"),
        (
            dict(causal_align="bottom_right", kv_positions=IDS),
            ValueError,
            r"causal_align='bottom_right' cannot be combined",
        ),
        (dict(causal_align="left"), ValueError, r"causal_align must be .*'left'"),
        (dict(causal_align=1), ValueError, r"causal_align must be .* got 1"),
        (dict(window=(1, 2, 3)), TypeError, r"window must be \(left, right\)"),
        (dict(window="all"), TypeError, r"window must be .*'all'"),
        (dict(window=(1.5, 0)), TypeError, r"window must hold Python integers"),
        (dict(window=(True, 0)), TypeError, r"window must hold Python integers"),
        (dict(window=(-1, 0)), ValueError, r"window must not be negative"),
        (dict(window=(jnp.int32(1), 0)), TypeError, r"window must hold"),
        (dict(q_lengths=jnp.ones(2)), TypeError, r"q_lengths must be integers"),
        (dict(q_lengths=[1, 2]), TypeError, r"q_lengths must be an array; got list"),
        (dict(kv_lengths=jnp.ones(3, int)), ValueError, r"kv_lengths must have shape"),
        (dict(kv_segment_ids=IDS), ValueError, r"kv_segment_ids needs q_segment_ids"),
        (dict(q_segment_ids=IDS[:, :2]), ValueError, r"q_segment_ids must have shape"),
        (
            dict(q_segment_ids=np.full((2, 3), 2**31)),
            ValueError,
            r"q_segment_ids must fit into int32",
        ),
        (
            dict(q_segment_ids=IDS.astype(jnp.uint32)),
            TypeError,
            r"q_segment_ids must have at most 32 bits",
        ),
        (dict(softcap=0), ValueError, r"softcap must be positive"),
        (dict(softcap=float("nan")), ValueError, r"softcap must be positive"),
        (dict(softcap=jnp.float32(1)), TypeError, r"softcap must be None or a Python"),
        (dict(sinks=jnp.ones(3)), ValueError, r"sinks must have shape \(N,\) = \(2,\)"),
        (dict(sinks=jnp.ones(2, int)), TypeError, r"sinks must have dtype"),
        (dict(dropout_rate=0.1), ValueError, r"dropout_rate 0.1 needs dropout_rng"),
        (dict(dropout_rate=1.1), ValueError, r"dropout_rate must be in \[0, 1\]"),
        (dict(dropout_rate=jnp.float32(0)), TypeError, r"dropout_rate must be a Py"),
        (
            dict(dropout_rate=0.1, dropout_rng=jax.random.split(jax.random.key(0))),
            ValueError,
            r"dropout_rng must be one key .*\(2,\)",
        ),
        (dict(dropout_rate=0.1, dropout_rng=0), TypeError, r"dropout_rng must be an"),
    ],
)
def test_errors_say_what_contradicts(options, error, match):
    with pytest.raises(error, match=r"^flash_attention: .*" + match):
        flash_attention(X, X, X, **options)


def test_one_array_of_segments_needs_equal_lengths():
    k = jnp.ones((2, 4, 2, 4))
    with pytest.raises(ValueError, match="T must be S; got T=3, S=4"):
        flash_attention(X, k, k, q_segment_ids=IDS)


def test_arrays_need_the_same_number_of_axes():
    with pytest.raises(ValueError, match="the same axes"):
        flash_attention(X[0], X, X)
