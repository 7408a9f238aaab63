"""Equal instructions of an optimized program, and those that only look alike."""

import shutil
from pathlib import Path

import pytest

from opsnn_jax.aot.schedule import read_schedule
from opsnn_jax.aot.twins import forms

DUMPS = Path(__file__).parent / "dumps"

PROGRAM = """HloModule jit_f, is_scheduled=true

%inner (p.0: f32[8]) -> f32[8] {
  ROOT %p.0 = f32[8]{0} parameter(0)
}

%first (p.1: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0:T(128)} parameter(0)
  %c.1 = f32[8]{0:T(128)} fusion(%p.1), kind=kLoop, calls=%inner
  ROOT %add.1 = f32[8]{0:T(128)} add(%p.1, %c.1), metadata={op_name="a{b}" line=3}
}

%second (p.2: f32[8]) -> f32[8] {
  %p.2 = f32[8]{0:T(128)} parameter(0), frontend_attributes={s="<[{}, {}]>"}
  %c.2 = f32[8]{0:T(128)} fusion(%p.2), kind=kLoop, calls=%inner
  ROOT %add.2 = f32[8]{0:T(128)} add(%p.2, %c.2), metadata={op_name="c" line=4}
}

%third (p.3: f32[8]) -> f32[8] {
  %p.3 = f32[8]{0:T(128)} parameter(0)
  %c.3 = f32[8]{0:T(128)} fusion(%p.3), kind=kLoop, calls=%inner
  ROOT %add.3 = f32[8]{0:T(128)} add(%c.3, %c.3)
}

ENTRY %main (x: f32[8], y: f32[8], z: f32[8]) -> f32[8] {
  %x = f32[8]{0:T(128)} parameter(0)
  %y = f32[8]{0:T(128)} parameter(1), sharding={replicated}
  %z = f32[8]{0:T(128)S(1)} parameter(2)
  %pair = (f32[8]{0:T(128)}, (f32[2]{0}, s32[])) fusion(%x), calls=%first
  %tiny.3 = f32[8]{0:T(128)} fusion(%x), calls=%first, metadata={op_name="a"}
  %broadcast_bitcast_fusion.2 = f32[8]{0:T(128)} fusion(%y), calls=%second
  %moved = f32[8]{0:T(128)} fusion(%z), calls=%second
  %result = f32[8]{0:T(128)S(1)} fusion(%y), calls=%second
  ROOT %other = f32[8]{0:T(128)} fusion(%y), calls=%third
}
"""

ALL = ("c.1", "c.2", "tiny.3", "broadcast_bitcast_fusion.2")
ALL += ("pair", "moved", "result", "other")


def test_twins_differ_in_names_and_places_only():
    form = forms(PROGRAM, ALL)
    assert form["tiny.3"] == form["broadcast_bitcast_fusion.2"]
    assert form["c.1"] == form["c.2"]


@pytest.mark.parametrize("name", ["moved", "result", "other", "pair"])
def test_another_shape_place_in_memory_or_computation_is_no_twin(name):
    form = forms(PROGRAM, ALL)
    assert form[name] != form["tiny.3"]


def test_an_operand_of_several_arrays():
    text = PROGRAM.replace("fusion(%z)", "fusion(%pair)")
    shapes = "fusion((f32[8]{0:T(128)}, (f32[2]{0}, s32[])))"
    assert shapes in forms(text, ["moved"])["moved"]


def test_a_computation_named_as_an_instruction_is_still_itself():
    text = """HloModule jit_f

%add (a: s32[], b: s32[]) -> s32[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %r.1 = s32[] add(%a, %b)
}

%max (a.1: s32[], b.1: s32[]) -> s32[] {
  %a.1 = s32[] parameter(0)
  %b.1 = s32[] parameter(1)
  ROOT %r.2 = s32[] maximum(%a.1, %b.1)
}

ENTRY %main (x: s32[8], max: s32[], add: s32[]) -> s32[] {
  %x = s32[8]{0} parameter(0)
  %max = s32[] parameter(1)
  %add = s32[] parameter(2)
  %sum = s32[] reduce(%x, %max), dimensions={0}, to_apply=%add
  %top = s32[] reduce(%x, %add), dimensions={0}, to_apply=%max
  %one = s32[] conditional(%max, %x, %x), branch_computations={%add, %max}
  ROOT %two = s32[] conditional(%max, %x, %x), branch_computations={%add, %add}
}
"""
    form = forms(text, ["sum", "top", "one", "two"])
    assert form["sum"] != form["top"]
    assert form["one"] != form["two"]


def test_many_levels_of_calls():
    levels = [
        f"%f.{i} (p: f32[]) -> f32[] {{\n  %p = f32[] parameter(0)\n"
        f"  ROOT %c.{i} = f32[] call(%p), to_apply=%f.{i - 1}\n}}\n"
        for i in range(3000)
    ]
    form = forms("".join(levels), ["c.2", "c.3"])
    assert form["c.2"] != form["c.3"]


def test_a_kernel_that_was_compiled_once_for_two_counts_twice(tmp_path):
    for path in DUMPS.iterdir():
        shutil.copy(path, tmp_path)
    (tmp_path / "2000000000000000001-TLP-hlo.txt").write_text(PROGRAM)
    schedule = read_schedule(tmp_path)
    assert [(k.name, k.calls) for k in schedule.kernels] == [
        ("broadcast_bitcast_fusion.2", 4),
        ("tiny.3", 4),
    ]
    assert schedule.cycles == 2 * 4 * 235
    assert schedule.unread == ("broadcast_add_fusion.2.x_ref",)
