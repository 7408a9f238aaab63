"""Reports: derived figures, roofline, JSON, table and page. Nothing is compiled."""

import dataclasses
import functools
import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from rich.console import Console

from opsnn_jax.aot import figures
from opsnn_jax.aot.compile import _name_of
from opsnn_jax.aot.page import render_page
from opsnn_jax.aot.report import (
    GpuKernel,
    Kernel,
    Lane,
    Loop,
    Memory,
    Report,
    Roofline,
    Schedule,
    Unit,
)
from opsnn_jax.aot.roofline import choose_rate, find_roofline
from opsnn_jax.aot.table import print_reports
from opsnn_jax.aot.targets import TARGETS, get_target

MEMORY = Memory(arguments=1000, outputs=500, temporaries=200, aliased=100)
KERNEL = Kernel(
    name="matmul<1>",
    calls=3,
    bundles=100,
    cycles=1_000,
    undecided=70,
    stalls=50,
    units=(Unit("MXU", 4, 2_000), Unit("VLOAD", 3, 300), Unit("VSTORE", 1, 100)),
    loops=(
        Loop(0, 90, 1, 5.0, 900, False, 40, 20),
        Loop(10, 50, 2, None, 400, True, 30, 10),
    ),
    fills=40,
    spills=20,
    lanes=tuple(
        Lane(name, (0.0, 0.5, 1.0))
        for name in ("MXU", "VLOAD", "VLOAD:FILL", "VSTORE", "VSTORE:SPILL")
    ),
)
SCHEDULE = Schedule(kernels=(KERNEL,), cycles=3_000, stalls=150, program=75)
GOOD = Report(
    name="f",
    target="tpu-v5e",
    ok=True,
    stage="done",
    error="",
    toolchain={"libtpu": "1.2"},
    memory=MEMORY,
    flops=2e6,
    bytes=3e3,
    schedule=SCHEDULE,
    roofline=Roofline("bfloat16", 1e-6, 2e-6, 5e-8, 3e-6),
    notes=("a note",),
)
BAD = Report(
    name="<lambda>",
    target="tpu-v6e",
    ok=False,
    stage="compile",
    error="RESOURCE_EXHAUSTED: vmem & <more>",
    toolchain={"libtpu": "1.2"},
)
GPU = dataclasses.replace(
    GOOD,
    target="h200",
    schedule=None,
    flops=None,
    bytes=None,
    roofline=Roofline("float32", None, 2e-6, 5e-6, None),
    gpu_kernels=(GpuKernel("k", 255, 16, 8, 4096),),
)


def test_derived_figures():
    assert MEMORY.peak == 1600
    assert GOOD.roofline.bound == "memory"
    assert GOOD.roofline.gap == pytest.approx(1.5)
    assert KERNEL.innermost_spills == 40
    assert SCHEDULE.innermost_spills == 120
    assert (SCHEDULE.fills, SCHEDULE.spills) == (120, 60)
    assert KERNEL.unknown_trips
    assert KERNEL.units[0].cycles == 500
    assert GPU.roofline.gap is None
    assert GPU.roofline.bound == "launch"


@pytest.mark.parametrize("report", [GOOD, BAD, GPU])
def test_json_round_trip(report):
    data = json.loads(report.to_json())
    assert data["ok"] == report.ok
    if report.roofline:
        assert data["roofline"]["bound"] == report.roofline.bound
    if report.schedule:
        assert data["schedule"]["kernels"][0]["loops"][1]["trips"] is None
        assert data["schedule"]["innermost_spills"] == 120


@pytest.mark.parametrize(
    "target, dtypes, highest, rate",
    [
        ("tpu-v5e", ["bfloat16", "float32"], True, "bfloat16"),
        ("tpu-v5e", ["float32", "int32"], False, "bfloat16"),
        ("tpu-v5e", ["float32"], True, "float32"),
        ("h200", ["float32"], False, "tensorfloat32"),
        ("h200", ["float32"], True, "float32"),
        ("h200", ["float16"], False, "bfloat16"),
        ("tpu-v5e", ["int8", "int32"], False, "int8"),
        ("tpu-v5e", [], False, "bfloat16"),
    ],
)
def test_rate(target, dtypes, highest, rate):
    assert choose_rate(get_target(target), dtypes, highest) == rate


def test_roofline_of_a_tpu():
    v5e = get_target("tpu-v5e")
    roof = find_roofline(v5e, "bfloat16", 197e12, 9e9, MEMORY, 9, SCHEDULE)
    assert roof.compute == 1.0
    # Arguments and outputs cross the bus once, an alias only once in all.
    assert roof.memory == pytest.approx(1400 / 819e9)
    # A gather needs less.
    less = find_roofline(v5e, "bfloat16", 1.0, 700.0, MEMORY, 9, SCHEDULE)
    assert less.memory == pytest.approx(700 / 819e9)
    assert roof.launch == pytest.approx(75 / 1.5e9)
    assert roof.schedule == pytest.approx((3_000 + 150 + 75) / 1.5e9)


def test_roofline_of_a_gpu_without_known_cost():
    roof = find_roofline(get_target("h200"), "float32", None, None, MEMORY, 3, None)
    assert (roof.schedule, roof.gap, roof.compute) == (None, None, None)
    assert roof.launch == pytest.approx(3 * 2e-6)
    assert roof.memory == pytest.approx(1400 / 4.8e12)


