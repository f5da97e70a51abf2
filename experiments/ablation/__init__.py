"""Ablations: a grid or a random search over configuration values and seeds, run by Ray Tune."""
