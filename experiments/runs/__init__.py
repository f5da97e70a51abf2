"""Presets, configuration, the start of runs, and searches in trained supernets."""
