"""Convolutions against `lax.conv_general_dilated` under `jax.grad`, float32.

python benchmarks/conv.py              the table below, results/conv.json and .png
python benchmarks/conv.py --rows 3x3   only the rows with this in their names, anew
python benchmarks/conv.py --torch      PyTorch beside them, where it is installed

Rows are layers of ResNet-50 and VGG-16 (batch 8), ResNeXt, MobileNet, ViT, a causal
depthwise layer of a state-space model, others of one and three dimensions, and four
convolutions inside `lax.scan`. Columns are forward, dx, dw, and all of them.
"""

import argparse
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from harness import commit, plot_ratios, renew, save, time_in_turn, workspace

from opsnn_jax import conv


@dataclass(frozen=True)
class Layer:
    """One row: x (N, *S, C), w (*K, C / groups, O), and the options of `conv`.

    `also` names implementations to be timed beside the default.
    """

    name: str
    x: tuple[int, ...]
    w: tuple[int, ...]
    options: dict = field(default_factory=dict)
    scanned: int = 0
    also: tuple[str, ...] = ()


def _dense(n, h, c, o):
    return Layer(
        f"3x3 {n}x{h}x{h} {c}-{o}", (n, h, h, c), (3, 3, c, o), also=("winograd",)
    )


LAYERS = [
    # 3x3 layers of ResNet-50 and VGG-16.
    _dense(8, 56, 64, 64), _dense(8, 28, 128, 128), _dense(8, 14, 256, 256),
    _dense(8, 7, 512, 512), _dense(8, 112, 64, 128), _dense(8, 56, 128, 256),
    _dense(8, 28, 256, 512), _dense(8, 14, 512, 512),
    # Of a small ResNet.
    _dense(64, 28, 16, 16), _dense(64, 14, 32, 32),
    Layer("7x7 stride 2", (8, 224, 224, 3), (7, 7, 3, 64), dict(strides=2)),
    Layer("patches 16x16", (8, 224, 224, 3), (16, 16, 3, 768), dict(strides=16)),
    Layer("3x3 stride 2", (8, 56, 56, 128), (3, 3, 128, 128), dict(strides=2)),
    Layer("5x5", (8, 28, 28, 64), (5, 5, 64, 64)),
    Layer("1x1", (8, 28, 28, 512), (1, 1, 512, 128)),
    Layer("1x1 stride 2", (8, 56, 56, 256), (1, 1, 256, 512), dict(strides=2)),
    Layer("grouped 4-4", (8, 56, 56, 128), (3, 3, 4, 128), dict(groups=32)),
    Layer("grouped 16-16", (8, 14, 14, 512), (3, 3, 16, 512), dict(groups=32)),
    Layer("grouped 32-32", (8, 14, 14, 512), (3, 3, 32, 512), dict(groups=16)),
    Layer("depthwise 3x3", (8, 56, 56, 128), (3, 3, 1, 128), dict(groups=128)),
    Layer("depthwise 3x3 stride 2", (8, 56, 56, 128), (3, 3, 1, 128),
          dict(groups=128, strides=2)),
    Layer("depthwise 5x5", (8, 14, 14, 256), (5, 5, 1, 256), dict(groups=256)),
    Layer("causal depthwise conv1d", (4, 1024, 512), (4, 1, 512),
          dict(groups=512, padding="CAUSAL")),
    Layer("conv1d", (4, 1024, 256), (3, 256, 256)),
    Layer("conv3d", (2, 16, 28, 28, 32), (3, 3, 3, 32, 32)),
    Layer("3x3 in scan", (4, 28, 28, 64), (3, 3, 64, 64), scanned=4),
    Layer("3x3 stride 1 16 in scan", (16, 14, 14, 16), (3, 3, 16, 16), scanned=4),
]  # fmt: skip


def forward(layer: Layer, implementation) -> Callable:
    """y from x and w; of a scanned layer, applied to its own result several times."""
    f = functools.partial(conv, implementation=implementation, **layer.options)
    if not layer.scanned:
        return f

    def scanned(x, w):
        def body(carry, _):
            return f(carry, w), None

        return jax.lax.scan(body, x, None, length=layer.scanned)[0]

    return scanned


def passes(f: Callable) -> dict[str, Callable]:
    """forward, dx, dw, and forward with both gradients, as functions of (x, w, dy)."""

    def both(x, w, dy):
        y, vjp = jax.vjp(f, x, w)
        return y, vjp(dy)

    return {
        "fwd": lambda x, w, dy: f(x, w),
        "dx": lambda x, w, dy: jax.vjp(lambda x: f(x, w), x)[1](dy),
        "dw": lambda x, w, dy: jax.vjp(lambda w: f(x, w), w)[1](dy),
        "fwd+bwd": both,
    }


