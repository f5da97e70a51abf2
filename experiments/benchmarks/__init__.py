"""Benchmarks: programs that measure and print time and memory ratios."""
