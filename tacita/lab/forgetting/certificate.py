"""The certificate of a withdrawal (sharing spec D.5): what was asked, done and checked, and what was not.

It names no item, and nobody but by a pseudonym. What was not measured says so. `exact` is about bits: true only where
the model has those of one that was trained again, or where the method has them by construction and says so. A tally has
the bits of its sums, and what it solves from them up to rounding: its guarantee says that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import tacita
from tacita.core.codec import digest
from tacita.core.types import Arrays
from tacita.lab.artefacts import clean
from tacita.lab.forgetting.proof import Done, Proof, model_digest
from tacita.lab.forgetting.pseudonyms import pseudonym, together
from tacita.lab.forgetting.verdict import checks_of, gap_of, verdict_of
from tacita.lab.run_folder import Saved
from tacita.round.device_state import device_arrays

NOT_RUN = "not run"
ROUNDING = "up to rounding"
SAME = 1e-6  # the largest difference of a score that counts as equal to training again
ALONE = "A retraction sent alone shows its author's items to whoever compares the models before and after it."
RESIDUAL = (
    "Copies of the model sent before, and recommendations made from it, are not reached; choices that validation made "
    "(the best round, tally's recency and inputs) stay as the data helped to make them; result.json and events.jsonl "
    "keep averages of rounds that the data took part in, ids.json the user's id."
)
TALLY = (
    "the model is a function of a sum over users, so taking a term back leaves rounding only",
    "training again means the same catalogue, inputs and ways of scoring, without the data",
)
NOISED = ("training again means the same catalogue, items and ways of scoring, without the data, and other noise",)
TRAINED = ("training again means the same seed, catalogue, rounds and remaining choices to share, without the data",)
AUDITS = (
    "auc_pairs", "auc_difference", "auc_user", "param_distance_ratio", "gram_distance", "noise_floor",
    "rank_percentile", "jaccard20", "relearn_ratio", "canary_exposure",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A request, all that came of it, and what is left of it in the new folder."""

    saved: Saved  # the run as it was
    done: Done
    proof: Proof | None
    traces: dict[str, list[str]]
    number: int
    seconds: float
    key: bytes  # of what it calls people

    def summed(self, name: str) -> float:
        return float(sum(one.get(name) or 0.0 for one in self.told))

    @property
    def methods(self) -> list[dict[str, Any]]:
        """The same of those alone who took something out of the model."""
        mine = {*self.done.way.by, self.done.fed.learner.name}
        said = [one for name, one in self.done.said.items() if name in mine]
        return [one for found in said for one in found.get("each", [found])] or self.told

    @property
    def told(self) -> list[dict[str, Any]]:
        """What every part says, where several people were handled one by one what it says of each."""
        return [one for said in self.done.said.values() for one in said.get("each", [said])]


def certify(case: Case) -> dict[str, Any]:
    found = {
        "request": _request(case),
        "method": _method(case),
        "model": _model(case),
        "participation": _participation(case),
        "cost": _cost(case),
        "guarantee": _guarantee(case),
        "audit": _audit(case),
        "utility": NOT_RUN if case.proof is None else case.proof.utility,
        "purged": _purged(case),
        "residual_risk": _residual(case),
        "verdict": _verdict(case),
    }
    return {name: _plain(value) for name, value in found.items()}


