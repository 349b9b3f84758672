"""A run is a function of its settings: same bytes twice, on any machine shape, and after a kill at any moment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
from pydantic import BaseModel, ValidationError

import tacita
from helpers.killed_runs import KILL_SCRIPT
from tacita.cli import main
from tacita.core.config import RunConfig, to_toml, validate_model
from tacita.core.errors import TacitaError
from tacita.core.files import lock_folder, read_arrays, write_arrays
from tacita.data.sources import load_interactions
from tacita.federation.rounds import RoundReport
from tacita.kernels.threads import max_threads
from tacita.report.pages import write_report
from tacita.runs import assembly, controls, serving, training
from tacita.runs.assembly import Machine
from tacita.runs.training import TrainingCallbacks

SMALL = "synthetic:users=60,items=40,per_user=12"


def settings(**more: Any) -> RunConfig:
    """A small run without controls; `more` overrides whole tables."""
    base: dict[str, Any] = {"data": SMALL, "train": {"rounds": 3}, "evaluate": {"controls": False}}
    return validate_model(RunConfig, base | more, "the test")


KINDS: dict[str, dict[str, Any]] = {
    "mf fedavg with controls": {"evaluate": {"controls": True}},
    "mf f3crec": {"method": "f3crec"},
    "ncf rlp2": {"backbone": {"name": "ncf"}, "method": "rlp2"},
    "ncf shared layer": {"backbone": {"name": "ncf", "share_mlp": True}},
    "pfedrec own tables": {
        "backbone": {"name": "pfedrec"},
        "evaluate": {"controls": False, "item_table": "personal"},
        "train": {"rounds": 3},
    },
    "mf spp poisson": {"method": "spp", "train": {"rounds": 3, "participation": {"kind": "poisson", "rate": 0.5}}},
    "mf reg last round": {"method": "reg", "train": {"rounds": 3, "resume_from": "last"}},
    "mf adam": {"train": {"rounds": 2, "optimiser": "adam"}, "backbone": {"lr": 0.01, "item_lr_scale": 1.0}},
    "mf silos": {"train": {"rounds": 2, "silos": 7}},
    "mf kd sampled": {"method": "kd", "evaluate": {"controls": False, "sampled_negatives": 9}},
    "tally": {"backbone": {"name": "tally", "repeat": 0.1, "min_item": 2, "min_pair": 2}},
    "mf noise": {"parts": [{"name": "laplace-noise"}, {"name": "replay"}]},
}


FEDKDREC: dict[str, Any] = {
    "method": "fedkdrec",
    "backbone": {"name": "neumf", "dim": 4, "tower": [8], "lr": 0.01},
    "train": {
        "rounds": 4,
        "local_epochs": 2,
        "optimiser": "lazy-adam",
        "moments": "kept",
        "participation": {"kind": "fraction", "rate": 0.3},
    },
}
"""Prediction transfer over the blocks of a stream, with all that its clients can keep."""


@pytest.fixture(autouse=True)
def _own_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TACITA_DATA", raising=False)
    yield
    assembly.use_threads(0)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint after every round."""
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(training, "CHECKPOINT_SHARE", float("inf"))


def result_of(config: RunConfig, machine: Machine = Machine()) -> bytes:  # noqa: B008
    out = Path(f"run-{len(list(Path.cwd().iterdir()))}")
    return (training.train(config, out, machine).folder / "result.json").read_bytes()


def interrupted(config: RunConfig, out: Path, after: int) -> None:
    """A run that stops as on Ctrl-C once it has had that many rounds."""
    count = 0

    def stop(_: RoundReport) -> None:
        nonlocal count
        count += 1
        if count == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training.train(config, out, watcher=TrainingCallbacks(on_round=stop))


# Same numbers


@pytest.mark.parametrize("kind", KINDS)
def test_result_does_not_depend_on_the_machine(kind: str) -> None:
    config = settings(**KINDS[kind])
    first = result_of(config)
    assert result_of(config) == first, "the same seed twice"
    assert result_of(config, Machine(chunk=7)) == first
    assert result_of(config, Machine(chunk=1024)) == first
    if max_threads() > 1:
        assert result_of(config, Machine(threads=1, chunk=64)) == first
        assert result_of(config, Machine(threads=2, chunk=64)) == first


def test_another_seed_gives_another_result() -> None:
    first, two = (json.loads(result_of(settings(seed=seed))) for seed in (1, 2))
    assert first["mean"] != two["mean"]


