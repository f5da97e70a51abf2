"""What an architecture costs and who can afford it."""
