"""Convolution in three dimensions as a sum of convolutions in two.

    y[:, d] = sum_k conv2d(x[:, s d + e k - lo], w[k])

over the taps k of the depth, for XLA has a fast convolution on a CPU in two dimensions
and none in three. The depth is merged with the batch. dx is the same sum over dy with
the transposed filter, dw a matrix product.
"""

import dataclasses

from . import direct, gemm, windows
from .spec import ConvSpec


def refuses(spec: ConvSpec) -> str | None:
    """Why `spec` cannot be done, or None."""
    if spec.rank != 3:
        return f"takes three spatial dimensions only, got {spec.rank}"
    return None


weight_gradient = gemm.weight_gradient


def _correlate(spec, padded, w):
    """The sums (N, *T, O) of `pad(spec, x)` and w, in the accumulation dtype."""
    return sum(
        _plane(spec, padded, w[k], k).reshape(spec.y_shape)
        for k in range(spec.kernel[0])
    )


forward, input_gradient = windows.passes(_correlate)


def _plane(spec, padded, w, k):
    """What tap k of the depth adds."""
    first, step, out = k * spec.dilation[0], spec.strides[0], spec.out_spatial[0]
    x = padded[:, first : first + (out - 1) * step + 1 : step]
    x = x.reshape(-1, *x.shape[2:])
    plane = dataclasses.replace(
        spec,
        x_shape=x.shape,
        w_shape=w.shape,
        strides=spec.strides[1:],
        padding=((0, 0), (0, 0)),
        dilation=spec.dilation[1:],
        activation=None,
        keep_preactivation=False,
    )
    return direct.correlate(plane, x, w)
