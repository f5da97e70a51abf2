"""Data sets, their preparation and their partition over clients."""
