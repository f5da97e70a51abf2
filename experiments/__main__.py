"""The `fedloom` command; Ctrl-C prints one line, even while its modules are being imported."""

import sys


def main() -> None:
    """Imports the command line and runs it."""
    try:
        from fedloom.experiments.cli import main as run_command

        run_command()
    except KeyboardInterrupt:  # later interrupts are handled in `run_command`
        sys.stderr.write("fedloom: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
