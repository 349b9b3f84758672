"""Checks of an installation: versions, compiled kernels, disk, memory, data."""

from __future__ import annotations

import os
import platform
import re
import shutil
import tempfile
import time
from importlib import metadata
from pathlib import Path


def _check(what: str, state: str, detail: str) -> dict[str, str]:
    return {"what": what, "state": state, "detail": detail}


def examine(data_dir: Path | None) -> list[dict[str, str]]:
    """Every check as {what, state: ok | note | fails, detail}."""
    return [_python(), *_packages(), _kernels(), _machine(), _disk(), _data(data_dir)]


def _python() -> dict[str, str]:
    version = platform.python_version()
    good = tuple(int(n) for n in version.split(".")[:2]) >= (3, 11)
    return _check("python", "ok" if good else "fails", version if good else f"{version}; 3.11 or newer is needed")


def _needed() -> list[str]:
    """The packages tacita cannot run without, as its own installation states them."""
    stated = [one for one in metadata.requires("tacita") or [] if "extra ==" not in one]
    return sorted(re.split(r"[^A-Za-z0-9._-]", one, maxsplit=1)[0] for one in stated)


def _packages() -> list[dict[str, str]]:
    try:
        names = _needed()
    except metadata.PackageNotFoundError:
        return [_check("tacita", "fails", "not installed; pip install -e . in its folder")]
    out = []
    for name in names:
        try:
            out.append(_check(name, "ok", metadata.version(name)))
        except metadata.PackageNotFoundError:
            out.append(_check(name, "fails", f"not installed; pip install {name}"))
    return out


def _kernels() -> dict[str, str]:
    try:
        import numpy as np

        from tacita.kernels.hashing import normals

        began = time.perf_counter()
        drawn = normals(np.uint64(1), np.arange(1000, dtype=np.uint64), 8)
        took = time.perf_counter() - began
        if not 0.9 < float(drawn.std()) < 1.1:
            return _check("compiled kernels", "fails", "give wrong numbers; reinstall numba")
        return _check("compiled kernels", "ok", f"work (first call {took:.2f} s)")
    except Exception as error:  # whatever is broken in the compiler, the doctor must say it
        said = " ".join(str(error).split())[:200]
        hint = "; set NUMBA_CACHE_DIR to a folder of yours" if "cache" in said else ""
        return _check("compiled kernels", "fails", f"{type(error).__name__}: {said}{hint}")


def _machine() -> dict[str, str]:
    cores = f"{os.cpu_count()} cores"
    try:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not every system tells
        return _check("machine", "ok", cores)
    return _check("machine", "ok", f"{cores}, {pages * size / 2**30:.0f} GiB of memory")


def _disk() -> dict[str, str]:
    try:
        free = shutil.disk_usage(".").free / 2**30
        with tempfile.TemporaryFile(dir="."):
            pass
    except OSError as error:
        return _check("this folder", "fails", f"cannot be written: {error.strerror}; runs/ is made here")
    return _check("this folder", "ok" if free > 1 else "note", f"{free:.1f} GiB free")


def _data(data_dir: Path | None) -> dict[str, str]:
    try:
        from tacita.data.named import DATASETS, cache_dir
    except ImportError as error:
        return _check("data", "fails", f"cannot be read: {error.name} is not installed")
    folder = data_dir or (Path(os.environ["TACITA_DATA"]) if os.environ.get("TACITA_DATA") else None)
    if folder is not None:
        names = [name for name in DATASETS if (folder / name).is_dir()]
        return _check("data", "ok" if names else "note", f"{folder}: {', '.join(names) or 'no known dataset there'}")
    if (cache_dir() / "ml-100k").is_dir():
        return _check("data", "ok", f"ml-100k in {cache_dir()}")
    return _check("data", "note", "nothing fetched yet; `tacita data get ml-100k`")
