"""What a person is willing to spend, said on their node: it holds before anything leaves, and from run to run."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from helpers.loopback_site import DATA, PATIENT, SPLIT, Site, close_nodes, make_site, play_blocks
from helpers.node_accounts import MF, dpps_config, release_counts
from tacita.cli.entry import app
from tacita.core.config import RunConfig, validate_model
from tacita.core.errors import TacitaError
from tacita.live.node import budgets, charging, verbs
from tacita.live.node.node import Node
from tacita.live.wire import decode_reply
from tacita.privacy.accounting import Event, compute_epsilon, find_max_releases
from tacita.privacy.calibration import bound_mu_of_pure
from tacita.privacy.ledger import EARLIER_ROUNDS, EARLIER_RUNS, UNIT, Ledger
from tacita.runs.assembly import build_plan


@pytest.fixture
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    result = make_site(tmp_path, getattr(request, "param", None) or dpps_config())
    yield result
    close_nodes(result)


def account(node: Node, name: str, run: str = "r") -> dict[int, Any]:
    """A person's own, by their number in the store."""
    state = node.store.load_devices(run)
    assert state is not None
    return dict(zip(state[1]["users"].tolist(), state[1][f"parts/{name}"].tolist(), strict=True))


def declared_before(site: Site, said: list[float]) -> dict[Node, list[int]]:
    """Somebody on each node says each of these, before anything is asked."""
    request: dict[Node, list[int]] = {}
    spoil = site.transport.spoil

    def first(number: int, body: bytes, answer: Any) -> bytes | None:
        node = site.transport.members[number]
        if node not in request:
            ids, raws = node.store.list_users()
            for raw, epsilon in zip(raws, said):
                verbs.perform_verb(node, "budget", {"user": raw, "epsilon": epsilon})
            request[node] = ids[: len(said)].tolist()
        result: bytes | None = spoil(number, body, answer)
        return result

    site.transport.spoil = first
    return request


def test_a_budget_is_the_persons_own_and_chooses_noise_and_limit(site: Site) -> None:
    request = declared_before(site, [5.0, 0.0, 2.5, 0.2])
    play_blocks(site)
    part = next(entry for entry in build_plan(site.config).parts if entry.name == "dpps")
    price = np.ceil((1 / part.compute_noise_multipliers()) ** 2 / UNIT)  # type: ignore[attr-defined]
    assert len(request) == 3
    for node, (rich, none, between, careful) in request.items():
        tier, budget = account(node, "dpps/tier"), account(node, "dpps/budget")
        spent, released = account(node, "dpps/spent"), account(node, "dpps/times")
        assert (tier[rich], budget[rich]) == (2, 5_000_000)
        assert (tier[between], budget[between]) == (1, 2_500_000)
        assert (tier[careful], budget[careful]) == (0, 200_000)
        assert spent[rich][0] == released[rich][0] * price[2] > 0
        assert released[none][0] == 0  # nothing of theirs ever left
        others = set(tier) - {rich, none, between, careful}
        assert {budget[other] for other in others} <= {
            500_000,
            1_000_000,
            5_000_000,
        }  # a tier of the run, as without it


def test_lowering_a_budget_below_spending_stops_releases(site: Site) -> None:
    declared_before(site, [5.0])
    play_blocks(site)
    node = site.transport.members[1]
    ids, raws = node.store.list_users()
    before = account(node, "dpps/spent")[int(ids[0])]
    assert before[0] > 0
    verbs.perform_verb(node, "budget", {"user": raws[0], "epsilon": 0.001})
    with site.store as store:
        store.create_run("again", site.config, PATIENT)
    site.run = "again"
    site.next_block()
    assert account(node, "dpps/times", "again")[int(ids[0])][0] == 0
    assert account(node, "dpps/spent", "again")[int(ids[0])][1] == before[0]  # carried, and stays
    assert max(entry[0] for entry in account(node, "dpps/times", "again").values()) > 0


def test_user_who_lowers_the_budget_during_a_sum_is_excluded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    late: set[int] = set()

    def declare(node: Node, *more: Any) -> None:
        budgets.apply_declared_budgets(node, *more)
        if id(node) not in late:
            late.add(id(node))
            verbs.perform_verb(node, "budget", {"user": node.store.list_users()[1][0], "epsilon": 0.0})

    monkeypatch.setattr(charging, "apply_declared_budgets", declare)
    play_blocks(site)
    for node in site.transport.members.values():
        assert account(node, "dpps/times")[int(node.store.list_users()[0][0])][0] == 0
        assert release_counts(node).max() > 0


