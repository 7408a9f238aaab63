"""Masks of flash_attention that are described: each is its dense mask, and no more."""

import functools

import attention_truth
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_truth import bf16, check_against_exact, f32, make

from opsnn_jax.ops.attention import flash_attention
from tests import draws

IMPLEMENTATIONS = ["reference", "xla", "pallas_tpu", "pallas_gpu"]


def run(q, k, v, dout, dlse=None, implementation=None, **options):
    """Outputs and gradients of a call, compiled once for all that are alike."""
    dlse = jnp.zeros(q.shape[:-1], f32) if dlse is None else dlse
    static = [(n, x) for n, x in options.items() if not isinstance(x, jax.Array)]
    traced = {n: x for n, x in options.items() if isinstance(x, jax.Array)}
    return attention_truth.run(
        q, k, v, dout, dlse, traced, implementation, tuple(sorted(static))
    )


def check_mask(key, shape, seen, implementation, dtype=f32, **options):
    """The call gives what the formula gives for the dense mask `seen`."""
    arrays = make(key, *shape, dtype=dtype)
    dlse = draws.normal(key, arrays[0].shape[:-1])
    got = run(*arrays, dlse, implementation, **options)
    seen = np.broadcast_to(seen, (shape[0], 1, shape[1], shape[2]))
    check_against_exact(got, (*arrays, None, seen), dlse=dlse)
    dead = ~seen.any(-1)[:, 0]
    for name in ("out", "dq"):
        assert not np.asarray(got[name], np.float32)[dead].any(), name
    assert (np.asarray(got["lse"])[dead] == -np.inf).all()
    for name in ("dk", "dv"):
        assert not np.asarray(got[name], np.float32)[~seen.any(-2)[:, 0]].any(), name


def as_jax(**arrays):
    return {name: jnp.asarray(x, jnp.int32) for name, x in arrays.items()}


def grid(t, s):
    return np.arange(t)[:, None], np.arange(s)[None, :]


each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def each_of(cases, more):
    """Every implementation with `cases`, and the default with `more`."""
    pairs = [(name, case) for name in IMPLEMENTATIONS for case in cases]
    pairs += [("xla", case) for case in more]
    return pytest.mark.parametrize("implementation, case", pairs, ids=str)


# Causal alignment and windows.


@each_of([(2, 5), (5, 2)], [(1, 5), (4, 4)])
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_causal_alignment(key, implementation, case, align):
    t, s = case
    row, col = grid(t, s)
    seen = col <= row + (s - t if align == "bottom_right" else 0)
    options = dict(is_causal=True, causal_align=align)
    check_mask(key, (1, t, s, 2, 1, 4), seen, implementation, **options)


@each_of([(2, 0), (0, 2)], [(0, 0), (1, 1), (None, 1), (1, None), 1, (9, 9)])
def test_window_is_the_band_with_both_ends(key, implementation, case):
    window = case
    left, right = (window, window) if isinstance(window, int) else window
    row, col = grid(6, 7)
    seen = np.ones((6, 7), bool)
    if left is not None:
        seen &= col >= row - left
    if right is not None:
        seen &= col <= row + right
    check_mask(key, (1, 6, 7, 1, 1, 4), seen, implementation, window=window)


@each
def test_window_with_causal_and_alignment(key, implementation):
    row, col = grid(4, 9)
    seen = (col <= row + 5) & (col >= row + 5 - 3)
    options = dict(is_causal=True, causal_align="bottom_right", window=(3, 2))
    check_mask(key, (2, 4, 9, 2, 2, 4), seen, implementation, **options)


def test_a_window_lets_through_nothing_outside_of_it(key):
    q, k, v, _ = make(key, 1, 64, 64, 1, 1, 4)

    def out(v):
        return flash_attention(q, k, v, window=(5, 0))[0, :, 0, 0]

    jacobian = jax.jit(jax.jacrev(out))(v)[:, 0, :, 0, 0]
    row, col = grid(64, 64)
    inside = (col <= row) & (col >= row - 5)
    np.testing.assert_array_equal(np.asarray(jacobian) != 0, inside)


@pytest.mark.parametrize("window", [(40, 0), (0, 500), (300, 300)])
def test_window_over_several_tiles(key, window):
    row, col = grid(600, 700)
    seen = (col >= row - window[0]) & (col <= row + window[1])
    check_mask(key, (1, 600, 700, 1, 1, 8), seen, "xla", window=window)


# Lengths, segments, positions.


@each
@pytest.mark.parametrize("dtype", [f32, bf16])
def test_lengths(key, implementation, dtype):
    q_lengths, kv_lengths = np.array([5, 3, 0]), np.array([2, 0, 9])
    row, col = grid(5, 7)
    seen = (row < q_lengths[:, None, None]) & (col < kv_lengths[:, None, None])
    options = as_jax(q_lengths=q_lengths, kv_lengths=kv_lengths)
    check_mask(key, (3, 5, 7, 2, 1, 4), seen[:, None], implementation, dtype, **options)


