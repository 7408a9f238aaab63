"""Bugs of attention, in each of its implementations."""

from tests.mutants.mutant import Mutant

_ATTENTION = "tests/ops/test_attention.py::"
_MASKS = "tests/ops/test_attention_masks.py::"
_OPTIONS = "tests/ops/test_attention_options.py::"
_GARBAGE = (
    "tests/ops/test_attention_transforms.py::"
    "test_garbage_reaches_no_gradient_of_a_gradient"
)
_XLA_TILES = "tests/kernels/test_attention_xla.py::"
_TPU_TILES = "tests/kernels/test_attention_tpu.py::"
_GPU_TILES = "tests/kernels/test_attention_gpu.py::"
_CUDNN = "tests/ops/test_attention_cudnn.py::"

ATTENTION = (
    Mutant(
        "attention-dq-not-scaled",
        "kernels/attention/xla.py",
        "tiles.unrows(dq * spec.scale)",
        "tiles.unrows(dq)",
        (_XLA_TILES + "test_lengths_around_a_block",),
    ),
    Mutant(
        "attention-causal-off-by-one",
        "opsnn_jax/ops/attention_masks.py",
        "right = 0 if right is None",
        "right = 1 if right is None",
        (_ATTENTION + "test_causal_is_aligned_top_left",),
    ),
    Mutant(
        "attention-band-off-by-one",
        "kernels/attention/mask.py",
        "result & (distance >= self.lower)",
        "result & (distance > self.lower)",
        ("tests/kernels/test_attention_mask.py",),
    ),
    Mutant(
        "attention-block-skipped",
        "kernels/attention/mask.py",
        "least, greatest = col - (row + rows - 1), col + cols - 1 - row\n"
        "        result = True\n"
        "        if self.lower is not None:\n"
        "            result = greatest >= self.lower",
        "least, greatest = col - (row + rows - 1), col + cols - 1 - row\n"
        "        result = True\n"
        "        if self.lower is not None:\n"
        "            result = greatest > self.lower",
        ("tests/kernels/test_attention_mask.py",),
    ),
    Mutant(
        "attention-accumulator-not-rescaled",
        "kernels/attention/xla.py",
        "a[2] * scale_a[..., None] + b[2]",
        "a[2] + b[2]",
        (_XLA_TILES + "test_lengths_around_a_block",),
    ),
    Mutant(
        "attention-lse-sign",
        "kernels/attention/xla.py",
        "_finite(top) + jnp.log(weight)",
        "_finite(top) - jnp.log(weight)",
        (_XLA_TILES + "test_lengths_around_a_block",),
    ),
    Mutant(
        "attention-no-delta",
        "kernels/attention/xla.py",
        "s - at(lse, i), dp - delta_i",
        "s - at(lse, i), dp",
        (_XLA_TILES + "test_lengths_around_a_block",),
    ),
    Mutant(
        "attention-padding-keys-seen",
        "kernels/attention/scores.py",
        "seen = col < spec.kv_len",
        "seen = col <= spec.kv_len",
        (_XLA_TILES + "test_any_blocks_and_bands",),
    ),
    Mutant(
        "attention-hidden-values-not-fenced",
        "kernels/attention/scores.py",
        "finite(k), fence(v)",
        "finite(k), (v, fence(v)[1])",
        (_ATTENTION + "test_garbage_in_hidden_keys_does_not_leak",),
    ),
    Mutant(
        "attention-nan-row-reaches-hidden-keys",
        "kernels/attention/xla.py",
        "            distance = jnp.where(seen, distance, -jnp.inf)\n",
        "",
        (_ATTENTION + "test_row_that_is_nan_leaves_its_hidden_keys_alone",),
    ),
    Mutant(
        "attention-hidden-garbage-multiplies-a-tangent",
        "kernels/attention/scores.py",
        "product(dq, finite(k))",
        "product(dq, k)",
        (_GARBAGE + "[None-nan]",),
    ),
    Mutant(
        "attention-hidden-garbage-in-the-slope-of-a-cap",
        "kernels/attention/scores.py",
        "else finite(product)",
        "else product",
        (_GARBAGE + "[2.0-nan]",),
    ),
    Mutant(
        "attention-dead-row-divides-by-zero",
        "kernels/attention/xla.py",
        "    weight = jnp.where(dead, 1, weight)\n",
        "",
        (_ATTENTION + "test_dead_row_is_zero_for_a_mask_and_for_a_bias",),
    ),
    Mutant(
        "attention-heads-grouped-by-turns",
        "kernels/attention/tiles.py",
        "x.reshape(spec.batch, nq, bq, spec.kv_heads, spec.group, x.shape[-1])",
        "x.reshape(spec.batch, nq, bq, spec.group, spec.kv_heads, x.shape[-1])"
        ".swapaxes(3, 4)",
        (_ATTENTION + "test_grouped_heads_sum_their_gradients",),
    ),
    Mutant(
        "attention-dbias-last-tile-only",
        "kernels/attention/tiles.py",
        "(total, old + ds, start)",
        "(total, ds, start)",
        (_ATTENTION + "test_gradient_of_a_bias_over_several_tiles",),
    ),
    Mutant(
        "attention-dbias-dtype",
        "kernels/attention/xla.py",
        "x[:b, :n, :t, :s].astype(extra[0].dtype)",
        "x[:b, :n, :t, :s]",
        (_ATTENTION + "test_bias_of_every_broadcast_shape_has_its_gradient[(3, 4)]",),
    ),
    Mutant(
        "attention-tpu-accumulator-not-rescaled",
        "kernels/attention/tpu_forward.py",
        "acc_scr[...] * _widened(decay, pv.shape[1]) + pv",
        "acc_scr[...] + pv",
        (_TPU_TILES + "test_values",),
    ),
    Mutant(
        "attention-tpu-infinite-start-of-the-maximum",
        "kernels/attention/tpu_forward.py",
        "jnp.full_like(top_scr, -GREATEST)",
        "jnp.full_like(top_scr, -jnp.inf)",
        (_TPU_TILES + "test_a_first_strip_whose_scores_all_overflow",),
    ),
    Mutant(
        "attention-tpu-dk-not-scaled",
        "kernels/attention/tpu_backward.py",
        "(dk_scr[...] * spec.scale)",
        "(dk_scr[...])",
        (_TPU_TILES + "test_values",),
    ),
    Mutant(
        "attention-gpu-accumulator-not-rescaled",
        "kernels/attention/gpu_forward.py",
        "acc * decay[:, None] + pv",
        "acc + pv",
        (_GPU_TILES + "test_values",),
    ),
    Mutant(
        "attention-gpu-diagonal-taken-for-full",
        "kernels/attention/gpu_plan.py",
        "_positive(first + band.upper + 1)",
        "_positive(last + band.upper + 1)",
        (_GPU_TILES + "test_values",),
    ),
    Mutant(
        "attention-gpu-head-gradients-not-summed",
        "kernels/attention/gpu_backward.py",
        "visit(first + g, i, partial, total)",
        "visit(first, i, partial, total)",
        (_GPU_TILES + "test_values",),
    ),
    Mutant(
        "attention-gpu-bias-gradient-of-one-head",
        "kernels/attention/gpu_bias.py",
        "return total + _dscores(",
        "return _dscores(",
        (_GPU_TILES + "test_the_gradient_of_a_bias_over_several_blocks",),
    ),
    Mutant(
        "attention-tpu-dq-of-one-block-of-keys",
        "kernels/attention/tpu_backward.py",
        "dq_in_ref[0][...] if dq_in_ref else jnp.zeros_like(dq_scr)",
        "jnp.zeros_like(dq_scr)",
        (_TPU_TILES + "test_values",),
    ),
    Mutant(
        "attention-tpu-piece-left-out",
        "kernels/attention/tpu_visit.py",
        "lax.fori_loop(done * each, plan.pieces,",
        "lax.fori_loop(done * each + 1, plan.pieces,",
        (_TPU_TILES + "test_values",),
    ),
    Mutant(
        "attention-tpu-head-gradients-not-summed",
        "kernels/attention/tpu_plan.py",
        "return n * self.spec.group + lax.div(step, self.count[0])",
        "return n * self.spec.group",
        (_TPU_TILES + "test_values",),
    ),
    Mutant(
        "attention-window-off-by-one",
        "opsnn_jax/ops/attention_masks.py",
        "Band(None if left is None else -left, right)",
        "Band(None if left is None else 1 - left, right)",
        (_MASKS + "test_window_over_several_tiles",),
    ),
    Mutant(
        "attention-bottom-right-ignored",
        "opsnn_jax/ops/attention_masks.py",
        "band.shifted(kv_len - q_len)",
        "band.shifted(0)",
        (_MASKS + "test_causal_alignment",),
    ),
    Mutant(
        "attention-live-tile-skipped",
        "kernels/attention/ranges.py",
        "(q_low <= kv_high) & (kv_low <= q_high)",
        "(q_low < kv_high) & (kv_low <= q_high)",
        (_MASKS + "test_described_masks_over_several_tiles",),
    ),
    Mutant(
        "attention-lse-has-no-gradient",
        "opsnn_jax/ops/attention.py",
        "inner.swapaxes(1, 2) - dlse",
        "inner.swapaxes(1, 2)",
        (_OPTIONS + "test_lse_and_its_gradient",),
    ),
    Mutant(
        "attention-softcap-without-slope",
        "kernels/attention/scores.py",
        "cap * t, 1 - t * t",
        "cap * t, None",
        (_OPTIONS + "test_slope_of_a_cap",),
    ),
    Mutant(
        "attention-dropout-not-in-the-cotangents",
        "kernels/attention/xla.py",
        "dp = scores.dropped(scores.dot(dout_i, v_j, (2, 2)), i, j)",
        "dp = scores.dot(dout_i, v_j, (2, 2))",
        (_OPTIONS + "test_dropout_is_the_same_for_all_blocks",),
    ),
    Mutant(
        "attention-dropout-blind-to-the-head",
        "kernels/attention/dropout.py",
        "_mix(head ^ seed[0])",
        "_mix(seed[0]) + 0 * head",
        (_OPTIONS + "test_the_generator_is_as_random_as_it_should_be",),
    ),
    Mutant(
        "attention-sink-gradient-sign",
        "opsnn_jax/ops/attention.py",
        "dsinks = -jnp.sum",
        "dsinks = jnp.sum",
        (_OPTIONS + "test_sinks_over_several_tiles",),
    ),
    Mutant(
        "attention-tpu-bias-gradient-of-one-tile",
        "kernels/attention/tpu_bias.py",
        "        acc_scr[:, which] += ds\n",
        "        acc_scr[:, which] = ds\n",
        (_OPTIONS + "test_bias_of_a_kernel",),
    ),
    Mutant(
        "attention-decode-parts-not-weighed",
        "opsnn_jax/ops/attention_decode.py",
        "(weights / total)[..., None]",
        "(weights / weights.sum())[..., None]",
        (
            "tests/ops/test_attention_decode.py::"
            "test_decode_of_one_token_and_its_gradient",
        ),
    ),
    Mutant(
        "attention-tpu-garbage-behind-the-keys",
        "kernels/attention/tpu_tile.py",
        "inside = col < spec.kv_len",
        "inside = col <= spec.kv_len",
        (_TPU_TILES + "test_values",),
    ),
    Mutant(
        "attention-cudnn-window-off-by-one",
        "kernels/attention/cudnn.py",
        "else (-left, 0)",
        "else (1 - left, 0)",
        (_CUDNN + "test_jax_gets_the_options_of_the_call",),
    ),
    Mutant(
        "attention-cudnn-scale-lost",
        "kernels/attention/cudnn.py",
        "scale=spec.scale",
        "scale=None",
        (_CUDNN + "test_jax_gets_the_options_of_the_call",),
    ),
    Mutant(
        "attention-cudnn-window-behind-the-keys",
        "kernels/attention/cudnn.py",
        "spec.q_len > spec.kv_len",
        "spec.q_len > spec.kv_len - lower",
        (_CUDNN + "test_sizes_it_refuses",),
    ),
    Mutant(
        "attention-cudnn-chosen-unnamed",
        "opsnn_jax/ops/attention_table.py",
        '"cuda": ("pallas_gpu",)',
        '"cuda": ("pallas_gpu", "cudnn")',
        (_CUDNN + "test_it_is_never_chosen",),
    ),
)
