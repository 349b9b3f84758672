"""A run folder on disk: made whole or not at all, and read back with every doubt about it said in one sentence.

It holds config.toml, events.jsonl, result.json, server.safetensors, clients.safetensors, ids.json and report.html.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tacita.core.config import RunConfig, read_toml, to_toml, validate_model
from tacita.core.errors import TacitaError
from tacita.core.files import disk_error, read_arrays, read_json, temporary_path, write_arrays, write_bytes, write_json
from tacita.core.types import Arrays, BlockStream, Ints, Ragged
from tacita.federation.rounds import Progress
from tacita.federation.state_arrays import pack_server, server_note
from tacita.report.data import damaged_ids_error, method_name, missing_run_error, refuse_changed
from tacita.round.device_state import stream_devices

from tacita.round.plan import Federation
from tacita.runs.file_schemas import are_ids, is_result

UNFINISHED = "unfinished"  # says in result.json what a run still has to do


def find_free_folder(config: RunConfig) -> Path:
    """A new name under runs/ that says what is in it."""
    data = Path(config.data.partition(":")[0]).stem
    backbone = str(config.backbone.get("name", "mf"))
    named = dict.fromkeys([backbone, method_name(backbone, config.method, None)])
    return find_free_name("-".join([data, *named, str(config.seed)]))


def find_free_name(stem: str) -> Path:
    """A new name under runs/."""
    for n in range(1, 10_000):
        path = Path("runs") / (stem if n == 1 else f"{stem}-{n}")
        if not path.exists():
            return path
    raise TacitaError("runs/ holds ten thousand runs of this name; choose one with --out.")


def make_folder(out: Path, config: RunConfig, stream: BlockStream) -> None:
    """A run folder appears whole, with its config and ids, or not at all."""
    side, settings = temporary_path(out), to_toml(config).encode()
    try:
        side.mkdir(parents=True)
        write_bytes(side / "config.toml", settings)
        write_json(side / "ids.json", {**_build_ids(stream), "settings": hashlib.sha256(settings).hexdigest()})
        side.rename(out)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY) and out.exists():
            raise TacitaError(f"another process has just made {out}; choose another --out.") from None
        raise disk_error(out, error) from None
    finally:
        shutil.rmtree(side, ignore_errors=True)


def _build_ids(stream: BlockStream) -> dict[str, Any]:
    return {
        "data": stream.name,
        "fingerprint": stream.fingerprint,
        "users": list(stream.user_ids),
        "items": list(stream.item_ids),
        "titles": {i: stream.titles[i] for i in stream.item_ids if i in stream.titles},
    }


def write_models(fed: Federation, progress: Progress, out: Path) -> None:
    """What each side holds at the end, kept apart; the devices' file includes their own histories."""
    server, clients = progress.server, progress.clients
    origin = {"config": fed.config.model_dump_json(), "fingerprint": fed.stream.fingerprint}
    write_arrays(out / "server.safetensors", pack_server(server), {**server_note(server), **origin})
    history = fed.stream.history(len(fed.stream.blocks))
    current = fed.stream.blocks[-1].train
    if fed.backbone.reads_order:
        current = current.join_rows(fed.stream.blocks[-1].valid).join_rows(fed.stream.blocks[-1].test).sort_by_time()
    lists: Arrays = {
        "history/ptr": history.ptr,
        "history/ids": history.ids,
        "current/ptr": current.ptr,
        "current/ids": current.ids,
    }
    if fed.backbone.reads_context or fed.serving_owner("personal_scores"):  # such devices read times and ratings, too
        lists |= {f"current/{name}": column for name, column in current.values.items()}
    if fed.backbone.reads_history:  # it scores what was done in earlier blocks, too
        past = fed.stream.history(len(fed.stream.blocks) - 1)
        past = past.sort_by_time() if fed.backbone.reads_order else past
        lists |= {"past/ptr": past.ptr, "past/ids": past.ids}
    write_arrays(out / "clients.safetensors", {**stream_devices(clients, ""), **lists}, origin)


NEXT = "next"
"""A folder in a run folder whose files are about to take the place of those beside it."""


def finish_change(folder: Path) -> None:
    """Put in place what a change had prepared and decided on when a kill came; the report is made of it again."""
    ready = folder / NEXT
    if not ready.is_dir():
        return
    (folder / "report.html").unlink(missing_ok=True)
    for one in sorted(ready.iterdir()):
        with contextlib.suppress(FileNotFoundError):  # another reader of the folder was faster
            os.replace(one, folder / one.name)
    with contextlib.suppress(OSError):
        ready.rmdir()


