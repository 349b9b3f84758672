"""A run: from a config to a folder with numbers, models and events, resumable after a kill at any moment.

The folder holds config.toml, events.jsonl, result.json, server.safetensors, clients.safetensors, ids.json and
report.html. While it trains, checkpoint.safetensors holds where it stands; rounds are deterministic, so going on
from any checkpoint gives the numbers of an unbroken run.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import tacita
from tacita.core.config import RunConfig, read_toml, to_toml, validated
from tacita.core.draws import Draws, keys_of
from tacita.core.errors import TacitaError
from tacita.core.files import (
    Lines,
    alone_in,
    clear_sides,
    disk_error,
    read_arrays,
    read_json,
    side_of,
    write_arrays,
    write_bytes,
    write_json,
)
from tacita.core.types import Arrays, Block, Floats, Ints, Ragged, Stream
from tacita.data.sources import load
from tacita.data.splits import effective_split, split
from tacita.federation.measuring import selecting_metric
from tacita.federation.rounds import Progress, RoundReport, run_stream, start
from tacita.federation.scoring import DeviceScorer
from tacita.federation.state_arrays import (
    progress_arrays,
    read_progress,
    read_server,
    server_arrays,
    server_note,
)
from tacita.kernels.ranking import best_items
from tacita.kernels.threads import most_threads, set_threads
from tacita.lab.controls import CONTROLS, mean_of, run_controls
from tacita.methods import Part, World, build_parts, effective_parts
from tacita.metrics import continual_summary
from tacita.models import backbone_class
from tacita.models.base import Backbone
from tacita.report.data import method_name, refuse_changed
from tacita.round.device_state import device_pieces, read_devices
from tacita.round.learner import learner_of
from tacita.round.plan import Federation, Plan, to_serve

UNFINISHED = "unfinished"  # says in result.json what a run still has to do
CHECKPOINT_SECONDS = 10.0  # at least this long between two checkpoints
CHECKPOINT_SHARE = 0.05  # of the time, at most, goes into writing them


@dataclass(frozen=True)
class Machine:
    """How to run, as opposed to what: none of this can change a result."""

    threads: int = 0  # 0: all cores
    chunk: int = 256
    data_dir: Path | None = None


@dataclass(frozen=True)
class Watcher:
    """Who wants to know how a run is going."""

    on_start: Callable[[Federation, Progress], None] = lambda fed, progress: None
    on_round: Callable[[RoundReport], None] = lambda report: None
    on_controls: Callable[[Federation], None] = lambda fed: None  # the run is trained, its controls begin
    on_control: Callable[[str, int], None] = lambda name, block: None


ALL_CORES, NOBODY = Machine(), Watcher()


def use_threads(threads: int) -> None:
    most = most_threads()
    if threads < 0 or threads > most:
        raise TacitaError(f"--threads {threads}: this machine offers 1 to {most}, or 0 for all.")
    set_threads(threads or most)


def assemble(config: RunConfig, machine: Machine) -> Federation:
    """Load, split and check everything, so that bad input is refused before anything is written."""
    backbone, parts, draws = build(config)
    check_settings(config, backbone)
    use_threads(machine.threads)
    table = load(
        config.data,
        data_dir=machine.data_dir,
        columns=config.columns or None,
        date_format=config.date_format,
        decimal=config.decimal,
    )
    config = effective(config.model_copy(update={"split": effective_split(table, config.split)}), backbone, parts)
    stream = split(table, config.split)
    smallest = stream.blocks[0].n_items
    check_cutoffs(config, smallest)
    backbone.check(smallest, stream.n_items)
    for part in parts:
        part.check(smallest)
    return Federation(backbone, parts, config, draws, machine.chunk, stream=stream)


def effective(config: RunConfig, backbone: Backbone, parts: tuple[Part, ...]) -> RunConfig:
    """The same run with the value of every setting of its model and parts written out."""
    model = {"name": backbone.name, **backbone.config.model_dump(mode="json", exclude_none=True)}
    listed = [{"name": p.name, **p.config.model_dump(mode="json", exclude_none=True)} for p in parts]
    return config.model_copy(update={"backbone": model, "parts": listed})


def build(config: RunConfig, secret: str = "") -> tuple[Backbone, tuple[Part, ...], Draws]:
    """Model and parts; `secret` is what a device adds to the seed of draws that protect its people."""
    options = dict(config.backbone)
    name = options.pop("name", "mf")
    if not isinstance(name, str):
        raise TacitaError("backbone.name must be a name such as 'mf'.")
    cls = backbone_class(name)
    backbone = cls(validated(cls.Config, options, f"backbone '{name}'"))
    draws = Draws(config.seed, secret)
    specs = effective_parts(config.method, config.parts)
    world = World(backbone, draws, config.train)
    parts = build_parts(specs, world)
    learner_of(world, parts).check()
    return backbone, parts, draws


def planned(config: RunConfig, secret: str = "") -> Plan:
    """What everybody may know of a run, and, with a secret, draws that only a device knows."""
    backbone, parts, draws = build(config, secret)
    return Plan(backbone, parts, config, draws)


def check_settings(config: RunConfig, backbone: Backbone) -> None:
    """Refuse what cannot be trained on any data."""
    plan = config.train
    selecting_metric(config)
    if config.evaluate.item_table == "personal" and (
        plan.silos or backbone.learner != "rows" or plan.participation.kind != "all"
    ):
        raise TacitaError(
            "evaluate.item_table = 'personal' is for users who are clients, train item rows and take part in every "
            f"round; use 'global' with train.silos = {plan.silos}, train.participation.kind = "
            f"'{plan.participation.kind}' and backbone '{backbone.name}'."
        )
    if config.evaluate.mask == "history" and config.evaluate.old_block_mask == "current":
        raise TacitaError(
            "evaluate.old_block_mask = 'current' with evaluate.mask = 'history' would hide an old block's own test "
            "items; use 'own'."
        )


def check_cutoffs(config: RunConfig, n_items: int) -> None:
    asked = {f"evaluate.k = {k}": k for k in config.evaluate.k}
    asked[f"evaluate.select_by = '{config.evaluate.select_by}'"] = selecting_metric(config)[1]
    for setting, k in asked.items():
        if k < 1:
            raise TacitaError(f"{setting} makes no sense; a cut-off is a number from 1.")
        if k > n_items:
            fits = max(1, n_items // 2)
            raise TacitaError(
                f"{setting} is larger than the catalogue of {n_items} items; try --set evaluate.k=[{fits}] "
                f"--set evaluate.select_by=ndcg@{fits}."
            )


def train(config: RunConfig, out: Path, machine: Machine = ALL_CORES, watcher: Watcher = NOBODY) -> Run:
    """A new run in a new folder; what fails before its first round leaves no folder."""
    if out.exists() or out.is_symlink():
        begun = (out / "config.toml").is_file()
        told = "exists; go on with --resume, or" if begun else "exists and holds no run;"
        raise TacitaError(f"{out} {told} choose another --out.")
    fed = assemble(config, machine)
    _make_folder(out, fed.config, fed.stream)
    with alone_in(out):
        try:
            _train_to_end(fed, start(fed), out, watcher)
        except (TacitaError, MemoryError):
            events = out / "events.jsonl"
            if not events.is_file() or events.stat().st_size == 0:
                shutil.rmtree(out, ignore_errors=True)
            raise
        return _with_controls(fed, out, watcher)


def _make_folder(out: Path, config: RunConfig, stream: Stream) -> None:
    """A run folder appears whole, with its config and ids, or not at all."""
    side, settings = side_of(out), to_toml(config).encode()
    try:
        side.mkdir(parents=True)
        write_bytes(side / "config.toml", settings)
        write_json(side / "ids.json", {**_ids(stream), "settings": hashlib.sha256(settings).hexdigest()})
        side.rename(out)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY) and out.exists():
            raise TacitaError(f"another process has just made {out}; choose another --out.") from None
        raise disk_error(out, error) from None
    finally:
        shutil.rmtree(side, ignore_errors=True)


def free_folder(config: RunConfig) -> Path:
    """A new name under runs/ that says what is in it."""
    data = Path(config.data.partition(":")[0]).stem
    backbone = str(config.backbone.get("name", "mf"))
    named = dict.fromkeys([backbone, method_name(backbone, config.method, None)])
    stem = "-".join([data, *named, str(config.seed)])
    for n in range(1, 10_000):
        path = Path("runs") / (stem if n == 1 else f"{stem}-{n}")
        if not path.exists():
            return path
    raise TacitaError("runs/ holds ten thousand runs of this name; choose one with --out.")


def is_finished(out: Path) -> bool:
    return (out / "result.json").is_file() and UNFINISHED not in open_run(out).result


def resume(
    out: Path,
    machine: Machine = ALL_CORES,
    watcher: Watcher = NOBODY,
    controls: bool = True,
) -> Run:
    """Go on with a run that was interrupted; a finished one is simply opened.

    A run that was only killed in its controls does not train again; without `controls` it ends without the rest.
    """
    if not (out / "config.toml").is_file() or not (out / "ids.json").is_file():
        remedy = "leave out --resume and choose another --out" if out.exists() else "leave out --resume"
        raise TacitaError(f"{out} holds no run to go on with; {remedy} to start one.")
    saved = out / "checkpoint.safetensors"
    with alone_in(out):
        clear_sides(out)
        if is_finished(out):
            return _published(out)
        config, ids = _read_config(out), _read_ids(out)
        if "settings" not in ids:
            raise TacitaError(f"{out} was begun by an earlier version of tacita; start a new run with this one.")
        fed = assemble(config, machine)
        if ids["fingerprint"] != fed.stream.fingerprint:
            raise TacitaError(f"{out} was trained on other data than '{config.data}' holds now; start a new run.")
        if not (out / "result.json").is_file():
            progress = _read_checkpoint(saved, config) if saved.is_file() else start(fed)
            spent = _trim_events(out / "events.jsonl", progress)
            _train_to_end(fed, progress, out, watcher, spent)
        return _with_controls(fed, out, watcher, controls)


def _train_to_end(fed: Federation, progress: Progress, out: Path, watcher: Watcher, spent: float = 0.0) -> None:
    """All rounds, then models and numbers on disk: what comes after cannot lose them."""
    watcher.on_start(fed, progress)
    began = time.monotonic() - spent
    due = time.monotonic() + CHECKPOINT_SECONDS
    with Lines(out / "events.jsonl") as events:

        def on_round(report: RoundReport, now: Progress) -> None:
            nonlocal due
            ended = time.monotonic()
            events.add({**asdict(report), "seconds": round(ended - began, 3)})
            if ended >= due:
                events.sync()
                arrays, note = progress_arrays(now)
                note["config"] = fed.config.model_dump_json()
                write_arrays(out / "checkpoint.safetensors", arrays, note)
                cost = time.monotonic() - ended
                due = ended + cost + max(CHECKPOINT_SECONDS, cost / CHECKPOINT_SHARE)
            watcher.on_round(report)

        run_stream(fed, progress, on_round)
    _write_models(fed, progress, out)
    pending = {UNFINISHED: "controls"} if fed.config.evaluate.controls else {}
    write_json(out / "result.json", {**_result(fed, progress), **pending})
    (out / "checkpoint.safetensors").unlink(missing_ok=True)


def _with_controls(fed: Federation, out: Path, watcher: Watcher, wanted: bool = True) -> Run:
    """The controls that are still missing, each on disk as soon as it is there."""
    result = open_run(out).result
    if result.pop(UNFINISHED, None):
        (out / "report.html").unlink(missing_ok=True)  # somebody may have looked before the controls were there
        if wanted:
            watcher.on_controls(fed)
            try:
                for name, found in run_controls(fed, watcher.on_control, without=tuple(result["controls"])):
                    result["controls"][name] = found
                    write_json(out / "result.json", {**result, UNFINISHED: "controls"})
            except MemoryError:
                raise TacitaError(
                    f"not enough memory for a control; the run itself is in {out}: end it without the rest with "
                    f"`tacita train --out {out} --resume --no-controls`."
                ) from None
        result["controls"] = {name: {"skipped": "switched off"} for name in CONTROLS} | result["controls"]
        write_json(out / "result.json", result)
    return _published(out)


def save_run(fed: Federation, progress: Progress, out: Path) -> None:
    """A run that was trained elsewhere (a trial) as a finished folder, without controls."""
    if out.exists():
        return
    _make_folder(out, fed.config, fed.stream)
    write_bytes(out / "events.jsonl", b"")
    _write_models(fed, progress, out)
    write_json(out / "result.json", _result(fed, progress))


def _published(out: Path) -> Run:
    """A finished run with its report and without its checkpoint, even if it was killed after its last round."""
    from tacita.report.pages import write_report

    run = open_run(out)
    if not (out / "report.html").is_file():
        write_report([out], out / "report.html")
    if (out / "checkpoint.safetensors").is_file():
        (out / "checkpoint.safetensors").unlink()
    return run


def _result(fed: Federation, progress: Progress) -> dict[str, Any]:
    blocks = progress.results
    kept = continual_summary([b["on_blocks"] for b in blocks], [b["users"] for b in blocks])
    return {
        "tacita": tacita.__version__,
        "config": fed.config.model_dump(mode="json"),
        "data": {
            "name": fed.stream.name,
            "fingerprint": fed.stream.fingerprint,
            "users": fed.stream.n_users,
            "items": fed.stream.n_items,
            "removed": [asdict(one) for one in fed.stream.removed],
            "notes": list(fed.stream.notes),
        },
        "blocks": blocks,
        "mean": mean_of(blocks),
        "continual": {name: None if math.isnan(value) else value for name, value in kept.items()},
        "controls": {},
        "bytes": {
            "up_per_client_and_round": float(np.mean([b["bytes_up"] for b in blocks])),
            "down_per_client_and_round": float(np.mean([b["bytes_down"] for b in blocks])),
        },
    }


def _ids(stream: Stream) -> dict[str, Any]:
    return {
        "data": stream.name,
        "fingerprint": stream.fingerprint,
        "users": list(stream.user_ids),
        "items": list(stream.item_ids),
        "titles": {i: stream.titles[i] for i in stream.item_ids if i in stream.titles},
    }


def _write_models(fed: Federation, progress: Progress, out: Path) -> None:
    """What each side holds at the end, kept apart; the devices' file includes their own histories."""
    server, clients = progress.server, progress.clients
    origin = {"config": fed.config.model_dump_json(), "fingerprint": fed.stream.fingerprint}
    write_arrays(out / "server.safetensors", server_arrays(server), {**server_note(server), **origin})
    history = fed.stream.history(len(fed.stream.blocks))
    last = fed.stream.blocks[-1].train
    lists: Arrays = {
        "history/ptr": history.ptr,
        "history/ids": history.ids,
        "current/ptr": last.ptr,
        "current/ids": last.ids,
    }
    if fed.backbone.reads_history:  # it scores what was done in earlier blocks, too
        past = fed.stream.history(len(fed.stream.blocks) - 1)
        lists |= {"past/ptr": past.ptr, "past/ids": past.ids}
        for block in fed.stream.blocks:
            lists |= {f"told/{block.index}/ptr": block.train.ptr, f"told/{block.index}/ids": block.train.ids}
    write_arrays(out / "clients.safetensors", {**device_pieces(clients, ""), **lists}, origin)


