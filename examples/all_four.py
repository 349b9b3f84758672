"""Four papers in one stream: memory and temporal mean, sharing, interests, and noise that fits everybody's budget.

What cannot join is FedKDRec: its devices send scores, each seen by itself and some of them swapped, and no epsilon can
be stated of that, so `dpps` refuses them; the other parts change item rows, which FedKDRec never sends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tacita
from tacita.runs.forgetting.reopened_run import reopen_run
from tacita.runs.forgetting.request_service import submit_request
from tacita.runs.forgetting.requests import RawRequest
from tacita.runs.ledger import describe_ledger, read_run_ledger

PARTS: list[dict[str, Any]] = [
    {"name": "replay"},  # F3CRec on devices: what used to be liked is learned again
    {"name": "temporal-mean"},  # F3CRec on the server: items that moved little stay near where they were
    {"name": "sharing"},  # FedShare: some people show some items, and can take them back
    {"name": "shared-graph"},
    {"name": "contrastive-unlearning"},
    {"name": "interest"},  # LIPM: who is like everybody counts more; under a budget that weight is noised, too
    {"name": "fine-tuning"},
    {"name": "dpps", "clip": 0.1, "releases": 12},  # last: it clips and noises all that the others send
]

SETTINGS: dict[str, Any] = {
    "split": {"kind": "blocks", "n_blocks": 2},
    "backbone": "mf",  # replay scores with private vectors alone, so neither FedShare's nor LIPM's own model will do
    "train": {"rounds": 5, "aggregation": "mean"},  # weights by data would tell how much a person has
    "evaluate": {"controls": False},
}


def main(out: Path = Path("runs/all-four"), data: str = "synthetic:users=300,items=120", **more: Any) -> None:
    run = tacita.train(data=data, parts=PARTS, out=out, **SETTINGS | more)
    print(*describe_ledger(read_run_ledger(run.folder)), sep="\n")
    user = somebody_who_shares(run.folder)
    print(
        f"{user} takes back what they shared: {submit_request(run.folder, RawRequest('unshare', {user: None})).message}"
    )
    print(*describe_ledger(read_run_ledger(run.folder)), sep="\n")  # rounds of unlearning are releases like all others


def somebody_who_shares(folder: Path) -> str:
    run = reopen_run(folder)
    return str(run.saved.ids["users"][int(run.shared.counts().argmax())])


if __name__ == "__main__":
    main()
