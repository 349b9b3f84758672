"""The door of a finished run: what people ask for is carried out on its saved state, and the folder is written anew.

The folder is opened as a resume opens it, with the histories that its devices still have. The request goes the way of
every request (federation/requests.py). Then what was withdrawn leaves every list that devices keep, the run is tested
again, and new files replace the old ones together: a kill leaves the folder as it was, or as it is then.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.files import alone_in, clear_sides, write_json
from tacita.core.types import Keys, Ragged, Stream
from tacita.federation.devices import Here
from tacita.federation.measuring import Learned, block_scores
from tacita.federation.requests import handle
from tacita.federation.rounds import Progress, end_block
from tacita.lab.artefacts import find_traces, needles_of
from tacita.lab.assembling import ALL_CORES, Machine, assemble
from tacita.lab.calibration import calibrated
from tacita.lab.controls import mean_of
from tacita.lab.forgetting.anew import Price, begun_anew, certified, noted, shared_by, shares_of
from tacita.lab.forgetting.certificate import Case, certify
from tacita.lab.forgetting.paths import AGAIN, REMEDY, Shares, Way, check_kind, way_of
from tacita.lab.forgetting.proof import Done, Proof, prove, waiting_in
from tacita.lab.forgetting.pseudonyms import certificates, key_of, new_key, number_of, pseudonym, unfinished
from tacita.lab.forgetting.wishes import Asked, Standing, Wish, checked, nothing_to_do
from tacita.lab.ledger import accounts_of, paid, spread
from tacita.lab.loaded import server_of
from tacita.lab.run_folder import Saved, changing, lists_of, open_saved, read_result, settle, write_models
from tacita.metrics import continual_summary
from tacita.report.pages import write_report
from tacita.report.promises import SAID, privacy_lines
from tacita.round.device_state import PARTS, DeviceState, apart, read_devices
from tacita.round.plan import Federation


@dataclass(frozen=True)
class Granted:
    """What came of a wish."""

    said: str  # which way it went and why, or why nothing changed
    certificate: dict[str, Any] | None = None  # None: nothing was withdrawn
    path: Path | None = None  # where the certificate is
    n_items: int = 0  # that it was about
    n_people: int = 0  # who asked
    paid: str = ""  # what it cost their budgets, in words


@dataclass
class Opened:
    """A finished run that goes on: its people with what they still have, and where it stands."""

    saved: Saved
    fed: Federation
    progress: Progress

    @property
    def waiting(self) -> Keys:
        """Who asked to take something back and waits for others."""
        held = self.progress.server.parts.values()
        found = [part[name] for part in held for name in ("asked", "waiting") if name in part]
        return np.concatenate([np.zeros(0, np.uint64), *found])

    def standing(self) -> Standing:
        stream = self.fed.stream
        own = lists_of(self.saved.held, "history"), stream.trained(len(stream.blocks) - 1)
        return Standing(self.saved, stream.user_keys, *own, self.shares.shared, self.waiting, self.rest)

    @property
    def rest(self) -> frozenset[str]:
        """Who had something forgotten of which the certificate says that some stayed in the model."""
        key, named = key_of(self.saved.folder), unfinished(self.saved.folder)
        if key is None or not named:
            return frozenset()
        return frozenset(user for user in self.saved.ids["users"] if pseudonym(key, user) in named)

    @property
    def shares(self) -> Shares:
        """(users) What people share."""
        return shares_of(self.fed, Learned(self.progress.server, self.progress.clients))

    @property
    def shared(self) -> Ragged:
        return self.shares.shared

    def way_of(self, asked: Asked, again: bool = False) -> Way:
        """Which way a request goes."""
        return way_of(self.fed, asked, self.shares.take(asked.users), again)


def grant(folder: Path, wish: Wish, verify: bool = False, machine: Machine = ALL_CORES) -> Granted:
    """Carry out what people ask of a run folder."""
    began = time.perf_counter()
    read_result(folder)  # what is no finished run is refused before anybody is kept out of it
    with alone_in(folder):
        clear_sides(folder)
        settle(folder)
        run = opened(folder, machine)
        check_kind(run.fed, wish.kind)
        asked = checked(wish, run.standing())
        if asked.empty:
            return Granted(nothing_to_do(wish, run.standing()))
        done = carried_out(run.fed, run.progress, asked, run.way_of(asked, wish.again))
        proof = None
        if verify and wish.kind != "share" and not done.waits:
            proof = prove(done)
        return _written(run.saved, done, proof, began)


def opened(folder: Path, machine: Machine = ALL_CORES) -> Opened:
    """A finished run as it would go on."""
    saved = open_saved(folder)
    fed = assemble(saved.config, machine)
    if saved.ids["fingerprint"] != fed.stream.fingerprint:
        raise TacitaError(
            f"{folder} was trained on other data than '{saved.config.data}' holds now; restore it, or train again."
        )
    fed = replace(calibrated(fed, folder), stream=left_of(fed.stream, lists_of(saved.held, "history")))
    server, clients = server_of(saved, fed.backbone), read_devices(saved.held, "")
    clients.lasting = fed.lasting
    clients.keep()
    results = read_result(folder)["blocks"]
    return Opened(saved, fed, Progress(server, Here(clients), server, in_block=True, results=results))


def left_of(stream: Stream, history: Ragged) -> Stream:
    """The stream without what people do not have any more."""

    def kept(lists: Ragged) -> Ragged:
        stays = history.holds(lists.rows(), lists.ids)
        return lists if stays.all() else lists.where(stays)

    blocks = tuple(
        replace(block, train=kept(block.train), valid=kept(block.valid), test=kept(block.test))
        for block in stream.blocks
    )
    return replace(stream, blocks=blocks)


def carried_out(fed: Federation, progress: Progress, asked: Asked, way: Way) -> Done:
    """The request on the run's state; what was withdrawn is nowhere on the devices then."""
    before, results = progress.server, progress.results
    was = Learned(before, apart(progress.clients))
    began, busy = time.perf_counter(), time.process_time()
    if way.anew:
        return _anew(fed, progress, asked, way, was)
    said = handle(fed, progress, asked.requests)
    seconds, busy = time.perf_counter() - began, time.process_time() - busy
    _check_done(fed, asked, said)
    gone, left = _left(fed, progress.clients, asked)
    changed = progress.server.items is not before.items or progress.server.heads is not before.heads
    if changed:
        progress.results = results[:-1]
        end_block(left, progress)  # what parts keep of a block's end is made of the new model, too
        scores = {name: v for name, v in progress.results[-1].items() if name not in _TRAINED}
    else:
        progress.clients.keep()
        scores, _ = block_scores(left, progress.server, progress.clients)
    progress.results = [*results[:-1], {**results[-1], **scores}]
    needed = tuple(f"{PARTS}{name}/" for name in {fed.learner.name} | waiting_in(said))
    purge(fed, progress.clients, gone, asked, {name for name in progress.clients.lists if name.startswith(needed)})
    now = Learned(progress.server, progress.clients)
    return Done(fed, left, asked, way, gone, said, was, now, seconds, busy, progress.results)