def test_budget_is_in_no_message_and_in_export_and_erase(site: Site, tmp_path: Path) -> None:
    declared_before(site, [1.0])
    play_blocks(site)
    assert all(decode_reply(reply).head.requests == [] for _, _, reply in site.transport.log)
    node = site.transport.members[1]
    _, raws = node.store.list_users()
    node.export_user_data(tmp_path / "mine.jsonl", raws[0])
    lines = [json.loads(line) for line in (tmp_path / "mine.jsonl").read_text().splitlines()]
    assert [entry for entry in lines if entry.get("request") == "budget" and "1000000" in entry["payload"]]
    assert verbs.perform_verb(node, "status", {})["requests"] == []
    assert verbs.perform_verb(node, "status", {})["requests waiting"] == 0
    node.erase_user(raws[0])
    assert node.store.read_declared_budgets("r") == {}


def test_node_states_epsilon_or_that_there_is_none(site: Site) -> None:
    node = site.transport.members[1]
    assert verbs.perform_verb(node, "status", {})["epsilon"].startswith("no epsilon")
    play_blocks(site)
    _, raws = node.store.list_users()
    most = float(verbs.perform_verb(node, "ledger", {"user": raws[0]})["runs"]["r"]["spent"])
    assert verbs.perform_verb(node, "epsilon", {"user": raws[0]}).startswith(
        f"epsilon {most:.4g} of a budget of 0.5 at"
    )
    assert "at most epsilon" in verbs.perform_verb(node, "status", {})["epsilon"]
    for bad in (-1.0, float("nan"), 1e7):
        with pytest.raises(TacitaError, match="epsilon"):
            verbs.perform_verb(node, "budget", {"user": raws[0], "epsilon": bad})
    with pytest.raises(TacitaError, match="nothing of user"):
        verbs.perform_verb(node, "budget", {"user": "nobody", "epsilon": 1.0})


def test_the_verbs_of_the_command_line(site: Site) -> None:
    play_blocks(site)
    node = site.transport.members[1]
    _, raws = node.store.list_users()
    node.close()
    message = CliRunner().invoke(app, ["node", "budget", raws[0], "1.5", "--folder", str(node.folder)])
    assert message.exit_code == 0, message.output
    assert "spends at most epsilon 1.5 in every run that counts" in message.output
    shown = CliRunner().invoke(app, ["node", "recommend", raws[0], "--folder", str(node.folder)])
    assert f"What this cost user {raws[0]}: epsilon" in " ".join(shown.output.split())


# A private tally


TALLY = {"backbone": {"name": "tally"}, "privacy": {"epsilon": 4.0, "blocks": 2}}


def told(node: Node, run: str) -> tuple[dict[int, Any], dict[int, Any]]:
    return account(node, "statistic/spent", run), account(node, "statistic/times", run)


def willing(site: Site) -> dict[int, list[int]]:
    """As many people of each node as one sum needs are willing to spend more."""
    for node in site.transport.members.values():
        for raw in node.store.list_users()[1][:5]:
            verbs.perform_verb(node, "budget", {"user": raw, "epsilon": 20.0})
    return {number: node.store.list_users()[0][:5].tolist() for number, node in site.transport.members.items()}


@pytest.mark.parametrize(
    "site", [validate_model(RunConfig, {"data": DATA, "split": SPLIT, "seed": 5, **TALLY}, "the test")], indirect=True
)
def test_a_private_tally_goes_on_with_what_people_spent_before_also_after_a_kill(site: Site) -> None:
    spoil, killed = site.transport.spoil, set()

    def kill(number: int, body: bytes, answer: Any) -> bytes | None:
        """The node dies with its answer in the file and nothing sent, and begins again from the file alone."""
        reply: bytes | None = spoil(number, body, answer)
        if number in killed or b'"kind":"statistic"' not in body:
            return reply
        killed.add(number)
        dead = site.transport.members[number]
        shutil.copytree(dead.folder, dead.folder.with_name(f"again{number}"))  # as the disk is at this moment
        site.transport.members[number] = Node.open(dead.folder.with_name(f"again{number}"))
        dead.close()
        return None

    site.transport.spoil = kill
    play_blocks(site)
    assert len(killed) == 3
    spent = {number: told(node, "r")[0] for number, node in site.transport.members.items()}
    node = site.transport.members[1]
    ids, raws = node.store.list_users()
    rich = willing(site)
    with site.store as store:
        store.create_run("again", site.config, PATIENT)
    site.run = "again"
    site.next_block()
    for number, node in site.transport.members.items():
        units, times = told(node, "again")
        for user, (likes, terms, back, earlier) in units.items():
            assert earlier == sum(spent[number].get(user, [0]))  # all of it, once
            full = earlier > 0.95 * max(sum(entry) for entry in spent[number].values())
            if full and user not in rich[number]:
                assert (likes, terms, back) == (0, 0, 0)  # a new run is no new budget
        assert max(sum(entry) for entry in spent[number].values()) > 0
        assert any(time[3] for time in times.values())
    own_values = told(site.transport.members[1], "again")
    assert own_values[1][int(ids[0])][:2] == [1, 1]  # who is willing to spend more goes on
    shown = verbs.perform_verb(site.transport.members[1], "ledger", {"user": raws[0]})["runs"]
    assert shown["again"]["spent"] > shown["r"]["spent"] > 0