def _read_checkpoint(path: Path, config: RunConfig) -> Progress:
    arrays, note = read_arrays(path, "delete it to train this run again from its first round")
    if not _made_with(note, config):
        raise TacitaError(f"{path.parent / 'config.toml'} was changed after the run began; start a new run instead.")
    return read_progress(arrays, note)


def _made_with(note: dict[str, str], config: RunConfig) -> bool:
    """Whether a file was written under these settings; settings it does not know have their defaults."""
    return validated(RunConfig, json.loads(note["config"]), "the settings of the run") == config


def _trim_events(path: Path, progress: Progress) -> float:
    """Forget events after the checkpoint, whose rounds are about to be run again; returns the time spent before."""
    if not path.is_file():
        return 0.0
    reached = (progress.server.block, progress.server.round) if progress.in_block else (len(progress.results), 0)
    kept, spent = [], 0.0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
            if (event["block"], event["round"]) <= reached:
                kept.append(line + "\n")
                spent = float(event["seconds"])
        except (ValueError, TypeError, LookupError):
            break  # the line that was being written when the run was killed
    write_bytes(path, "".join(kept).encode())
    return spent


@dataclass(frozen=True)
class Run:
    """A finished run: its numbers, and recommendations from what its devices hold."""

    folder: Path
    config: RunConfig
    result: dict[str, Any]

    def recommend(self, user: str | int, k: int = 10, exclude_seen: bool = True) -> list[dict[str, Any]]:
        """Top k for a raw user id: [{item, title, score, basis}], best first."""
        return recommend(self.folder, [str(user)], k, exclude_seen)[str(user)]


