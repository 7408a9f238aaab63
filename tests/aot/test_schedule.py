"""The schedule reader, on dumps of a small kernel by libtpu 0.0.52 for a v5e.

The kernel `tiny` has a grid of 3 around a loop of 6, and a `lax.scan` of 4 calls it.
The pipeline's loop has 5 trips, of which the first and the last skip the kernel. The
dump of the program is cut to that loop.
"""

import shutil
from pathlib import Path

import pytest

from opsnn_jax.aot.bundles import find_loops, split_bundles
from opsnn_jax.aot.issues import count_cycles, count_issues
from opsnn_jax.aot.schedule import (
    count_calls,
    parse_utilization,
    read_kernel,
    read_schedule,
)

DUMPS = Path(__file__).parent / "dumps"
STEM = "2000000000000000002-tiny.3-00-"


@pytest.fixture
def texts():
    names = (
        "final_bundles",
        "packed-bundles-post-ra",
        "final_hlo-static-per-bundle-utilization",
    )
    return {n: (DUMPS / f"{STEM}{n}.txt").read_text() for n in names}


def test_cycles_are_bundles_as_often_as_they_issue(texts):
    kernel = read_kernel("tiny.3", 4, texts)
    assert kernel.bundles == 29
    # Two bundles outside, 5 trips of 16 bundles, 3 of the kernel: 3 and 6 trips of 8.
    assert kernel.cycles == 2 + 5 * 16 + 3 * (3 + 6 * 8)
    assert kernel.undecided == 0
    outer, inner = kernel.loops
    assert (outer.trips, outer.depth, outer.innermost) == (5, 1, False)
    assert (inner.trips, inner.depth, inner.innermost) == (6, 2, True)
    assert inner.cycles == 3 * 6 * 8
    assert outer.cycles == kernel.cycles - 2


def test_delay_slots_of_a_branch_belong_to_its_loop(texts):
    inner = read_kernel("tiny.3", 1, texts).loops[1]
    bundles, _ = split_bundles(texts["final_bundles"])
    branch = next(i for i, b in enumerate(bundles) if "target = $region63" in b)
    assert inner.last == branch + 4


def test_stalls_are_what_the_unfolded_schedule_has_more(texts):
    kernel = read_kernel("tiny.3", 1, texts)
    whole = count_cycles(texts["packed-bundles-post-ra"])
    assert kernel.stalls == whole - kernel.cycles
    # Without that dump nothing is claimed.
    del texts["packed-bundles-post-ra"]
    assert read_kernel("tiny.3", 1, texts).stalls is None


def test_units_are_counted_once_per_issue(texts):
    units = {u.name: u for u in read_kernel("tiny.3", 1, texts).units}
    # One load in the inner loop, one store predicated on its end.
    assert units["VLOAD"].used == units["VSTORE"].used == 3 * 6
    assert units["MATMUL"].used == 0
    assert units["VLOAD"].cycles == 6  # three load slots
    assert not any(":" in name for name in units)


def test_spills_are_placed_in_their_loop(texts):
    header, *rows = texts["final_hlo-static-per-bundle-utilization"].splitlines()
    names = [n.strip() for n in rows[0].split(",")]
    fill, spill = names.index("VLOAD:FILL"), names.index("VSTORE:SPILL")

    def with_spill(bundle):
        changed = list(rows)
        row = changed[3 + bundle].split()
        row[fill], row[spill] = "2", "1"
        changed[3 + bundle] = " ".join(row)
        text = "\n".join([header, *changed])
        key = "final_hlo-static-per-bundle-utilization"
        return read_kernel("tiny.3", 1, {**texts, key: text})

    inside = with_spill(0xF)
    assert (inside.fills, inside.spills) == (36, 18)
    assert inside.innermost_spills == 54
    outside = with_spill(0x2)
    assert (outside.fills, outside.spills) == (10, 5)
    assert outside.innermost_spills == 0


def test_the_program_counts_calls_through_its_loops():
    program = (DUMPS / "2000000000000000001-TLP-00-final_bundles.txt").read_text()
    bundles, markers = split_bundles(program)
    weights = count_issues(bundles, find_loops(bundles, markers)).bundles
    assert count_calls(bundles, weights) == {
        "broadcast_add_fusion.2.x_ref": 4,
        "tiny.3": 4,
        "broadcast_bitcast_fusion.2": 4,
    }


def test_a_folder_of_dumps(tmp_path):
    for path in DUMPS.iterdir():
        shutil.copy(path, tmp_path)
    # The compiler's first try of the kernel, which it threw away.
    old = tmp_path / "1000000000000000000-tiny.3-00-final_bundles.txt"
    old.write_text("     0   :  {} \n")
    schedule = read_schedule(tmp_path)
    (kernel,) = schedule.kernels
    assert (kernel.name, kernel.calls, kernel.cycles) == ("tiny.3", 4, 235)
    assert schedule.cycles == 4 * 235
    assert schedule.program > 0
    # The program calls two more, whose dumps are not in this folder.
    assert len(schedule.unread) == 2


