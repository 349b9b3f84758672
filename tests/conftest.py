"""Loaded before any test: thread pools read their settings when they are loaded. Noise is reproducible in tests."""

import os
import tempfile
from pathlib import Path

# Small products on two threads cost several times the work, and two workers share the cores already.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ["TACITA_STATE"] = tempfile.mkdtemp(prefix="tacita-state-")  # never the user's own

import pytest

import tacita.kernels  # noqa: F401  # before torch brings its own pool
from tacita.runs import assembly
from tacita.runs.noise_secret import draw_secret

pytest.register_assert_rewrite("helpers")
assembly.draw_secret = lambda: ""  # noise follows the seed, so that tests compare numbers


@pytest.fixture(autouse=True)
def state_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where secrets of lab noise go in this test."""
    folder = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("TACITA_STATE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def lab_noise(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the mark `secret_noise`, noise follows a secret, as it does in runs."""
    if request.node.get_closest_marker("secret_noise") is not None:
        monkeypatch.setattr(assembly, "draw_secret", draw_secret)
