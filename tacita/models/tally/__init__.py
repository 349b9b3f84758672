"""tally: a linear model from a sum over people."""