def open_run(folder: Path) -> Run:
    if not folder.is_dir():
        raise TacitaError(f"no run folder {folder}; `tacita train --out {folder}` makes one.")
    if not (folder / "config.toml").is_file():
        raise TacitaError(f"{folder} is not a run folder: it has no config.toml.")
    if not (folder / "result.json").is_file():
        raise TacitaError(f"{folder} is not finished; go on with `tacita train --out {folder} --resume`.")
    result = read_json(folder / "result.json")
    if not isinstance(result, dict) or not {"data", "blocks", "mean", "controls", "bytes"} <= result.keys():
        raise TacitaError(f"{folder / 'result.json'} is damaged: not the result of a run; train again.")
    return Run(folder, _read_config(folder), result)


def _read_config(folder: Path) -> RunConfig:
    path = folder / "config.toml"
    refuse_changed(path, _read_ids(folder).get("settings"))
    return validated(RunConfig, read_toml(path), str(path))


def _read_ids(folder: Path) -> dict[str, Any]:
    ids = read_json(folder / "ids.json")
    kinds = {"fingerprint": str, "users": list, "items": list, "titles": dict}
    if not isinstance(ids, dict) or any(not isinstance(ids.get(name), kind) for name, kind in kinds.items()):
        raise TacitaError(f"{folder / 'ids.json'} is damaged: not the ids of a run; train again.")
    return ids


