"""How often code issues, on small schedules in the language of libtpu's dumps."""

import pytest

from opsnn_jax.aot.bundles import find_loops, split_bundles
from opsnn_jax.aot.issues import count_issues
from opsnn_jax.aot.scalars import Scalars

SLOTS = ["{}"] * 4  # of a branch


def follow(lines):
    """The issues of code whose lines are bundles; loops start with "LB"."""
    text = "\n".join(
        f"0x{i:x} {line if line.startswith('LB') else ': ' + line}"
        for i, line in enumerate(lines)
    )
    bundles, markers = split_bundles(text)
    return count_issues(bundles, find_loops(bundles, markers))


def loop(n, body, *, start="smov 0", test="scmp.ge.s32.totalorder %s{n}2, 5"):
    """Loop `n`, whose counter is s<n>0."""
    return [
        f"{{ %s{n}1 = {start} }}",
        f"LB: {{ %s{n}0 = sphi %s{n}1, %s{n}2 }} /* Start region 1{n} */",
        *body,
        f"{{ %s{n}2 = sadd.s32 1, %s{n}0 ;; %p{n} = {test.format(n=n)} }}",
        f"{{ %b = sbr.rel (!%p{n}) target = $region1{n} }}",
        *SLOTS,
    ]


def compare(name, how, number):
    return f"%{name} = scmp.{how}.s32.totalorder %s70, {number}"


def unless(region, predicate, body):
    """`body`, which is jumped over where the predicate holds."""
    branch = f"{{ %b = sbr.rel ({predicate}) target = $region{region} }}"
    return [branch, *SLOTS, *body, f"{{}} /* Start/End empty region {region} */"]


def test_the_pipeline_skips_its_first_and_last_trip():
    guard = [
        f"{{ {compare('p1', 'ge', 1)} ;; {compare('p2', 'lt', 4)} }}",
        "{ %p3 = pnand %p1, %p2 }",
    ]
    issues = follow(loop(7, [*guard, *unless(30, "%p3", ["{ body }"] * 10)]))
    assert issues.bundles == [1, *[5] * 8, *[3] * 10, *[5] * 7]
    assert issues.trips == {1: 5}
    assert not issues.undecided


def test_a_predicate_may_pass_through_a_number_and_a_spill_slot():
    guard = [
        f"{{ {compare('p1', 'eq', 2)} }}",
        "{ %s3 = scalar_select /*predicate=*/%p1, /*on_true=*/1, /*on_false=*/0 }",
        "{ %4 = sst [smem:[#allocation9_spill]] %s3 }",
        "{ %s5 = sld [smem:[#allocation9_spill]] }",
        "{ %p6 = scmp.ne.s32.totalorder %s5, 0 }",
    ]
    once = follow(loop(7, [*guard, *unless(30, "!%p6", ["{ body }"])]))
    assert once.bundles[12] == 1
    # Read before it is written, a slot has what the trip before left.
    guard[2:4] = guard[3:1:-1]
    late = follow(loop(7, [*guard, *unless(30, "!%p6", ["{ body }"])]))
    assert late.bundles[12] == 5 and len(late.undecided) == 1


def test_a_branch_that_data_decides_counts_as_not_taken():
    guard = ["{ %s1 = sld [smem:[%s9]] ;; %p2 = scmp.eq.s32.totalorder %s1, 0 }"]
    issues = follow(loop(7, [*guard, *unless(30, "%p2", ["{ body }"] * 3)]))
    assert set(issues.bundles) == {1, 5}
    (skip,) = issues.undecided
    assert (skip.first, skip.last) == (8, 10)


def test_the_trips_of_a_loop_may_follow_from_one_around_it():
    inner = loop(8, ["{ body }"] * 2, start="smov %s70")
    issues = follow(loop(7, inner))
    # From 0, 1, ... 4 to 5.
    assert issues.trips == {1: 5, 3: (5 + 4 + 3 + 2 + 1) / 5}
    assert issues.bundles[4] == 15


def test_a_loop_that_data_ends_counts_once():
    inner = loop(8, ["{ body }"], test="scmp.ge.s32.totalorder %s{n}2, %s99")
    issues = follow(loop(7, inner))
    assert issues.trips == {1: 5, 3: None}
    assert set(issues.bundles[2:-6]) == {5}


