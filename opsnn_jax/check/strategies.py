"""Hypothesis strategies for the arguments of ops.

Faults hide at the sizes and values that nobody writes down: 0, 1, primes, one more or
one less than a block; values near the end of the dtype's range, and a few elements a
thousand times larger than the rest. Arrays are drawn as a kind and a seed, so that they
shrink quickly and a failing example is short.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

KINDS = ("normal", "uniform", "shifted", "tiny", "large", "outliers", "zeros")


def _hypothesis():
    try:
        import hypothesis.strategies
    except ImportError as error:
        raise ImportError(
            "opsnn_jax.check.strategies needs hypothesis: pip install hypothesis."
        ) from error
    return hypothesis.strategies


def sizes(
    *, smallest: int = 0, largest: int = 33, blocks: tuple[int, ...] = (8, 16, 32)
):
    """One size: 0, 1, small primes, odd numbers, and blocks less 1, as is and plus 1.

    Args:
      smallest, largest: the range to stay in.
      blocks: block sizes of the kernel under test.

    Raises:
      ValueError: for an empty range.
    """
    if smallest > largest:
        raise ValueError(
            "sizes: smallest must be at most largest; "
            f"got smallest={smallest}, largest={largest}."
        )
    st = _hypothesis()
    edges = [0, 1, 2, 3, 5, 7, 13, 17, 31]
    edges += [b + d for b in blocks for d in (-1, 0, 1)]
    # The ends of the range are edges of their own, and keep the list from being empty.
    edges += [smallest, largest]
    edges = sorted({n for n in edges if smallest <= n <= largest})
    return st.one_of(st.sampled_from(edges), st.integers(smallest, largest))


def shapes(rank: int, **how: Any):
    """A shape of `rank` sizes; `how` is that of `sizes`."""
    return _hypothesis().tuples(*(sizes(**how) for _ in range(rank)))


def dtypes(*names: str):
    """A floating-point dtype: one of `names`, by default float32, bfloat16, float16."""
    names = names or ("float32", "bfloat16", "float16")
    return _hypothesis().sampled_from([jnp.dtype(name) for name in names])


def arrays(shape: Any, dtype: Any, *, kinds: tuple[str, ...] = KINDS):
    """An array of one of `KINDS` of values.

    Args:
      shape: a tuple, or a strategy for one.
      dtype: a dtype, or a strategy for one.
      kinds: `normal`; `uniform` in [-5, 5]; `shifted`, normal with a mean of up to 5;
        `tiny`, within 1e-3; `large`, about the square root of the dtype's largest
        number over the size, so that a sum of products does not overflow; `outliers`,
        normal with one element in a thousand, at least one, 1000 times larger; `zeros`.
    """
    st = _hypothesis()
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ValueError(
            f"arrays: kinds must be some of {', '.join(KINDS)}; got {unknown[0]!r}."
        )
    return st.builds(
        make_array,
        shape if isinstance(shape, st.SearchStrategy) else st.just(tuple(shape)),
        dtype if isinstance(dtype, st.SearchStrategy) else st.just(jnp.dtype(dtype)),
        st.sampled_from(kinds),
        st.integers(0, 2**16),
    )


def make_array(shape: tuple[int, ...], dtype: Any, kind: str, seed: int):
    """The array that `arrays` builds from what it drew. Deterministic."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape)
    if kind == "uniform":
        values = rng.uniform(-5, 5, shape)
    elif kind == "shifted":
        values = rng.uniform(-5, 5) + rng.uniform(0.1, 2) * values
    elif kind == "tiny":
        values = rng.uniform(-1e-3, 1e-3, shape)
    elif kind == "large":
        top = float(jnp.finfo(dtype).max)
        values = values * (top / max(1, values.size)) ** 0.5 / 8
    elif kind == "outliers":
        count = max(1, values.size // 1000)
        values.flat[rng.permutation(values.size)[:count]] *= 1000
    elif kind == "zeros":
        values = np.zeros(shape)
    return jnp.asarray(values.astype(dtype))


def conv_calls(rank: int = 2, dtype: Any = "float32", **how: Any):
    """A call of a convolution, `(x, w, options)`.

    x (N, *spatial, C), w (*kernel, C / groups, O); options holds strides, padding,
    dilation and groups. `how` is that of `sizes`, for the spatial sizes.
    """
    st = _hypothesis()

    @st.composite
    def calls(draw):
        groups = draw(st.sampled_from((1, 1, 2, 3)))
        channels = groups * draw(st.integers(1, 3))
        outputs = groups * draw(st.integers(1, 3))
        spatial = draw(shapes(rank, **{"smallest": 1, "largest": 17} | how))
        kernel = draw(st.tuples(*(st.integers(1, 3),) * rank))
        pair = st.tuples(st.integers(-1, 3), st.integers(-1, 3))
        options = {
            "strides": draw(st.tuples(*(st.integers(1, 3),) * rank)),
            "dilation": draw(st.tuples(*(st.integers(1, 2),) * rank)),
            "padding": draw(
                st.one_of(
                    st.sampled_from(("SAME", "VALID")), st.tuples(*(pair,) * rank)
                )
            ),
            "groups": groups,
        }
        batch = draw(st.sampled_from((1, 2, 3, 0)))
        # Sums of products of large values overflow half precision on any route.
        kinds = tuple(kind for kind in KINDS if kind not in ("large", "outliers"))
        x = draw(arrays((batch, *spatial, channels), dtype, kinds=kinds))
        w = draw(arrays((*kernel, channels // groups, outputs), dtype, kinds=kinds))
        return x, w, options

    return calls()


def attention_calls(dtype: Any = "float32", **how: Any):
    """A call of attention, `(q, k, v, options)`: q (B, T, N, H), k and v (B, S, K, H).

    `options` holds is_causal and scale. `how` is that of `sizes`, for T and S.
    """
    st = _hypothesis()

    @st.composite
    def calls(draw):
        kv_heads, group = draw(st.sampled_from(((1, 1), (2, 1), (1, 3), (2, 2))))
        causal = draw(st.booleans())
        t = draw(sizes(**{"smallest": 1} | how))
        s = t if causal else draw(sizes(**{"smallest": 1} | how))
        batch, width = draw(st.integers(1, 2)), draw(st.sampled_from((1, 3, 8, 16)))
        kinds = ("normal", "uniform", "shifted", "tiny", "outliers", "zeros")
        q = draw(arrays((batch, t, kv_heads * group, width), dtype, kinds=kinds))
        k = draw(arrays((batch, s, kv_heads, width), dtype, kinds=kinds))
        v = draw(arrays((batch, s, kv_heads, width), dtype, kinds=kinds))
        scale = draw(st.sampled_from((None, 1.0, 0.125)))
        return q, k, v, {"is_causal": causal, "scale": scale}

    return calls()
