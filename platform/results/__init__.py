"""Result tables, checkpoints and the status file of a run."""
