"""The type of values that travel or are stored as JSON objects."""

from __future__ import annotations

from typing import Any

JsonObject = dict[str, Any]
