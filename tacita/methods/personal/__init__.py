"""Interests and budgets: LIPM, DPPS, DP-FedAvg and what they are compared with."""
