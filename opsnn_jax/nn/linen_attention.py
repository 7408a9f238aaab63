"""flax.linen's attention modules, computed by flash_attention."""

from collections.abc import Callable

import flax.linen as nn
import jax
from flax.linen.dtypes import promote_dtype
from flax.typing import Array, Dtype, PrecisionLike, PRNGKey

from opsnn_jax.dispatch import Requested
from opsnn_jax.nn.attention import attend, can_attend


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: PRNGKey | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Dtype | None = None,
    precision: PrecisionLike = None,
    module: nn.Module | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., Array] | None = None,
    qk_attn_weights_einsum: Callable[..., Array] | None = None,
    attn_weights_value_einsum: Callable[..., Array] | None = None,
    implementation: Requested = None,
) -> jax.Array:
    """`flax.linen.dot_product_attention` by flash_attention: an `attention_fn`.

    The arguments are flax's, and `implementation` is that of flash_attention. What
    needs the attention weights themselves (dropout that is on, `module` to sow them
    into, products of the caller's own) is computed by flax. Elsewhere the softmax is
    always float32, and a query whose every key is masked gives 0 where flax gives the
    mean of the values.
    """
    weights_wanted = (
        (dropout_rate > 0.0 and not deterministic)
        or module is not None
        or einsum_dot_general is not None
        or qk_attn_weights_einsum is not None
        or attn_weights_value_einsum is not None
    )
    query, key, value = promote_dtype(query, key, value, dtype=dtype)
    if weights_wanted or not can_attend(query, key, value, bias, precision):
        return nn.dot_product_attention(
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
            force_fp32_for_softmax,
            einsum_dot_general,
            qk_attn_weights_einsum,
            attn_weights_value_einsum,
        )
    return attend(
        query,
        key,
        value,
        bias,
        mask,
        precision=precision,
        implementation=implementation,
    )


class MultiHeadDotProductAttention(nn.MultiHeadDotProductAttention):
    """`flax.linen.MultiHeadDotProductAttention` computed by flash_attention.

    Fields, parameters and their initial values are flax's, so its checkpoints load.
    """

    attention_fn: Callable[..., Array] = dot_product_attention


class MultiHeadAttention(nn.MultiHeadAttention):
    """`flax.linen.MultiHeadAttention` computed by flash_attention."""

    attention_fn: Callable[..., Array] = dot_product_attention
