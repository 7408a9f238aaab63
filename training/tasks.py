"""What a configuration trains: a model, its loss, its data and how it is judged."""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from ..models.gpt import GPT, generate
from ..models.resnet import ResNet
from . import data
from .config import Config, OptimizerConfig
from .leaves import PyTree
from .policy import Policy
from .window import LossFn

# The same draws whatever the run's seed, so that samples of two runs compare.
_SAMPLE_SEED = 0


@dataclass(frozen=True)
class Task:
    """One training task.

    Attributes:
      params: fresh parameters, fp32.
      model_state: what the model carries besides, or `()`.
      loss_fn: as `make_train_step` wants it; its metrics hold `accuracy`.
      batches: of training data, without end.
      steps: how many updates the run makes.
      counted: what a batch holds, "images" or "tokens"; for the display of speed.
      count: how many of them a batch holds.
      evaluate: `evaluate(params, model_state)`, results by name on data kept apart.
      sample: `sample(params, model_state)`, text that the model writes, or None.
    """

    params: PyTree
    model_state: PyTree
    loss_fn: LossFn
    batches: data.BatchStream
    steps: int
    counted: str
    count: int
    evaluate: Callable[[PyTree, PyTree], dict[str, float]]
    sample: Callable[[PyTree, PyTree], str] | None = None


