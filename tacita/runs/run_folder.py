"""A run folder on disk: it is made whole or not at all, and a damaged one is refused with one sentence.

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
from functools import cached_property
from pathlib import Path

import numpy as np

from tacita.core.config import RunConfig, read_toml, to_toml, validate_model
from tacita.core.errors import TacitaError
from tacita.core.files import disk_error, read_arrays, read_json, temporary_path, write_arrays, write_bytes, write_json
from tacita.core.types import Arrays, BlockStream, Ints, Ragged
from tacita.federation.rounds import Progress
from tacita.federation.state_arrays import flatten_server, make_server_note
from tacita.report.data import damaged_ids_error, missing_run_error, name_method, refuse_changed
from tacita.round.device_state import stream_devices
from tacita.round.plan import Federation
from tacita.runs.file_schemas import RunIds, RunResult, are_ids, is_result

UNFINISHED = "unfinished"  # says in result.json what a run still has to do


def find_free_folder(config: RunConfig) -> Path:
    """A new name under runs/ that says what is in it."""
    data = Path(config.data.partition(":")[0]).stem
    backbone = str(config.backbone.get("name", "mf"))
    method = name_method(backbone, config.method, None)
    names = [data, backbone]
    if method != backbone:
        names.append(method)
    names.append(str(config.seed))
    return find_free_name("-".join(names))


def find_free_name(stem: str) -> Path:
    """A new name under runs/."""
    for number in range(1, 10_000):
        name = stem if number == 1 else f"{stem}-{number}"
        path = Path("runs") / name
        if not path.exists():
            return path
    raise TacitaError("runs/ holds ten thousand runs of this name; choose one with --out.")


def make_folder(out: Path, config: RunConfig, stream: BlockStream) -> None:
    """A run folder appears whole, with its config and ids, or not at all."""
    side = temporary_path(out)
    settings = to_toml(config).encode()
    ids = _build_ids(stream)
    ids["settings"] = hashlib.sha256(settings).hexdigest()
    try:
        side.mkdir(parents=True)
        write_bytes(side / "config.toml", settings)
        write_json(side / "ids.json", ids)
        side.rename(out)
    except OSError as error:
        is_taken = error.errno in (errno.EEXIST, errno.ENOTEMPTY)
        if is_taken and out.exists():
            raise TacitaError(f"another process has just made {out}; choose another --out.") from None
        raise disk_error(out, error) from None
    finally:
        shutil.rmtree(side, ignore_errors=True)


def _build_ids(stream: BlockStream) -> RunIds:
    titles = {}
    for item in stream.item_ids:
        if item in stream.titles:
            titles[item] = stream.titles[item]
    return {
        "data": stream.name,
        "fingerprint": stream.fingerprint,
        "users": list(stream.user_ids),
        "items": list(stream.item_ids),
        "titles": titles,
    }


def write_models(federation: Federation, progress: Progress, out: Path) -> None:
    """What each side holds at the end, in separate files; the devices' file includes their own histories."""
    server = progress.server
    origin = {
        "config": federation.config.model_dump_json(),
        "fingerprint": federation.stream.fingerprint,
    }
    note = {**make_server_note(server), **origin}
    write_arrays(out / "server.safetensors", flatten_server(server), note)
    devices = stream_devices(progress.clients, "")
    lists = build_lists(federation)
    write_arrays(out / "clients.safetensors", {**devices, **lists}, origin)


def build_lists(federation: Federation) -> Arrays:
    """The lists that devices score with after the last block."""
    stream = federation.stream
    backbone = federation.backbone
    history = stream.collect_history(len(stream.blocks), with_columns=False)
    current = _read_last_block(federation)
    lists: Arrays = {
        "history/ptr": history.ptr,
        "history/ids": history.ids,
        "current/ptr": current.ptr,
        "current/ids": current.ids,
    }
    override = federation.find_serving_owner("personal_scores")
    if backbone.reads_context or override:  # such devices read times and ratings, too
        for name, column in current.values.items():
            lists[f"current/{name}"] = column
    if backbone.reads_history:  # it scores items of earlier blocks, too
        past = stream.collect_history(len(stream.blocks) - 1)
        if backbone.reads_order:
            past = past.sort_by_time()
        lists["past/ptr"] = past.ptr
        lists["past/ids"] = past.ids
    return lists


def _read_last_block(federation: Federation) -> Ragged:
    """What devices read of the last block: its training items, or, if order matters, all of it in order."""
    block = federation.stream.blocks[-1]
    if not federation.backbone.reads_order:
        return block.train
    whole = block.train.join_rows(block.valid).join_rows(block.test)
    return whole.sort_by_time()


NEXT = "next"
"""A folder in a run folder whose files are about to replace the run's own."""


def finish_change(folder: Path) -> None:
    """Put the files of a change in place that was decided on before a kill; the report is made again from them."""
    ready = folder / NEXT
    if not ready.is_dir():
        return
    (folder / "report.html").unlink(missing_ok=True)
    for path in sorted(ready.iterdir()):
        with contextlib.suppress(FileNotFoundError):  # another reader of the folder was faster
            os.replace(path, folder / path.name)
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
    has_result = (out / "result.json").is_file()
    return has_result and UNFINISHED not in read_result(out)


