"""The federation: client selection, the run's state, stages, and the loop over their rounds."""
