"""Errors against an fp64 truth, and the double benchmark that judges them."""

import jax.numpy as jnp
import numpy as np


def errors(got, truth) -> dict[str, float]:
    """Largest and rms error, relative to the largest and the rms value of `truth`."""
    got, truth = np.asarray(got, np.float64), np.asarray(truth, np.float64)
    assert got.shape == truth.shape, (got.shape, truth.shape)
    if truth.size == 0:
        return {"max": 0.0, "rms": 0.0}
    difference = got - truth
    scale = {"max": np.abs(truth).max(), "rms": np.sqrt(np.mean(truth**2))}
    error = {"max": np.abs(difference).max(), "rms": np.sqrt(np.mean(difference**2))}
    return {k: float(e / (scale[k] or 1.0)) for k, e in error.items()}


def assert_as_accurate(got, plain, truth, *, factor=2.0, terms=0):
    """Asserts that `got` errs at most `factor` times as much as `plain` does.

    `plain` is the plain formula in the dtype of `got`. Where it is exact, or nearly,
    one rounding to that dtype stands in for its error, and the roundings of a sum in
    fp32 of `terms` terms, which add up like a random walk.
    """
    assert got.dtype == plain.dtype, (got.dtype, plain.dtype)
    one_rounding = float(jnp.finfo(got.dtype).eps) / 2
    one_rounding += float(jnp.finfo("float32").eps) / 2 * terms**0.5
    theirs = errors(plain, truth)
    bounds = {kind: factor * max(e, one_rounding) for kind, e in theirs.items()}
    assert_within(got, truth, bounds)


def assert_within(got, truth, bounds):
    """Asserts that the "max" and "rms" errors of `got` are within their bounds."""
    for kind, error in errors(got, truth).items():
        assert error <= bounds[kind], (
            f"{kind} error {error:.2e} is over its bound {bounds[kind]:.2e}"
        )
