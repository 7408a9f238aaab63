"""The cases by which the library's ops around attention are checked."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from .contract import OpCase, draw


def attention_case(
    name: str,
    sizes: tuple[int, int, int, int, int, int],
    *,
    bias: bool = False,
    transforms: bool = False,
    **options: Any,
) -> OpCase:
    """A case of attention, for sizes (B, T, S, N, K, H)."""
    b, t, s, n, k, h = sizes

    def make_args(key, dtype):
        shapes = [(b, t, n, h), (b, s, k, h), (b, s, k, h)]
        if bias:
            shapes.append((b, n, t, s))
        return draw(key, dtype, shapes)

    return OpCase(name, make_args, options, transforms)


def attention_cases() -> tuple[OpCase, ...]:
    return (
        attention_case("plain", (2, 9, 9, 2, 2, 8), transforms=True),
        attention_case("causal", (1, 17, 17, 2, 2, 8), is_causal=True),
        attention_case("cross", (1, 5, 13, 2, 2, 4)),
        attention_case("grouped", (1, 8, 8, 4, 2, 8)),
        attention_case("one head for all", (1, 8, 11, 3, 1, 8), is_causal=True),
        attention_case("bias", (1, 7, 6, 2, 2, 8), bias=True),
        attention_case("scale", (1, 6, 6, 1, 1, 16), scale=0.5),
        attention_case("window", (1, 9, 9, 1, 1, 8), window=(2, 1)),
        attention_case(
            "bottom right",
            (1, 5, 9, 2, 1, 8),
            is_causal=True,
            causal_align="bottom_right",
        ),
        attention_case(
            "lengths", (3, 5, 9, 1, 1, 8), kv_lengths=np.array([9, 4, 0], np.int32)
        ),
        attention_case(
            "segments",
            (1, 8, 8, 1, 1, 8),
            is_causal=True,
            q_segment_ids=np.array([0, 0, 0, 1, 1, 1, 1, 2], np.int32),
        ),
        attention_case("softcap", (1, 6, 6, 2, 2, 8), softcap=1.5),
        attention_case(
            "sinks", (1, 6, 6, 2, 2, 8), sinks=np.array([0.5, -1.0], np.float32)
        ),
        attention_case("block + 1", (1, 129, 129, 1, 1, 8), is_causal=True),
        attention_case("one token", (1, 1, 1, 1, 1, 1)),
        attention_case("no keys", (1, 3, 0, 1, 1, 4)),
        attention_case("empty", (0, 4, 4, 2, 2, 4)),
    )


def attention_factor(name, dtype, case) -> float:
    """The reference keeps the softmax and the output in float32 for its backward pass.

    Flash attention makes the softmax again as exp(score - lse): roundings of the score,
    of lse and of exp where the reference has one. In half precision it takes delta from
    an output that was rounded, which all keys of a row share, and a TPU's matrix unit
    takes the softmax and the scaled queries rounded as well.
    """
    return 3.0


def decode_cases() -> tuple[OpCase, ...]:
    def case(name, sizes, lengths, **options):
        lengths = np.array(lengths, np.int32)
        return attention_case(name, sizes, lengths=lengths, **options)

    return (
        case("one token", (2, 1, 12, 4, 2, 8), (12, 5), transforms=True),
        # Enough keys and features that the largest error is not one element's chance.
        case("three parts", (2, 2, 12, 4, 2, 8), (7, 10), splits=3),
        case("window", (1, 1, 16, 2, 2, 4), (13,), window=4, splits=2),
    )


def plain_decode(q, k_cache, v_cache, *, lengths, window=None, splits=1):
    """attention_decode without parts, and with no two heads in one product."""
    from opsnn_jax import flash_attention

    del splits
    tokens = q.shape[1]
    return flash_attention(
        q,
        k_cache,
        v_cache,
        window=None if window is None else (window, 0),
        q_positions=lengths[:, None] - tokens + np.arange(tokens, dtype=np.int32),
        kv_positions=np.arange(k_cache.shape[1], dtype=np.int32),
        implementation="reference",
    )


def qkv_cases() -> tuple[OpCase, ...]:
    def case(name, x_shape, w_shape, transforms=False, **options):
        scale = w_shape[0] ** -0.5

        def make_args(key, dtype):
            shapes = (x_shape, w_shape, w_shape[1:])
            return draw(key, dtype, shapes, (1, scale, 1))

        return OpCase(name, make_args, options, transforms)

    return (
        case("three of a size", (2, 5, 6), (6, 3, 2, 4), transforms=True),
        case("grouped, turned", (3, 7), (7, 8, 4), kv_heads=2, rotary=True),
    )


def plain_qkv(x, w_qkv, b_qkv, *, kv_heads=None, rotary=False):
    """fused_qkv as a product for each of the three."""
    w = w_qkv.reshape(w_qkv.shape[0], -1, w_qkv.shape[-1])
    b = b_qkv.reshape(w.shape[1:])
    kv_heads = kv_heads or w.shape[1] // 3
    ends = (w.shape[1] - 2 * kv_heads, w.shape[1] - kv_heads)
    q, k, v = (
        jnp.einsum("...d,dnh->...nh", x, part) + bias
        for part, bias in zip(
            jnp.split(w, ends, axis=1), jnp.split(b, ends, axis=0), strict=True
        )
    )
    return (plain_rotary(q), plain_rotary(k), v) if rotary else (q, k, v)


def rotary_cases() -> tuple[OpCase, ...]:
    def case(name, shape, transforms=False, **options):
        def make_args(key, dtype):
            return draw(key, dtype, (shape,))

        return OpCase(name, make_args, options, transforms)

    return (
        case("plain", (2, 5, 3, 8), transforms=True),
        case("part", (7, 2, 10), rotary_dim=6, base=500.0),
        case("none", (2, 0, 1, 4)),
    )


def plain_rotary(x, *, base=10000.0, rotary_dim=None):
    """rotary_embedding by a matrix of 2 x 2 for each pair, made in float64."""
    turned = rotary_dim or x.shape[-1]
    half = turned // 2
    angles = np.outer(np.arange(x.shape[-3]), base ** (-np.arange(half) / half))
    cos, sin = np.cos(angles), np.sin(angles)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    turn = jnp.asarray([[cos, -sin], [sin, cos]], wide)
    pairs = x[..., :turned].astype(wide).reshape(*x.shape[:-1], 2, half)
    y = jnp.einsum("jkti,...tnki->...tnji", turn, pairs)
    y = y.reshape(*x.shape[:-1], turned).astype(x.dtype)
    return jnp.concatenate([y, x[..., turned:]], axis=-1)
