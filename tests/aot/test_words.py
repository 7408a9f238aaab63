"""What a report says of a failure."""

import re

import jax
import pytest

from opsnn_jax.aot.words import death, diagnostics, meaningful, raised_in


def test_meaningful_lines():
    message = "\n\nXlaRuntimeError: no room\n----\n  at Foo\n" + "detail\n" * 50
    lines = meaningful(message).splitlines()
    assert lines[0] == "XlaRuntimeError: no room"
    assert len(lines) == 8


def test_diagnostics_of_the_compiler():
    said = """
W0000 00:00:00.000000 1 log.cc:1] error rates are high
loc("good"("k.py":6:11)): error: 'nvvm.cp' op is not supported on sm_80
loc("good"("k.py":6:11)): error: 'nvvm.cp' op is not supported on sm_80
loc("good"("k.py":6:11)): note: see current operation
k.py:7:1: error: told already
"""
    (line,) = diagnostics(said, "INTERNAL: told already").splitlines()
    assert line.endswith("error: 'nvvm.cp' op is not supported on sm_80")


def test_the_last_words_of_a_process():
    said = death(-6, "much\nF0101 1 a.cc:1] Check failed: x\nmore")
    assert said.splitlines()[0] == "the compiler died of SIGABRT"
    assert said.splitlines()[1].startswith("F0101")
    assert death(3, "bye") == "the compiler exited with 3\nbye"


def test_where_an_error_was_raised():
    def leaf(x):
        return {}["nokey"]

    with pytest.raises(KeyError) as caught:
        jax.eval_shape(leaf, 1.0)
    where = raised_in(caught.tb)
    assert re.fullmatch(r"in leaf, .*test_words\.py:\d+", where)
    assert raised_in(caught.tb, besides=[__file__]) == ""
