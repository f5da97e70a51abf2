"""Aggregation: weighting rules, the weighted mean of the clients' updates, and server rules."""
