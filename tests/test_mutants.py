"""The bugs of `make mutants` still fit the sources that they are planted in."""

import collections
from pathlib import Path

from tests.mutants.mutants import MUTANTS

ROOT = Path(__file__).parents[1]


def test_each_stands_where_it_says_once():
    found = {m.name: (ROOT / m.file).read_text().count(m.old) for m in MUTANTS}
    assert {name: count for name, count in found.items() if count != 1} == {}


def test_each_has_a_name_of_its_own_and_tests_that_exist():
    counts = collections.Counter(mutant.name for mutant in MUTANTS)
    assert max(counts.values()) == 1
    for mutant in MUTANTS:
        for test in mutant.tests:
            file, _, name = test.partition("::")
            text = (ROOT / file).read_text()
            function = name.partition("[")[0]
            assert not name or f"def {function}(" in text, mutant.name
