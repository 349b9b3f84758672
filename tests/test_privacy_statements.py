"""What people are told of privacy: the same in every place, as much as was spent, and nothing that is not so."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import pytest

import tacita as tc
from tacita.cli import main
from tacita.report.promises import NO_EPSILON, list_privacy_lines, summarise_privacy
from tacita.runs.ledger import describe_ledger, read_run_ledger

SMALL = "synthetic:users=60,items=40,per_user=12"
BRIEF: dict[str, Any] = {"evaluate": {"controls": False}, "split": {"n_blocks": 2}}


def call(*arguments: str, code: int = 0) -> tuple[str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as error:
        main(list(arguments))
    assert (error.value.code or 0) == code, err.getvalue()
    return " ".join(out.getvalue().split()), " ".join(err.getvalue().split())


@pytest.fixture(scope="module")
def personal(tmp_path_factory: pytest.TempPathFactory) -> tc.Run:
    """A run of DPPS, whose budgets are a part's."""
    return tc.train(SMALL, method="dpps", train={"rounds": 2}, out=tmp_path_factory.mktemp("runs") / "dpps", **BRIEF)


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> tc.Run:
    """A run of tally under a budget of 2, from which one person who had told in every block took all back."""
    out = tmp_path_factory.mktemp("runs") / "tally"
    run = tc.train(SMALL, backbone="tally", privacy={"epsilon": 2.0}, out=out, **BRIEF)
    spent = {user: read_run_ledger(out, user)["spent"] for user in run.users[:8]}
    who = max(spent, key=lambda user: spent[user])
    (out / "foretold").write_text(json.dumps(read_run_ledger(out, who)))
    message, _ = call("forget", "--run", str(out), "--user", who, "--all")
    (out / "said").write_text(message)
    (out / "who").write_text(who)
    return tc.load(out)


def test_recommendations_state_the_budget_of_a_part(personal: tc.Run) -> None:
    message, _ = call("recommend", "--run", str(personal.folder), "--user", "u1", "-k", "1")
    assert "no epsilon" not in message
    assert "budgets of epsilon 0.5 to 5 at delta 1e-05 for all that one person has, against the server" in message
    most = read_run_ledger(personal.folder)["epsilon"]["most"]
    assert f"At most epsilon {most:.4g} is spent so far." in message


def test_promises_of_parts_are_stated_in_words(personal: tc.Run) -> None:
    message = list_privacy_lines(personal.config, personal.result)
    assert "the server, which sees each noised release" in message[0]
    assert "threat" not in " ".join(message)
    assert "rehearsal" in message[-1]
    for promise, words in (
        ({"unit": "person", "threat": "local", "delta": 0.0, "epsilon_of_a_release": 0.5}, "for each release"),
        ({"unit": "silo", "threat": "central", "delta": 1e-5, "noise": 2.0}, "for all that one silo has"),
        ({"unit": "person", "threat": "silo", "delta": 1e-5, "epsilon_0.5_really": 20.7, "delta_at_0.5_really": 0.1},
         "0.5 is really 20.7"),
        ({"epsilon_per_item": 1.0, "epsilon_per_person_mean": 2.0, "epsilon_per_person_most": 7.0}, "7 at most"),
    ):  # fmt: skip
        report = list_privacy_lines(personal.config, {"blocks": [{"promises": {"part": promise}}]})
        assert words in report[0]
        assert words in summarise_privacy(personal.config, {"blocks": [{"promises": {"part": promise}}]})
    assert list_privacy_lines(personal.config, {"blocks": [{}]}) == [NO_EPSILON]