def test_equal_runs_have_equal_files() -> None:
    config = settings(method="f3crec")
    first, two = (training.train(config, Path(name)).folder for name in ("a", "b"))
    for name in ("config.toml", "ids.json", "result.json", "server.safetensors", "clients.safetensors"):
        assert (first / name).read_bytes() == (two / name).read_bytes(), name


def test_threads_beyond_the_machine_are_refused() -> None:
    for threads in (-1, max_threads() + 1):
        with pytest.raises(TacitaError, match=f"--threads {threads}"):
            assembly.use_threads(threads)


# Resume


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("kind", KINDS)
def test_resume_equals_unbroken(kind: str) -> None:
    config = settings(**KINDS[kind])
    whole = training.train(config, Path("whole")).folder
    rounds = (whole / "events.jsonl").read_text().splitlines()
    for after in (1, len(rounds) // 2, len(rounds)):
        out = Path(f"cut-{after}")
        interrupted(config, out, after)
        assert (out / "checkpoint.safetensors").is_file()
        training.resume(out, Machine(chunk=13))
        for name in ("result.json", "server.safetensors", "clients.safetensors"):
            assert (out / name).read_bytes() == (whole / name).read_bytes(), (after, name)
        assert places(out) == places(whole)
        assert sorted(os.listdir(out)) == sorted(os.listdir(whole))


def places(folder: Path) -> list[tuple[int, int, float]]:
    """Block, round and validation score of every event."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    seconds = [e["seconds"] for e in events]
    assert seconds == sorted(seconds)
    return [(e["block"], e["round"], e["valid"]) for e in events]


def test_events_are_a_line_a_round() -> None:
    folder = training.train(settings(), Path("run")).folder
    assert [p[:2] for p in places(folder)] == [(b, r) for b in range(4) for r in (1, 2, 3)]


def test_resume_without_a_checkpoint_starts_over() -> None:
    whole = result_of(settings())
    interrupted(settings(), Path("cut"), 5)
    assert not Path("cut/checkpoint.safetensors").exists()
    training.resume(Path("cut"))
    assert Path("cut/result.json").read_bytes() == whole
    assert len(places(Path("cut"))) == 12


@pytest.mark.usefixtures("often")
def test_resume_bears_events_that_were_cut_or_lost() -> None:
    interrupted(settings(), Path("cut"), 5)
    events = Path("cut/events.jsonl")
    content = events.read_bytes()
    whole = result_of(settings())
    for damaged in (content + b'{"block": 1, "rou', content + b"17\n\xff\xfe\n", content[:-3], b""):
        shutil.copytree("cut", "again")
        Path("again/events.jsonl").write_bytes(damaged)
        training.resume(Path("again"))
        assert Path("again/result.json").read_bytes() == whole
        assert places(Path("again"))[-1][:2] == (3, 3)
        shutil.rmtree("again")


@pytest.mark.usefixtures("often")
def test_resume_refuses_changed_data() -> None:
    rng = np.random.default_rng(3)
    rows = [f"u{rng.integers(20)},i{rng.integers(30)},{t}" for t in range(300)]
    Path("x.csv").write_text("user,item,timestamp\n" + "\n".join(rows) + "\n")
    interrupted(settings(data="x.csv"), Path("cut"), 4)
    Path("x.csv").write_text("user,item,timestamp\n" + "\n".join([*rows, "u1,i1,999"]) + "\n")
    with pytest.raises(TacitaError, match=r"cut was trained on other data than 'x\.csv' holds now"):
        training.resume(Path("cut"))
    Path("x.csv").unlink()
    with pytest.raises(TacitaError, match=r"x\.csv"):
        training.resume(Path("cut"))
    Path("x.csv").write_text("user,item,timestamp\n" + "\n".join(rows) + "\n")
    assert training.resume(Path("cut")).result["data"]["users"] == 20


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("change", [("seed = 1\n", "seed = 2\n"), ("rounds = 3", "rounds = 4"), ("mf", "pfedrec")])
def test_resume_refuses_changed_settings(change: tuple[str, str]) -> None:
    interrupted(settings(), Path("cut"), 4)
    config = Path("cut/config.toml")
    config.write_text(config.read_text().replace(*change, 1))
    with pytest.raises(TacitaError, match=r"config\.toml was changed or damaged after the run began"):
        training.resume(Path("cut"))


def as_before(folder: Path) -> None:
    """The folder as an earlier version wrote it: no digest of the settings, and only those that there were."""
    ids = json.loads((folder / "ids.json").read_text())
    del ids["settings"]
    (folder / "ids.json").write_text(json.dumps(ids))
    later = ("repeats", "hidden_items")
    state = [line for line in (folder / "config.toml").read_text().splitlines() if not line.startswith(later)]
    (folder / "config.toml").write_text("\n".join(state))

    def forget(text: str) -> str:
        values = json.loads(text)
        del values["split"]["repeats"], values["evaluate"]["hidden_items"], values["date_format"], values["decimal"]
        return json.dumps(values)

    for path in folder.glob("*.safetensors"):
        arrays, note = read_arrays(path)
        write_arrays(path, arrays, {**note, "config": forget(note["config"])})


@pytest.mark.usefixtures("often")
def test_a_run_that_an_earlier_version_began_is_not_mistaken_for_other_data() -> None:
    interrupted(settings(), Path("cut"), 4)
    as_before(Path("cut"))
    with pytest.raises(TacitaError, match=r"cut was begun by an earlier version of tacita; start a new run"):
        training.resume(Path("cut"))


def test_a_run_that_an_earlier_version_finished_is_served() -> None:
    run = training.train(settings(), Path("run"))
    user = json.loads(Path("run/ids.json").read_text())["users"][0]
    recommendations = run.recommend(user, 3)
    as_before(Path("run"))
    assert serving.open_run(Path("run")).recommend(user, 3).equals(recommendations)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("how", ["cut", "flipped", "empty", "text"])
def test_resume_refuses_a_damaged_checkpoint_and_says_what_to_do(how: str) -> None:
    interrupted(settings(), Path("cut"), 4)
    saved = Path("cut/checkpoint.safetensors")
    content = bytearray(saved.read_bytes())
    content[-5] ^= 1
    broken = {"cut": bytes(content[:-100]), "flipped": bytes(content), "empty": b"", "text": b"not a checkpoint"}
    saved.write_bytes(broken[how])
    with pytest.raises(TacitaError, match=r"checkpoint\.safetensors is damaged.*delete it"):
        training.resume(Path("cut"))
    saved.unlink()
    training.resume(Path("cut"))
    assert Path("cut/result.json").read_bytes() == result_of(settings())


@pytest.mark.usefixtures("often")
def test_only_one_process_trains_a_folder() -> None:
    interrupted(settings(), Path("cut"), 4)
    with lock_folder(Path("cut")), pytest.raises(TacitaError, match="another process is at work in cut"):
        training.resume(Path("cut"))
    training.resume(Path("cut"))


def test_a_run_that_fails_before_its_first_round_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise TacitaError("not this time.")

    monkeypatch.setattr(training, "run_remaining_blocks", fails)
    with pytest.raises(TacitaError, match="not this time"):
        training.train(settings(), Path("deep/run"))
    assert list(Path("deep").iterdir()) == []


# kill -9: a process that has imported everything forks children, which die at a chosen write or moment


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    "more",
    [
        {"method": "f3crec"},
        {"backbone": {"name": "pfedrec"}, "evaluate": {"controls": True, "item_table": "personal"}},
        FEDKDREC,
    ],
    ids=["f3crec", "pfedrec own tables", "fedkdrec over blocks"],
)
def test_kill_9_at_any_moment(more: dict[str, Any], tmp_path: Path) -> None:
    config = settings(**more).model_dump_json(exclude_none=True)
    command = [sys.executable, "-c", KILL_SCRIPT, config, "11", "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["cases"] >= 1
    assert document["kills"] >= document["cases"]


# Recommendations


@pytest.fixture(scope="module", params=["mf fedavg with controls", "ncf rlp2", "pfedrec own tables", "tally"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "run"
    return training.train(settings(**KINDS[request.param]), out).folder


def test_recommend_leaves_out_what_the_user_knows(trained: Path) -> None:
    table = load_interactions(SMALL)
    known: dict[str, set[str]] = {}
    for user, item in zip(table.user, table.item, strict=True):
        known.setdefault(table.user_ids[user], set()).add(table.item_ids[item])
    users = json.loads((trained / "ids.json").read_text())["users"]
    assert set(users) == set(known)
    every = set(table.item_ids)
    for user, result in serving.recommend(trained, users, 40).items():
        assert {entry["item"] for entry in result} == every - known[user]
        scores = [entry["score"] for entry in result]
        assert scores == sorted(scores, reverse=True)
    with_seen = serving.recommend(trained, users[:1], 40, exclude_seen=False)[users[0]]
    assert {entry["item"] for entry in with_seen} == every


def test_many_users_at_once_get_what_each_gets_alone(trained: Path) -> None:
    users = json.loads((trained / "ids.json").read_text())["users"]
    together = serving.recommend(trained, users, 7)
    assert list(together) == users
    for user in users[::6]:
        assert serving.recommend(trained, [user], 7) == {user: together[user]}
        assert serving.recommend(trained, [user], 3)[user] == together[user][:3]


def test_recommend_refuses(trained: Path) -> None:
    for k in (0, -1, 41):
        with pytest.raises(TacitaError, match=f"cannot recommend {k} items"):
            serving.recommend(trained, ["u1"], k)
    with pytest.raises(TacitaError, match="user 'nobody' is not in"):
        serving.recommend(trained, ["u1", "nobody"], 3)


# The Python door


def test_train_from_python() -> None:
    few = [{"name": "replay", "top_n": 30}]
    run = tacita.train(data=SMALL, backbone="mf", method="f3crec", parts=few, seed=3, train={"rounds": 2}, out="mine")
    assert run.config.seed == 3
    assert run.result["blocks"][0]["rounds"] == 2
    assert (run.folder / "report.html").is_file()
    repeat = tacita.open_run("mine")
    assert (repeat.result, repeat.config) == (run.result, run.config)
    assert repeat.recommend("u1", k=3).equals(run.recommend("u1", k=3))
    with pytest.raises(TacitaError, match="exists"):
        tacita.train(data=SMALL, out="mine")
    with pytest.raises(TacitaError, match=r"did you mean 'train\.rounds'"):
        tacita.train(data=SMALL, train={"rouns": 2})
    with pytest.raises(TacitaError, match="no run folder nowhere"):
        tacita.open_run("nowhere")


def test_train_from_python_names_its_folder_and_takes_numeric_ids() -> None:
    rng = np.random.default_rng(3)
    rows = [f"{rng.integers(20)},{rng.integers(30)},{t}" for t in range(300)]
    Path("shop.csv").write_text("user,item,timestamp\n" + "\n".join(rows) + "\n")
    run = tacita.train(data="shop.csv", train={"rounds": 1}, evaluate={"controls": False})
    assert run.folder == Path("runs/shop-mf-fedavg-1")
    assert run.recommend(7, 2).equals(run.recommend("7", 2))


# Settings and TOML


def leaves(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from leaves(kind, (*path, name))
        else:
            yield (*path, name), kind


def choices(kind: Any) -> list[Any]:
    """Values worth trying for a setting of any type."""
    literal = [c for entry in (kind, *get_args(kind)) if get_origin(entry) is Literal for c in get_args(entry)]
    tables = [{"name": "ncf"}, {"user": "customer"}, [{"name": "replay", "top_n": 9}]]
    return [*literal, True, False, 0.25, 2.5, 7, "other", ["auc"], [5, 10], *tables]


def changed(path: tuple[str, ...], kind: Any) -> RunConfig:
    """The default settings with another value at one place."""
    for value in choices(kind):
        table: Any = value
        for key in reversed(path):
            table = {key: table}
        try:
            config = RunConfig.model_validate(table)
        except ValidationError:
            continue
        if config != RunConfig():
            return config
    raise AssertionError(f"no other value for {'.'.join(path)}: add one to choices()")


@pytest.mark.parametrize(
    ("path", "kind"), list(leaves(RunConfig)), ids=lambda p: ".".join(p) if type(p) is tuple else ""
)
def test_every_setting_changes_the_text_and_comes_back(path: tuple[str, ...], kind: Any) -> None:
    config = changed(path, kind)
    text = to_toml(config)
    assert text != to_toml(RunConfig())
    assert validate_model(RunConfig, tomllib.loads(text), "text") == config


def test_the_folder_holds_the_effective_settings() -> None:
    config = settings(seed=7, split={"n_blocks": 2}, parts=[{"name": "replay", "top_n": 9}])
    folder = training.train(config, Path("run")).folder
    written = tomllib.loads((folder / "config.toml").read_text())
    assert written["train"]["patience"] == config.train.patience
    assert written["backbone"] == {"name": "mf", "dim": 32, "lr": 1.0, "item_lr_scale": "items", "init_std": 0.01}
    assert (written["split"]["kind"], written["split"]["k_core"], written["split"]["n_blocks"]) == ("blocks", 0, 2)
    assert written["parts"][0]["top_n"] == 9
    assert written["parts"][0].keys() > {"name", "top_n", "eps"}  # those that were not given, too
    outcome = serving.open_run(folder).config
    assert json.loads((folder / "result.json").read_text())["config"] == outcome.model_dump(mode="json")
    run = training.train(outcome, Path("again"))  # the same run
    assert run.result == serving.open_run(folder).result


def test_settings_without_a_value_are_named_with_what_they_would_do() -> None:
    text = (training.train(settings(), Path("run")).folder / "config.toml").read_text()
    assert "# split.min_rating: keep only interactions rated at least this" in text


# Controls come last, and lose nothing


def crash(*_: Any) -> Any:
    raise KeyboardInterrupt


def test_a_crash_in_a_control_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(evaluate={"controls": True})
    whole = training.train(config, Path("whole"))
    with monkeypatch.context() as broken:
        broken.setitem(controls.CONTROLS, "linear", crash)
        with pytest.raises(KeyboardInterrupt):
            training.train(config, Path("cut"))
    halfway = serving.open_run(Path("cut"))
    assert halfway.result["blocks"] == whole.result["blocks"]
    assert set(halfway.result["controls"]) == {"random", "popular", "alone"}
    assert serving.recommend(Path("cut"), ["u1"]) == serving.recommend(Path("whole"), ["u1"])
    with monkeypatch.context() as trained:  # neither a round nor a finished control runs again
        trained.setattr(training, "run_remaining_blocks", crash)
        trained.setitem(controls.CONTROLS, "random", crash)
        training.resume(Path("cut"))
    assert Path("cut/result.json").read_bytes() == Path("whole/result.json").read_bytes()
    assert sorted(os.listdir("cut")) == sorted(os.listdir("whole"))


def test_resume_without_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(controls.CONTROLS, "linear", crash)
    with pytest.raises(KeyboardInterrupt):
        training.train(settings(evaluate={"controls": True}), Path("cut"))
    with pytest.raises(SystemExit) as ended:
        main(["train", "--resume", "--no-controls", "--out", "cut"])
    assert not ended.value.code
    result = json.loads(Path("cut/result.json").read_text())
    assert result["controls"]["linear"] == {"skipped": "switched off"}
    assert "mean" in result["controls"]["popular"]
    assert "unfinished" not in result
    assert Path("cut/report.html").is_file()


def test_memory_that_ends_in_a_control_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def hungry(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setitem(controls.CONTROLS, "linear", hungry)
    with pytest.raises(TacitaError, match=r"the run itself is in big: .*--out big --resume --no-controls"):
        training.train(settings(evaluate={"controls": True}), Path("big"))
    write_report([Path("big")], Path("early.html"))
    assert "not yet: the run goes on with --resume" in Path("early.html").read_text()
    assert training.resume(Path("big"), controls=False).result["controls"]["linear"] == {"skipped": "switched off"}


def test_controls_that_go_on_know_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen: 7 of 4 done, and minus one day left."""
    with monkeypatch.context() as broken:
        broken.setitem(controls.CONTROLS, "popular", crash)
        with pytest.raises(KeyboardInterrupt):
            training.train(settings(evaluate={"controls": True}), Path("cut"))
    report: list[Any] = []
    blocks, entry = lambda fed: report.append(len(fed.stream.blocks)), lambda *control: report.append(control)
    training.resume(Path("cut"), watcher=TrainingCallbacks(on_controls=blocks, on_control=entry))
    assert report[0] == 4
    assert report[1:] == [(name, block) for name in ("popular", "alone", "linear") for block in range(4)]


def test_two_processes_make_one_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one is first, between our look and our making it; its folder stays as it is."""
    assembled = assembly.assemble_federation

    def meanwhile(*given: Any) -> Any:
        Path("new").mkdir()
        Path("new/theirs").touch()
        return assembled(*given)

    monkeypatch.setattr(training, "assemble_federation", meanwhile)
    with pytest.raises(TacitaError, match=r"another process has just made new; choose another --out"):
        training.train(settings(), Path("new"))
    assert (os.listdir("."), os.listdir("new")) == (["new"], ["theirs"])


def test_arrays_survive_their_file_and_any_flipped_bit_is_noticed(tmp_path: Path) -> None:
    arrays = {
        "f": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "none": np.zeros((0, 3), np.float32),
        "one": np.array(3, np.int64),
        "keys": np.arange(3, dtype=np.uint64),
    }
    path = tmp_path / "x.safetensors"
    write_arrays(path, arrays, {"a": "b", "c": "d"})
    first = path.read_bytes()
    back, note = read_arrays(path)
    assert note == {"a": "b", "c": "d"}
    for name, value in arrays.items():
        assert back[name].dtype == value.dtype
        np.testing.assert_array_equal(back[name], value)
    for _ in range(4):
        write_arrays(path, arrays, {"c": "d", "a": "b"})
        assert path.read_bytes() == first
    for at in range(0, len(first), 7):
        broken = bytearray(first)
        broken[at] ^= 4
        path.write_bytes(broken)
        with pytest.raises(TacitaError, match="is damaged"):
            read_arrays(path)
