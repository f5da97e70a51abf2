"""The `fedloom` command."""


def main() -> None:
    """Entry point; the commands are added step by step."""
    raise SystemExit("fedloom: no commands yet")
