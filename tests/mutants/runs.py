"""Bugs of checkpoints, the loop and the trainer."""

from tests.mutants.mutant import Mutant

_LOOP = "tests/training/test_loop.py::"
_CHECKPOINT = "tests/training/test_checkpoint.py::"
_FAILURES = "tests/training/test_checkpoint_failures.py::"
_SHARDING = "tests/training/test_sharding.py::"

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
        (_FAILURES + "test_save_that_fails_in_the_background_leaves_the_one_before",),
    ),
    Mutant(
        "checkpoint-begun-without-room",
        "training/checkpoint.py",
        "if free < needed:",
        "if needed < 0:",
        (_FAILURES + "test_no_room_is_known_before_anything_is_written",),
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
            "tests/training/test_resume_command.py::"
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
        "state.attempted_steps, clip(), state.params, new.params",
        ("tests/training/test_monitor.py::test_measures_are_those_of_each_parameter",),
    ),
)
