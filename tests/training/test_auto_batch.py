"""The largest batch: the search, sizes in words, and the command."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opsnn_jax.training import auto_batch, trainer
from opsnn_jax.training.auto_batch import largest, memory_of, parse_size, show_size
from opsnn_jax.training.config_file import ConfigError
from opsnn_jax.training.data import BatchStream, DataError
from tests.training.tiny import TINY_IMAGES

FORMS = {
    "line": lambda n: 1000 + 7 * n,
    "steps": lambda n: 1000 + 64 * (n // 16),
    "bent": lambda n: 1000 + n**1.3,
    "flat, then steep": lambda n: 1000 + max(n - 300, 0) * 50,
    "few rows": lambda n: 1000 + 7 * n if n <= 333 else float("inf"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("multiple", [1, 3, 8])
def test_search_finds_the_largest(form, multiple):
    tried = []

    def bytes_of(n):
        tried.append(n)
        return FORMS[form](n)

    for budget in (1100, 2345, 9999):
        tried.clear()
        found = largest(bytes_of, budget, multiple=multiple)
        assert found % multiple == 0
        assert FORMS[form](found) <= budget < FORMS[form](found + multiple)
        assert len(set(tried)) < 30
        if form == "line":
            assert len(set(tried)) < 16


@pytest.mark.parametrize(
    "text, size",
    [("100", 100), ("1KiB", 1024), ("1.5 MB", 3 * 2**19), ("6g", 6 * 2**30)],
)
def test_sizes_in_words(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "1 parsec", "0", "1e3"])
def test_size_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="--memory: expected a size such as 6GiB"):
        parse_size(text)


def test_sizes_are_shown_short():
    shown = [show_size(x) for x in (7, 1536, 5 * 2**20, 3 * 2**40)]
    assert shown == ["7 B", "1.5 KiB", "5 MiB", "3 TiB"]


def test_memory_is_that_of_arguments_results_and_between():
    x = jnp.ones((256, 256))
    size = x.nbytes
    plain = jax.jit(lambda x: x + 1.0).lower(x).compile()
    donated = jax.jit(lambda x: x + 1.0, donate_argnums=0).lower(x).compile()
    assert 2 * size <= memory_of(plain) < 2.1 * size
    assert size <= memory_of(donated) < 1.1 * size


@pytest.fixture
def rows(weights_only, monkeypatch):
    """The three weights on batches with rows, of which there are 100."""
    make = trainer.make_task
    monkeypatch.setattr(auto_batch, "make_task", lambda config: task(config, make))
    monkeypatch.setattr(trainer, "make_task", lambda config: task(config, make))


def task(config, make):
    size = config.data.batch_size
    if size > 100:
        raise DataError("data: batch_size must be at most the 100 rows there are")
    made = make(config)

    def loss_fn(params, model_state, batch, rng):
        loss = (jnp.exp(batch["g"]) * params["w"].sum()).mean()
        return loss, (model_state, {"accuracy": loss})

    batch = {"g": np.zeros((size, 1000), np.float32)}
    batches = BatchStream(lambda k: batch)
    return type(made)(**(vars(made) | {"loss_fn": loss_fn, "batches": batches}))


@pytest.mark.parametrize(
    "memory, most", [("200KB", 51), pytest.param("1GiB", 100, marks=pytest.mark.slow)]
)
def test_command_trains_with_the_largest(run, rows, memory, most):
    config = TINY_IMAGES | {"optimization": {"micro_batches": 2}}
    code, out, err, runs = run(config, "--auto-batch", "--memory", memory)
    assert (code, err) == (0, "")
    settings = json.loads((runs / "images-0" / "config.json").read_text())
    size = settings["data"]["batch_size"]
    assert f"batch size: {size}, " in out and size % 2 == 0
    # 4 kB a row, once as an argument and perhaps again in between.
    assert 0.4 * most < size <= most and (size == 100 or most == 51)


@pytest.mark.parametrize(
    "options, says",
    [
        (["--auto-batch", "--memory", "2KB"], "a batch of 10 needs"),
        (["--auto-batch", "--resume"], "a run keeps its batch"),
        (["--memory", "2GB"], "--memory goes with --auto-batch"),
        (["--auto-batch", "--memory", "big"], "expected a size such as 6GiB"),
    ],
)
def test_what_cannot_be_is_one_line(run, rows, options, says):
    (run.folder / "images-0").mkdir(parents=True)
    config = TINY_IMAGES | {"optimization": {"micro_batches": 10}}
    code, _, err, _ = run(config, *options)
    assert code == 2
    assert says in err and err.count("\n") == 1
