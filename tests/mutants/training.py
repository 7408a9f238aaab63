"""Bugs of loss scales, the train step, and what is sent between devices."""

from tests.mutants.mutant import Mutant

_SCALE = "tests/training/test_loss_scale.py::"
_STEP = "tests/training/test_step.py::"
_WINDOW = "tests/training/test_window.py::"
_COMPRESSION = "tests/training/test_compression.py::"
_COMPRESSED = "tests/training/test_compressed_training.py::"

LOSS_SCALE = (
    Mutant(
        "scale-growth-off-by-one",
        "training/loss_scale.py",
        "grow = count >= self.growth_interval",
        "grow = count > self.growth_interval",
        (_SCALE + "test_reproduces_published_sequence",),
    ),
    Mutant(
        "scale-count-kept-at-growth",
        "training/loss_scale.py",
        "growth_count=jnp.where(grow, 0, count)",
        "growth_count=count",
        (_SCALE + "test_reproduces_published_sequence",),
    ),
    Mutant(
        "scale-count-kept-at-overflow",
        "training/loss_scale.py",
        "jnp.where(finite, state.growth_count + 1, 0)",
        "jnp.where(finite, state.growth_count + 1, state.growth_count)",
        (_SCALE + "test_reproduces_published_sequence",),
    ),
    Mutant(
        "scale-no-floor",
        "training/loss_scale.py",
        "jnp.maximum(state.scale * self.backoff, self.min)",
        "state.scale * self.backoff",
        (_SCALE + "test_backoff_stops_at_the_floor_which_may_be_below_one",),
    ),
    Mutant(
        "scale-no-ceiling",
        "training/loss_scale.py",
        "jnp.minimum(state.scale * self.growth, self.max)",
        "state.scale * self.growth",
        (_SCALE + "test_growth_stops_at_the_ceiling_and_comes_back",),
    ),
    Mutant(
        "scale-no-hysteresis",
        "training/loss_scale.py",
        "~finite & (state.hysteresis_left <= 1)",
        "~finite",
        (_SCALE + "test_reproduces_published_sequence",),
    ),
    Mutant(
        "scale-unscaled-in-half",
        "training/loss_scale.py",
        "return g.astype(jnp.float32) * inverse if is_float(g) else g",
        "return g * inverse.astype(g.dtype) if is_float(g) else g",
        (_SCALE + "test_unscaled_gradients_are_fp32",),
    ),
)

