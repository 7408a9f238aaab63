"""Skips what has no compiler here, with the reason."""

import pytest

from opsnn_jax.aot.targets import get_target
from opsnn_jax.aot.toolchain import MissingToolchain, require_toolchain


@pytest.fixture
def compiles_for():
    """`compiles_for(target)` skips the test where that target has no compiler."""

    def check(target):
        try:
            require_toolchain(get_target(target))
        except MissingToolchain as missing:
            pytest.skip(str(missing))

    return check
