"""Models that are trained for a few steps, and what a step writes."""

import functools

import flax.linen as linen
import jax
import jax.numpy as jnp
import optax

from opsnn_jax.training import Policy

FP16 = Policy.parse("mixed_float16")
FP32 = Policy.parse("float32")


class SmallNet(linen.Module):
    """Convolution, batch norm, dropout and a dense layer."""

    dtype: jnp.dtype

    @linen.compact
    def __call__(self, x, train):
        x = linen.Conv(4, (3, 3), dtype=self.dtype)(x)
        x = linen.BatchNorm(not train, dtype=self.dtype)(x)
        x = linen.Dropout(0.1, deterministic=not train)(linen.relu(x))
        return linen.Dense(3, dtype=self.dtype)(x.reshape(x.shape[0], -1))


def cnn(policy, key):
    """Loss function, parameters, batch statistics and a batch of a small net."""
    model = SmallNet(policy.compute)
    image_key, label_key, init_key = jax.random.split(key, 3)
    batch = {
        "image": jax.random.normal(image_key, (8, 6, 6, 1)),
        "label": jax.random.randint(label_key, (8,), 0, 3),
    }
    with jax.numpy_dtype_promotion("standard"):  # flax needs it
        init = jax.jit(functools.partial(model.init, train=False))
        variables = init(init_key, batch["image"])

    def loss_fn(params, stats, batch, rng):
        with jax.numpy_dtype_promotion("standard"):
            logits, new = model.apply(
                {"params": params, "batch_stats": stats},
                batch["image"],
                train=True,
                mutable=["batch_stats"],
                rngs={"dropout": rng},
            )
        logits = policy.cast_to_output(logits)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        accuracy = (logits.argmax(-1) == batch["label"]).astype(jnp.float32).mean()
        return loss.mean(), (new["batch_stats"], {"accuracy": accuracy})

    return loss_fn, variables["params"], variables["batch_stats"], batch


def mlp(policy, key):
    """Loss function, parameters, running mean and batch of two dense layers."""
    keys = jax.random.split(key, 4)
    params = {
        "first": 0.4 * jax.random.normal(keys[0], (6, 16)),
        "bias": jnp.zeros(16),
        "last": 0.2 * jax.random.normal(keys[1], (16, 3)),
    }
    batch = {
        "x": jax.random.normal(keys[2], (8, 6)),
        "label": jax.random.randint(keys[3], (8,), 0, 3),
    }

    def loss_fn(params, model_state, batch, rng):
        cast = policy.cast_to_compute
        hidden = cast(batch["x"]) @ cast(params["first"]) + cast(params["bias"])[None]
        logits = policy.cast_to_output(jnp.tanh(hidden) @ cast(params["last"]))
        picked = jnp.take_along_axis(
            jax.nn.log_softmax(logits), batch["label"][:, None], axis=1
        )
        mean = 0.9 * model_state + 0.1 * policy.cast_to_output(hidden).mean(0)
        return -picked.mean(), (mean, {})

    return loss_fn, params, jnp.zeros(16), batch


def linear(params, model_state, batch, rng):
    """The mean of g w: its gradient is the mean of g."""
    return (batch["g"] * params["w"]).mean(), (model_state, {})


def written(state):
    return state.params, state.opt_state, state.model_state, state.ema, state.step
