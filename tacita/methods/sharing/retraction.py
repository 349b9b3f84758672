"""retraction: who never shared and leaves takes along what it added to the table (sharing spec D.2).

Sums over a fixed denominator are linear, so a device can keep what it itself added, damped by what later rounds
absorbed of it: by 1 - alpha beta a round, beta being what the others weigh. Leaving, people send these sums back, and
the server sees only the sum over all who leave together. It knows who took part, a commitment of each upload, and how
long what each sent was, which bounds what may come back. All of that names people: live it needs nodes whose owners
allow it (`insecure_single_user_uploads`), until sums are secure.

After one round this is exact. After many it is as good as alpha: `tacita.runs.calibration` finds alpha and what is left
of the distance to retraining (`ratio`) with people who leave for trial. Without a ratio, or with one above
`most_ratio`, nobody's retraction is taken: the table goes back to the last checkpoint before they took part, and the
rounds since then are played again without them. So it is where more comes back than was ever sent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, CohortView, Doubles, Floats, Keys, Ragged, RoundReplay, ServerState, StateUpdate
from tacita.learn.rows import MOST_MOVE
from tacita.messages import CohortReply, DenseArrays, SparseRows, Spec, Total, Upload
from tacita.methods.sharing import update_log as log
from tacita.methods.sharing.accumulators import COMMITMENT_SIZE, compute_commitments, gaussian_multiplier, merge_rows
from tacita.round.parts import DeviceQuery, Part, PartConfig, RoundPlayer
from tacita.round.registry import register, register_preset
from tacita.round.request import RequestBatch

_SLACK = 1.001  # of lengths that travelled in single precision
_UPLOAD_COLUMNS = ("sender", "number", "psi", "commitment")  # of every upload


class RetractionConfig(PartConfig):
    alpha: float = Field(0.1, ge=0, le=1, description="how strongly a round damps what was added before it")
    ratio: float | None = Field(
        None, ge=0, description="what calibration found to be left of the distance to retraining; none: not calibrated"
    )
    most_ratio: float = Field(0.5, gt=0, description="above this ratio the table goes back to a checkpoint instead")
    min_users: int = Field(1, ge=1, description="a retraction waits until so many leave together")
    checkpoint_every: int = Field(10, ge=1, description="rounds between two checkpoints of the table")
    most_psi: float = Field(0.0, ge=0, description="how much of who leaves a checkpoint may hold (Psi*)")
    epsilon: float | None = Field(None, gt=0, description="noise for a certificate that holds under assumption")
    delta: float = Field(1e-5, gt=0, lt=1, description="of that noise")


@register
class Retraction(Part):
    name = "retraction"
    takes_back = ("people",)
    plays_again = True
    only_notes = True
    Config: ClassVar[type[PartConfig]] = RetractionConfig
    config: RetractionConfig

    def extra_fields(self, n_items: int) -> tuple[Spec, ...]:
        digest = "a digest of what was sent"
        train, size = self.context.train, n_items * self.context.backbone.item_width
        longest = train.server_lr * log.compute_max_weight(self.context, n_items) * MOST_MOVE * size**0.5
        return (
            Spec("psi", (1,), seen="each", most=longest, least=0.0, about="how long what was sent is"),
            Spec("commitment", (COMMITMENT_SIZE,), seen="each", most=2.0**16 - 1, least=0.0, about=digest),
        )

    def check(self, n_items: int) -> None:
        train = self.context.train
        if train.aggregation != "fixed":
            raise TacitaError(
                f"part 'retraction' takes back summands, and train.aggregation = '{train.aggregation}' divides by who "
                "is there; use 'fixed'."
            )
        if train.participation.kind == "poisson":
            log.check_replay_settings(self.name, train)
        log.check_replay_settings(self.name, train.model_copy(update={"denominator": 1.0}))
        log.check_part_order(self.name, self.context, ("encode", "after"), ("server_step", "after"))

    # on the device

    def device_arrays(self, n_users: int) -> StateUpdate:
        none, width = np.zeros(n_users + 1, np.int64), self.context.backbone.item_width
        columns: Arrays = {"row": np.zeros((0, width), np.float32), "segment": np.zeros(0, np.int32)}
        vectors: Arrays = {"private": np.zeros((0, self.context.backbone.private_width), np.float32)}
        return {
            "carried": Ragged(none, np.zeros(0, np.int32), columns),
            "vectors": Ragged(none, np.zeros(0, np.int32), vectors),
            "since": np.zeros(n_users),
        }

    def begin_round(self, view: CohortView) -> StateUpdate:
        """Keep one's own vector as it was before the first round after a checkpoint, to be able to go back."""
        segment = int(view.received[self.name]["damping"][3])
        kept = view.lists[self.name]["vectors"]
        last = np.full(len(view.user), -1, np.int64)
        last[kept.rows()] = kept.ids  # the last of each
        fresh = np.flatnonzero(last != segment)
        now = {"private": view.private[fresh]}
        more = Ragged.from_pairs(fresh, np.full(len(fresh), segment, np.int32), len(view.user), now)
        return {"vectors": kept.join_rows(more)} if len(fresh) else {}

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, StateUpdate]:
        """Add what leaves to what is carried: this part stands after those that change uploads."""
        if "rows" not in upload.values:
            return upload, {}
        before, step, denominator, segment = view.received[self.name]["damping"].tolist()
        rows, first = log.as_rows(upload.values["rows"]), view.user_ptr[:-1]
        share = self.context.train.server_lr * upload.weight / max(denominator, 1e-300)
        mine, since = view.lists[self.name]["carried"], view.parts[self.name]["since"].copy()
        sent = upload.weight[rows.client] > 0
        moved = Ragged.from_pairs(
            first[rows.client[sent]], rows.item[sent], len(view.user),
            {"row": -share[rows.client[sent], None] * rows.value[sent]},
        )  # fmt: skip
        who = first[upload.weight > 0]
        factor = np.ones(len(view.user))
        own = np.log(np.exp(step) + self.config.alpha * share[upload.weight > 0])  # one does not absorb oneself
        factor[who] = np.exp(before - since[who] + np.minimum(own, 0.0))
        since[who] = before + step
        length = share * np.sqrt(rows.squared_norms(upload.n_clients))
        secret = self.context.draws.private("commitment", view.block, view.round)
        upload = upload.with_value(f"{self.name}.psi", DenseArrays(length.astype(np.float32)[:, None]))
        digest = compute_commitments(rows, upload.n_clients, view.client_keys, secret).astype(np.float32)
        upload = upload.with_value(f"{self.name}.commitment", DenseArrays(digest))
        return upload, {"carried": merge_rows(mine, factor, moved, int(segment)), "since": since}

    def answer(self, view: CohortView, question: str) -> CohortReply:
        what, *more = question.split("/")[1].split("-")
        mine, since = view.lists[self.name]["carried"], view.parts[self.name]["since"]
        now = float(view.received[self.name]["damping"][0])
        factor = np.exp(now - since)
        if what == "back":  # to a checkpoint; the rounds from there on are going to be played again
            return self._restore_checkpoint(view, int(more[0]), now)
        start = self.context.backbone.init_private(self.context.draws, view.user_keys)
        nobody = mine.filter_entries(np.zeros(len(mine.ids), bool))
        none = view.lists[self.name]["vectors"]
        none = none.filter_entries(np.zeros(len(none.ids), bool))
        kept = {"private": start, **self._build_state_update(nobody, np.zeros_like(since), none)}
        if what == "gone":
            return CohortReply(Upload({}, np.ones(view.n_clients), view.client_keys), kept)
        told = SparseRows(mine.rows(), mine.ids, mine.values["row"] * factor[mine.rows(), None])
        size = 4.0 * mine.counts()[:, None] * (2 + mine.values["row"].shape[1])
        upload = Upload({"carried": told, "bytes": DenseArrays(size)}, np.ones(view.n_clients), view.client_keys)
        return CohortReply(upload, kept)

    def _restore_checkpoint(self, view: CohortView, at: int, now: float) -> CohortReply:
        """What was carried after so many rounds, and everybody's own vector of then."""
        lists, since = view.lists[self.name], view.parts[self.name]["since"]
        left = lists["carried"].filter_entries(lists["carried"].values["segment"] < at)
        damped = left.values["row"] * np.exp(now - since)[left.rows(), None]
        carried = Ragged(left.ptr, left.ids, {**left.values, "row": damped.astype(np.float32)})
        vectors, private = lists["vectors"], view.private.copy()
        later = vectors.filter_entries(vectors.ids >= at)
        private[later.rows()[::-1]] = later.values["private"][::-1]  # of each the first one has the last word
        kept = {
            "private": private,
            **self._build_state_update(carried, np.full_like(since, now), vectors.filter_entries(vectors.ids < at)),
        }
        return CohortReply(Upload({}, np.ones(view.n_clients), view.client_keys), kept)

    def _build_state_update(self, carried: Ragged, since: Doubles, vectors: Ragged) -> StateUpdate:
        kept: StateUpdate = {"carried": carried, "since": since, "vectors": vectors}
        return {f"parts/{self.name}/{name}": one for name, one in kept.items()}

    # on the server

    def fields(self, server: ServerState, question: str) -> tuple[Spec, ...]:
        if question.split("/")[1] != "leave":
            return ()
        about = "what those who leave take back"
        size = Spec("bytes", (1,), least=0.0)
        return (Spec("carried", server.items.shape, most=MOST_MOVE, about=about), size)

    def server_begin_block(self, server: ServerState) -> Arrays:
        held = dict(server.parts.get(self.name, {}))
        if not held:
            kinds = (np.uint64, np.int32, np.float64)
            held = log.empty_round_log() | {
                name: np.zeros(0, kind) for name, kind in zip(_UPLOAD_COLUMNS, kinds, strict=False)
            }
            held |= {"commitment": np.zeros((0, COMMITMENT_SIZE), np.uint16), "damping": np.zeros(1)}
            held |= {"waiting": np.zeros(0, np.uint64), "mean-weight": np.zeros(1)}
        return held | _make_checkpoint(held, server)

    def own(self, server: ServerState, clients: Keys) -> tuple[ServerState, Ragged]:
        """Nothing is for single clients; the server writes down who takes part."""
        held = log.record_participants(server.parts[self.name], (server.block, server.round), clients)
        return server.with_part(self.name, held), Ragged.empty(len(clients))

    def broadcast(self, server: ServerState) -> Arrays:
        """The damping of all rounds so far and of this one, its denominator, and the segment it is in."""
        held = server.parts.get(self.name, {})
        if not held:
            return {"damping": np.zeros(4)}
        asked = int(np.diff(held["ptr"])[-1]) if len(held["rounds"]) else 0
        denominator = self.context.train.denominator or float(max(1, asked))
        segment = float(max(_list_checkpoints(held)))
        return {
            "damping": np.array(
                [held["damping"][-1], self._compute_log_damping(held, asked, denominator), denominator, segment]
            )
        }

    def _compute_log_damping(self, held: Arrays, asked: int, denominator: float) -> float:
        """The logarithm of what is left of an earlier addition after a round of so many."""
        weight = float(held["mean-weight"][0]) or 1.0
        others = self.context.train.server_lr * weight * asked / denominator
        return float(np.log(max(1e-3, 1 - self.config.alpha * others)))

    def received_fits(self, sent: Arrays, n_items: int) -> bool:
        damping = sent.get("damping")
        fits = damping is not None and damping.shape == (4,) and damping.dtype == np.float64
        return fits and sent.keys() == {"damping"}

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        held = dict(server.parts[self.name])
        step = self.broadcast(server)["damping"][1]
        number = len(held["damping"]) - 1
        held["damping"] = np.append(held["damping"], held["damping"][-1] + step)
        told = total.each.get(f"{self.name}.psi")
        if told is not None:
            psi, digest = told.value, total.each[f"{self.name}.commitment"].value
            assert isinstance(psi, DenseArrays)
            assert isinstance(digest, DenseArrays)
            order = np.argsort(told.sender)  # so that the list does not depend on where people live
            new = (told.sender[order], np.full(len(order), number, np.int32), psi.value[order, 0].astype(np.float64),
                   digest.value[order].astype(np.uint16))  # fmt: skip
            held |= {name: np.concatenate([held[name], one]) for name, one in zip(_UPLOAD_COLUMNS, new, strict=True)}
            held["mean-weight"] = np.array([total.weight / max(1, total.n_clients)])
        if (number + 1) % self.config.checkpoint_every == 0:
            held |= _make_checkpoint(held, server)
        return server.with_part(self.name, held)

    # leaving

    def handle_many(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, dict[str, Any]] | None:
        if requests.kind != "leave":
            if requests.kind == "forget" and log.asks_to_forget(requests):
                raise TacitaError(
                    "part 'retraction' lets whole people leave and does not forget single items; train with part 'fru' "
                    "for that, or in a run folder forget with --again."
                )
            return None
        held = dict(server.parts[self.name])
        waiting = np.union1d(held["waiting"], requests.senders)
        if len(waiting) < self.config.min_users and not requests.is_immediate:
            held["waiting"] = waiting
            more = self.config.min_users - len(waiting)
            return server.with_part(self.name, held), log.build_certificate(self.name, held, waits_for=more)
        held["waiting"] = np.zeros(0, np.uint64)
        server = server.with_part(self.name, held)
        if not np.isin(waiting, held["sender"]).any():
            return server, log.build_certificate(self.name, held)
        reason = self._find_refusal_reason()
        if reason is None:
            found = self._apply_retraction(server, waiting, ask)
            if found is not None:
                return found
            reason = "what came back is longer than all that was ever sent"
        return self._roll_back(server, waiting, reason, ask, play)

    def _find_refusal_reason(self) -> str | None:
        ratio = self.config.ratio
        if ratio is None:
            return "alpha was not calibrated"
        most = self.config.most_ratio
        return f"calibration left {ratio:.2f} of the distance, above {most:g}" if ratio > most else None

    def _apply_retraction(
        self, server: ServerState, leavers: Keys, ask: DeviceQuery
    ) -> tuple[ServerState, dict[str, Any]] | None:
        """Add what the leavers carried; None: it is longer than it can be."""
        held = server.parts[self.name]
        total = ask(server, f"{self.name}/leave", leavers)
        bound = float(held["psi"][np.isin(held["sender"], leavers)].sum())
        length = float(np.linalg.norm(total["carried"]))
        if length > bound * _SLACK:
            return None
        items, sigma = server.items + total["carried"], 0.0
        if self.config.epsilon is not None:
            sigma = (self.config.ratio or 0.0) * bound * gaussian_multiplier(self.config.epsilon, self.config.delta)
            items = items + sigma * self._make_noise_generator(server, leavers).normal(size=items.shape)
        server = server.with_items(np.asarray(items, np.float32))
        kept = self._drop_leavers(server, leavers)
        said = log.build_certificate(
            self.name, kept, path="retraction", alpha=self.config.alpha, ratio=self.config.ratio, leavers=len(leavers),
            psi_bound=bound, length=length, sigma=sigma, storage_client=float(total["bytes"][0]) / total.n_clients,
            purged=["checkpoints that hold them", "their participation, commitments and lengths"],
        )  # fmt: skip
        if sigma:
            said |= {"epsilon": self.config.epsilon, "delta": self.config.delta,
                     "guarantee": "bounded",
                     "assumptions": ["what is left is at most the calibrated share of what was sent",
                                     "nobody has the run's seed, which the noise follows"]}  # fmt: skip
        return server.with_part(self.name, kept), said

    def _make_noise_generator(self, server: ServerState, leavers: Keys) -> np.random.Generator:
        """Fresh for every retraction: two with the same noise, subtracted, would show what was carried."""
        who = [int(one) for one in np.sort(leavers)]
        key = self.context.draws.private("retraction", server.block, server.round, *who)
        return np.random.Generator(np.random.Philox(key=int(key)))

    def _drop_leavers(self, server: ServerState, leavers: Keys) -> Arrays:
        """What is known of the others; the table as it is now is a checkpoint, and none that holds a leaver is left."""
        held = server.parts[self.name]
        gone = np.isin(held["sender"], leavers)
        first = int(held["number"][gone].min(initial=len(held["rounds"])))
        kept = log.drop_clients(held, leavers)
        kept |= {name: held[name][~gone] for name in _UPLOAD_COLUMNS}
        kept = {k: v for k, v in kept.items() if not k.startswith("table.") or int(k.split(".")[1]) <= first}
        return kept | _make_checkpoint(kept, server)

    def _roll_back(
        self, server: ServerState, leavers: Keys, reason: str, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, dict[str, Any]]:
        """The last checkpoint that holds little enough of the leavers, and the rounds since then without them."""
        held = server.parts[self.name]
        gone = np.isin(held["sender"], leavers)
        tables = _list_checkpoints(held)
        so_far = [float(held["psi"][gone & (held["number"] < at)].sum()) for at in tables]
        at = max((t for t, psi in zip(tables, so_far, strict=True) if psi <= self.config.most_psi), default=-1)
        rounds = list(log.iterate_rounds(held))
        if at < 0 or any(moment[0] != server.block for moment, _ in rounds[at:]):
            raise TacitaError(
                "part 'retraction' cannot go back to before these people took part, in an earlier block; in a run "
                "folder forget with --again."
            )
        table, *heads = (held[f"table.{at:06d}{name}"] for name in ("", *(f".{one}" for one in server.heads)))
        early = self._truncate_state(server, leavers, at)
        server = replace(server, items=table, heads=dict(zip(server.heads, heads, strict=True)))
        server = server.with_part(self.name, early)
        stay = np.unique(held["clients"][~np.isin(held["clients"], leavers)])
        ask(server, f"{self.name}/gone", leavers)
        if len(stay):
            ask(server, f"{self.name}/back-{at}", stay)
        for moment, clients in rounds[at:]:
            others = clients[~np.isin(clients, leavers)]
            if len(others):
                server = play(server, others, RoundReplay(moment[1]))
        said = log.build_certificate(
            self.name, server.parts[self.name], path="checkpoint", reason=reason, from_round=at, leavers=len(leavers),
            alpha=self.config.alpha, ratio=self.config.ratio,
            purged=["later checkpoints", "their participation, commitments and lengths"],
        )  # fmt: skip
        return server, said

    def _truncate_state(self, server: ServerState, leavers: Keys, at: int) -> Arrays:
        """What was known after some rounds, without the leavers."""
        held = server.parts[self.name]
        kept = log.drop_clients(held, leavers)
        noted = ~np.isin(held["sender"], leavers) & (held["number"] < at)
        kept |= {name: held[name][noted] for name in _UPLOAD_COLUMNS}
        kept |= {"rounds": kept["rounds"][:at], "ptr": kept["ptr"][: at + 1], "damping": held["damping"][: at + 1]}
        kept["clients"] = kept["clients"][: kept["ptr"][-1]]
        return {k: v for k, v in kept.items() if not k.startswith("table.") or int(k.split(".")[1]) <= at}


def _list_checkpoints(held: Arrays) -> list[int]:
    """After how many rounds there is a checkpoint."""
    return sorted({int(name.split(".")[1]) for name in held if name.startswith("table.")})


def _make_checkpoint(held: Arrays, server: ServerState) -> Arrays:
    """The model after so many rounds."""
    at = f"table.{len(held['damping']) - 1:06d}"
    items: Floats = server.items
    return {at: items} | {f"{at}.{name}": v for name, v in server.heads.items()}


register_preset(
    "retraction", {"name": "withdrawal"}, {"name": "retraction"}, settings={"train": {"aggregation": "fixed"}}
)
