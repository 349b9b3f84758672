"""A node: what it keeps, what it answers, what it recommends."""
