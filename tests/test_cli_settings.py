"""Verbs other than `train` that take settings and columns: they reach the run, and nonsense is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tacita.cli import main
from tacita.core.config import RunConfig
from tacita.core.errors import TacitaError
from tacita.research.audit import tally_settings
from tacita.research.experiments import tally_tuning
from tacita.research.experiments.tuning import build_tuning_config

SETTINGS = ["--set", "split.n_blocks=2", "--set", "evaluate.k=[5]", "--set", "evaluate.select_by=ndcg@5"]


def code_of(words: list[str]) -> Any:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return ended.value.code


@pytest.fixture
def shop(tmp_path: Path) -> str:
    rng = np.random.default_rng(5)
    rows = [f"c{rng.integers(15)},s{rng.integers(20)},{day}" for day in range(300)]
    (tmp_path / "shop.csv").write_text("customer,sku,day\n" + "\n".join(rows))
    return str(tmp_path / "shop.csv")


def test_tune_takes_columns_and_settings_and_answers_in_json(
    shop: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tally_tuning, "GRID", {"ridge": [2.0, 5.0]})
    columns = ["--columns", "user=customer,item=sku,time=day"]
    more = ["--set", "backbone.recency=0", "--set", "split.k_core=0"]
    request = ["tune", "--backbone", "tally", "--data", shop, *columns, *SETTINGS, *more]
    assert code_of([*request, "--json", "--quiet"]) in (0, None)
    document = json.loads(capsys.readouterr().out)
    assert [dataset["options"] for dataset in document["datasets"][shop]] == [{"ridge": 2.0}, {"ridge": 5.0}]
    assert document["chosen"][shop] in ({"ridge": 2.0}, {"ridge": 5.0})
    assert "ndcg@5" in document["datasets"][shop][0]["test"]


def test_settings_of_tune_are_those_of_a_run() -> None:
    tuning_config = build_tuning_config(["x.csv"], "mf", "reg", 3, {"backbone": {"dim": 4}, "split": {"n_blocks": 2}})
    assert tuning_config.backbone == {"name": "mf", "dim": 4}
    assert tuning_config.split.n_blocks == 2
    assert tuning_config.evaluate.controls is False
    assert build_tuning_config(["a"], "mf", "reg", 3).model_dump() == (
        RunConfig(data="a", backbone={"name": "mf"}, seed=3)
        .model_copy(update={"evaluate": tuning_config.evaluate})
        .model_dump()
    )
    for wrong in ({"method": "ft"}, {"parts": []}, {"seed": 2}):
        with pytest.raises(TacitaError, match="is not for tune"):
            build_tuning_config(["a"], "mf", "reg", 3, wrong)
    with pytest.raises(TacitaError, match="unknown key 'rounds'"):
        build_tuning_config(["a"], "mf", "reg", 3, {"rounds": 2})


def test_an_audit_takes_columns_and_settings(
    shop: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[RunConfig] = []

    def listen(config: RunConfig, *others: Any) -> dict[str, Any]:
        messages.append(config)
        return {"heard": True}

    monkeypatch.setattr(tally_settings, "audit_tally", listen)
    request = ["audit", "tally", "--data", shop, "--columns", "user=customer,item=sku", "--set", "backbone.keep=50"]
    assert code_of([*request, "--brief", "--json", "--quiet"]) in (0, None)
    assert json.loads(capsys.readouterr().out) == {"heard": True}
    assert messages[0].columns == {"user": "customer", "item": "sku"}
    assert messages[0].backbone == {"name": "tally", "keep": 50}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["audit", "tally", "--run", "x", "--set", "backbone.keep=5"], "go with --data"),
        (["audit", "scores", "--run", "x", "--columns", "user=a,item=b"], "go with --data"),
        (["audit", "scores"], "say what to audit"),
        (["tune", "--paper", "f3crec", "--set", "train.rounds=2"], "not for --paper"),
    ],
)
def test_unknown_settings_are_refused_in_one_sentence(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(words) == 2
    captured = capsys.readouterr()
    assert message in " ".join((captured.out + captured.err).split())
