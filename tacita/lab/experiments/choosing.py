"""What people choose by: quality, bytes of a person, seconds, epsilon, what forgetting one person costs, what is seen.

One person, the same in every run of a seed, leaves with everything, by the way that the run's own door takes. Where
that way is to train again, the training itself is the price and is not paid a second time.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from tacita.core.types import Requests
from tacita.federation.measuring import Learned
from tacita.federation.rounds import Progress, RoundReport, run_stream, start
from tacita.lab.experiments.once import Line, first_metric, only_block, pack, promised, rounded
from tacita.lab.forgetting.anew import shares_of
from tacita.lab.forgetting.door import carried_out
from tacita.lab.forgetting.paths import Way, way_of
from tacita.lab.forgetting.proof import Done
from tacita.lab.forgetting.wishes import Asked, some_of
from tacita.lab.seeing import server_sees
from tacita.methods.distillation.traffic import KILOBYTE
from tacita.round.plan import Federation

AGAIN = "trains again"
_FROM = {
    "local": "from the server",
    "silo": "from the server",
    "central": "from who gets the model",
    "": "from who sees the sum",
}


def choose_once(fed: Federation) -> Line:
    """A run from its first round to its last, and one person's leaving."""
    only_block(fed)
    sent = np.zeros(2)

    def on_round(report: RoundReport, now: Progress) -> None:
        sent[:] += report.clients * np.array([report.bytes_up, report.bytes_down])

    progress, began = start(fed), time.process_time()
    run_stream(fed, progress, on_round)
    seconds = time.process_time() - began
    result, found = progress.results[-1], progress.found[-1]
    up, down = sent / KILOBYTE / fed.stream.n_users
    values = found.mean() | promised(result)
    values |= {"KB up, a person": up, "KB down, a person": down, "CPU seconds": seconds}
    kept = {name: result[name] for name in ("rounds", "best_round", "valid")}
    forgets, price = _leaving(fed, progress, seconds)
    words = {"forgets": forgets, "sees": server_sees(fed), "promise": promise_of(result)}
    values["forgetting, CPU seconds"] = price
    return {"values": rounded(values), **kept, "words": words, "users": pack(found.values[first_metric(fed)])}


def promise_of(result: dict[str, Any]) -> str:
    """Whom the largest epsilon of a run is about, and from whom it protects; nothing where there is none."""
    said = [
        (v, made) for made in result.get("promises", {}).values() for k, v in made.items() if k.startswith("epsilon")
    ]
    if not said:
        return ""
    made = max(said, key=lambda one: float(one[0]))[1]
    if "epsilon_per_person_most" in made:
        return "who told most"
    return f"a {made.get('unit', 'person')}, {_FROM[made.get('threat', '')]}"


def leaver(fed: Federation, progress: Progress) -> tuple[Asked, Way]:
    """One drawn person who leaves with everything that was learned from, and the way that this goes.

    Where people share, it is one who shares all of it: for whom the method was made.
    """
    trained, keys = fed.stream.trained(len(fed.stream.blocks) - 1), fed.stream.user_keys
    shares = shares_of(fed, Learned(progress.server, progress.clients))
    has, all_shared = trained.counts() > 0, shares.shared.counts() >= trained.counts()
    able = has & all_shared if (has & all_shared).any() else has
    user = some_of(np.flatnonzero(able), keys, fed.draws, 0.0)  # at least one is drawn
    items = trained.take(user)
    told = Requests("leave", keys[user], items.where(np.zeros(len(items.ids), bool)), alone=True)
    asked = Asked(told, user.astype(np.int32), items, whole=True)
    return asked, way_of(fed, asked, shares.take(user))


def _leaving(fed: Federation, progress: Progress, training: float) -> tuple[str, float]:
    """How a person is forgotten, in words, and the seconds it took the processor."""
    asked, way = leaver(fed, progress)
    if way.anew:
        return f"{AGAIN}: exact", training
    done = carried_out(fed, progress, asked, way)
    return _how(done), done.seconds_cpu


def _how(done: Done) -> str:
    if done.waits:
        return "waits until others leave, too; --again trains again"
    model, said = done.fed.backbone.retracts, [bool(one["exact"]) for one in done.said.values() if "exact" in one]
    sums = done.fed.learner.takes_back and model is not None and model.exact
    exact = "exact" if (sums or (said and all(said))) and not done.way.leaves else "not exact"
    return f"{' and '.join(done.way.by)}: {exact}" + (", of what was shared only" if done.way.leaves else "")
