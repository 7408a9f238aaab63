"""Settings of every test: strict promotion, four CPU devices, a key for each test."""

import os
import zlib

import jax
import pytest

# Read when the first backend starts, which importing JAX does not do.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def key(request):
    """A random key of the test's own, the same in every run."""
    return jax.random.key(zlib.crc32(request.node.nodeid.encode()))
