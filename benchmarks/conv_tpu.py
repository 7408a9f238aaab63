"""Convolutions for a TPU against XLA's, by the issue cycles of their static schedules.

python benchmarks/conv_tpu.py              all rows: results/conv_tpu.json and .png
python benchmarks/conv_tpu.py --rows g32   only the rows with this in their names, anew

No TPU is needed, but the extra `aot`. A program is counted whole: padding, copies
between layouts, the transformed filter, the look for results that are not finite. Only
the direct form that would replace those is left out; it does not run, and a schedule
would count it. On both sides code that counters skip counts as often as it runs; what
data may skip, which would count as run, is "undecided".
"""

import argparse
import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import jax
from harness import plot_ratios, renew, save

from opsnn_jax import conv
from opsnn_jax.aot import compile_for
from opsnn_jax.kernels import finite


@dataclass(frozen=True)
class Layer:
    """One layer, the implementation to count, and the options of `conv`."""

    name: str
    x: tuple[int, ...]
    w: tuple[int, ...]
    implementation: str
    dtype: str = "bfloat16"
    options: dict = field(default_factory=dict)
    passes: tuple[str, ...] = ("fwd", "dx", "dw")


def _dense(n, h, c, o, *more):
    # XLA's dw of many channels takes its compiler more than ten minutes.
    return Layer(
        f"3x3 float32 {n}x{h}x{h} {c}-{o}", (n, h, h, c), (3, 3, c, o), "pallas_tpu",
        "float32", {"precision": "highest"}, ("fwd", "dx", *more),
    )  # fmt: skip


LAYERS = [
    _dense(8, 28, 256, 256), _dense(8, 14, 512, 512), _dense(8, 28, 128, 128, "dw"),
    _dense(8, 20, 256, 256),
    _dense(8, 14, 256, 256), _dense(8, 56, 64, 64), _dense(8, 7, 512, 512),
    Layer("depthwise 3x3", (8, 56, 56, 128), (3, 3, 1, 128), "pallas_tpu_depthwise",
          options={"groups": 128}),
    Layer("causal conv1d", (4, 1024, 512), (4, 1, 512), "pallas_tpu_depthwise",
          options={"groups": 512, "padding": "CAUSAL"}),
    Layer("grouped g32", (8, 28, 28, 256), (3, 3, 8, 256), "block_diagonal",
          options={"groups": 32}),
]  # fmt: skip


def passes(layer: Layer, implementation: str | None):
    """Forward, dx and dw: a function and its arguments each."""
    f = functools.partial(conv, implementation=implementation, **layer.options)
    x, w = (jax.ShapeDtypeStruct(shape, layer.dtype) for shape in (layer.x, layer.w))
    dy = jax.eval_shape(functools.partial(conv, **layer.options), x, w)

    def gradient(i, x, w, dy):
        return jax.vjp(f, x, w)[1](dy)[i]

    return {
        "fwd": (f, (x, w)),
        "dx": (functools.partial(gradient, 0), (x, w, dy)),
        "dw": (functools.partial(gradient, 1), (x, w, dy)),
    }


def without_exact_form(f):
    """`f` for a process of its own, in which nothing is computed again."""

    def run(*arrays):
        finite.exact_by_condition = _mark
        return f(*arrays)

    return run


def _mark(exact, is_finite, y, *arrays):
    # The look must have a result, or it would not be in the program.
    def mark(a):
        return a.at[(0,) * a.ndim].multiply(is_finite.astype(a.dtype))

    return jax.tree.map(mark, y)


def count(layer: Layer, name: str, target: str) -> dict:
    """The row of one pass of a layer on one target."""
    cycles = {}
    for who, implementation in (("ours", layer.implementation), ("xla", "reference")):
        f, arrays = passes(layer, implementation)[name]
        report = compile_for(without_exact_form(f), *arrays, target=target)
        if not report.ok:
            raise RuntimeError(f"{layer.name} {name} {target} {who}: {report.error}")
        schedule = report.schedule
        if schedule.unread:
            raise RuntimeError(f"{layer.name} {name} {target} {who}: {report.notes}")
        cycles[who] = schedule.cycles
        cycles[f"{who}_with_stalls"] = schedule.cycles + (schedule.stalls or 0)
        cycles[f"{who}_undecided"] = schedule.undecided
    ratio = cycles["ours"] / cycles["xla"]
    with_stalls = cycles["ours_with_stalls"] / cycles["xla_with_stalls"]
    label = f"{layer.name} {name} {target.removeprefix('tpu-')}"
    print(f"{label:46} {ratio:.3f}, with stalls {with_stalls:.3f}", flush=True)
    return {
        "label": label,
        "implementation": layer.implementation,
        "libtpu": report.toolchain["libtpu"],
        **cycles,
        "ratio": ratio,
        "ratio_with_stalls": with_stalls,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="", help="only rows with this in their names")
    args = parser.parse_args()
    wanted = [
        (layer, name, target)
        for layer in LAYERS
        for name in layer.passes
        for target in ("tpu-v5e", "tpu-v6e")
        if args.rows in f"{layer.name} {name} {target}"
    ]
    results = [] if not args.rows else renew("conv_tpu", [])
    with ThreadPoolExecutor(2) as pool:
        for row in pool.map(lambda each: count(*each), wanted):
            kept = [old for old in results if old["label"] != row["label"]]
            results = [*kept, row]
            save("conv_tpu", results)  # XLA's compiler may take minutes for a row
    title = "convolution on a TPU, static schedules"
    print(plot_ratios("conv_tpu", results, title, unit="issue cycles"))


if __name__ == "__main__":
    main()