def test_rates_are_consistent():
    for target in TARGETS.values():
        peak = target.peak
        assert peak["float32"] < peak["bfloat16"] <= peak["int8"]
        assert bool(target.topology) == (target.platform == "tpu")
        assert bool(target.sm) == (target.platform == "cuda")
    # Published rate = units x rows x columns x operations of a cell x clock.
    for name, per_cycle in (
        ("tpu-v5e", 131072),
        ("tpu-v6e", 524288),
        ("tpu-v7x", 524288),
    ):
        target = get_target(name)
        assert target.peak["bfloat16"] == pytest.approx(
            per_cycle * target.clock, rel=0.003
        )


def test_unknown_target_lists_all():
    with pytest.raises(ValueError, match=r"tpu-v5e.*b200.*got 'tpu-v9'"):
        get_target("tpu-v9")


def printed(*reports):
    out = io.StringIO()
    print_reports(reports, Console(file=out, width=200))
    return out.getvalue()


def test_table():
    text = printed(GOOD, BAD)
    assert re.search(r"issue cycles +│ +3,000", text)
    assert "2 us, bound by memory" in text
    assert "refused (compile)" in text
    assert "cannot be traced" in printed(dataclasses.replace(BAD, stage="trace"))
    assert "RESOURCE_EXHAUSTED: vmem & <more>" in text
    assert "5 trips" in text and "? trips" in text
    assert "note: a note" in text
    assert re.search(r"matmul<1> +│ +3 │ +100 │ +1,000 │ +50 │ +40 │ +20\n", text)
    assert re.search(r"matmul<1> +│ +50% │", text)


@pytest.mark.parametrize("beside", [1, 2, 5])
def test_eighty_characters_cut_nothing(beside):
    names = ("MATMUL", "MATPUSH", "VALU", "EUP", "XLU", "VLOAD", "VSTORE")
    numbers = dict(
        calls=12_345, bundles=654_321, cycles=987_654, stalls=876_543, fills=765_432
    )
    kernel = dataclasses.replace(
        KERNEL,
        name="broadcast_multiply_reduce_fusion.12.clone",
        units=tuple(Unit(name, 1, 987_654) for name in names),
        **numbers,
    )
    schedule = dataclasses.replace(SCHEDULE, kernels=(kernel,))
    name = "flash_attention@pallas_tpu vjp"
    report = dataclasses.replace(GOOD, name=name, schedule=schedule)
    out = io.StringIO()
    print_reports([report] * beside, Console(file=out, width=80))
    text = out.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert all(name in text for name in (*names, *numbers))
    assert all(f"{number:,}" in text for number in numbers.values())
    assert text.count("issue cycles") == -(-beside // 2)


def test_what_is_compiled_has_the_name_of_the_function():
    assert _name_of(functools.partial(functools.partial(max, 1), 2)) == "max"


def test_a_report_prints_as_its_table():
    assert re.search(r"issue cycles +│ +3,000", str(GOOD))
    assert "MXU" in str(GOOD) and "Lane(" not in str(GOOD)


def test_table_of_a_gpu():
    text = printed(GPU)
    assert "255 registers, 24 B of spills, 4 KiB of shared memory" in text
    assert re.search(r"flops +│ +\?", text)


def test_a_bound_that_is_not_known_is_left_out():
    text, page = printed(GPU), render_page([GPU])
    assert "5 us, bound by launch; compute is not known" in text
    assert "compute bound" not in text + page
    assert "Roofline without compute" in page
    assert ">compute</text>" not in page and ">memory</text>" in page
    # Beside one whose bound is known, the cell is empty.
    assert re.search(r"compute bound +│ +1 us at bfloat16 │ +\n", printed(GOOD, GPU))
    assert json.loads(GPU.to_json())["roofline"]["compute"] is None


class _Checker(HTMLParser):
    """Every element closed, and nothing fetched."""

    VOID = frozenset({"meta", "br"})

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        assert not {"src", "href"} & {name for name, _ in attrs}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_is_well_formed_and_self_contained():
    page = render_page([GOOD, BAD, GPU])
    checker = _Checker()
    checker.feed(re.sub(r"<(rect|line)([^>]*)/>", r"<\1\2></\1>", page))
    assert checker.open == []
    assert "script" not in checker.seen
    assert "url(" not in page and "http" not in page
    assert "prefers-color-scheme: dark" in page
    assert "vmem &amp; &lt;more&gt;" in page and "&lt;lambda&gt;" in page
    assert page.count('class="spill"') == 2
    assert page.count('class="loop"') == 2


def test_page_explains_schedules_only_where_there_is_one():
    assert "that data may skip counts" in render_page([GPU, GOOD])
    assert "that data may skip counts" not in render_page([GPU])


def test_page_draws_the_use_to_scale():
    page = render_page([GOOD])
    path = re.search(r'class="mxu" d="M92 (\d+)(.*?)Z"', page)
    base = int(path[1])
    # Three stretches at 0, half and all of a lane 30 high.
    tops = [float(v) for v in re.findall(r"V([\d.]+)", path[2])]
    assert tops == [base, base - 15, base - 30, base]


def test_units_of_figures():
    assert figures.seconds(1.5e-6) == "1.5 us"
    assert figures.seconds(0.0) == "0 ns"
    assert figures.size(1536) == "1.5 KiB"
    assert figures.count(2.5e9) == "2.5G"


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, jax; before = set(sys.modules); import opsnn_jax.aot; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "print(new & {'libtpu', 'cloudpickle', 'rich', 'subprocess', 'flax'})"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == "set()", run.stderr