KILLED = """
import os, signal, sys
from pathlib import Path
from tacita.live.node import question_handler
from tacita.live.node.node import Node
from tacita.live.node.store import NodeStore

when, folder, body = sys.argv[1:]
commit = NodeStore.commit_answer

def killed(store, *given, **more):
    if when == "written":
        commit(store, *given, **more)
    os.kill(os.getpid(), signal.SIGKILL)

NodeStore.commit_answer = killed
question_handler.answer_message(Node.open(Path(folder)), Path(body).read_bytes())
"""


def test_kill_9_between_charge_and_answer_neither_loses_nor_doubles_what_people_spent(tmp_path: Path) -> None:
    """Processes of nodes die: one with the charge made and nothing written, one with it written and nothing sent."""
    config = validate_model(RunConfig, {"data": DATA, "split": SPLIT, "seed": 5, **TALLY}, "the test")
    sites = {}
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        sites[name] = make_site(tmp_path / name, config)
    site, remainder = sites["killed"], {1: ["made"], 2: ["written"]}
    observations: dict[int, dict[int, Any]] = {}

    def die(number: int, body: bytes, answer: Any) -> bytes | None:
        if b'"kind":"statistic"' not in body or not remainder.get(number):
            return bytes(answer())
        node, request = site.transport.members[number], tmp_path / f"request{number}"
        request.write_bytes(body)
        node.close()
        when = remainder[number].pop()
        child = subprocess.run([sys.executable, "-c", KILLED, when, str(node.folder), str(request)], timeout=300)
        assert child.returncode == -signal.SIGKILL
        site.transport.members[number] = repeat = Node.open(node.folder)
        observations[number] = told(repeat, "r")[1]
        return None

    site.transport.spoil = die
    for entry in sites.values():
        play_blocks(entry)
    assert remainder == {1: [], 2: []}
    assert not any(times[1] for times in observations[1].values())  # nothing was written, and nothing had left
    assert max(times[1] for times in observations[2].values()) == 1  # it was charged before anything could leave
    for number, node in site.transport.members.items():
        assert told(node, "r") == told(sites["whole"].transport.members[number], "r")  # each release once
        assert max(sum(units) for units in told(node, "r")[0].values()) > 0
    willing(site)
    with site.store as store:
        store.create_run("again", config, PATIENT)
    site.run = "again"
    site.next_block()
    for node in site.transport.members.values():
        before = told(node, "r")[0]
        assert all(units[3] == sum(before.get(user, [0])) for user, units in told(node, "again")[0].items())
    for entry in sites.values():
        close_nodes(entry)


# Rounds that chance decides


def drawn(noise: float = 2.0, rate: float = 0.1) -> Ledger:
    event = Event("round", "gaussian", 1.0, noise, "person", "central", rate, "poisson")
    same = Event(EARLIER_ROUNDS, "gaussian", 1.0, noise, "person", "central", rate, "poisson", once=True)
    return Ledger((event, same, Event(EARLIER_RUNS, "gaussian", 1.0, 1.0, "person", "central", once=True)))


def test_earlier_rounds_are_charged_at_this_runs_rate() -> None:
    ledger = drawn()
    fits = find_max_releases(ledger.events[0], 1.0, 1e-5)
    result = ledger.with_earlier_spending(ledger.open_accounts(1, 1.0), np.zeros(1, np.int64), np.array([fits - 2]))
    assert ledger.compute_spent_epsilon(result)[0] == pytest.approx(
        compute_epsilon([(ledger.events[0], fits - 2)], 1e-5)
    )
    for goes in (True, True, False):
        result, went = ledger.charge(result, "round")
        assert went[0] == goes
    assert result["times"][0].tolist() == [2, fits - 2, 0]
    assert ledger.compute_spent_epsilon(result)[0] <= 1.0
    repeat = ledger.with_earlier_spending(result, np.zeros(1, np.int64), np.zeros(1, np.int64))
    assert repeat["spent"].tolist() == result["spent"].tolist()  # it only grows


