"""The XLA tiles: every cut gives the same result, and no array of all scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_passes import check_passes

from opsnn_jax.kernels.attention import xla
from opsnn_jax.kernels.attention.mask import Band
from opsnn_jax.kernels.attention.spec import AttentionSpec
from opsnn_jax.ops.attention import flash_attention
from tests import draws

CAUSAL = Band(upper=0)


@pytest.mark.parametrize(
    "block, band",
    [
        ((8, 16), Band()),
        ((16, 8), CAUSAL),
        ((8, 8), Band(lower=-5, upper=2)),
        ((64, 8), Band(upper=-20)),  # the first 20 queries see no key
        ((8, 64), CAUSAL),
    ],
    ids=str,
)
def test_any_blocks_and_bands(key, block, band):
    check_passes(key, xla, (2, 33, 41, 4, 2, 5, 3), band, block=block)


@pytest.mark.parametrize("lengths", [(7, 9), (8, 8), (1, 17)])
def test_lengths_around_a_block(key, lengths):
    check_passes(key, xla, (1, *lengths, 2, 1, 4, 4), CAUSAL, block=(8, 8))


def test_rows_without_a_key_are_zero_over_several_tiles(key):
    got = check_passes(key, xla, (1, 20, 12, 1, 1, 4, 4), Band(upper=-9), block=(4, 4))
    out, lse, dq, *_ = (np.asarray(x) for x in got)
    assert not out[:, :9].any()
    assert not dq[:, :9].any()
    assert (lse[..., :9] == -np.inf).all()


@pytest.mark.parametrize("segments", [False, True])
def test_queries_of_padding_see_no_key(key, segments):
    # Five queries in two tiles of three; the sixth stands where it would see key 5,
    # and its padded id is 0.
    keys = jax.random.split(key, 4)
    q, k, v, dout = (
        draws.normal(i, (1, n, 1, 4)) for i, n in zip(keys, (5, 8, 8, 5), strict=True)
    )
    spec = AttentionSpec(
        1, 5, 8, 1, 1, 4, 4, jnp.dtype(jnp.float32), 0.5,
        Band() if segments else CAUSAL, None, None, None, ids=segments,
    )  # fmt: skip
    ids = jnp.ones((1, 5), jnp.int32), jnp.array([[1] * 5 + [0] * 3], jnp.int32)
    extra = ids if segments else ()

    @jax.jit
    def grads(k, v):
        out, lse = xla.fwd(spec, q, k, v, *extra, block=(4, 4))
        delta = jnp.sum(out * dout, axis=-1).swapaxes(1, 2)
        return xla.bwd(spec, q, k, v, lse, delta, dout, *extra, block=(4, 4))

    clean, dirty = (
        grads(*(x.at[:, 5:].set(hidden) for x in (k, v))) for hidden in (0.0, np.nan)
    )
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)


@pytest.mark.parametrize("is_causal", [False, True])
def test_no_array_of_all_scores(is_causal):
    """The temporary memory is linear in the length."""
    x = jax.ShapeDtypeStruct((1, 8192, 1, 8), jnp.float32)

    def loss(q, k, v):
        return jnp.sum(flash_attention(q, k, v, is_causal=is_causal))

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile()
    tile = 4 * xla.BLOCK[0] * xla.BLOCK[1]
    operand = 4 * 8192 * 8
    limit = 8 * tile + 24 * operand
    assert limit < 4 * 8192 * 8192 / 8
    assert compiled.memory_analysis().temp_size_in_bytes < limit