def read_result(folder: Path) -> RunResult:
    """The numbers of a finished run."""
    if not folder.is_dir():
        raise missing_run_error(folder)
    finish_change(folder)
    if not (folder / "config.toml").is_file():
        raise TacitaError(f"{folder} is not a run folder: it has no config.toml.")
    if not (folder / "result.json").is_file():
        raise TacitaError(f"{folder} is not finished; go on with `tacita train --out {folder} --resume`.")
    result: RunResult = read_json(folder / "result.json")
    if not is_result(result):
        raise TacitaError(f"{folder / 'result.json'} is damaged: not the result of a run; train again.")
    return result


def read_config(folder: Path) -> RunConfig:
    path = folder / "config.toml"
    refuse_changed(path, read_ids(folder).get("settings"))
    return validate_model(RunConfig, read_toml(path), str(path))


def read_ids(folder: Path) -> RunIds:
    ids = read_json(folder / "ids.json")
    if not are_ids(ids):
        raise damaged_ids_error(folder)
    return dict(ids)


def matches_config(note: dict[str, str], config: RunConfig) -> bool:
    """Whether a file was written under these settings; settings it does not know have their defaults."""
    settings = json.loads(note["config"])
    return validate_model(RunConfig, settings, "the settings of the run") == config


@dataclass(frozen=True)
class SavedRun:
    """The models of a finished run: ids, and what each side holds with its note."""

    folder: Path
    config: RunConfig
    ids: RunIds
    server_arrays: Arrays
    server_note: dict[str, str]
    client_arrays: Arrays
    client_note: dict[str, str]

    @cached_property
    def user_number(self) -> dict[str, int]:
        """The row of every raw user id."""
        return {user: number for number, user in enumerate(self.ids["users"])}

    def find_user_numbers(self, users: list[str]) -> Ints:
        """The rows of raw user ids."""
        number_of = self.user_number
        missing = [user for user in users if user not in number_of]
        if missing:
            raise self.unknown_ids_error("user", missing)
        numbers = [number_of[user] for user in users]
        return np.array(numbers, np.int32)

    def unknown_ids_error(self, what: str, missing: Sequence[str]) -> TacitaError:
        """That the run does not know some users or items, with what its own ids are like."""
        ids = self.ids[f"{what}s"]
        listed = abbreviate_ids(missing, 5)
        subject = f"{what}s {listed} are"
        if len(set(missing)) == 1:
            subject = f"{what} {listed} is"
        return TacitaError(
            f"{subject} not in {self.folder}; its {len(ids):,} {what}s have ids such as '{ids[0]}' (see ids.json)"
            f"{self.describe_filter(what)}."
        )

    def describe_filter(self, what: str) -> str:
        """That users or items of the data may be missing because of a filter, if the run had one."""
        split = self.config.split
        filters = []
        if split.k_core and split.k_core > 1:
            filters.append(f"split.k_core = {split.k_core:g}")
        if split.min_user > 1:
            filters.append(f"split.min_user = {split.min_user:g}")
        drops_few = len(filters) > 0
        if split.min_rating:
            filters.append(f"split.min_rating = {split.min_rating:g}")
        if not filters:
            return ""
        if not drops_few:
            reason = "without such ratings"
        elif what == "user":
            reason = "that have few items"
        else:
            reason = "that few people have"
        return f"; its filters ({', '.join(filters)}) leave out {what}s {reason}"


def abbreviate_ids(ids: Sequence[str], most: int) -> str:
    """The first few ids of a list, each once, and how many more there are."""
    distinct = list(dict.fromkeys(ids))
    quoted = [f"'{raw_id}'" for raw_id in distinct[:most]]
    listed = ", ".join(quoted)
    n_more = len(distinct) - most
    return f"{listed} and {n_more:,} more" if n_more > 0 else listed


def open_saved(folder: Path) -> SavedRun:
    read_result(folder)  # without one the run is not finished
    config = read_config(folder)
    ids = read_ids(folder)
    server_arrays, server_note = read_arrays(folder / "server.safetensors")
    client_arrays, client_note = read_arrays(folder / "clients.safetensors")
    for name, note in (("server", server_note), ("clients", client_note)):
        same_data = note["fingerprint"] == ids["fingerprint"]
        if not same_data or not matches_config(note, config):
            raise TacitaError(
                f"{folder / name}.safetensors belongs to another dataset or run than the ids.json and config.toml "
                "beside it; train again."
            )
    n_users = len(client_arrays["history/ptr"]) - 1
    n_items = len(server_arrays["items"])
    has_all_users = n_users == len(ids["users"])
    has_all_items = n_items == len(ids["items"])
    if not has_all_users or not has_all_items:
        raise damaged_ids_error(folder)
    return SavedRun(folder, config, ids, server_arrays, server_note, client_arrays, client_note)


def read_lists(arrays: Arrays, name: str) -> Ragged:
    """One of the lists that devices hold, per user."""
    prefix = f"{name}/"
    columns = {}
    for key, column in arrays.items():
        if key.startswith(prefix):
            columns[key.removeprefix(prefix)] = column
    ptr = columns.pop("ptr")
    ids = columns.pop("ids")
    return Ragged(ptr, ids, columns)
