"""Rules that every part with a ledger is held to, whoever wrote it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers import noise_laws
from helpers.examples import load_example
from helpers.oracle import started
from helpers.private_federation import ROUND, federate_parts, serving_broadcast
from tacita.core.config import RunConfig, validate_model
from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, CohortView, Doubles, RoundReplay
from tacita.federation.rounds import make_initial_progress, run_remaining_blocks
from tacita.messages import CohortReply, Spec, Upload
from tacita.round import registry
from tacita.round.capabilities import Unlearning
from tacita.round.fields import PartFields
from tacita.round.part import Part
from tacita.round.plan import Federation
from tacita.round.state import StateSpec
from tacita.runs.assembly import Machine, assemble_federation
from tacita.runs.ledger import describe_uncovered
from tacita.runs.server_view import describe_server_view

WHISPER = {"name": "whisper"}


class Loud(Part):
    name = "loud"

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, Arrays]:
        return upload.scale(np.full(view.n_clients, 100.0)), {}


class Heavy(Part):
    """Weighs clients by how much they have."""

    name = "heavy"

    def weigh(self, view: CohortView, upload: Upload) -> Doubles:
        return 1.0 / (1.0 + np.diff(view.train.ptr[view.user_ptr]))


class Curious(Part, Unlearning):
    """Asks devices a question of its own."""

    name = "curious"
    scope = ()

    def answer_question(self, view: CohortView, question: str) -> CohortReply:
        raise NotImplementedError


class Single(Part):
    """Sends a field that the server sees of each client by itself."""

    name = "single"

    def fields(self, n_items: int, block: int = 0) -> PartFields:
        return PartFields(extra=(Spec("mark", (1,), seen="each"),))


@pytest.fixture(autouse=True)
def whisper(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("_PARTS", "_PRESETS"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))
    for part in (Loud, Heavy, Curious, Single):
        registry.register(part)
    return load_example("toy_budget").Whisper


def federate_whisper(*specs: dict[str, Any], **train: Any) -> Federation:
    return federate_parts(*specs, **{"aggregation": "fixed", **train})


def config_of(data: str = "synthetic:users=40,items=30,per_user=9", **train: Any) -> RunConfig:
    values = {
        "method": "whisper",
        "parts": [WHISPER],
        "data": data,
        "catalogue": "from-data",
        "split": {"kind": "random"},
        "train": {"rounds": 1, "aggregation": "fixed", **train},
        "evaluate": {"k": [5], "select_by": "ndcg@5", "controls": False},
    }
    return validate_model(RunConfig, values, "a test")


def test_nothing_may_change_a_release_after_its_clip() -> None:
    federate_whisper({"name": "loud"}, WHISPER)
    with pytest.raises(TacitaError, match="'loud' changes releases after whisper has noised them; list whisper after"):
        federate_whisper(WHISPER, {"name": "loud"})


def test_weights_that_follow_from_data_are_refused() -> None:
    with pytest.raises(TacitaError, match="'heavy' weighs people by what they have, which whisper does not hide"):
        federate_whisper({"name": "heavy"}, WHISPER)


def test_answers_that_no_ledger_counts_are_refused(whisper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    federate_whisper({"name": "curious"}, WHISPER)
    monkeypatch.setattr(whisper, "covers", frozenset())
    with pytest.raises(TacitaError, match="'curious' asks people besides rounds"):
        federate_whisper({"name": "curious"}, WHISPER)


def test_fields_of_single_clients_are_refused() -> None:
    federation = federate_whisper({"name": "single"}, WHISPER)
    with pytest.raises(TacitaError, match=r"'single.mark' is seen each by itself, and whisper noises sums"):
        federation.fields(started(federation).server, ROUND)


@pytest.mark.parametrize("lasting", ["nothing", "until a rollback"])
def test_a_ledger_without_lasting_accounts_is_refused(
    whisper: Any, monkeypatch: pytest.MonkeyPatch, lasting: str
) -> None:
    declare = whisper.state

    def state(self: Part, n_users: int) -> Sequence[StateSpec]:
        if lasting == "nothing":
            return ()
        return [replace(spec, persistent=False) for spec in declare(self, n_users)]

    monkeypatch.setattr(whisper, "state", state)
    with pytest.raises(TacitaError, match="'whisper' has a ledger, and its state lacks the accounts"):
        federate_whisper(WHISPER)


def test_a_sum_with_one_noise_is_divided_by_people_enrolled(tmp_path: Any) -> None:
    federation = assemble_federation(config_of(), Machine(threads=1))
    assert federation.config.train.denominator == 40.0
    rows = [f"u{user},i{item}" for user in range(24) for item in range(user % 3, 30, 3)]
    (tmp_path / "rows.csv").write_text("\n".join(["user,item", *rows]) + "\n")
    with pytest.raises(TacitaError, match=r"whisper divides a noised sum.*set train\.denominator"):
        assemble_federation(config_of(str(tmp_path / "rows.csv")), Machine(threads=1))
    with pytest.raises(TacitaError, match=r"must not divide it by who took part; use train\.aggregation = 'fixed'"):
        assemble_federation(config_of(aggregation="mean"), Machine(threads=1))


def test_persons_are_not_promised_what_silos_train_together() -> None:
    with pytest.raises(TacitaError, match="'whisper' protects persons, and a silo that trains one model"):
        assemble_federation(config_of(silos=4, denominator=4.0), Machine(threads=1))


def test_what_the_server_sees_follows_from_the_ledger() -> None:
    federation = assemble_federation(config_of(), Machine(threads=1))
    assert describe_server_view(federation) == "each person's clipped update; the model that others get has noise"


def test_ledger_and_result_agree_on_the_denominator() -> None:
    from tacita.report.promises import list_privacy_lines

    federation = assemble_federation(config_of(), Machine(threads=1))
    progress = make_initial_progress(federation)
    run_remaining_blocks(federation, progress, lambda report, progress: None)
    result = {"blocks": progress.results}
    sentence = "divided by train.denominator = 40, of people enrolled"
    assert sentence in " ".join(describe_uncovered(federation.config, federation))
    assert sentence in " ".join(list_privacy_lines(federation.config, result))


def test_noise_of_a_replayed_round_is_new() -> None:
    """Also where noise follows the seed: a part need not number its releases."""
    federation = federate_whisper(WHISPER)
    progress = started(federation)
    broadcast = serving_broadcast(federation, progress)
    replayed = replace(ROUND, replay=RoundReplay(0, 1.0))
    first = progress.devices.exchange(federation, progress.server, broadcast, ROUND).total
    repeat = progress.devices.exchange(federation, progress.server, broadcast, replayed).total
    difference = repeat["rows"] - first["rows"]
    assert noise_laws.normal(difference, 4.0 * np.sqrt(2)) > 1e-6
