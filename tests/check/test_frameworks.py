"""Ops against PyTorch, where it is installed."""

import builtins
import warnings

import jax
import jax.numpy as jnp
import pytest
from planted_ops import conv

from opsnn_jax.check import compare_frameworks


def attention(q, k, v, *, bias=None, mask=None, scale=None, is_causal=False):
    return jax.nn.dot_product_attention(
        q, k, v, bias, mask, scale=scale, is_causal=is_causal
    )


def layer_norm(x, scale, bias, *, eps):
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    normal = centred * jax.lax.rsqrt(variance + eps)
    return normal * jnp.broadcast_to(scale, x.shape) + jnp.broadcast_to(bias, x.shape)


OPS = {
    "conv1d": conv,
    "conv2d": conv,
    "conv3d": conv,
    "flash_attention": attention,
    "layer_norm": layer_norm,
}


@pytest.fixture
def torch():
    # Importing PyTorch may warn about the host; that is not ours to judge.
    with warnings.catch_warnings(action="ignore"):
        return pytest.importorskip("torch", reason="pip install torch==2.13.0 (CPU)")


@pytest.mark.parametrize("name", OPS)
def test_plain_jax_means_the_same_as_pytorch(torch, name):
    compare_frameworks(name, op=OPS[name]).raise_if_failed()


def test_mistaken_padding_is_found(torch):
    def lower(x, w, b=None, *, padding="SAME", **options):
        padding = "SAME_LOWER" if padding == "SAME" else padding
        return conv(x, w, b, padding=padding, **options)

    result = compare_frameworks("conv1d", op=lower)
    failed = {row.name.split(":")[0] for row in result.rows if not row.ok}
    # The side of the odd pad shows only where the pads are uneven.
    assert "even kernel" in failed and "same" not in failed


def test_missing_scale_is_found(torch):
    def unscaled(q, k, v, *, scale=None, **options):
        return attention(q, k, v, scale=scale or 1.0, **options)

    result = compare_frameworks("flash_attention", op=unscaled)
    failed = {row.name.split(":")[0] for row in result.rows if not row.ok}
    assert "plain" in failed and "scale" not in failed


def test_without_pytorch_it_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name == "torch":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match="pip install torch"):
        compare_frameworks("conv2d", op=conv)


def test_unknown_name_is_refused():
    with pytest.raises(ValueError, match="name must be one of"):
        compare_frameworks("conv4d")