@pytest.mark.parametrize(
    ("noise", "rate", "like"), [(2.0, 0.1, True), (3.0, 0.05, True), (2.0, 0.2, False), (1.9, 0.1, False)]
)
def test_rounds_of_other_settings_count_as_no_less_than_they_cost(noise: float, rate: float, like: bool) -> None:
    local, other = drawn(), drawn(noise, rate)
    spent, _ = other.charge(other.open_accounts(1), "round")
    spent, _ = other.charge(spent, "round")
    rounds, units = other.count_rounds_like(local.events[0], spent)
    assert (rounds[0] == 2, units[0] == 0) == (like, like)
    carried = local.with_earlier_spending(local.open_accounts(1), units, rounds)
    assert local.compute_spent_epsilon(carried)[0] >= other.compute_spent_epsilon(spent)[0] * (1 - 1e-6)


def test_second_sampled_run_starts_from_earlier_spending(tmp_path: Path) -> None:
    values = {"data": DATA, "split": SPLIT, "seed": 5, "backbone": MF, "method": "dp-fedavg"}
    drawn = {"kind": "poisson", "rate": 0.5}
    train = {"rounds": 2, "aggregation": "fixed", "denominator": 15.0, "participation": drawn}
    part = {"name": "dp-fedavg", "noise": 3.0, "clip": 0.01}
    config = validate_model(RunConfig, {**values, "train": train, "parts": [part]}, "the test")
    site = make_site(tmp_path, config, insecure_single_user_uploads=True)
    play_blocks(site)
    with site.store as store:
        store.create_run("again", config, PATIENT)
    site.run = "again"
    site.next_block()
    for node in site.transport.members.values():
        first, second = account(node, "dp-fedavg/times"), account(node, "dp-fedavg/times", "again")
        assert max(entry[0] for entry in first.values()) > 0
        for user, (rounds, earlier, _) in second.items():
            if rounds:
                assert earlier == first[user][0]
        assert any(rounds for rounds, _, _ in second.values())
    close_nodes(site)


def test_a_second_run_with_laplace_noise_is_no_second_budget(tmp_path: Path) -> None:
    part = {"name": "laplace-noise", "mode": "ldp", "epsilon": 1.0, "budget": 2.0}
    values = {"data": DATA, "split": SPLIT, "seed": 5, "backbone": MF, "method": "fedavg", "train": {"rounds": 2}}
    config = validate_model(RunConfig, {**values, "parts": [part]}, "the test")
    site = make_site(tmp_path, config, min_users=1)
    play_blocks(site)
    with site.store as store:
        store.create_run("again", config, PATIENT)
    site.run = "again"
    site.next_block()
    for node in site.transport.members.values():
        first, second = account(node, "laplace-noise/spent"), account(node, "laplace-noise/spent", "again")
        assert max(entry[0] for entry in first.values()) == 2 / UNIT  # all of it
        for user, (local, earlier) in second.items():
            assert earlier == (np.ceil(bound_mu_of_pure(first[user][0] * UNIT) ** 2 / UNIT) if first[user][0] else 0)
            if first[user][0] == 2 / UNIT:
                assert local == 0
    close_nodes(site)


def test_who_can_pay_decides_no_refusal(tmp_path: Path) -> None:
    """In the second block only those who are new can pay, and they are few; noise protects each of them."""
    part = {"name": "laplace-noise", "mode": "ldp", "epsilon": 1.0, "budget": 2.0}
    dated = {"kind": "blocks", "borders": [1_676_522_048]}  # some people come later
    values = {"data": DATA, "split": dated, "seed": 5, "backbone": MF, "method": "fedavg", "train": {"rounds": 2}}
    site = make_site(tmp_path, validate_model(RunConfig, {**values, "parts": [part]}, "the test"), min_users=9)
    play_blocks(site)
    answers = [decode_reply(reply).head for _, _, reply in site.transport.log]
    assert not [head for head in answers if head.verdict == "refused"]
    times = account(site.transport.members[1], "laplace-noise/times")
    assert {n_releases for (n_releases, *_) in times.values()} == {2}  # of the 4 rounds a budget pays 2
    close_nodes(site)
