"""Bugs of convolution: direct, by other products, and Winograd."""

from tests.mutants.mutant import Mutant

_CONV_OPS = "tests/ops/test_conv.py::"
_WINOGRAD_TPU = "tests/kernels/winograd/test_tpu.py::test_each_pass_is_right_by_itself"
_CONV_IMPLEMENTATIONS = "tests/ops/test_conv_implementations.py::"
_EPILOGUE = "tests/ops/test_conv_epilogue.py::"
_SEPARABLE = "tests/ops/test_separable_conv.py::"
_TRANSPOSE = "tests/ops/test_conv_transpose.py::"
_TRANSFORMS = "tests/kernels/winograd/test_transforms.py::"
_LAYERS = "tests/nn/test_conv_layers.py::"

CONV = (
    Mutant(
        "conv-dx-padding",
        "kernels/conv/windows.py",
        "(extent - 1 - lo, size - ((out - 1) * stride + 1) + lo)",
        "(extent - lo, size - ((out - 1) * stride + 1) + lo - 1)",
        (_CONV_OPS + "test_other_ranks",),
    ),
    Mutant(
        "conv-dw-padding",
        "kernels/conv/windows.py",
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
        "done = [(*pair, 0) if min(pair) < 0 else _KEEP for pair in padding]",
        "done = [(*pair[::-1], 0) if min(pair) < 0 else _KEEP for pair in padding]",
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
        "sums = (fast if m == 1 else or_exact(fast, exact))(x, w)",
        "sums = fast(x, w)",
        (
            _CONV_IMPLEMENTATIONS
            + "test_one_groups_infinity_stays_its_own[inf-block_diagonal]",
        ),
    ),
    Mutant(
        "winograd-tpu-relu-hides-an-overflow",
        "kernels/winograd/tpu_kernels.py",
        "            y += y - y\n",
        "            y += 0.0\n",
        (
            "tests/ops/test_conv_nonfinite.py::"
            "test_a_product_that_overflows_is_not_hidden_by_relu[pallas_tpu]",
        ),
    ),
    Mutant(
        "depthwise-tpu-every-strip-is-the-first",
        "kernels/conv/depthwise_tpu_image.py",
        "above = pl.program_id(2) * image.strip",
        "above = 0 * pl.program_id(2)",
        (_CONV_IMPLEMENTATIONS + "test_strips_of_an_image_join[SAME]",),
    ),
    Mutant(
        "depthwise-tpu-no-zeros-beside-an-image",
        "kernels/conv/depthwise_tpu_image.py",
        "            if start < end:\n",
        "            if start < 0:\n",
        (_CONV_IMPLEMENTATIONS + "test_strips_of_an_image_join[SAME]",),
    ),
    Mutant(
        "depthwise-tpu-copies-the-same-first-rows",
        "kernels/conv/depthwise_tpu_image.py",
        "_copy(buffer_ref, x_ref, start + i, image)",
        "_copy(buffer_ref, x_ref, i, image)",
        (
            _CONV_IMPLEMENTATIONS
            + "test_against_fp64[pallas_tpu_depthwise-x13-w13-options13]",
        ),
    ),
    Mutant(
        "depthwise-tpu-no-padding-below",
        "kernels/conv/depthwise_tpu_image.py",
        "    is_there = (row >= start) & (row < start + count)\n",
        "    is_there = row >= start\n",
        (_CONV_IMPLEMENTATIONS + "test_strips_of_an_image_join[SAME]",),
    ),
    Mutant(
        "separable-tpu-rows-of-z-in-the-wrong-place",
        "kernels/conv/separable_tpu.py",
        "(row + i) * columns + start",
        "i * columns + start",
        (
            _SEPARABLE + "test_values_and_gradients_against_fp64"
            "[x0-kernel0-5-names0-float32-options0]",
        ),
    ),
    Mutant(
        "separable-gradient-of-z-twice",
        "opsnn_jax/ops/separable_conv.py",
        "conv_gradients(choices.depthwise, first, second.x)",
        "conv_gradients(choices.depthwise, first, second.x * 2)",
        (
            _SEPARABLE + "test_values_and_gradients_against_fp64"
            "[x0-kernel0-5-names0-float32-options0]",
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
        "return jnp.array(True), exact(*arrays)",
        "return jnp.array(True), y",
        (
            "tests/ops/test_conv_nonfinite.py::"
            "test_an_image_of_infinities_has_no_nan[winograd]",
        ),
    ),
    Mutant(
        "conv-infinity-stays-nan-on-other-platforms",
        "kernels/finite.py",
        "lambda: exact(*arrays))",
        "lambda: y)",
        ("tests/kernels/test_finite.py",),
    ),
    Mutant(
        "conv-phases-of-the-filter-swapped",
        "kernels/conv/phases.py",
        "(*axes[::2], *axes[1::2], 2 * rank, 2 * rank + 1),",
        "(*axes[::2], *axes[:0:-2], 2 * rank, 2 * rank + 1),",
        (_CONV_IMPLEMENTATIONS + "test_half_precision_rounds_once[phases]",),
    ),
    Mutant(
        "conv-phases-of-dx-cropped-at-the-other-end",
        "kernels/conv/phases.py",
        "[(-lo, -hi) for lo, hi in _padding(spec)]",
        "[(-hi, -lo) for lo, hi in _padding(spec)]",
        (_CONV_IMPLEMENTATIONS + "test_half_precision_rounds_once[phases]",),
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
        "for axis in (rank + 1 + i, i)]",
        "for axis in (i, rank + 1 + i)]",
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
        "conv-slab-offset",
        "kernels/conv/windows.py",
        "step * self._rows * stride, *",
        "step * (self._rows * stride - 1), *",
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
        "winograd-large-tiles-of-the-depth",
        "kernels/winograd/xla.py",
        "_DEPTH_TILE = 2",
        "_DEPTH_TILE = 4",
        ("tests/ops/test_conv_winograd.py::test_smaller_tiles_are_more_accurate",),
    ),
    Mutant(
        "winograd-takes-strides",
        "kernels/winograd/xla.py",
        "if any(s != 1 for s in spec.strides):",
        "if any(s > 2 for s in spec.strides):",
        ("tests/ops/test_conv_errors.py::test_bad_input",),
    ),
    Mutant(
        "winograd-tpu-halo",
        "kernels/winograd/tpu_blocks.py",
        "return h * height, w * width, n * self.batch, 0",
        "return h * (height + 2), w * width, n * self.batch, 0",
        (_WINOGRAD_TPU + "[rows-y]",),
    ),
    Mutant(
        "winograd-tpu-filter-of-dx-not-flipped",
        "kernels/winograd/tpu_kernels.py",
        "w_ref[taps - 1 - i, :, pl.ds(start, width)]",
        "w_ref[i, :, pl.ds(start, width)]",
        (_WINOGRAD_TPU + "[rows-dx]",),
    ),
    Mutant(
        "winograd-tpu-filter-of-dx-by-its-first-channels",
        "kernels/winograd/tpu_kernels.py",
        "_transform_filter(turned_ref, u_ref, blocks, start)",
        "_transform_filter(turned_ref, u_ref, blocks)",
        (_WINOGRAD_TPU + "[filters-dx]",),
    ),
    Mutant(
        "winograd-tpu-accumulator-not-reset",
        "kernels/winograd/tpu_kernels.py",
        "    acc_ref[...] = jnp.zeros_like(acc_ref)\n",
        "",
        (_WINOGRAD_TPU + "[rows-y]",),
    ),
    Mutant(
        "winograd-tpu-dw-reset-at-each-image",
        "kernels/winograd/tpu_kernels.py",
        "return _all([pl.program_id(axis) == 0 for axis in (1, 2, 3)])",
        "return _all([pl.program_id(axis) == 0 for axis in (2, 3)])",
        (_WINOGRAD_TPU + "[steps-dw]",),
    ),
    Mutant(
        "winograd-tpu-filter-of-the-first-outputs",
        "kernels/winograd/tpu_kernels.py",
        "return _all([pl.program_id(axis) == 0 for axis in (1, 2, 3)])",
        "return _all([pl.program_id(axis) == 0 for axis in range(4)])",
        (_WINOGRAD_TPU + "[filters-y]",),
    ),
    Mutant(
        "winograd-tpu-rows-of-the-first-tiles",
        "kernels/winograd/tpu_kernels.py",
        "starts = [blocks.t.m * row for row in range(blocks.rows)]",
        "starts = [0 for row in range(blocks.rows)]",
        (_WINOGRAD_TPU + "[rows-y]",),
    ),
    Mutant(
        "winograd-tpu-columns-of-the-first-step",
        "kernels/winograd/tpu_blocks.py",
        "return h * height, w * width, n * self.batch, 0",
        "return h * height, 0, n * self.batch, 0",
        (_WINOGRAD_TPU + "[steps-y]",),
    ),
    Mutant(
        "winograd-tpu-a-product-of-parts-left-out",
        "kernels/winograd/tpu_kernels.py",
        "stacked = jnp.concatenate(v[: count - j]) if count - j > 1 else v[0]",
        "stacked = jnp.concatenate([v[0], *[v[1] * 0] * (count - j - 1)])",
        (_WINOGRAD_TPU + "[rows-y]",),
    ),
    Mutant(
        "winograd-tpu-no-bias",
        "kernels/winograd/tpu_kernels.py",
        "        y += _f32(b_ref[...])\n",
        "        y += 0 * _f32(b_ref[...])\n",
        (_WINOGRAD_TPU + "[rows-y]",),
    ),
)
