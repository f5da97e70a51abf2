"""Exports trained models as files that other programs load without fedloom."""
