"""SASRec as a centralised control: self-attention over everybody's ordered histories, pooled in one place.

Split, masks and metrics are the package's own. The test is read twice: with the training items alone ("train"), and
with the validation item as well ("known"), as papers on sequences do.

    python tests/controls/sasrec.py --data ml-1m --minutes 50
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from tacita.core.config import RunConfig, SplitConfig
from tacita.core.types import Block, Floats, Ints, Ragged
from tacita.federation.evaluation import build_ranking_mask
from tacita.metrics import EvaluationRules, evaluate_ranking, sample_candidates
from tacita.round.plan import Federation
from tacita.runs.assembly import ALL_CORES, assemble_federation


class SASRec(nn.Module):
    """What comes next at every place of a history, from what stands before it."""

    def __init__(self, n_items: int, dim: int, length: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.length, self.layers = length, layers
        self.item = nn.Embedding(n_items + 1, dim, padding_idx=n_items)
        self.place = nn.Embedding(length, dim)
        nn.init.normal_(self.item.weight, std=dim**-0.5)
        nn.init.normal_(self.place.weight, std=0.02)
        self.drop = nn.Dropout(dropout)
        self.before = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * layers + 1))
        self.joint = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        wide = [(nn.Linear(dim, dim), nn.ReLU(), nn.Dropout(dropout), nn.Linear(dim, dim)) for _ in range(layers)]
        self.inner = nn.ModuleList(nn.Sequential(*entry) for entry in wide)

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        """(rows, places) item numbers to (rows, places, dim); what stands later is never looked at."""
        x = self.drop(self.item(items) + self.place.weight[: items.shape[1]])
        for layer in range(self.layers):
            q, k, v = self.joint[layer](self.before[2 * layer](x)).chunk(3, dim=-1)
            x = x + self.drop(self.out[layer](functional.scaled_dot_product_attention(q, k, v, is_causal=True)))
            x = x + self.drop(self.inner[layer](self.before[2 * layer + 1](x)))
        return self.before[-1](x)


def windows(lists: Ragged, length: int, rng: np.random.Generator) -> list[Ints]:
    """Histories cut into pieces of at most length + 1 items, at other places in every epoch; neighbours share one."""
    out = []
    for row in range(len(lists)):
        ids = lists.ids[lists.ptr[row] : lists.ptr[row + 1]]
        first = int(rng.integers(1, length + 1)) if len(ids) > length + 1 else len(ids)
        cuts = [0, *range(first, max(len(ids) - 1, 1), length)]
        out += [ids[lo : hi + 1] for lo, hi in zip(cuts, [*cuts[1:], len(ids)], strict=True) if hi - lo > 0]
    return [piece for piece in out if len(piece) > 1]


def batches(pieces: list[Ints], tokens: int, pad: int, rng: np.random.Generator) -> Iterator[torch.Tensor]:
    """Pieces of about the same length together, filled up with `pad`, in random order."""
    order = np.argsort([len(p) + rng.random() for p in pieces])
    begins = np.cumsum([len(pieces[at]) for at in order]) // tokens  # the batch that each falls into
    groups = np.split(order, np.flatnonzero(np.diff(begins)) + 1)
    for g in rng.permutation(len(groups)):
        own = [torch.from_numpy(pieces[k].astype(np.int64)) for k in groups[g]]
        yield nn.utils.rnn.pad_sequence(own, batch_first=True, padding_value=pad)


def loss_of(model: SASRec, rows: torch.Tensor, pad: int, negatives: int) -> torch.Tensor:
    wanted = rows[:, 1:]
    real = wanted != pad
    hidden, wanted = model(rows[:, :-1])[real], wanted[real]
    if not negatives:
        return functional.cross_entropy(hidden @ model.item.weight[:-1].T, wanted)
    drawn = torch.randint(pad, (negatives,))
    other = (hidden @ model.item.weight[drawn].T).masked_fill(drawn[None] == wanted[:, None], -torch.inf)
    own = (hidden * model.item.weight[wanted]).sum(-1, keepdim=True)
    return functional.cross_entropy(torch.cat([own, other], dim=1), torch.zeros(len(wanted), dtype=torch.long))


def measured(fed: Federation, block: Block, model: SASRec, read: Ragged, purpose: str) -> dict[str, float]:
    """HR@10 and NDCG@10 over all items and, at test, over 99 that a person never had."""
    model.eval()

    def score(users: Ints) -> Floats:
        own = [read.ids[read.ptr[u] : read.ptr[u + 1]][-model.length :].astype(np.int64) for u in users]
        rows = nn.utils.rnn.pad_sequence([torch.from_numpy(x) for x in own], batch_first=True)
        with torch.no_grad():
            last = model(rows)[torch.arange(len(own)), torch.tensor([len(x) - 1 for x in own])]
            return (last @ model.item.weight[:-1].T).numpy()

    keys, touched = fed.stream.user_keys, fed.stream.collect_history(len(fed.stream.blocks))
    mask = build_ranking_mask(fed, block, "test" if purpose == "test" else "valid", "block")
    wanted = block.test if purpose == "test" else block.valid
    few = sample_candidates(touched, 99, block.n_items, keys, fed.draws, block.index)
    result = {}
    for name, among in {"": None, "99 negatives ": few}.items() if purpose == "test" else [("", None)]:
        entry = evaluate_ranking(score, wanted, mask, keys, fed.draws, EvaluationRules(["hr", "ndcg"], [10], among))
        result |= {name + metric: value for metric, value in entry.compute_means().items()}
    return result


def run(asked: argparse.Namespace) -> dict[str, object]:
    """Train until validation has not improved for `patience` epochs or the time is up; test the best epoch."""
    torch.manual_seed(asked.seed)
    rng = np.random.default_rng(asked.seed)
    fed = assemble_federation(RunConfig(data=asked.data, split=SplitConfig(kind="leave-one-out")), ALL_CORES)
    torch.set_num_threads(asked.threads)
    block, pad = fed.stream.blocks[0], fed.stream.n_items
    model = SASRec(pad, asked.dim, asked.length, asked.layers, asked.dropout)
    optimiser = torch.optim.Adam(model.parameters(), lr=asked.lr, betas=(0.9, 0.98))
    begun, best, best_epoch, epoch, state = time.perf_counter(), 0.0, 0, 0, copy.deepcopy(model.state_dict())
    while epoch - best_epoch < asked.patience and time.perf_counter() - begun < 60 * asked.minutes:
        epoch += 1
        model.train()
        for rows in batches(windows(block.train, asked.length, rng), asked.tokens, pad, rng):
            optimiser.zero_grad()
            loss_of(model, rows, pad, asked.negatives).backward()
            optimiser.step()
        result = measured(fed, block, model, block.train, "valid")["ndcg@10"]
        print(f"epoch {epoch}: validation ndcg@10 {result:.4f}, {time.perf_counter() - begun:.0f} s", flush=True)
        if result > best:
            best, best_epoch, state = result, epoch, copy.deepcopy(model.state_dict())
    spent = {"seconds": time.perf_counter() - begun, "cpu_seconds": time.process_time()}
    model.load_state_dict(state)
    reads = {"train": block.train, "known": block.train.join_rows(block.valid)}
    test = {name: measured(fed, block, model, read, "test") for name, read in reads.items()}
    return {**vars(asked), "epochs": epoch, "best_epoch": best_epoch, "valid": best, "read": test, **spent}


def asked_for(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="SASRec on pooled data, last item out.")
    parser.add_argument("--data", default="ml-100k")
    whole = {"dim": 64, "length": 200, "layers": 2, "negatives": 0, "tokens": 8192, "patience": 10, "threads": 1}
    for name, value in {**whole, "seed": 1, "dropout": 0.2, "lr": 1e-3, "minutes": 50.0}.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    return parser.parse_args(given)


if __name__ == "__main__":
    print(json.dumps(run(asked_for())))