@each
def test_bottom_right_is_the_end_of_the_lengths(key, implementation):
    q_lengths, kv_lengths = np.array([4, 2]), np.array([3, 7])
    row, col = grid(4, 8)
    seen = (row < q_lengths[:, None, None]) & (col < kv_lengths[:, None, None])
    seen &= col <= row + (kv_lengths - q_lengths)[:, None, None]
    options = as_jax(q_lengths=q_lengths, kv_lengths=kv_lengths)
    options |= dict(is_causal=True, causal_align="bottom_right")
    check_mask(key, (2, 4, 8, 1, 1, 4), seen[:, None], implementation, **options)


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_lengths_beyond_the_array_are_its_own(key, align):
    q, k, v, dout = make(key, 2, 4, 6, 1, 1, 4)
    options = dict(is_causal=True, causal_align=align)
    got = run(
        q, k, v, dout, **options,
        q_lengths=jnp.array([9, -3]), kv_lengths=jnp.array([100, 2]),
    )  # fmt: skip
    want = run(
        q, k, v, dout, **options,
        q_lengths=jnp.array([4, 0]), kv_lengths=jnp.array([6, 2]),
    )  # fmt: skip
    jax.tree.map(np.testing.assert_array_equal, got, want)


@each
@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_garbage_behind_the_lengths_reaches_nothing(key, implementation, garbage):
    q, k, v, dout = make(key, 1, 6, 7, 2, 1, 4)
    options = dict(q_lengths=jnp.array([4]), kv_lengths=jnp.array([5]))

    def filled(x):
        return (
            q.at[:, 4:].set(x),
            k.at[:, 5:].set(x),
            v.at[:, 5:].set(x),
            dout.at[:, 4:].set(x),
        )

    clean = run(*filled(0.0), implementation=implementation, **options)
    dlse = jnp.zeros((1, 6, 2)).at[:, 4:].set(garbage)
    dirty = run(*filled(garbage), dlse, implementation, **options)
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)


@pytest.mark.parametrize("implementation", ["xla", "pallas_tpu", "pallas_gpu"])
def test_a_query_that_is_nan_reaches_no_key_that_it_does_not_see(key, implementation):
    q, k, v, dout = make(key, 1, 6, 6, 1, 1, 4)
    for bad in ((q.at[:, 2].set(np.nan), dout), (q, dout.at[:, 2].set(np.nan))):
        got = run(bad[0], k, v, bad[1], implementation=implementation, is_causal=True)
        for name in ("dk", "dv"):
            assert np.isnan(got[name][:, :3]).all(), name
            assert np.isfinite(got[name][:, 3:]).all(), name


SEGMENTS = np.repeat([[0, 1, 2], [5, 5, 3]], [3, 4, 2], axis=1)


@each
@pytest.mark.parametrize("causal", [False, True])
def test_segments(key, implementation, causal):
    row, col = grid(9, 9)
    same = SEGMENTS[:, :, None] == SEGMENTS[:, None, :]
    seen = same & ((col <= row) | (not causal))
    options = as_jax(q_segment_ids=SEGMENTS) | dict(is_causal=causal)
    check_mask(key, (2, 9, 9, 2, 1, 4), seen[:, None], implementation, **options)


@each
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_each_segment_is_a_call_by_itself(key, implementation, align):
    lengths = ((2, 3), (4, 1), (1, 5))  # of queries and of keys
    q, k, v, dout = make(key, 1, 7, 9, 2, 1, 4)
    q_ids, kv_ids = (
        jnp.repeat(jnp.arange(3), jnp.array(n), total_repeat_length=sum(n))
        for n in zip(*lengths, strict=True)
    )
    options = dict(is_causal=True, causal_align=align, window=(2, 1))
    got = run(
        q, k, v, dout, implementation=implementation, **options,
        q_segment_ids=q_ids, kv_segment_ids=kv_ids,
    )  # fmt: skip
    t = s = 0
    for rows, cols in lengths:
        part = slice(t, t + rows), slice(s, s + cols)
        arrays = (q[:, part[0]], k[:, part[1]], v[:, part[1]], dout[:, part[0]])
        want = run(*arrays, implementation="reference", **options)
        for name, x in want.items():
            mine = got[name][:, part[name in ("dk", "dv")]]
            np.testing.assert_allclose(mine, x, rtol=1e-5, atol=1e-6, err_msg=name)
        t, s = t + rows, s + cols


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_segments_with_one_key_have_no_gradient_of_scores(key, align):
    starts = np.array([0, 76, 110, 256])
    q_ids = jnp.repeat(jnp.arange(3), jnp.diff(starts), total_repeat_length=256)
    arrays = make(key, 1, 256, 3, 1, 1, 8, dtype=jnp.float16)
    options = dict(q_segment_ids=q_ids, kv_segment_ids=jnp.arange(3))
    got = run(*arrays, is_causal=True, causal_align=align, **options)
    # Of two sums of the same terms; float32 rounds them differently.
    assert np.abs(np.asarray(got["dq"], np.float32)).max() < 1e-6
    assert np.abs(np.asarray(got["dk"], np.float32)).max() < 1e-5
    dout = np.asarray(arrays[3], np.float64)[0]
    for i in range(3):
        first = starts[i] if align == "top_left" else starts[i + 1] - 1
        want = dout[first : starts[i + 1]].sum(0)
        np.testing.assert_allclose(got["dv"][0, i], want, rtol=2e-3)


