"""A server: what it holds, what it asks of nodes, what it accepts."""
