"""What replaces a result that is not finite, in the form of each platform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opsnn_jax.kernels.finite import exact_by_condition, exact_in_place


@pytest.mark.parametrize("choose", [exact_by_condition, exact_in_place])
@pytest.mark.parametrize("finite", [True, False])
def test_exact_where_not_finite(choose, finite):
    def exact(a, b):
        return a + b, a * b

    @jax.jit
    def run(finite, y, a, b):
        return choose(exact, finite, y, a, b)

    y, a, b = (jnp.zeros(2), jnp.ones(2)), jnp.arange(2.0), jnp.full(2, 3.0)
    expected = y if finite else ([3, 4], [0, 3])
    got = run(jnp.array(finite), y, a, b)
    np.testing.assert_array_equal(got, np.stack(expected))
