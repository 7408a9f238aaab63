"""conv2d against `lax.conv_general_dilated` under `jax.grad`: 3x3, stride 1, float32.

python benchmarks/conv.py            the table below, results/conv.json and .png
python benchmarks/conv.py --quick    two rows only
"""

import argparse
import functools

import jax
import jax.numpy as jnp
from harness import plot_ratios, save, time_in_turn, workspace

from opsnn_jax import conv2d

# (N, H, C, O): 3x3 layers of ResNet-50 and VGG-16 at batch 8, and of a small ResNet.
LAYERS = [
    (8, 56, 64, 64), (8, 28, 128, 128), (8, 14, 256, 256), (8, 7, 512, 512),
    (8, 112, 64, 128), (8, 56, 128, 256), (8, 28, 256, 512), (8, 14, 512, 512),
    (64, 28, 16, 16), (64, 14, 32, 32),
]  # fmt: skip
IMPLEMENTATIONS = {"default": None, "winograd": "winograd"}


def passes(implementation):
    """forward, dx, dw, and forward with both gradients, as functions of (x, w, dy)."""
    f = functools.partial(conv2d, implementation=implementation)

    def both(x, w, dy):
        y, vjp = jax.vjp(f, x, w)
        return y, vjp(dy)

    return {
        "fwd": lambda x, w, dy: f(x, w),
        "dx": lambda x, w, dy: jax.vjp(lambda x: f(x, w), x)[1](dy),
        "dw": lambda x, w, dy: jax.vjp(lambda w: f(x, w), w)[1](dy),
        "fwd+bwd": both,
    }


def measure(layer):
    n, h, c, o = layer
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((n, h, h, c), (3, 3, c, o), (n, h, h, o))
    arrays = tuple(map(jax.random.normal, keys, shapes))
    rows = []
    for name in passes(None):
        variants = {"xla": jax.jit(passes("reference")[name])}
        for label, implementation in IMPLEMENTATIONS.items():
            variants[label] = jax.jit(passes(implementation)[name])
        times = time_in_turn(variants, arrays)
        for label in IMPLEMENTATIONS:
            rows.append(
                {
                    "layer": layer,
                    "pass": name,
                    "implementation": label,
                    "label": f"{label} {name} {n}x{h}x{h} {c}-{o}",
                    "xla_ms": times["xla"]["ms"],
                    "workspace": workspace(variants[label], arrays),
                    "xla_workspace": workspace(variants["xla"], arrays),
                    **times[label],
                }
            )
            print(f"{rows[-1]['label']:40} {rows[-1]['ratio']:.2f}", flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two rows only")
    layers = LAYERS[:2] if parser.parse_args().quick else LAYERS
    rows = [row for layer in layers for row in measure(layer)]
    print(save("conv", rows))
    shown = [
        r for r in rows if r["pass"] == "fwd+bwd" and r["implementation"] == "default"
    ]
    print(plot_ratios("conv", shown, "conv2d 3x3, float32, forward and backward"))
    geometric = jnp.exp(jnp.log(jnp.array([r["ratio"] for r in shown])).mean())
    print(f"geometric mean of the default, forward and backward: {geometric:.2f}")


if __name__ == "__main__":
    main()
