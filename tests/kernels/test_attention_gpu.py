"""The GPU kernels in Pallas's interpreter, where blocks end in NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_passes import check_passes
from jax.sharding import PartitionSpec as P

from opsnn_jax.kernels.attention import gpu
from opsnn_jax.kernels.attention.mask import Band
from opsnn_jax.kernels.attention.spec import AttentionSpec
from opsnn_jax.ops.attention import TABLE, flash_attention

CAUSAL = Band(upper=0)

# JAX from 0.11 on warns of the Triton route as it lowers for a GPU.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend")


@pytest.mark.parametrize(
    "shape, band, dtype, block",
    [
        ((1, 17, 33, 2, 1, 8, 5), Band(), jnp.float32, (16, 16)),
        ((1, 40, 20, 4, 2, 8, 5), CAUSAL, jnp.bfloat16, (32, 16)),
        ((1, 33, 64, 1, 1, 3, 18), CAUSAL, jnp.float16, (16, 32)),
        ((1, 60, 50, 1, 1, 8, 8), Band(-20, 4), jnp.float32, (16, 16)),
        ((1, 64, 64, 1, 1, 16, 16), Band(-40, 40), jnp.float32, (16, 16)),
        ((1, 40, 10, 1, 1, 8, 8), Band(upper=-30), jnp.float32, (16, 16)),
        ((1, 20, 50, 1, 1, 8, 8), Band(lower=7), jnp.float32, (16, 16)),
        ((2, 1, 1, 1, 1, 1, 1), Band(), jnp.bfloat16, None),
    ],
    ids=str,
)
def test_values(key, shape, band, dtype, block):
    check_passes(key, gpu, shape, band, dtype, interpret=True, block=block)


def test_the_gradient_is_the_slope_of_the_function(key):
    # In float32 a step of 0.02 leaves an error of step^2 and one of eps / step.
    arrays = [jax.random.normal(k, (1, 4, 2, 8)) for k in jax.random.split(key, 5)]
    *args, dout, direction = arrays

    @jax.jit
    def f(*args):
        call = dict(is_causal=True, implementation="pallas_gpu")
        return jnp.vdot(flash_attention(*args, **call), dout)

    grads = jax.grad(f, (0, 1, 2))(*args)
    step = 0.02
    for i, grad in enumerate(grads):
        ends = []
        for sign in (step, -step):
            moved = list(args)
            moved[i] = moved[i] + sign * direction
            ends.append(f(*moved))
        slope = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose(jnp.vdot(grad, direction), slope, atol=3e-3)


def lower_for_a_gpu(f, *specs):
    """The program that `f` becomes on an A100, in a process without a GPU."""
    device = jax.sharding.AbstractDevice(
        device_kind="NVIDIA A100-SXM4-80GB", num_cores=108, platform="cuda"
    )
    mesh = jax.sharding.AbstractMesh(
        (1,), ("gpu",), (jax.sharding.AxisType.Auto,), abstract_device=device
    )
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(f).trace(*specs).lower(lowering_platforms=("cuda",)).as_text()


def test_every_operand_can_be_mapped_over():
    spec = jax.ShapeDtypeStruct
    q, k = spec((3, 2, 130, 4, 8), jnp.float32), spec((3, 2, 130, 2, 8), jnp.float32)
    lengths, sinks = spec((3, 2), jnp.int32), spec((3, 4), jnp.float32)
    mask = spec((3, 2, 1, 130, 130), bool)
    rng = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3))

    def loss(q, k, v, mask, lengths, sinks, rng):
        operands = dict(mask=mask, kv_lengths=lengths, sinks=sinks, dropout_rng=rng)
        out = flash_attention(q, k, v, **operands, dropout_rate=0.1, softcap=2.0)
        return jnp.sum(out)

    gradients = jax.vmap(jax.grad(loss, (0, 1, 2, 5)))
    text = lower_for_a_gpu(gradients, q, k, k, mask, lengths, sinks, rng)
    assert text.count("xla.gpu.triton") == 3


def test_the_default_on_a_gpu_is_the_kernel_also_in_shard_map():
    x = jax.ShapeDtypeStruct((1, 128, 1, 128), jnp.bfloat16)
    f = functools.partial(flash_attention, is_causal=True)
    assert lower_for_a_gpu(f, x, x, x).count("xla.gpu.triton") == 1
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    f = jax.shard_map(
        lambda q: flash_attention(q, q, q), mesh=mesh, in_specs=P("d"), out_specs=P("d")
    )
    gradient = jax.jit(jax.grad(lambda q: jnp.sum(f(q).astype(jnp.float32))))
    text = gradient.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    # JAX from 0.11 on compiles only for a GPU that it knows, and here is none.
    kernels = 3 if gpu.unprepared() is None else 0
    assert text.count("xla.gpu.triton") == kernels


def test_exports_for_all_platforms_at_once(monkeypatch):
    monkeypatch.setattr(gpu, "_capability", lambda: 90)
    x = jax.ShapeDtypeStruct((1, 16, 1, 16), jnp.float32)
    platforms = ("cpu", "tpu", "cuda")
    exported = jax.export.export(jax.jit(flash_attention), platforms=platforms)(x, x, x)
    assert "triton" not in exported.mlir_module()
    assert "tpu_custom_call" in exported.mlir_module()


def test_what_the_kernels_refuse():
    x = jnp.zeros((1, 3, 1, 4))
    for args, options, match in (
        ((jnp.zeros((1, 3, 1, 257)),) * 3, {}, "no heads of 257 features"),
        ((x, x, x, jnp.zeros((3, 3))), {}, "the gradient of a bias"),
    ):
        with pytest.raises(NotImplementedError, match=match):
            flash_attention(*args, implementation="pallas_gpu", **options)
        flash_attention(*args, implementation=("pallas_gpu", "xla"), **options)


@pytest.mark.parametrize(
    "capability, match", [(75, "needs compute capability 8.0, not 7.5"), (80, None)]
)
def test_gpus_before_the_a100_get_another_implementation(
    capability, match, monkeypatch
):
    monkeypatch.setattr(gpu, "_capability", lambda: capability)
    implementation = TABLE.implementations["pallas_gpu"]
    spec = AttentionSpec(*(1,) * 7, jnp.dtype("float32"), 1.0, Band(), None, None, None)
    assert implementation.refuses_on("cuda", spec, named=False) == match
    assert implementation.refuses_on("cpu", spec, named=True) is None
