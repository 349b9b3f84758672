"""What people are told while they wait where there is no terminal, and what things are called."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.progress import Progress

import tacita
from tacita.cli import console, main, time_left
from tacita.core.config import RunConfig
from tacita.core.errors import TacitaError
from tacita.federation.rounds import RoundReport, make_initial_progress
from tacita.research.audit import tally_settings as audit
from tacita.runs import serving
from tacita.runs.assembly import Machine, assemble_federation
from tacita.runs.forgetting.request_service import submit_request
from tacita.runs.forgetting.requests import RawRequest
from tacita.runs.run_folder import find_free_folder, open_saved

SMALL = "synthetic:users=60,items=40,per_user=12"
CLOCK = r"\d+:\d\d:\d\d"


def call(*arguments: str) -> tuple[str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as error:
        main(list(arguments))
    assert error.value.code == 0, err.getvalue()
    return out.getvalue(), err.getvalue()


@pytest.fixture(autouse=True)
def _own_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(console, "LINE_SECONDS", 0.02)


@pytest.fixture(scope="module")
def tally(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tally") / "run"
    tacita.train(data=SMALL, backbone="tally", out=folder)
    return folder


# Lines instead of a bar


def test_training_prints_progress_to_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Block, round, validation and time left; then the controls."""
    monkeypatch.setattr(console, "LINE_SECONDS", 0.002)  # controls of so few people take some milliseconds
    _, err = call("train", "--data", SMALL, "--rounds", "150", "--set", "train.patience=150", "--out", "x")
    place = rf"{CLOCK} block \d/4 round \d+/150"
    assert re.search(rf"(?m)^{place} · valid 0\.\d+ · .* rounds/s · ≤ {CLOCK} left \+ controls$", err)
    assert re.search(rf"(?m)^{CLOCK} controls: ", err)
    assert "\x1b" not in err


def test_quiet_prints_no_progress_to_a_pipe() -> None:
    assert call("train", "--data", SMALL, "--rounds", "150", "--out", "x", "--quiet")[1] == ""


def test_json_output_keeps_progress_on_standard_error() -> None:
    out, err = call("train", "--data", SMALL, "--rounds", "150", "--out", "x", "--json")
    assert json.loads(out)["data"]["users"] == 60
    assert re.search(rf"(?m)^{CLOCK} block ", err)


@pytest.mark.parametrize("more", [[], ["--json"], ["--quiet"]], ids=str)
def test_audit_prints_progress_to_a_pipe(monkeypatch: pytest.MonkeyPatch, more: list[str]) -> None:
    """Every attack may take minutes: the verb passes on what the audit says of them."""

    def slow(*given: object) -> None:
        on_done = next(entry for entry in given if callable(entry))
        for done in range(3):
            on_done(done, 9)
            time.sleep(0.1)
        raise TacitaError("enough.")

    monkeypatch.setattr(audit, "audit_tally", slow)
    err = io.StringIO()
    with contextlib.redirect_stderr(err), pytest.raises(SystemExit):
        main(["audit", "tally", "--data", SMALL, *more])
    report = bool(re.search(rf"(?m)^{CLOCK} attacks · 2/9 · {CLOCK} left$", err.getvalue()))
    assert report == (more != ["--quiet"])
    assert err.getvalue().splitlines()[-1] == "tacita: enough."


@pytest.mark.parametrize("quiet", [False, True])
def test_long_step_without_callbacks_still_prints_progress(quiet: bool) -> None:
    err = io.StringIO()
    with contextlib.redirect_stderr(err), console.show_clock("reading [x]", quiet):
        time.sleep(0.15)
    assert bool(re.search(rf"(?m)^{CLOCK} reading \[x\]$", err.getvalue())) != quiet
    text = err.getvalue()
    time.sleep(0.1)
    assert err.getvalue() == text, "the teller ends with the work"


def test_counted_progress_shows_note_and_time_left() -> None:
    err = io.StringIO()
    with contextlib.redirect_stderr(err), console.show_progress("cells") as tell:
        tell(0, 4)
        time.sleep(0.1)
        tell(2, 4, "mf")
        time.sleep(0.1)
    assert re.search(rf"(?m)^{CLOCK} cells · 2/4 · mf · {CLOCK} left$", err.getvalue())


