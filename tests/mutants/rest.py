"""Bugs of dispatch, of the layers, and of the checking and device-compile tools."""

from tests.mutants.mutant import Mutant

_DISPATCH = "tests/test_dispatch.py::"
_MODULES = "tests/nn/test_attention_modules.py::"

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
        "reason = self.refuses(spec)\n",
        "reason = self.refuses(spec) and None\n",
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
        "None if mask is None else jnp.asarray(mask).astype(bool)",
        "None",
        (_MODULES + "test_linen_takes_any_number_of_batch_axes",),
    ),
    Mutant(
        "flax-bias-lost",
        "opsnn_jax/nn/attention.py",
        "value,\n        bias,\n        None if mask",
        "value,\n        None,\n        None if mask",
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
        "opsnn_jax/check/contract_report.py",
        "return all(row.ok for row in self.rows) and any(\n"
        "            not row.refused for row in self.rows\n        )",
        "return all(row.ok for row in self.rows)",
        (
            "tests/check/test_contract.py::test_refusal_is_shown_but_a_report_of_refusals_is_not_ok",
        ),
    ),
)

_ISSUES = "tests/aot/test_issues.py::"

AOT = (
    Mutant(
        "aot-skipped-branches-taken",
        "opsnn_jax/aot/issues.py",
        "elif event.branch >= at:",
        "else:",
        (_ISSUES + "test_a_branch_in_skipped_code_skips_nothing",),
    ),
    Mutant(
        "aot-values-of-a-loop-forgotten",
        "opsnn_jax/aot/issues.py",
        "                values |= _known(inside)\n",
        "",
        (_ISSUES + "test_what_a_loop_ends_with_is_known_behind_it",),
    ),
    Mutant(
        "aot-spill-slots-read-before-they-are-written",
        "opsnn_jax/aot/scalars.py",
        "sound = len(stores) == 1 and stores[0].start() < load",
        "sound = len(stores) == 1",
        (_ISSUES + "test_a_predicate_may_pass_through_a_number_and_a_spill_slot",),
    ),
)
