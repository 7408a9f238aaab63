"""A failure leaves a folder whose script fails again."""

import functools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import planted_ops
import pytest

from opsnn_jax.check import check_grads, load_arguments
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
    assert "define `op` below" in text
    compile(text, "reproduce.py", "exec")


@pytest.mark.parametrize("value", [object(), {1, 2}])
def test_what_cannot_be_stored_is_refused(tmp_path, value):
    with pytest.raises(TypeError):
        write_reproducer(
            Path(tmp_path), jnp.sin, (value,), {}, check="c", settings={}, headline="h"
        )
