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
_CONV_IMPLEMENTATIONS = "tests/ops/test_conv_implementations.py::"
_EPILOGUE = "tests/ops/test_conv_epilogue.py::"
_TRANSPOSE = "tests/ops/test_conv_transpose.py::"
_ATTENTION = "tests/ops/test_attention.py::"
_MASKS = "tests/ops/test_attention_masks.py::"
_OPTIONS = "tests/ops/test_attention_options.py::"
_XLA_TILES = "tests/kernels/test_attention_xla.py::"
_TPU_TILES = "tests/kernels/test_attention_tpu.py::"
_GPU_TILES = "tests/kernels/test_attention_gpu.py::"
_TRANSFORMS = "tests/kernels/winograd/test_transforms.py::"
_DISPATCH = "tests/test_dispatch.py::"
_MODULES = "tests/nn/test_attention_modules.py::"
_LAYERS = "tests/nn/test_conv_layers.py::"
_SCALE = "tests/training/test_loss_scale.py::"
_STEP = "tests/training/test_step.py::"
_WINDOW = "tests/training/test_window.py::"
_LOOP = "tests/training/test_loop.py::"
_CHECKPOINT = "tests/training/test_checkpoint.py::"
_SHARDING = "tests/training/test_sharding.py::"
_COMPRESSION = "tests/training/test_compression.py::"

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
        "conv-groups-shifted-in-their-block",
        "kernels/conv/block_diagonal.py",
        "    return i == j\n",
        "    return i == (j + 1) % m\n",
        (_CONV_IMPLEMENTATIONS + "test_every_number_of_groups[3]",),
    ),
    Mutant(
        "conv-infinity-of-another-group",
        "kernels/conv/block_diagonal.py",
        "sums = or_exact(fast, functools.partial(direct.correlate, spec))(x, w)",
        "sums = fast(x, w)",
        (
            _CONV_IMPLEMENTATIONS
            + "test_one_groups_infinity_stays_its_own[inf-block_diagonal]",
        ),
    ),
    Mutant(
        "winograd-tpu-relu-hides-an-overflow",
        "kernels/winograd/tpu.py",
        "            y += y - y\n",
        "            y += 0 * bias\n",
        (
            "tests/ops/test_conv_nonfinite.py::"
            "test_an_overflow_on_the_way_is_not_hidden_by_relu[pallas_tpu]",
        ),
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
        "p * (dp - delta_i)",
        "p * dp",
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
        "jnp.where(seen, p + 0 * delta_i, 0), jnp.where(seen, ds, 0)",
        "p, jnp.where(seen, ds, 0)",
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
        "kernels/attention/tpu_forward.py",
        "acc_scr[...] * _widened(decay, pv.shape[1]) + pv",
        "acc_scr[...] + pv",
        (_TPU_TILES + "test_values",),
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
        "jnp.sum(products, axis=-1).swapaxes(1, 2) - dlse",
        "jnp.sum(products, axis=-1).swapaxes(1, 2)",
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
        (_OPTIONS + "test_bias_of_a_tpu_kernel",),
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
        "inside = (col < spec.kv_len) &",
        "inside = (col <= spec.kv_len) &",
        (_TPU_TILES + "test_values",),
    ),
)

