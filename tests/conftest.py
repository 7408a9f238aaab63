"""Settings of every test: strict promotion, and a key for each test."""

import zlib

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def key(request):
    """A random key of the test's own, the same in every run."""
    return jax.random.key(zlib.crc32(request.node.nodeid.encode()))
