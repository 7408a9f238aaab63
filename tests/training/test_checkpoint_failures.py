"""Checkpoints that cannot be written or read, and what is left of them."""

import contextlib
import errno
import os
import resource
import shutil
import types
import unittest.mock

import jax
import jax.numpy as jnp
import pytest

from opsnn_jax.training.checkpoint import CheckpointError, Checkpoints
from tests.training.equal import assert_same_bits


def test_failed_save_leaves_the_one_before(tmp_path):
    folder = tmp_path / "checkpoints"
    state = {"w": jnp.ones(2)}
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        moved = folder.rename(tmp_path / "moved")
        folder.write_text("in the way")
        with pytest.raises(CheckpointError, match="cannot write to .*Not a directory"):
            checkpoints.save(2, state)
            checkpoints.wait()
        folder.unlink()
        moved.rename(folder)
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.restore(state).step == 1


@contextlib.contextmanager
def no_file_beyond(size):
    """As a full disk, which needs another user's rights to make: EFBIG for ENOSPC."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_save_that_fails_in_the_background_leaves_the_one_before(key, tmp_path):
    # orbax counts what a save would have replaced as gone, whether or not it came.
    state = {"w": jax.random.normal(key, (50_000,))}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        with (
            no_file_beyond(20_000),
            pytest.raises(CheckpointError, match="cannot write to .*: File too large"),
        ):
            checkpoints.save(2, state)
            checkpoints.wait()
        assert checkpoints.latest == 1
        assert_same_bits(checkpoints.restore(state).state, state)
        checkpoints.save(3, state)
        checkpoints.wait()
        assert checkpoints.steps == (3,)


def test_errors_at_the_end_are_errors_of_checkpoints(tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(CheckpointError, match="No space left on device"):
        with Checkpoints(tmp_path) as checkpoints:
            close = checkpoints._manager.close
            monkeypatch.setattr(
                checkpoints._manager, "close", unittest.mock.Mock(side_effect=full)
            )
    close()
    # The error on its way is the one that is seen.
    with pytest.raises(ZeroDivisionError):
        with Checkpoints(tmp_path) as checkpoints:
            close = checkpoints._manager.close
            monkeypatch.setattr(
                checkpoints._manager, "close", unittest.mock.Mock(side_effect=full)
            )
            _ = 1 / 0
    close()


def test_no_room_is_known_before_anything_is_written(tmp_path, monkeypatch):
    state = {"w": jnp.ones(100_000), "b": jnp.ones(3)}
    with Checkpoints(tmp_path) as checkpoints:
        for free, fits in ((490_000, False), (510_000, True)):
            usage = types.SimpleNamespace(free=free)
            monkeypatch.setattr(shutil, "disk_usage", lambda _, u=usage: u)
            if fits:
                checkpoints.save(1, state)
                continue
            with pytest.raises(
                CheckpointError,
                match=r"device: a checkpoint takes 502,012 bytes, 490,000 are free\.",
            ):
                checkpoints.save(1, state)
            assert not list(tmp_path.iterdir())
    written = sum(f.stat().st_blocks * 512 for f in tmp_path.rglob("*"))
    assert written < 510_000


def test_damaged_checkpoint_is_an_error_that_says_what_to_delete(tmp_path):
    state = {"w": jnp.ones(2)}
    with Checkpoints(tmp_path, keep_last=2) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.save(2, state)
    for file in (tmp_path / "2" / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    with Checkpoints(tmp_path, keep_last=2) as checkpoints:
        with pytest.raises(CheckpointError, match="checkpoint 2 .* delete .*2"):
            checkpoints.restore(state)
        assert checkpoints.restore(state, 1).step == 1


def test_no_checkpoint_and_no_folder_are_errors(tmp_path):
    with Checkpoints(tmp_path / "new") as checkpoints:
        assert (checkpoints.latest, checkpoints.best, checkpoints.steps) == (
            None,
            None,
            (),
        )
        with pytest.raises(CheckpointError, match="there is no checkpoint in"):
            checkpoints.restore({})
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot use .*file"):
        Checkpoints(tmp_path / "file")
    with pytest.raises(ValueError, match="expected keep_last of at least 1"):
        Checkpoints(tmp_path, keep_last=0)


def test_leaf_that_is_no_array_is_refused(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(TypeError, match="'a/b' is 3"):
            checkpoints.save(1, {"a": {"b": 3}})
        with pytest.raises(ValueError, match="two leaves have the path 'a/b'"):
            checkpoints.save(1, {"a": {"b": jnp.ones(1)}, "a/b": jnp.ones(1)})
