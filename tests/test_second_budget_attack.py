"""What a second attack on budgets found: each test fails where its mend is taken out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tacita.core.config import RunConfig, validate_model
from tacita.core.errors import TacitaError
from tacita.core.types import CohortView, Doubles
from tacita.data.interaction_table import Interactions
from tacita.federation.one_round import Progress
from tacita.federation.rounds import begin_block, make_initial_progress, run_remaining_blocks, run_round
from tacita.messages import Total, Upload
from tacita.methods.personal.interest import InterestWeights
from tacita.round.plan import Federation
from tacita.round.question import Question
from tacita.runs.assembly import Machine, RunTable, assemble_federation

SMALL = "synthetic:users=30,items=20,per_user=6,groups=3"
EVALUATE = {"k": [5], "select_by": "ndcg@5", "controls": False}
ONE_THREAD = Machine(threads=1)
CENTRAL = {"name": "dpps", "threat": "central", "tiers": [1.0], "shares": [1.0], "releases": 4}


def assemble_run(data: RunTable | None = None, **settings: Any) -> Federation:
    values = {"data": SMALL, "evaluate": EVALUATE, **settings}
    return assemble_federation(validate_model(RunConfig, values, "a test"), ONE_THREAD, data=data)


# Parts on the server that divide by the weight of a noised sum


def assemble_interests() -> Federation:
    train = {"rounds": 2, "silos": 0, "aggregation": "fixed", "optimiser": "sgd", "denominator": 30.0}
    return assemble_run(method="lipm-dpps", backbone={"name": "mf", "dim": 4}, parts=[CENTRAL], train=train)


@pytest.mark.parametrize("headcount", [29.0, 31.0])
def test_no_headcount_decides_what_parts_make_of_a_noised_sum(headcount: float) -> None:
    """The mean interest of LIPM was divided by who had data: claimed 1, at least 2.08."""
    federation = assemble_interests()
    progress = make_initial_progress(federation)
    begin_block(federation, progress, 0)
    question = Question("round")
    server, broadcast = federation.broadcast_round(progress.server, None)
    total = progress.devices.exchange(federation, server, broadcast, question).total

    def take_step(weight: float) -> Doubles:
        seen: Total = federation.decode(server, replace(total, weight=weight), question)
        changed = federation.learn_from_total(server, seen, question, 1.0)
        return np.asarray(federation.server_step(server, changed, seen).parts["interest"]["centre"])

    assert np.array_equal(take_step(30.0), take_step(headcount))


# Weights that a model makes of one person's data


@pytest.mark.parametrize("factor", [np.nan, 0.0, -1.0])
def test_a_weight_that_is_no_number_drops_nobody_out(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """A refusal, or a client less, would tell the server whose data made it."""
    weigh = InterestWeights.weigh

    def weigh_badly(self: InterestWeights, view: CohortView, upload: Upload) -> Doubles:
        factors = weigh(self, view, upload)
        factors[view.user == 7] = factor
        return factors

    totals = []
    for is_bad in (False, True):
        if is_bad:
            monkeypatch.setattr(InterestWeights, "weigh", weigh_badly)
        train = {"rounds": 2, "silos": 0, "aggregation": "mean", "optimiser": "sgd"}
        federation = assemble_run(method="lipm-dpps", backbone={"name": "mf", "dim": 4}, train=train)
        progress = make_initial_progress(federation)
        begin_block(federation, progress, 0)
        server, broadcast = federation.broadcast_round(progress.server, None)
        totals.append(progress.devices.exchange(federation, server, broadcast, Question("round")).total)
    assert totals[0].weight == totals[1].weight
    assert totals[0].n_clients == totals[1].n_clients
    assert totals[0]["dpps.noise"] == totals[1]["dpps.noise"]


def test_a_weight_that_is_no_number_is_refused_where_nothing_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InterestWeights, "weigh", lambda self, view, upload: np.full(view.n_clients, np.nan))
    train = {"rounds": 2, "silos": 0, "aggregation": "mean"}
    federation = assemble_run(parts=[{"name": "interest"}], backbone={"name": "mf", "dim": 4}, train=train)
    progress = make_initial_progress(federation)
    begin_block(federation, progress, 0)
    with pytest.raises(TacitaError, match="from 0 to 1"):
        run_round(federation, progress.server, progress.devices)


# Blocks that rows of a file name

ROUNDS: dict[str, dict[str, Any]] = {
    "dpps": {"method": "dpps", "train": {"rounds": 1}},
    "dp-fedavg": {
        "method": "dp-fedavg",
        "train": {"rounds": 1, "aggregation": "fixed", "denominator": 10.0, "participation": {"kind": "all"}},
    },
    "tally": {"backbone": {"name": "tally"}, "privacy": {"epsilon": 8.0}},
}


def make_blocks(*last_rows: int) -> RunTable:
    """Twenty people with six rows each in block 0; then a row of the first person in each of these blocks."""
    users = [*np.repeat(np.arange(20), 6).tolist(), *(0 for _ in last_rows)]
    items = [*np.tile(np.arange(6), 20).tolist(), *(0 for _ in last_rows)]
    blocks = [*np.zeros(120, int).tolist(), *last_rows]
    return RunTable(
        Interactions(
            name="toy",
            user=np.array(users, np.int32),
            item=np.array(items, np.int32),
            rating=None,
            timestamp=np.arange(len(users), dtype=np.int64),
            split=np.zeros(len(users), np.int8),
            user_ids=tuple(f"u{number}" for number in range(20)),
            item_ids=tuple(f"i{number}" for number in range(6)),
            titles={},
            fingerprint="toy",
            format_note="",
            block=np.array(blocks, np.int32),
        )
    )


def train_blocks(data: RunTable, kind: str, split: dict[str, Any]) -> Progress:
    settings = {"split": {"kind": "given", **split}, "catalogue": "from-data", **ROUNDS[kind]}
    federation = assemble_run(data, **settings)
    progress = make_initial_progress(federation)
    run_remaining_blocks(federation, progress, lambda report, progress: None)
    return progress


@pytest.mark.parametrize("kind", ROUNDS)
@pytest.mark.parametrize("last_rows", [(), (1,), (2,), (1, 2), (9,)])
def test_one_row_adds_no_block_under_a_budget(kind: str, last_rows: tuple[int, ...]) -> None:
    """A row in a block of its own showed in how many models there are."""
    progress = train_blocks(make_blocks(*last_rows), kind, {"n_blocks": 2})
    assert [result["rounds"] for result in progress.results] == [1, 1]


@pytest.mark.parametrize("kind", ROUNDS)
def test_blocks_of_a_file_are_counted_by_settings_under_a_budget(kind: str) -> None:
    with pytest.raises(TacitaError, match=r"split\.n_blocks"):
        train_blocks(make_blocks(1), kind, {})


def test_without_a_budget_a_file_says_how_many_blocks_there_are() -> None:
    federation = assemble_run(make_blocks(1), split={"kind": "given"})
    assert len(federation.stream.blocks) == 2


# Titles


def test_titles_are_those_of_the_catalogue_under_a_budget(tmp_path: Path) -> None:
    """A title column is what single rows say."""
    path = tmp_path / "items.csv"
    path.write_text("item,title\n" + "".join(f"i{item},Film {item}\n" for item in range(6)))
    table = replace(make_blocks().table, block=None, titles={"i1": "a secret of u3"})
    tally = {"backbone": {"name": "tally"}, "split": {"kind": "random"}, "catalogue": str(path)}
    private = assemble_run(RunTable(table), **tally, privacy={"epsilon": 8.0})
    assert private.stream.titles["i1"] == "Film 1"
    assert assemble_run(RunTable(table), **tally).stream.titles["i1"] == "a secret of u3"
