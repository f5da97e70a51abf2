"""Methods that end with a model per tier, or one for all."""
