"""Which requests a run fulfils, by its method; lab and nodes ask the same function."""

from __future__ import annotations

import pytest

from tacita.methods import resolve_config
from tacita.round.fulfilment import can_fulfil, list_parts_reaching
from tacita.round.request import REQUEST_KINDS
from tacita.runs.assembly import Machine, assemble_federation

DATA = "synthetic:users=40,items=30,per_user=8"


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ({"method": "fedavg"}, []),
        ({"method": "retraction"}, ["leave"]),
        ({"method": "fedshare"}, ["share", "unshare", "forget", "leave"]),
        ({"method": "fedshare-fedavg"}, ["share", "unshare", "leave"]),
        ({"method": "fru"}, ["forget", "leave"]),
        ({"method": "fedavg", "backbone": {"name": "tally"}}, ["forget", "leave"]),
    ],
)
def test_a_run_fulfils_what_its_parts_reach(values: dict[str, object], kinds: list[str]) -> None:
    plan = assemble_federation(resolve_config({"data": DATA, **values}, "the test"), Machine())
    assert [kind for kind in REQUEST_KINDS if can_fulfil(plan, kind)] == kinds


def test_parts_are_selected_by_what_they_take_out() -> None:
    plan = assemble_federation(resolve_config({"data": DATA, "method": "retraction"}, "the test"), Machine())
    assert [part.name for part in list_parts_reaching(plan, "local", "people")] == ["retraction"]
    assert list_parts_reaching(plan, "given", "local") == []
