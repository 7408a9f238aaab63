"""The library's ops against PyTorch on the CPU, forward and backward.

PyTorch in float64 is the truth and PyTorch in the same dtype the baseline: neither
shares a line with the op, so a mistake in the meaning of an option, in both the op and
our own reference, shows here.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .arguments import refuse_missing_dtype
from .compare import Comparison
from .errors import compare_arrays
from .levels import SAME_MEANING, Limits, limits_of

# Where the library keeps the ops that have a counterpart in PyTorch.
_HOMES = {
    "conv1d": "opsnn_jax.ops.conv",
    "conv2d": "opsnn_jax.ops.conv",
    "conv3d": "opsnn_jax.ops.conv",
    "flash_attention": "opsnn_jax.ops.attention",
    "layer_norm": "opsnn_jax.ops.norm",
}


@dataclass(frozen=True)
class FrameworkCase:
    """One call: argument shapes by name, and the options of the op.

    Attributes:
      booleans: names of the arguments that are masks.
      keywords: names of the arguments that are passed by keyword.
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    options: Mapping[str, Any] = field(default_factory=dict)
    booleans: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()


def compare_frameworks(
    name: str,
    *,
    op: Callable | None = None,
    dtype: Any = "float32",
    level: str | Limits = SAME_MEANING,
    factor: float = 1.0,
    seed: int = 0,
) -> Comparison:
    """Compares an op with its counterpart in PyTorch over its options.

    Args:
      name: `conv1d`, `conv2d`, `conv3d`, `flash_attention` or `layer_norm`.
      op: what to compare; None takes the library's. Its signature is that of the
        library: `conv(x, w, b=None, *, strides, padding, dilation, groups)` with x
        (N, *spatial, C) and w (*kernel, C / groups, O); `flash_attention(q, k, v, *,
        bias, mask, scale, is_causal)` with q (B, T, N, H), k and v (B, S, K, H);
        `layer_norm(x, scale, bias, *, eps)`, over the last axis.
      dtype: float32, bfloat16 or float16.
      level: `L0`, `L1`, `L2` or `Limits`. By default loose enough for sums in another
        order and tight enough for any mistake in what is computed.
      factor: multiplies them.
      seed: of the data.

    Returns:
      A `Comparison`, with rows for the output and each gradient of each case.

    Raises:
      ImportError: without PyTorch, or where the library has no such op.
      ValueError: for an unknown name, or a dtype that JAX does not compute in.
    """
    if name not in _HOMES:
        raise ValueError(
            f"compare_frameworks: name must be one of {', '.join(_HOMES)}; "
            f"got {name!r}."
        )
    refuse_missing_dtype("compare_frameworks", dtype)
    limits, name_of_limits = limits_of(level, "compare_frameworks")
    torch = _torch()
    op = op or _library_op(name)
    cases, theirs = _counterpart(name)
    rows = []
    for case in cases:
        rng = np.random.default_rng(seed)
        data = {key: _data(rng, case, key, dtype) for key in case.shapes}
        ours = _in_jax(op, case, data, seed)
        base = _in_torch(torch, theirs, case, data, seed, dtype)
        true = _in_torch(torch, theirs, case, data, seed, "float64")
        for key in ours:
            arrays = (ours[key], base[key].astype(ours[key].dtype), true[key])
            row = compare_arrays(f"{case.name}: {key}", *arrays, limits, factor)
            rows.append(_with_dtype(row, ours[key], dtype))
    title = f"{name} in {jnp.dtype(dtype)}"
    peer = f"PyTorch {torch.__version__}"
    return Comparison(title, peer, name_of_limits, tuple(rows))


def _torch():
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            "compare_frameworks needs PyTorch: pip install torch==2.13.0 (CPU build)."
        ) from error
    return torch


def _library_op(name):
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"compare_frameworks: the library has no {name}; pass op= with one."
        ) from error


def _with_dtype(row, ours, dtype):
    """The row, failed if our array is not in the dtype that was asked for."""
    if ours.dtype == jnp.dtype(dtype):
        return row
    text = f"is {ours.dtype}, expected {jnp.dtype(dtype)}"
    return dataclasses.replace(row, failures=(*row.failures, text))


def _data(rng, case, key, dtype):
    shape = case.shapes[key]
    if key in case.booleans:
        mask = rng.random(shape) < 0.7
        # A query that sees no key has no defined result in PyTorch.
        mask[..., 0] = True
        return mask
    # Outputs of about size 1, as the standard's constants expect.
    scale = np.prod(shape[:-1]) ** -0.5 if key == "w" else 1.0
    return (rng.standard_normal(shape) * scale).astype(jnp.dtype(dtype))


def _cotangent(seed, shape):
    return np.random.default_rng([seed, 1]).standard_normal(shape).astype(np.float16)


def _in_jax(op, case, data, seed) -> dict[str, np.ndarray]:
    fixed = {k: jnp.asarray(v) for k, v in data.items() if k in case.booleans}
    moving = {k: jnp.asarray(v) for k, v in data.items() if k not in fixed}

    def call(arrays):
        everything = fixed | arrays
        named = {k: everything[k] for k in case.keywords}
        rest = [everything[k] for k in case.shapes if k not in named]
        return op(*rest, **named, **case.options)

    @jax.jit
    def run(arrays):
        out, pull = jax.vjp(call, arrays)
        (gradients,) = pull(jnp.asarray(_cotangent(seed, out.shape), out.dtype))
        return out, gradients

    out, gradients = run(moving)
    found = {"out": out} | {f"d {key}": gradients[key] for key in moving}
    return {key: np.asarray(value) for key, value in found.items()}


