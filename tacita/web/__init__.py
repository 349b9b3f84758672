"""Recommendations of a run over HTTP, for programs: what `tacita serve` starts."""
