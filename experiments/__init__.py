"""What a person runs: command line, configuration, reports and benchmarks."""
