"""ring_attention over eight devices is flash_attention over the whole sequence."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from opsnn_jax.ops.ring_attention import ring_attention
from tests.compilation import environment_of

X = jnp.ones((1, 3, 2, 4))

PROGRAM = """
import functools
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from opsnn_jax import flash_attention
from opsnn_jax.ops.ring_attention import ring_attention

mesh = jax.make_mesh((8,), ("s",), axis_types=(jax.sharding.AxisType.Auto,))
keys = jax.random.split(jax.random.key(0), 5)
q, dout = (jax.random.normal(k, (2, 16, 4, 8)) for k in keys[:2])
k, v = (jax.random.normal(k, (2, 24, 2, 8)) for k in keys[2:4])
dlse = jax.random.normal(keys[4], (2, 16, 4))
ids = jnp.repeat(jnp.arange(3), jnp.array([5, 9, 2]), total_repeat_length=16)

def check(options, arrays, segments=False, check_vma=True):
    def whole(q, k, v):
        more = dict(q_segment_ids=ids) if segments else {}
        return flash_attention(
            q, k, v, **options, **more, return_lse=True, implementation="reference"
        )

    def shard(q, k, v, ids):
        more = dict(q_segment_ids=ids) if segments else {}
        return ring_attention(
            q, k, v, axis_name="s", **options, **more, return_lse=True
        )

    split = P(None, "s")
    ring = jax.shard_map(
        shard, mesh=mesh, in_specs=(split, split, split, P("s")),
        out_specs=(split, split), check_vma=check_vma,
    )
    results = []
    for f in (whole, lambda *x: ring(*x, ids)):
        out, vjp = jax.vjp(jax.jit(f), *arrays)
        results.append((out, vjp((dout, dlse))))
    for got, want in zip(*map(jax.tree.leaves, results[::-1])):
        np.testing.assert_allclose(got, want, atol=2e-5)

check(dict(is_causal=True, softcap=3.0), (q, k, v))
check(dict(window=(3, 2)), (q, k[:, :16], v[:, :16]))
check(dict(is_causal=True), (q, k[:, :16], v[:, :16]), segments=True, check_vma=False)

for t, s, v_dim in ((0, 8, 4), (8, 0, 4), (8, 8, 0)):
    options = dict(is_causal=True, return_lse=True)
    whole, split = functools.partial(flash_attention, **options), P(None, "s")
    ring = jax.shard_map(
        functools.partial(ring_attention, axis_name="s", **options),
        mesh=mesh, in_specs=split, out_specs=split,
    )
    empty = q[:, :t], k[:, :s], v[:, :s, :, :v_dim]
    for f in (lambda x: x[0], lambda x: jnp.maximum(x[1], -9)):
        results = (
            jax.value_and_grad(lambda *x: f(g(*x)).sum(), (0, 1, 2))(*empty)
            for g in (ring, whole)
        )
        for got, want in zip(*map(jax.tree.leaves, results)):
            assert got.shape == want.shape
            if want.size:  # JAX does not fetch what has none and is sharded
                np.testing.assert_allclose(got, want, atol=2e-5)
print("equal")
"""


def test_eight_devices_give_what_one_gives():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment_of(devices=8),
        capture_output=True,
        text=True,
    )
    assert done.stdout == "equal\n", done.stderr[-2000:]


@pytest.mark.parametrize(
    "arrays, options, error, match",
    [
        ((None,) * 3, {}, TypeError, "q must be an array; got NoneType"),
        ((jnp.ones(3),) * 3, {}, ValueError, "must have the same axes"),
        ((X, X, X), dict(is_causal="yes"), TypeError, "is_causal must be a bool"),
        ((X, X, X), dict(is_causal=1), TypeError, "is_causal must be a bool"),
    ],
)
def test_errors(arrays, options, error, match):
    with pytest.raises(error, match=match):
        ring_attention(*arrays, axis_name="s", **options)


def test_a_window_wider_than_32_bits_is_none():
    mesh = jax.make_mesh((1,), ("s",), axis_types=(jax.sharding.AxisType.Auto,))

    def run(window):
        ring = functools.partial(ring_attention, axis_name="s", window=window)
        split = P(None, "s")
        return jax.shard_map(ring, mesh=mesh, in_specs=split, out_specs=split)(X, X, X)

    np.testing.assert_array_equal(run((2**40, 2**40)), run(None))


def test_the_formula_has_no_ring():
    with pytest.raises(ValueError, match="implementation must be one with passes"):
        ring_attention(None, None, None, axis_name="s", implementation="reference")
