"""What is true of short runs, frozen: `python tests/frozen.py` compares this code with tests/frozen.json bit by bit.

`--write` freezes them again, after a change that is meant to change numbers. Digests hold on one kind of processor; the
test in test_frozen.py compares the numbers themselves, up to rounding, and so holds on all. On another processor,
`--save FILE` notes the digests of one commit and `--against FILE` compares another commit with them.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tacita.core.config import RunConfig, validate_model
from tacita.federation.rounds import RoundReport
from tacita.methods import list_preset_names, list_preset_parts
from tacita.runs import serving, training
from tacita.runs.serving import Run
from tacita.runs.training import TrainingCallbacks

FILE = Path(__file__).with_suffix(".json")
DATA = "synthetic:users=90,items=60,per_user=14,groups=4,drift=0.3,new=0.2"
ROUNDS = {"rounds": 6}
MF = {"name": "mf", "lr": 2.0, "init_std": 0.1}  # learns something in so few rounds
PLAIN: dict[str, Any] = {"controls": False}

ADAM: dict[str, Any] = {
    "train": {**ROUNDS, "optimiser": "lazy-adam"},
    "backbone": {**MF, "lr": 0.02, "item_lr_scale": 1.0},
}
MATCHED: dict[str, Any] = {"train": ADAM["train"], "backbone": {"name": "fedpergnn", "dim": 8, "lr": 0.02}}
INTEREST: dict[str, Any] = {"name": "interest", "dim": 8, "tower": [16, 8], "last": 6, "lr": 0.02}
LIPM: dict[str, Any] = {"train": {**ROUNDS, "optimiser": "lazy-adam", "batches": "people", "batch_size": 64}}
PAIRS = {"objective": "bpr", "optimiser": "lazy-adam", "negatives": 1, "redraw": "epoch", "l2": 1e-4}
TRANSFER = [name for name in list_preset_names() if "prediction-transfer" in str(list_preset_parts(name))]

KINDS: dict[str, dict[str, Any]] = {
    **{f"mf {name}": {"method": name} for name in list_preset_names() if name not in (*TRANSFER, "fedpergnn")},
    **{f"mf {name}": {"method": name, **ADAM} for name in TRANSFER},
    "fedpergnn": {"method": "fedpergnn", **MATCHED},
    "mf fedrec": {"method": "fedrec", "train": {**ROUNDS, "objective": "squared", "aggregation": "per-row"}},
    "mf lipm-dpps": {"method": "lipm-dpps", "parts": [{"name": "dpps", "clip": 0.01}]},
    "interest lipm": {"method": "lipm", **LIPM, "backbone": {**INTEREST, "lr": 0.02}},
    "interest in skewed silos": {"train": {**LIPM["train"], "silos": 7, "skew": "high"}, "backbone": INTEREST},
    "interest in pairs": {"train": {**LIPM["train"], "objective": "bpr"}, "backbone": INTEREST},
    "mf retraction": {"method": "retraction", "train": {**ROUNDS, "aggregation": "fixed"}},
    "mf dp-fedavg": {
        "method": "dp-fedavg",
        "parts": [{"name": "dp-fedavg", "noise": 1.0, "clip": 0.5}],
        "train": {**ROUNDS, "aggregation": "fixed", "participation": {"kind": "poisson", "rate": 0.4}},
    },
    "mf dpps": {"method": "dpps", "parts": [{"name": "dpps", "clip": 0.1}]},
    "mf dpps central": {
        "method": "dpps",
        "parts": [{"name": "dpps", "clip": 0.1, "threat": "central", "releases": 8}],
        "train": {**ROUNDS, "aggregation": "fixed"},
    },
    "tally dpps": {"method": "dpps", "backbone": {"name": "tally"}, "parts": [{"name": "dpps", "clip": 0.01}]},
    "noise that is counted": {"parts": [{"name": "laplace-noise", "mode": "ldp", "clip": 0.1}]},
    "mf controls": {"evaluate": {}},
    "mf pdc-frs that contributes": {"method": "pdc-frs", "parts": [{"name": "sharing", "after": 2}]},
    "mf cdcgnnfed that mends": {"method": "cdcgnnfed", "parts": [{"name": "graph-mending", "mend_every": 2}]},
    "rlp2 that remembers": {"method": "rlp2", "parts": [{"name": "error-memory", "threshold": 0.3}]},
    "ncf": {"backbone": {"name": "ncf"}, "evaluate": {}},
    "ncf shared layer": {"backbone": {"name": "ncf", "share_mlp": True}, "evaluate": {}},
    "ncf f3crec": {"backbone": {"name": "ncf"}, "method": "f3crec"},
    "pfedrec": {"backbone": {"name": "pfedrec"}, "evaluate": {}},
    "pfedrec f3crec": {"backbone": {"name": "pfedrec"}, "method": "f3crec"},
    "pfedrec personal table": {
        "backbone": {"name": "pfedrec"},
        "evaluate": {"controls": False, "item_table": "personal"},
    },
    "tally": {"backbone": {"name": "tally"}, "evaluate": {}},
    "tally-order": {"backbone": {"name": "tally-order", "order_window": 6}, "evaluate": {"read": "known"}},
    "tally under a budget": {"backbone": {"name": "tally"}, "privacy": {"epsilon": 20.0}},
    "tally-order under a budget": {
        "backbone": {"name": "tally-order", "order_window": 6},
        "privacy": {"epsilon": 20.0},
    },
    "tally filter": {"backbone": {"name": "tally", "solve": "filter", "axes": 16}},
    "tally mixture": {"backbone": {"name": "tally", "solve": "mixture", "axes": 16}},
    "tally inputs": {"backbone": {"name": "tally", "most_inputs": 20, "length_power": 0.5, "min_pair": 2}},
    "silos": {"train": {**ROUNDS, "silos": 7}},
    "silos f3crec": {"train": {**ROUNDS, "silos": 7}, "method": "f3crec"},
    "weighted": {
        "train": {**ROUNDS, "aggregation": "weighted", "local_epochs": 2, "batch_size": 8},
        "backbone": {**MF, "lr": 0.3},
    },
    "per row": {
        "train": {**ROUNDS, "aggregation": "per-row", "server_lr": 0.5},
        "backbone": {**MF, "lr": 0.5, "item_lr_scale": 1.0},
    },
    "fixed poisson": {
        "train": {**ROUNDS, "aggregation": "fixed", "participation": {"kind": "poisson", "rate": 0.4}},
        "method": "f3crec",
    },
    "fraction": {"train": {**ROUNDS, "participation": {"kind": "fraction", "rate": 0.3}}, "method": "rlp2"},
    "adam": {"train": {**ROUNDS, "optimiser": "adam"}, "backbone": {**MF, "lr": 0.01, "item_lr_scale": 1.0}},
    "noise": {"method": "f3crec", "parts": [{"name": "laplace-noise", "scale": 0.01}]},
    "leave one out": {"split": {"kind": "leave-one-out"}, "evaluate": {"sampled_negatives": 20}},
    "random split": {"split": {"kind": "random"}, "evaluate": {"controls": False, "mask": "history"}},
    "ego fedshare-local": {
        "method": "fedshare-local",
        "split": {"kind": "random"},
        "backbone": {"name": "ego", "lr": 0.05, "item_lr_scale": 1.0},
        "train": {
            **ROUNDS,
            **PAIRS,
            "local_epochs": 3,
            "batch_size": 1000,
            "aggregation": "weighted",
            "server_lr": 10.0,
        },
        "evaluate": {"controls": False, "unmasked": True},
    },
    "last round": {"method": "reg", "train": {**ROUNDS, "resume_from": "last"}},
}


def config_of(kind: str) -> RunConfig:
    base = {"data": DATA, "backbone": MF, "train": ROUNDS, "evaluate": PLAIN, "seed": 3}
    values = base | KINDS[kind]
    values["privacy"] = {**values.get("privacy", {}), "reproducible_noise": True}
    return validate_model(RunConfig, values, kind)


def numbers_of(run: Run) -> dict[str, Any]:
    """A result without the echo of its settings, which may grow, and what some users are recommended from it."""
    told = {name: run.result[name] for name in ("blocks", "mean", "continual", "controls", "bytes")}
    users = json.loads((run.folder / "ids.json").read_text())["users"][::20]
    found = serving.recommend(run.folder, users, 5)
    served = {user: [{k: one[k] for k in ("item", "title", "score")} for one in items] for user, items in found.items()}
    return {**told, "served": served}


def summary_of(numbers: dict[str, Any]) -> dict[str, Any]:
    """A few numbers in which every change of a model shows."""
    scores = [one["score"] for found in numbers["served"].values() for one in found]
    return rounded({**numbers["mean"], "valid": numbers["blocks"][-1]["valid"], "score": sum(scores) / len(scores)})


def run(kind: str, out: Path) -> dict[str, Any]:
    return numbers_of(training.train(config_of(kind), out))


def resumed(out: Path) -> dict[str, Any]:
    """A run that was stopped in its sixth round, and went on."""
    rounds = 0
    before = training.CHECKPOINT_SECONDS, training.CHECKPOINT_SHARE
    training.CHECKPOINT_SECONDS, training.CHECKPOINT_SHARE = -1.0, float("inf")  # after every round

    def stop(_: RoundReport) -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 6:
            raise KeyboardInterrupt

    try:
        training.train(config_of("mf f3crec"), out, watcher=TrainingCallbacks(on_round=stop))
    except KeyboardInterrupt:
        assert (out / "checkpoint.safetensors").is_file()
        return numbers_of(training.resume(out))
    finally:
        training.CHECKPOINT_SECONDS, training.CHECKPOINT_SHARE = before
    raise AssertionError("the run was not stopped")


def all_runs() -> dict[str, dict[str, Any]]:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for n, kind in enumerate(KINDS):
            print(kind, file=sys.stderr)
            found[kind] = run(kind, Path(folder) / str(n))
        found["resumed"] = resumed(Path(folder) / "resumed")
    return found


def digest(numbers: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()[:16]


def rounded(value: Any) -> Any:
    """Six digits are enough to see a change, and few enough for other processors."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list) else value


def main() -> int:
    found = all_runs()
    if "--write" in sys.argv:
        lines = {kind: {"digest": digest(one), **summary_of(one)} for kind, one in found.items()}
        FILE.write_text(json.dumps(lines, indent=1) + "\n")
        return 0
    if "--save" in sys.argv:
        digests = {kind: digest(numbers) for kind, numbers in found.items()}
        Path(sys.argv[-1]).write_text(json.dumps(digests, indent=1) + "\n")
        return 0
    frozen = json.loads(FILE.read_text())
    if "--against" in sys.argv:
        digests = json.loads(Path(sys.argv[-1]).read_text())
        frozen = {kind: {"digest": value} for kind, value in digests.items()}
    changed = [
        kind for kind in frozen.keys() | found.keys() if frozen.get(kind, {}).get("digest") != digest(found[kind])
    ]
    for kind in sorted(changed):
        print(f"{kind}: {frozen.get(kind)} is now {summary_of(found[kind])}")
    print(f"{len(found) - len(changed)} of {len(found)} runs are identical")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