def test_withdrawal_cost_is_predicted_and_overspending_is_stated(private: tc.Run) -> None:
    who = (private.folder / "who").read_text()
    spent = read_run_ledger(private.folder, who)["spent"]
    assert spent > 2.1  # it went beyond the plan
    assert "if_taken_back" not in read_run_ledger(private.folder, who)  # nothing is left to take back
    foretold = json.loads((private.folder / "foretold").read_text())
    assert foretold["spent"] < 2.1
    assert foretold["if_taken_back"] == spent  # the ledger says so before
    assert f"{spent - foretold['spent']:.4g} more, {spent:.4g} in all" in " ".join(describe_ledger(foretold))
    assert f"you have then spent {spent:.4g} of 2." in (private.folder / "said").read_text()
    message, _ = call("recommend", "--run", str(private.folder), "--user", "u3", "-k", "1")
    assert "under a planned epsilon 2, delta 1e-05 for each person" in message
    assert f"spent more than was planned, up to epsilon {spent:.4g}" in message
    assert json.loads((private.folder / "result.json").read_text())["privacy"]["epsilon"]["most"] == spent


def test_results_pages_and_tables_state_privacy(private: tc.Run, personal: tc.Run) -> None:
    for run, words in ((private, "Privacy: epsilon 2 at delta"), (personal, "budgets of epsilon 0.5 to 5")):
        assert words in " ".join(json.loads((run.folder / "result.json").read_text())["said_of_privacy"])
        assert words in (run.folder / "report.html").read_text()
    plain = tc.train(SMALL, backbone="tally", out=private.folder.parent / "plain", **BRIEF)
    epsilon = tc.compare([private, personal, plain])["epsilon"].to_list()
    assert epsilon[0] > 2.1
    assert epsilon[1:] == [5.0, None]
    assert tc.compare([private, plain], over="seeds")["epsilon"].to_list() == [epsilon[0], None]


def test_ledger_statement_is_true(private: tc.Run, personal: tc.Run) -> None:
    message = " ".join(describe_ledger(read_run_ledger(private.folder)))
    assert "best" not in message  # under a budget validation chooses nothing
    assert "A lab run is a rehearsal" in message
    assert "a digest of the data" in message
    assert "Budget of each person: epsilon 2." in message
    assert "e-1" not in message.replace("delta 1e-05", "")
    assert " 1 release " in message
    other = next(user for user in private.users if user != (private.folder / "who").read_text())
    own = " ".join(describe_ledger(read_run_ledger(private.folder, other)))
    assert "taken back:" not in own
    assert "do not add up" in own
    assert "To take something back" in own
    assert "To take something back" not in " ".join(
        describe_ledger(read_run_ledger(personal.folder, personal.users[0]))
    )
    message = " ".join(describe_ledger(read_run_ledger(personal.folder)))
    assert "which round is the best" in message
    assert "counts of people (result.json, events.jsonl)" in message
    assert "Budget of each person: epsilon 0.5 to epsilon 5." in message


def test_item_without_released_sums_says_why(private: tc.Run) -> None:
    untold = next(item for item in private.items if not private.similar(item).height)
    message, _ = call("similar", str(private.folder), untold)
    assert f"Nothing is known of what is like item {untold}; under a budget only popular items are told of." in message
    assert "planned epsilon 2" in message
    _, side_output = call("recommend", "--run", str(private.folder), "--all", "--out", str(private.folder / "all.csv"))
    assert "planned epsilon 2" in side_output


def test_meaningless_delta_raises_a_warning(personal: tc.Run) -> None:
    promise = {"unit": "person", "threat": "local", "delta": 0.5, "epsilon_most": 1.0}
    result = {"blocks": [{"promises": {"part": promise}}], "data": {"users": 60}}
    assert "Delta 0.5 is no small chance among 60 people" in " ".join(list_privacy_lines(personal.config, result))
    result["data"] = {"users": 1}
    assert "no small chance" not in " ".join(list_privacy_lines(personal.config, result))
    split = ("--set", "split.kind=random", "--no-controls", "--set", "privacy.epsilon=2", "--set", "privacy.delta=0.5")
    _, side_output = call(
        "train", "--data", SMALL, "--backbone", "tally", *split, "--out", str(personal.folder / "large")
    )
    assert "Delta 0.5 is no small chance among 60 people" in side_output
