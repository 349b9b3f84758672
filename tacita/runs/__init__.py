"""Runs in one process: folders, serving, forgetting, controls, speed, tables of papers."""
