"""Checks of an installation: versions, compiled kernels, disk, memory, data, and what the live mode needs."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import tempfile
import time
from importlib import metadata
from pathlib import Path


def _make_check(what: str, state: str, detail: str) -> dict[str, str]:
    return {"what": what, "state": state, "detail": detail}


def check_installation(data_dir: Path | None) -> list[dict[str, str]]:
    """Every check as {what, state: ok | note | fails, detail}."""
    return [
        _check_python(),
        *_check_packages(),
        _check_kernels(),
        _check_machine(),
        _check_disk(),
        _check_data(data_dir),
        *_check_live(),
        _check_locks(),
    ]


def _check_python() -> dict[str, str]:
    version = platform.python_version()
    good = tuple(int(n) for n in version.split(".")[:2]) >= (3, 11)
    return _make_check("python", "ok" if good else "fails", version if good else f"{version}; 3.11 or newer is needed")


def _list_required() -> list[str]:
    """The packages tacita cannot run without, as its own installation states them."""
    stated = [one for one in metadata.requires("tacita") or [] if "extra ==" not in one]
    return sorted(re.split(r"[^A-Za-z0-9._-]", one, maxsplit=1)[0] for one in stated)


def _check_packages() -> list[dict[str, str]]:
    try:
        names = _list_required()
    except metadata.PackageNotFoundError:
        return [_make_check("tacita", "fails", "not installed; pip install -e . in its folder")]
    out = []
    for name in names:
        try:
            out.append(_make_check(name, "ok", metadata.version(name)))
        except metadata.PackageNotFoundError:
            out.append(_make_check(name, "fails", f"not installed; pip install {name}"))
    return out


def _check_kernels() -> dict[str, str]:
    try:
        import numpy as np

        from tacita.kernels.hashing import normals

        began = time.perf_counter()
        drawn = normals(np.uint64(1), np.arange(1000, dtype=np.uint64), 8)
        took = time.perf_counter() - began
        if not 0.9 < float(drawn.std()) < 1.1:
            return _make_check("compiled kernels", "fails", "give wrong numbers; reinstall numba")
        return _make_check("compiled kernels", "ok", f"work (first call {took:.2f} s)")
    except Exception as error:  # whatever is broken in the compiler, the doctor must say it
        said = " ".join(str(error).split())[:200]
        hint = "; set NUMBA_CACHE_DIR to a folder of yours" if "cache" in said else ""
        return _make_check("compiled kernels", "fails", f"{type(error).__name__}: {said}{hint}")


def _check_machine() -> dict[str, str]:
    cores = f"{os.cpu_count()} cores"
    try:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not every system tells
        return _make_check("machine", "ok", cores)
    return _make_check("machine", "ok", f"{cores}, {pages * size / 2**30:.0f} GiB of memory")


def _check_disk() -> dict[str, str]:
    try:
        free = shutil.disk_usage(".").free / 2**30
        with tempfile.TemporaryFile(dir="."):
            pass
    except OSError as error:
        return _make_check("this folder", "fails", f"cannot be written: {error.strerror}; runs/ is made here")
    return _make_check("this folder", "ok" if free > 1 else "note", f"{free:.1f} GiB free")


def _check_data(data_dir: Path | None) -> dict[str, str]:
    try:
        from tacita.data.datasets import DATASETS, cache_dir
    except ImportError as error:
        return _make_check("data", "fails", f"cannot be read: {error.name} is not installed")
    folder = data_dir or (Path(os.environ["TACITA_DATA"]) if os.environ.get("TACITA_DATA") else None)
    if folder is not None:
        names = [name for name in DATASETS if (folder / name).is_dir()]
        return _make_check(
            "data", "ok" if names else "note", f"{folder}: {', '.join(names) or 'no known dataset there'}"
        )
    if (cache_dir() / "ml-100k").is_dir():
        return _make_check("data", "ok", f"ml-100k in {cache_dir()}")
    return _make_check("data", "note", "nothing fetched yet; `tacita data get ml-100k`")


# The live mode, which the lab works without; Flower is looked at from outside and never loaded


def _check_live() -> list[dict[str, str]]:
    try:
        stated = [one for one in metadata.requires("tacita") or [] if re.search("extra == ['\"]live['\"]", one)]
    except metadata.PackageNotFoundError:
        return []  # said already
    wanted = {}  # name -> the exact version, "" for any
    for one in stated:
        name = re.split(r"[^A-Za-z0-9._-]", one, maxsplit=1)[0]
        pin = re.search(r"==\s*([0-9][^\s;,)]*)", one.split(";")[0])
        wanted[name] = pin[1] if pin else ""
    if not wanted:
        said = "this installation of tacita does not say what it needs; install it again, `pip install -e '.[live]'`"
        return [_make_check("live mode", "note", said)]
    found = {name: _version(name) for name in wanted}
    if found.get("flwr") is None:
        return [
            _make_check("live mode", "note", "not installed; the lab works without, `pip install tacita[live]` adds it")
        ]
    checks = [_check_live_package(name, found[name], wanted[name]) for name in sorted(wanted)]
    return checks if any(one["state"] == "fails" for one in checks) else [*checks, _check_separation()]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _check_live_package(name: str, installed: str | None, pin: str) -> dict[str, str]:
    what = f"{name} (live)"
    if installed is None:
        return _make_check(what, "fails", "not installed; `pip install tacita[live]` adds it")
    if pin and installed != pin:
        return _make_check(what, "fails", f"{installed}, but tacita needs exactly {pin}; `pip install {name}=={pin}`")
    return _make_check(what, "ok", installed)


def _check_separation() -> dict[str, str]:
    """Whether a node's connection to the server can belong to a user who cannot open the node's files."""
    from tacita.live.processes import find_user_problem

    what, why_not = "node's connection", find_user_problem("nobody")
    if why_not is None:
        return _make_check(what, "ok", "runs as another user (nobody), who cannot open the node's files")
    return _make_check(what, "note", f"would run as the user who runs the node, who can open its files: {why_not}")


def _check_locks() -> dict[str, str]:
    """Whether a second process would be kept away from a store in this folder."""
    remedy = "keep servers and nodes on a local disk, where a second process is kept away from their files"
    try:
        import fcntl

        with tempfile.NamedTemporaryFile(dir=".") as one, open(one.name, "rb") as other:
            fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return _make_check("locks", "note", f"do not hold in this folder; {remedy}")
    except (ImportError, OSError) as error:
        said = getattr(error, "strerror", None) or error
        return _make_check("locks", "note", f"do not work in this folder ({said}); {remedy}")
    return _make_check("locks", "ok", "work in this folder")