def test_a_loop_of_the_program_whose_length_is_data(tmp_path):
    for path in DUMPS.iterdir():
        shutil.copy(path, tmp_path)
    assert not read_schedule(tmp_path).unknown_trips
    program = tmp_path / "2000000000000000001-TLP-00-final_bundles.txt"
    text = program.read_text()
    assert text.count("totalorder %s550_s20, 4 ") == 1
    program.write_text(text.replace("%s550_s20, 4 ", "%s550_s20, %s99 "))
    assert read_schedule(tmp_path).unknown_trips


def test_no_program_no_schedule(tmp_path):
    assert read_schedule(tmp_path) is None


def _loop(test: str, init: str = "0", step: str = "1") -> str:
    return f"""
     0   :  {{ %s1_s0 = smov {init} }}
   0x1 LB: > {{ %s2_s0 = sphi %s1_s0, %s3_s0 }} /* Start region 7 */
   0x2   : > {{ %s3_s0 = sadd.s32 {step}, %s2_s0  ;;  %p4_p0 = {test} }}
   0x3   : > {{ %5 = sbr.rel (!%p4_p0) target = $region7 }} /* End region 7 */
   0x4   :  {{}}
   0x5   :  {{}}
   0x6   :  {{}}
   0x7   :  {{}}
   0x8   :  {{}}
"""


@pytest.mark.parametrize(
    "text, trips",
    [
        (_loop("scmp.ge.s32.totalorder %s3_s0, 12 /* loop exit test */"), 12),
        (_loop("scmp.ge.s32.totalorder %s3_s0, 12", init="2"), 10),
        (_loop("scmp.ge.s32.totalorder %s3_s0, 12", step="5"), 3),
        (_loop("scmp.ge.s32.totalorder (%p9_p1), %s3_s0, 12"), 12),
        (_loop("scmp.eq.s32.totalorder %s3_s0, 12"), 12),
        (_loop("scmp.ge.s32.totalorder %s3_s0, %s99_s1"), None),
        # What the counter grows by, or is, is data.
        (_loop("scmp.ge.s32.totalorder %s3_s0, 12", step="%s99_s1"), None),
        (_loop("scmp.ge.s32.totalorder %s99_s1, 12"), None),
    ],
)
def test_trips(text, trips):
    bundles, markers = split_bundles(text)
    (span,) = find_loops(bundles, markers)
    assert (span.first, span.last, span.trips) == (1, 7, trips)
    assert span.certain == (trips is not None)
    # A loop of unknown length counts once.
    assert count_cycles(text) == 2 + 7 * (trips or 1)


def test_a_loop_that_data_starts_counts_from_0_and_is_told():
    text = _loop("scmp.ge.s32.totalorder %s3_s0, 12", init="%s99_s1")
    bundles, markers = split_bundles(text)
    (span,) = find_loops(bundles, markers)
    assert (span.trips, span.certain) == (12, False)
    issues = count_issues(bundles, [span])
    assert issues.trips == {1: None}
    assert sum(issues.bundles) == 2 + 7 * 12


def test_a_forward_branch_is_no_loop():
    text = """
     0   :  { %1 = sbr.rel (%p2_p0) target = $region7 }
   0x1 LB:  { %3 = vst [vmem:[%s1]] } /* Start region 7 */
"""
    assert find_loops(*split_bundles(text)) == []


def test_comments_that_span_lines_belong_to_their_bundle():
    text = """
     0   :  { %1 = dma.hbm_to_vmem /* windowed:
base_bounds: (64, 8)
iteration_bounds: (2, 2, 4) */ }
   0x1   :  {}
"""
    bundles, _ = split_bundles(text)
    assert len(bundles) == 2
    assert "base_bounds" in bundles[0]


def test_utilization_of_libtpu_0_0_42_has_one_column_for_the_matrix_unit():
    names, slots, rows = parse_utilization(
        "== CAPACTIY:\n"
        "MXU, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU\n"
        "    4     3     4     2     1     3     3     1     1     2\n"
        "== UTILIZATION:\n"
        "0 0 0 0 0 1 0 0 0 2\n"
    )
    assert (names[0], slots[0]) == ("MXU", 4)
    assert rows == [(0, 0, 0, 0, 0, 1, 0, 0, 0, 2)]
    assert parse_utilization("") == ((), (), [])


def test_cycles_without_utilization(texts):
    kernel = read_kernel("tiny.3", 1, {"final_bundles": texts["final_bundles"]})
    assert kernel.cycles == 235
    assert kernel.units == kernel.lanes == ()