@dataclass(frozen=True)
class Saved:
    """The models of a finished run: ids, and what each side holds with its note."""

    run: Run
    ids: dict[str, Any]
    served: Arrays
    note: dict[str, str]
    held: Arrays
    origin: dict[str, str]

    def numbers(self, users: list[str]) -> Ints:
        """The rows of raw user ids."""
        number = {raw: n for n, raw in enumerate(self.ids["users"])}
        missing = [u for u in users if u not in number]
        if missing:
            raise TacitaError(
                f"user '{missing[0]}' is not in {self.run.folder}; its {len(number):,} users have ids such as "
                f"'{self.ids['users'][0]}' (see ids.json)."
            )
        return np.array([number[u] for u in users], np.int32)


def open_saved(folder: Path) -> Saved:
    run, ids = open_run(folder), _read_ids(folder)
    (served, note), (held, origin) = (read_arrays(folder / f"{side}.safetensors") for side in ("server", "clients"))
    for name, made in (("server", note), ("clients", origin)):
        if made["fingerprint"] != ids["fingerprint"] or not _made_with(made, run.config):
            raise TacitaError(
                f"{folder / name}.safetensors belongs to another dataset or run than the ids.json and config.toml "
                "beside it; train again."
            )
    return Saved(run, ids, served, note, held, origin)


