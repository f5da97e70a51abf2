"""Device tiers: what an architecture costs, and which devices and clients can afford it."""