def make_task(config: Config) -> Task:
    """The task that a configuration describes.

    Raises:
      DataError: if the data cannot be had, or holds less than a batch.
    """
    make = {"mnist": classify_images, "python_manual": model_text}[config.data.name]
    return make(config)


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The optimizer with its schedule over `steps` updates."""
    if config.schedule == "cosine":
        warmup = min(config.warmup_steps, steps - 1)
        rest = optax.cosine_decay_schedule(config.learning_rate, steps - warmup)
    else:  # which does not depend on the steps, so that a run can be made longer
        warmup = config.warmup_steps
        rest = optax.constant_schedule(config.learning_rate)
    rise = optax.linear_schedule(0.0, config.learning_rate, max(warmup, 1))
    # The first update already has a rate above zero.
    rate = optax.join_schedules([lambda count: rise(count + 1), rest], [warmup])
    if config.name == "adamw":
        return optax.adamw(rate, b2=config.beta2, weight_decay=config.weight_decay)
    return optax.chain(
        optax.add_decayed_weights(config.weight_decay),
        optax.sgd(rate, momentum=config.momentum, nesterov=True),
    )


def classify_images(config: Config) -> Task:
    """A residual network on MNIST digits."""
    options, policy = config.data, config.optimization.policy
    images = data.load_mnist(options.test_size, config.run.seed)
    batches = data.shuffled(images.train, options.batch_size, config.run.seed)
    dtypes = _LayerDtypes(policy)
    model = ResNet(config.model.widths, config.model.blocks, dtypes=dtypes)
    # Under jit: op by op it would compile each of them.
    variables = jax.jit(functools.partial(model.init, train=False))(
        jax.random.key(config.run.seed), images.train["image"][:1]
    )
    dtypes.check()

    def loss_fn(params, batch_stats, batch, rng):
        logits, new = model.apply(
            {"params": params, "batch_stats": batch_stats},
            shifted(batch["image"], rng, options.shift),
            train=True,
            mutable=["batch_stats"],
        )
        loss, accuracy = _cross_entropy(logits, batch["label"])
        return loss.mean(), (new["batch_stats"], {"accuracy": accuracy.mean()})

    @jax.jit
    def judge(params, batch_stats, batch):
        variables = {"params": params, "batch_stats": batch_stats}
        logits = model.apply(variables, batch["image"], train=False)
        loss, right = _cross_entropy(logits, batch["label"])
        return (loss * batch["counts"]).sum(), (right * batch["counts"]).sum()

    def evaluate(params, batch_stats):
        batches = data.in_order(images.test, options.batch_size)
        sums = [judge(params, batch_stats, batch) for batch in batches]
        loss, right = np.sum(jax.device_get(sums), axis=0) / len(images.test["label"])
        return {"test loss": float(loss), "test accuracy": float(right)}

    rows = len(images.train["label"])
    return Task(
        params=variables["params"],
        model_state=variables["batch_stats"],
        loss_fn=loss_fn,
        batches=batches,
        steps=_steps(config, rows // options.batch_size),
        counted="images",
        count=options.batch_size,
        evaluate=evaluate,
    )


def model_text(config: Config) -> Task:
    """A small GPT on the characters of the Python manual."""
    options, shape = config.data, config.model
    policy = config.optimization.policy
    text = data.load_python_manual(options.test_share)
    unknown = sorted(set(shape.prompt) - set(text.alphabet))
    if unknown:
        raise data.DataError(
            f"model.prompt: must use characters of the text; got {unknown[0]!r}, which "
            "is not among them."
        )
    length = options.sequence_length
    batches = data.random_windows(
        text.train, length, options.batch_size, config.run.seed
    )

    windows = data.consecutive_windows(text.test, length)

    dtypes = _LayerDtypes(policy)

    def make():
        return GPT(
            len(text.alphabet),
            length,
            layers=shape.layers,
            width=shape.width,
            heads=shape.heads,
            dropout=shape.dropout,
            dtypes=dtypes,
            rngs=nnx.Rngs(config.run.seed),
        )

    graph, _ = nnx.split(nnx.eval_shape(make))
    dtypes.check()
    # Under jit: op by op it would compile each of them.
    params = jax.jit(lambda: nnx.split(make())[1])()

    def loss_fn(params, model_state, batch, rng):
        dropout_key = rng if shape.dropout else None
        logits = nnx.merge(graph, params)(batch["tokens"], dropout_key=dropout_key)
        loss, accuracy = _cross_entropy(logits, batch["next"])
        return loss.mean(), (model_state, {"accuracy": accuracy.mean()})

    @jax.jit
    def judge(params, batch):
        logits = nnx.merge(graph, params)(batch["tokens"])
        loss, right = _cross_entropy(logits, batch["next"])
        counts = batch["counts"][:, None]
        return (loss * counts).sum(), (right * counts).sum()

    def evaluate(params, model_state):
        batches = data.in_order(windows, options.batch_size)
        sums = [judge(params, batch) for batch in batches]
        loss, right = np.sum(jax.device_get(sums), axis=0) / windows["next"].size
        return {
            "bits per character": float(loss / np.log(2)),
            "test accuracy": float(right),
        }

    def sample(params, model_state):
        number = {c: i for i, c in enumerate(text.alphabet)}
        prompt = jnp.asarray([number[c] for c in shape.prompt], jnp.int32)
        written = generate(
            nnx.merge(graph, params),
            prompt,
            shape.sample_length,
            jax.random.key(_SAMPLE_SEED),
        )
        return "".join(text.alphabet[i] for i in np.asarray(written))

    per_batch = options.batch_size * length
    return Task(
        params=params,
        model_state=(),
        loss_fn=loss_fn,
        batches=batches,
        steps=_steps(config, len(text.train) // per_batch),
        counted="tokens",
        count=per_batch,
        evaluate=evaluate,
        sample=sample,
    )


class _LayerDtypes:
    """The dtype of each layer by its path; knows which rules were for one."""

    def __init__(self, policy: Policy):
        self._policy, self._paths = policy, []

    def __call__(self, path: str) -> Any:
        self._paths.append(path)
        return self._policy.compute_dtype(path)

    def check(self) -> None:
        """Once the model is made. A rule for no layer is most likely a slip."""
        for pattern, _ in self._policy.rules:
            if not any(re.search(pattern, path) for path in self._paths):
                raise data.DataError(
                    f"optimization.rules: {pattern!r} matches no layer; those are "
                    f"{', '.join(dict.fromkeys(self._paths))}."
                )


def shifted(images: jax.Array, rng: jax.Array, by: int) -> jax.Array:
    """Each image `(N, H, W, C)` moved by up to `by` pixels; zeros come in."""
    if by == 0:
        return images
    padded = jnp.pad(images, ((0, 0), (by, by), (by, by), (0, 0)))
    corners = jax.random.randint(rng, (images.shape[0], 2), 0, 2 * by + 1)

    def cut(image, corner):
        start = (corner[0], corner[1], 0)
        return jax.lax.dynamic_slice(image, start, images.shape[1:])

    return jax.vmap(cut)(padded, corners)


def _cross_entropy(logits: jax.Array, labels: jax.Array):
    """The loss and whether the guess is right, for each label, fp32."""
    logits = logits.astype(jnp.float32)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return loss, (logits.argmax(-1) == labels).astype(jnp.float32)


def _steps(config: Config, per_epoch: int) -> int:
    return config.run.steps or config.run.epochs * max(per_epoch, 1)