STEP = (
    Mutant(
        "step-unscaled-with-the-next-scale",
        "training/window.py",
        "loss_scale.unscale(state.loss_scale, grads)",
        "loss_scale.unscale(\n"
        "            loss_scale.adjust(state.loss_scale, jnp.asarray(True)), grads\n"
        "        )",
        (_STEP + "test_any_power_of_two_schedule_leaves_fp32_bitwise_unchanged",),
    ),
    Mutant(
        "step-gradients-not-checked",
        "training/step.py",
        "finite = finite_leaves.all() & jnp.isfinite(norm)",
        "finite = jnp.asarray(True)",
        (_STEP + "test_norm_beyond_fp32_is_a_skip_and_not_a_zero_update",),
    ),
    Mutant(
        "step-update-not-checked",
        "training/step.py",
        "lambda: stays_finite(after, before)",
        "lambda: jnp.asarray(True)",
        (_STEP + "test_optimizer_that_makes_a_nan_is_skipped",),
    ),
    Mutant(
        "step-select-by-multiplying",
        "training/leaves.py",
        "return jnp.where(take_new, n, o)",
        "taken = take_new.astype(n.dtype)\n        return taken * n + (1 - taken) * o",
        ("tests/training/test_leaves.py::test_tree_that_is_not_taken_leaves_no_trace",),
    ),
    Mutant(
        "step-batch-statistics-kept-on-a-skip",
        "training/step.py",
        "**select(finite, after, before),",
        "**select(finite, after, before) | {'model_state': window.model_state},",
        (_STEP + "test_fp16_overflow_leaves_everything_bitwise_unchanged",),
    ),
    Mutant(
        "step-clipped-before-unscaling",
        "training/step.py",
        "clip_by_norm(clipped, clip_norm, left)",
        "clip_by_norm(clipped, clip_norm, left * state.loss_scale.scale)",
        (_STEP + "test_clip_after_unscale",),
    ),
    Mutant(
        "step-mean-of-means",
        "training/window.py",
        "jnp.asarray(1.0 if weight_fn is None else weight_fn(part))",
        "jnp.asarray(1.0)",
        (_WINDOW + "test_ragged_micro_batches_equal_one_batch",),
    ),
    Mutant(
        "step-micro-batches-summed-in-half",
        "training/window.py",
        "return (s.astype(wide) + weigh(g).astype(wide)).astype(policy.accumulate)",
        "return (s + weigh(g)).astype('bfloat16').astype(policy.accumulate)",
        (_WINDOW + "test_micro_batches_are_summed_in_fp32",),
    ),
    Mutant(
        "step-counted-on-a-skip",
        "training/step.py",
        "**select(finite, after, before),",
        "**select(finite, after, before) | {'step': state.step + 1},",
        (
            _WINDOW
            + "test_overflow_in_one_micro_batch_skips_the_window_and_leaves_nothing",
        ),
    ),
    Mutant(
        "step-random-key-moves-on-a-skip",
        "training/window.py",
        "jax.random.fold_in(state.rng, state.step)",
        "jax.random.fold_in(state.rng, state.attempted_steps)",
        (_STEP + "test_fp16_overflow_leaves_everything_bitwise_unchanged",),
    ),
    Mutant(
        "step-donates-shared-buffers",
        "training/leaves.py",
        "jnp.array(leaf, copy=True)",
        "jnp.asarray(leaf)",
        (_STEP + "test_state_shares_no_buffer_and_can_be_donated",),
    ),
    Mutant(
        "clip-norm-underflows",
        "training/clip.py",
        " & (squares > _SAFE_SUM)",
        "",
        ("tests/training/test_clip.py::test_global_norm",),
    ),
    Mutant(
        "step-infinity-of-the-state-taken-for-a-fault",
        "training/leaves.py",
        "verdicts = [(jnp.isfinite(n) | ~jnp.isfinite(o)).all() for n, o in pairs]",
        "verdicts = [jnp.isfinite(n).all() for n, _ in pairs]",
        ("tests/training/test_leaves.py::test_which_leaf_is_not_finite",),
    ),
    Mutant(
        "clip-norm-overflows",
        "training/clip.py",
        "inverse = _inverse_size(largest)",
        "inverse = jnp.float32(1.0)",
        ("tests/training/test_clip.py::test_global_norm",),
    ),
    Mutant(
        "policy-casts-integers",
        "training/leaves.py",
        "return array and jnp.issubdtype(leaf.dtype, jnp.floating)",
        "return array and jnp.issubdtype(leaf.dtype, jnp.number)",
        ("tests/training/test_policy.py::test_only_floating_leaves_are_cast",),
    ),
    Mutant(
        "config-takes-unknown-keys",
        "training/config.py",
        'extra="forbid"',
        'extra="ignore"',
        ("tests/training/test_config.py::test_fault_is_one_line_naming_the_key",),
    ),
)

COMPRESSION = (
    Mutant(
        "compression-of-signed-values",
        "training/compression.py",
        "jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.inf)",
        "jnp.where(jnp.isfinite(x), x, jnp.inf)",
        (_COMPRESSION + "test_top_k_keeps_the_largest_and_the_first_of_equals",),
    ),
    Mutant(
        "compression-forgets-the-rest",
        "training/compression.py",
        "return sent, x - self.decode(sent, x.shape)",
        "return sent, jnp.zeros_like(x)",
        (_COMPRESSED + "test_late_gradients_come_and_each_worker_owes_its_own",),
    ),
    Mutant(
        "compression-hides-an-overflow",
        "training/compression.py",
        "scale = jnp.where(jnp.isfinite(largest), scale, jnp.nan)",
        "scale = jnp.where(jnp.isfinite(largest), scale, 1.0)",
        (_COMPRESSION + "test_what_is_not_finite_is_never_hidden",),
    ),
    Mutant(
        "compression-residual-moves-on-a-skip",
        "training/step.py",
        "**select(finite, after, before),",
        "**select(finite, after, before) | {'residual': window.residual},",
        (_COMPRESSED + "test_overflow_on_one_worker_leaves_no_trace",),
    ),
    Mutant(
        "compression-residual-of-the-sum",
        "training/window.py",
        "jax.tree.map(lambda x: x / weight, owed)",
        "jax.tree.map(lambda x: x, owed)",
        (_COMPRESSED + "test_parameters_that_are_split_are_compressed_where_they_lie",),
    ),
)