DISPATCH = (
    Mutant(
        "dispatch-batched-axis",
        "opsnn_jax/lowering.py",
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
        "opsnn_jax/meshes.py",
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
        (_COMPRESSION + "test_late_gradients_come_and_each_worker_owes_its_own",),
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
        (_COMPRESSION + "test_overflow_on_one_worker_leaves_no_trace",),
    ),
    Mutant(
        "compression-residual-of-the-sum",
        "training/window.py",
        "jax.tree.map(lambda x: x / weight, owed)",
        "jax.tree.map(lambda x: x, owed)",
        (
            _COMPRESSION
            + "test_parameters_that_are_split_are_compressed_where_they_lie",
        ),
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
        "opsnn_jax/check/directional.py",
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

RUNS = (
    Mutant(
        "checkpoint-of-another-run",
        "training/checkpoint.py",
        "        if different is not None:",
        "        if different is not None and self._config is not None:",
        (_CHECKPOINT + "test_difference_names_the_first_leaf",),
    ),
    Mutant(
        "checkpoint-dtypes-not-compared",
        "training/manifest.py",
        "if there[name] != leaf:",
        "if there[name][1] != leaf[1]:",
        (_CHECKPOINT + "test_difference_names_the_first_leaf",),
    ),
    Mutant(
        "checkpoint-best-is-nan",
        "training/checkpoint.py",
        "metric is not None and math.isfinite(metric)",
        "metric is not None",
        (_CHECKPOINT + "test_the_best_and_the_last_are_kept",),
    ),
    Mutant(
        "checkpoint-last-not-kept",
        "training/checkpoint.py",
        "kept = {*range(len(checkpoints))[-self.last :], *scored[: self.best]}",
        "kept = {*scored[: self.best]} or {len(checkpoints) - 1}",
        (_CHECKPOINT + "test_the_best_and_the_last_are_kept",),
    ),
    Mutant(
        "checkpoint-forgotten-once-another-failed",
        "training/checkpoint.py",
        "            self._manager.reload()\n",
        "            self._manager.all_steps()\n",
        (_CHECKPOINT + "test_save_that_fails_in_the_background_leaves_the_one_before",),
    ),
    Mutant(
        "checkpoint-begun-without-room",
        "training/checkpoint.py",
        "if free < needed:",
        "if needed < 0:",
        (_CHECKPOINT + "test_no_room_is_known_before_anything_is_written",),
    ),
    Mutant(
        "run-rows-lost-on-a-full-disk",
        "training/report.py",
        "self._waiting[self._file.write(self._waiting) :]",
        'b"" if self._file.write(self._waiting) else self._waiting',
        ("tests/training/test_report.py::test_rows_that_find_no_room_wait",),
    ),
    Mutant(
        "run-refused-for-another-monitor",
        "training/config.py",
        'del settings["optimization"]["stop_after_skips"], settings["monitor"]',
        'del settings["optimization"]["stop_after_skips"]',
        (
            "tests/training/test_trainer.py::"
            "test_what_is_measured_may_change_when_a_run_goes_on",
        ),
    ),
    Mutant(
        "run-data-begins-anew",
        "training/loop.py",
        "data=source.get_state()",
        'data={"drawn": 0}',
        (_LOOP + "test_any_batches_go_on_where_they_were",),
    ),
    Mutant(
        "run-saves-what-was-read-ahead",
        "training/data.py",
        "        return self._state\n",
        "        return self._position()\n",
        (_LOOP + "test_any_batches_go_on_where_they_were",),
    ),
    Mutant(
        "run-saves-before-it-reports",
        "training/loop.py",
        "    def save() -> None:\n        report()\n",
        "    def save() -> None:\n",
        (_LOOP + "test_reports_come_before_saves_and_every_step_once",),
    ),
    Mutant(
        "run-keeps-rows-that-are-made-again",
        "training/report.py",
        'rows = [r for r in read_rows(self.path) if r["attempted_steps"] <= steps]',
        "rows = read_rows(self.path)",
        (
            "tests/training/test_train_command.py::"
            "test_stopped_run_is_saved_and_goes_on_to_the_same_end",
        ),
    ),
    Mutant(
        "verdict-of-any-device",
        "training/leaves.py",
        "jax.lax.pmin(verdict.astype(jnp.int32), axes)",
        "jax.lax.pmax(verdict.astype(jnp.int32), axes)",
        (_SHARDING + "test_data_and_model_split_under_shard_map",),
    ),
    Mutant(
        "gradients-reduced-in-half",
        "training/window.py",
        "lambda x: x.astype(policy.reduce), grad_sum",
        "lambda x: x.astype('bfloat16'), grad_sum",
        (_SHARDING + "test_gradients_are_reduced_in_the_dtype_of_the_policy",),
    ),
    Mutant(
        "clip-rows-as-a-whole",
        "training/clip.py",
        "axes = tuple(range(1, x.ndim)) if rule.rows else None",
        "axes = None",
        (
            "tests/training/test_clip.py::"
            "test_rules_clip_parameters_and_rows_on_their_own",
        ),
    ),
    Mutant(
        "monitor-of-clipped-gradients",
        "training/step.py",
        "state.attempted_steps, grads, state.params, new.params",
        "state.attempted_steps, clipped, state.params, new.params",
        ("tests/training/test_monitor.py::test_measures_are_those_of_each_parameter",),
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
    *COMPRESSION,
    *RUNS,
    *CHECK,
)
