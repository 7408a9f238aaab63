"""sensitivity and precision_sweep find an unstable formula and the line to blame."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opsnn_jax.check import precision_sweep, sensitivity


def variance_by_squares(x):
    """Cancels where the mean is large."""
    mean = jnp.mean(x, axis=-1, keepdims=True)
    return jnp.mean(x * x, axis=-1, keepdims=True) - mean * mean


def variance_in_two_passes(x):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    return jnp.mean((x - mean) ** 2, axis=-1, keepdims=True)


@pytest.fixture
def far_from_zero(key):
    return jax.random.normal(key, (4, 64)) + 300


def _by_noise(report):
    return {row.noise: row for row in report.rows}


def test_unstable_formula_is_found(far_from_zero):
    report = sensitivity(variance_by_squares, far_from_zero, axes={0: -1})
    rows = _by_noise(report)
    assert not report.ok and rows["repeat"].ok
    assert not rows["precision"].ok and not rows["bits"].ok
    stable = sensitivity(variance_in_two_passes, far_from_zero, axes={0: -1})
    assert stable.ok, str(stable)
    assert rows["precision"].moved > 100 * _by_noise(stable)["precision"].moved


def test_order_of_a_sum_in_half_precision_is_found():
    def narrow_sum(x):
        return jax.lax.scan(lambda s, v: (s + v, None), x[0] * 0, x)[0]

    x = jnp.concatenate([jnp.ones(200), jnp.full(50, 100.0)]).astype(jnp.bfloat16)
    report = sensitivity(narrow_sum, x, noise=("order", "repeat"), axes={0: 0})
    assert not _by_noise(report)["order"].ok
    assert _by_noise(report)["repeat"].ok
    left_out = sensitivity(narrow_sum, x, noise=("order",))
    assert left_out.ok and "needs axes=" in str(left_out)


def test_result_that_changes_between_runs_is_found():
    calls = iter(range(10))
    report = sensitivity(lambda x: x + next(calls), jnp.ones(3), noise=("repeat",))
    assert not report.ok and report.rows[0].limit == 0


def test_gain_is_the_condition_number():
    # d log(x) / (log(x)/x) = 1 / log(x): near 1 the logarithm is ill conditioned.
    x = jnp.full((200,), 1.001, jnp.float32)
    report = sensitivity(jnp.log, x, noise=("noise",))
    assert report.rows[0].gain == pytest.approx(1000, rel=0.1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bits_moves_every_nonzero_input_by_one_unit(dtype):
    x = jnp.asarray([1.0, -2.5, 0.0, 3.0], dtype)
    seen = []
    sensitivity(lambda x: seen.append(np.asarray(x)) or x, x, noise=("bits",))
    moved = np.abs(seen[-1].astype(np.float64) - np.asarray(x).astype(np.float64))
    spacing = float(jnp.finfo(dtype).eps) * np.array([1, 2, 0, 2])
    np.testing.assert_array_equal(moved, spacing)


def test_sweep_blames_the_equation():
    def f(x):
        y = jnp.tanh(x)
        y = y.astype(jnp.bfloat16).astype(jnp.float32)  # the culprit
        return jnp.exp(y)

    report = precision_sweep(f, jnp.linspace(0.1, 1.0, 40))
    assert "convert_element_type" in report.worst.equation
    assert "test_sensitivity.py" in report.worst.source
    assert report.worst.alone == pytest.approx(report.error, rel=0.05)


def test_raising_one_sum_wins_most_of_the_error_back(far_from_zero):
    report = precision_sweep(variance_by_squares, far_from_zero)
    assert "reduce_sum" in report.worst.equation
    assert report.worst.raised < 0.7 * report.error


def test_sweep_opens_calls_and_keeps_control_flow():
    @jax.custom_vjp
    def square(x):
        return x * x

    square.defvjp(lambda x: (x * x, x), lambda x, dy: (2 * x * dy,))

    def f(x):
        y = jax.jit(jax.checkpoint(lambda v: square(jax.nn.relu(v))))(x)
        y = square(y)
        return jax.lax.scan(lambda c, _: (jnp.sin(c), None), y, length=2)[0]

    x = jnp.linspace(0.1, 1.0, 7)
    report = precision_sweep(f, x)
    found = sorted(row.equation.split()[1] for row in report.rows)
    assert found == ["max", "mul", "mul", "scan"]
    assert report.error < 1e-6
    assert report.table().row_count == 4
    assert len(report.to_dict()["rows"]) == 4


def test_exact_function_has_no_culprit():
    assert precision_sweep(lambda x: x + x, jnp.arange(4.0)).worst is None


def test_python_numbers_beside_the_arrays_stay(key):
    x = jax.random.normal(key, (5,))
    assert sensitivity(lambda x, n: x * n, x, 2).ok
    assert sensitivity(lambda x, n: (x * n, n), x, 0.5).ok


def test_empty_output_does_not_move():
    assert sensitivity(jnp.sin, jnp.zeros((0, 3))).ok


def test_elements_that_are_not_finite_do_not_move(key):
    def f(x):
        y = jnp.where(x > 0, x, -jnp.inf)
        return y.at[0].set(jnp.nan)

    x = jax.random.normal(key, (50,)).at[1].set(jnp.inf)
    report = sensitivity(f, x)
    assert report.ok, str(report)
    assert all(np.isfinite([row.moved, row.largest]).all() for row in report.rows)
    # Ones that a disturbance makes so have moved without bound.
    one = sensitivity(lambda x: jnp.where(x == 1, x, jnp.nan), jnp.ones(3))
    assert _by_noise(one)["bits"].moved == np.inf and not one.ok


def test_bad_noise_is_refused():
    with pytest.raises(ValueError, match="argument numbers below 1 as keys; got 3"):
        sensitivity(jnp.sin, jnp.ones(3), noise=["order"], axes={3: 0})
    with pytest.raises(ValueError, match="noise must be some of"):
        sensitivity(jnp.sin, jnp.ones(3), noise=("louder",))
    with pytest.raises(ValueError, match="floating-point array"):
        sensitivity(jnp.argmax, jnp.ones(3))
