"""Paper tables as files: what is run, what was published, what we found."""
