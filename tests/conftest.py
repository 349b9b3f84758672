"""Loaded before any test: thread pools read their settings when they are loaded."""

import os

# Small products on two threads cost several times the work, and two workers share the cores already.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest

import tacita.kernels  # noqa: F401  # before torch brings its own pool

pytest.register_assert_rewrite("helpers")
