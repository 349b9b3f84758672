"""What parts report of requests: only what they say, and nobody's key."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tacita.round.unlearning_report import CalibratedPath, UnlearningReport, are_exact, list_purged, sum_cost


def test_an_event_holds_what_is_set_and_no_keys() -> None:
    path = CalibratedPath(path="checkpoint", alpha=0.5, ratio=None)
    report = UnlearningReport(method="m", exact=False, subjects=(7, 8), calibration=path, details={"edges": 3})
    content = {"method": "m", "exact": False, "path": "checkpoint", "alpha": 0.5, "ratio": None, "edges": 3}
    assert report.to_json() == content
    assert UnlearningReport().to_json() == {}


def test_defaults_fill_only_what_a_report_leaves_open() -> None:
    price = UnlearningReport(rounds=4, bytes_up=10.0, purged=("sums",))
    report = UnlearningReport(method="m", rounds=0, purged=()).with_defaults(price)
    assert report.to_json() == {"method": "m", "rounds": 0, "bytes_up": 10.0, "purged": ()}


def test_a_part_that_waits_says_so_in_either_way() -> None:
    assert UnlearningReport(waits=True).is_waiting
    assert UnlearningReport(waits_for=2).is_waiting
    assert not UnlearningReport(method="m").is_waiting


def test_reports_of_several_parts_add_up() -> None:
    reports = [UnlearningReport(rounds=2, purged=("a",), exact=True), UnlearningReport(purged=("b",))]
    assert sum_cost(reports, "rounds") == 2.0
    assert list_purged(reports) == ["a", "b"]
    assert are_exact(reports)
    assert not are_exact([*reports, UnlearningReport(exact=False)])
    assert not are_exact(reports[1:])


def test_a_misspelt_field_is_refused() -> None:
    with pytest.raises(ValidationError):
        UnlearningReport(**{"metod": "m"})  # type: ignore[arg-type]
