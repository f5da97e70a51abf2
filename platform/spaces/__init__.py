"""Search spaces: decisions, supernets, slices."""
