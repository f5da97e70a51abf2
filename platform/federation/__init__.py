"""A federation and its rounds: who takes part, the run's state, stages, and the loop over them."""
