"""Attacks on fedloom's own promises: seeded, resumable, with one JSON line of figures at the end."""
