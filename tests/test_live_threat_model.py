"""What an epsilon on a node is not about is printed with it: by mechanism, and of budgets that were raised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.hostile_server import begin_site, private_tally_config
from helpers.loopback_site import close_nodes, rows_of_blocks, site_config
from tacita.core.config import RunConfig, validate_model
from tacita.live.node import threat_model, verbs
from tacita.runs.assembly import build_plan
from tacita.runs.ledger import describe_ledger


def with_part(part: dict[str, Any], **train: Any) -> RunConfig:
    values = site_config("fedavg").model_dump(mode="json")
    values["train"] |= train
    return validate_model(RunConfig, values | {"parts": [part]}, "the test")


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (private_tally_config(1.0), threat_model.OF_SUMS),
        (with_part({"name": "dpps"}), threat_model.OF_LOCAL_ROUNDS),
        (with_part({"name": "laplace-noise", "mode": "ldp", "budget": 2.0}), threat_model.OF_LOCAL_ROUNDS),
        (
            with_part({"name": "dp-fedavg", "noise": 3.0}, aggregation="fixed", denominator=30.0),
            threat_model.OF_CENTRAL_ROUNDS,
        ),
        (site_config("tally"), None),
    ],
    ids=["tally", "dpps", "laplace", "dp-fedavg", "no epsilon"],
)
def test_every_mechanism_says_what_it_does_not_cover(config: RunConfig, sentence: str | None) -> None:
    lines = threat_model.list_uncovered_sentences(build_plan(config))
    if sentence is None:
        assert lines == []
    else:
        assert lines == [threat_model.PUBLIC, sentence, threat_model.OF_EVERY_RUN]


def test_status_and_account_print_what_is_outside(tmp_path: Path) -> None:
    site = begin_site(tmp_path, private_tally_config(1.0))
    node = site.transport.members[1]
    assert verbs.perform_verb(node, "status", {})["outside"] == []
    site.next_block()
    status = verbs.perform_verb(node, "status", {})
    assert threat_model.OF_SUMS in status["outside"]
    user = node.store.list_users()[1][0]
    account = verbs.perform_verb(node, "ledger", {"user": user})["runs"]["r"]
    words = describe_ledger(account)
    assert threat_model.OF_SUMS in words
    assert not any("who takes part" in line for line in words)  # a private sum does not tell
    close_nodes(site)


def test_a_budget_that_is_raised_after_releases_is_called_an_odometer(tmp_path: Path) -> None:
    site = begin_site(tmp_path, private_tally_config(1.0, blocks=2))
    node = site.transport.members[1]
    raised, lowered, early, first, silent = node.store.list_users()[1][:5]

    def declare(user: str, epsilon: float) -> str:
        return str(verbs.perform_verb(node, "budget", {"user": user, "epsilon": epsilon})["note"])

    assert [declare(user, 2.0) for user in (raised, lowered)] == ["", ""]
    assert [declare(early, epsilon) for epsilon in (0.5, 3.0)] == ["", ""]  # before anything was released
    site.next_block()
    site.collect(rows_of_blocks(site.config)[1])
    assert declare(lowered, 1.5) == ""
    assert declare(raised, 4.0) == threat_model.RAISED
    assert declare(first, 4.0) == threat_model.RAISED  # the run allowed 1
    for user in (raised, lowered, early, first, silent):
        account = verbs.perform_verb(node, "ledger", {"user": user})["runs"]["r"]
        assert (threat_model.RAISED in describe_ledger(account)) == (user in (raised, first))
    close_nodes(site)
