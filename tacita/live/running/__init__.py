"""Processes: a server, a node, and what their owners ask of them."""
