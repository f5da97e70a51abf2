"""The figures of reports; the only part that needs matplotlib."""