class FakeClock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(time_left, "time", fake)
    return fake


def test_time_left_counts_down_between_steps(clock: FakeClock) -> None:
    """Seen: 2:10 left, for three minutes."""
    pace = time_left.Pace()
    for done in range(3):
        clock.now = 10.0 * done
        pace.record(done)
    remaining = time_left.TimeLeft(pace, 13)
    assert remaining.describe() == "0:02:10 left"
    clock.now += 70
    assert remaining.describe() == "0:01:00 left"
    clock.now += 65
    assert remaining.describe() == "0:00:00 left"
    clock.now += 10
    assert remaining.describe() == "longer than expected"
    pace.record(3)
    assert time_left.TimeLeft(pace, 12).describe() != "longer than expected"


def test_progress_of_a_run_moves_in_training_and_in_controls(clock: FakeClock) -> None:
    """The lines of a bar that hears nothing still change; controls have a time left of their own."""
    bar = Progress(disable=True)
    shown = console._TrainingBar(bar, quiet=True)
    config = RunConfig.model_validate({"data": SMALL, "split": {"n_blocks": 2}, "train": {"rounds": 10}})
    federation = assemble_federation(config, Machine(threads=1))
    shown.on_start(federation, make_initial_progress(federation))
    for number in (1, 2):
        clock.now += 5
        shown.on_round(RoundReport(0, number, 60, 1.0, 1.0))
    [task] = bar.tasks
    assert console._format_note(task).endswith("≤ 0:01:30 left + controls")
    clock.now += 30
    assert console._format_note(task).endswith("≤ 0:01:00 left + controls")
    shown.on_controls(federation)
    assert task.description == "controls: random"
    clock.now += 4
    shown.on_control("random", 0)
    assert console._format_note(task) == "0:00:28 left"
    clock.now += 4
    shown.on_control("random", 1)
    assert (task.description, console._format_note(task)) == ("controls: most popular", "0:00:24 left")
    clock.now += 14
    assert console._format_note(task) == "0:00:10 left"


def test_closed_pipe_does_not_stop_training() -> None:
    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    with contextlib.redirect_stderr(Gone()), console.show_clock("reading"):
        time.sleep(0.1)


# What things are called


def test_tally_run_is_named_after_its_backbone() -> None:
    assert find_free_folder(RunConfig(data="ml-100k", backbone={"name": "tally"})) == Path("runs/ml-100k-tally-1")
    assert find_free_folder(RunConfig(data="ml-100k", method="reg")) == Path("runs/ml-100k-mf-reg-1")
    out, err = call("train", "--data", SMALL, "--backbone", "tally")
    assert "ndcg@20: tally on synthetic" in out
    page = Path("runs/synthetic-tally-1/report.html").read_text()
    for text in (out, err, page.partition("Effective settings")[0]):
        assert "fedavg" not in text
    assert "tally on synthetic" in page


def test_a_comparison_names_tally_once(tally: Path) -> None:
    tacita.train(data=SMALL, train={"rounds": 2}, evaluate={"controls": False}, out=Path("mf"))
    call("report", str(tally), "mf", "--out", "both.html")
    page = Path("both.html").read_text()
    assert "<summary>tally <small>" in page
    assert "<summary>fedavg · mf <small>" in page


def test_the_progress_of_tally_counts_the_rounds_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "LINE_SECONDS", 0.001)
    _, err = call("train", "--data", "synthetic:users=300,items=300,per_user=20", "--backbone", "tally")
    matches = set(re.findall(r"block \d/4 round \d/(\d+)", err))
    assert matches == {"5"}, "a round for each recency that is tried"


# Nobody is known


@pytest.fixture
def forgotten(tally: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(tally, tmp_path / "run"))
    submit_request(folder, RawRequest("forget", {"u1": None}))
    return folder


