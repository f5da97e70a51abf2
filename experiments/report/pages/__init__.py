"""Whole reports: their content and their files."""
