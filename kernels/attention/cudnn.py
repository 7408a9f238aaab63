"""Attention by NVIDIA's cuDNN, as the public `jax.nn.dot_product_attention` has it.

Its gradient comes with it: the statistics that cuDNN's forward pass saves for its
backward pass leave JAX only rounded to q's dtype, so there are no two passes to give to
an op's own rule. What is refused here is what cuDNN, JAX's way to it, or both cannot do
as this library means it.
"""

import jax
from jax import lax

from .spec import AttentionSpec, refuses_unknown

# Of the A100, and of Hopper, from which on heads may have twice the features.
_LEAST_CAPABILITY, _WIDE_CAPABILITY = 80, 90


def refuses(spec: AttentionSpec) -> str | None:
    """Why cuDNN cannot do a call, or None."""
    sizes = dict(B=spec.batch, T=spec.q_len, S=spec.kv_len)
    reasons = (
        refuses_unknown(**sizes),
        _refuses_options(spec),
        _refuses_heads(spec),
    )
    reason = next((r for r in reasons if r is not None), None)
    # Of sizes that are not known the band cannot be told.
    return _refuses_band(spec) if reason is None else reason


def unprepared() -> str | None:
    """Why it cannot be compiled in this process, or None."""
    capability = _capability()
    if capability is None:
        return "needs an NVIDIA GPU with cuDNN, and this process has none"
    if capability < _LEAST_CAPABILITY:
        return f"needs compute capability 8.0, not {capability / 10}"
    return None


def attend(spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """out (B, T, N, H) of `dtype`; JAX can differentiate it once, in reverse.

    Args:
      q, k, v: as the passes of `AttentionSpec` take them.
    """
    left = spec.band.lower
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=spec.scale,
        is_causal=not spec.band.full,
        local_window_size=None if left is None else (-left, 0),
        implementation="cudnn",
    )


def _capability() -> int | None:
    """The compute capability of this process's NVIDIA GPU, times ten, or None.

    Where there is such a GPU there is cuDNN: JAX does not start one without.
    """
    try:
        (device, *_) = jax.local_devices(backend="cuda")
    except RuntimeError:
        return None
    return round(10 * float(device.compute_capability))


def _refuses_options(spec):
    options = {
        "bias": spec.bias_shape is not None,
        "mask": spec.mask_shape is not None,
        "lengths or segments": spec.ids,
        "positions": spec.positions,
        "sinks": spec.sinks,
        "softcap": spec.softcap is not None,
        "dropout": spec.dropout_rate > 0,
    }
    for name, given in options.items():
        if given:
            return f"takes no {name}"
    if spec.returns_lse:
        return "returns no lse: JAX rounds it to q's dtype and gives it no gradient"
    if spec.precision not in (None, lax.Precision.DEFAULT):
        return f"takes the default precision only, not {spec.precision}"
    if spec.dtype.name not in ("bfloat16", "float16"):
        return f"takes bfloat16 and float16, not {spec.dtype}"
    return None


def _refuses_heads(spec):
    if spec.v_dim != spec.qk_dim:
        return (
            f"takes values of as many features as keys, {spec.qk_dim}, not {spec.v_dim}"
        )
    if spec.qk_dim % 8 or spec.qk_dim == 0:
        return f"takes heads of 8, 16, 24, ... features, not {spec.qk_dim}"
    capability = _capability()
    narrow = capability is not None and capability < _WIDE_CAPABILITY
    most = 128 if narrow else 256
    if spec.qk_dim > most:
        return f"takes no heads of {spec.qk_dim} features, only of up to {most}"
    return None


def _refuses_band(spec):
    lower, upper = spec.band.lower, spec.band.upper
    if spec.band.full:
        return None
    if upper != 0 or (lower is not None and lower > 0):
        # The diagonal of "bottom_right" is another upper bound, too.
        return (
            "takes only what is causal of what hides keys, with the diagonal at the "
            "first key (top_left) and windows to the left"
        )
    if lower is not None and spec.q_len > spec.kv_len:
        # Behind the last key a query may see none, and cuDNN refuses all of these.
        return (
            f"takes no window over more queries than keys, {spec.q_len} and "
            f"{spec.kv_len}"
        )
    return None
