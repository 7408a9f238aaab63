"""The TPU kernels in Pallas's interpreter, where blocks end in NaN."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_passes import check_passes
from jax.sharding import PartitionSpec as P

from opsnn_jax.kernels.attention import tpu, xla
from opsnn_jax.kernels.attention.mask import Band
from opsnn_jax.kernels.attention.spec import AttentionSpec, Extra
from opsnn_jax.kernels.attention.tpu_plan import Plan
from opsnn_jax.ops.attention import TABLE, flash_attention
from tests import draws

CAUSAL = Band(upper=0)


@pytest.mark.parametrize(
    "shape, band, dtype, block",
    [
        ((1, 130, 257, 2, 1, 8, 5), Band(), jnp.float32, (128, 128, 128)),
        ((1, 300, 140, 2, 1, 8, 5), CAUSAL, jnp.bfloat16, (256, 128, 128)),
        ((1, 129, 257, 1, 1, 3, 8), CAUSAL, jnp.float32, (128, 256, 256)),
        ((1, 260, 200, 1, 1, 8, 8), Band(-100, 20), jnp.float32, (128, 128, 128)),
        ((1, 150, 40, 1, 1, 8, 8), Band(upper=-130), jnp.float32, (128, 128, 128)),
        ((2, 1, 1, 1, 1, 1, 1), Band(), jnp.bfloat16, (128, 128, 128)),
        # Several strips of keys in a block, a strip in two pieces, and ragged ends.
        ((1, 260, 520, 2, 1, 8, 5), CAUSAL.shifted(200), jnp.float32, (128, 512, 256)),
        ((1, 200, 600, 1, 1, 8, 8), Band(), jnp.bfloat16, (128, 512, 128)),
    ],
    ids=str,
)
def test_values(key, shape, band, dtype, block):
    check_passes(key, tpu, shape, band, dtype, interpret=True, block=block)


@pytest.mark.parametrize(
    "options",
    [
        {"ids": True, "sinks": True, "softcap": 2.0, "dropout_rate": 0.3},
        {"positions": True, "band": CAUSAL},
        {"bias_shape": (1, 2, 260, 600), "mask_shape": (1, 1, 1, 600)},
        {"bias_shape": (1, 1, 1, 600), "mask_shape": (1, 2, 260, 600)},
    ],
    ids=lambda options: "-".join(options),
)
def test_options_over_several_blocks_and_strips(key, options):
    # Two blocks of keys, of two strips of two pieces; the last strip is empty.
    shape, block = (1, 260, 600, 2, 1, 8, 8), (128, 512, 256)
    assert_same_passes(key, shape, options, block)


def assert_same_passes(key, shape, options, block):
    """The passes of the kernels are those of the implementation in plain JAX."""
    none = {"band": Band(), "bias_shape": None, "mask_shape": None}
    b, t, s, n, k, h, _ = shape
    spec = AttentionSpec(
        *shape,
        np.dtype("float32"),
        h**-0.5,
        precision=jax.lax.Precision.HIGHEST,
        **none | options,
    )
    keys = iter(jax.random.split(key, 10))

    def draw(*shape):
        return draws.normal(next(keys), shape)

    q, dout, k, v = (draw(b, *x, h) for x in ((t, n), (t, n), (s, k), (s, k)))
    # Segments that end inside of pieces and between them, positions out of order.
    ids = [jnp.arange(x)[None] // 128 * 128 // 200 for x in (t, s)]
    places = [jnp.arange(x)[None] * 3 % x for x in (t, s)]
    extra = Extra(
        bias=None if spec.bias_shape is None else draw(*spec.bias_shape),
        mask=None if spec.mask_shape is None else draw(*spec.mask_shape) < 1,
        **(dict(zip(("q_ids", "kv_ids"), ids, strict=True)) if spec.ids else {}),
        **(
            dict(zip(("q_positions", "kv_positions"), places, strict=True))
            if spec.positions
            else {}
        ),
        sinks=draw(n) if spec.sinks else None,
        seed=jnp.array([3, 5], jnp.int32) if spec.dropout_rate else None,
    ).present
    delta = draw(b, n, t)

    def run(kernels, **how):
        @jax.jit
        def passes(q, k, v, dout, extra):
            out, lse = kernels.fwd(spec, q, k, v, *extra, **how)
            return (
                out,
                lse,
                *kernels.bwd(spec, q, k, v, lse, delta, dout, *extra, **how),
            )

        return passes(q, k, v, dout, extra)

    got, want = run(tpu, interpret=True, block=block), run(xla)
    names = ("out", "lse", "dq", "dk", "dv", "dbias")[: len(want)]
    for name, a, b in zip(names, got, want, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        # Sums of a few hundred terms in two orders.
        atol = 32 * np.finfo(np.float32).eps * np.abs(np.nan_to_num(b, neginf=0)).max()
        np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=name)


def test_a_first_strip_whose_scores_all_overflow(key):
    shape, dtype = (1, 8, 256, 1, 1, 8, 8), np.dtype("float32")
    spec = AttentionSpec(
        *shape, dtype, 1.0, Band(), jax.lax.Precision.HIGHEST, None, None
    )
    k, v = (draws.normal(i, (1, 256, 1, 8)) for i in jax.random.split(key))
    q, k = jnp.full((1, 8, 1, 8), 1e20), k * 1e-20
    k = k.at[:, :128].set(-1e20)  # scores of -8e40
    got = tpu.fwd(spec, q, k, v, interpret=True, block=(128, 128, 128))
    rest = dataclasses.replace(spec, kv_len=128)
    want = xla.fwd(rest, q, k[:, 128:], v[:, 128:])
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("part", ["k", "v"])
def test_garbage_reaches_only_the_queries_that_see_it(key, part):
    q, k, v = (draws.normal(i, (1, 6, 1, 4)) for i in jax.random.split(key, 3))
    bad = {"k": k, "v": v}
    bad[part] = bad[part].at[:, 3, 0, 1].set(jnp.nan)

    @jax.jit
    def run(q, k, v):
        def f(*args):
            out = flash_attention(*args, is_causal=True, implementation="pallas_tpu")
            return jnp.sum(out[:, :3]), out  # only what is not to see the garbage

        return jax.grad(f, (0, 1, 2), has_aux=True)(q, k, v)

    grads, out = run(q, k, v)
    bad_grads, bad_out = run(q, bad["k"], bad["v"])
    np.testing.assert_array_equal(bad_out[:, :3], out[:, :3])
    assert np.isnan(bad_out[:, 3:]).all()
    np.testing.assert_array_equal(bad_grads[0][:, :3], grads[0][:, :3])


@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])
def test_vmap_and_gradient_of_a_gradient(key, implementation):
    q = draws.normal(key, (2, 1, 3, 1, 4))

    def run(implementation):
        def loss(q):
            out = flash_attention(q, q, q, implementation=implementation)
            return jnp.sum(jnp.square(out))

        def norm(q):
            return jnp.sum(jnp.square(jax.grad(loss)(q)))

        return jax.jit(jax.vmap(jax.grad(norm)))(q)

    np.testing.assert_allclose(
        run(implementation), run("reference"), rtol=2e-5, atol=2e-5
    )


def test_every_operand_can_be_mapped_over():
    spec = jax.ShapeDtypeStruct
    q, k = spec((3, 2, 130, 4, 8), jnp.float32), spec((3, 2, 130, 2, 8), jnp.float32)
    lengths, sinks = spec((3, 2), jnp.int32), spec((3, 4), jnp.float32)
    rng = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3))

    def loss(q, k, v, lengths, sinks, rng):
        operands = dict(kv_lengths=lengths, sinks=sinks, dropout_rng=rng)
        return jnp.sum(flash_attention(q, k, v, **operands, dropout_rate=0.1))

    gradients = jax.jit(jax.vmap(jax.grad(loss, (0, 1, 2, 4))))
    traced = gradients.trace(q, k, k, lengths, sinks, rng)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 2


def plain_spec(length, band, **options):
    return AttentionSpec(
        *(1, length, length, 8, 8, 128, 128),
        np.dtype("bfloat16"),
        scale=1.0,
        band=band,
        precision=None,
        bias_shape=None,
        mask_shape=None,
        **options,
    )


@pytest.mark.parametrize("band", [CAUSAL, Band(-3000, 0), Band(-3000, 2000)], ids=str)
def test_blocks_in_which_nothing_is_seen_are_not_fetched(band):
    spec = plain_spec(16384, band)
    plan = Plan.of(spec, (512, 2048, 512), interpret=False)
    nq, nk = plan.count
    seen = {
        (i, j)
        for i in range(nq)
        for j in range(nk)
        if band.meets(i * 512, 512, j * 2048, 2048)
    }
    forward = [plan.by_queries(0, 0, i, j) for i in range(nq) for j in range(nk)]
    backward = [plan.by_keys(0, 0, i, j) for j in range(nk) for i in range(nq)]
    for places in (forward, backward):
        blocks = [(int(i), int(j)) for _, _, i, j in places]
        assert set(blocks) == seen
        # A step at the place of the one before it fetches nothing.
        changes = sum(a != b for a, b in itertools.pairwise([None, *blocks]))
        assert changes == len(seen)


def test_what_the_kernels_refuse():
    x = jnp.zeros((1, 3, 1, 4))
    half = x.astype(jnp.float16)
    for args, options, match in (
        ((half, half, half), {}, "not float16"),
        ((x, x, x), {"precision": "high"}, "no precision HIGH"),
        ((jnp.zeros((1, 3, 1, 513)),) * 3, {}, "no heads of 513 features"),
    ):
        with pytest.raises(NotImplementedError, match=match):
            flash_attention(*args, implementation="pallas_tpu", **options)
        flash_attention(*args, implementation=("pallas_tpu", "xla"), **options)


@pytest.mark.parametrize(
    ("dtype", "precision", "kernel"),
    [
        ("float32", None, True),
        ("float32", "high", False),
        ("bfloat16", "high", True),  # its products are exact
    ],
)
def test_the_default_on_a_tpu_is_the_kernel(dtype, precision, kernel):
    implementation = TABLE.implementations["pallas_tpu"]
    assert implementation.platforms == ("tpu",)
    x = jax.ShapeDtypeStruct((1, 128, 1, 128), dtype)
    with jax.default_matmul_precision(precision):
        traced = jax.jit(flash_attention).trace(x, x, x)
    lowered = traced.lower(lowering_platforms=("tpu",))
    assert ("tpu_custom_call" in lowered.as_text()) == kernel


def test_the_default_on_a_tpu_lowers_in_shard_map():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    f = jax.shard_map(
        lambda q: flash_attention(q, q, q), mesh=mesh, in_specs=P("d"), out_specs=P("d")
    )
    x = jax.ShapeDtypeStruct((1, 128, 1, 128), jnp.float32)
    gradient = jax.jit(jax.grad(lambda q: jnp.sum(f(q))))
    lowered = gradient.trace(x).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("tpu_custom_call") == 2
