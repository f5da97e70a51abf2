"""The tables of reports, as blocks of text."""
