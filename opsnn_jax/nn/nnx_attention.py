"""flax.nnx's attention module, computed by flash_attention."""

import functools

import jax
from flax import nnx
from flax.nnx.nn import dtypes
from flax.typing import Array, Dtype, PrecisionLike, PromoteDtypeFn

from opsnn_jax.dispatch import Requested
from opsnn_jax.nn.attention import attend, can_attend


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Dtype | None = None,
    precision: PrecisionLike = None,
    module: nnx.Module | None = None,
    promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
    is_causal: bool = False,
    implementation: Requested = None,
) -> jax.Array:
    """`flax.nnx.dot_product_attention` by flash_attention: an `attention_fn`.

    The arguments are flax's, and `implementation` is that of flash_attention. What
    needs the attention weights themselves (dropout that is on, `module` to sow them
    into) is computed by flax. Elsewhere a query whose every key is masked gives 0 where
    flax gives the mean of the values.
    """
    weights_wanted = (dropout_rate > 0.0 and not deterministic) or module is not None
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    if weights_wanted or not can_attend(query, key, value, bias, precision):
        return nnx.dot_product_attention(
            query,
            key,
            value,
            bias,
            mask,
            broadcast_dropout,
            dropout_rng,
            dropout_rate,
            deterministic,
            dtype,
            precision,
            module,
            promote_dtype,
            is_causal,
        )
    return attend(
        query,
        key,
        value,
        bias,
        mask,
        is_causal=is_causal,
        precision=precision,
        implementation=implementation,
    )


class MultiHeadAttention(nnx.MultiHeadAttention):
    """`flax.nnx.MultiHeadAttention` computed by flash_attention.

    Arguments, parameters and their initial values are flax's, so its checkpoints load.
    """

    @functools.wraps(nnx.MultiHeadAttention.__init__)
    def __init__(self, *args, **kwargs):
        kwargs.setdefault("attention_fn", dot_product_attention)
        super().__init__(*args, **kwargs)