@each
def test_positions(key, implementation):
    q_positions = np.array([[3, 0, 7, 2], [-1, 5, 5, 9]])
    kv_positions = np.array([4, 1, 0, 7, 2])
    distance = kv_positions[None, None, :] - q_positions[:, :, None]
    seen = (distance <= 0) & (distance >= -4)
    given = as_jax(q_positions=q_positions, kv_positions=kv_positions)
    shape = (2, 4, 5, 2, 1, 4)
    check_mask(key, shape, seen[:, None], implementation, **given, window=(4, 3))
    seen = np.arange(5) <= q_positions[:, :, None]
    del given["kv_positions"]
    check_mask(key, shape, seen[:, None], implementation, **given)


@pytest.mark.parametrize(
    "implementation, parts",
    [
        ("xla", (250, 100, 330, 20)),
        pytest.param("pallas_gpu", (50, 20, 66, 4), marks=pytest.mark.slow),
    ],
)
def test_described_masks_over_several_tiles(key, implementation, parts):
    ids, size = np.repeat(np.arange(4), parts), sum(parts)
    lengths = np.array([size, size // 2])
    row, col = grid(size, size)
    seen = (ids[:, None] == ids) & (col <= row)
    seen = seen & (row < lengths[:, None, None]) & (col < lengths[:, None, None])
    options = as_jax(q_segment_ids=ids, q_lengths=lengths, kv_lengths=lengths)
    options |= dict(is_causal=True)
    shape = (2, size, size, 2, 1, 4)
    check_mask(key, shape, seen[:, None], implementation, **options)
    options |= as_jax(kv_segment_ids=ids)  # another array: the band becomes data
    check_mask(key, shape, seen[:, None], implementation, **options)


def test_described_masks_need_no_array_of_all_scores():
    x = jax.ShapeDtypeStruct((1, 4096, 1, 8), f32)
    ids = jax.ShapeDtypeStruct((1, 4096), jnp.int32)

    def loss(q, k, v, ids):
        options = dict(q_segment_ids=ids, kv_segment_ids=ids + 0)
        return jnp.sum(flash_attention(q, k, v, is_causal=True, **options))

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x, ids).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4096 * 4096 / 2


def test_vmap_and_gradient_of_a_gradient_of_described_masks(key):
    q, k, v, _ = make(key, 2, 5, 7, 1, 1, 4)
    lengths = jnp.array([[3, 7], [1, 5]])

    def loss(lengths, q, implementation):
        options = dict(kv_lengths=lengths, is_causal=True, causal_align="bottom_right")
        out, lse = flash_attention(
            q, k, v, **options, return_lse=True, implementation=implementation
        )
        return jnp.sum(jnp.square(out)) + jnp.sum(jnp.sin(jnp.maximum(lse, -9)))

    def second(implementation):
        def norm(lengths, q):
            gradient = jax.grad(loss, 1)(lengths, q, implementation)
            return jnp.sum(jnp.square(gradient))

        return jax.jit(jax.vmap(jax.grad(norm, 1), (0, None)))(lengths, q)

    np.testing.assert_allclose(second(None), second("reference"), rtol=2e-4, atol=2e-5)


def test_batch_axes(key):
    q, k, v, _ = make(key, 6, 4, 5, 2, 1, 8)
    bias = draws.normal(key, (3, 1, 4, 5))
    lengths = jnp.array([[5, 3, 1], [0, 2, 4]])
    f = jax.jit(functools.partial(flash_attention, is_causal=True, return_lse=True))
    wide = (x.reshape(2, 3, *x.shape[1:]) for x in (q, k, v))
    got = f(*wide, bias, kv_lengths=lengths)
    bias = jnp.concatenate([bias, bias])
    want = f(q, k, v, bias, kv_lengths=lengths.reshape(6))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a.reshape(b.shape), b)
    one = f(q[0], k[0], v[0], bias[0], kv_lengths=lengths[0, 0])
    for a, b in zip(one, want, strict=True):
        np.testing.assert_array_equal(a, b[0])


@pytest.mark.parametrize("sinks", [None, jnp.array([0.5, -1.0])])
def test_lse_where_there_is_no_key(sinks):
    q, k = jnp.ones((1, 3, 2, 4)), jnp.ones((1, 0, 2, 4))
    out, lse = flash_attention(q, k, k, sinks=sinks, return_lse=True)
    want = np.full((1, 3, 2), -np.inf) if sinks is None else sinks
    np.testing.assert_array_equal(lse, np.broadcast_to(want, (1, 3, 2)))
    assert not out.any()