def _in_torch(torch, function, case, data, seed, dtype) -> dict[str, np.ndarray]:
    kind = getattr(torch, str(jnp.dtype(dtype)))
    tensors = {}
    for key, value in data.items():
        if key in case.booleans:
            tensors[key] = torch.from_numpy(value)
        else:
            # numpy's float64 holds every value of the narrower dtypes.
            exact = torch.from_numpy(value.astype(np.float64))
            tensors[key] = exact.to(kind).requires_grad_()
    out = function(torch, **tensors, **case.options)
    dy = torch.from_numpy(_cotangent(seed, tuple(out.shape)).astype(np.float64))
    out.backward(dy.to(kind))
    found = {"out": out.detach()}
    found |= {f"d {k}": t.grad for k, t in tensors.items() if t.requires_grad}
    return {key: value.double().numpy() for key, value in found.items()}


def _counterpart(name) -> tuple[tuple[FrameworkCase, ...], Callable]:
    if name == "flash_attention":
        return _ATTENTION, _torch_attention
    if name == "layer_norm":
        return _LAYER_NORM, _torch_layer_norm
    return _conv_cases(int(name[4])), _torch_conv


def _conv_cases(rank: int) -> tuple[FrameworkCase, ...]:
    def case(name, size, kernel, channels, outputs, groups=1, **options):
        shapes = {
            "x": (2, *range(size, size + rank), channels),
            "w": (*(kernel,) * rank, channels // groups, outputs),
            "b": (outputs,),
        }
        return FrameworkCase(name, shapes, options | {"groups": groups})

    uneven = ((2, 0), (0, 3), (1, 1))[:rank]
    crop = ((-1, 1), (0, -2), (1, 0))[:rank]
    return (
        case("same", 6, 3, 4, 5),
        case("valid", 6, 3, 4, 5, padding="VALID"),
        case("stride 2, same", 7, 3, 3, 4, strides=2),
        case("stride 3, valid", 8, 2, 3, 4, strides=3, padding="VALID"),
        case("dilation 2", 8, 3, 3, 4, dilation=2),
        case("stride 2, dilation 2", 9, 3, 2, 3, strides=2, dilation=2),
        case("groups", 5, 3, 6, 4, groups=2),
        case("depthwise", 6, 3, 4, 8, groups=4),
        case("1x1", 5, 1, 6, 4),
        case("even kernel", 6, 2, 3, 4),
        case("uneven pads", 6, 3, 3, 4, padding=uneven),
        case("cropped", 8, 3, 3, 4, padding=crop, strides=2),
    )


def _torch_conv(torch, x, w, b, strides=1, padding="SAME", dilation=1, groups=1):
    rank = x.ndim - 2
    strides = (strides,) * rank
    dilation = (dilation,) * rank
    sizes, kernel = x.shape[1:-1], w.shape[:-2]
    if padding == "SAME":
        padding = tuple(
            _same(n, (k - 1) * d + 1, s)
            for n, k, s, d in zip(sizes, kernel, strides, dilation, strict=True)
        )
    elif padding == "VALID":
        padding = ((0, 0),) * rank
    f = torch.nn.functional
    # F.pad wants the last axis first; it crops where a pad is negative.
    flat = [n for pair in reversed(padding) for n in pair]
    x = f.pad(x.movedim(-1, 1), flat)
    w = w.movedim(-1, 0).movedim(-1, 1)
    conv = (f.conv1d, f.conv2d, f.conv3d)[rank - 1]
    y = conv(x, w, b, stride=strides, dilation=dilation, groups=groups)
    return y.movedim(1, -1)


def _same(size, extent, stride):
    """Pads that give ceil(size / stride) outputs, the odd one behind."""
    total = max((-(-size // stride) - 1) * stride + extent - size, 0)
    return total // 2, total - total // 2


def _attention_case(name, t, s, heads, kv_heads, extra=(), **options):
    shapes = {
        "q": (2, t, heads, 8),
        "k": (2, s, kv_heads, 8),
        "v": (2, s, kv_heads, 8),
    } | {key: (2, heads, t, s) for key in extra}
    masks = tuple(key for key in extra if key == "mask")
    return FrameworkCase(name, shapes, options, masks, tuple(extra))


_ATTENTION = (
    _attention_case("plain", 7, 7, 2, 2),
    _attention_case("cross", 5, 9, 2, 2),
    _attention_case("causal", 9, 9, 2, 2, is_causal=True),
    _attention_case("grouped", 6, 6, 4, 2),
    _attention_case("scale", 6, 6, 2, 2, scale=0.25),
    _attention_case("mask", 6, 7, 2, 2, ("mask",)),
    _attention_case("bias", 6, 7, 2, 2, ("bias",)),
)


def _torch_attention(torch, q, k, v, bias=None, mask=None, scale=None, is_causal=False):
    y = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        attn_mask=bias if bias is not None else mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return y.transpose(1, 2)


_LAYER_NORM = tuple(
    FrameworkCase(
        f"width {n}", {"x": (5, n), "scale": (n,), "bias": (n,)}, {"eps": eps}
    )
    for n, eps in ((8, 1e-5), (33, 1e-5), (127, 1e-3))
)


def _torch_layer_norm(torch, x, scale, bias, eps):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], scale, bias, eps)