@contextlib.contextmanager
def replace_files(folder: Path) -> Iterator[Path]:
    """A place for new files of a run: they replace the old ones together, or, where something fails, not at all."""
    for old in folder.glob(f".{NEXT}.*"):  # of a process that was killed
        shutil.rmtree(old, ignore_errors=True)
    side = temporary_path(folder / NEXT)
    try:
        side.mkdir()
        yield side
        side.rename(folder / NEXT)
    except OSError as error:
        raise disk_error(folder, error) from None
    finally:
        shutil.rmtree(side, ignore_errors=True)
    finish_change(folder)


def is_finished(out: Path) -> bool:
    return (out / "result.json").is_file() and UNFINISHED not in read_result(out)


def read_result(folder: Path) -> dict[str, Any]:
    """The numbers of a finished run."""
    if not folder.is_dir():
        raise missing_run_error(folder)
    finish_change(folder)
    if not (folder / "config.toml").is_file():
        raise TacitaError(f"{folder} is not a run folder: it has no config.toml.")
    if not (folder / "result.json").is_file():
        raise TacitaError(f"{folder} is not finished; go on with `tacita train --out {folder} --resume`.")
    result: dict[str, Any] = read_json(folder / "result.json")
    if not is_result(result):
        raise TacitaError(f"{folder / 'result.json'} is damaged: not the result of a run; train again.")
    return result


def read_config(folder: Path) -> RunConfig:
    path = folder / "config.toml"
    refuse_changed(path, read_ids(folder).get("settings"))
    return validate_model(RunConfig, read_toml(path), str(path))


def read_ids(folder: Path) -> dict[str, Any]:
    ids = read_json(folder / "ids.json")
    if not are_ids(ids):
        raise damaged_ids_error(folder)
    return dict(ids)


def matches_config(note: dict[str, str], config: RunConfig) -> bool:
    """Whether a file was written under these settings; settings it does not know have their defaults."""
    return validate_model(RunConfig, json.loads(note["config"]), "the settings of the run") == config


@dataclass(frozen=True)
class SavedRun:
    """The models of a finished run: ids, and what each side holds with its note."""

    folder: Path
    config: RunConfig
    ids: dict[str, Any]
    server_arrays: Arrays
    server_note: dict[str, str]
    client_arrays: Arrays
    client_note: dict[str, str]

    def user_numbers(self, users: list[str]) -> Ints:
        """The rows of raw user ids."""
        number = {raw: n for n, raw in enumerate(self.ids["users"])}
        missing = [u for u in users if u not in number]
        if missing:
            raise self.unknown_ids_error("user", missing)
        return np.array([number[u] for u in users], np.int32)

    def unknown_ids_error(self, what: str, missing: Sequence[str]) -> TacitaError:
        """That the run does not know some users or items, with what its own ids are like."""
        known, many = self.ids[f"{what}s"], len(set(missing)) > 1
        return TacitaError(
            f"{what}{'s' * many} {abbreviate_ids(missing, 5)} {'are' if many else 'is'} not in {self.folder}; its "
            f"{len(known):,} {what}s have ids such as '{known[0]}' (see ids.json){self.filter_note(what)}."
        )

    def filter_note(self, what: str) -> str:
        """That users or items of the data may be missing because of a filter, if the run had one."""
        split = self.config.split
        used = {"k_core": (split.k_core or 0) > 1, "min_user": split.min_user > 1, "min_rating": split.min_rating}
        named = [f"split.{name} = {getattr(split, name):g}" for name, given in used.items() if given]
        few = "that have few items" if what == "user" else "that few people have"
        why = few if used["k_core"] or used["min_user"] else "without such ratings"
        return f"; its filters ({', '.join(named)}) leave out {what}s {why}" if named else ""


def abbreviate_ids(ids: Sequence[str], most: int) -> str:
    """The first few ids of a list, each once, and how many there are beside them."""
    each = list(dict.fromkeys(ids))
    told = ", ".join(f"'{one}'" for one in each[:most])
    return told + (f" and {len(each) - most:,} more" if len(each) > most else "")


def open_saved(folder: Path) -> SavedRun:
    read_result(folder)  # without one there is no run to speak of
    config, ids = read_config(folder), read_ids(folder)
    (served, note), (held, origin) = (read_arrays(folder / f"{side}.safetensors") for side in ("server", "clients"))
    for name, made in (("server", note), ("clients", origin)):
        if made["fingerprint"] != ids["fingerprint"] or not matches_config(made, config):
            raise TacitaError(
                f"{folder / name}.safetensors belongs to another dataset or run than the ids.json and config.toml "
                "beside it; train again."
            )
    if len(held["history/ptr"]) != len(ids["users"]) + 1 or len(served["items"]) != len(ids["items"]):
        raise damaged_ids_error(folder)
    return SavedRun(folder, config, ids, served, note, held, origin)


def read_lists(held: Arrays, name: str) -> Ragged:
    """One of the lists that devices hold, per user."""
    columns = {key.removeprefix(f"{name}/"): v for key, v in held.items() if key.startswith(f"{name}/")}
    return Ragged(columns.pop("ptr"), columns.pop("ids"), columns)
