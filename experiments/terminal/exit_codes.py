"""Exit codes of the command line; 0 means that all planned work is done."""

OK = 0
CONFIGURATION = 2
CLIENTS_FAILED = 3
INFRASTRUCTURE = 4
INTERRUPTED = 130

_BY_KIND = {
    "done": OK,
    "refused": CONFIGURATION,
    "failed": CLIENTS_FAILED,
    "infrastructure": INFRASTRUCTURE,
    "interrupted": INTERRUPTED,
}


def of_run_end(kind: str) -> int:
    """The exit code for the kind of a run's end."""
    return _BY_KIND[kind]
