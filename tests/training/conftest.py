"""What several tests of the training share."""

import jax
import pytest


@pytest.fixture
def quick_compilation():
    """Half the compile time, for tests that judge what is made and not how exactly."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
