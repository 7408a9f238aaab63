"""Flash attention for TPUs, in Pallas: one kernel forward, one or two backward.

The kernels take arrays (B, N, T, H), so that a block is (positions, features).
"""

import jax
import jax.numpy as jnp
from jax import lax

from .spec import AttentionSpec, in_log2, refuses_unknown
from .tpu_backward import gradients
from .tpu_bias import bias_gradient
from .tpu_forward import forward
from .tpu_plan import (
    BACKWARD,
    FORWARD,
    MOST_SHRINKAGE,
    Plan,
    largest_block,
    shrinkage,
)


def refuses(spec: AttentionSpec) -> str | None:
    """Why the kernels cannot do a call, or None."""
    sizes = dict(B=spec.batch, T=spec.q_len, S=spec.kv_len)
    if (reason := refuses_unknown(**sizes)) is not None:
        return reason
    if spec.dtype.name not in ("float32", "bfloat16"):
        return f"takes float32 and bfloat16, not {spec.dtype}"
    if spec.qk_dim == 0:
        return "takes no heads of size 0"
    if shrinkage(spec) > MOST_SHRINKAGE:
        return f"takes no heads of {max(spec.qk_dim, spec.v_dim)} features"
    if spec.dtype == jnp.float32 and spec.precision == lax.Precision.HIGH:
        return "has no precision HIGH for float32, only DEFAULT and HIGHEST"
    return None


def fwd(
    spec: AttentionSpec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *extra: jax.Array,
    interpret: bool = False,
    block: tuple[int, int, int] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `AttentionSpec`."""
    plan = Plan.of(spec, block or largest_block(spec, FORWARD), interpret)
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    out, lse = forward(plan, q, k, v, plan.inputs(spec.split(extra)))
    return out.swapaxes(1, 2), lse


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
    block: tuple[int, int, int] | None = None,
) -> tuple[jax.Array, ...]:
    """See `AttentionSpec`."""
    plan = Plan.of(spec, block or largest_block(spec, BACKWARD), interpret)
    q, k, v, dout = (x.swapaxes(1, 2) for x in (q, k, v, dout))
    # With +inf a dead row has p = exp2(s - inf) = 0.
    lse = jnp.where(lse == -jnp.inf, jnp.inf, in_log2(lse))[:, :, None]
    arrays = (q, k, v, dout, lse, delta[:, :, None])
    # lse holds all there is to know of the sinks.
    inputs = plan.inputs(spec.split(extra)._replace(sinks=None))
    grads = [x.swapaxes(1, 2) for x in gradients(plan, arrays, inputs)]
    if spec.bias_shape is not None:
        grads.append(bias_gradient(plan, arrays, inputs).astype(extra[0].dtype))
    return tuple(grads)
