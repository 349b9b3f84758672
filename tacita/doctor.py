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

Check = dict[str, str]


def _make_check(what: str, state: str, detail: str) -> Check:
    return {"what": what, "state": state, "detail": detail}


def check_installation(data_dir: Path | None) -> list[Check]:
    """Every check as {what, state: ok | note | fails, detail}."""
    return [
        _check_python(),
        *_check_packages(),
        _check_kernels(),
        _check_machine(),
        _check_disk(),
        _check_data(data_dir),
        *_check_live_packages(),
        _check_locks(),
    ]


def _check_python() -> Check:
    version = platform.python_version()
    major, minor = version.split(".")[:2]
    if (int(major), int(minor)) < (3, 11):
        return _make_check("python", "fails", f"{version}; 3.11 or newer is needed")
    return _make_check("python", "ok", version)


def _list_required_packages() -> list[str]:
    """The packages tacita cannot run without, as its own installation states them."""
    requirements = metadata.requires("tacita") or []
    return sorted(_parse_package_name(requirement) for requirement in requirements if "extra ==" not in requirement)


def _parse_package_name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]


def _check_packages() -> list[Check]:
    try:
        names = _list_required_packages()
    except metadata.PackageNotFoundError:
        return [_make_check("tacita", "fails", "not installed; pip install -e . in its folder")]
    checks = []
    for name in names:
        version = _find_installed_version(name)
        if version is None:
            checks.append(_make_check(name, "fails", f"not installed; pip install {name}"))
        else:
            checks.append(_make_check(name, "ok", version))
    return checks


def _check_kernels() -> Check:
    try:
        import numpy as np

        from tacita.kernels.hashing import draw_normals

        began = time.perf_counter()
        drawn = draw_normals(np.uint64(1), np.arange(1000, dtype=np.uint64), 8)
        seconds = time.perf_counter() - began
        if not 0.9 < float(drawn.std()) < 1.1:
            return _make_check("compiled kernels", "fails", "give wrong numbers; reinstall numba")
        return _make_check("compiled kernels", "ok", f"work (first call {seconds:.2f} s)")
    except Exception as error:  # whatever is broken in the compiler, the doctor must report it
        message = " ".join(str(error).split())[:200]
        hint = "; set NUMBA_CACHE_DIR to a folder of yours" if "cache" in message else ""
        return _make_check("compiled kernels", "fails", f"{type(error).__name__}: {message}{hint}")


def _check_machine() -> Check:
    cores = f"{os.cpu_count()} cores"
    try:
        n_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not every system has these values
        return _make_check("machine", "ok", cores)
    return _make_check("machine", "ok", f"{cores}, {n_bytes / 2**30:.0f} GiB of memory")


def _check_disk() -> Check:
    try:
        free_gib = shutil.disk_usage(".").free / 2**30
        with tempfile.TemporaryFile(dir="."):
            pass
    except OSError as error:
        return _make_check("this folder", "fails", f"cannot be written: {error.strerror}; runs/ is made here")
    state = "ok" if free_gib > 1 else "note"
    return _make_check("this folder", state, f"{free_gib:.1f} GiB free")


def _check_data(data_dir: Path | None) -> Check:
    try:
        from tacita.data.datasets import DATASETS, cache_dir
    except ImportError as error:
        return _make_check("data", "fails", f"cannot be read: {error.name} is not installed")
    folder = data_dir
    if folder is None and os.environ.get("TACITA_DATA"):
        folder = Path(os.environ["TACITA_DATA"])
    if folder is not None:
        names = [name for name in DATASETS if (folder / name).is_dir()]
        if names:
            return _make_check("data", "ok", f"{folder}: {', '.join(names)}")
        return _make_check("data", "note", f"{folder}: no known dataset there")
    if (cache_dir() / "ml-100k").is_dir():
        return _make_check("data", "ok", f"ml-100k in {cache_dir()}")
    return _make_check("data", "note", "nothing fetched yet; `tacita data get ml-100k`")


# The live mode, which the lab works without; Flower's version is read, and Flower is never loaded


def _check_live_packages() -> list[Check]:
    try:
        pins = _list_live_pins()
    except metadata.PackageNotFoundError:
        return []  # another check reports it
    if not pins:
        detail = "this installation of tacita does not say what it needs; install it again, `pip install -e '.[live]'`"
        return [_make_check("live mode", "note", detail)]
    installed = {name: _find_installed_version(name) for name in pins}
    if installed.get("flwr") is None:
        detail = "not installed; the lab works without, `pip install tacita[live]` adds it"
        return [_make_check("live mode", "note", detail)]
    checks = [_check_live_package(name, installed[name], pins[name]) for name in sorted(pins)]
    has_failure = any(check["state"] == "fails" for check in checks)
    return checks if has_failure else [*checks, _check_user_separation()]


def _list_live_pins() -> dict[str, str]:
    """The packages of the live mode, each with the exact version that it needs; "" stands for any."""
    pins = {}
    for requirement in metadata.requires("tacita") or []:
        if re.search("extra == ['\"]live['\"]", requirement):
            pin = re.search(r"==\s*([0-9][^\s;,)]*)", requirement.split(";")[0])
            pins[_parse_package_name(requirement)] = pin[1] if pin else ""
    return pins


def _find_installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _check_live_package(name: str, installed: str | None, pin: str) -> Check:
    subject = f"{name} (live)"
    if installed is None:
        return _make_check(subject, "fails", "not installed; `pip install tacita[live]` adds it")
    if pin and installed != pin:
        detail = f"{installed}, but tacita needs exactly {pin}; `pip install {name}=={pin}`"
        return _make_check(subject, "fails", detail)
    return _make_check(subject, "ok", installed)


def _check_user_separation() -> Check:
    """Whether a node's connection to the server can belong to a user who cannot open the node's files."""
    from tacita.live.processes import CONNECTION_ACCOUNT, find_user_problem

    subject = "node's connection"
    problem = find_user_problem(CONNECTION_ACCOUNT)
    if problem is None:
        detail = f"runs as another user ({CONNECTION_ACCOUNT}), who cannot open the node's files"
        return _make_check(subject, "ok", detail)
    return _make_check(subject, "note", f"would run as the user who runs the node, who can open its files: {problem}")


def _check_locks() -> Check:
    """Whether a second process would be kept away from a store in this folder."""
    remedy = "keep servers and nodes on a local disk, where a second process is kept away from their files"
    try:
        import fcntl

        with tempfile.NamedTemporaryFile(dir=".") as locked, open(locked.name, "rb") as other:
            fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return _make_check("locks", "note", f"do not hold in this folder; {remedy}")
    except (ImportError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        return _make_check("locks", "note", f"do not work in this folder ({reason}); {remedy}")
    return _make_check("locks", "ok", "work in this folder")
