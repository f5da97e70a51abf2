"""The methods; each is a sequence of stages over explicit state."""