def test_a_loop_too_long_to_follow_counts_by_its_constant_trips():
    (skip, body), trips = ("{ skip }", "{ body }"), 20000
    data = ["{ %s1 = sld [smem:[%s9]] ;; %p2 = scmp.eq.s32.totalorder %s1, 0 }"]
    inside = loop(8, [body, *data, *unless(30, "%p2", [skip])], test=_ends(trips))
    issues = follow(loop(7, inside))
    assert issues.trips == {1: 5, 3: trips}
    assert issues.bundles[4] == 5 * trips
    assert len(issues.undecided) == 1


def test_a_loop_too_long_to_follow_whose_trips_are_not_constant_is_not_known():
    end = ["{ %s99 = smov 20000 }"]
    issues = follow([*end, *loop(7, ["{ body }"], test=_ends("%s99"))])
    assert issues.trips == {2: None}


def test_loops_of_very_many_trips_in_all_are_not_followed_to_the_end():
    inner = loop(8, ["{ body }"], test=_ends(10000))
    issues = follow(loop(7, inner, test=_ends(10000)))
    assert issues.trips == {1: 10000, 3: 10000}
    assert issues.bundles[3] == 10**8


def _ends(trips):
    return f"scmp.ge.s32.totalorder %s{{n}}2, {trips}"


def test_a_jump_out_of_a_loop_is_not_followed_but_told():
    guard = [f"{{ {compare('p1', 'eq', 2)} }}"]
    leave = ["{ %b = sbr.rel (%p1) target = $region30 }", *SLOTS]
    behind = ["{ behind }", "{} /* Start/End empty region 30 */"]
    issues = follow([*loop(7, [*guard, *leave, "{ body }"]), *behind])
    assert issues.trips == {1: 5}
    assert len(issues.undecided) == 1


def test_a_long_chain_of_scalars_is_not_known():
    chain = [f"%s{i + 1} = sadd.s32 1, %s{i}" for i in range(1, 5000)]
    scalars = Scalars("{ %s1 = smov 0 ;; " + " ;; ".join(chain) + " }")
    assert scalars.value("s5000", {}) is None
    assert scalars.value("s100", {}) == 99


def test_what_a_loop_ends_with_is_known_behind_it():
    inner = loop(8, ["{ body }"])
    guard = ["{ %p1 = scmp.eq.s32.totalorder %s80, 4 }"]  # the last of its five
    behind = unless(30, "%p1", ["{ never }"])
    issues = follow(loop(7, [*inner, *guard, *behind]))
    assert not issues.undecided
    assert issues.bundles.count(0) == 1


def test_a_branch_in_skipped_code_skips_nothing():
    inner = unless(31, "%p2", ["{ some }"])
    guard = [f"{{ {compare('p1', 'lt', 3)} ;; {compare('p2', 'lt', 4)} }}"]
    issues = follow(loop(7, [*guard, *unless(30, "%p1", inner)]))
    # Trips 3 and 4 get there, and 3 skips what the branch inside guards.
    assert issues.bundles == [1, *[5] * 7, *[2] * 5, 1, 2, *[5] * 7]


@pytest.mark.parametrize(
    "instruction, value",
    [
        ("smov 4294967295", -1),
        ("sadd.s32 4294967295, %s1", 5),
        ("smov (%p1, %s1), 3", 3),
        ("smov (!%p1, %s1), 3", 6),
        ("ssub.s32 2, %s1", -4),
        ("smin.u32 %s2, %s1", 6),  # s2 is -1, the greatest unsigned number
        ("smin.s32 %s2, %s1", -1),
        ("sshrl.u32 %s2, 30", 3),
        ("sshra.s32 %s2, 30", -1),
        ("smulhi.u32 2863311531, %s1", 4),
        ("scmp.lt.u32.totalorder %s2, %s1", 0),
        ("scmp.lt.s32.totalorder %s2, %s1", 1),
        ("pmov %p1", 1),
        ("pneg %p1", 0),
        ("pnor %p1, %p1", 0),
        ("scmp.lt.s32.totalorder (!%p1), %s2, %s1", None),  # it has no value
        ("sadd.s32 %s1, %s7", None),
        ("sld [smem:[%s1]]", None),
        ("sodd.s32 %s1, %s1", None),
        ("scmp.lt.f32.partialorder %s2, %s1", None),
        ("scmp %s2, %s1", None),
        ("sshll.u32 1, 2147483647", -(2**31)),
    ],
)
def test_values(instruction, value):
    scalars = Scalars(f"{{ %s9_s1 = {instruction} /* a comment */ ;; %z = smov 1 }}")
    assert scalars.value("s9_s1", {"s1": 6, "s2": -1, "p1": 1}) == value
