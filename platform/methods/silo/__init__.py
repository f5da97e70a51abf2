"""Cross-silo methods: every client keeps a state, and ends with a network of its own."""
