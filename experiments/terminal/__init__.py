"""Output that all commands share: text, tables, JSON and exit codes."""
