"""The bugs that the tests must catch: each a small edit, and the tests that see it.

`old` stands exactly once in `file`. `new` keeps shapes and imports as they are, so that
nothing but a wrong result can give the bug away. `tests` are node ids of pytest, as few
and as quick as will do.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


_CONV_OPS = "tests/ops/test_conv.py::"
_EPILOGUE = "tests/ops/test_conv_epilogue.py::"
_TRANSPOSE = "tests/ops/test_conv_transpose.py::"
_ATTENTION = "tests/ops/test_attention.py::"
_XLA_TILES = "tests/kernels/test_attention_xla.py::"
_TPU_TILES = "tests/kernels/test_attention_tpu.py::"
_TRANSFORMS = "tests/kernels/winograd/test_transforms.py::"
_DISPATCH = "tests/test_dispatch.py::"
_MODULES = "tests/nn/test_attention_modules.py::"
_LAYERS = "tests/nn/test_conv_layers.py::"
_SCALE = "tests/training/test_loss_scale.py::"
_STEP = "tests/training/test_step.py::"

CONV = (
    Mutant(
        "conv-dx-padding",
        "kernels/conv/direct.py",
        "(extent - 1 - lo, size - ((out - 1) * stride + 1) + lo)",
        "(extent - lo, size - ((out - 1) * stride + 1) + lo - 1)",
        (_CONV_OPS + "test_other_ranks",),
    ),
    Mutant(
        "conv-dw-padding",
        "kernels/conv/direct.py",
        "(lo, (out - 1) * stride + extent - size - lo)",
        "(lo + 1, (out - 1) * stride + extent - size - lo - 1)",
        (_CONV_OPS + "test_other_ranks",),
    ),
    Mutant(
        "conv-filter-not-flipped",
        "kernels/conv/windows.py",
        "    w = lax.rev(w, tuple(range(spec.rank)))\n",
        "",
        (_CONV_OPS + "test_other_ranks",),
    ),
    Mutant(
        "conv-groups-transposed",
        "kernels/conv/windows.py",
        "jnp.moveaxis(w, (-3, -2, -1), (-1, -2, -3))",
        "jnp.moveaxis(w, (-3, -2, -1), (-2, -1, -3))",
        (
            _CONV_OPS + "test_direct_options_against_reference_in_fp64"
            "[strides3-dilation3-SAME-2-k3]",
        ),
    ),
    Mutant(
        "conv-crop-at-the-other-end",
        "kernels/conv/direct.py",
        "cut = [(min(lo, 0), min(hi, 0), 0) for lo, hi in padding]",
        "cut = [(min(hi, 0), min(lo, 0), 0) for lo, hi in padding]",
        (_CONV_OPS + "test_negative_padding_crops",),
    ),
    Mutant(
        "conv-rounded-before-the-bias",
        "kernels/conv/epilogue.py",
        "    z = sums\n",
        "    z = sums.astype(spec.dtype)\n",
        (_CONV_OPS + "test_bias_is_added_before_the_one_rounding",),
    ),
    Mutant(
        "conv-db-sum-in-half",
        "opsnn_jax/ops/conv.py",
        "db = jnp.sum(dz, axes, dtype=spec.accumulate_dtype).astype(b.dtype)",
        "rows = dz.reshape(-1, dz.shape[-1])\n"
        "        db = lax.scan(lambda t, row: (t + row, None), 0 * b, rows)[0]",
        (_CONV_OPS + "test_gradients_of_filter_and_bias_are_summed_in_fp32",),
    ),
    Mutant(
        "conv-db-dtype",
        "opsnn_jax/ops/conv.py",
        "dtype=spec.accumulate_dtype).astype(b.dtype)",
        "dtype=spec.accumulate_dtype)",
        (_CONV_OPS + "test_half_precision_rounds_once",),
    ),
    Mutant(
        "conv-residual-dropped",
        "kernels/conv/epilogue.py",
        "z = z + residual.astype(z.dtype)",
        "z = z + 0 * residual.astype(z.dtype)",
        (_EPILOGUE + "test_a_residual_needs_no_bias",),
    ),
    Mutant(
        "conv-relu-gradient-everywhere",
        "kernels/conv/epilogue.py",
        "jnp.where(kept > 0, dy, 0)",
        "jnp.where(kept >= 0, dy, 0)",
        (_EPILOGUE + "test_values_and_gradients_of_all_operands[direct-relu]",),
    ),
    Mutant(
        "conv-transpose-pads-swapped",
        "opsnn_jax/ops/conv_transpose.py",
        "(extent - 1 - lo, extent - 1 - hi)",
        "(extent - 1 - hi, extent - 1 - lo)",
        (_TRANSPOSE + "test_as_lax[strides4-padding4-dilation4-False-k4]",),
    ),
    Mutant(
        "conv-infinity-stays-nan",
        "kernels/finite.py",
        "lambda: exact(*arrays))",
        "lambda: y)",
        (
            "tests/ops/test_conv_nonfinite.py::"
            "test_an_image_of_infinities_has_no_nan[winograd]",
        ),
    ),
    Mutant(
        "lax-conv-output-layout",
        "opsnn_jax/ops/lax_conv.py",
        "{n: 0, c: y.ndim - 1}",
        "{n: y.ndim - 1, c: 0}",
        (_LAYERS + "test_lax_signature_in_any_layout",),
    ),
    Mutant(
        "lax-conv-filter-layout",
        "opsnn_jax/ops/lax_conv.py",
        "lax.transpose(rhs, (*kernel, i, o))",
        "lax.transpose(rhs, (*kernel[::-1], i, o))",
        (_LAYERS + "test_lax_signature_in_any_layout",),
    ),
)

WINOGRAD = (
    Mutant(
        "winograd-bt-sign",
        "kernels/winograd/transforms.py",
        "[-root * c for c in poly]",
        "[root * c for c in poly]",
        (_TRANSFORMS + "test_trilinear_identity",),
    ),
    Mutant(
        "winograd-g-not-scaled",
        "kernels/winograd/transforms.py",
        "[a**k / scale for k in range(r)]",
        "[a**k for k in range(r)]",
        (_TRANSFORMS + "test_trilinear_identity",),
    ),
    Mutant(
        "winograd-bt-last-row",
        "kernels/winograd/transforms.py",
        "bt.append(_coefficients(points))",
        "bt.append([Fraction(0)] * (n - 1) + [Fraction(1)])",
        (_TRANSFORMS + "test_trilinear_identity",),
    ),
    Mutant(
        "winograd-xla-interleave",
        "kernels/winograd/xla.py",
        "products = jnp.moveaxis(products, axis, dim + 1)\n"
        "        shape = products.shape\n"
        "        merged = (*shape[:dim], shape[dim] * t.m, *shape[dim + 2 :])",
        "products = jnp.moveaxis(products, axis, dim)\n"
        "        shape = products.shape\n"
        "        merged = (*shape[:dim], shape[dim + 1] * t.m, *shape[dim + 2 :])",
        (_CONV_OPS + "test_sizes_that_fill_no_tile",),
    ),
    Mutant(
        "winograd-xla-last-tile",
        "kernels/winograd/xla.py",
        "(slice(0, size) for size in out_spatial)",
        "(slice(-size, None) for size in out_spatial)",
        (_CONV_OPS + "test_sizes_that_fill_no_tile",),
    ),
    Mutant(
        "winograd-xla-block-offset",
        "kernels/winograd/xla.py",
        "i * rows * t.m, size, axis=1",
        "i * (rows * t.m - 1), size, axis=1",
        (_CONV_OPS + "test_blocks_of_tile_rows_join[winograd]",),
    ),
    Mutant(
        "winograd-xla-dw-last-block-only",
        "kernels/winograd/xla.py",
        "(acc + block(i), None)",
        "(block(i), None)",
        (_CONV_OPS + "test_blocks_of_tile_rows_join[winograd]",),
    ),
    Mutant(
        "winograd-xla-dw-transposed",
        "kernels/winograd/xla.py",
        "return dw.astype(spec.dtype)",
        "return dw.swapaxes(0, 1).astype(spec.dtype)",
        (_CONV_OPS + "test_directional_finite_differences[winograd]",),
    ),
    Mutant(
        "winograd-takes-strides",
        "kernels/winograd/xla.py",
        "if any(s != 1 for s in spec.strides):",
        "if any(s > 2 for s in spec.strides):",
        (_CONV_OPS + "test_bad_input",),
    ),
    Mutant(
        "winograd-tpu-halo",
        "kernels/winograd/tpu.py",
        "return n, (h + 1) * rows, 0, 0, 0",
        "return n, h * rows, 0, 0, 0",
        (_CONV_OPS + "test_pallas_tpu_against_fp64[float32-x0-w0-padding0]",),
    ),
    Mutant(
        "winograd-tpu-accumulator-not-reset",
        "kernels/winograd/tpu.py",
        "    acc_ref[...] = jnp.zeros_like(acc_ref)\n",
        "",
        (_CONV_OPS + "test_pallas_tpu_against_fp64[float32-x0-w0-padding0]",),
    ),
    Mutant(
        "winograd-tpu-dw-reset-at-each-image",
        "kernels/winograd/tpu.py",
        "@pl.when((pl.program_id(1) == 0) & (pl.program_id(2) == 0))",
        "@pl.when(pl.program_id(2) == 0)",
        (_CONV_OPS + "test_pallas_tpu_against_fp64[float32-x0-w0-padding0]",),
    ),
    Mutant(
        "winograd-tpu-no-bias",
        "kernels/winograd/tpu.py",
        "y = y[:, :width] + bias",
        "y = y[:, :width] + 0 * bias",
        (_CONV_OPS + "test_pallas_tpu_against_fp64[float32-x0-w0-padding0]",),
    ),
)

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
        "opsnn_jax/ops/attention.py",
        "Band(upper=0) if is_causal",
        "Band(upper=1) if is_causal",
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
        "(call.dot(dout_i, v_j, (2, 2)) - _at(delta, i))",
        "call.dot(dout_i, v_j, (2, 2))",
        (_XLA_TILES + "test_lengths_around_a_block",),
    ),
    Mutant(
        "attention-padding-keys-seen",
        "kernels/attention/xla.py",
        "(col < spec.kv_len)",
        "(col <= spec.kv_len)",
        (_XLA_TILES + "test_any_blocks_and_bands",),
    ),
    Mutant(
        "attention-hidden-values-not-fenced",
        "kernels/attention/spec.py",
        "jnp.where(v_finite, v, 0), poison",
        "v, poison",
        (_ATTENTION + "test_garbage_in_hidden_keys_does_not_leak",),
    ),
    Mutant(
        "attention-nan-row-reaches-hidden-keys",
        "kernels/attention/xla.py",
        "p, ds = jnp.where(seen, p, 0), jnp.where(seen, ds, 0)",
        "ds = jnp.where(seen, ds, 0)",
        (_ATTENTION + "test_row_that_is_nan_leaves_its_hidden_keys_alone",),
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
        "kernels/attention/tpu.py",
        "acc_scr[...] * decay[:, :1] + pv",
        "acc_scr[...] + pv",
        (_TPU_TILES + "test_values",),
    ),
    Mutant(
        "attention-tpu-dk-not-scaled",
        "kernels/attention/tpu.py",
        "(dk_scr[...] * spec.scale)",
        "(dk_scr[...])",
        (_TPU_TILES + "test_values",),
    ),
    Mutant(
        "attention-tpu-head-gradients-not-summed",
        "kernels/attention/tpu.py",
        "return n * group + lax.div(step, nq), i",
        "return n * group, i",
        (_TPU_TILES + "test_values",),
    ),
    Mutant(
        "attention-tpu-garbage-behind-the-keys",
        "kernels/attention/tpu.py",
        "& (col < spec.kv_len) &",
        "& (col <= spec.kv_len) &",
        (_TPU_TILES + "test_values",),
    ),
)

DISPATCH = (
    Mutant(
        "dispatch-batched-axis",
        "opsnn_jax/dispatch.py",
        "return outs, [0] * len(outs)",
        "return outs, [1] * len(outs)",
        (_DISPATCH + "test_vmap_over_any_axis",),
    ),
    Mutant(
        "dispatch-order-reversed",
        "opsnn_jax/dispatch.py",
        "for name in candidates:",
        "for name in reversed(candidates):",
        (_DISPATCH + "test_each_platform_gets_its_first_that_can",),
    ),
    Mutant(
        "dispatch-refusal-ignored",
        "opsnn_jax/dispatch.py",
        "return self.refuses(spec)",
        "return self.refuses(spec) and None",
        (_DISPATCH + "test_a_name_means_exactly_that_one",),
    ),
    Mutant(
        "dispatch-platform-ignored",
        "opsnn_jax/dispatch.py",
        "interpreted = self.pallas and named and",
        "interpreted = self.pallas and",
        (_DISPATCH + "test_each_platform_gets_its_first_that_can",),
    ),
    Mutant(
        "dispatch-replicated-not-aligned",
        "opsnn_jax/dispatch.py",
        "if a is not None and union - has",
        "if a is not None and False",
        (_DISPATCH + "test_arrays_are_made_to_vary_alike",),
    ),
)

MODULES = (
    Mutant(
        "flax-mask-lost",
        "opsnn_jax/nn/attention.py",
        "None if mask is None else join_scores(mask.astype(bool))",
        "None",
        (_MODULES + "test_linen_takes_any_number_of_batch_axes",),
    ),
    Mutant(
        "flax-bias-lost",
        "opsnn_jax/nn/attention.py",
        "join_scores(bias)",
        "None",
        (_MODULES + "test_bias_mask_and_dtype_mean_what_they_do_in_flax",),
    ),
    Mutant(
        "flax-linen-dtype-lost",
        "opsnn_jax/nn/linen_attention.py",
        "promote_dtype(query, key, value, dtype=dtype)",
        "promote_dtype(query, key, value)",
        (_MODULES + "test_bias_mask_and_dtype_mean_what_they_do_in_flax",),
    ),
    Mutant(
        "flax-nnx-causal-lost",
        "opsnn_jax/nn/nnx_attention.py",
        "        mask,\n        is_causal=is_causal,\n",
        "        mask,\n",
        (_MODULES + "test_nnx_is_causal_and_dropout",),
    ),
)

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
        "training/step.py",
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
        "        finite &= stays_finite(after, before)\n",
        "",
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
        "clip_by_norm(grads, clip_norm, norm)",
        "clip_by_norm(grads, clip_norm, norm * state.loss_scale.scale)",
        (_STEP + "test_clip_after_unscale",),
    ),
    Mutant(
        "step-mean-of-means",
        "training/step.py",
        "jnp.asarray(1.0 if weight_fn is None else weight_fn(part))",
        "jnp.asarray(1.0)",
        (_STEP + "test_ragged_micro_batches_equal_one_batch",),
    ),
    Mutant(
        "step-micro-batches-summed-in-half",
        "training/step.py",
        "lambda s, g: s + weigh(g), grad_sum, grads",
        "lambda s, g: (s.astype('bfloat16') + weigh(g).astype('bfloat16'))"
        ".astype('float32'), grad_sum, grads",
        (_STEP + "test_micro_batches_are_summed_in_fp32",),
    ),
    Mutant(
        "step-counted-on-a-skip",
        "training/step.py",
        "**select(finite, after, before),",
        "**select(finite, after, before) | {'step': state.step + 1},",
        (
            _STEP
            + "test_overflow_in_one_micro_batch_skips_the_window_and_leaves_nothing",
        ),
    ),
    Mutant(
        "step-random-key-moves-on-a-skip",
        "training/step.py",
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
        "clip-norm-overflows",
        "training/clip.py",
        "_inverse_size(jnp.stack([jnp.abs(x).max() for x in leaves]).max())",
        "jnp.float32(1.0)",
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

CHECK = (
    Mutant(
        "compare-one-sided",
        "opsnn_jax/check/errors.py",
        "error, size = np.abs(a - truth), np.abs(truth)",
        "error, size = np.maximum(a - truth, 0), np.abs(truth)",
        ("tests/check/test_compare.py::test_wrong_small_values_are_counted",),
    ),
    Mutant(
        "compare-infinities-of-any-sign",
        "opsnn_jax/check/errors.py",
        "return finite | (a == b) | (np.isnan(a) & np.isnan(b))",
        "return finite | ~(np.isfinite(a) | np.isfinite(b))",
        ("tests/check/test_compare.py::test_nonfinite_must_match",),
    ),
    Mutant(
        "gradient-check-one-sided",
        "opsnn_jax/check/gradients.py",
        "if abs(value - difference) > tolerance",
        "if value - difference > tolerance",
        ("tests/check/test_gradients.py::test_wrong_gradient_is_named",),
    ),
    Mutant(
        "contract-counts-refusals-as-kept",
        "opsnn_jax/check/contract.py",
        "return all(row.ok for row in self.rows) and any(\n"
        "            not row.refused for row in self.rows\n        )",
        "return all(row.ok for row in self.rows)",
        (
            "tests/check/test_contract.py::test_refusal_is_shown_but_a_report_of_refusals_is_not_ok",
        ),
    ),
)

MUTANTS = (
    *CONV,
    *WINOGRAD,
    *ATTENTION,
    *DISPATCH,
    *MODULES,
    *LOSS_SCALE,
    *STEP,
    *CHECK,
)
