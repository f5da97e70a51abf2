"""From the user's words to a run: presets, configuration, start, and searches in what a run has trained."""