def test_forgotten_user_gets_popular_items_marked_as_such(forgotten: Path) -> None:
    out, _ = call("recommend", "--run", "run", "--user", "u1", "--user", "u2", "-k", "3")
    own_values, other = out.split("for user u2")
    assert "for user u1: popular items, nothing is known of this person" in " ".join(own_values.split())
    assert "popularity" in own_values
    assert "people" not in own_values  # it is decayed and may be noised
    assert "score" not in own_values
    assert "nothing is known" not in other
    document = json.loads(call("recommend", "--run", "run", "--user", "u1", "--user", "u2", "-k", "3", "--json")[0])
    assert {entry["basis"] for entry in document["u1"]} == {"popularity"}
    assert {entry["basis"] for entry in document["u2"]} == {"history"}


TOLD = "lists/parts/statistic/told:item"


def test_popularity_excludes_users_who_left(tally: Path, forgotten: Path) -> None:
    """Against the lists of everybody else."""
    saved = open_saved(forgotten)
    counts = {raw: 0 for raw in saved.ids["items"]}
    for item in saved.client_arrays[TOLD]:
        counts[saved.ids["items"][item]] += 1
    result = serving.recommend(forgotten, ["u1"], 40)["u1"]
    assert {entry["item"]: entry["score"] for entry in result} == counts
    assert [entry["score"] for entry in result] == sorted(counts.values(), reverse=True)
    assert sum(counts.values()) < len(open_saved(tally).client_arrays[TOLD])


# The shell


def run_tacita(**variables: str) -> subprocess.CompletedProcess[str]:
    arguments = variables.pop("arguments", "").split()
    return subprocess.run(
        [sys.executable, "-m", "tacita", *arguments],
        env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("tacita tr", {"train"}),
        ("tacita data ", {"list", "get", "describe", "import"}),
        ("tacita train --see", {"--seed"}),
    ],
)
def test_the_shell_completes_verbs_and_options(typed: str, offered: set[str]) -> None:
    done = run_tacita(_TACITA_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=str(len(typed.split(" ")) - 1))
    assert (done.returncode, done.stderr) == (0, "")
    assert set(done.stdout.split()) == offered


def test_completion_is_shown_and_installed(tmp_path: Path) -> None:
    shown = run_tacita(arguments="--show-completion bash")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "complete -o default -F _tacita_completion tacita" in shown.stdout
    done = run_tacita(arguments="--install-completion bash", HOME=str(tmp_path / "home"))
    assert done.returncode == 0, done.stderr
    script = tmp_path / "home" / ".bash_completions" / "tacita.sh"
    assert script.read_text().strip() == shown.stdout.strip()
    assert str(script) in (tmp_path / "home" / ".bashrc").read_text()


# What files bring along


def test_ids_with_control_characters_or_formulas_are_escaped() -> None:
    evil = "a\x1b[31m\x1b]0;title\x07\u202eb"
    items = [evil, "=1+1", *(f"i{n}" for n in range(10))]
    rows = {
        "user": [f"u{n}" for n in range(12) for _ in range(6)],
        "item": [items[(n + k) % 12] for n in range(12) for k in range(6)],
    }
    settings = {"split": {"kind": "random"}, "evaluate": {"controls": False, "k": [3], "select_by": "ndcg@3"}}
    tacita.train(rows, backbone="tally", out="odd", **settings)
    out, err = call("recommend", "--run", "odd", "--user", "u1", "-k", "6", "--seen", "--include", f"{evil},=1+1")
    assert "\x1b" not in out + err
    assert "\u202e" not in out + err
    assert "a\ufffd[31m" in out
    _, err = call("recommend", "--run", "odd", "--all", "-k", "12", "--seen", "--out", "recs.csv")
    assert "begin with =, +, - or @" in err
    assert evil in Path("recs.csv").read_text(encoding="utf-8")  # files hold ids as they are
    with contextlib.redirect_stderr(io.StringIO()) as message, pytest.raises(SystemExit):
        main(["recommend", "--run", "odd", "--user", "\x1b[2Jnobody"])
    assert "\x1b" not in message.getvalue()
