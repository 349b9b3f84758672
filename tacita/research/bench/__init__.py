"""Speed and memory in one run, as ratios: rounds, prediction transfer, shared graphs, and what a promise costs."""
