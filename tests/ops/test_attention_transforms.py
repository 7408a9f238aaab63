"""flash_attention under JAX's transformations, and on several devices."""

import functools
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_truth import bf16, f32, make
from jax import lax
from jax.sharding import PartitionSpec as P

from opsnn_jax.ops.attention import flash_attention
from tests import draws
from tests.compilation import environment_of


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
    bias = draws.normal(key, (2, 1, 3, 5))
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
    masks = draws.bernoulli(key, 0.7, (2, 3, 1, 1, 3, 4))
    run = jax.jit(functools.partial(flash_attention, q, k, v, None))
    got = jax.vmap(jax.vmap(run))(masks)
    for i in range(2):
        for j in range(3):
            check_close(got[i, j], run(masks[i, j]))


@pytest.mark.parametrize("bias", [False, True])
def test_gradient_of_a_gradient(key, bias):
    q, k, v, _ = make(key, 1, 3, 4, 2, 1, 4)
    bias = draws.normal(key, (1, 1, 3, 4)) if bias else None
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


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_garbage_reaches_no_gradient_of_a_gradient(key, softcap, garbage):
    q, k, v, _ = make(key, 1, 6, 7, 2, 1, 4)

    def norm(q, k, v):
        out = flash_attention(
            q,
            k,
            v,
            softcap=softcap,
            q_lengths=jnp.array([4]),
            kv_lengths=jnp.array([5]),
        )
        return jnp.sum(out**3)

    @jax.jit
    def second(*args):
        gradient = jax.grad(norm, (0, 1, 2))
        return jax.grad(lambda *x: jnp.sum(gradient(*x)[1] ** 2), (0, 1, 2))(*args)

    def filled(x):
        return q.at[:, 4:].set(x), k.at[:, 5:].set(x), v.at[:, 5:].set(x)

    jax.tree.map(
        np.testing.assert_array_equal, second(*filled(garbage)), second(*filled(0.0))
    )


def test_reference_has_forward_mode_and_hessian(key):
    with jax.enable_x64(True):  # the terms of a slope may cancel
        q, k, v, _ = make(key, 1, 2, 3, 1, 1, 2, dtype=jnp.float64)

        def f(q):
            out = flash_attention(q, k, v, is_causal=True, implementation="reference")
            return jnp.sum(jnp.square(out))

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


def test_a_batch_that_is_not_known_yet(key):
    """One exported program for every batch, forward and backward."""
    (b,) = jax.export.symbolic_shape("b")
    q, k, v, _ = make(key, 3, 5, 6, 4, 2, 8)
    lengths = jnp.array([6, 2, 0])

    def grads(q, k, v, lengths):
        options = dict(is_causal=True, kv_lengths=lengths, dropout_rate=0.3)
        options |= dict(dropout_rng=jax.random.key(0), sinks=jnp.ones(4))
        f = functools.partial(flash_attention, **options)
        return jax.value_and_grad(lambda *x: f(*x).sum(), (0, 1, 2))(q, k, v)

    args = q, k, v, lengths
    shapes = [jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype) for x in args]
    exported = jax.export.export(jax.jit(grads))(*shapes)
    check_close(exported.call(*args), grads(*args))


def test_sizes_that_are_not_known_yet_are_refused_in_a_sentence():
    b, t = jax.export.symbolic_shape("b, t")

    def shape(shape, implementation=None):
        x = jax.ShapeDtypeStruct(shape, f32)
        call = functools.partial(
            flash_attention, is_causal=True, implementation=implementation
        )
        return jax.eval_shape(call, x, x, x).shape

    for name in ("pallas_tpu", "pallas_gpu"):
        with pytest.raises(NotImplementedError, match="are known only, got B=b"):
            shape((b, 5, 4, 8), name)
    with pytest.raises(NotImplementedError, match="are known only, got T=t, S=t"):
        shape((b, t, 4, 8))
    with pytest.raises(ValueError, match="heads and features must be known"):
        shape((b, 5, t, 8))
    assert shape((b, t, 4, 8), "reference") == (b, t, 4, 8)


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
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SHARDED)],
        env=environment_of(devices=2),
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
