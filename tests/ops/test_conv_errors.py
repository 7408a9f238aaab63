"""What conv refuses, each in a sentence, and what it takes as options."""

import functools

import jax
import numpy as np
import pytest

from opsnn_jax import conv2d

X, W = np.zeros((2, 8, 8, 4), np.float32), np.zeros((3, 3, 4, 6), np.float32)
BAD = [
    (ValueError, r"x must have 4 dimensions", (X[0], W), {}),
    (ValueError, r"w must have 4 dimensions", (X, W[0]), {}),
    (ValueError, r"\(3, 3, 4, O\); got \(3, 3, 2, 6\)", (X, W[:, :, :2]), {}),
    (ValueError, r"groups must divide C = ", (X, W), dict(groups=3)),
    (ValueError, r"groups must be at least 1", (X, W), dict(groups=0)),
    (ValueError, r"b must have shape \(O,\) = \(6,\)", (X, W, X[0, 0, 0]), {}),
    (ValueError, r"the kernel must not be empty", (X, W[:0]), {}),
    (TypeError, r"x must have dtype", (X.astype(int), W), {}),
    (TypeError, r"x must have dtype", (X.astype(complex), W), {}),
    (TypeError, r"jax_enable_x64 is off", (X.astype(float), W.astype(float)), {}),
    (TypeError, r"w must have the dtype of x", (X, W.astype("float16")), {}),
    (TypeError, r"w must be an array; got NoneType", (X, None), {}),
    (TypeError, r"x must be an array; got list", ([[1.0]], W), {}),
    (ValueError, r"padding must be \"SAME\"", (X, W), dict(padding="FOO")),
    (ValueError, r"padding must be \"SAME\"", (X, W), dict(padding="CAUSAL")),
    (ValueError, r"one entry for each of the 2", (X, W), dict(padding=((1, 1),))),
    (ValueError, r"int or a \(low, high\) pair", (X, W), dict(padding=((1,), (1, 1)))),
    (ValueError, r"must not crop more", (X, W), dict(padding=-5)),
    (TypeError, r"padding must be an int", (X, W), dict(padding=1.5)),
    (ValueError, r"strides must be a positive int", (X, W), dict(strides=0)),
    (ValueError, r"strides must be a positive int, or 2", (X, W), dict(strides=(1,))),
    (ValueError, r"precision must be None, .* got 'best'", (X, W),
     dict(precision="best")),
    (ValueError, r"precision must be", (X, W), dict(precision=["high", "high"])),
    (ValueError, r"got 1\.$", (X, W), dict(implementation=1)),
    (ValueError, r"implementation must be", (X, W), dict(implementation={"direct"})),
    (TypeError, r"x must be an array; got ShapeDtypeStruct",
     (jax.ShapeDtypeStruct(X.shape, X.dtype), W), {}),
    (TypeError, r"dilation must be an int", (X, W), dict(dilation="a")),
    (ValueError, r"implementation must be None, one of", (X, W),
     dict(implementation="cudnn")),
    (ValueError, r"an empty sequence", (X, W), dict(implementation=())),
    (NotImplementedError, r"'winograd' takes no strides", (X, W),
     dict(implementation="winograd", strides=2)),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "arrays", "options"), BAD)
def test_bad_input(error, message, arrays, options):
    with pytest.raises(error, match=message):
        conv2d(*arrays, **options)


def test_options_may_be_numpy():
    pads = np.array([[1, 0], [0, 1]])
    for padding in (pads, list(pads)):
        y = jax.eval_shape(
            functools.partial(
                conv2d, strides=np.array([2, 1]), padding=padding, groups=np.int64(1)
            ),
            X,
            W,
        )
        assert y.shape == (2, 4, 7, 6)


def test_precision_may_be_a_pair():
    assert conv2d(X, W, precision=("highest", "default")).shape == (2, 8, 8, 6)


def test_a_traced_option_is_refused():
    with pytest.raises(TypeError, match="known while tracing"):
        jax.jit(lambda s: conv2d(X, W, strides=s))(2)
