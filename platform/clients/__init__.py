"""What a client does in a round, and the process that does it."""
