"""The sequence model that stands beside tally: it never looks ahead, reads every step once, and learns an order."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from controls.sasrec import SASRec, asked_for, batches, loss_of, run, windows
from tacita.core.types import Ragged


def test_what_comes_later_is_never_looked_at() -> None:
    torch.manual_seed(0)
    model = SASRec(9, 8, 6, 2, 0.0).eval()
    first, second = torch.tensor([[1, 2, 3, 4, 5, 6]]), torch.tensor([[1, 2, 3, 4, 0, 9]])
    with torch.no_grad():
        entry, other = model(first), model(second)
    assert torch.allclose(entry[:, :4], other[:, :4], atol=1e-6)
    assert not torch.allclose(entry[:, 4:], other[:, 4:], atol=1e-3)


def test_every_step_of_a_history_is_learned_once() -> None:
    rng = np.random.default_rng(3)
    lists = [list(range(100 * u, 100 * u + n)) for u, n in enumerate((1, 2, 5, 6, 7, 23, 60))]
    for _ in range(20):
        pieces = windows(Ragged.from_lists(lists), 5, rng)
        steps = sorted((int(a), int(b)) for p in pieces for a, b in pairwise(p))
        assert steps == [(a, b) for entry in lists for a, b in pairwise(entry)]
        assert max(len(p) for p in pieces) <= 6
        rows = [row[row < 1000].tolist() for group in batches(pieces, 12, 1000, rng) for row in group]
        assert sorted(rows) == sorted(p.tolist() for p in pieces)


def test_it_learns_what_follows_what() -> None:
    torch.manual_seed(1)
    rng = np.random.default_rng(1)
    model = SASRec(20, 16, 10, 1, 0.0)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    round_and_round = torch.stack([(torch.arange(11) + int(s)) % 20 for s in rng.integers(0, 20, 64)])
    first = loss_of(model, round_and_round, 20, 0).item()
    for _ in range(60):
        optimiser.zero_grad()
        loss_of(model, round_and_round, 20, 8).backward()
        optimiser.step()
    assert loss_of(model, round_and_round, 20, 0).item() < first / 10


def test_the_command_measures_both_ways_of_reading() -> None:
    message = "--data synthetic:users=40,items=30,per_user=8 --dim 8 --length 5 --layers 1 --patience 1 --minutes 0.05"
    result = run(asked_for(message.split()))
    reads = result["read"]
    assert isinstance(reads, dict)
    assert reads.keys() == {"train", "known"}
    for read in reads.values():
        assert read.keys() == {"hr@10", "ndcg@10", "99 negatives hr@10", "99 negatives ndcg@10"}
        assert all(0 <= value <= 1 for value in read.values())


def test_a_stopped_training_goes_on_from_its_checkpoint_with_the_same_numbers(tmp_path: Path) -> None:
    message = "--data synthetic:users=40,items=30,per_user=8 --dim 8 --length 5 --layers 1 --patience 3 --checkpoint"
    whole = run(asked_for([*message.split(), str(tmp_path / "whole")]))
    folder = str(tmp_path / "stopped")
    for epochs in range(1, int(str(whole["epoch"])) + 1):
        resumed = run(asked_for([*message.split(), folder, "--epochs", str(epochs)]))
    assert resumed["converged"]
    assert resumed["read"] == whole["read"]
    assert resumed["best_epoch"] == whole["best_epoch"]
