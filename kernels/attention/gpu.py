"""Flash attention for NVIDIA GPUs, in Pallas through Triton: one kernel forward, two
backward, and one for the gradient of a bias.

JAX from 0.11 on warns that it will lose this route. Once it has, importing
`jax.experimental.pallas.triton` fails, and dispatch leaves these kernels out.
"""

import math

import jax
import jax.numpy as jnp

from . import gpu_device
from .gpu_backward import key_gradients, query_gradient
from .gpu_bias import bias_gradient
from .gpu_forward import forward
from .gpu_plan import Plan
from .spec import AttentionSpec, in_log2, refuses_unknown

# The gradients of larger heads do not fit into the registers.
_MOST_FEATURES = 256

# Triton counts the elements of a bias or mask in 31 bits.
_MOST_SCORES = 2**31

# Of the A100: earlier ones have no bfloat16 and no asynchronous loads.
_LEAST_CAPABILITY = 80


def refuses(spec: AttentionSpec) -> str | None:
    """Why the kernels cannot do a call, or None."""
    sizes = dict(B=spec.batch, T=spec.q_len, S=spec.kv_len)
    if (reason := refuses_unknown(**sizes)) is not None:
        return reason
    features = max(spec.qk_dim, spec.v_dim)
    if spec.dtype.name not in ("float32", "bfloat16", "float16"):
        return f"takes float32, bfloat16 and float16, not {spec.dtype}"
    if spec.qk_dim == 0:
        return "takes no heads of size 0"
    if features > _MOST_FEATURES:
        return f"takes no heads of {features} features"
    for name, shape in (("bias", spec.bias_shape), ("mask", spec.mask_shape)):
        if shape is not None and math.prod(shape) >= _MOST_SCORES:
            return f"takes no {name} of {math.prod(shape)} elements"
    return None


def unprepared() -> str | None:
    """Why they cannot be compiled in this process, or None."""
    try:
        capability = gpu_device.capability()
    except ValueError:
        return (
            "is compiled for one kind of GPU, and this process has none: tell it with "
            "jax.sharding.use_abstract_mesh"
        )
    if capability is not None and capability < _LEAST_CAPABILITY:
        return f"needs compute capability 8.0, not {capability / 10}"
    return None


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
    lse = jnp.where(lse == -jnp.inf, jnp.inf, in_log2(lse))
    arrays, inputs = (q, k, v, dout, lse, delta), _inputs(spec, extra)
    dq = query_gradient(Plan.of(spec, "dq", interpret, block), arrays, inputs)
    dk, dv = key_gradients(Plan.of(spec, "dkv", interpret, block), arrays, inputs)
    if spec.bias_shape is None:
        return dq, dk, dv
    dbias = bias_gradient(Plan.of(spec, "dbias", interpret, block), arrays, inputs)
    return dq, dk, dv, dbias.astype(extra[0].dtype)


def _inputs(spec, extra):
    """The operands as kernels take them: bias and mask (b n, t, s); sinks in units of
    log 2."""
    extra = spec.split(extra)
    sinks = extra.sinks
    bias, mask = (
        x if x is None else x.reshape(-1, *x.shape[2:])
        for x in (extra.bias, extra.mask)
    )
    if bias is not None and bias.dtype == jnp.float64:
        bias = bias.astype(jnp.float32)  # scores are no wider
    if sinks is not None:
        sinks = sinks.astype(jnp.float32)
        sinks = jnp.where(sinks == -jnp.inf, sinks, in_log2(sinks))
    return extra._replace(bias=bias, mask=mask, sinks=sinks)
