"""A failure leaves a folder whose script fails again."""

import ast
import enum
import functools
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import planted_ops
import pytest
from flax.core import FrozenDict

from opsnn_jax.check import check_grads, load_arguments, load_options
from opsnn_jax.check.reproducer import write_reproducer


def test_script_shows_the_failure_again(key, tmp_path):
    op = functools.partial(planted_ops.attention, implementation="wrong sign")
    args = planted_ops.qkv(key, jnp.float32)
    report = check_grads(op, *args, directions=1, repro=tmp_path)
    script = report.reproducer / "reproduce.py"
    assert report.reproducer.parent == tmp_path
    assert report.reproducer.name.startswith("attention-")
    assert str(script) in str(report)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "AssertionError: attention: derivatives DISAGREE" in done.stderr


def test_no_folder_without_failure(key, tmp_path):
    args = planted_ops.qkv(key, jnp.float32)
    assert check_grads(planted_ops.attention_reference, *args, repro=tmp_path).ok
    assert not list(tmp_path.iterdir())


def test_arguments_come_back_bit_for_bit(key, tmp_path):
    args = (
        {"w": jnp.arange(3, dtype=jnp.bfloat16), "b": [jnp.zeros((0, 2)), None]},
        (jnp.array(True), 2, 0.5, "same"),
        jax.random.key(3),
        np.float16([np.nan, -0.0]),
    )
    place = write_reproducer(
        tmp_path, jnp.sin, args, {}, check="check_grads", settings={}, headline="h"
    )
    back = load_arguments(place)
    assert jax.tree.structure(back) == jax.tree.structure(args)
    for ours, theirs in zip(jax.tree.leaves(back), jax.tree.leaves(args), strict=True):
        if isinstance(theirs, (int, float, str)):
            assert ours == theirs
        elif jnp.issubdtype(theirs.dtype, jax.dtypes.prng_key):
            assert ours == theirs
        else:
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
            assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


def test_local_function_leaves_a_place_for_its_definition(tmp_path):
    @jax.custom_vjp
    def local(x):
        return x * x

    local.defvjp(lambda x: (x * x, x), lambda x, dy: (x * dy,))
    report = check_grads(local, jnp.arange(1.0, 4.0), repro=tmp_path)
    text = (report.reproducer / "reproduce.py").read_text()
    assert "local cannot be imported by name, as it is not a top-level" in text
    assert "define `op` in this file" in text
    compile(text, "reproduce.py", "exec")


class Pair(NamedTuple):
    """Two numbers, which have to come back as a Pair."""

    left: jax.Array
    right: float


class Side(enum.Enum):
    """An option as ops have them."""

    SAME = "same"


def wrong(x, *, dtype=None, act=None, shift=None, side=None):
    """Twice the gradient, by options of every kind."""
    assert side is Side.SAME and isinstance(shift, Pair)
    y = act(x.astype(dtype)) + shift.left.sum()
    return jax.lax.stop_gradient(-y) + 2 * y


def test_options_come_back_as_they_were(key, tmp_path):
    op = functools.partial(wrong, shift=Pair(jnp.ones(3), 2.0))
    options = {"dtype": jnp.float32, "act": jnp.sin, "side": Side.SAME}
    x = jax.random.normal(key, (5,))
    report = check_grads(op, x, options=options, directions=1, repro=tmp_path)
    assert load_options(report.reproducer)["act"] is jnp.sin
    script = report.reproducer / "reproduce.py"
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120
    )
    assert "AssertionError: wrong: derivatives DISAGREE" in done.stderr


def test_values_of_every_kind_come_back(tmp_path):
    args = (
        Pair(jnp.arange(3.0), 0.5),
        np.float32(2.5),
        jnp.dtype("bfloat16"),
        np.dtype("int8"),
        jnp.bfloat16,
        Side.SAME,
        {2: functools.partial(planted_ops.conv, strides=2), (1, "a"): float("inf")},
    )
    place = _write(tmp_path, jnp.sin, args)
    back = load_arguments(place)
    assert type(back[0]) is Pair and (back[0].left == args[0].left).all()
    assert type(back[1]) is np.float32 and back[1:6] == args[1:6]
    assert back[6][2].keywords == {"strides": 2} and back[6][1, "a"] == float("inf")


@pytest.mark.parametrize("headline", ['a \\x "', '"""', "line\nline", "é\\"])
def test_any_headline_leaves_a_script_that_parses(tmp_path, headline):
    place = _write(tmp_path, jnp.sin, (1.0,), headline)
    text = (place / "reproduce.py").read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text), clean=False) == headline


@pytest.mark.parametrize("what", ["set", "FrozenDict", "function", "folder"])
def test_reproducer_that_cannot_be_written_is_a_note(key, tmp_path, what):
    def wrong(x, other):
        return jax.lax.stop_gradient(-x) + 2 * x

    others = {
        "set": frozenset({1}),
        "FrozenDict": FrozenDict({"w": jnp.ones(3)}),
        "function": jax.tree_util.Partial(lambda x: x),
    }
    folder = tmp_path / "repro"
    if what == "folder":
        folder.write_text("a file, where a folder is to be made")
    report = check_grads(
        wrong, jax.random.normal(key, (5,)), others.get(what), repro=folder
    )
    assert report.failures and report.reproducer is None
    (note,) = (n for n in report.notes if n.startswith("No reproducer was written"))
    assert {"function": "lambda", "folder": str(folder)}.get(what, what) in note


def _write(folder, op, args, headline="h"):
    return write_reproducer(
        folder, op, args, {}, check="check_grads", settings={}, headline=headline
    )


@pytest.mark.parametrize("value", [object(), {1, 2}])
def test_what_cannot_be_stored_is_refused(tmp_path, value):
    with pytest.raises(TypeError):
        write_reproducer(
            Path(tmp_path), jnp.sin, (value,), {}, check="c", settings={}, headline="h"
        )
