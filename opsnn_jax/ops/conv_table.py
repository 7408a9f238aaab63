"""The implementations of convolution, and the rules by which one is chosen.

`benchmarks/conv.py` holds those for a CPU against XLA, `opsnn compile` the schedules of
the kernels for a TPU.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

from jax import lax

from opsnn_jax.dispatch import Implementation, Table, deferred
from opsnn_jax.kernels.conv import (
    block_diagonal,
    depthwise,
    direct,
    gemm,
    phases,
    planes,
    pointwise,
)
from opsnn_jax.kernels.conv.spec import ConvSpec
from opsnn_jax.kernels.winograd import xla as winograd


def _implementation(name, module, refuses=lambda spec: None, **options):
    def refuses_sizes(spec):
        if spec.is_symbolic and module is not direct:
            return f"takes sizes that are known only, got {spec.x_shape}"
        return refuses(spec)

    passes = {
        "fwd": module.forward,
        "dx": module.input_gradient,
        "dw": module.weight_gradient,
    }
    if options:
        passes = {k: functools.partial(f, **options) for k, f in passes.items()}
    return Implementation(name, passes, refuses=refuses_sizes)


def _pallas_tpu(name, module) -> Implementation:
    module = f"opsnn_jax.kernels.{module}"
    passes = {
        "fwd": deferred(module, "forward"),
        "dx": deferred(module, "input_gradient"),
        "dw": deferred(module, "weight_gradient"),
    }
    return Implementation(
        name,
        passes,
        platforms=("tpu",),
        refuses=deferred(module, "refuses"),
        pallas=True,
    )


_DIRECT = _implementation("direct", direct)
_IMPLEMENTATIONS = (
    _DIRECT,
    _implementation("gemm", gemm),
    _implementation("pointwise", pointwise, refuses=pointwise.refuses),
    _implementation("depthwise", depthwise, refuses=depthwise.refuses),
    _implementation("planes", planes, refuses=planes.refuses),
    _implementation("phases", phases, refuses=phases.refuses),
    _implementation("block_diagonal", block_diagonal, refuses=block_diagonal.refuses),
    # One or two registers of a CPU wide. A filter of many blocks would take minutes to
    # compile if each were written out.
    _implementation(
        "block_diagonal_16",
        block_diagonal,
        refuses=block_diagonal.refuses,
        width=16,
        looped=True,
    ),
    _implementation("winograd", winograd, refuses=winograd.refuses),
    *(
        _implementation(
            f"winograd_f{m}", winograd, refuses=winograd.refuses_tile(m), m=m
        )
        for m in (2, 4, 6)
    ),
    _pallas_tpu("pallas_tpu", "winograd.tpu"),
    _pallas_tpu("pallas_tpu_depthwise", "conv.depthwise_tpu"),
)


@dataclass(frozen=True)
class Rule:
    """Where an implementation is tried before those of the rules below it."""

    implementation: str
    platform: str
    passes: tuple[str, ...]
    applies: Callable[[ConvSpec], bool]
    because: str


def _is_3x3(spec):
    return spec.rank > 1 and set(spec.kernel) == {3}


def _winograd_pays(spec):
    # Where the transforms, which memory bounds, are little beside the products: those
    # of the image with enough channels, that of the filter with enough tiles.
    fewest, most = sorted(spec.w_shape[-2:])
    if spec.kernel == (5, 5):
        return fewest >= 64 and _tiles(spec) >= 4 * most
    enough = fewest >= (64 if spec.rank == 2 else 32)
    return _is_3x3(spec) and enough and _tiles(spec) >= 0.75 * most


def _winograd_pays_for_dw(spec):
    # The products sum over tiles, and give as many results as the filter has.
    fewest, most = sorted(spec.w_shape[-2:])
    enough = fewest >= (32 if spec.rank == 2 else 16)
    return _is_3x3(spec) and enough and _tiles(spec) >= max(96, most / 2)


def _has_narrow_groups(spec):
    return spec.groups > 1 and spec.w_shape[-2] < 16


def _takes_patches(spec):
    pairs = zip(spec.kernel, spec.strides, strict=True)
    return phases.refuses(spec) is None and all(k <= s for k, s in pairs)


def _has_few_inputs(spec):
    return spec.rank < 3 and spec.x_shape[-1] <= 16 and phases.refuses(spec) is None


def _tiles(spec):
    """How many of Winograd's tiles cover the output."""
    axes = zip(spec.out_spatial, winograd.transforms(spec), strict=True)
    return spec.x_shape[0] * math.prod(-(-size // t.m) for size, t in axes)


def _blocks_pay(spec):
    # Of groups that fill it, or of one channel, XLA makes more of the matrix unit.
    many = spec.groups > 1 and not spec.is_depthwise
    return many and block_diagonal.groups_in_block(spec) > 1


def fills_registers(spec: ConvSpec) -> bool:
    """Whether registers of 8 columns by 128 channels cut images evenly.

    Else XLA lays images out in another way than the depthwise kernels for a TPU take
    them, say with 8 images in a register, and moves them before and after.
    """
    columns = spec.spatial[-1], spec.out_spatial[-1]
    return spec.x_shape[-1] % 128 == 0 and all(size % 8 == 0 for size in columns)


def _winograd_pays_on_a_tpu(spec):
    # Where a product of fp32 is six of bfloat16, and registers are full of images and
    # channels. A small image has too few tiles to pay for the transformed filter: of
    # 14x14 with 256 channels XLA's form has fewer cycles on a v6e.
    highest = lax.Precision.HIGHEST
    exact = spec.dtype == "float32" and spec.precision in (highest, (highest, highest))
    channels, size = min(spec.w_shape[-2:]), min(*spec.spatial, *spec.out_spatial)
    full = spec.x_shape[0] % 8 == 0 and channels >= 128
    if not (exact and spec.rank == 2 and _is_3x3(spec) and full):
        return False
    return size >= (20 if channels >= 256 else 28)


_ALL = ("fwd", "dx", "dw")

# Those for a CPU follow from the time of forward and both gradients in one program,
# where the passes share the cores and the cache. Forward alone may differ a little.
_RULES = (
    Rule(
        "depthwise", "cpu", _ALL, lambda spec: spec.is_depthwise,
        "XLA multiplies every channel by every other, or one channel at a time",
    ),
    Rule(
        "pointwise", "cpu", _ALL, lambda spec: math.prod(spec.kernel) == 1,
        "one matrix product, with nothing to gather",
    ),
    Rule(
        "block_diagonal_16", "cpu", _ALL,
        lambda spec: spec.groups > 1 and spec.rank < 3,
        "XLA takes groups one after the other, and dw over every pair of channels",
    ),
    Rule(
        "gemm", "cpu", ("fwd", "dx"), _has_narrow_groups,
        "XLA takes narrow groups one after the other",
    ),
    Rule(
        "gemm", "cpu", ("dw",), lambda spec: spec.groups > 1,
        "XLA takes dw of groups over every pair of channels",
    ),
    Rule(
        "phases", "cpu", _ALL, _takes_patches,
        "no output shares an input with another: one matrix product, nothing to gather",
    ),
    Rule(
        "phases", "cpu", ("dx",), _has_few_inputs,
        "XLA multiplies the zeros that the stride puts between the elements of dy",
    ),
    Rule(
        "winograd", "cpu", ("fwd", "dx"), _winograd_pays,
        "a quarter of the products, and enough channels and tiles to pay for the "
        "transforms",
    ),
    Rule(
        "winograd", "cpu", ("dw",), _winograd_pays_for_dw,
        "a quarter of the products, and enough tiles to sum over",
    ),
    Rule(
        "planes", "cpu", _ALL, lambda spec: spec.rank == 3,
        "XLA's convolution in three dimensions is slower than several in two",
    ),
    Rule(
        "block_diagonal", "tpu", _ALL, _blocks_pay,
        "XLA multiplies each group on a matrix unit that it hardly fills",
    ),
    Rule(
        "pallas_tpu_depthwise", "tpu", _ALL,
        lambda spec: spec.is_depthwise and fills_registers(spec),
        "every element is loaded once, and a tap is a load at another place",
    ),
    Rule(
        "pallas_tpu", "tpu", _ALL, _winograd_pays_on_a_tpu,
        "a quarter of the products, of which each in full fp32 is six",
    ),
)  # fmt: skip


def _applying(name: str, platform: str, spec: ConvSpec) -> list[Rule]:
    return [
        rule
        for rule in _RULES
        if rule.platform == platform and name in rule.passes and rule.applies(spec)
    ]


def _order(name: str, platform: str, spec: ConvSpec) -> tuple[str, ...]:
    rules = [] if spec.is_symbolic else _applying(name, platform, spec)
    return (*(rule.implementation for rule in rules), "direct")


def _because(name: str, platform: str, spec: ConvSpec, implementation: str) -> str:
    for rule in _applying(name, platform, spec):
        if rule.implementation == implementation:
            return rule.because
    return "no rule names a faster one"


TABLE = Table("conv", _IMPLEMENTATIONS, _order, plain=_DIRECT, because=_because)
