"""A training loop of your own: our ops, policy and loss scale with optax; no trainer.

Learns which quarter of a noisy image is bright: a convolution, attention over the
positions it gives, and a linear layer, in float16 with dynamic loss scaling.
"""

import jax
import jax.numpy as jnp
import optax

from opsnn_jax.ops.attention import flash_attention
from opsnn_jax.ops.conv import conv2d
from opsnn_jax.training import DynamicLossScale, Policy, all_finite, select

POLICY = Policy.parse("mixed_float16")
# Too high on purpose: the first steps overflow, are skipped, and the scale comes down.
SCALE = DynamicLossScale(initial=2.0**24, growth_interval=100)
OPTIMIZER = optax.adam(3e-3)


def init(key):
    keys = jax.random.split(key, 4)
    return {
        "conv": 0.3 * jax.random.normal(keys[0], (3, 3, 1, 16)),
        "positions": jax.random.normal(keys[3], (1, 16, 16)),
        "qkv": 0.2 * jax.random.normal(keys[1], (16, 48)),
        "head": 0.2 * jax.random.normal(keys[2], (16, 4)),
    }


def loss_fn(params, images, labels):
    # Each weight is cast where it is used; the loss is computed in fp32.
    w = POLICY.cast_to_compute
    x = jax.nn.relu(conv2d(w(images), w(params["conv"]), strides=2))
    x = x.reshape(x.shape[0], -1, 16) + w(params["positions"])
    q, k, v = jnp.split((x @ w(params["qkv"]))[:, :, None, :], 3, axis=-1)
    x = x + flash_attention(q, k, v)[:, :, 0, :]
    logits = POLICY.cast_to_output(x).mean(1) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@jax.jit
def train_step(params, opt_state, scale, images, labels):
    def scaled_loss(params):
        loss = loss_fn(params, images, labels)
        return SCALE.scale(scale, loss), loss

    grads, loss = jax.grad(scaled_loss, has_aux=True)(params)
    grads = SCALE.unscale(scale, grads)
    finite = all_finite(grads)
    updates, new_opt_state = OPTIMIZER.update(grads, opt_state, params)
    new_params = optax.apply_updates(params, updates)
    params, opt_state = select(finite, (new_params, new_opt_state), (params, opt_state))
    return params, opt_state, SCALE.adjust(scale, finite), loss


def batch(key):
    """Images (32, 8, 8, 1) whose quarter `labels` is brighter than the noise."""
    noise_key, label_key = jax.random.split(key)
    labels = jax.random.randint(label_key, (32,), 0, 4)
    rows = jnp.arange(8)[None, :, None] // 4 == (labels // 2)[:, None, None]
    columns = jnp.arange(8)[None, None, :] // 4 == (labels % 2)[:, None, None]
    bright = (rows & columns).astype(jnp.float32)[..., None]
    return bright + 0.5 * jax.random.normal(noise_key, (32, 8, 8, 1)), labels


def main(steps=200):
    params = init(jax.random.key(0))
    opt_state, scale = OPTIMIZER.init(params), SCALE.init()
    for step in range(steps):
        data = batch(jax.random.fold_in(jax.random.key(1), step))
        params, opt_state, scale, loss = train_step(params, opt_state, scale, *data)
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step}  loss {loss:.4f}  scale {scale.scale:g}")
    return float(loss), int(scale.total_skips)


if __name__ == "__main__":
    print("loss {:.4f}, skipped steps {}".format(*main()))
