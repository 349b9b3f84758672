"""SASRec as a centralised control: self-attention over everybody's ordered histories, pooled in one place.

Split, masks and metrics are the package's own. The test is read twice: with the training items alone ("train"), and
with the validation item as well ("known"), as papers on sequences do.

    python tests/controls/sasrec.py --data ml-1m --minutes 500 --checkpoint FOLDER
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from tacita.core.config import RunConfig, SplitConfig
from tacita.core.types import Block, Floats, Ints, Ragged
from tacita.federation.evaluation import build_ranking_mask
from tacita.metrics import EvaluationRules, evaluate_ranking, sample_candidates
from tacita.round.plan import Federation
from tacita.runs.assembly import ALL_CORES, assemble_federation

CHECKPOINT = "sasrec.safetensors"


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


class Training:
    """Model, optimiser and the best epoch so far; a checkpoint after every epoch lets a stopped training go on."""

    def __init__(self, options: argparse.Namespace, n_items: int) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.model = SASRec(n_items, options.dim, options.length, options.layers, options.dropout)
        self.optimiser = torch.optim.Adam(self.model.parameters(), lr=options.lr, betas=(0.9, 0.98))
        self.best_weights = copy.deepcopy(self.model.state_dict())
        self.progress = {"epoch": 0, "best_epoch": 0, "best": 0.0, "cpu_seconds": 0.0}

    def train_epoch(self, train: Ragged, n_items: int) -> None:
        """One pass; its draws follow from seed and epoch, so that a resumed training makes the same ones."""
        self.progress["epoch"] += 1
        epoch = int(self.progress["epoch"])
        torch.manual_seed(1000 * self.options.seed + epoch)
        rng = np.random.default_rng([self.options.seed, epoch])
        self.model.train()
        for rows in batches(windows(train, self.options.length, rng), self.options.tokens, n_items, rng):
            self.optimiser.zero_grad()
            loss_of(self.model, rows, n_items, self.options.negatives).backward()
            self.optimiser.step()

    def record_validation(self, ndcg: float) -> None:
        if ndcg > self.progress["best"]:
            self.progress |= {"best": ndcg, "best_epoch": self.progress["epoch"]}
            self.best_weights = copy.deepcopy(self.model.state_dict())

    def is_converged(self) -> bool:
        return self.progress["epoch"] - self.progress["best_epoch"] >= self.options.patience

    def save_checkpoint(self, folder: Path) -> None:
        tensors = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        tensors |= {f"best/{name}": tensor for name, tensor in self.best_weights.items()}
        for index, moments in self.optimiser.state_dict()["state"].items():
            tensors |= {f"adam/{index}/{name}": tensor for name, tensor in moments.items()}
        folder.mkdir(parents=True, exist_ok=True)
        settings = {"progress": json.dumps(self.progress)}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "next", settings)
        (folder / "next").replace(folder / CHECKPOINT)

    def load_checkpoint(self, folder: Path) -> None:
        with safe_open(folder / CHECKPOINT, "pt") as file:
            self.progress = json.loads(file.metadata()["progress"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        self.model.load_state_dict(select_tensors(tensors, "model/"))
        self.best_weights = select_tensors(tensors, "best/")
        moments: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in select_tensors(tensors, "adam/").items():
            index, moment = name.split("/")
            moments.setdefault(int(index), {})[moment] = tensor
        groups = self.optimiser.state_dict()["param_groups"]
        self.optimiser.load_state_dict({"state": moments, "param_groups": groups})


def select_tensors(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def run(options: argparse.Namespace) -> dict[str, object]:
    """Train until validation has not improved for `patience` epochs or the time is up; test the best epoch."""
    fed = assemble_federation(RunConfig(data=options.data, split=SplitConfig(kind="leave-one-out")), ALL_CORES)
    torch.set_num_threads(options.threads)
    block, n_items = fed.stream.blocks[0], fed.stream.n_items
    training = Training(options, n_items)
    folder = Path(options.checkpoint) if options.checkpoint else None
    if folder and (folder / CHECKPOINT).exists():
        training.load_checkpoint(folder)
    begun = time.perf_counter()
    while training.progress["epoch"] < options.epochs and not training.is_converged():
        if time.perf_counter() - begun > 60 * options.minutes:
            break
        cpu = time.process_time()
        training.train_epoch(block.train, n_items)
        ndcg = measured(fed, block, training.model, block.train, "valid")["ndcg@10"]
        training.record_validation(ndcg)
        training.progress["cpu_seconds"] += time.process_time() - cpu
        spent = training.progress["cpu_seconds"]
        print(f"epoch {training.progress['epoch']}: validation ndcg@10 {ndcg:.4f}, {spent:.0f} s of CPU", flush=True)
        if folder:
            training.save_checkpoint(folder)
    training.model.load_state_dict(training.best_weights)
    reads = {"train": block.train, "known": block.train.join_rows(block.valid)}
    test = {name: measured(fed, block, training.model, read, "test") for name, read in reads.items()}
    ended = {"converged": training.is_converged(), "read": test}
    return {**vars(options), **training.progress, **ended}


def asked_for(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="SASRec on pooled data, last item out.")
    parser.add_argument("--data", default="ml-100k")
    parser.add_argument("--checkpoint", default="", help="a folder: a training that was stopped goes on from it")
    whole = {"dim": 64, "length": 200, "layers": 2, "negatives": 0, "tokens": 8192, "patience": 10}
    whole |= {"epochs": 1000, "threads": 1}
    for name, value in {**whole, "seed": 1, "dropout": 0.2, "lr": 1e-3, "minutes": 50.0}.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    print(json.dumps(run(asked_for())))
