"""The registry, the baseline, and all registered kernels against it."""

import dataclasses
import json
from pathlib import Path

import aot_kernels as kernels
import pytest
from aot_kernels import spec

from opsnn_jax.aot import baseline
from opsnn_jax.aot.baseline import Figure, compare, measure
from opsnn_jax.aot.cases import KERNELS
from opsnn_jax.aot.registry import KernelCase, Registry
from opsnn_jax.aot.report import Report
from opsnn_jax.aot.targets import get_target

FILE = Path(__file__).parents[2] / baseline.BASELINE
FIGURE = Figure("op/fwd", "tpu-v5e", "libtpu-1", {"issue_cycles": 1000})

# A case of the tests, so that the check itself is checked in every run.
PRODUCT = KernelCase(
    "test/product/fwd/128x256x128",
    lambda: (kernels.product, (spec(128, 256), spec(256, 128))),
)

PAIRS = [
    pytest.param(case, target, id=f"{case.name}-{target}")
    for case in (PRODUCT, *KERNELS)
    for target in case.targets
]


@pytest.mark.aot
@pytest.mark.parametrize("case, target", PAIRS)
def test_no_kernel_got_worse(case, target, compiles_for):
    compiles_for(target)
    report, figure = measure(case, target)
    assert report.ok, f"{case.name} for {target}: {report.error}"
    assert figure is not None, report.notes
    committed = baseline.read(FILE)
    if case is PRODUCT:
        committed = {figure.key: dict(figure.costs)}
        assert figure.costs["with_stalls"] > figure.costs["issue_cycles"] > 0
    assert (why := compare(figure, committed)) is None, why


def test_names_are_unique_and_fit_a_key():
    registry = Registry()
    registry.add(PRODUCT)
    with pytest.raises(ValueError, match="taken"):
        registry.add(PRODUCT)
    with pytest.raises(ValueError, match="space"):
        registry.add(KernelCase("a b", PRODUCT.make))


def test_registered_targets_exist():
    for case in KERNELS:
        for target in case.targets:
            get_target(target)


@pytest.mark.parametrize("old, accepted", [(1000, True), (953, True), (952, False)])
def test_five_percent_is_the_limit(old, accepted):
    why = compare(FIGURE, {FIGURE.key: {"issue_cycles": old}})
    assert (why is None) == accepted
    if why:
        assert "952" in why and "1000" in why


def test_stalls_cannot_be_traded_for_issue_cycles():
    new = Figure("op", "t", "c", {"issue_cycles": 900, "with_stalls": 1200})
    old = {new.key: {"issue_cycles": 1000, "with_stalls": 1100}}
    assert "with_stalls was 1100, now 1200" in compare(new, old)


def test_the_first_spill_fails():
    new = Figure("op", "a100", "c", {"spilled_bytes": 4})
    assert "now 4" in compare(new, {new.key: {"spilled_bytes": 0}})


def test_what_is_not_known_is_not_0(monkeypatch):
    new = Figure("op", "a100", "c", {})
    assert "now unknown" in compare(new, {new.key: {"spilled_bytes": 0}})
    report = Report(
        "op", "h200", True, "done", "", {"jaxlib": "1"}, gpu_unread=1, notes=("why",)
    )
    monkeypatch.setattr(baseline, "compile_for", lambda *_, **__: report)
    assert measure(PRODUCT, "h200") == (report, None)
    # A TPU without a schedule has no spills of a GPU.
    report = dataclasses.replace(report, target="tpu-v5e", gpu_unread=0)
    assert measure(PRODUCT, "tpu-v5e") == (report, None)


def test_cases_that_are_none(capsys):
    with pytest.raises(SystemExit):
        baseline.main(["--cases", "conv9d"])
    assert "no case has 'conv9d' in its name" in capsys.readouterr().err


def test_a_case_without_baseline_fails_and_says_what_to_do():
    assert "--update" in compare(FIGURE, {})


def test_update_keeps_other_compilers_and_drops_lost_cases(tmp_path):
    path = tmp_path / "baseline.json"
    kept = "op/fwd tpu-v5e libtpu-0"
    path.write_text(json.dumps({kept: {"issue_cycles": 7}, "gone t c": {}}))
    baseline.write(path, [FIGURE])
    assert baseline.read(path) == {
        kept: {"issue_cycles": 7},
        FIGURE.key: {"issue_cycles": 1000},
    }


@pytest.mark.aot
def test_the_command_compares_and_updates(tmp_path, monkeypatch, capsys, compiles_for):
    compiles_for("tpu-v5e")
    registry = Registry()
    registry.add(KernelCase(PRODUCT.name, PRODUCT.make, targets=("tpu-v5e",)))
    monkeypatch.setattr(baseline, "KERNELS", registry)
    path = tmp_path / "baseline.json"
    assert baseline.main(["--file", str(path)]) == 1
    assert "no baseline" in capsys.readouterr().err
    assert baseline.main(["--file", str(path), "--update"]) == 0
    assert baseline.main(["--file", str(path)]) == 0
