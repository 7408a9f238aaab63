"""Disks that fill up while a run is going on."""

import errno
import os
import re
import types

import pytest

from opsnn_jax.training import checkpoint, report
from tests.training.equal import assert_equal_ends
from tests.training.tiny import TINY_IMAGES

NO_ROOM = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("last", [2, 4, 6])
def test_disk_that_fills_up_is_one_line_and_loses_nothing(
    run, weights_only, monkeypatch, last
):
    """Of checkpoints, there is room for those up to `last`, 0 for none."""
    weights_only.batch_at = float
    every = ["--set", "run.save_every=2"]
    straight = run(TINY_IMAGES, *every)[3] / "images-0"
    saves = []

    def disk_usage(folder):
        saves.append(1)
        free = 10**9 if 2 * len(saves) < last else 500
        return types.SimpleNamespace(free=free)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "disk_usage", disk_usage)
        code, _, err, runs = run(TINY_IMAGES, *every)
        folder = runs / "images-1"
        assert code == 1 and err.count("\n") == 1
        where = re.escape(str(folder / "checkpoints"))
        why = (
            r"No space left on device: a checkpoint takes [\d,]+ bytes, 500 are free; "
        )
        assert re.search(f"cannot write to {where}: {why}", err)
        if last == 2:
            assert "make room and begin anew, for there is no checkpoint yet" in err
            return
        go_on = f"make room and go on from step {last - 2} with --resume {folder}.\n"
        assert err.endswith(go_on)
        # The rows and the curves are there. A run that goes on too early ends alike.
        assert len(report.read_rows(folder / "metrics.jsonl")) == last
        assert (folder / "curves.png").exists()
        code, _, err, _ = run(TINY_IMAGES, *every, "--resume", str(folder))
        assert (code, err.count("\n")) == (1, 1) and err.endswith(go_on)
    assert run(TINY_IMAGES, *every, "--resume", str(folder))[0] == 0
    assert_equal_ends(folder, straight)


@pytest.mark.parametrize("back", [True, False])
def test_rows_wait_for_room_and_the_run_goes_on(run, weights_only, monkeypatch, back):
    flush, tried = report.Rows.flush, []

    def no_room(self):
        tried.append(1)
        if len(tried) > 1 and (len(tried) < 3 or not back):
            raise NO_ROOM
        flush(self)

    monkeypatch.setattr(report.Rows, "flush", no_room)
    code, _, err, runs = run(TINY_IMAGES)
    rows = report.read_rows(runs / "images-0" / "metrics.jsonl")
    if back:
        assert (code, err) == (0, "")
        assert [row["attempted_steps"] for row in rows] == [1, 2, 3, 4, 5, 6]
    else:
        assert code == 1 and err.count("\n") == 1
        assert "No space left on device; make room and go on from step 6 with" in err
        assert len(rows) == 2


def test_picture_that_finds_no_room_costs_nothing_else(run, weights_only, monkeypatch):
    replace = report.replace_file

    def no_room(path, content):
        if path.suffix == ".png":
            raise NO_ROOM
        replace(path, content)

    monkeypatch.setattr(report, "replace_file", no_room)
    code, out, err, runs = run(TINY_IMAGES)
    assert (code, err) == (0, "")
    folder = runs / "images-0"
    assert f"No curves were drawn: cannot write to {folder}: No space left" in out
    assert (folder / "results.json").exists()