def _anew(fed: Federation, progress: Progress, asked: Asked, way: Way, was: Learned) -> Done:
    """The request noted by whom it concerns, and the run once more without what is withdrawn."""
    began, busy = time.perf_counter(), time.process_time()
    purged = noted(fed, progress, asked)
    gone, left = _left(fed, progress.clients, asked)
    now, price = Learned(progress.server, progress.clients), Price()
    made = begun_anew(left, shared_by(fed, now), None, now, price)
    seconds, busy = time.perf_counter() - began, time.process_time() - busy
    purge(fed, made.clients, gone, asked, {name for name in made.clients.lists if name not in fed.lasting})
    said = {AGAIN: certified(price, purged, exact=not way.leaves)}
    after = Learned(made.server, made.clients)
    return Done(fed, left, asked, way, gone, said, was, after, seconds, busy, made.results)


def _left(fed: Federation, clients: DeviceState, asked: Asked) -> tuple[Ragged, Federation]:
    """Per user what is nobody's any more, and the run without it."""
    gone, history = _withdrawn(clients, asked, fed), fed.stream.history(len(fed.stream.blocks))
    stays = history.where(~gone.holds(history.rows(), history.ids))
    return gone, replace(fed, stream=left_of(fed.stream, stays))


_TRAINED = ("rounds", "best_round", "valid", "valid_served", "bytes_up", "bytes_down")
"""What a block's result says of its training."""


