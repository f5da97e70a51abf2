"""Ablations: a grid, random or Bayesian search over configuration values and seeds, with Ray Tune or in process."""
