"""The command line: one module for each group of verbs; they parse, call and print, and hold no logic."""

from tacita.cli.entry import app, main

__all__ = ["app", "main"]
