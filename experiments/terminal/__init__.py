"""What every command says in the same way: text, tables, JSON and exit codes."""
