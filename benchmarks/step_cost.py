"""What our step costs over one written by hand with optax: a small CNN and a small GPT.

The step by hand differentiates the same loss, updates with the same optimizer and
donates its state; it checks nothing. Ours keeps fp32 master weights, checks everything
that is written and selects on a skip; "scaled" adds a dynamic loss scale and clipping,
"monitored" a monitor every 10 steps besides. Each timing is of 10 steps.

python benchmarks/step_cost.py            the table, results/step_cost.json and .png
python benchmarks/step_cost.py --quick    few rounds
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from harness import plot_ratios, save, time_in_turn
from rich.console import Console
from rich.table import Table

from opsnn_jax.models.gpt import GPT
from opsnn_jax.models.resnet import ResNet
from opsnn_jax.training import (
    DynamicLossScale,
    Monitor,
    Policy,
    TrainState,
    make_train_step,
)

STEPS = 10
OPTIMIZER = optax.adamw(1e-3)
POLICY = Policy.parse("mixed_bfloat16")
OPTIONS = {
    "ours": {},
    "ours, scaled": {"loss_scale": DynamicLossScale(), "clip_norm": 1.0},
    "ours, scaled, monitored": {
        "loss_scale": DynamicLossScale(),
        "clip_norm": 1.0,
        "monitor": Monitor(every=10),
    },
}


def cnn():
    model = ResNet((16, 32), dtype=POLICY.compute)
    rng = np.random.default_rng(0)
    batch = {
        "image": jnp.asarray(rng.normal(size=(64, 28, 28, 1)), jnp.float32),
        "label": jnp.asarray(rng.integers(0, 10, 64), jnp.int32),
    }
    init = jax.jit(lambda key: model.init(key, batch["image"], train=False))
    variables = init(jax.random.key(0))

    def loss_fn(params, stats, batch, rng):
        logits, new = model.apply(
            {"params": params, "batch_stats": stats},
            batch["image"],
            train=True,
            mutable=["batch_stats"],
        )
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return loss.mean(), (new["batch_stats"], {})

    return variables["params"], variables["batch_stats"], loss_fn, batch


def gpt():
    def make():
        return GPT(
            96,
            128,
            layers=2,
            width=128,
            heads=4,
            dtype=POLICY.compute,
            rngs=nnx.Rngs(0),
        )

    graph, _ = nnx.split(nnx.eval_shape(make))
    params = jax.jit(lambda: nnx.split(make())[1])()
    tokens = np.random.default_rng(0).integers(0, 96, (8, 129))
    batch = {
        "tokens": jnp.asarray(tokens[:, :-1], jnp.int32),
        "next": jnp.asarray(tokens[:, 1:], jnp.int32),
    }

    def loss_fn(params, model_state, batch, rng):
        logits = nnx.merge(graph, params)(batch["tokens"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"])
        return loss.mean(), (model_state, {})

    return params, (), loss_fn, batch


def by_hand(params, model_state, loss_fn):
    @jax.jit(donate_argnums=0)
    def step(state, batch):
        params, opt_state, model_state, count = state
        rng = jax.random.fold_in(jax.random.key(0), count)
        (loss, (model_state, _)), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            params, model_state, batch, rng
        )
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state, model_state, count + 1), loss

    copies = jax.tree.map(jnp.copy, (params, model_state))
    return step, (copies[0], OPTIMIZER.init(params), copies[1], jnp.int32(0))


def ours(params, model_state, loss_fn, options):
    scale = {"loss_scale": options.get("loss_scale")}
    state = TrainState.create(
        params, OPTIMIZER, policy=POLICY, model_state=model_state, **scale
    )
    return make_train_step(loss_fn, OPTIMIZER, policy=POLICY, **options), state


def repeated(step, state):
    """10 steps that go on from where the last 10 ended."""

    def run(batch):
        nonlocal state
        for _ in range(STEPS):
            state, metrics = step(state, batch)
        return metrics

    return run


def state_bytes(state):
    return sum(x.nbytes for x in jax.tree.leaves((state.params, state.opt_state)))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    rounds = 3 if parser.parse_args().quick else 21
    console, rows = Console(), []
    table = Table(title=f"time of a step, medians of {rounds} rounds in turn")
    for name in ("model", "step", "ms", "ratio", "quartiles"):
        table.add_column(name, justify="left" if name in ("model", "step") else "right")
    for name, make in {"cnn": cnn, "gpt": gpt}.items():
        params, model_state, loss_fn, batch = make()
        variants = {"by hand": repeated(*by_hand(params, model_state, loss_fn))}
        for label, options in OPTIONS.items():
            step, state = ours(params, model_state, loss_fn, options)
            variants[label] = repeated(step, state)
        count = sum(x.size for x in jax.tree.leaves(params))
        # Master weight and two moments, fp32 each, and the counts of the schedule.
        console.print(
            f"{name}: {count:,} parameters; parameters and optimizer of a fresh state "
            f"{state_bytes(ours(params, model_state, loss_fn, {})[1]):,} bytes, "
            f"12 for each parameter are {12 * count:,}"
        )
        for label, times in time_in_turn(variants, (batch,), rounds).items():
            low, high = times["ratio_quartiles"]
            table.add_row(
                name,
                label,
                f"{times['ms'] / STEPS:.3f}",
                f"{times['ratio']:.3f}",
                f"{low:.3f} to {high:.3f}",
            )
            rows.append({"label": f"{name}, {label}", "model": name} | times)
    console.print(table)
    if rounds > 3:
        path = save("step_cost", rows)
        picture = plot_ratios("step_cost", rows, "A training step", "one by hand")
        console.print(f"saved {path} and {picture}")


if __name__ == "__main__":
    main()
