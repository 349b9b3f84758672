"""A person's own budget inside a silo (spec F.3): everybody trains apart, is clipped, and the silo noises one sum."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tacita
from helpers import noise_laws
from helpers.noise_laws import SURE
from helpers.oracle import started
from helpers.private_federation import ROUND, SMALL_DATA, crowd_stream, dpps_part, federate_parts, serving_broadcast
from tacita.core.errors import TacitaError
from tacita.core.types import BlockStream, Ragged
from tacita.federation.rounds import run_round
from tacita.messages import Total
from tacita.methods.personal.dpps import DPPS
from tacita.round.plan import Federation
from tacita.runs.ledger import describe_ledger, read_run_ledger

IN_SILO: dict[str, Any] = {"name": "dpps", "threat": "silo", "releases": 4}
APART: dict[str, Any] = {"silos": 3, "in_silos": "apart", "aggregation": "fixed"}


def sums(fed: Federation) -> Total:
    progress = started(fed)
    return progress.devices.exchange(fed, progress.server, serving_broadcast(fed, progress), ROUND).total


def without(stream: BlockStream, user: int) -> BlockStream:
    """The same people, one of whom has nothing to tell."""
    (block,) = stream.blocks
    lists = [block.train.row(u).tolist() if u != user else [] for u in range(block.n_users)]
    return replace(stream, blocks=(replace(block, train=Ragged.from_lists(lists)),))


def test_separate_training_in_a_silo_equals_training_without_silos() -> None:
    alone, apart = federate_parts(), federate_parts(silos=3, in_silos="apart")
    tables = []
    for fed in (alone, apart, federate_parts(silos=3)):
        progress = started(fed)
        server, _ = run_round(fed, progress.server, progress.devices)
        tables.append(server.items)
    assert np.array_equal(tables[0], tables[1])
    assert not np.array_equal(tables[0], tables[2])  # together is something else


def test_silo_adds_noise_once_whoever_participates() -> None:
    fed = federate_parts({**IN_SILO, "tiers": [1.0], "shares": [1.0]}, stream=crowd_stream(12, 3000), **APART)
    part, total = dpps_part(fed), sums(fed)
    sigma = part.compute_noise_deviations()[0]
    # with a person or without: one clip, not two
    assert sigma == pytest.approx(part.config.clip * part.compute_noise_multipliers()[0])
    assert total["dpps.noise"][0] == pytest.approx(3 * sigma**2)
    plain = sums(federate_parts(stream=crowd_stream(12, 3000), **APART))
    noise = total["rows"][np.abs(plain["rows"]).sum(axis=1) == 0]
    assert noise_laws.normal(noise, np.sqrt(3) * sigma) > SURE
    assert noise_laws.normal(noise, np.sqrt(3) * 0.95 * sigma) < SURE
    assert noise_laws.normal(noise, sigma) < SURE  # as if one silo had not added its own


def test_user_changes_the_silo_sum_by_at_most_the_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DPPS, "noise_sum", lambda part, server, total: total)  # before the noise
    part = {**IN_SILO, "clip": 0.01}
    stream = crowd_stream(9, 40)
    fed = federate_parts(part, stream=stream, **APART)
    whole, clips = sums(fed), dpps_part(fed).compute_clips()
    for user in range(9):
        rest = sums(federate_parts(part, stream=without(stream, user), **APART))
        changed = float(np.linalg.norm(whole["rows"] - rest["rows"]))
        assert changed <= clips.max() * (1 + 1e-5)
        assert min(abs(changed - clips)) < 1e-4 * clips.max()  # this clip binds, whatever the budget


def test_lower_budgets_are_clipped_more_and_stop_on_time() -> None:
    fed = federate_parts(IN_SILO, **APART)
    part, progress = dpps_part(fed), started(fed)
    assert (np.diff(part.compute_clips()) > 0).all()
    shares = np.array(part.config.shares) / sum(part.config.shares)
    assert shares @ part.compute_clips() == pytest.approx(part.config.clip)
    server = progress.server
    for _ in range(6):
        server, _ = run_round(fed, server, progress.devices)
    account = progress.clients.parts["dpps"]
    assert (account["times"][:, 0] == 4).all()  # planned for four
    assert part.promises(server)["unit"] == "person"
    assert part.promises(server)["threat"] == "silo"


def test_uploads_without_a_user_to_clip_are_refused() -> None:
    with pytest.raises(TacitaError, match=r"train\.in_silos = 'apart'"):
        federate_parts({"name": "dpps"}, silos=3)
    with pytest.raises(TacitaError, match=r"set train\.silos and train\.in_silos"):
        federate_parts(IN_SILO, aggregation="fixed")
    with pytest.raises(TacitaError, match="needs silos that train together"):
        federate_parts({**IN_SILO, "unit": "silo"}, **APART)
    with pytest.raises(TacitaError, match="must not divide by how many took part"):
        federate_parts(IN_SILO, silos=3, in_silos="apart")


def test_the_result_prints_unit_and_threat(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"train": {"rounds": 2, **APART}, "evaluate": {"controls": False}}
    run = tacita.train(data=SMALL_DATA, out=tmp_path / "run", method="dpps", parts=[IN_SILO], **settings)
    message = " ".join(describe_ledger(read_run_ledger(run.folder)))
    assert "protects a person against the server, which sees the noised sum of each silo, and not against" in message
    report = run.result["blocks"][-1]
    assert report["bytes_up"] < 4 * 60 * 33  # one table a silo, not one a person
