"""Tables, plots and one self-contained page from the result tables."""
