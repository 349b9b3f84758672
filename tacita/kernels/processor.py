"""The processor that compiled loops are made for: on another kind the last digits differ."""

from __future__ import annotations

from llvmlite import binding


def name_processor() -> str:
    """The compiler's name for this kind of processor."""
    return str(binding.get_host_cpu_name())
