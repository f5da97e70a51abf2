"""The methods: each a sequence of stages over explicit state."""
