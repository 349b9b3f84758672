"""The code reads as `tests/code_measures.py` measures it: names, complexity, density, and the walk of one round."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import code_measures
import round_walk
from tacita.round.part import ALL_HOOKS, CORE_HOOKS

GUIDE = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
SOURCES = code_measures.sources()
MOST_BANNED = 9
"""Names that say nothing and are still in use; the number only goes down."""
MOST_COMPLEXITY = 15
"""Of a function outside kernels and command line."""
MOST_DENSITY = 9.42
"""Syntax nodes per line of code; the goal is 9.5."""
MOST_FILES = 18
"""Files that one round passes through."""
MOST_CHANGES = 64
"""Changes of file in one round; it was 131."""
DATA = os.environ.get("TACITA_DATA", "")


def test_no_class_name_occurs_twice() -> None:
    assert code_measures.repeated_classes(SOURCES) == {}


def test_banned_names_become_fewer() -> None:
    assert len(code_measures.banned_names(SOURCES)) <= MOST_BANNED


def test_complexity_stays_below_the_limit() -> None:
    pytest.importorskip("radon")
    judged = {path: source for path, source in SOURCES.items() if not path.startswith(("kernels/", "cli/"))}
    assert code_measures.complex_functions(judged, MOST_COMPLEXITY) == []


def test_density_stays_below_the_limit() -> None:
    assert code_measures.density(SOURCES) <= MOST_DENSITY


def test_the_measure_tells_dense_from_plain() -> None:
    dense = "def f(a, b):\n    return [x * y + (x if x > y else y) for x in a for y in b if x - y > 2 and y]\n"
    plain = "def f(a, b):\n    total = a + b\n    scale = total * 2\n    return scale\n"
    assert code_measures.density({"dense": dense}) > 2 * code_measures.density({"plain": plain})
    assert code_measures.banned_names({"told.py": "for one in told:\n    found = one\n"}) != []
    assert code_measures.repeated_classes({"a.py": "class A: ...", "b.py": "class A: ..."}) != {}


def test_a_part_has_few_hooks() -> None:
    assert len(CORE_HOOKS) <= 16
    assert len(ALL_HOOKS) <= 30


def assert_quoted(walk: round_walk.Walk) -> None:
    """Whether the guide says of a round what the profiler counts; a helper more or less is not worth an edit."""
    quoted = re.search(r"passes through: \*\*(\d+) files, (\d+) functions, (\d+) changes of file\*\*", GUIDE)
    assert quoted is not None
    files, functions, changes = (int(number) for number in quoted.groups())
    assert (files, changes) == (len(walk.files), walk.changes_of_file), walk.describe()
    assert abs(functions - len(walk.functions)) <= 5, walk.describe()


def test_a_round_passes_through_few_files() -> None:
    """The guide quotes the profiler's count; small batches make five steps of it here, too."""
    walk = round_walk.walk_round("synthetic:users=120,items=80,per_user=20,seed=3", batch_size=8)
    assert len(walk.files) <= MOST_FILES
    assert walk.changes_of_file <= MOST_CHANGES
    assert_quoted(walk)


@pytest.mark.skipif(not (Path(DATA) / "ml-100k").is_dir(), reason="TACITA_DATA holds no ml-100k")
def test_the_guide_quotes_the_round_on_movielens() -> None:
    assert_quoted(round_walk.walk_round())
