"""Reproduces tables and figures of the papers from item files: published numbers, runs, and claims that must hold."""