def _plain(value: Any) -> Any:
    """Numbers that JSON knows."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _request(case: Case) -> dict[str, Any]:
    ids, asked = case.saved.ids["users"], case.done.asked
    subjects = [pseudonym(case.key, ids[u]) for u in asked.users.tolist()]
    others = [pseudonym(case.key, ids[u]) for u in _others(case)]
    one = subjects[0] if len(subjects) == 1 else together(subjects)
    told = case.done.fed.stream.trained(len(case.done.fed.stream.blocks) - 1)
    edges = int(told.holds(asked.users[asked.items.rows()], asked.items.ids).sum())
    return {
        "id": case.number,
        "received_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "subject_pseudonym": one,
        "subjects": subjects,
        "sent_with": others,
        "scope": "user" if asked.whole else "shared_edges" if asked.requests.kind == "unshare" else "items",
        "n_edges": edges,
        "n_items": len(asked.items.ids),
    }


def _others(case: Case) -> list[int]:
    """Who else was taken back in the same update."""
    row = {int(key): n for n, key in enumerate(case.done.fed.stream.user_keys.tolist())}
    mine = set(case.done.asked.users.tolist())
    named = {row[int(key)] for one in case.told if not one.get("waits") for key in one.get("subjects", ())}
    return sorted(named - mine)


def _method(case: Case) -> dict[str, Any]:
    config = case.saved.config
    return {
        "name": next((str(one["method"]) for one in case.methods if "method" in one), " and ".join(case.done.way.by)),
        "mode": "; ".join(str(one["mode"]) for one in case.told if "mode" in one) or "as the method has it",
        "why": case.done.way.why,
        "leaves": case.done.way.leaves,
        "exact": _exact(case),
        "calibration": _calibration(case),
        "parameters": {"backbone": config.backbone, "parts": config.parts, "method": config.method},
        "code_version": tacita.__version__,
        "seeds": {"run": config.seed, "split": config.split.seed},
    }


def _calibration(case: Case) -> dict[str, Any] | str:
    """The damping that retractions were carried with, what it leaves, and which way was taken for that."""
    names: tuple[str, ...] = ("path", "alpha", "ratio", "reason")
    found = [{k: one[k] for k in names if k in one} for one in case.methods]
    return next((one for one in found if "alpha" in one), "none")


def _sums_exactly(case: Case) -> bool:
    """Whether the model is a function of sums that nobody put noise into."""
    model = case.done.left.backbone.retracts
    return case.done.left.learner.takes_back and model is not None and model.exact


def _exact(case: Case) -> bool:
    """Checked bit by bit, or, where nobody checked, exact by construction."""
    if case.done.way.leaves or case.done.waits or _nothing_taken(case):
        return False
    if case.proof is not None:
        return case.proof.same_bits
    said = [bool(one["exact"]) for one in case.methods if "exact" in one]
    return bool(said) and all(said)


def _up_to_rounding(case: Case) -> bool:
    """By construction, unless a check found more; the sums have the bits, what is solved from them need not."""
    if not _sums_exactly(case) or case.done.way.leaves or case.done.waits:
        return False
    return case.proof is None or (case.proof.difference is not None and case.proof.difference <= SAME)


def _model(case: Case) -> dict[str, Any]:
    done = case.done
    left: Arrays = {}
    for block in done.left.stream.blocks:
        left |= {f"{block.index}/ptr": block.train.ptr, f"{block.index}/ids": block.train.ids}
    return {
        "sha256_before": model_digest(done.left, done.was),
        "sha256_after": model_digest(done.left, done.now),
        "sha256_data_remaining": digest(left),
    }


def _participation(case: Case) -> dict[str, Any]:
    return {
        "clients_asked": int(case.summed("clients_asked")),
        "rounds": int(case.summed("rounds")),
        "bytes_up": case.summed("bytes_up"),
        "bytes_down": case.summed("bytes_down"),
    }


def _cost(case: Case) -> dict[str, Any]:
    done, proof = case.done, case.proof
    held = device_arrays(done.now.clients, "")
    server = case.summed("seconds_server") or done.seconds
    return {
        "seconds_server": round(server, 4),
        "seconds_client_total": round(case.summed("seconds_client"), 4),
        "seconds_request": round(done.seconds, 4),
        "seconds_total": round(case.seconds, 4),
        "seconds_retrain": NOT_RUN if proof is None else round(proof.seconds, 4),
        "ratio_to_retrain": NOT_RUN if proof is None else done.seconds / max(proof.seconds, 1e-9),
        "storage_bytes_server": case.summed("storage_server"),
        "storage_bytes_client_mean": case.summed("storage_client"),
        "bytes_on_devices_mean": sum(a.nbytes for a in held.values()) / max(1, done.now.clients.n_users),
    }


def _guarantee(case: Case) -> dict[str, Any]:
    proof, sums = case.proof, case.done.left.learner.takes_back
    again = TRAINED if not sums else TALLY if _sums_exactly(case) else NOISED
    kinds = {one.get("guarantee") for one in case.told}
    bounded = next((one for one in case.told if one.get("guarantee") == "bounded"), {})
    kind = "bounded" if "bounded" in kinds else "empirical" if proof else NOT_RUN
    kind = "exact" if _exact(case) else ROUNDING if _up_to_rounding(case) else kind
    said = [str(line) for one in case.told for line in one.get("assumptions", ())]
    return {
        "type": kind,
        "epsilon": bounded.get("epsilon"),
        "delta": bounded.get("delta"),
        "psi_bound": bounded.get("psi_bound"),
        "max_score_difference": NOT_RUN if proof is None else proof.difference,
        "people_compared": NOT_RUN if proof is None else proof.compared,
        "assumptions": [*again, *dict.fromkeys(said)],
    }


def _audit(case: Case) -> dict[str, Any]:
    found = dict.fromkeys(AUDITS, NOT_RUN)
    if case.proof is None:
        return {"reference": "none", **found}
    return {"reference": "retrain", **found, **case.proof.audit}


def _purged(case: Case) -> dict[str, Any]:
    """What was emptied, and what a search of the new folder finds."""
    lists = ["histories", "lists that parts keep"] if len(case.done.gone.ids) else []
    private = ["private vectors"] if case.done.asked.whole else []
    said = [str(line) for one in case.told for line in one.get("purged", ())]
    return {"emptied": list(dict.fromkeys([*lists, *private, *said])), "clean": clean(case.traces), **case.traces}


def _residual(case: Case) -> str:
    alone = len(case.done.asked.users) == 1 and not _others(case) and _sums_exactly(case)
    moved = model_digest(case.done.left, case.done.was) != model_digest(case.done.left, case.done.now)
    more = [case.done.way.leaves, ALONE if alone and moved else ""]
    more += [str(one["residual_risk"]) for one in case.told if one.get("residual_risk")]
    if case.traces["rows"]:
        more.append(f"Item rows as they were before are still in {', '.join(case.traces['rows'])}.")
    return " ".join([RESIDUAL, *(one for one in more if one)])


def _nothing_taken(case: Case) -> bool:
    """Whether something is taken back from the server's record, and that held nothing of it."""
    done, asked = case.done, case.done.asked
    if asked.requests.kind != "unshare" or done.way.anew:
        return False
    held = done.was.server.given.of(done.fed.stream.user_keys[asked.users])
    return not asked.items.holds(held.rows(), held.ids).any()


def _verdict(case: Case) -> str:
    if case.done.waits:
        return "waiting"
    if _nothing_taken(case):
        return "fail: the server's record held nothing of what is taken back"
    if not clean(case.traces):
        return "fail: the search of the folder found what was withdrawn"
    if case.proof is None:
        return "not verified"
    proof = case.proof
    if proof.same_bits and proof.difference is None:
        return "pass: the model has the bits of one trained again; nobody is left to compare scores of"
    if proof.difference is not None and (_sums_exactly(case) or proof.same_bits):
        return f"{'pass' if proof.difference <= SAME else 'fail'}: score difference at most {SAME}"
    auc = proof.audit["auc_pairs"]
    gap = gap_of(auc["after"], auc["retrain"])
    found = {kind: len(where) for kind, where in case.traces.items()}
    return verdict_of(checks_of(gap, proof.audit["param_distance_ratio"], None, found))
