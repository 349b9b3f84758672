"""Experiments on runs: tables of papers and tuning, speed, attacks."""
