"""A small decoder-only transformer with pre-norm blocks (GPT-2), in flax nnx.

Matrix products compute in `dtype`; layer norms and logits come out in fp32 where it
matters: statistics are fp32, the residual stream is `dtype`, logits are fp32. The
embedding is the last layer's weight too (Press and Wolf, 2017).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from opsnn_jax.nn.nnx import MultiHeadAttention


class GPT(nnx.Module):
    """Tokens `(B, T)` int32 to logits `(B, T, vocabulary)` fp32, T up to `length`.

    `dtypes` gives the dtype of a layer by its path, `blocks/0/mlp_norm` say, in place
    of `dtype`.
    """

    def __init__(
        self,
        vocabulary: int,
        length: int,
        *,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        dropout: float = 0.0,
        dtype: Any = jnp.float32,
        dtypes: Callable[[str], Any] | None = None,
        rngs: nnx.Rngs,
    ):
        of = dtypes or (lambda path: dtype)
        # The last layer computes in what its weight, the embedding, does.
        self.length, self.dtype = length, of("tokens")
        embed = {"embedding_init": nnx.initializers.normal(0.02), "rngs": rngs}
        self.tokens = nnx.Embed(vocabulary, width, dtype=of("tokens"), **embed)
        self.positions = nnx.Embed(length, width, dtype=of("positions"), **embed)
        self.dropout = nnx.Dropout(dropout)
        self.blocks = nnx.List(
            [
                Block(width, heads, dropout, lambda p, i=i: of(f"blocks/{i}/{p}"), rngs)
                for i in range(layers)
            ]
        )
        self.norm = nnx.LayerNorm(width, dtype=of("norm"), rngs=rngs)

    def __call__(
        self, tokens: jax.Array, *, dropout_key: jax.Array | None = None
    ) -> jax.Array:
        """Logits of the token after each. With a key, dropout is on."""
        rngs = None if dropout_key is None else nnx.Rngs(dropout_key)
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))[None]
        x = self.dropout(x, deterministic=rngs is None, rngs=rngs)
        for block in self.blocks:
            x = block(x, rngs)
        # The fp32 sum of a product in `dtype` stays fp32: rounded logits cost accuracy.
        return jnp.einsum(
            "btd,vd->btv",
            self.norm(x).astype(self.dtype),
            self.tokens.embedding[...].astype(self.dtype),
            preferred_element_type=jnp.float32,
        )


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float,
        dtypes: Callable[[str], Any],
        rngs: nnx.Rngs,
    ):
        def make(name):
            return {"dtype": dtypes(name), "rngs": rngs}

        self.attention_norm = nnx.LayerNorm(width, **make("attention_norm"))
        self.attention = MultiHeadAttention(
            heads, width, decode=False, **make("attention")
        )
        self.mlp_norm = nnx.LayerNorm(width, **make("mlp_norm"))
        self.up = nnx.Linear(width, 4 * width, **make("up"))
        self.down = nnx.Linear(4 * width, width, **make("down"))
        self.dropout = nnx.Dropout(dropout)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs | None) -> jax.Array:
        off = {"deterministic": rngs is None, "rngs": rngs}
        y = self.attention(self.attention_norm(x), is_causal=True)
        x = x + self.dropout(y, **off)
        y = self.down(nnx.gelu(self.up(self.mlp_norm(x))))
        return x + self.dropout(y, **off)


def generate(
    model: GPT,
    prompt: jax.Array,
    count: int,
    key: jax.Array,
    *,
    temperature: float = 0.8,
) -> jax.Array:
    """Continues a text.

    Args:
      prompt: (T,) int32, at least one token.
      count: how many tokens are drawn.
      key: of the draw.
      temperature: divides the logits; towards 0 the likeliest token is taken.

    Returns:
      (T + count,) int32, the prompt first. The model sees the last `model.length`.
    """
    graph, weights = nnx.split(model)
    length = model.length
    # A window of fixed size, filled from the left: one compilation. What lies behind
    # the last token cannot be seen by it, since attention is causal.
    seen = prompt[-length:]
    window = jnp.zeros((length,), jnp.int32).at[: len(seen)].set(seen)

    def draw(carry, key):
        window, filled = carry
        logits = nnx.merge(graph, weights)(window[None])[0, filled - 1]
        token = jax.random.categorical(key, logits / temperature).astype(jnp.int32)
        full = filled == length
        window = jnp.where(full, jnp.roll(window, -1), window)
        place = jnp.where(full, length - 1, filled)
        return (window.at[place].set(token), place + 1), token

    _, drawn = jax.jit(lambda c, keys: jax.lax.scan(draw, c, keys))(
        (window, jnp.int32(len(seen))), jax.random.split(key, count)
    )
    return jnp.concatenate([prompt, drawn])
