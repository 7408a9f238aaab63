"""Flash attention for NVIDIA GPUs, in Pallas through Triton: one kernel forward, two
backward.

JAX from 0.11 on warns that it will lose this route. Once it has, importing
`jax.experimental.pallas.triton` fails, and dispatch leaves these kernels out.
"""

import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from .gpu_backward import key_gradients, query_gradient
from .gpu_forward import forward
from .gpu_plan import Plan
from .spec import LOG2_E, AttentionSpec

# The gradients of larger heads do not fit into the registers.
_MOST_FEATURES = 256

# Triton counts the elements of a mask in 31 bits.
_MOST_MASK = 2**31

# Of the A100: earlier ones have no bfloat16 and no asynchronous loads.
_LEAST_CAPABILITY = 80


def refuses(spec: AttentionSpec) -> str | None:
    """Why the kernels cannot do a call, or None."""
    features = max(spec.qk_dim, spec.v_dim)
    if spec.dtype.name not in ("float32", "bfloat16", "float16"):
        return f"takes float32, bfloat16 and float16, not {spec.dtype}"
    if spec.qk_dim == 0:
        return "takes no heads of size 0"
    if features > _MOST_FEATURES:
        return f"takes no heads of {features} features"
    if spec.bias_shape is not None:
        return "has no kernel for the gradient of a bias"
    if spec.mask_shape is not None and math.prod(spec.mask_shape) >= _MOST_MASK:
        return f"takes no mask of {math.prod(spec.mask_shape)} elements"
    return None


def unprepared() -> str | None:
    """Why they cannot be compiled in this process, or None."""
    try:
        capability = _capability()
    except ValueError:
        return (
            "is compiled for one kind of GPU, and this process has none: tell it with "
            "jax.sharding.use_abstract_mesh"
        )
    if capability is not None and capability < _LEAST_CAPABILITY:
        return f"needs compute capability 8.0, not {capability / 10}"
    return None


def _capability():
    """That of the GPU to compile for, times ten; None if it need not be known."""
    if hasattr(plgpu, "get_gpu_info"):
        return plgpu.get_gpu_info().compute_capability
    # JAX 0.10 compiles for whatever GPU there is in the end.
    try:
        (device, *_) = jax.local_devices(backend="gpu")
    except RuntimeError:
        return None
    return round(10 * float(device.compute_capability))


def fwd(
    spec: AttentionSpec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *extra: jax.Array,
    interpret: bool = False,
    block: tuple[int, int] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `AttentionSpec`."""
    plan = Plan.of(spec, "fwd", interpret, block)
    return tuple(forward(plan, q, k, v, _inputs(spec, extra)))


def bwd(
    spec: AttentionSpec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    dout: jax.Array,
    *extra: jax.Array,
    interpret: bool = False,
    block: tuple[int, int] | None = None,
) -> tuple[jax.Array, ...]:
    """See `AttentionSpec`."""
    # With +inf a dead row has p = exp2(s - inf) = 0.
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2_E)
    arrays, inputs = (q, k, v, dout, lse, delta), _inputs(spec, extra)
    dq = query_gradient(Plan.of(spec, "dq", interpret, block), arrays, inputs)
    dk, dv = key_gradients(Plan.of(spec, "dkv", interpret, block), arrays, inputs)
    return dq, dk, dv


def _inputs(spec, extra):
    """The operands as kernels take them: the mask as (b n, t, s), sinks float32."""
    extra = spec.split(extra)
    mask, sinks = extra.mask, extra.sinks
    return extra._replace(
        mask=None if mask is None else mask.reshape(-1, *mask.shape[2:]),
        sinks=None if sinks is None else sinks.astype(jnp.float32),
    )
