"""What ablations leave on disk beside the results of their runs."""
