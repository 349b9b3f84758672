"""Compiled loops: the one home of numba."""

import os

# Threads that wait by spinning make a shared machine five times slower; set before the thread pool is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
