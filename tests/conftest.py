"""Settings of every test: strict promotion, four CPU devices, a key for each test.

`make test` compiles without most of XLA's optimizations, which take longer than the
tests. Those of the numbers that a CPU computes are marked `optimized` and compiled as
users do.
"""

import zlib

import jax
import pytest

from tests.compilation import set_flags

set_flags(quick=jax.config.values["jax_disable_most_optimizations"])

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def key(request):
    """A random key of the test's own, the same in every run."""
    return jax.random.key(zlib.crc32(request.node.nodeid.encode()))


def pytest_collection_modifyitems(items):
    # One after another: each change between the two kinds empties JAX's caches.
    items.sort(key=lambda item: item.get_closest_marker("optimized") is not None)


@pytest.fixture(scope="session")
def optimizations_are_off():
    return jax.config.values["jax_disable_most_optimizations"]


@pytest.fixture(autouse=True)
def optimizations(request, optimizations_are_off):
    """Compiles the tests that are marked so as users do; they add `AS_USERS_DO`."""
    off = optimizations_are_off and not request.node.get_closest_marker("optimized")
    # What is compiled does not know which it was.
    if off != jax.config.values["jax_disable_most_optimizations"]:
        jax.clear_caches()
        jax.config.update("jax_disable_most_optimizations", off)
