"""Loaded before any test: the thread pool must read its settings before torch brings its own."""

import tacita.kernels  # noqa: F401
