"""What precision, loss scaling and master weights do to training: digits and text.

Each row trains the same model from the same weights on the same batches. At a loss
factor of 1e-5 the gradients are as small as those of a deep network's first layers:
fp16 rounds most of them to zero unless the loss is scaled. Adam itself does not mind
the factor, for its epsilon is made as small.

python benchmarks/mixed_precision.py            the table, results/mixed_precision.json
python benchmarks/mixed_precision.py --quick    digits only, in less than a minute
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from harness import save
from rich.console import Console
from rich.table import Table

from opsnn_jax.models.gpt import GPT
from opsnn_jax.training import (
    DynamicLossScale,
    NoLossScale,
    Policy,
    TrainState,
    make_train_step,
)
from opsnn_jax.training import data as datasets

# A short run would end before the default interval lets the scale grow.
DYNAMIC = DynamicLossScale(growth_interval=100)
VARIANTS = {
    "fp32": (Policy.parse("float32"), NoLossScale()),
    "bf16, fp32 master": (Policy.parse("mixed_bfloat16"), NoLossScale()),
    "fp16, fp32 master, scaled": (Policy.parse("mixed_float16"), DYNAMIC),
    "fp16, fp32 master": (Policy.parse("mixed_float16"), NoLossScale()),
    "bf16 only": (Policy("bfloat16", "bfloat16", "bfloat16"), NoLossScale()),
    "fp16 only": (Policy("float16", "float16", "float16"), NoLossScale()),
}
FACTORS = (1.0, 1e-5)


def cross_entropy(logits, labels):
    logits = logits.astype(jnp.float32)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, (logits.argmax(-1) == labels).mean(dtype=jnp.float32)


def digits(policy, steps):
    """Two dense layers on the 5,000 MNIST digits; the metric is test accuracy."""
    images = datasets.load_mnist(test_size=1000, seed=0)
    batches = datasets.shuffled(images.train, batch_size=64, seed=0)
    keys = jax.random.split(jax.random.key(0))
    he = jax.nn.initializers.he_normal()
    params = {
        "first": he(keys[0], (784, 128)),
        "bias": jnp.zeros(128),
        "last": he(keys[1], (128, 10)),
    }
    cast = policy.cast_to_compute

    def predict(params, images):
        x = cast(images.reshape(len(images), -1)) @ cast(params["first"])
        return jax.nn.relu(x + cast(params["bias"])) @ cast(params["last"])

    def loss(params, batch):
        return cross_entropy(predict(params, batch["image"]), batch["label"])[0]

    def metric(params):
        return cross_entropy(
            predict(params, images.test["image"]), images.test["label"]
        )[1]

    return params, loss, metric, stack(batches, steps), 1e-3


def text(policy, steps):
    """A small GPT on the Python manual; the metric is bits per character."""
    manual = datasets.load_python_manual(test_share=0.02)
    length = 64
    batches = datasets.random_windows(manual.train, length, 16, seed=0)
    test = datasets.consecutive_windows(manual.test, length)

    def make():
        return GPT(
            len(manual.alphabet),
            length,
            layers=2,
            width=64,
            heads=4,
            dtype=policy.compute,
            rngs=nnx.Rngs(0),
        )

    graph, _ = nnx.split(nnx.eval_shape(make))
    params = jax.jit(lambda: nnx.split(make())[1])()

    def loss(params, batch):
        return cross_entropy(nnx.merge(graph, params)(batch["tokens"]), batch["next"])[
            0
        ]

    def metric(params):
        parts = {
            name: rows.reshape(-1, 16, length) for name, rows in whole(test).items()
        }
        return jax.lax.map(lambda part: loss(params, part), parts).mean() / jnp.log(2.0)

    return params, loss, metric, stack(batches, steps), 3e-3


def whole(rows):
    """Rows that make whole batches of 16."""
    count = len(rows["next"]) // 16 * 16
    return {name: values[:count] for name, values in rows.items()}


def stack(batches, steps):
    drawn = [next(batches) for _ in range(steps)]
    return {name: np.stack([b[name] for b in drawn]) for name in drawn[0]}


TASKS = {
    "digits": (digits, 600, "test accuracy"),
    "text": (text, 400, "bits/character"),
}


def train(make, steps, variant, factor):
    policy, loss_scale = VARIANTS[variant]
    params, loss, metric, batches, rate = make(policy, steps)
    # Without a master copy epsilon is 0 in half precision, whatever is written here.
    optimizer = optax.adam(rate, eps=1e-8 * factor)
    scaling = {"policy": policy, "loss_scale": loss_scale}
    state = TrainState.create(params, optimizer, **scaling)

    def loss_fn(params, model_state, batch, rng):
        return factor * loss(params, batch), (model_state, {})

    step = make_train_step(loss_fn, optimizer, donate=False, **scaling)

    @jax.jit
    def run(state, batches):
        # All steps in one program: what is compared is numbers, not speed.
        return jax.lax.scan(lambda s, b: (step(s, b)[0], None), state, batches)[0]

    end = run(state, batches)
    return {
        "metric": float(jax.jit(metric)(end.params)),
        "skipped": int(end.loss_scale.total_skips),
        "scale": float(end.loss_scale.scale),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    console, rows = Console(), []
    for task in ("digits",) if quick else TASKS:
        make, steps, metric = TASKS[task]
        steps = 150 if quick else steps
        for factor in FACTORS:
            table = Table(title=f"{task}, {steps} steps, loss x {factor:g}")
            for name in ("precision", metric, "skipped steps", "loss scale"):
                table.add_column(
                    name, justify="left" if name == "precision" else "right"
                )
            for variant in VARIANTS:
                row = train(functools.partial(make), steps, variant, factor)
                table.add_row(
                    variant,
                    f"{row['metric']:.4f}",
                    str(row["skipped"]),
                    f"{row['scale']:.10g}",
                )
                rows.append(
                    {"task": task, "loss_factor": factor, "variant": variant} | row
                )
            console.print(table)
    if not quick:
        console.print(f"saved {save('mixed_precision', rows)}")


if __name__ == "__main__":
    main()