def _withdrawn(clients: DeviceState, asked: Asked, fed: Federation) -> Ragged:
    """Per user, what is nobody's any more: what is to be forgotten, and what parts dropped for good."""
    none = np.zeros(0, np.int32)
    rows, ids = [none], [none]
    if asked.requests.kind in ("forget", "leave"):
        rows, ids = [asked.users[asked.items.rows()]], [asked.items.ids]
    for name in clients.lists:
        if name.endswith("/gone"):
            found = clients.list_of(name, asked.users)
            rows.append(asked.users[found.rows()])
            ids.append(found.ids)
    return Ragged.from_pairs(np.concatenate(rows), np.concatenate(ids), fed.stream.n_users)


def _check_done(fed: Federation, asked: Asked, said: dict[str, Any]) -> None:
    """Refuse what every part let pass; nothing is written yet."""
    able = {part.name for part in fed.parts if part.takes_back} | {fed.learner.name}
    if asked.requests.kind != "share" and not able & said.keys():
        named = ", ".join(sorted(able))
        raise TacitaError(f"none of {named} carries out '{asked.requests.kind}' in this run; {REMEDY}.")


def purge(fed: Federation, clients: DeviceState, gone: Ragged, asked: Asked, spared: set[str]) -> None:
    """Take what is withdrawn out of every list that the devices of these people keep; who leaves keeps nothing.

    `spared`: lists that are still needed to take something back later, or that never held it.
    """
    users = asked.users
    mine = gone.take(users)
    for name in clients.lists.keys() - spared:
        found = clients.list_of(name, users)
        stays = ~mine.holds(found.rows(), found.ids) if not asked.whole else np.zeros(len(found.ids), bool)
        if not stays.all():
            clients.put(users, {name: found.where(stays)})
    if asked.whole:
        clients.put(users, {"private": np.zeros_like(clients.private[users])})
        for part in fed.parts:  # as before one's first block, but for what lasts
            waits = any(name.startswith(f"{PARTS}{part.name}/") for name in spared)
            kept = {} if waits else part.device_arrays(len(users))
            blank = {k: v for k, v in kept.items() if not isinstance(v, Ragged) and k not in part.lasting}
            clients.put(users, {f"{PARTS}{part.name}/{name}": v for name, v in blank.items()})
    clients.keep()


def _written(saved: Saved, done: Done, proof: Proof | None, began: float) -> Granted:
    """New files in place of the old ones, all of them or none."""
    folder, asked = saved.folder, done.asked
    progress = Progress(done.now.server, Here(done.now.clients), done.now.server)
    certificate = path = None
    with changing(folder) as side:
        write_models(done.left, progress, side)
        write_json(side / "result.json", _result(folder, done))
        if asked.requests.kind != "share":
            number = 1 + max((number_of(one) for one in certificates(folder)), default=0)
            name = f"{'unshare' if asked.requests.kind == 'unshare' else 'forget'}-{number}.json"
            leavers = asked.users if asked.whole else asked.users[:0]
            needles = needles_of(saved, done.gone, done.withdrawn, leavers, done.was)
            needles = replace(needles, lasting=done.fed.lasting if done.way.anew else None)
            traces = find_traces(side, needles, besides=folder)
            key = key_of(folder) or new_key(side)
            certificate = certify(Case(saved, done, proof, traces, number, time.perf_counter() - began, key))
            path = folder / name
            write_json(side / name, certificate)
    write_report([folder], folder / "report.html")
    before, after = done.was.clients.parts, done.now.clients.parts
    cost = paid((*done.fed.parts, done.fed.learner), before, after, asked.users)
    return Granted(done.way.why, certificate, path, len(asked.items.ids), len(asked.users), cost)


def _result(folder: Path, done: Done) -> dict[str, Any]:
    """The numbers of the run with the last block measured again."""
    result, blocks = read_result(folder), done.results
    kept = continual_summary([b["on_blocks"] for b in blocks], [b["users"] for b in blocks])
    counted = accounts_of((*done.fed.parts, done.fed.learner), done.now.clients.parts)
    result |= {
        **({} if counted is None else {"privacy": spread(*counted)}),
        "blocks": blocks,
        "mean": mean_of(blocks),
        "continual": {name: None if np.isnan(value) else value for name, value in kept.items()},
        "requests": result.get("requests", 0) + 1,
    }
    return {**result, SAID: privacy_lines(done.fed.config, result)}
