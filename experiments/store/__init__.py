"""The files of ablations, in addition to the results of their runs."""
