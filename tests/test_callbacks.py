"""Callbacks are called after every round and block and at the end, whoever starts the run and however often."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import tacita as tc
from tacita.runs import training
from tacita.runs.callbacks import Callback, RunStart
from tacita.runs.trackers import registry, tracker

DATA = "synthetic:users=120,items=60,per_user=12,seed=3"
QUICK: dict[str, Any] = {
    "method": "fedavg",
    "split": {"kind": "blocks", "n_blocks": 2},
    "train": {"rounds": 3},
    "evaluate": {"controls": False},
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Diary(tc.Callback):
    """Writes down what it is called with."""

    def __init__(self, most_rounds: int | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.starts: list[RunStart] = []
        self.most_rounds = most_rounds

    def on_start(self, start: RunStart) -> None:
        self.starts.append(start)
        self.calls.append(("start",))

    def on_round(self, report: Any) -> None:
        self.calls.append(("round", report.block, report.round))
        if len(self.rounds) == self.most_rounds:
            raise KeyboardInterrupt

    def on_block(self, scores: dict[str, Any]) -> None:
        self.calls.append(("block", scores["block"]))

    def on_end(self, run: tc.Run) -> None:
        self.calls.append(("end", run.folder.name))

    @property
    def rounds(self) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] == "round"]


def test_rounds_blocks_and_the_end_are_called_in_their_order() -> None:
    diary = Diary()
    run = tc.train(DATA, out="run", callbacks=[diary], **QUICK)
    n_rounds = [block["rounds"] for block in run.result["blocks"]]
    expected: list[tuple[Any, ...]] = [("start",)]
    for block, rounds in enumerate(n_rounds):
        expected += [("round", block, number) for number in range(1, rounds + 1)]
        expected.append(("block", block))
    expected.append(("end", "run"))
    assert diary.calls == expected
    assert diary.starts[0].folder == Path("run")
    assert (diary.starts[0].n_users, diary.starts[0].n_blocks) == (120, 2)


def test_callbacks_hear_the_rounds_that_the_log_has() -> None:
    """A default model is tried before its folder is made: these rounds are called, too."""
    diary = Diary()
    tc.train(DATA, out="run", callbacks=[diary], evaluate={"controls": False, "k": [5], "select_by": "ndcg@5"})
    lines = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    assert diary.rounds == [("round", line["block"], line["round"]) for line in lines]
    assert len(lines) > 1


def test_a_callback_that_stops_a_run_leaves_one_to_resume() -> None:
    with pytest.raises(KeyboardInterrupt):
        tc.train(DATA, out="run", callbacks=[Diary(most_rounds=2)], **QUICK)
    diary = Diary()
    run = tc.train(out="run", resume=True, callbacks=[diary])
    assert diary.calls[0] == ("start",)
    assert diary.calls[-1] == ("end", "run")
    whole = tc.train(DATA, out="whole", **QUICK)
    assert run.result["mean"] == whole.result["mean"]
    again = Diary()
    tc.train(out="run", resume=True, callbacks=[again])
    assert again.calls == []  # it was finished: nothing went on


def test_a_recommender_calls_back() -> None:
    diary = Diary()
    clicks = {"user": ["ann", "ann", "ann", "bob", "bob", "bob"] * 5, "item": list("abcdefghij") * 3}
    evaluate = {"k": [3], "select_by": "ndcg@3", "controls": False}
    tc.Recommender(backbone="tally", evaluate=evaluate, callbacks=[diary]).fit(clicks)
    assert diary.calls[0] == ("start",)
    assert diary.calls[-1][0] == "end"


def test_what_is_no_callback_is_refused_before_the_run() -> None:
    with pytest.raises(tc.TacitaError, match=r"type function; derive its class from tacita\.Callback"):
        tc.train(DATA, out="run", callbacks=[test_a_recommender_calls_back], **QUICK)
    assert not Path("run").exists()


# Trackers, whatever tool they write for


class Memory(tracker.Tracker):
    """Keeps what it would write."""

    name = "memory"

    def __init__(self) -> None:
        self.settings: dict[str, str] = {}
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed: list[bool] = []

    def open(self, start: RunStart, settings: Any) -> None:
        self.settings = dict(settings)

    def log(self, figures: dict[str, float], step: int) -> None:
        self.rows.append((step, figures))

    def close(self, is_finished: bool) -> None:
        self.closed.append(is_finished)

    @property
    def names(self) -> set[str]:
        return {name for _, figures in self.rows for name in figures}


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    kept = Memory()
    monkeypatch.setitem(registry.TRACKERS, "memory", lambda: kept)
    return kept


def test_trackers_write_what_result_json_says(memory: Memory) -> None:
    run = tc.train(DATA, out="run", track="memory", **QUICK | {"evaluate": {}})
    tested = [figures["test/ndcg@20"] for _, figures in memory.rows if "test/ndcg@20" in figures]
    assert tested == [block["ndcg@20"] for block in run.result["blocks"]]
    last = memory.rows[-1][1]
    assert last["mean/ndcg@20"] == run.result["mean"]["ndcg@20"]
    assert last["controls/popular/ndcg@20"] == run.result["controls"]["popular"]["mean"]["ndcg@20"]
    valid = [figures["valid/ndcg@20"] for _, figures in memory.rows if "valid/ndcg@20" in figures]
    lines = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    assert valid == [line["valid"] for line in lines]
    steps = [step for step, _ in memory.rows]
    assert steps == sorted(steps)
    assert memory.closed == [True]


def test_trackers_write_no_path_no_column_and_no_id(memory: Memory) -> None:
    folder = Path("home of mia")
    folder.mkdir()
    lines = ["patient,drug"]
    for row in range(400):
        lines.append(f"mia-{row % 20},drug-{row * 7 % 31}")
    (folder / "clicks.csv").write_text("\n".join(lines))
    tc.train(
        folder / "clicks.csv", columns={"user": "patient", "item": "drug"}, out="run", track="memory", backbone="tally"
    )
    written = json.dumps([memory.settings, memory.rows])
    assert memory.settings["backbone.name"] == "tally"
    for private in ("mia", "patient", "drug"):
        assert private not in written


def test_under_a_budget_only_the_place_in_the_run_is_tracked(memory: Memory) -> None:
    """Scores and counts are of exact data; the seed would take reproducible noise off."""
    tc.train(
        DATA, out="run", track="memory", backbone="tally", split={"kind": "random"}, catalogue="from-data",
        privacy={"epsilon": 8, "reproducible_noise": True},
    )  # fmt: skip
    assert memory.names <= {"block", "round"}
    assert memory.rows
    assert memory.settings["privacy.epsilon"] == "8.0"
    assert not {"seed", "split.seed"} & memory.settings.keys()
    without_budget = Memory()
    registry.TRACKERS["memory"] = lambda: without_budget
    tc.train(DATA, out="plain", track="memory", backbone="tally", split={"kind": "random"})
    assert {"seed", "split.seed"} <= without_budget.settings.keys()
    assert "test/ndcg@20" in without_budget.names


def test_the_seed_of_reproducible_noise_is_not_tracked(memory: Memory) -> None:
    """Items told by PDC-FRS have an epsilon each and no ledger."""
    tc.train(
        DATA, out="run", track="memory", backbone="tally", split={"kind": "random"},
        privacy={"reproducible_noise": True},
    )  # fmt: skip
    assert memory.settings["privacy.reproducible_noise"] == "True"
    assert not {"seed", "split.seed"} & memory.settings.keys()


def test_a_tracker_of_a_run_that_fails_is_closed(memory: Memory) -> None:
    with pytest.raises(KeyboardInterrupt):
        tc.train(DATA, out="run", track=["memory"], callbacks=[Diary(most_rounds=1)], **QUICK)
    assert memory.closed == [False]


def test_an_unknown_tracker_is_refused_before_anything_is_read() -> None:
    with pytest.raises(tc.TacitaError, match="there is no such tracker; choose of jsonl, tensorboard, mlflow, wandb"):
        tc.train("no-such-file.csv", track="tensorbord")


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_a_missing_package_is_one_sentence_with_its_remedy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    submodules = [module for module in sys.modules if module.startswith(f"{name}.")]
    for module in submodules:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(tc.TacitaError, match=rf"track {name} needs .* `pip install 'tacita\[{name}\]'` installs it"):
        tc.train(DATA, out="run", track=name, **QUICK)
    assert not Path("run").exists()


def test_jsonl_is_written_in_any_case() -> None:
    run = tc.train(DATA, out="run", track="jsonl", **QUICK)
    lines = (run.folder / "events.jsonl").read_text().splitlines()
    assert len(lines) == sum(block["rounds"] for block in run.result["blocks"])
    assert isinstance(training.NO_CALLBACKS, training.TrainingCallbacks)
    assert issubclass(tc.Callback, Callback)
