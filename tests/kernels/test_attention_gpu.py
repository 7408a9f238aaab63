"""The GPU kernels in Pallas's interpreter, where blocks end in NaN."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_passes import check_passes
from jax.sharding import PartitionSpec as P

from opsnn_jax.kernels.attention import gpu, gpu_device
from opsnn_jax.kernels.attention.gpu_plan import Plan
from opsnn_jax.kernels.attention.mask import Band
from opsnn_jax.kernels.attention.spec import AttentionSpec
from opsnn_jax.ops.attention import TABLE, flash_attention
from tests import draws

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


@pytest.mark.parametrize(
    "shape, bias_shape, band",
    [
        ((2, 20, 35, 2, 1, 8, 8), (1, 2, 20, 35), CAUSAL),
        ((2, 20, 35, 2, 2, 8, 8), (2, 1, 20, 35), Band(-9, 4)),
        ((2, 20, 35, 2, 2, 8, 5), (1, 2, 1, 35), CAUSAL),
        ((2, 20, 35, 2, 1, 8, 8), (1, 1, 20, 1), Band(lower=7)),
        ((2, 20, 35, 2, 1, 8, 8), (1, 1, 1, 1), Band()),
    ],
    ids=str,
)
def test_the_gradient_of_a_bias_over_several_blocks(key, shape, bias_shape, band):
    bias = draws.normal(key, bias_shape)
    check_passes(key, gpu, shape, band, bias=bias, interpret=True, block=(16, 16))


@pytest.mark.parametrize("precision", [None, jax.lax.Precision.HIGHEST])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("capability", [None, 80, 86, 90])
def test_every_block_fits_into_shared_memory(dtype, precision, capability, monkeypatch):
    monkeypatch.setattr(gpu_device, "capability", lambda: capability)
    limit = gpu_device.shared_memory()
    sizes = 1, 4096, 4096, 2, 2
    full = (1, 2, 4096, 4096)
    for features, bias, mask in itertools.product(
        (8, 64, 128, 256), (None, full), (None, full)
    ):
        spec = AttentionSpec(
            *sizes, features, features, jnp.dtype(dtype), 1.0, CAUSAL, precision,
            bias, mask,
        )  # fmt: skip
        for kernel in ("fwd", "dq", "dkv", "dbias"):
            plan = Plan.of(spec, kernel, interpret=False)
            assert plan.shared_memory(kernel) <= limit
            assert min(plan.block) >= 16


def test_the_gradient_is_the_slope_of_the_function(key):
    # In float32 a step of 0.02 leaves an error of step^2 and one of eps / step.
    arrays = [draws.normal(k, (1, 4, 2, 8)) for k in jax.random.split(key, 5)]
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
    mask, bias = spec((3, 2, 1, 130, 130), bool), spec((3, 4, 1, 130), jnp.float32)
    rng = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3))

    def loss(q, k, v, bias, sinks, mask, lengths, rng):
        operands = dict(bias=bias, mask=mask, kv_lengths=lengths, sinks=sinks)
        options = dict(dropout_rng=rng, dropout_rate=0.1, softcap=2.0)
        return jnp.sum(flash_attention(q, k, v, **operands, **options))

    gradients = jax.vmap(jax.grad(loss, tuple(range(5))))
    text = lower_for_a_gpu(gradients, q, k, k, bias, sinks, mask, lengths, rng)
    assert text.count("xla.gpu.triton") == 4


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
    monkeypatch.setattr(gpu_device, "capability", lambda: 90)
    x = jax.ShapeDtypeStruct((1, 16, 1, 16), jnp.float32)
    platforms = ("cpu", "tpu", "cuda")
    exported = jax.export.export(jax.jit(flash_attention), platforms=platforms)(x, x, x)
    assert "triton" not in exported.mlir_module()
    assert "tpu_custom_call" in exported.mlir_module()


def test_what_the_kernels_refuse():
    spec = jax.ShapeDtypeStruct
    x, long = spec((1, 3, 1, 257), jnp.float32), spec((1, 50_000, 1, 4), jnp.float32)
    for args, match in (
        ((x, x, x), "no heads of 257 features"),
        ((*(long,) * 3, spec((50_000,) * 2, jnp.float32)), "no bias of 2500000000 el"),
        ((*(long,) * 3, None, spec((50_000,) * 2, bool)), "no mask of 2500000000 el"),
    ):
        f = functools.partial(flash_attention, implementation="pallas_gpu")
        with pytest.raises(NotImplementedError, match=match):
            jax.eval_shape(f, *args)
        f = functools.partial(flash_attention, implementation=("pallas_gpu", "xla"))
        jax.eval_shape(f, *args)


@pytest.mark.parametrize(
    "capability, match", [(75, "needs compute capability 8.0, not 7.5"), (80, None)]
)
def test_gpus_before_the_a100_get_another_implementation(
    capability, match, monkeypatch
):
    monkeypatch.setattr(gpu_device, "capability", lambda: capability)
    implementation = TABLE.implementations["pallas_gpu"]
    spec = AttentionSpec(*(1,) * 7, jnp.dtype("float32"), 1.0, Band(), None, None, None)
    assert implementation.refuses_on("cuda", spec, named=False) == match
    assert implementation.refuses_on("cpu", spec, named=True) is None
