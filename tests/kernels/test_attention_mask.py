"""A band answers for blocks what it says element by element."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from opsnn_jax.kernels.attention.mask import Band
from opsnn_jax.kernels.attention.spec import AttentionSpec
from opsnn_jax.kernels.attention.tiles import Tiles

BANDS = [
    Band(),
    Band(upper=0),
    Band(upper=3),
    Band(lower=-2),
    Band(lower=-2, upper=0),
    Band(lower=1, upper=2),
    Band(lower=2, upper=-2),
]


def visible(band, t, s):
    return np.asarray(band.visible(jnp.arange(t)[:, None], jnp.arange(s)[None, :]))


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_blocks_agree_with_elements(band):
    seen = visible(band, 9, 11)
    starts = itertools.product(range(0, 8, 3), range(0, 9, 4), (1, 2, 3), (1, 3))
    for row, col, rows, cols in starts:
        part = seen[row : row + rows, col : col + cols]
        rows, cols = part.shape
        covers = bool(band.covers(row, rows, col, cols))
        meets = bool(band.meets(row, rows, col, cols))
        assert covers == part.all()
        # An empty band has no block to skip by its bounds alone.
        assert meets == part.any() or (meets and band == Band(lower=2, upper=-2))


@pytest.mark.parametrize("a, b", list(itertools.combinations(BANDS, 2)), ids=str)
def test_intersection(a, b):
    want = visible(a, 7, 8) & visible(b, 7, 8)
    np.testing.assert_array_equal(visible(a & b, 7, 8), want)


def test_only_a_band_without_bounds_is_full():
    assert [band.full for band in BANDS] == [True] + [False] * (len(BANDS) - 1)


def test_causal_tiles_are_a_triangle():
    spec = AttentionSpec(
        *(1, 64, 64, 1, 1, 8, 8), jnp.dtype("float32"), 1.0, Band(upper=0), *[None] * 3
    )
    tiles = Tiles.of(spec, (16, 16))
    assert tiles.full == tuple((i, j) for i in range(4) for j in range(i))
    assert tiles.partial == tuple((i, i) for i in range(4))
