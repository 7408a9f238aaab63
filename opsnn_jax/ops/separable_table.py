"""The implementations of depthwise separable convolution: two convolutions, or one
kernel for both."""

import functools

from opsnn_jax.dispatch import Implementation, Requested, Table, deferred
from opsnn_jax.kernels.conv import separable
from opsnn_jax.kernels.conv.separable import SeparableSpec

from . import conv_table

OP = "separable_conv2d"
FUSED = "pallas_tpu_separable"

_MODULE = "opsnn_jax.kernels.conv.separable_tpu"
_FUSED = Implementation(
    FUSED,
    {"fwd": deferred(_MODULE, "forward")},
    platforms=("tpu",),
    refuses=deferred(_MODULE, "refuses"),
    pallas=True,
)
_PLAIN = Implementation("direct", {"fwd": separable.forward})


@functools.lru_cache(maxsize=64)
def table(each: Requested) -> Table:
    """The table where `each` is what is asked of two separate convolutions."""

    def forward(spec: SeparableSpec, x, w_depthwise, w_pointwise, *more):
        first, second = (
            conv_table.TABLE.choose(each, s)["fwd"]
            for s in (spec.depthwise, spec.pointwise)
        )
        z = first(x, w_depthwise)
        return separable.results(spec, second(z, w_pointwise, *more), z)

    separate = Implementation("separate", {"fwd": forward})
    return Table(OP, (_FUSED, separate), _order, plain=_PLAIN, because=_because)


def fused_pays(spec: SeparableSpec) -> bool:
    """Whether one kernel is faster than two convolutions on a TPU."""
    return conv_table.fills_registers(spec.depthwise)


def _order(name: str, platform: str, spec: SeparableSpec) -> tuple[str, ...]:
    if platform == "tpu" and fused_pays(spec):
        return FUSED, "separate"
    return ("separate",)


def _because(name, platform, spec, implementation) -> str:
    if implementation == FUSED:
        return "what lies between the two convolutions stays on the chip"
    return "each convolution is chosen apart"