def lists_of(held: Arrays, name: str) -> Ragged:
    """One of the lists that devices hold, per user."""
    return Ragged(held[f"{name}/ptr"], held[f"{name}/ids"])


def recommend(
    folder: Path, users: list[str], k: int = 10, exclude_seen: bool = True
) -> dict[str, list[dict[str, Any]]]:
    """Top k items for raw user ids, scored as their own devices would, or popular ones where nothing is known."""
    saved = open_saved(folder)
    chosen, ids = saved.numbers(users), saved.ids
    if not 1 <= k <= len(ids["items"]):
        raise TacitaError(f"cannot recommend {k} items; choose from 1 to the {len(ids['items']):,} there are.")
    scores = serve(saved, chosen)
    hidden, seen = np.zeros(scores.shape, bool), lists_of(saved.held, "history").take(chosen)
    hidden[seen.rows(), seen.ids] = exclude_seen
    unknown = ~((scores != 0) & ~hidden).any(axis=1)  # nobody's zeros are a taste: those people get what is popular
    if unknown.any():
        scores[unknown] = build(saved.run.config)[0].popularity(read_server(saved.served, saved.note))
    scores[hidden] = -np.inf
    top, top_scores = best_items(scores, k)
    out = {}
    for row, user in enumerate(users):
        basis = "popularity" if unknown[row] else "history"
        found = [(ids["items"][i], float(s)) for i, s in zip(top[row], top_scores[row], strict=True) if np.isfinite(s)]
        out[user] = [{"item": i, "title": ids["titles"].get(i, ""), "score": s, "basis": basis} for i, s in found]
    return out


def serve(saved: Saved, users: Ints) -> Floats:
    """Scores of the given users from saved state alone, without the dataset."""
    config, held = saved.run.config, saved.held
    plan, server = planned(config), read_server(saved.served, saved.note)
    clients = read_devices(held, "")
    current = lists_of(held, "current")
    n, none = clients.n_users, Ragged.empty(clients.n_users)
    block = Block(server.block, n, len(server.items), current, none, none, np.zeros(n, bool), len(current.ids))
    keys = keys_of(saved.ids["users"])
    past = lists_of(held, "past") if "past/ptr" in held else None
    return DeviceScorer(plan, server, clients, block, keys, to_serve(plan, server), "serve", past)(users)
