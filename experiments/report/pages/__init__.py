"""Whole reports: what they say, and their files."""
