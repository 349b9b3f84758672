"""tacita: recommend without collecting."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tacita.lab.serving import Run

__all__ = ["__version__", "open_run", "train"]


def train(*, out: str | Path | None = None, data_dir: str | Path | None = None, **settings: Any) -> Run:
    """Train a run: `tacita.train(data="ml-100k", method="fedavg", seed=1)`; settings as in a config file.

    Without `out` the folder is made under runs/, named after data, backbone, method and seed.
    """
    from tacita.lab import assembling, training
    from tacita.lab.run_folder import free_folder
    from tacita.methods import configured

    if isinstance(settings.get("backbone"), str):
        settings["backbone"] = {"name": settings["backbone"]}
    config = configured(settings, "the settings")
    folder = Path(out) if out is not None else free_folder(config)
    where = Path(data_dir) if data_dir is not None else None
    return training.train(config, folder, assembling.Machine(data_dir=where))


def open_run(folder: str | Path) -> Run:
    """A finished run, to read its result or recommend from it."""
    from tacita.lab import serving

    return serving.open_run(Path(folder))
