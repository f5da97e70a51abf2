"""The user-facing part: command line, configuration, ablations, analysis, reports and benchmarks."""