def draw(layer: Layer) -> tuple[jax.Array, ...]:
    """x, w and dy, of about size 1 all."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = jax.random.normal(keys[0], layer.x), jax.random.normal(keys[1], layer.w)
    w = w * math.prod(layer.w[:-1]) ** -0.5
    y = jax.eval_shape(forward(layer, "reference"), x, w)
    return x, w, jax.random.normal(keys[2], y.shape)


def measure(layer: Layer, with_torch: bool) -> list[dict]:
    arrays = draw(layer)
    labels = {"default": None, **{name: name for name in layer.also}}
    rows = []
    for name in passes(None):
        variants = {"xla": jax.jit(passes(forward(layer, "reference"))[name])}
        for label, implementation in labels.items():
            variants[label] = jax.jit(passes(forward(layer, implementation))[name])
        if with_torch and not layer.scanned:
            variants["torch"] = torch_passes(layer, arrays)[name]
        times = time_in_turn(variants, arrays)
        for label in [v for v in variants if v != "xla"]:
            row = {
                "layer": layer.name,
                "pass": name,
                "implementation": label,
                "label": f"{layer.name}, {label}, {name}",
                "xla_ms": times["xla"]["ms"],
                "commit": commit(),
                **times[label],
            }
            if label != "torch":
                row["workspace"] = workspace(variants[label], arrays)
                row["xla_workspace"] = workspace(variants["xla"], arrays)
            rows.append(row)
            print(
                f"{row['label']:52} {row['ratio']:6.3f}"
                f"   ({row['ms']:.2f} ms, XLA {row['xla_ms']:.2f} ms)",
                flush=True,
            )
    return rows


def torch_passes(layer: Layer, arrays) -> dict[str, Callable]:
    """The same passes by PyTorch, in its own layout, as functions of ignored arrays."""
    import torch

    rank = len(layer.x) - 2
    x, w, dy = (np.array(a) for a in arrays)
    last = "channels_last" if rank == 2 else "channels_last_3d"
    memory = {} if rank == 1 else {"memory_format": getattr(torch, last)}
    x = torch.tensor(np.moveaxis(x, -1, 1)).contiguous(**memory).requires_grad_()
    w = torch.tensor(np.moveaxis(w, (-1, -2), (0, 1))).contiguous(**memory)
    w.requires_grad_()
    dy = torch.tensor(np.moveaxis(dy, -1, 1)).contiguous(**memory)
    strides = np.broadcast_to(layer.options.get("strides", 1), rank).tolist()
    padding = layer.options.get("padding", "SAME")
    if padding == "CAUSAL":
        pads = [(k - 1, 0) for k in layer.w[:rank]]
    else:
        pads = jax.lax.padtype_to_pads(layer.x[1:-1], layer.w[:rank], strides, padding)
    flat = [p for pair in reversed(pads) for p in pair]
    convolve = getattr(torch.nn.functional, f"conv{rank}d")

    def forward(x, w):
        padded = torch.nn.functional.pad(x, flat)
        return convolve(padded, w, None, strides, groups=layer.options.get("groups", 1))

    def gradient(*inputs):
        def run(*_):
            y = forward(x, w)
            return y, torch.autograd.grad(y, inputs, dy)

        return run

    def no_gradient(*_):
        with torch.no_grad():
            return forward(x, w)

    return {
        "fwd": no_gradient,
        "dx": gradient(x),
        "dw": gradient(w),
        "fwd+bwd": gradient(x, w),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="", help="only rows with this in their names")
    parser.add_argument("--torch", action="store_true", help="PyTorch beside them")
    arguments = parser.parse_args()
    layers = [layer for layer in LAYERS if arguments.rows in layer.name]
    rows = [row for layer in layers for row in measure(layer, arguments.torch)]
    rows = renew("conv", rows) if arguments.rows else rows
    shown = [
        r for r in rows if r["pass"] == "fwd+bwd" and r["implementation"] == "default"
    ]
    dense = [r["ratio"] for r in shown if r["layer"].startswith("3x3 8x")]
    if dense:
        mean = jnp.exp(jnp.log(jnp.array(dense)).mean())
        print(f"geometric mean of the dense 3x3 rows, forward and backward: {mean:.2f}")
    print(save("conv", rows))
    print(plot_ratios("conv", shown, "float32, forward and backward"))


if __name__ == "__main__":
    main()
