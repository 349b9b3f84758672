"""`tacita bench peers`: ALS is tuned on the run's own split, and needs its package."""

from __future__ import annotations

import sys

import pytest

from tacita.core.errors import TacitaError
from tacita.methods import resolve_config
from tacita.research.bench import peers
from tacita.runs.assembly import Machine, assemble_federation

DATA = "synthetic:users=120,items=60,per_user=14,groups=4"


def test_the_comparison_names_the_package_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "implicit.als", None)
    with pytest.raises(TacitaError, match=r"tacita\[peers\]"):
        peers.bench_peers(DATA, 1, None)


def test_als_is_tuned_on_validation_and_beats_chance() -> None:
    pytest.importorskip("implicit")
    settings = {"data": DATA, "backbone": {"name": "tally"}, "split": {"kind": "leave-one-out"}}
    evaluate = {"k": [10], "select_by": "ndcg@10", "read": "known"}
    federation = assemble_federation(resolve_config({**settings, "evaluate": evaluate}, "test"), Machine(1))
    result = peers.tune_als(federation)
    assert result["settings"] in {settings.describe() for settings in peers.SETTINGS}
    assert result["ndcg"] > 0.09  # chance: 4.5 / 48
