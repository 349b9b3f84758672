"""Data past memory: people shared out over shards on disk, split in one pass, and mapped when they are read."""
