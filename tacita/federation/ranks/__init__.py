"""One run in several processes: people are sharded over ranks, and rank 0 has the server and the only loop."""
